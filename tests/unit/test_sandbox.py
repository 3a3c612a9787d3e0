import errno
import json
import os
import signal
import stat
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from optiml import errors, process, sandbox
from optiml.process import Worker
from optiml.sandbox import Layers, Policy

HERE = Path(__file__).parent
SOON_S = 20.0
linux = pytest.mark.skipif(sys.platform != "linux", reason="there is a sandbox on Linux only")


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    with Worker("worker_child", import_paths=[HERE]) as shared:
        yield shared


def attempt(worker: Worker, what: str, **details: str) -> int:
    return worker.call({"do": "attempt", "what": what, **details}, timeout_s=SOON_S)[0]["errno"]


def require(holds: bool, layer: str) -> None:
    if not holds:
        pytest.skip(f"this machine does not offer the layer: {layer}")


def test_a_policy_survives_json_and_refuses_a_field_it_does_not_have() -> None:
    policy = Policy(readable=("/a",), scratch="/b", processes=True, cpu_s=3, address_space_bytes=1 << 40, uid=7)
    assert Policy.from_json(policy.to_json()) == policy
    with pytest.raises(errors.InvalidInput, match="everything"):
        Policy.from_json({"everything": True})


def test_layers_survive_json() -> None:
    layers = Layers(landlock_abi=3, files=True, uid=5, notes=("one", "two"))
    assert Layers.from_json(layers.to_json()) == layers


@pytest.mark.parametrize(
    ("layers", "strong"),
    [
        (Layers(files=True, network=True, no_new_processes=True), True),
        (Layers(files=True, network=True, process_limit=True), True),
        (Layers(files=True, network=True), False),
        (Layers(files=True, no_new_processes=True), False),
        (Layers(network=True, no_new_processes=True), False),
        (Layers(), False),
    ],
)
def test_a_sandbox_is_strong_only_with_files_network_and_processes_all_held(layers: Layers, strong: bool) -> None:
    assert layers.strong is strong


def test_a_description_names_each_layer_and_each_gap() -> None:
    lines = Layers(files=True, landlock_abi=7, notes=("something is missing",)).describe()
    assert "yes files confined (Landlock ABI 7)" in lines
    assert "no  no network" in lines
    assert lines[-1] == "something is missing"


@linux
def test_files_outside_the_policy_cannot_be_read(worker: Worker, tmp_path: Path) -> None:
    require(worker.layers.files, "files")
    secret = tmp_path / "secret"
    secret.write_text("key")
    secret.chmod(0o644)
    for path in (
        "/etc/passwd",
        str(secret),
        str(Path.home()),
        f"/proc/{os.getpid()}/environ",
        "/proc/self/root/etc/passwd",
    ):
        what = "list" if os.path.isdir(path) else "read"
        assert attempt(worker, what, path=path) == errno.EACCES, path
    assert attempt(worker, "read", path=os.__file__) == 0


@linux
def test_only_the_scratch_folder_can_be_written(worker: Worker, tmp_path: Path) -> None:
    require(worker.layers.files, "files")
    assert attempt(worker, "write", path="inside") == 0
    assert attempt(worker, "make a link", path="link") == 0
    assert attempt(worker, "read", path="link") == errno.EACCES
    for path in (tmp_path / "outside", "/tmp/optiml-outside", Path(sandbox.__file__).with_name("outside.py")):
        assert attempt(worker, "write", path=str(path)) == errno.EACCES
        assert not Path(path).exists()


@linux
@pytest.mark.skipif(not sandbox._gpu_nodes(), reason="there is no GPU here to hide")
def test_gpu_device_nodes_cannot_be_opened(worker: Worker) -> None:
    require(worker.layers.gpu_hidden, "GPU hidden")
    for node in sandbox._gpu_nodes():
        assert attempt(worker, "read", path=node) in (errno.EACCES, errno.EPERM)


@linux
def test_named_paths_can_be_read_and_nothing_beside_them(tmp_path: Path) -> None:
    granted, beside = tmp_path / "granted", tmp_path / "beside"
    granted.mkdir()
    (granted / "file").write_text("x")
    beside.write_text("x")
    policy = Policy(readable=(str(granted), str(tmp_path / "absent")))
    with Worker("worker_child", import_paths=[HERE], policy=policy) as worker:
        require(worker.layers.files, "files")
        assert attempt(worker, "read", path=str(granted / "file")) == 0
        assert attempt(worker, "read", path=str(beside)) == errno.EACCES
        assert attempt(worker, "write", path=str(granted / "file")) == errno.EACCES


@linux
@pytest.mark.parametrize(
    "what",
    [
        "fork",
        "exec",
        "internet socket",
        "unix socket",
        "signal the parent",
        "limit the parent",
        "raise its limits",
        "become root",
        "new session",
        "ptrace",
        "bpf",
        "io_uring",
    ],
)
def test_a_worker_is_refused(worker: Worker, what: str) -> None:
    require(worker.layers.seccomp, "seccomp")
    if what == "become root":
        require(worker.layers.unprivileged_uid, "unprivileged uid")
    assert attempt(worker, what) in (errno.EPERM, errno.EACCES)


@linux
@pytest.mark.parametrize("what", ["start a thread", "socket pair", "signal itself", "lower its own limit"])
def test_a_worker_can_still(what: str) -> None:
    with Worker("worker_child", import_paths=[HERE]) as worker:
        assert attempt(worker, what) == 0


@linux
def test_the_newer_fork_call_seems_not_to_exist_so_that_the_c_library_uses_the_older_one(worker: Worker) -> None:
    require(worker.layers.seccomp, "seccomp")
    assert attempt(worker, "clone3") == errno.ENOSYS
    assert attempt(worker, "unassigned") == errno.ENOSYS


@linux
def test_modes_cannot_be_changed_since_landlock_does_not_see_that(worker: Worker, tmp_path: Path) -> None:
    require(worker.layers.seccomp, "seccomp")
    assert attempt(worker, "change a mode", path=str(tmp_path)) == errno.EPERM


@linux
def test_a_probe_says_what_a_worker_gets(worker: Worker) -> None:
    def without_uid(layers: Layers) -> dict[str, object]:
        return {**layers.to_json(), "uid": None}

    assert without_uid(process.probe()) == without_uid(worker.layers)


@linux
@pytest.mark.skipif(os.name != "posix" or os.geteuid() != 0, reason="only root can give up being root")
def test_a_child_of_root_is_not_root_and_keeps_no_capability_to_change_anything(worker: Worker) -> None:
    require(worker.layers.unprivileged_uid, "unprivileged uid")
    assert worker.layers.capabilities_dropped
    assert worker.call({"do": "facts"}, timeout_s=SOON_S)[0]["uid"] == worker.layers.uid != 0
    status = Path(f"/proc/{worker.pid}/status").read_text()
    masks = dict(line.split(":\t") for line in status.splitlines() if line.startswith("Cap"))
    read_only = 1 << 2  # CAP_DAC_READ_SEARCH, under Landlock, where the interpreter lies in a private folder
    assert {name: int(mask, 16) & ~read_only for name, mask in masks.items()} == dict.fromkeys(masks, 0)


# Runs SCRIPT as another kind of machine or user would: without Landlock, without privileges, or both.
ELSEWHERE = """
import ctypes, os, struct, sys
sys.path[:0] = [sys.argv[1], sys.argv[2]]
from optiml import sandbox
kernel = sandbox._Kernel(sandbox._machine())
if "user" in sys.argv[3:]:
    kept = int(sandbox._has_capability(2)) << 2
    kernel.prctl(sandbox._PR_SET_KEEPCAPS, 1)
    os.setgroups([])
    os.setresgid(65534, 65534, 65534)
    os.setresuid(65534, 65534, 65534)
    kernel.syscall("capset", ctypes.c_char_p(struct.pack("=Ii", sandbox._CAP_VERSION_3, 0)),
                   ctypes.c_char_p(struct.pack("=6I", kept, kept, kept, 0, 0, 0)))
    if kept:
        kernel.prctl(sandbox._PR_CAP_AMBIENT, sandbox._PR_CAP_AMBIENT_RAISE, 2)
kernel.prctl(sandbox._PR_SET_NO_NEW_PRIVS, 1)
missing = []
if "no landlock" in sys.argv[3:]:
    missing += [444]
if "no unshare" in sys.argv[3:]:
    missing += [sandbox._machine().calls["unshare"]]
if "no seccomp" in sys.argv[3:]:
    missing += [sandbox._machine().calls["seccomp"]]
program = [sandbox._instruction(sandbox._LOAD, 0)]
for number in missing:
    program += [sandbox._instruction(sandbox._JEQ, number, 0, 1), sandbox._instruction(sandbox._RET, 0x50000 | 38)]
program += [sandbox._instruction(sandbox._RET, sandbox._RET_ALLOW)]
code = ctypes.create_string_buffer(b"".join(program))
descriptor = ctypes.create_string_buffer(struct.pack("@HP", len(program), ctypes.addressof(code)))
kernel.prctl(sandbox._PR_SET_SECCOMP, sandbox._SECCOMP_MODE_FILTER, ctypes.addressof(descriptor))
os.environ["TMPDIR"] = "/tmp"
import json
from optiml.process import Worker, run
from optiml.sandbox import Policy
with Worker("worker_child", import_paths=[sys.argv[2]]) as worker:
    echo = worker.call({"do": "echo"}, timeout_s=20)[0]
    fork = worker.call({"do": "attempt", "what": "fork"}, timeout_s=20)[0]["errno"]
    layers = worker.layers.to_json() | {"strong": worker.layers.strong}
finished = run(["sh", "-c", "sleep 1000 & echo out"], policy=Policy(processes=True), timeout_s=20)
print(json.dumps({"echo": echo, "fork": fork, "layers": layers, "stdout": finished.stdout.decode()}))
"""


@linux
@pytest.mark.parametrize(
    ("conditions", "expected"),
    [
        (["user"], {"unprivileged_uid": True, "network_namespace": False, "network": True, "no_new_processes": True}),
        (["user", "no landlock"], {"files": False, "strong": False, "network": True, "no_new_processes": True}),
        (["no landlock"], {"files": False, "strong": False, "network": True, "capabilities_dropped": True}),
        (["no unshare", "no seccomp"], {"network_namespace": False, "network": True, "no_new_processes": True}),
    ],
    ids=", ".join,
)
def test_with_less_on_offer_everything_works_and_says_what_is_missing(
    tmp_path: Path, conditions: list[str], expected: dict[str, bool]
) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can try what another user gets")
    if not sandbox._has_capability(2) and not sandbox._readable_by_others(Policy(), before_exec=False):
        pytest.skip("another user could not run this interpreter")
    if "user" in conditions and not sandbox._open_to_others(str(HERE), stat.S_IROTH):
        pytest.skip("another user could not read this project: a user of its own would")
    script = tmp_path / "elsewhere.py"
    script.write_text(ELSEWHERE)
    done = subprocess.run(
        [sys.executable, script, HERE.parent.parent, HERE, *conditions], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert (answer["echo"], answer["fork"], answer["stdout"]) == ({"do": "echo"}, errno.EPERM, "out\n")
    assert {name: answer["layers"][name] for name in expected} == expected
    assert any("Landlock" in note for note in answer["layers"]["notes"]) == ("no landlock" in conditions)


def decide(program: list[bytes], machine: sandbox._Machine, call: int, first: int = 0) -> int:
    """Carry out a filter as the kernel does: the action for one system call."""
    data = struct.pack("<iIQ6Q", call, machine.audit, 0, first, 0, 0, 0, 0, 0)
    position = accumulator = 0
    while True:
        code, if_true, if_false, value = struct.unpack("=HBBI", program[position])
        position += 1
        if code == sandbox._LOAD:
            (accumulator,) = struct.unpack_from("<I", data, value)
        elif code == sandbox._RET:
            return value
        else:
            holds = {
                sandbox._JEQ: accumulator == value,
                sandbox._JGE: accumulator >= value,
                sandbox._JSET: bool(accumulator & value),
            }[code]
            position += if_true if holds else if_false


REFUSED, MISSING = 0x00050000 | errno.EPERM, 0x00050000 | errno.ENOSYS
ALLOWED, KILLED = 0x7FFF0000, 0x80000000
THREAD, NEW_USER, SIGNAL = 0x003D0F00, 0x10000000, int(getattr(signal, "SIGCHLD", 17))
MACHINES = {
    "x86_64": sandbox._Machine(
        audit=0xC000003E, has_x32=True, calls={k: v[0] for k, v in sandbox._CALLS.items() if v[0] is not None}
    ),
    "aarch64": sandbox._Machine(
        audit=0xC00000B7, has_x32=False, calls={k: v[1] for k, v in sandbox._CALLS.items() if v[1] is not None}
    ),
}


@pytest.mark.parametrize("name", MACHINES)
def test_the_filter_lets_threads_start_and_processes_only_where_allowed(name: str) -> None:
    machine = MACHINES[name]
    clone = machine.calls["clone"]
    worker = sandbox._filter(machine, Policy(), abi=7, before_exec=False)
    assert decide(worker, machine, clone, THREAD) == ALLOWED
    assert decide(worker, machine, clone, SIGNAL) == REFUSED
    assert decide(worker, machine, machine.calls["execve"]) == REFUSED
    builder = sandbox._filter(machine, Policy(processes=True), abi=7, before_exec=True)
    assert decide(builder, machine, clone, SIGNAL) == ALLOWED
    assert decide(builder, machine, clone, SIGNAL | NEW_USER) == REFUSED
    assert decide(builder, machine, machine.calls["execve"]) == ALLOWED
    for program in (worker, builder):
        assert decide(program, machine, machine.calls["clone3"]) == MISSING
        assert decide(program, machine, machine.calls["setsid"]) == REFUSED


@pytest.mark.parametrize("name", MACHINES)
def test_the_filter_refuses_every_call_it_lists_unless_the_policy_grants_it(name: str) -> None:
    machine = MACHINES[name]
    program = sandbox._filter(machine, Policy(), abi=7, before_exec=False)
    conditional = {"clone", "clone3", "truncate", "seccomp"} | {n for n in machine.calls if n.startswith("landlock")}
    for call in set(machine.calls) - conditional:
        assert decide(program, machine, machine.calls[call], first=12345) == REFUSED, call
    networked = sandbox._filter(machine, Policy(network=True), abi=7, before_exec=False)
    assert decide(networked, machine, machine.calls["socket"]) == ALLOWED
    with_gpu = sandbox._filter(machine, Policy(gpu=True), abi=7, before_exec=False)
    assert [decide(with_gpu, machine, machine.calls["socket"], first=family) for family in (1, 2)] == [ALLOWED, REFUSED]
    without_landlock = sandbox._filter(machine, Policy(), abi=0, before_exec=False)
    assert decide(without_landlock, machine, machine.calls["truncate"]) == REFUSED


@pytest.mark.parametrize("name", MACHINES)
def test_the_filter_allows_ordinary_calls_and_kills_foreign_architectures(name: str) -> None:
    machine = MACHINES[name]
    program = sandbox._filter(machine, Policy(), abi=7, before_exec=False)
    ordinary = {"x86_64": (0, 1, 9, 202, 257), "aarch64": (63, 64, 222, 98, 56)}[name]  # read write mmap futex openat
    assert {decide(program, machine, call) for call in ordinary} == {ALLOWED}
    assert decide(program, machine, machine.calls["prlimit64"], first=0) == ALLOWED
    assert decide(program, machine, machine.calls["kill"], first=os.getpid()) == ALLOWED
    other = MACHINES["aarch64" if name == "x86_64" else "x86_64"]
    assert decide(program, other, 0) == KILLED
    if name == "x86_64":
        assert decide(program, machine, 0x40000000) == KILLED
    assert decide(program, machine, 5000) == MISSING
