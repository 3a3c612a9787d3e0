/* The generated handlers for the plain instruction set of the build. */
#define _POSIX_C_SOURCE 200809L
#define NAME(x) x##_plain
#include "core.inc"
#include "handlers.inc"
