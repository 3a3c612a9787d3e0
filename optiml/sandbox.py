"""What a child gives up before it touches anything untrusted, and which of it this machine can enforce.

`apply` runs inside the child while it has a single thread, since most of these limits bind the calling
thread and those it starts later. Each layer is taken if the kernel offers it and reported if it does not:

    files       Landlock: the interpreter and named paths readable, one scratch folder writable
    network     seccomp refuses new sockets; Landlock refuses TCP; root also gets an empty network namespace
    processes   seccomp refuses fork and exec, or RLIMIT_NPROC bounds them under a uid of their own
    privileges  no_new_privs, no capabilities, an unprivileged uid where the parent is root
    limits      CPU time, address space, file size, open files

What it does not cover: the total size of the scratch folder, stat() of paths outside it, timing channels.
"""

from __future__ import annotations

import ctypes
import errno
import os
import site
import stat
import struct
import sys
import sysconfig
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from optiml.errors import InvalidInput

if sys.platform != "win32":
    import resource


@dataclass(frozen=True, kw_only=True)
class Policy:
    """What a child may do. The default is: read the interpreter, write its scratch folder, compute."""

    readable: tuple[str, ...] = ()  # files and folders, besides those of the interpreter
    scratch: str | None = None  # the one writable folder; `process` fills it in
    network: bool = False
    processes: bool = False  # may start others, within `task_limit`
    gpu: bool = False  # may open NVIDIA device nodes
    cpu_s: int | None = None  # per call in a worker, in all for an outside program
    address_space_bytes: int | None = None
    file_size_bytes: int = 1 << 30
    open_files: int = 256
    task_limit: int = 512  # processes and threads together
    uid: int | None = None  # used when the parent is root; None picks one that nobody else has
    trusted: bool = False  # our own code doing our own work in another process: nothing above is enforced

    def to_json(self) -> dict[str, Any]:
        """As a JSON object."""
        return {**asdict(self), "readable": list(self.readable)}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Policy:
        """The inverse of `to_json`.

        Raises:
            InvalidInput: a field that a policy does not have.
        """
        unknown = set(data) - {field.name for field in fields(cls)}
        if unknown:
            raise InvalidInput(f"a policy has no field {sorted(unknown)[0]!r}")
        return cls(**{**data, "readable": tuple(data.get("readable", ()))})


@dataclass(frozen=True, kw_only=True)
class Layers:
    """Which parts of a policy the kernel enforces on a child. All False: none, it is an ordinary process."""

    landlock_abi: int = 0  # 0: this kernel has no Landlock
    files: bool = False  # only the policy's paths can be opened
    network: bool = False  # no new socket, but a local one where the GPU is allowed
    network_namespace: bool = False
    no_new_processes: bool = False  # fork, and for workers exec, fail
    process_limit: bool = False  # processes are allowed, and bounded
    seccomp: bool = False
    no_new_privileges: bool = False
    capabilities_dropped: bool = False  # none left that can change anything
    unprivileged_uid: bool = False  # not root
    uid: int | None = None
    signals: bool = False  # cannot signal processes outside
    undumpable: bool = False
    gpu_hidden: bool = False
    limits: bool = False
    notes: tuple[str, ...] = ()  # one sentence for each layer that could not be had

    @property
    def strong(self) -> bool:
        """Good enough for a stranger's code: files confined, no network, processes none or bounded."""
        return self.files and self.network and (self.no_new_processes or self.process_limit)

    def describe(self) -> list[str]:
        """One line per layer, for `optiml doctor`."""
        landlock = f"Landlock ABI {self.landlock_abi}" if self.landlock_abi else "no Landlock"
        identity = "no uid" if self.uid is None else f"uid {self.uid}"
        rows = (
            ("files confined", self.files, landlock),
            ("no network", self.network, "own namespace" if self.network_namespace else "socket calls refused"),
            ("no new processes", self.no_new_processes or self.process_limit, "seccomp"),
            ("signals scoped", self.signals, ""),
            ("no new privileges", self.no_new_privileges, ""),
            ("no capabilities", self.capabilities_dropped, ""),
            ("unprivileged user", self.unprivileged_uid, identity),
            ("GPU hidden", self.gpu_hidden, ""),
            ("resource limits", self.limits, ""),
        )
        lines = []
        for name, holds, detail in rows:
            shown = f" ({detail})" if detail and holds else ""
            lines.append(f"{'yes' if holds else 'no ':3} {name}{shown}")
        return [*lines, *self.notes]

    def to_json(self) -> dict[str, Any]:
        """As a JSON object."""
        return {**asdict(self), "notes": list(self.notes)}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Layers:
        """The inverse of `to_json`."""
        return cls(**{**data, "notes": tuple(data.get("notes", ()))})


# Linux ABI numbers below: include/uapi/linux/{prctl,landlock,seccomp,capability,sched}.h.
_PR_SET_PDEATHSIG, _PR_GET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_KEEPCAPS = 1, 2, 4, 8
_PR_SET_SECCOMP, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS, _PR_CAP_AMBIENT = 22, 24, 38, 47
_PR_CAP_AMBIENT_RAISE, _PR_CAP_AMBIENT_CLEAR_ALL = 2, 4
_CAP_DAC_READ_SEARCH, _CAP_VERSION_3 = 2, 0x20080522
_AF_UNIX = 1
_CLONE_NEWNET, _CLONE_THREAD = 0x40000000, 0x00010000
_CLONE_NAMESPACES = 0x7E020000  # every CLONE_NEW* flag of clone(2)

_FS_EXECUTE, _FS_WRITE_FILE, _FS_READ_FILE, _FS_READ_DIR = 1, 2, 4, 8
_FS_ALL_BY_ABI = (0, 0x1FFF, 0x3FFF, 0x7FFF, 0x7FFF, 0xFFFF)  # from ABI 5 on, all sixteen
_FS_TRUNCATE, _FS_IOCTL_DEV = 1 << 14, 1 << 15
_FS_FOR_FILES = _FS_EXECUTE | _FS_WRITE_FILE | _FS_READ_FILE | _FS_TRUNCATE | _FS_IOCTL_DEV
_FS_SPECIAL = (1 << 6) | (1 << 11)  # making character and block devices: not even in scratch
_NET_ALL, _SCOPE_ALL = 0b11, 0b11  # bind and connect TCP; abstract sockets and signals

_SECCOMP_MODE_FILTER, _SECCOMP_SET_MODE_FILTER, _SECCOMP_TSYNC = 2, 1, 1
_RET_ALLOW, _RET_ERRNO, _RET_KILL = 0x7FFF0000, 0x00050000, 0x80000000
_LOAD, _JEQ, _JGE, _JSET, _RET = 0x20, 0x15, 0x35, 0x45, 0x06
_X32_BIT = 0x40000000
_FIRST_UNKNOWN = 470  # system calls added after Linux 6.17 are unknown to this filter


@dataclass(frozen=True, kw_only=True)
class _Machine:
    """Numbers that differ between the two architectures: audit code and system calls."""

    audit: int
    has_x32: bool
    calls: dict[str, int]


# name: (x86-64, aarch64); None where the architecture never had it.
_CALLS: dict[str, tuple[int | None, int | None]] = {
    "capset": (126, 91), "seccomp": (317, 277), "unshare": (272, 97),
    "landlock_create_ruleset": (444, 444), "landlock_add_rule": (445, 445), "landlock_restrict_self": (446, 446),
    # new processes
    "fork": (57, None), "vfork": (58, None), "clone": (56, 220), "clone3": (435, 435),
    "execve": (59, 221), "execveat": (322, 281), "setsid": (112, 157), "setpgid": (109, 154),
    # other processes
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271),
    "process_madvise": (440, 440), "process_mrelease": (448, 448), "kcmp": (312, 272), "pidfd_getfd": (438, 438),
    "pidfd_send_signal": (424, 424), "kill": (62, 129), "tkill": (200, 130), "tgkill": (234, 131),
    "rt_sigqueueinfo": (129, 138), "rt_tgsigqueueinfo": (297, 240), "prlimit64": (302, 261),
    "sched_setaffinity": (203, 122), "sched_setscheduler": (144, 119), "sched_setparam": (142, 118),
    "sched_setattr": (314, 274), "setpriority": (141, 140), "ioprio_set": (251, 30),
    "migrate_pages": (256, 238), "move_pages": (279, 239),
    # memory and queues shared with other processes by name
    "shmget": (29, 194), "shmat": (30, 196), "shmctl": (31, 195), "semget": (64, 190), "semop": (65, 193),
    "semctl": (66, 191), "semtimedop": (220, 192), "msgget": (68, 186), "msgsnd": (69, 189), "msgrcv": (70, 188),
    "msgctl": (71, 187), "mq_open": (240, 180), "mq_unlink": (241, 181),
    # sockets
    "socket": (41, 198),
    # mounts and namespaces
    "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51), "move_mount": (429, 429),
    "open_tree": (428, 428), "fsopen": (430, 430), "fsconfig": (431, 431), "fsmount": (432, 432),
    "fspick": (433, 433), "mount_setattr": (442, 442), "open_tree_attr": (467, 467), "setns": (308, 268),
    # kernel interfaces with a history of holes
    "bpf": (321, 280), "keyctl": (250, 219), "add_key": (248, 217), "request_key": (249, 218),
    "perf_event_open": (298, 241), "userfaultfd": (323, 282), "kexec_load": (246, 104), "kexec_file_load": (320, 294),
    "io_uring_setup": (425, 425), "io_uring_enter": (426, 426), "io_uring_register": (427, 427),
    "init_module": (175, 105), "finit_module": (313, 273), "delete_module": (176, 106), "iopl": (172, None),
    "ioperm": (173, None), "modify_ldt": (154, None), "acct": (163, 89), "quotactl": (179, 60),
    "quotactl_fd": (443, 443), "swapon": (167, 224), "swapoff": (168, 225), "reboot": (169, 142),
    "settimeofday": (164, 170), "clock_settime": (227, 112), "adjtimex": (159, 171), "clock_adjtime": (305, 266),
    "sethostname": (170, 161), "setdomainname": (171, 162), "syslog": (103, 116), "lookup_dcookie": (212, 18),
    "vhangup": (153, 58), "name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265),
    "fanotify_init": (300, 262), "fanotify_mark": (301, 263), "mknod": (133, None), "mknodat": (259, 33),
    "memfd_secret": (447, 447), "memfd_create": (319, 279),
    # changes to files that Landlock does not see
    "chown": (92, None), "fchown": (93, 55), "lchown": (94, None), "fchownat": (260, 54), "setxattr": (188, 5),
    "lsetxattr": (189, 6), "fsetxattr": (190, 7), "setxattrat": (463, 463), "removexattr": (197, 14),
    "lremovexattr": (198, 15), "fremovexattr": (199, 16), "removexattrat": (466, 466), "file_setattr": (469, 469),
    "chmod": (90, None), "fchmod": (91, 52), "fchmodat": (268, 53), "fchmodat2": (452, 452), "truncate": (76, 45),
}  # fmt: skip
_OWN_USE = frozenset({"capset", "seccomp", "landlock_create_ruleset", "landlock_add_rule", "landlock_restrict_self"})
_NEW_PROCESS = frozenset({"fork", "vfork", "clone", "clone3", "execve", "execveat"})
_OWN_PID_ONLY = frozenset({"kill", "tgkill"})
_ZERO_PID_ONLY = frozenset({"prlimit64", "sched_setaffinity", "sched_setscheduler", "sched_setparam", "sched_setattr"})
_FOR_BUILDS = frozenset({"chmod", "fchmod", "fchmodat", "fchmodat2"})  # a linker marks its output executable
_SIGNALLING = frozenset({"kill", "tkill", "tgkill", "rt_sigqueueinfo", "rt_tgsigqueueinfo", "pidfd_send_signal"})


def _machine() -> _Machine | None:
    if sys.platform != "linux" or struct.calcsize("P") != 8:
        return None
    name = os.uname().machine
    if name == "x86_64":
        return _Machine(audit=0xC000003E, has_x32=True, calls={k: v[0] for k, v in _CALLS.items() if v[0] is not None})
    if name == "aarch64":
        return _Machine(audit=0xC00000B7, has_x32=False, calls={k: v[1] for k, v in _CALLS.items() if v[1] is not None})
    return None


class _Kernel:
    """The system calls that Python does not offer; a failed one raises OSError."""

    def __init__(self, machine: _Machine) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._calls = machine.calls

    def prctl(self, option: int, a: int = 0, b: int = 0, c: int = 0, d: int = 0) -> None:
        words = (ctypes.c_ulong(word) for word in (a, b, c, d))
        self._check(self._libc.prctl(ctypes.c_int(option), *words))

    def syscall(self, name: str, *args: Any) -> int:
        words = (ctypes.c_long(arg) if isinstance(arg, int) else arg for arg in args)
        self._libc.syscall.restype = ctypes.c_long
        return self._check(self._libc.syscall(ctypes.c_long(self._calls[name]), *words))

    def parent_death_signal(self) -> int:
        signal = ctypes.c_int(0)
        self._check(self._libc.prctl(ctypes.c_int(_PR_GET_PDEATHSIG), ctypes.byref(signal), 0, 0, 0))
        return signal.value

    def _check(self, result: int) -> int:
        if result < 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
        return result


def die_with_parent(parent: int, signal: int) -> None:
    """Ask for `signal` when the thread that started this process ends; leave at once if `parent` is gone already.

    Where the system has no such request this only checks once.
    """
    machine = _machine()
    if machine is not None:
        _Kernel(machine).prctl(_PR_SET_PDEATHSIG, signal)
    if os.getppid() != parent:
        os._exit(0)


def apply(policy: Policy, *, before_exec: bool = False) -> Layers:
    """Give up everything that `policy` does not grant. There is no way back.

    Call it once, in a child, while it has a single thread. A layer that cannot be had is reported in
    the result, never an exception.

    Args:
        policy: what to keep.
        before_exec: the caller will replace itself by another program, so `execve` stays allowed.
    """
    machine = _machine()
    if machine is None:
        return Layers(notes=("this system offers no sandbox that is known here",))
    kernel = _Kernel(machine)
    held: dict[str, Any] = {}
    notes: list[str] = []
    death_signal, parent = kernel.parent_death_signal(), os.getppid()

    os.umask(0o077)
    _prefer_as_memory_victim()
    ruleset, abi = _landlock_ruleset(kernel, policy, before_exec, notes)
    held["landlock_abi"] = abi
    if not policy.network:
        held["network_namespace"] = _leave_network(kernel)
    held["limits"] = _set_limits(policy, before_exec, notes)
    held |= _drop_privileges(kernel, policy, before_exec, confined=ruleset is not None, notes=notes)
    try:
        kernel.prctl(_PR_SET_NO_NEW_PRIVS, 1)
        held["no_new_privileges"] = True
    except OSError as error:
        notes.append(f"no_new_privs could not be set: {error.strerror}")
    if ruleset is not None:
        held["files"] = _restrict_files(kernel, ruleset, notes)
    try:
        kernel.prctl(_PR_SET_DUMPABLE, 0)
        held["undumpable"] = True
        if death_signal:  # changing the uid has cleared it
            kernel.prctl(_PR_SET_PDEATHSIG, death_signal)
    except OSError as error:
        notes.append(f"core dumps could not be switched off: {error.strerror}")
    if death_signal and os.getppid() != parent:
        os._exit(0)
    held |= _restrict_calls(kernel, machine, policy, abi=abi, before_exec=before_exec, notes=notes)

    held["signals"] = (
        bool(held.get("files") and abi >= 6)
        or bool(held.get("seccomp") and not policy.processes)
        or os.geteuid() >= _PRIVATE_UIDS
    )
    held["gpu_hidden"] = not policy.gpu and (bool(held.get("files")) or not _gpu_nodes())
    if policy.processes and not held.get("process_limit"):
        notes.append("the number of processes is not bounded")
    return Layers(**held, uid=os.geteuid(), notes=tuple(notes))


# --- files -----------------------------------------------------------------------------------------------------


def interpreter_paths() -> tuple[str, ...]:
    """Files and folders that this interpreter, its packages and the C library read; those that exist."""
    package = os.path.dirname(os.path.abspath(__file__))
    prefixes = {sys.prefix, sys.base_prefix, sys.exec_prefix, sys.base_exec_prefix}
    wanted = [
        *_SYSTEM_PATHS,
        *(os.path.join(prefix, part) for prefix in prefixes for part in ("lib", "lib64", "bin", "pyvenv.cfg")),
        *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
        *site.getsitepackages(),
        *package_folders(),
        os.path.realpath(sys.executable or sys.prefix),
        *os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep),
        package,
    ]
    return tuple(dict.fromkeys(path for path in wanted if path and os.path.isabs(path) and os.path.exists(path)))


def package_folders() -> list[str]:
    """Folders of installed packages on the import path, those of `pip install --target` among them."""
    return [entry for entry in sys.path if _holds_packages(entry)]


def _holds_packages(folder: str) -> bool:
    if os.path.basename(folder) in ("site-packages", "dist-packages"):
        return True
    try:
        return any(name.endswith(".dist-info") for name in os.listdir(folder))
    except OSError:  # "", a zip file, a folder that is gone
        return False


_SYSTEM_PATHS = (
    "/lib", "/lib32", "/lib64", "/usr/lib", "/usr/lib32", "/usr/lib64", "/usr/local/lib", "/nix/store",
    "/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d", "/etc/localtime", "/usr/share/zoneinfo",
    "/proc/self", "/proc/cpuinfo", "/proc/meminfo", "/proc/stat", "/proc/sys/vm/overcommit_memory",
    "/sys/devices/system/cpu", "/sys/devices/system/node", "/sys/kernel/mm/transparent_hugepage",
    "/dev/urandom", "/dev/random",
)  # fmt: skip
_PROGRAM_PATHS = (
    "/bin", "/sbin", "/usr/bin", "/usr/sbin", "/usr/local/bin", "/usr/libexec", "/usr/include", "/usr/share",
    "/etc/alternatives",
)  # fmt: skip
_SINKS = ("/dev/null", "/dev/zero", "/dev/full")
_GPU_READABLE = ("/proc", "/sys", "/usr/bin", "/etc/vulkan", "/usr/share/nvidia")


def _gpu_nodes() -> list[str]:
    try:
        names = os.listdir("/dev")
    except OSError:
        return []
    return sorted(f"/dev/{name}" for name in names if name.startswith(("nvidia", "nvgpu", "nvhost", "nvmap", "dri")))


def _landlock_ruleset(kernel: _Kernel, policy: Policy, before_exec: bool, notes: list[str]) -> tuple[int | None, int]:
    """Build the rules, while every path can still be opened: (descriptor or None, ABI)."""
    try:
        abi = kernel.syscall("landlock_create_ruleset", None, 0, 1)
    except OSError as error:
        notes.append(f"files are not confined: this kernel offers no Landlock ({error.strerror})")
        return None, 0
    everything = _FS_ALL_BY_ABI[min(abi, len(_FS_ALL_BY_ABI) - 1)]
    handled = [everything]
    if abi >= 4:
        handled.append(0 if policy.network else _NET_ALL)
    if abi >= 6:
        handled.append(_SCOPE_ALL)
    attributes = struct.pack(f"={len(handled)}Q", *handled)
    try:
        ruleset = kernel.syscall("landlock_create_ruleset", ctypes.c_char_p(attributes), len(attributes), 0)
    except OSError as error:
        notes.append(f"files are not confined: {error.strerror}")
        return None, abi

    runs_programs = policy.processes or before_exec
    read = _FS_READ_FILE | _FS_READ_DIR | (_FS_EXECUTE if runs_programs else 0)
    rules: list[tuple[str, int]] = [(path, read) for path in interpreter_paths()]
    if runs_programs:
        rules += [(path, read) for path in _PROGRAM_PATHS]
    rules += [(path, _FS_READ_FILE | _FS_WRITE_FILE) for path in _SINKS]
    if policy.gpu:
        rules += [(path, read) for path in _GPU_READABLE]
        rules.append(("/proc/self", read | _FS_WRITE_FILE | _FS_TRUNCATE))  # the CUDA driver names its threads there
        rules += [(path, _FS_READ_FILE | _FS_WRITE_FILE | _FS_READ_DIR | _FS_IOCTL_DEV) for path in _gpu_nodes()]
    rules += [(path, read) for path in policy.readable]
    if policy.scratch is not None:
        rules.append((policy.scratch, everything & ~_FS_SPECIAL & ~_FS_IOCTL_DEV))
    for path, access in rules:
        _allow(kernel, ruleset, path, access & everything)
    return ruleset, abi


def _allow(kernel: _Kernel, ruleset: int, path: str, access: int) -> None:
    try:
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return  # what does not exist need not be readable
    try:
        if not stat.S_ISDIR(os.fstat(descriptor).st_mode):
            access &= _FS_FOR_FILES
        rule = struct.pack("=Qi", access, descriptor)
        kernel.syscall("landlock_add_rule", ruleset, 1, ctypes.c_char_p(rule), 0)
    except OSError:
        return  # one path less to read, never one more
    finally:
        os.close(descriptor)


def _restrict_files(kernel: _Kernel, ruleset: int, notes: list[str]) -> bool:
    try:
        kernel.syscall("landlock_restrict_self", ruleset, 0)
    except OSError as error:
        notes.append(f"files are not confined: {error.strerror}")
        return False
    finally:
        os.close(ruleset)
    return True


# --- privileges and limits -------------------------------------------------------------------------------------


def _prefer_as_memory_victim() -> None:
    try:
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
    except OSError:
        return  # a nicety: without it the kernel's own choice stands


def _leave_network(kernel: _Kernel) -> bool:
    try:
        kernel.syscall("unshare", _CLONE_NEWNET)
    except OSError:
        return False  # only root may; the other two network layers stand
    return True


def _set_limits(policy: Policy, before_exec: bool, notes: list[str]) -> bool:
    """Every limit but the number of tasks, which needs to know the uid."""
    wanted = [
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, policy.file_size_bytes),
        (resource.RLIMIT_NOFILE, policy.open_files),
    ]
    if policy.address_space_bytes is not None:
        wanted.append((resource.RLIMIT_AS, policy.address_space_bytes))
    try:
        for kind, value in wanted:
            _lower_limit(kind, value)
        if before_exec and policy.cpu_s is not None:
            _lower_limit(resource.RLIMIT_CPU, policy.cpu_s + 1)
        limit_cpu_time(policy)
    except (OSError, ValueError) as error:
        notes.append(f"a resource limit could not be set: {error}")
        return False
    return True


def limit_cpu_time(policy: Policy) -> None:
    """Allow `policy.cpu_s` more seconds of CPU time from now on; SIGXCPU ends the process after that.

    A worker calls this before each of its calls, so the limit is one that can be moved.
    """
    if policy.cpu_s is None or sys.platform == "win32":
        return
    used = resource.getrusage(resource.RUSAGE_SELF)
    soft = int(used.ru_utime + used.ru_stime) + policy.cpu_s + 1
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))


def _lower_limit(kind: int, value: int) -> None:
    _, hard = resource.getrlimit(kind)
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(kind, (value, value))


def _drop_privileges(
    kernel: _Kernel, policy: Policy, before_exec: bool, *, confined: bool, notes: list[str]
) -> dict[str, Any]:
    """Leave root if we are root, and every capability in any case.

    Where the interpreter lies in a folder that other users cannot enter, the new uid keeps the one
    capability to read and search all folders, provided that Landlock then decides what it may read.
    """
    held: dict[str, Any] = {}
    is_root, kept = os.geteuid() == 0, 0
    moves = is_root and _readable_by_others(policy, before_exec)
    if is_root and not moves and confined and _has_capability(_CAP_DAC_READ_SEARCH):
        moves, kept = True, 1 << _CAP_DAC_READ_SEARCH
    try:
        _drop_bounding_set(kernel, kept)
        if moves:
            kernel.prctl(_PR_SET_KEEPCAPS, int(kept != 0))
            _become_another_user(policy, held, notes)
        elif is_root:
            notes.append("still root, without capabilities: other users cannot read what it needs")
        elif policy.processes:
            held["process_limit"] = _limit_tasks(os.getuid(), policy.task_limit)
        if os.geteuid() == 0:
            kept = 0
        _set_capabilities(kernel, kept)
        if kept:  # a program that takes this one's place keeps it too
            kernel.prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_RAISE, _CAP_DAC_READ_SEARCH)
        held["capabilities_dropped"] = True
    except OSError as error:
        notes.append(f"capabilities could not be dropped: {error.strerror}")
    held["unprivileged_uid"] = os.geteuid() != 0
    return held


_PRIVATE_UIDS = 0x70000000  # above any account; the process id is added, so that no two children share one
_NOBODY = 65_534


def _become_another_user(policy: Policy, held: dict[str, Any], notes: list[str]) -> None:
    choices = (_PRIVATE_UIDS + os.getpid(), _NOBODY) if policy.uid is None else (policy.uid,)
    for uid in choices:
        try:
            if policy.scratch is not None:
                os.chown(policy.scratch, uid, uid, follow_symlinks=False)
            if policy.processes or uid >= _PRIVATE_UIDS:  # threads are tasks too
                held["process_limit"] = _limit_tasks(uid, policy.task_limit) and policy.processes
            os.setgroups([])
            os.setresgid(uid, uid, uid)
            os.setresuid(uid, uid, uid)
        except OSError:
            continue  # a container maps few uids; the next choice may be among them
        return
    held["process_limit"] = False
    notes.append("still root, without capabilities: this container maps no other uid")


def _readable_by_others(policy: Policy, before_exec: bool) -> bool:
    needed = policy.readable if before_exec else (*interpreter_paths(), *policy.readable)
    paths = [path for path in needed if os.path.exists(path)]
    if not all(_open_to_others(path, stat.S_IROTH) for path in paths):
        return False
    return policy.scratch is None or _open_to_others(os.path.dirname(policy.scratch), stat.S_IXOTH)


def _open_to_others(path: str, needed: int) -> bool:
    try:
        for spelling in (Path(path), Path(path).resolve()):
            if not spelling.stat().st_mode & needed:
                return False
            if not all(folder.stat().st_mode & stat.S_IXOTH for folder in spelling.parents):
                return False
    except OSError:
        return False
    return True


def _limit_tasks(uid: int, allowance: int) -> bool:
    """Let `uid` have `allowance` tasks more than it has now: the kernel counts all of them, whoever started them."""
    present = 0
    for entry in os.listdir("/proc") if uid < _PRIVATE_UIDS else ():
        if not entry.isdigit():
            continue
        try:
            status = Path("/proc", entry, "status").read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue  # it ended meanwhile
        rows = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
        if rows["Uid"].split()[0] == str(uid):
            present += int(rows["Threads"])
    _lower_limit(resource.RLIMIT_NPROC, present + allowance)
    return True


def _has_capability(number: int) -> bool:
    status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    for line in status.splitlines():
        if line.startswith("CapPrm:"):
            return bool(int(line.split()[1], 16) >> number & 1)
    return False


def _drop_bounding_set(kernel: _Kernel, kept: int) -> None:
    for number in range(64):
        if kept >> number & 1:
            continue
        try:
            kernel.prctl(_PR_CAPBSET_DROP, number)
        except OSError as error:
            if error.errno in (errno.EINVAL, errno.EPERM):  # past the last one; or nothing to drop them with
                return
            raise


def _set_capabilities(kernel: _Kernel, kept: int) -> None:
    header = struct.pack("=Ii", _CAP_VERSION_3, 0)
    words = struct.pack("=6I", kept, kept, kept, 0, 0, 0)  # effective, permitted, inheritable; then the upper halves
    kernel.syscall("capset", ctypes.c_char_p(header), ctypes.c_char_p(words))


# --- system calls ----------------------------------------------------------------------------------------------


def _restrict_calls(
    kernel: _Kernel, machine: _Machine, policy: Policy, *, abi: int, before_exec: bool, notes: list[str]
) -> dict[str, Any]:
    program = _filter(machine, policy, abi=abi, before_exec=before_exec)
    code = ctypes.create_string_buffer(b"".join(program), 8 * len(program))
    descriptor = struct.pack("@HP", len(program), ctypes.addressof(code))
    try:
        try:
            kernel.syscall("seccomp", _SECCOMP_SET_MODE_FILTER, _SECCOMP_TSYNC, ctypes.c_char_p(descriptor))
        except OSError:  # older than Linux 3.17, or refused by a container: the older call does the same here
            pointer = ctypes.create_string_buffer(descriptor, len(descriptor))
            kernel.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.addressof(pointer))
    except OSError as error:
        notes.append(f"system calls are not filtered: {error.strerror}")
        return {}
    return {"seccomp": True, "network": not policy.network, "no_new_processes": not policy.processes}


def _filter(machine: _Machine, policy: Policy, *, abi: int, before_exec: bool) -> list[bytes]:
    """The program that decides each system call, as 8-byte instructions of classic BPF.

    It starts from what a kernel offers and takes away: numbers it does not know answer ENOSYS, known
    dangerous ones EPERM. `clone3` answers ENOSYS, because its flags lie in memory that a filter cannot
    see; the C library then uses `clone`, whose flags it can.
    """
    number, arch, first_argument = 0, 4, 16  # offsets in struct seccomp_data, little-endian
    refuse = _RET_ERRNO | errno.EPERM
    program = [
        _instruction(_LOAD, arch),
        _instruction(_JEQ, machine.audit, 1, 0),
        _instruction(_RET, _RET_KILL),
        _instruction(_LOAD, number),
    ]
    if machine.has_x32:
        program += [_instruction(_JGE, _X32_BIT, 0, 1), _instruction(_RET, _RET_KILL)]
    program += [_instruction(_JGE, _FIRST_UNKNOWN, 0, 1), _instruction(_RET, _RET_ERRNO | errno.ENOSYS)]

    for name, call in machine.calls.items():
        if name in _granted(policy, abi=abi, before_exec=before_exec):
            continue
        if name == "clone3":
            body = [_instruction(_RET, _RET_ERRNO | errno.ENOSYS)]
        elif name == "clone":
            body = [
                _instruction(_LOAD, first_argument),
                _instruction(_JSET, _CLONE_NAMESPACES, 1, 0),
                _instruction(_RET, _RET_ALLOW) if policy.processes else _instruction(_JSET, _CLONE_THREAD, 1, 0),
                _instruction(_RET, refuse),
                _instruction(_RET, _RET_ALLOW),
            ]
        elif (only := _only_first_argument(name, policy)) is not None:
            body = [
                _instruction(_LOAD, first_argument),
                _instruction(_JEQ, only, 1, 0),
                _instruction(_RET, refuse),
                _instruction(_RET, _RET_ALLOW),
            ]
        else:
            body = [_instruction(_RET, refuse)]
        program += [_instruction(_JEQ, call, 0, len(body)), *body]
    return [*program, _instruction(_RET, _RET_ALLOW)]


def _only_first_argument(name: str, policy: Policy) -> int | None:
    """The one first argument with which a call is let through, or None if it never is."""
    if name in _OWN_PID_ONLY:
        return os.getpid()
    if name in _ZERO_PID_ONLY:
        return 0
    if name == "socket" and policy.gpu:  # the CUDA driver looks for an MPS server and gives up without one
        return _AF_UNIX
    return None


def _granted(policy: Policy, *, abi: int, before_exec: bool) -> frozenset[str]:
    granted = set(_OWN_USE - {"capset"})
    if policy.network:
        granted.add("socket")
    if policy.processes:
        granted |= (_NEW_PROCESS - {"clone", "clone3"}) | _FOR_BUILDS | _SIGNALLING
    if policy.processes or policy.gpu:
        granted.add("memfd_create")  # memory that no address space limit counts
    if before_exec:
        granted.add("execve")
    if abi >= 3:
        granted.add("truncate")  # Landlock decides it
    return frozenset(granted)


def _instruction(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)
