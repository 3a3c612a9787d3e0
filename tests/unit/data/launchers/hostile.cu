// Launchers that try to get out. None may do harm, and each is told by name.
#include <cuda_runtime.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/ptrace.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <string>
#include <thread>

extern "C" __global__ void scale(const float* x, float* y, int n, float a) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = a * x[i];
}
struct Early { // runs when the library is loaded, before the launcher is called
    bool forked, connected;
    Early() {
        forked = fork() >= 0;
        connected = socket(AF_INET, SOCK_STREAM, 0) >= 0;
        puts("optiml-record 0\n{\"do\":\"end\",\"how\":\"returned\"}\noptiml-end 0");
        fflush(stdout);
    }
} early;
#define LAUNCHER(name) extern "C" void name(const float* x, float* y, int n, float a, cudaStream_t stream)
#define WORK scale<<<(n + 255) / 256, 256, 0, stream>>>(x, y, n, a)

LAUNCHER(honest) { WORK; }
LAUNCHER(prints) { printf("%d\n", n), fflush(stdout); WORK; }
LAUNCHER(fork_bomb) { for (;;) if (fork() < 0) break; WORK; }
LAUNCHER(runs_system) { if (system("touch harm")) WORK; }
LAUNCHER(runs_program) { execl("/bin/sh", "sh", "-c", "sleep 100", (char*)nullptr); WORK; }
LAUNCHER(starts_thread) { std::thread([] { for (;;) {} }).detach(); WORK; }
LAUNCHER(opens_socket) { socket(AF_INET, SOCK_STREAM, 0); WORK; }
LAUNCHER(writes_file) { std::ofstream(std::string("/root/") + "harm") << "harm"; WORK; }
LAUNCHER(reads_file) { std::string key; std::ifstream("/etc/passwd") >> key; WORK; }
LAUNCHER(reads_environment) { if (getenv("OPTIML_HTTP_TOKEN") == nullptr) WORK; }
LAUNCHER(traces_parent) { ptrace(PTRACE_ATTACH, getppid(), 0, 0); WORK; }
LAUNCHER(kills_parent) { syscall(SYS_kill, getppid(), SIGKILL); WORK; }
LAUNCHER(reads_parent) {
    char here[8]; iovec mine{here, 8}, theirs{(void*)0x400000, 8};
    process_vm_readv(getppid(), &mine, 1, &theirs, 1, 0); WORK;
}
LAUNCHER(loads_library) { dlopen("libcuda.so.1", RTLD_NOW); WORK; }
LAUNCHER(exits) { WORK; exit(0); }
LAUNCHER(exits_at_once) { WORK; _exit(0); }
LAUNCHER(floods) { for (;;) puts("0123456789012345678901234567890123456789012345678901234567890123456789"); }
LAUNCHER(spins) { for (volatile int i = 0;; i = i + 1) {} }
LAUNCHER(takes_memory) { for (size_t i = 1;; i++) memset(malloc(1 << 24), 1, 1 << 24); }
LAUNCHER(forges_record) {
    const char text[] = "optiml-record guess\n{\"do\":\"end\",\"how\":\"returned\"}\noptiml-end guess\n";
    for (int descriptor = 3; descriptor < 128; descriptor++) (void)!write(descriptor, text, sizeof text - 1);
    _exit(0);
}
LAUNCHER(host_function) { WORK; cudaLaunchHostFunc(stream, [](void*) {}, nullptr); }
LAUNCHER(after_constructors) { if (early.forked || early.connected) for (;;) {} WORK; }
