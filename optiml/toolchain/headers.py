"""Headers that NVRTC lacks, as texts. Kernels written for nvcc include host headers out of habit.

nvcc includes the CUDA runtime by itself and with it much of the C library, so the constants and integer types below
are there without an include as well; `PRELUDE` is included before every source.
"""

from __future__ import annotations

from collections.abc import Mapping

PRELUDE_NAME = "optiml_prelude.h"

# The 64-bit types are those of CUDA's own <cuda/std/cstdint>, so that both can be included.
_STDINT = """#pragma once
typedef signed char int8_t; typedef short int16_t; typedef int int32_t; typedef long long int64_t;
typedef unsigned char uint8_t; typedef unsigned short uint16_t; typedef unsigned int uint32_t;
typedef unsigned long long uint64_t; typedef long long intptr_t; typedef unsigned long long uintptr_t;
typedef long int ptrdiff_t;
"""

_LIMITS = """#pragma once
#ifndef INT_MAX
#define CHAR_BIT 8
#define SCHAR_MIN (-128)
#define SCHAR_MAX 127
#define UCHAR_MAX 255
#define SHRT_MIN (-32768)
#define SHRT_MAX 32767
#define USHRT_MAX 65535
#define INT_MIN (-2147483647-1)
#define INT_MAX 2147483647
#define UINT_MAX 0xffffffffU
#define LONG_MIN (-9223372036854775807L-1L)
#define LONG_MAX 9223372036854775807L
#define ULONG_MAX 0xffffffffffffffffUL
#define LLONG_MIN (-9223372036854775807LL-1LL)
#define LLONG_MAX 9223372036854775807LL
#define ULLONG_MAX 0xffffffffffffffffULL
#endif
"""

_FLOAT = """#pragma once
#ifndef FLT_MAX
#define FLT_MAX 3.402823466e+38F
#define FLT_MIN 1.175494351e-38F
#define FLT_EPSILON 1.192092896e-07F
#define DBL_MAX 1.7976931348623157e+308
#define DBL_MIN 2.2250738585072014e-308
#define DBL_EPSILON 2.2204460492503131e-16
#endif
"""

_MATH = """#pragma once
#ifndef INFINITY
#define INFINITY ((float)(1e+300*1e+300))
#endif
#ifndef NAN
#define NAN ((float)(INFINITY*0.0F))
#endif
#ifndef HUGE_VALF
#define HUGE_VALF INFINITY
#define HUGE_VAL ((double)INFINITY)
#endif
#ifndef M_PI
#define M_E 2.7182818284590452354
#define M_LOG2E 1.4426950408889634074
#define M_LOG10E 0.43429448190325182765
#define M_LN2 0.69314718055994530942
#define M_LN10 2.30258509299404568402
#define M_PI 3.14159265358979323846
#define M_PI_2 1.57079632679489661923
#define M_PI_4 0.78539816339744830962
#define M_1_PI 0.31830988618379067154
#define M_2_PI 0.63661977236758134308
#define M_2_SQRTPI 1.12837916709551257390
#define M_SQRT2 1.41421356237309504880
#define M_SQRT1_2 0.70710678118654752440
#endif
"""

PRELUDE = "#pragma once\n" + "".join(text.removeprefix("#pragma once\n") for text in (_STDINT, _LIMITS, _FLOAT, _MATH))

_EMPTY = (
    "cuda_runtime.h", "cuda_runtime_api.h", "cuda.h", "device_launch_parameters.h", "stdio.h", "stdlib.h", "string.h",
    "cstdio", "cstdlib", "cstring", "assert.h", "cassert", "iostream", "device_functions.h", "stdbool.h",
)  # fmt: skip

VIRTUAL: Mapping[str, str] = {
    PRELUDE_NAME: PRELUDE,
    **dict.fromkeys(_EMPTY, "#pragma once\n"),
    **dict.fromkeys(("stdint.h", "cstdint", "stddef.h", "cstddef"), _STDINT),
    **dict.fromkeys(("limits.h", "climits"), _LIMITS),
    **dict.fromkeys(("float.h", "cfloat"), _FLOAT),
    **dict.fromkeys(("math.h", "cmath"), _MATH),
}
