/* The engine for x86-64 with AVX2 and FMA. */
#if defined(__x86_64__) && !defined(PLAIN_ONLY)
#pragma GCC target("avx2,fma,bmi,bmi2,lzcnt,popcnt")
#define _POSIX_C_SOURCE 200809L
#define _DEFAULT_SOURCE /* madvise */
#define NAME(x) x##_avx2
#include "engine.inc"
#endif
