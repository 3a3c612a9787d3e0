/* The engine for the plain instruction set of the build, and the choice between it and the AVX2 one. */
#define _POSIX_C_SOURCE 200809L
#define _DEFAULT_SOURCE /* madvise */
#define NAME(x) x##_plain
#include "engine.inc"

#if defined(__x86_64__) && !defined(PLAIN_ONLY)
int ptx_run_avx2(Launch* launch);
int ptx_peek_avx2(int lane, uint64_t address, uint8_t* to, int nbytes);
void ptx_where_avx2(int lane, int64_t* out);
static int fast(void) {
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2");
}
#else
#define ptx_run_avx2 ptx_run_plain
#define ptx_peek_avx2 ptx_peek_plain
#define ptx_where_avx2 ptx_where_plain
static int fast(void) { return 0; }
#endif

static int plain_wanted;

/* Use the plain instruction set even where AVX2 is there, so that tests can compare the two. */
void ptx_use_plain(int yes) { plain_wanted = yes; }
int ptx_run(Launch* launch) { return fast() && !plain_wanted ? ptx_run_avx2(launch) : ptx_run_plain(launch); }
int ptx_peek(int lane, uint64_t address, uint8_t* to, int nbytes) {
    return fast() && !plain_wanted ? ptx_peek_avx2(lane, address, to, nbytes) : ptx_peek_plain(lane, address, to, nbytes);
}
void ptx_where(int lane, int64_t* out) {
    if (fast() && !plain_wanted) ptx_where_avx2(lane, out);
    else ptx_where_plain(lane, out);
}
const char* ptx_fingerprint(void) { return FINGERPRINT; }
int ptx_launch_bytes(void) { return (int)sizeof(Launch); }
int ptx_instruction_bytes(void) { return (int)sizeof(Ins); }
