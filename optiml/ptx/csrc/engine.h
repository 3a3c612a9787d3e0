/* The records that optiml/ptx/native/execute.py and the engine share. Keep both sides in step.
 *
 * An operand is a byte offset into a warp's register file shifted left by one, or into the launch's constants with the
 * lowest bit set. A register is 32 lanes of 4 bytes, or of 8 for 64-bit registers; a predicate lane is 0 or -1.
 */
#include <stdint.h>

#define NONE 0xFFFFFFFFu
#define LANES 32

typedef struct {
    uint32_t op;     /* handler number */
    uint32_t pred;   /* guard, or NONE */
    uint32_t neg;    /* guard is negated: all ones, else 0 */
    uint32_t d[4];   /* destinations */
    uint32_t s[5];   /* sources */
    uint32_t aux;    /* see SPACE and the handlers */
    int32_t line;    /* index of the source line, -1 for none */
    uint32_t order;  /* position within the segment: orders events of several warps */
    uint32_t number; /* position within the program */
    int64_t imm;
} Ins;

enum { FALL, JUMP, BRANCH, EXIT, BARRIER };
enum { WARP_WIDE = 1, EXITS = 2, COUNTED = 4 };

typedef struct {
    int32_t first, last; /* instructions [first, last) */
    int32_t kind, target;
    uint32_t pred, neg;
    int32_t weight, flags;
    uint32_t mask;     /* member mask of a warp-wide first instruction, or NONE */
    int32_t barrier;   /* index into barriers, -1 for none */
    int32_t line;      /* index of the source line of the last counted instruction, -1 for none */
    int32_t exit_bit;  /* number among the plain exits, -1 for none */
} Segment;

enum { PLAIN = 1, ARRIVE = 2, ALIGNED = 4, REDUCES = 8, NEGATED = 16 };

typedef struct {
    uint32_t number, count; /* operands, or NONE */
    uint32_t source, target;
    int32_t flags, operation; /* operation: 0 and, 1 or, 2 popc */
} Barrier;

typedef struct {
    uint8_t* data;
    uint64_t size;
    uint64_t* last;      /* per sector: block epoch << 40 | time of the last load, only when counting */
    uint8_t* touched;    /* per sector: bits load 1, store 2, atomic 4, only when counting */
    uint32_t *writer, *reader[2]; /* the engine's own: per unit of memory, 32 * deed + lane, when checking races */
    uint32_t shift;      /* a unit is 1 << shift bytes */
    uint32_t written;    /* the kernel may write here, so that races are possible */
    uint32_t read;       /* the kernel may read here */
    uint8_t* valid;      /* per byte: written yet, only when checking uninitialised reads */
    int64_t sectors[3];  /* load, store, atomic */
    int64_t misses;
} Allocation;

/* spaces: global_load global_store global_atomic local_load local_store shared_load shared_store shared_atomic */
enum { SPACES = 8 };
typedef struct { int64_t requests, sectors, bytes, ideal, lines; } Space;
typedef struct {
    int64_t load_requests, load_sectors, store_requests, store_sectors, wavefronts, conflicts, divergent;
} Line;

enum { NO_FAULT, BAD_ACCESS, TRAP, SKIPPED_BARRIER, TWO_BARRIERS, DEADLOCK, OUT_OF_BUDGET, PAST_DEADLINE, ABORTED,
       RACE, UNINITIALISED, NO_MEMORY, PART_OF_WARP,
       FORGOTTEN /* between threads of one launch only */ };

typedef struct {
    int32_t kind, access, nbytes, space;
    uint64_t address;
    int64_t block;      /* linear id */
    int32_t thread, line; /* line index */
    int32_t other_line, other_thread; /* the other party of a race or of two barriers, -1 for none */
    int64_t other_block;
    int32_t other_access, hazard;
} Fault;

typedef int (*Print)(int lane, uint64_t format, uint64_t arguments, uint32_t instruction);
typedef int (*Compute)(uint32_t row, const void* const* operands, void* result);

typedef struct {
    const Ins* instructions;
    const Segment* segments;
    const Barrier* barriers;
    const uint8_t* reach; /* [barriers][segments]: the segment can run after the barrier's */
    const int32_t* specials; /* pairs (kind, operand) of registers with one value per thread */
    const uint32_t* zeros;   /* operands of registers that may be read before they are written, with width << 31 */
    uint8_t* constants;
    const uint32_t* extra;   /* what does not fit the records of matrix instructions */
    Allocation* allocations; /* of number 16, 17, ... */
    const int64_t* blocks;   /* linear ids to run, NULL for all */
    const uint8_t* parameters;
    Print print;
    Compute compute;
    int64_t* segment_warps;
    int64_t* segment_threads;
    Space* spaces;
    Line* lines;
    int64_t branches, divergent, barrier_count, warps;
    int64_t block_count;     /* blocks to run */
    int64_t budget;          /* warp instructions, -1 for no limit */
    double deadline;         /* CLOCK_MONOTONIC seconds, 0 for none */
    uint64_t l1_sectors;
    int64_t executed;        /* warp instructions run */
    /* when the work is divided, in warp instructions: how much runs before, how much must be left, and how many bytes
     * may be copied for each that is left; see native/splitting.py */
    int64_t probe, worthwhile, copied_bytes;
    uint32_t grid[3], block[3];
    uint32_t segment_count, barrier_total, special_count, zero_count, allocation_count;
    uint32_t register_bytes, shared_bytes, local_bytes, parameter_bytes;
    uint32_t waits, count, checks, max_order;
    uint32_t together;  /* all blocks must run at the same time */
    uint32_t unwritten; /* byte that shared and local memory hold until something is written */
    uint32_t threads;   /* host threads that may share the work: 1 for a kernel that must not be divided */
    uint32_t parts;     /* parts that the work was divided into, of those whose results were kept */
    uint32_t line_count;
    Fault fault;
} Launch;
