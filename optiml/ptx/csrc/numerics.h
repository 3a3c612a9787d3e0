/* Scalar arithmetic of the PTX ISA, one lane at a time, with the definitions of optiml/ptx/numerics.py.
 *
 * Everything here is exact IEEE arithmetic (contraction is off) or, for the approximate functions, the double precision
 * function rounded once. A half is its 16-bit pattern, a pair of halves a 32-bit word.
 */
#define INLINE static inline __attribute__((always_inline))

INLINE uint32_t f_bits(float x) { uint32_t u; memcpy(&u, &x, 4); return u; }
INLINE float f_from(uint32_t u) { float x; memcpy(&x, &u, 4); return x; }
INLINE uint64_t d_bits(double x) { uint64_t u; memcpy(&u, &x, 8); return u; }
INLINE double d_from(uint64_t u) { double x; memcpy(&x, &u, 8); return x; }

/* -- flushing, saturation -------------------------------------------------------------------------------------- */

INLINE float flush_f(float x) {
    uint32_t u = f_bits(x);
    return f_from((u & 0x7F800000u) ? u : u & 0x80000000u);
}
INLINE double flush_d(double x) {
    uint64_t u = d_bits(x);
    return d_from((u & 0x7FF0000000000000ull) ? u : u & 0x8000000000000000ull);
}
INLINE float sat_f(float x) { return x > 0.0f ? (x < 1.0f ? x : 1.0f) : 0.0f; }
INLINE double sat_d(double x) { return x > 0.0 ? (x < 1.0 ? x : 1.0) : 0.0; }
INLINE float relu_f(float x) { return x > 0.0f ? x : (x != x ? f_from(0x7FC00000u) : 0.0f); }

/* -- half and bfloat16 ----------------------------------------------------------------------------------------- */

INLINE float h2f(uint16_t h) {
    uint32_t sign = (uint32_t)(h & 0x8000u) << 16, rest = h & 0x7FFFu;
    uint32_t normal = (rest << 13) + (112u << 23);
    uint32_t special = (rest << 13) | 0x7F800000u;
    float small = (float)(int32_t)rest * 0x1p-24f; /* exact: at most ten bits */
    uint32_t r = rest >= 0x7C00u ? special : rest >= 0x0400u ? normal : f_bits(small);
    return f_from(sign | r);
}
/* Nearest even; NaN becomes a quiet NaN. Adding a magic number lets the float adder round subnormal results. */
INLINE uint16_t f2h(float x) {
    uint32_t u = f_bits(x), sign = u >> 16 & 0x8000u, a = u & 0x7FFFFFFFu;
    uint32_t small = f_bits(f_from(a) + 0.5f) - 0x3F000000u; /* below 2**-14: units of 2**-24 */
    uint32_t normal = (a - (112u << 23) + 0xFFFu + (a >> 13 & 1u)) >> 13;
    uint32_t r = a < 0x38800000u ? small : a >= 0x47800000u ? 0x7C00u : normal;
    if (a > 0x7F800000u) r = 0x7E00u | (a >> 13 & 0x3FFu);
    return (uint16_t)(sign | r);
}
INLINE uint16_t d2h(double x) {
    uint64_t u = d_bits(x), a = u & 0x7FFFFFFFFFFFFFFFull;
    uint16_t sign = (uint16_t)(u >> 48 & 0x8000u);
    if (a > 0x7FF0000000000000ull) return (uint16_t)(sign | 0x7E00u | (a >> 42 & 0x3FFu));
    if (a >= 0x40F0000000000000ull) return (uint16_t)(sign | 0x7C00u);
    if (a < 0x3F10000000000000ull) /* below 2**-14: units of 2**-24 */
        return (uint16_t)(sign | (uint16_t)(d_bits(d_from(a) + 0x1p28) - 0x41B0000000000000ull));
    return (uint16_t)(sign | (uint16_t)((a - (1008ull << 52) + 0x1FFFFFFFFFFull + (a >> 42 & 1)) >> 42));
}
INLINE uint16_t f2h_rz(float x) {
    uint16_t r = f2h(x);
    return (r & 0x7FFFu) <= 0x7C00u && fabsf(h2f(r)) > fabsf(x) ? (uint16_t)(r - 1) : r;
}
INLINE uint16_t d2h_rz(double x) {
    uint16_t r = d2h(x);
    return (r & 0x7FFFu) <= 0x7C00u && fabs((double)h2f(r)) > fabs(x) ? (uint16_t)(r - 1) : r;
}
/* Toward zero (3), minus (1) or plus infinity (2). */
INLINE uint16_t d2h_toward(double x, int mode) {
    uint16_t r = d2h(x);
    double back = (double)h2f(r);
    int down = back > x && (mode == 1 || (mode == 3 && x > 0)), up = back < x && (mode == 2 || (mode == 3 && x < 0));
    int away = r & 0x8000u ? down : up; /* from zero */
    if (up && r == 0x8000u) return 0x0001u;
    if (down && r == 0) return 0x8001u;
    return (uint16_t)(down || up ? away ? r + 1 : r - 1 : r);
}
INLINE float b2f(uint16_t b) { return f_from((uint32_t)b << 16); }
INLINE uint16_t f2b(float x) {
    uint32_t u = f_bits(x);
    return x != x ? 0x7FFFu : (uint16_t)((u + 0x7FFFu + (u >> 16 & 1u)) >> 16);
}
INLINE uint16_t f2b_rz(float x) { return x != x ? 0x7FFFu : (uint16_t)(f_bits(x) >> 16); }
INLINE uint16_t f2b_toward(float x, int mode) {
    uint32_t u = f_bits(x);
    if (x != x) return 0x7FFFu;
    int away = (u & 0xFFFFu) && (u >> 31 ? mode == 1 : mode == 2);
    return (uint16_t)((u >> 16) + (uint32_t)away);
}
/* double to float rounded to odd, so that a later rounding to a narrower type is right */
INLINE float odd_f(double x) {
    float r = (float)x;
    double back = (double)r;
    uint32_t u = f_bits(r);
    if (back != x && x == x && !(u & 1u)) u = fabs(back) > fabs(x) ? u - 1 : u + 1;
    return f_from(u);
}
INLINE double odd_sum(double p, double c) {
    double s = p + c, t = s - p, error = (p - (s - t)) + (c - t);
    uint64_t u = d_bits(s);
    if (error != 0 && !(u & 1) && fabs(s) <= 0x1.fffffffffffffp1023) u = (error > 0) == (s > 0) ? u + 1 : u - 1;
    return d_from(u);
}
INLINE uint16_t b_fma(uint16_t a, uint16_t b, uint16_t c) {
    return f2b(odd_f(odd_sum((double)b2f(a) * (double)b2f(b), (double)b2f(c))));
}
INLINE uint16_t b_add(uint16_t a, uint16_t b) { return b_fma(a, 0x3F80u, b); }
INLINE uint16_t b_sub(uint16_t a, uint16_t b) { return b_fma(b, 0xBF80u, a); }
INLINE uint16_t b_mul(uint16_t a, uint16_t b) { return b_fma(a, b, 0x8000u); }
INLINE uint16_t b_relu(uint16_t a) { return f2b(relu_f(b2f(a))); }
INLINE uint16_t h_flush(uint16_t a) { return (a & 0x7C00u) ? a : (uint16_t)(a & 0x8000u); }
INLINE uint16_t h_sat(uint16_t a) { return f2h(sat_f(h2f(a))); }
INLINE uint16_t h_relu(uint16_t a) { return f2h(relu_f(h2f(a))); }
INLINE uint16_t h_add(uint16_t a, uint16_t b) { return f2h(h2f(a) + h2f(b)); }
INLINE uint16_t h_sub(uint16_t a, uint16_t b) { return f2h(h2f(a) - h2f(b)); }
INLINE uint16_t h_mul(uint16_t a, uint16_t b) { return f2h(h2f(a) * h2f(b)); }
INLINE uint16_t h_fma(uint16_t a, uint16_t b, uint16_t c) {
    return d2h((double)h2f(a) * (double)h2f(b) + (double)h2f(c));
}
INLINE uint32_t pair(uint16_t low, uint16_t high) { return (uint32_t)low | (uint32_t)high << 16; }
INLINE uint16_t low_of(uint32_t x) { return (uint16_t)x; }
INLINE uint16_t high_of(uint32_t x) { return (uint16_t)(x >> 16); }

/* -- minimum and maximum: a number beats NaN, and -0 < +0 ------------------------------------------------------- */

INLINE float min_f(float a, float b) {
    if (a == b) return f_from(f_bits(a) | f_bits(b));
    return a < b || b != b ? a : b;
}
INLINE float max_f(float a, float b) {
    if (a == b) return f_from(f_bits(a) & f_bits(b));
    return a > b || b != b ? a : b;
}
INLINE double min_d(double a, double b) {
    if (a == b) return d_from(d_bits(a) | d_bits(b));
    return a < b || b != b ? a : b;
}
INLINE double max_d(double a, double b) {
    if (a == b) return d_from(d_bits(a) & d_bits(b));
    return a > b || b != b ? a : b;
}
INLINE float nan_f(float r, float a, float b) { return a != a || b != b ? f_from(0x7FC00000u) : r; }
INLINE double nan_d(double r, double a, double b) { return a != a || b != b ? d_from(0x7FF8000000000000ull) : r; }
INLINE float xorsign_f(float r, float a, float b) { return f_from(f_bits(r) | ((f_bits(a) ^ f_bits(b)) & 0x80000000u)); }

/* -- float32 and float64 --------------------------------------------------------------------------------------- */

INLINE float fma_f(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
INLINE double fma_d(double a, double b, double c) { return __builtin_fma(a, b, c); }
INLINE float div_approx(float a, float b) {
    float r = a / b, size = fabsf(b);
    if (size > 0x1p126f && size <= 0x1.fffffep127f)
        r = fabsf(a) > 0x1.fffffep127f ? f_from(0x7FC00000u) : copysignf(0.0f, a) * (b > 0 ? 1.0f : -1.0f);
    return r;
}
INLINE double rsqrt_d(double x) { return 1.0 / sqrt(x); }

/* -- integers -------------------------------------------------------------------------------------------------- */

INLINE uint32_t div_u32(uint32_t a, uint32_t b) { return b ? a / b : 0xFFFFFFFFu; }
INLINE uint64_t div_u64(uint64_t a, uint64_t b) { return b ? a / b : ~0ull; }
INLINE int32_t div_s32(int32_t a, int32_t b) { return b == 0 ? -1 : b == -1 ? (int32_t)(0u - (uint32_t)a) : a / b; }
INLINE int64_t div_s64(int64_t a, int64_t b) { return b == 0 ? -1 : b == -1 ? (int64_t)(0ull - (uint64_t)a) : a / b; }
INLINE uint32_t rem_u32(uint32_t a, uint32_t b) { return b ? a % b : a; }
INLINE uint64_t rem_u64(uint64_t a, uint64_t b) { return b ? a % b : a; }
INLINE int32_t rem_s32(int32_t a, int32_t b) { return b == 0 ? a : b == -1 ? 0 : a % b; }
INLINE int64_t rem_s64(int64_t a, int64_t b) { return b == 0 ? a : b == -1 ? 0 : a % b; }
INLINE uint64_t mulhi_u64(uint64_t a, uint64_t b) { return (uint64_t)((unsigned __int128)a * b >> 64); }
INLINE int64_t mulhi_s64(int64_t a, int64_t b) { return (int64_t)((__int128)a * b >> 64); }
INLINE int32_t clamp_s32(int64_t x) { return x > INT32_MAX ? INT32_MAX : x < INT32_MIN ? INT32_MIN : (int32_t)x; }
INLINE int64_t low24_s(int32_t a) { return (int64_t)((int32_t)((uint32_t)a << 8) >> 8); }
INLINE uint32_t clz32(uint32_t a) { return a ? (uint32_t)__builtin_clz(a) : 32u; }
INLINE uint32_t clz64(uint64_t a) { return a ? (uint32_t)__builtin_clzll(a) : 64u; }
INLINE uint32_t brev32(uint32_t a) {
    a = (a >> 1 & 0x55555555u) | (a & 0x55555555u) << 1;
    a = (a >> 2 & 0x33333333u) | (a & 0x33333333u) << 2;
    a = (a >> 4 & 0x0F0F0F0Fu) | (a & 0x0F0F0F0Fu) << 4;
    return __builtin_bswap32(a);
}
INLINE uint64_t brev64(uint64_t a) { return (uint64_t)brev32((uint32_t)a) << 32 | brev32((uint32_t)(a >> 32)); }
INLINE uint64_t ones64(uint32_t count) { return count >= 64 ? ~0ull : (1ull << count) - 1; }
INLINE uint64_t bfe_bits(uint64_t a, uint32_t start, uint32_t length, uint32_t bits, int is_signed) {
    uint32_t position = start & 0xFFu, count = length & 0xFFu;
    uint64_t fill = 0;
    if (is_signed && count > 0) {
        uint32_t last = position + count - 1 < bits - 1 ? position + count - 1 : bits - 1;
        fill = (a >> last & 1) ? ~0ull : 0;
    }
    uint32_t present = position >= bits ? 0 : bits - position < count ? bits - position : count;
    uint64_t mask = ones64(present);
    uint64_t body = (position >= 64 ? 0 : a >> position) & mask;
    return body | (fill & ~mask);
}
INLINE uint64_t bfi_bits(uint64_t a, uint64_t b, uint32_t start, uint32_t length) {
    uint32_t position = start & 0xFFu;
    uint64_t mask = position >= 64 ? 0 : ones64(length & 0xFFu) << position;
    return (b & ~mask) | ((position >= 64 ? 0 : a << position) & mask);
}
INLINE uint32_t bfi32(uint32_t a, uint32_t b, uint32_t start, uint32_t length) {
    uint32_t position = start & 0xFFu, count = length & 0xFFu;
    uint32_t mask = count >= 32 ? 0xFFFFFFFFu : (1u << count) - 1;
    mask = position >= 32 ? 0 : mask << position;
    return (b & ~mask) | ((position >= 32 ? 0 : a << position) & mask);
}
INLINE uint32_t prmt(uint32_t a, uint32_t b, uint32_t selector) {
    uint64_t pool = (uint64_t)b << 32 | a;
    uint32_t result = 0;
    for (int place = 0; place < 4; place++) {
        uint32_t nibble = selector >> 4 * place & 0xFu;
        uint32_t octet = (uint32_t)(pool >> 8 * (nibble & 7)) & 0xFFu;
        if (nibble & 8) octet = octet & 0x80u ? 0xFFu : 0;
        result |= octet << 8 * place;
    }
    return result;
}
INLINE uint32_t prmt_places(uint32_t a, uint32_t b, uint32_t places) { /* a nibble each, the lowest first */
    uint64_t pool = (uint64_t)b << 32 | a;
    uint32_t result = 0;
    for (int place = 0; place < 4; place++)
        result |= ((uint32_t)(pool >> 8 * (places >> 4 * place & 7u)) & 0xFFu) << 8 * place;
    return result;
}
INLINE uint32_t ones32(uint32_t count) { return count >= 32 ? 0xFFFFFFFFu : (1u << count) - 1; }
INLINE uint32_t bmsk(uint32_t start, uint32_t length) { return start >= 32 ? 0 : ones32(length) << start; }
INLINE uint32_t szext(uint32_t a, uint32_t width, int is_signed) {
    uint32_t mask = ones32(width), low = a & mask;
    return is_signed && width > 0 && (a >> (width - 1) & 1u) ? low | ~mask : low;
}
INLINE uint32_t vabsdiff4(uint32_t a, uint32_t b, uint32_t c, int is_signed, int adds) {
    uint32_t sum = c, packed = 0;
    for (int k = 0; k < 32; k += 8) {
        int32_t x = is_signed ? (int8_t)(a >> k) : (int32_t)(a >> k & 0xFFu);
        int32_t y = is_signed ? (int8_t)(b >> k) : (int32_t)(b >> k & 0xFFu);
        uint32_t apart = (uint32_t)(x > y ? x - y : y - x);
        sum += apart;
        packed |= (apart & 0xFFu) << k;
    }
    return adds ? sum : packed;
}
INLINE uint32_t funnel_l(uint32_t low, uint32_t high, uint32_t n) {
    return (uint32_t)((((uint64_t)high << 32 | low) << n) >> 32);
}
INLINE uint32_t funnel_r(uint32_t low, uint32_t high, uint32_t n) { return (uint32_t)(((uint64_t)high << 32 | low) >> n); }
INLINE uint32_t dp4a(uint32_t a, uint32_t b, uint32_t c, int sa, int sb) {
    for (int k = 0; k < 32; k += 8) {
        int32_t x = sa ? (int8_t)(a >> k) : (int32_t)(a >> k & 0xFFu);
        int32_t y = sb ? (int8_t)(b >> k) : (int32_t)(b >> k & 0xFFu);
        c += (uint32_t)(x * y);
    }
    return c;
}
INLINE uint32_t dp2a(uint32_t a, uint32_t b, uint32_t c, int sa, int sb) {
    for (int k = 0; k < 2; k++) {
        int32_t x = sa ? (int16_t)(a >> 16 * k) : (int32_t)(a >> 16 * k & 0xFFFFu);
        int32_t y = sb ? (int8_t)(b >> 8 * k) : (int32_t)(b >> 8 * k & 0xFFu);
        c += (uint32_t)x * (uint32_t)y;
    }
    return c;
}

/* -- conversions ----------------------------------------------------------------------------------------------- */

INLINE int64_t d_to_int(double x, double low, double high, int64_t nan) {
    return x != x ? nan : x < low ? (int64_t)low : x > high ? (int64_t)high : (int64_t)x;
}
INLINE int64_t d_to_s64(double x) {
    return x != x ? INT64_MIN : x >= 0x1p63 ? INT64_MAX : x < -0x1p63 ? INT64_MIN : (int64_t)x;
}
INLINE uint64_t d_to_u64(double x) {
    return x != x ? 1ull << 63 : x >= 0x1p64 ? ~0ull : x < 0 ? 0 : (uint64_t)x;
}
INLINE uint32_t f_to_tf32(float x) {
    uint32_t u = f_bits(x);
    return (u & 0x7F800000u) == 0x7F800000u ? u : (u + 0x1000u) & 0xFFFFE000u;
}
