/* A CUDA runtime that records instead of running, and the program that calls a launcher under it.
 *
 * The program reads its orders from stdin, loads the shared library that holds the launcher, calls it once, and
 * writes what was asked of the device to the stdout it started with, as lines of JSON between two lines that carry
 * the nonce of the orders. What the library prints goes to stderr. There is no device: addresses are numbers that
 * nothing is mapped at, so a host access to device memory faults and is told by its address.
 *
 * Nothing here is trusted by the reader. The library runs in this process and may write anything; the reader takes
 * the lines as a proposed launch plan and checks each of them. The limits and the filter of system calls below make
 * honest mistakes nameable; what keeps a hostile library harmless is the sandbox this program is started in.
 *
 * Orders, one per line:
 *   nonce TEXT · mode launcher|program · name SYMBOL
 *   device MAJOR MINOR MULTIPROCESSORS SHARED_OPTIN L2_BYTES MEMORY_BYTES
 *   entry SYMBOL STATIC_SHARED REGISTERS LOCAL MAX_THREADS COUNT SIZE...     a kernel and its parameters' sizes
 *   array BYTES          next argument of the launcher: the address of a fresh array, numbered from 0
 *   integer VALUE        next argument: an integer or the raw bits of a small struct
 *   float BITS · double BITS     next argument, as a hexadecimal bit pattern
 *   stream               next argument: the stream
 *   go
 */
#define _GNU_SOURCE
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>

#define PUBLIC __attribute__((visibility("default")))

enum {
    MAX_ENTRIES = 512, MAX_PARAMETERS = 128, MAX_SLOTS = 512, MAX_STREAMS = 66, MAX_EVENTS = 256, MAX_ARGUMENTS = 96,
    MAX_FUNCTIONS = 512, MAX_VARIABLES = 256, MAX_DEPTH = 16, MAX_OPERATIONS = 4096,
};
#define RECORD_BYTES ((size_t)20 << 20)
#define UPLOAD_BYTES ((size_t)8 << 20)
#define FIRST_ADDRESS ((uint64_t)0x200000000000)
#define SLOT_BYTES ((uint64_t)1 << 36)
#define SLOT_MARGIN ((uint64_t)1 << 30) /* a slot's memory starts here, so that small negative offsets stay in it */
#define STATIC_LIMIT (48 * 1024)        /* shared memory per block without an attribute */

struct entry {
    char symbol[1024];
    size_t shared, local;
    int registers, max_threads, count, dynamic_limit;
    int sizes[MAX_PARAMETERS];
};
struct slot { size_t bytes; int freed, symbol; };
struct stream { int used, blocking; };
struct event { int used, recorded; uint32_t clock[MAX_STREAMS]; };
struct function { const void *host; struct entry *entry; char name[256]; };
struct variable { const void *host; int slot; char name[256]; };
struct configuration { dim3 grid, block; size_t shared; cudaStream_t stream; };

static struct entry entries[MAX_ENTRIES];
static struct slot slots[MAX_SLOTS];
static struct stream streams[MAX_STREAMS]; /* 0: the launcher's; 1: legacy default; 2: per-thread default */
static struct event events[MAX_EVENTS];
static struct function functions[MAX_FUNCTIONS];
static struct variable variables[MAX_VARIABLES];
static struct configuration configurations[MAX_DEPTH];
static uint32_t clocks[MAX_STREAMS][MAX_STREAMS], host_clock[MAX_STREAMS], issued[MAX_STREAMS];
static int entry_count, slot_count, function_count, variable_count, depth, operations;
static size_t allocated, uploaded;
static char *record;
static size_t record_used;
static int record_fd = -1, told, active, is_program;
static char nonce[80], launcher_name[256];
static int major, minor, multiprocessors, l2_bytes;
static size_t shared_optin, device_memory;
static cudaError_t last_error;

/* --- the record ------------------------------------------------------------------------------------------------ */

static void say(const char *format, ...)
{
    va_list list;
    if (record_used + 4096 > RECORD_BYTES)
        return; /* what does not fit is missed by the count in the last line */
    va_start(list, format);
    int written = vsnprintf(record + record_used, RECORD_BYTES - record_used, format, list);
    va_end(list);
    if (written > 0 && record_used + (size_t)written < RECORD_BYTES)
        record_used += (size_t)written;
}

static void say_bytes(const void *data, size_t bytes)
{
    static const char digits[] = "0123456789abcdef";
    if (record_used + 2 * bytes + 4096 > RECORD_BYTES)
        return;
    for (size_t i = 0; i < bytes; i++) {
        record[record_used++] = digits[((const uint8_t *)data)[i] >> 4];
        record[record_used++] = digits[((const uint8_t *)data)[i] & 15];
    }
}

static void write_all(const char *text, size_t bytes)
{
    while (bytes) {
        ssize_t written = write(record_fd, text, bytes);
        if (written <= 0)
            return;
        text += written;
        bytes -= (size_t)written;
    }
}

static void tell(const char *ending)
{
    char line[256];
    if (told)
        return;
    told = 1;
    active = 0;
    int bytes = snprintf(line, sizeof line, "optiml-record %s\n", nonce);
    write_all(line, (size_t)bytes);
    write_all(record, record_used);
    bytes = snprintf(line, sizeof line, "{\"do\":\"end\",\"how\":\"%s\"}\noptiml-end %s\n", ending, nonce);
    write_all(line, (size_t)bytes);
}

/* What a plan cannot hold. The reader turns the kind into a reason; the text names it. */
static void escape(const char *what)
{
    if (active)
        say("{\"do\":\"escape\",\"what\":\"%s\"}\n", what);
}

static void unsupported(const char *what)
{
    if (active)
        say("{\"do\":\"unsupported\",\"what\":\"%s\"}\n", what);
}

static cudaError_t failed(cudaError_t error)
{
    last_error = error;
    return error;
}

static cudaError_t refused(cudaError_t error, const char *format, ...)
{
    char text[512];
    va_list list;
    va_start(list, format);
    vsnprintf(text, sizeof text, format, list);
    va_end(list);
    if (active)
        say("{\"do\":\"refused\",\"what\":\"%s\"}\n", text);
    return failed(error);
}

/* One more step of the plan; 0 if there are too many. */
static int counted(void)
{
    if (++operations <= MAX_OPERATIONS)
        return 1;
    if (operations == MAX_OPERATIONS + 1)
        say("{\"do\":\"limit\",\"what\":\"more than %d steps\"}\n", MAX_OPERATIONS);
    return 0;
}

/* --- addresses ------------------------------------------------------------------------------------------------- */

static uint64_t slot_address(int slot) { return FIRST_ADDRESS + (uint64_t)slot * SLOT_BYTES + SLOT_MARGIN; }

static int is_device(const void *pointer)
{
    uint64_t address = (uint64_t)pointer;
    return address >= FIRST_ADDRESS && address < FIRST_ADDRESS + (uint64_t)slot_count * SLOT_BYTES;
}

static int slot_of(const void *pointer) { return (int)(((uint64_t)pointer - FIRST_ADDRESS) / SLOT_BYTES); }

static int64_t offset_of(const void *pointer)
{
    return (int64_t)((uint64_t)pointer - slot_address(slot_of(pointer)));
}

/* Whether `bytes` from `pointer` on lie in one piece of device memory that is still there. */
static int holds(const void *pointer, size_t bytes)
{
    if (!is_device(pointer) || slots[slot_of(pointer)].freed)
        return 0;
    int64_t offset = offset_of(pointer);
    size_t room = slots[slot_of(pointer)].bytes;
    return offset >= 0 && (uint64_t)offset <= room && bytes <= room - (uint64_t)offset;
}

static int new_slot(size_t bytes, int symbol)
{
    if (slot_count == MAX_SLOTS)
        return -1;
    slots[slot_count].bytes = bytes;
    slots[slot_count].symbol = symbol;
    return slot_count++;
}

static int is_host(uint64_t address)
{
    unsigned char resident;
    if (address < 65536 || address >= (uint64_t)1 << 47)
        return 0;
    return syscall(SYS_mincore, (void *)(address & ~(uint64_t)4095), (size_t)1, &resident) == 0;
}

static void say_place(const char *label, const void *pointer)
{
    say("\"%s\":[%d,%lld]", label, slot_of(pointer), (long long)offset_of(pointer));
}

/* --- streams: what is known to be over before the next work of each --------------------------------------------- */

static int stream_of(cudaStream_t stream)
{
    if (stream == NULL || stream == cudaStreamLegacy)
        return 1;
    if (stream == cudaStreamPerThread)
        return 2;
    for (int i = 0; i < MAX_STREAMS; i++)
        if ((void *)stream == (void *)&streams[i] && streams[i].used)
            return i;
    return -1;
}

static void join(uint32_t *into, const uint32_t *from)
{
    for (int i = 0; i < MAX_STREAMS; i++)
        if (from[i] > into[i])
            into[i] = from[i];
}

static int enqueue(cudaStream_t stream)
{
    int s = stream_of(stream);
    if (s < 0)
        return -1;
    join(clocks[s], host_clock);
    for (int i = 0; i < MAX_STREAMS; i++) /* the legacy default stream waits for blocking streams, and they for it */
        if (s == 1 && streams[i].used && streams[i].blocking)
            join(clocks[1], clocks[i]);
    clocks[s][s] = ++issued[s];
    for (int i = 0; i < MAX_STREAMS; i++)
        if (s == 1 && streams[i].used && streams[i].blocking)
            join(clocks[i], clocks[1]);
    if (streams[s].blocking && s != 1)
        join(clocks[s], clocks[1]);
    return s;
}

static void check_joined(void)
{
    join(clocks[0], host_clock);
    for (int i = 1; i < MAX_STREAMS; i++)
        if (clocks[0][i] < issued[i])
            escape(i == 1 ? "work on the default stream, which nothing orders with the stream it was given: launch "
                            "on that stream, as in kernel<<<grid, block, 0, stream>>>"
                          : "work on a stream of its own that the stream it was given never waits for: record an "
                            "event there and let the given stream wait for it");
}

/* --- registration, by constructors of the library ---------------------------------------------------------------- */

PUBLIC void **__cudaRegisterFatBinary(void *binary)
{
    static void *handle;
    (void)binary;
    return &handle;
}
PUBLIC void __cudaRegisterFatBinaryEnd(void **handle) { (void)handle; }
PUBLIC void __cudaUnregisterFatBinary(void **handle) { (void)handle; }
PUBLIC char __cudaInitModule(void **handle) { (void)handle; return 1; }

PUBLIC void __cudaRegisterFunction(void **handle, const char *host, char *device, const char *name, int limit,
                                   void *tid, void *bid, void *block, void *grid, int *warp)
{
    (void)handle, (void)device, (void)limit, (void)tid, (void)bid, (void)block, (void)grid, (void)warp;
    if (function_count == MAX_FUNCTIONS)
        return;
    struct function *f = &functions[function_count++];
    f->host = host;
    snprintf(f->name, sizeof f->name, "%s", name);
    for (int i = 0; i < entry_count; i++)
        if (!strcmp(entries[i].symbol, name))
            f->entry = &entries[i];
}

PUBLIC void __cudaRegisterVar(void **handle, char *host, char *device, const char *name, int external, size_t bytes,
                              int constant, int global)
{
    (void)handle, (void)device, (void)external, (void)constant, (void)global;
    int slot = new_slot(bytes, 1);
    if (variable_count == MAX_VARIABLES || slot < 0)
        return;
    struct variable *v = &variables[variable_count++];
    v->host = host;
    v->slot = slot;
    snprintf(v->name, sizeof v->name, "%s", name);
    int plain = 1;
    for (const char *c = v->name; *c; c++)
        plain &= *c == '_' || *c == '$' || (*c >= '0' && *c <= '9') || ((*c | 32) >= 'a' && (*c | 32) <= 'z');
    if (plain)
        say("{\"do\":\"variable\",\"slot\":%d,\"name\":\"%s\",\"bytes\":%zu}\n", slot, v->name, bytes);
}

PUBLIC void __cudaRegisterManagedVar(void **handle, void **host, char *device, const char *name, int external,
                                     size_t bytes, int constant, int global)
{
    (void)handle, (void)host, (void)device, (void)name, (void)external, (void)bytes, (void)constant, (void)global;
    say("{\"do\":\"unsupported\",\"what\":\"a __managed__ variable\"}\n");
}

static struct entry *entry_of(const void *function)
{
    if ((const char *)function >= (const char *)entries && (const char *)function < (const char *)(entries + entry_count))
        return (struct entry *)function;
    for (int i = function_count - 1; i >= 0; i--)
        if (functions[i].host == function)
            return functions[i].entry;
    return NULL;
}

/* --- launches -------------------------------------------------------------------------------------------------- */

PUBLIC unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, struct CUstream_st *stream)
{
    if (depth == MAX_DEPTH)
        return 1;
    configurations[depth++] = (struct configuration){grid, block, shared, stream};
    return 0;
}

PUBLIC cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream)
{
    if (depth == 0)
        return failed(cudaErrorMissingConfiguration);
    struct configuration *c = &configurations[--depth];
    *grid = c->grid, *block = c->block, *shared = c->shared;
    *(cudaStream_t *)stream = c->stream;
    return cudaSuccess;
}

PUBLIC cudaError_t __cudaGetKernel(cudaKernel_t *kernel, const void *function)
{
    struct entry *entry = entry_of(function);
    *kernel = (cudaKernel_t)entry;
    return entry ? cudaSuccess : failed(cudaErrorInvalidDeviceFunction);
}

PUBLIC cudaError_t cudaGetFuncBySymbol(cudaFunction_t *function, const void *symbol)
{
    struct entry *entry = entry_of(symbol);
    *function = (cudaFunction_t)entry;
    return entry ? cudaSuccess : failed(cudaErrorInvalidDeviceFunction);
}

static cudaError_t check_launch(const struct entry *e, dim3 grid, dim3 block, size_t shared)
{
    size_t threads = (size_t)block.x * block.y * block.z;
    if (grid.x > 2147483647u || grid.y > 65535 || grid.z > 65535)
        return refused(cudaErrorInvalidConfiguration, "%s: a grid of (%u, %u, %u) is over the device's limits", e->symbol,
                       grid.x, grid.y, grid.z);
    if (!threads || block.x > 1024 || block.y > 1024 || block.z > 64 || threads > 1024)
        return refused(cudaErrorInvalidConfiguration, "%s: a block of (%u, %u, %u) is outside the device's limits",
                       e->symbol, block.x, block.y, block.z);
    if (threads > (size_t)e->max_threads || threads * (size_t)((e->registers + 7) / 8 * 8) > 65536)
        return refused(cudaErrorLaunchOutOfResources, "%s: %zu threads a block are more than its registers or launch "
                       "bounds allow", e->symbol, threads);
    size_t granted = e->dynamic_limit > STATIC_LIMIT ? (size_t)e->dynamic_limit
                     : e->shared < STATIC_LIMIT      ? STATIC_LIMIT - e->shared : 0;
    if (shared > granted && shared + e->shared <= shared_optin)
        return refused(cudaErrorInvalidValue, "%s: %zu bytes of dynamic shared memory, but only %zu are granted: call "
                       "cudaFuncSetAttribute with cudaFuncAttributeMaxDynamicSharedMemorySize first", e->symbol, shared,
                       granted);
    if (shared > granted || shared + e->shared > shared_optin)
        return refused(cudaErrorInvalidValue, "%s: %zu bytes of dynamic and %zu of static shared memory a block; the "
                       "device allows %zu", e->symbol, shared, e->shared, shared_optin);
    return cudaSuccess;
}

static cudaError_t launch(const void *function, dim3 grid, dim3 block, void **args, size_t shared, cudaStream_t stream,
                          int cooperative, dim3 cluster)
{
    struct entry *e = entry_of(function);
    if (e == NULL)
        return refused(cudaErrorInvalidDeviceFunction, "a launch of something that is no kernel of this file");
    if (!grid.x || !grid.y || !grid.z)
        return failed(cudaErrorInvalidConfiguration); /* nothing to do at this size */
    cudaError_t error = check_launch(e, grid, block, shared);
    if (error != cudaSuccess)
        return error;
    int s = enqueue(stream);
    if (s < 0)
        return refused(cudaErrorInvalidResourceHandle, "%s: launched on something that is no stream", e->symbol);
    for (int i = 0; i < e->count; i++) {
        uint64_t word = 0;
        if (e->sizes[i] != 8)
            continue;
        memcpy(&word, args[i], 8);
        if (is_device((void *)word) && slots[slot_of((void *)word)].freed)
            return refused(cudaErrorIllegalAddress, "%s: argument %d is memory that was freed before", e->symbol, i);
        if (!is_device((void *)word) && is_host(word)) {
            char text[1200];
            snprintf(text, sizeof text, "a host address as argument %d of %s", i, e->symbol);
            if (!is_program)
                escape(text);
        }
    }
    if (!counted())
        return failed(cudaErrorMemoryAllocation);
    say("{\"do\":\"launch\",\"kernel\":\"%s\",\"grid\":[%u,%u,%u],\"block\":[%u,%u,%u],\"shared\":%zu,\"cooperative\":%d,"
        "\"cluster\":[%u,%u,%u],\"args\":[", e->symbol, grid.x, grid.y, grid.z, block.x, block.y, block.z, shared,
        cooperative, cluster.x, cluster.y, cluster.z);
    for (int i = 0; i < e->count; i++) {
        say(i ? ",\"" : "\"");
        say_bytes(args[i], (size_t)e->sizes[i]);
        say("\"");
    }
    say("]}\n");
    return cudaSuccess;
}

static const dim3 no_cluster = {0, 0, 0};

PUBLIC cudaError_t cudaLaunchKernel(const void *f, dim3 grid, dim3 block, void **args, size_t shared, cudaStream_t stream)
{
    return launch(f, grid, block, args, shared, stream, 0, no_cluster);
}
PUBLIC cudaError_t cudaLaunchKernel_ptsz(const void *f, dim3 grid, dim3 block, void **args, size_t shared, cudaStream_t s)
{
    return launch(f, grid, block, args, shared, s, 0, no_cluster);
}
PUBLIC cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void **args, size_t shared,
                                      cudaStream_t stream)
{
    return launch((const void *)kernel, grid, block, args, shared, stream, 0, no_cluster);
}
PUBLIC cudaError_t cudaLaunchCooperativeKernel(const void *f, dim3 grid, dim3 block, void **args, size_t shared,
                                               cudaStream_t stream)
{
    return launch(f, grid, block, args, shared, stream, 1, no_cluster);
}
PUBLIC cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *c, const void *f, void **args)
{
    dim3 cluster = no_cluster;
    int cooperative = 0;
    for (unsigned i = 0; i < c->numAttrs; i++) {
        if (c->attrs[i].id == cudaLaunchAttributeCooperative)
            cooperative = c->attrs[i].val.cooperative != 0;
        if (c->attrs[i].id == cudaLaunchAttributeClusterDimension)
            cluster = (dim3){c->attrs[i].val.clusterDim.x, c->attrs[i].val.clusterDim.y, c->attrs[i].val.clusterDim.z};
    }
    return launch(f, c->gridDim, c->blockDim, args, c->dynamicSmemBytes, c->stream, cooperative, cluster);
}

PUBLIC cudaError_t cudaFuncSetAttribute(const void *f, enum cudaFuncAttribute attribute, int value)
{
    struct entry *e = entry_of(f);
    if (e == NULL)
        return failed(cudaErrorInvalidDeviceFunction);
    if (attribute == cudaFuncAttributeMaxDynamicSharedMemorySize) {
        if (value < 0 || (size_t)value + e->shared > shared_optin)
            return failed(cudaErrorInvalidValue);
        e->dynamic_limit = value;
    }
    return cudaSuccess;
}

PUBLIC cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *a, const void *f)
{
    struct entry *e = entry_of(f);
    memset(a, 0, sizeof *a);
    if (e == NULL)
        return failed(cudaErrorInvalidDeviceFunction);
    a->sharedSizeBytes = e->shared;
    a->localSizeBytes = e->local;
    a->maxThreadsPerBlock = e->max_threads;
    a->numRegs = e->registers;
    a->ptxVersion = a->binaryVersion = 10 * major + minor;
    a->maxDynamicSharedSizeBytes = e->dynamic_limit ? e->dynamic_limit : (int)(STATIC_LIMIT - (e->shared < STATIC_LIMIT ? e->shared : STATIC_LIMIT));
    return cudaSuccess;
}
PUBLIC cudaError_t cudaFuncSetCacheConfig(const void *f, enum cudaFuncCache config) { (void)f, (void)config; return cudaSuccess; }

/* --- occupancy: threads, registers, shared memory and blocks per multiprocessor ---------------------------------- */

static int blocks_per_multiprocessor(const struct entry *e, int block, size_t dynamic)
{
    int warps = (block + 31) / 32, blocks = 32;
    if (block <= 0 || block > e->max_threads)
        return 0;
    int by_threads = 2048 / (32 * warps);
    int per_warp = (e->registers * 32 + 255) / 256 * 256;
    int by_registers = per_warp ? 65536 / (per_warp * warps) : blocks;
    size_t shared = (e->shared + dynamic + 1024 + 127) / 128 * 128; /* the driver keeps 1 KiB of each block */
    int by_shared = (int)((shared_optin + 1024) / shared);
    blocks = blocks < by_threads ? blocks : by_threads;
    blocks = blocks < by_registers ? blocks : by_registers;
    return blocks < by_shared ? blocks : by_shared;
}

PUBLIC cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *f, int block,
                                                                          size_t dynamic, unsigned flags)
{
    struct entry *e = entry_of(f);
    (void)flags;
    *blocks = e ? blocks_per_multiprocessor(e, block, dynamic) : 0;
    return e ? cudaSuccess : failed(cudaErrorInvalidDeviceFunction);
}
PUBLIC cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const void *f, int block, size_t dynamic)
{
    return cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(blocks, f, block, dynamic, 0);
}
PUBLIC cudaError_t cudaOccupancyAvailableDynamicSMemPerBlock(size_t *bytes, const void *f, int blocks, int block)
{
    struct entry *e = entry_of(f);
    (void)block;
    *bytes = e && blocks > 0 ? (shared_optin + 1024) / (size_t)blocks - e->shared - 1024 : 0;
    return e ? cudaSuccess : failed(cudaErrorInvalidDeviceFunction);
}

/* --- memory ---------------------------------------------------------------------------------------------------- */

static cudaError_t allocate(void **pointer, size_t bytes)
{
    *pointer = NULL;
    if (bytes == 0)
        return cudaSuccess;
    if (bytes > device_memory - allocated)
        return failed(cudaErrorMemoryAllocation);
    int slot = new_slot(bytes, 0);
    if (slot < 0) {
        say("{\"do\":\"limit\",\"what\":\"more than %d allocations\"}\n", MAX_SLOTS);
        return failed(cudaErrorMemoryAllocation);
    }
    allocated += bytes;
    *pointer = (void *)slot_address(slot);
    say("{\"do\":\"allocate\",\"slot\":%d,\"bytes\":%zu}\n", slot, bytes);
    return cudaSuccess;
}

static cudaError_t release(void *pointer)
{
    if (pointer == NULL)
        return cudaSuccess;
    if (!is_device(pointer) || offset_of(pointer) != 0 || slots[slot_of(pointer)].freed)
        return refused(cudaErrorInvalidValue, "cudaFree of something that was not allocated");
    slots[slot_of(pointer)].freed = 1;
    allocated -= slots[slot_of(pointer)].bytes;
    return cudaSuccess;
}

static void synchronise(void)
{
    for (int i = 0; i < MAX_STREAMS; i++)
        host_clock[i] = issued[i];
}

PUBLIC cudaError_t cudaMalloc(void **pointer, size_t bytes) { return allocate(pointer, bytes); }
PUBLIC cudaError_t cudaMallocAsync(void **pointer, size_t bytes, cudaStream_t stream)
{
    (void)stream;
    return allocate(pointer, bytes);
}
PUBLIC cudaError_t cudaMallocFromPoolAsync(void **pointer, size_t bytes, cudaMemPool_t pool, cudaStream_t stream)
{
    (void)pool, (void)stream;
    return allocate(pointer, bytes);
}
PUBLIC cudaError_t cudaMallocPitch(void **pointer, size_t *pitch, size_t width, size_t height)
{
    *pitch = (width + 511) / 512 * 512;
    return allocate(pointer, *pitch * height);
}
PUBLIC cudaError_t cudaMallocManaged(void **pointer, size_t bytes, unsigned flags)
{
    (void)flags;
    if (!is_program) {
        unsupported("cudaMallocManaged");
        return failed(cudaErrorNotSupported);
    }
    cudaError_t error = allocate(pointer, bytes);
    if (*pointer && mmap(*pointer, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) != *pointer)
        return failed(cudaErrorMemoryAllocation);
    return error;
}
PUBLIC cudaError_t cudaFree(void *pointer)
{
    synchronise();
    return release(pointer);
}
PUBLIC cudaError_t cudaFreeAsync(void *pointer, cudaStream_t stream) { (void)stream; return release(pointer); }
PUBLIC cudaError_t cudaMallocHost(void **pointer, size_t bytes)
{
    *pointer = calloc(1, bytes ? bytes : 1);
    return *pointer ? cudaSuccess : failed(cudaErrorMemoryAllocation);
}
PUBLIC cudaError_t cudaHostAlloc(void **pointer, size_t bytes, unsigned flags)
{
    (void)flags;
    return cudaMallocHost(pointer, bytes);
}
PUBLIC cudaError_t cudaFreeHost(void *pointer) { free(pointer); return cudaSuccess; }
PUBLIC cudaError_t cudaHostRegister(void *pointer, size_t bytes, unsigned flags) { (void)pointer, (void)bytes, (void)flags; return cudaSuccess; }
PUBLIC cudaError_t cudaHostUnregister(void *pointer) { (void)pointer; return cudaSuccess; }
PUBLIC cudaError_t cudaHostGetDevicePointer(void **device, void *host, unsigned flags)
{
    (void)host, (void)flags;
    *device = NULL;
    escape("host memory mapped into the device's address space");
    return failed(cudaErrorNotSupported);
}
PUBLIC cudaError_t cudaMemGetInfo(size_t *left, size_t *total)
{
    *left = device_memory - allocated, *total = device_memory;
    return cudaSuccess;
}
PUBLIC cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *a, const void *pointer)
{
    memset(a, 0, sizeof *a);
    a->type = is_device(pointer) ? cudaMemoryTypeDevice : cudaMemoryTypeUnregistered;
    if (is_device(pointer))
        a->devicePointer = (void *)pointer;
    return cudaSuccess;
}

static cudaError_t set_bytes(void *target, int value, size_t bytes, cudaStream_t stream)
{
    if (bytes == 0)
        return cudaSuccess;
    if (!holds(target, bytes))
        return refused(cudaErrorInvalidValue, "cudaMemset of %zu bytes leaves the device memory it starts in", bytes);
    if (enqueue(stream) < 0)
        return refused(cudaErrorInvalidResourceHandle, "cudaMemset on something that is no stream");
    if (!counted())
        return failed(cudaErrorMemoryAllocation);
    say("{\"do\":\"memset\",");
    say_place("target", target);
    say(",\"value\":%d,\"bytes\":%zu}\n", value & 255, bytes);
    return cudaSuccess;
}

PUBLIC cudaError_t cudaMemsetAsync(void *p, int value, size_t bytes, cudaStream_t stream) { return set_bytes(p, value, bytes, stream); }
PUBLIC cudaError_t cudaMemset(void *p, int value, size_t bytes) { return set_bytes(p, value, bytes, NULL); }
PUBLIC cudaError_t cudaMemset2DAsync(void *p, size_t pitch, int value, size_t width, size_t height, cudaStream_t stream)
{
    cudaError_t error = cudaSuccess;
    if (pitch == width)
        return set_bytes(p, value, width * height, stream);
    for (size_t row = 0; row < height && error == cudaSuccess; row++)
        error = set_bytes((char *)p + row * pitch, value, width, stream);
    return error;
}
PUBLIC cudaError_t cudaMemset2D(void *p, size_t pitch, int value, size_t width, size_t height)
{
    return cudaMemset2DAsync(p, pitch, value, width, height, NULL);
}

static cudaError_t upload(void *target, const void *source, size_t bytes, cudaStream_t stream)
{
    if (!holds(target, bytes))
        return refused(cudaErrorInvalidValue, "a copy of %zu bytes leaves the device memory it starts in", bytes);
    if (enqueue(stream) < 0)
        return refused(cudaErrorInvalidResourceHandle, "a copy on something that is no stream");
    if (!counted())
        return failed(cudaErrorMemoryAllocation);
    if (!is_program && bytes > UPLOAD_BYTES - uploaded) {
        say("{\"do\":\"limit\",\"what\":\"more than %zu bytes copied from the host\"}\n", UPLOAD_BYTES);
        return failed(cudaErrorMemoryAllocation);
    }
    say("{\"do\":\"upload\",");
    say_place("target", target);
    say(",\"bytes\":%zu,\"data\":\"", bytes);
    if (!is_program) {
        uploaded += bytes;
        say_bytes(source, bytes);
    }
    say("\"}\n");
    return cudaSuccess;
}

static cudaError_t copy(void *target, const void *source, size_t bytes, enum cudaMemcpyKind kind, cudaStream_t stream)
{
    int to_device = is_device(target), from_device = is_device(source);
    if (bytes == 0)
        return cudaSuccess;
    if ((kind == cudaMemcpyHostToDevice && (!to_device || from_device)) ||
        (kind == cudaMemcpyDeviceToHost && (to_device || !from_device)) ||
        (kind == cudaMemcpyDeviceToDevice && !(to_device && from_device)) ||
        (kind == cudaMemcpyHostToHost && (to_device || from_device)))
        return refused(cudaErrorInvalidValue, "a copy whose direction does not fit its addresses");
    if (from_device && !holds(source, bytes))
        return refused(cudaErrorInvalidValue, "a copy of %zu bytes leaves the device memory it starts in", bytes);
    if (!to_device && !from_device) {
        memmove(target, source, bytes);
        return cudaSuccess;
    }
    if (!from_device)
        return upload(target, source, bytes, stream);
    if (!to_device) {
        escape("a host copy of what is in device memory (cudaMemcpyDeviceToHost)");
        say("{\"do\":\"download\",");
        say_place("source", source);
        say(",\"bytes\":%zu}\n", bytes);
        memset(target, 0, bytes);
        return cudaSuccess;
    }
    if (!holds(target, bytes))
        return refused(cudaErrorInvalidValue, "a copy of %zu bytes leaves the device memory it starts in", bytes);
    if (enqueue(stream) < 0)
        return refused(cudaErrorInvalidResourceHandle, "a copy on something that is no stream");
    if (!counted())
        return failed(cudaErrorMemoryAllocation);
    say("{\"do\":\"copy\",");
    say_place("source", source);
    say(",");
    say_place("target", target);
    say(",\"bytes\":%zu}\n", bytes);
    return cudaSuccess;
}

static cudaError_t copy_rows(void *target, size_t target_pitch, const void *source, size_t source_pitch, size_t width,
                             size_t height, enum cudaMemcpyKind kind, cudaStream_t stream)
{
    cudaError_t error = cudaSuccess;
    if (target_pitch == width && source_pitch == width)
        return copy(target, source, width * height, kind, stream);
    for (size_t row = 0; row < height && error == cudaSuccess; row++)
        error = copy((char *)target + row * target_pitch, (const char *)source + row * source_pitch, width, kind, stream);
    return error;
}

PUBLIC cudaError_t cudaMemcpyAsync(void *t, const void *s, size_t n, enum cudaMemcpyKind k, cudaStream_t stream) { return copy(t, s, n, k, stream); }
PUBLIC cudaError_t cudaMemcpy(void *t, const void *s, size_t n, enum cudaMemcpyKind k)
{
    cudaError_t error = copy(t, s, n, k, NULL);
    if (is_device(t) != is_device(s)) /* a copy between device and host waits; one within the device does not */
        join(host_clock, clocks[1]);
    return error;
}
PUBLIC cudaError_t cudaMemcpy2DAsync(void *t, size_t tp, const void *s, size_t sp, size_t w, size_t h, enum cudaMemcpyKind k, cudaStream_t stream) { return copy_rows(t, tp, s, sp, w, h, k, stream); }
PUBLIC cudaError_t cudaMemcpy2D(void *t, size_t tp, const void *s, size_t sp, size_t w, size_t h, enum cudaMemcpyKind k) { return copy_rows(t, tp, s, sp, w, h, k, NULL); }

static void *symbol_address(const void *symbol, size_t offset)
{
    for (int i = 0; i < variable_count; i++)
        if (variables[i].host == symbol)
            return (void *)(slot_address(variables[i].slot) + offset);
    return NULL;
}

PUBLIC cudaError_t cudaMemcpyToSymbolAsync(const void *symbol, const void *source, size_t bytes, size_t offset, enum cudaMemcpyKind kind, cudaStream_t stream)
{
    void *target = symbol_address(symbol, offset);
    return target ? copy(target, source, bytes, kind, stream) : refused(cudaErrorInvalidSymbol, "a copy to something that is no device variable");
}
PUBLIC cudaError_t cudaMemcpyToSymbol(const void *symbol, const void *source, size_t bytes, size_t offset, enum cudaMemcpyKind kind)
{
    cudaError_t error = cudaMemcpyToSymbolAsync(symbol, source, bytes, offset, kind, NULL);
    if (!is_device(source)) /* the host waits for it, and it waits for what was asked for before */
        join(host_clock, clocks[1]);
    return error;
}
PUBLIC cudaError_t cudaMemcpyFromSymbolAsync(void *target, const void *symbol, size_t bytes, size_t offset, enum cudaMemcpyKind kind, cudaStream_t stream)
{
    void *source = symbol_address(symbol, offset);
    return source ? copy(target, source, bytes, kind, stream) : refused(cudaErrorInvalidSymbol, "a copy from something that is no device variable");
}
PUBLIC cudaError_t cudaMemcpyFromSymbol(void *target, const void *symbol, size_t bytes, size_t offset, enum cudaMemcpyKind kind)
{
    return cudaMemcpyFromSymbolAsync(target, symbol, bytes, offset, kind, NULL);
}
PUBLIC cudaError_t cudaGetSymbolAddress(void **address, const void *symbol)
{
    *address = symbol_address(symbol, 0);
    return *address ? cudaSuccess : failed(cudaErrorInvalidSymbol);
}
PUBLIC cudaError_t cudaGetSymbolSize(size_t *bytes, const void *symbol)
{
    void *address = symbol_address(symbol, 0);
    *bytes = address ? slots[slot_of(address)].bytes : 0;
    return address ? cudaSuccess : failed(cudaErrorInvalidSymbol);
}

/* --- streams and events ---------------------------------------------------------------------------------------- */

PUBLIC cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags)
{
    for (int i = 3; i < MAX_STREAMS; i++)
        if (!streams[i].used && !issued[i]) {
            streams[i] = (struct stream){.used = 1, .blocking = flags == cudaStreamDefault};
            *stream = (cudaStream_t)&streams[i];
            return cudaSuccess;
        }
    say("{\"do\":\"limit\",\"what\":\"more than %d streams\"}\n", MAX_STREAMS - 3);
    return failed(cudaErrorMemoryAllocation);
}
PUBLIC cudaError_t cudaStreamCreate(cudaStream_t *stream) { return cudaStreamCreateWithFlags(stream, cudaStreamDefault); }
PUBLIC cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority) { (void)priority; return cudaStreamCreateWithFlags(stream, flags); }
PUBLIC cudaError_t cudaStreamDestroy(cudaStream_t stream)
{
    int s = stream_of(stream);
    if (s < 3)
        return failed(cudaErrorInvalidResourceHandle);
    streams[s].used = 0;
    return cudaSuccess;
}
PUBLIC cudaError_t cudaStreamSynchronize(cudaStream_t stream)
{
    int s = stream_of(stream);
    if (s < 0)
        return failed(cudaErrorInvalidResourceHandle);
    join(host_clock, clocks[s]);
    return cudaSuccess;
}
PUBLIC cudaError_t cudaStreamQuery(cudaStream_t stream) { return stream_of(stream) < 0 ? failed(cudaErrorInvalidResourceHandle) : cudaSuccess; }
PUBLIC cudaError_t cudaStreamGetFlags(cudaStream_t stream, unsigned *flags) { (void)stream; *flags = cudaStreamNonBlocking; return cudaSuccess; }
PUBLIC cudaError_t cudaStreamGetPriority(cudaStream_t stream, int *priority) { (void)stream; *priority = 0; return cudaSuccess; }
PUBLIC cudaError_t cudaStreamSetAttribute(cudaStream_t stream, cudaLaunchAttributeID id, const cudaLaunchAttributeValue *value) { (void)stream, (void)id, (void)value; return cudaSuccess; }
PUBLIC cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status) { (void)stream; *status = cudaStreamCaptureStatusNone; return cudaSuccess; }
PUBLIC cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) { *least = 0, *greatest = -5; return cudaSuccess; }

static struct event *event_of(cudaEvent_t event)
{
    for (int i = 0; i < MAX_EVENTS; i++)
        if ((void *)event == (void *)&events[i] && events[i].used)
            return &events[i];
    return NULL;
}
PUBLIC cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags)
{
    (void)flags;
    for (int i = 0; i < MAX_EVENTS; i++)
        if (!events[i].used) {
            memset(&events[i], 0, sizeof events[i]);
            events[i].used = 1;
            *event = (cudaEvent_t)&events[i];
            return cudaSuccess;
        }
    say("{\"do\":\"limit\",\"what\":\"more than %d events\"}\n", MAX_EVENTS);
    return failed(cudaErrorMemoryAllocation);
}
PUBLIC cudaError_t cudaEventCreate(cudaEvent_t *event) { return cudaEventCreateWithFlags(event, 0); }
PUBLIC cudaError_t cudaEventDestroy(cudaEvent_t event)
{
    struct event *e = event_of(event);
    if (e == NULL)
        return failed(cudaErrorInvalidResourceHandle);
    e->used = 0;
    return cudaSuccess;
}
PUBLIC cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream)
{
    struct event *e = event_of(event);
    int s = stream_of(stream);
    if (e == NULL || s < 0)
        return failed(cudaErrorInvalidResourceHandle);
    join(clocks[s], host_clock);
    for (int i = 0; i < MAX_STREAMS; i++)
        if (s == 1 && streams[i].used && streams[i].blocking)
            join(clocks[1], clocks[i]);
    memcpy(e->clock, clocks[s], sizeof e->clock);
    e->recorded = 1;
    return cudaSuccess;
}
PUBLIC cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags) { (void)flags; return cudaEventRecord(event, stream); }
PUBLIC cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags)
{
    struct event *e = event_of(event);
    int s = stream_of(stream);
    (void)flags;
    if (e == NULL || s < 0)
        return failed(cudaErrorInvalidResourceHandle);
    join(clocks[s], e->clock);
    return cudaSuccess;
}
PUBLIC cudaError_t cudaEventSynchronize(cudaEvent_t event)
{
    struct event *e = event_of(event);
    if (e == NULL)
        return failed(cudaErrorInvalidResourceHandle);
    join(host_clock, e->clock);
    return cudaSuccess;
}
PUBLIC cudaError_t cudaEventQuery(cudaEvent_t event) { return event_of(event) ? cudaSuccess : failed(cudaErrorInvalidResourceHandle); }
PUBLIC cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t start, cudaEvent_t end)
{
    *ms = 0.01f; /* a clock would make plans differ from run to run */
    return event_of(start) && event_of(end) ? cudaSuccess : failed(cudaErrorInvalidResourceHandle);
}
PUBLIC cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void *data)
{
    (void)stream, (void)function, (void)data;
    escape("a host function in a stream (cudaLaunchHostFunc)");
    return failed(cudaErrorNotSupported);
}
PUBLIC cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t function, void *data, unsigned flags)
{
    (void)flags, (void)function;
    return cudaLaunchHostFunc(stream, NULL, data);
}

/* --- the device ------------------------------------------------------------------------------------------------ */

PUBLIC cudaError_t cudaGetDevice(int *device) { *device = 0; return cudaSuccess; }
PUBLIC cudaError_t cudaSetDevice(int device) { return device == 0 ? cudaSuccess : failed(cudaErrorInvalidDevice); }
PUBLIC cudaError_t cudaGetDeviceCount(int *count) { *count = 1; return cudaSuccess; }
PUBLIC cudaError_t cudaDeviceSynchronize(void) { synchronise(); return cudaSuccess; }
PUBLIC cudaError_t cudaDeviceReset(void) { synchronise(); return cudaSuccess; }
PUBLIC cudaError_t cudaDeviceSetLimit(enum cudaLimit limit, size_t value) { (void)limit, (void)value; return cudaSuccess; }
PUBLIC cudaError_t cudaDeviceGetLimit(size_t *value, enum cudaLimit limit) { (void)limit; *value = (size_t)8 << 20; return cudaSuccess; }
PUBLIC cudaError_t cudaDeviceSetCacheConfig(enum cudaFuncCache config) { (void)config; return cudaSuccess; }
PUBLIC cudaError_t cudaCtxResetPersistingL2Cache(void) { return cudaSuccess; }
PUBLIC cudaError_t cudaDeviceCanAccessPeer(int *can, int device, int peer) { (void)device, (void)peer; *can = 0; return cudaSuccess; }
PUBLIC cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t *pool, int device) { (void)device; *pool = NULL; return cudaSuccess; }
PUBLIC cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t pool, enum cudaMemPoolAttr attribute, void *value) { (void)pool, (void)attribute, (void)value; return cudaSuccess; }
PUBLIC cudaError_t cudaMemAdvise(const void *pointer, size_t bytes, enum cudaMemoryAdvise advice, struct cudaMemLocation place) { (void)pointer, (void)bytes, (void)advice, (void)place; return cudaSuccess; }
PUBLIC cudaError_t cudaMemPrefetchAsync(const void *pointer, size_t bytes, struct cudaMemLocation place, unsigned flags, cudaStream_t stream) { (void)pointer, (void)bytes, (void)place, (void)flags, (void)stream; return cudaSuccess; }
PUBLIC cudaError_t cudaRuntimeGetVersion(int *version) { *version = CUDART_VERSION; return cudaSuccess; }
PUBLIC cudaError_t cudaDriverGetVersion(int *version) { *version = CUDART_VERSION; return cudaSuccess; }
PUBLIC cudaError_t cudaProfilerStart(void) { return cudaSuccess; }
PUBLIC cudaError_t cudaProfilerStop(void) { return cudaSuccess; }

PUBLIC cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device)
{
    if (device != 0)
        return failed(cudaErrorInvalidDevice);
    switch ((int)attribute) {
    case cudaDevAttrMaxThreadsPerBlock: *value = 1024; break;
    case cudaDevAttrMaxBlockDimX: case cudaDevAttrMaxBlockDimY: *value = 1024; break;
    case cudaDevAttrMaxBlockDimZ: *value = 64; break;
    case cudaDevAttrMaxGridDimX: *value = 2147483647; break;
    case cudaDevAttrMaxGridDimY: case cudaDevAttrMaxGridDimZ: *value = 65535; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = STATIC_LIMIT; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = (int)shared_optin; break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *value = (int)shared_optin + 1024; break;
    case cudaDevAttrReservedSharedMemoryPerBlock: *value = 1024; break;
    case cudaDevAttrTotalConstantMemory: *value = 65536; break;
    case cudaDevAttrWarpSize: *value = 32; break;
    case cudaDevAttrMaxRegistersPerBlock: case cudaDevAttrMaxRegistersPerMultiprocessor: *value = 65536; break;
    case cudaDevAttrMultiProcessorCount: *value = multiprocessors; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *value = 2048; break;
    case cudaDevAttrMaxBlocksPerMultiprocessor: *value = 32; break;
    case cudaDevAttrL2CacheSize: *value = l2_bytes; break;
    case cudaDevAttrComputeCapabilityMajor: *value = major; break;
    case cudaDevAttrComputeCapabilityMinor: *value = minor; break;
    case cudaDevAttrConcurrentKernels: case cudaDevAttrUnifiedAddressing: case cudaDevAttrCooperativeLaunch: *value = 1; break;
    case cudaDevAttrMemoryPoolsSupported: *value = 1; break;
    default: *value = 0;
    }
    return cudaSuccess;
}

PUBLIC cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *p, int device)
{
    if (device != 0)
        return failed(cudaErrorInvalidDevice);
    memset(p, 0, sizeof *p);
    snprintf(p->name, sizeof p->name, "recorded device");
    p->totalGlobalMem = device_memory;
    p->sharedMemPerBlock = STATIC_LIMIT;
    p->sharedMemPerBlockOptin = shared_optin;
    p->sharedMemPerMultiprocessor = shared_optin + 1024;
    p->reservedSharedMemPerBlock = 1024;
    p->regsPerBlock = p->regsPerMultiprocessor = 65536;
    p->warpSize = 32;
    p->maxThreadsPerBlock = 1024;
    p->maxThreadsPerMultiProcessor = 2048;
    p->maxBlocksPerMultiProcessor = 32;
    p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024, p->maxThreadsDim[2] = 64;
    p->maxGridSize[0] = 2147483647, p->maxGridSize[1] = p->maxGridSize[2] = 65535;
    p->totalConstMem = 65536;
    p->major = major, p->minor = minor;
    p->multiProcessorCount = multiprocessors;
    p->l2CacheSize = l2_bytes;
    p->concurrentKernels = p->unifiedAddressing = p->cooperativeLaunch = 1;
    return cudaSuccess;
}

PUBLIC cudaError_t cudaGetLastError(void)
{
    cudaError_t error = last_error;
    last_error = cudaSuccess;
    return error;
}
PUBLIC cudaError_t cudaPeekAtLastError(void) { return last_error; }
PUBLIC const char *cudaGetErrorName(cudaError_t error) { return error == cudaSuccess ? "cudaSuccess" : "cudaError"; }
PUBLIC const char *cudaGetErrorString(cudaError_t error) { return error == cudaSuccess ? "no error" : "an error of the recorded device"; }

/* --- what a launcher may not do -------------------------------------------------------------------------------- */

PUBLIC int pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*start)(void *), void *argument)
{
    (void)thread, (void)attributes, (void)start, (void)argument;
    escape("a thread of its own");
    return EAGAIN;
}

PUBLIC void *dlopen(const char *name, int mode)
{
    if (active || told) {
        escape("dlopen");
        return NULL;
    }
    void *(*real)(const char *, int) = (void *(*)(const char *, int))dlsym(RTLD_NEXT, "dlopen");
    return real(name, mode);
}

PUBLIC char *getenv(const char *name)
{
    (void)name;
    if (!is_program)
        escape("the environment (getenv)");
    return NULL; /* there is nothing in it */
}

/* System calls by the name a reader understands; the rest by number. */
static const struct { int number; const char *name; } named_calls[] = {
    {SYS_clone, "fork or clone (a new process or thread)"}, {SYS_clone3, "clone3 (a new process or thread)"},
    {SYS_execve, "execve (another program)"}, {SYS_execveat, "execveat (another program)"},
#ifdef SYS_fork
    {SYS_fork, "fork (a new process)"}, {SYS_vfork, "vfork (a new process)"}, {SYS_open, "open (a file)"},
    {SYS_creat, "creat (a file)"}, {SYS_unlink, "unlink (a file)"}, {SYS_mkdir, "mkdir (a folder)"},
    {SYS_access, "access (a file)"}, {SYS_readlink, "readlink (a file)"},
#endif
    {SYS_openat, "openat (a file)"}, {SYS_unlinkat, "unlinkat (a file)"}, {SYS_mkdirat, "mkdirat (a folder)"},
    {SYS_faccessat, "faccessat (a file)"}, {SYS_readlinkat, "readlinkat (a file)"},
    {SYS_socket, "socket (the network)"}, {SYS_connect, "connect (the network)"}, {SYS_bind, "bind (the network)"},
    {SYS_getppid, "getppid (another process)"}, {SYS_ptrace, "ptrace (another process)"}, {SYS_process_vm_readv, "process_vm_readv (another process)"},
    {SYS_process_vm_writev, "process_vm_writev (another process)"}, {SYS_kill, "kill (another process)"},
};

static int is_harmless_file(const char *path)
{
    static const char *const prefixes[] = {"/sys/devices/system/cpu", "/proc/cpuinfo", "/proc/meminfo", "/proc/stat",
                                           "/etc/localtime", "/usr/share/zoneinfo", "/usr/lib/locale", "/dev/urandom"};
    for (size_t i = 0; i < sizeof prefixes / sizeof *prefixes; i++)
        if (!strncmp(path, prefixes[i], strlen(prefixes[i])))
            return 1;
    return 0;
}

/* A system call that is not on the list: name it, refuse it, go on. */
static void on_call(int signal, siginfo_t *info, void *context)
{
    ucontext_t *u = context;
    (void)signal;
#if defined(__x86_64__)
    greg_t *result = &u->uc_mcontext.gregs[REG_RAX];
    const char *path = (const char *)u->uc_mcontext.gregs[info->si_syscall == SYS_openat ? REG_RSI : REG_RDI];
    int opens = info->si_syscall == SYS_openat || info->si_syscall == SYS_open;
#else
    unsigned long long *result = &u->uc_mcontext.regs[0];
    const char *path = (const char *)u->uc_mcontext.regs[1];
    int opens = info->si_syscall == SYS_openat;
#endif
    *result = -EPERM;
    if (is_program || (opens && is_harmless_file(path)))
        return;
    for (size_t i = 0; i < sizeof named_calls / sizeof *named_calls; i++)
        if (named_calls[i].number == info->si_syscall) {
            escape(named_calls[i].name);
            return;
        }
    char text[64];
    snprintf(text, sizeof text, "system call %d", info->si_syscall);
    escape(text);
}

static void on_crash(int signal, siginfo_t *info, void *context)
{
    uint64_t address = (uint64_t)info->si_addr;
    const char *ending = signal == SIGABRT ? "aborted" : signal == SIGFPE ? "arithmetic" : "crashed";
    (void)context;
    if ((signal == SIGSEGV || signal == SIGBUS) && address >= FIRST_ADDRESS &&
        address < FIRST_ADDRESS + MAX_SLOTS * SLOT_BYTES) {
        escape("a host access to device memory");
        ending = "touched";
    }
    tell(ending);
    _exit(0);
}

static void on_time(int signal)
{
    (void)signal;
    tell("timed_out");
    _exit(0);
}

/* Leave a second of CPU time for the record. */
static void keep_time(void)
{
    struct rlimit limit;
    signal(SIGXCPU, on_time);
    if (getrlimit(RLIMIT_CPU, &limit) == 0 && limit.rlim_max != RLIM_INFINITY) {
        limit.rlim_cur = limit.rlim_max > 1 ? limit.rlim_max - 1 : 1;
        setrlimit(RLIMIT_CPU, &limit);
    }
}

static void catch_crashes(void)
{
    static char stack[65536];
    static const int crashes[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT, SIGTRAP};
    stack_t own = {.ss_sp = stack, .ss_size = sizeof stack};
    struct sigaction action = {.sa_sigaction = on_crash, .sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER};
    sigaltstack(&own, NULL);
    for (size_t i = 0; i < sizeof crashes / sizeof *crashes; i++)
        sigaction(crashes[i], &action, NULL);
    action.sa_sigaction = on_call;
    sigaction(SIGSYS, &action, NULL);
}

static const int allowed_calls[] = {
    SYS_read, SYS_write, SYS_writev, SYS_close, SYS_fstat, SYS_newfstatat, SYS_lseek, SYS_mmap, SYS_mprotect, SYS_munmap,
    SYS_brk, SYS_mremap, SYS_madvise, SYS_mincore, SYS_rt_sigaction, SYS_rt_sigprocmask, SYS_rt_sigreturn,
    SYS_sigaltstack, SYS_futex, SYS_sched_yield, SYS_clock_gettime, SYS_clock_getres, SYS_clock_nanosleep,
    SYS_nanosleep, SYS_gettimeofday, SYS_times, SYS_getrusage, SYS_getpid, SYS_gettid, SYS_getuid, SYS_geteuid,
    SYS_getgid, SYS_getegid, SYS_tgkill, SYS_exit, SYS_exit_group, SYS_getrandom, SYS_uname, SYS_sysinfo,
    SYS_sched_getaffinity, SYS_getcpu, SYS_set_robust_list, SYS_rseq, SYS_membarrier, SYS_restart_syscall, SYS_fcntl,
    SYS_ioctl, SYS_statx,
#ifdef SYS_time
    SYS_time,
#endif
};

/* What the loader and the second filter need besides. */
static const int loading_calls[] = {
    SYS_openat, SYS_pread64, SYS_readlinkat, SYS_faccessat, SYS_prctl, SYS_seccomp, SYS_prlimit64, SYS_getcwd,
#ifdef SYS_open
    SYS_open, SYS_access, SYS_readlink, SYS_stat, SYS_lstat, SYS_arch_prctl,
#endif
};

/* Trap every system call that is not on the list, so that it is refused by name. Constructors of the library run
 * while it is loaded, so the first filter stands before that; the second takes away what only the loader needs. */
static int filter_calls(int is_loading)
{
    enum { BASE = sizeof allowed_calls / sizeof *allowed_calls, MORE = sizeof loading_calls / sizeof *loading_calls };
    struct sock_filter program[BASE + MORE + 6];
    int n = 0, count = is_loading ? BASE + MORE : BASE;
#if defined(__x86_64__)
    uint32_t architecture = AUDIT_ARCH_X86_64;
#else
    uint32_t architecture = AUDIT_ARCH_AARCH64;
#endif
    program[n++] = (struct sock_filter)BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, arch));
    program[n++] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, architecture, 1, 0);
    program[n++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_KILL);
    program[n++] = (struct sock_filter)BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr));
    for (int i = 0; i < count; i++)
        program[n++] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K,
                                                    (uint32_t)(i < BASE ? allowed_calls[i] : loading_calls[i - BASE]),
                                                    (uint8_t)(count - i), 0);
    program[n++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_TRAP);
    program[n++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW);
    struct sock_fprog whole = {.len = (unsigned short)n, .filter = program};
    return prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) || prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &whole, 0, 0);
}

/* --- the call -------------------------------------------------------------------------------------------------- */

/* Any function of integers, addresses, floats and doubles: both calling conventions here fill integer registers and
 * floating registers independently and pass the rest in eight-byte places on the stack, in order. */
#if defined(__x86_64__)
enum { INTEGER_REGISTERS = 6, FLOAT_REGISTERS = 8 };
#else
enum { INTEGER_REGISTERS = 8, FLOAT_REGISTERS = 8 };
#endif
enum { STACK_PLACES = 40 };

static long integers[8];
static double floats[8];
static long places[STACK_PLACES];
static int integer_count, float_count, place_count, argument_count;

static void pass_integer(long value)
{
    argument_count++;
    if (integer_count < INTEGER_REGISTERS)
        integers[integer_count++] = value;
    else if (place_count < STACK_PLACES)
        places[place_count++] = value;
}

static void pass_float(uint64_t bits)
{
    argument_count++;
    if (float_count < FLOAT_REGISTERS)
        memcpy(&floats[float_count++], &bits, 8);
    else if (place_count < STACK_PLACES)
        places[place_count++] = (long)bits;
}

static void call(void *function)
{
    const long *i = integers, *p = places;
    const double *f = floats;
#define P8(n) p[n], p[n + 1], p[n + 2], p[n + 3], p[n + 4], p[n + 5], p[n + 6], p[n + 7]
#define L8 long, long, long, long, long, long, long, long
#define D8 double, double, double, double, double, double, double, double
#if defined(__x86_64__)
    ((void (*)(long, long, long, long, long, long, D8, L8, L8, L8, L8, L8))function)(
        i[0], i[1], i[2], i[3], i[4], i[5], f[0], f[1], f[2], f[3], f[4], f[5], f[6], f[7], P8(0), P8(8), P8(16), P8(24),
        P8(32));
#else
    ((void (*)(L8, D8, L8, L8, L8, L8, L8))function)(i[0], i[1], i[2], i[3], i[4], i[5], i[6], i[7], f[0], f[1], f[2],
                                                     f[3], f[4], f[5], f[6], f[7], P8(0), P8(8), P8(16), P8(24), P8(32));
#endif
}

static int read_orders(void)
{
    static char line[16384], word[64];
    while (fgets(line, sizeof line, stdin)) {
        char *rest = line;
        int used = 0;
        if (sscanf(line, "%63s%n", word, &used) != 1)
            continue;
        rest += used;
        if (!strcmp(word, "nonce"))
            sscanf(rest, "%79s", nonce);
        else if (!strcmp(word, "mode"))
            is_program = strstr(rest, "program") != NULL;
        else if (!strcmp(word, "name"))
            sscanf(rest, "%255s", launcher_name);
        else if (!strcmp(word, "device"))
            sscanf(rest, "%d %d %d %zu %d %zu", &major, &minor, &multiprocessors, &shared_optin, &l2_bytes, &device_memory);
        else if (!strcmp(word, "entry") && entry_count < MAX_ENTRIES) {
            struct entry *e = &entries[entry_count++];
            sscanf(rest, "%1023s %zu %d %zu %d %d%n", e->symbol, &e->shared, &e->registers, &e->local, &e->max_threads,
                   &e->count, &used);
            if (e->count > MAX_PARAMETERS)
                return 0;
            for (int i = 0; i < e->count; i++) {
                int more = 0;
                rest += used;
                if (sscanf(rest, "%d%n", &e->sizes[i], &more) != 1)
                    return 0;
                used = more;
            }
        } else if (!strcmp(word, "array")) {
            int slot = new_slot(strtoull(rest, NULL, 10), 0);
            pass_integer((long)slot_address(slot));
        } else if (!strcmp(word, "integer"))
            pass_integer(strtol(rest, NULL, 10));
        else if (!strcmp(word, "float") || !strcmp(word, "double"))
            pass_float(strtoull(rest, NULL, 16));
        else if (!strcmp(word, "stream"))
            pass_integer((long)&streams[0]);
        else if (!strcmp(word, "go"))
            return 1;
    }
    return 0;
}

static void at_exit(void) { tell("left"); }

int main(int argc, char **argv)
{
    record = mmap(NULL, RECORD_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    record_fd = fcntl(1, F_DUPFD_CLOEXEC, 100);
    if (argc != 2 || record == MAP_FAILED || record_fd < 0 || dup2(2, 1) < 0 || !read_orders())
        return 2;
    int nothing = open("/dev/null", O_RDONLY);
    if (nothing < 0 || dup2(nothing, 0) < 0)
        return 2;
    close(nothing);
    streams[0].used = streams[1].used = streams[2].used = 1;
    streams[2].blocking = 1;
    catch_crashes();
    keep_time();
    if (filter_calls(1)) {
        tell("unfiltered");
        return 0;
    }
    void *library = dlopen(argv[1], RTLD_NOW | RTLD_LOCAL);
    if (library == NULL) {
        const char *missing = strstr(dlerror(), "undefined symbol: ");
        say("{\"do\":\"missing\",\"what\":\"%.200s\"}\n", missing ? missing + 18 : "");
        tell("unloaded");
        return 0;
    }
    void *function = dlsym(library, launcher_name);
    if (function == NULL) {
        tell("nameless");
        return 0;
    }
    atexit(at_exit);
    if (filter_calls(0)) {
        tell("unfiltered");
        return 0;
    }
    active = 1;
    if (is_program) {
        static char name[] = "program", *arguments[] = {name, NULL};
        ((int (*)(int, char **))function)(1, arguments);
    } else
        call(function);
    check_joined();
    tell("returned");
    _exit(0);
}
