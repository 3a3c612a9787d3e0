import contextlib
import fcntl
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from optiml import errors, process
from optiml.process import Worker, run
from optiml.sandbox import Policy
from optiml.scratch import ScratchFolders, remove_folder

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="children are sandboxed on Linux only")

HERE = Path(__file__).parent
SOON_S = 20.0  # far above what anything here needs, so that only a hang reaches it
PROCESSES = Policy(processes=True)


def new_worker(policy: Policy | None = None, **options: object) -> Worker:
    return Worker("worker_child", policy=policy, import_paths=[HERE], **options)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    with new_worker() as shared:
        yield shared


def ends(pid: int) -> bool:
    """Wait for the end of a process that need not be our child."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([descriptor], [], [], SOON_S)[0])
    finally:
        os.close(descriptor)


def test_a_call_brings_header_and_blobs_to_the_handler_and_its_answer_back(worker: Worker) -> None:
    values = np.arange(1_000_000, dtype=np.float32)
    header, blobs = worker.call({"do": "echo", "n": 1}, [values, b"", b"abc"], timeout_s=SOON_S)
    assert header == {"do": "echo", "n": 1}
    assert np.array_equal(np.frombuffer(blobs[0], dtype=np.float32), values)
    assert [bytes(blob) for blob in blobs[1:]] == [b"", b"abc"]


@pytest.mark.skipif(not Path("/proc/self/autogroup").exists(), reason="the kernel weighs no sessions here")
def test_a_nice_worker_lets_other_sessions_go_first_too() -> None:
    with new_worker(niceness=3) as nice:
        nice.call({"do": "echo"}, timeout_s=SOON_S)
        assert nice.pid is not None
        assert os.getpriority(os.PRIO_PROCESS, nice.pid) == 3 + os.nice(0)
        assert Path(f"/proc/{nice.pid}/autogroup").read_text().split()[-1] == str(3 + os.nice(0))


def test_a_handler_may_ask_its_parent_while_it_works(worker: Worker) -> None:
    answer, _ = worker.call(
        {"do": "ask", "questions": 3}, timeout_s=SOON_S, on_question=lambda asked: {"twice": 2 * asked["number"]}
    )
    assert answer == {"told": [0, 2, 4]}


def test_a_question_that_nobody_expects_ends_the_child(worker: Worker) -> None:
    with pytest.raises(errors.WorkerDied, match="not an answer"):
        worker.call({"do": "ask", "questions": 1}, timeout_s=SOON_S)


def test_a_worker_stays_warm_between_calls(worker: Worker) -> None:
    pids = {worker.call({"do": "facts"}, timeout_s=SOON_S)[0]["pid"] for _ in range(3)}
    assert pids == {worker.pid}


def test_calls_from_many_threads_each_get_their_own_answer(worker: Worker) -> None:
    def ask(number: int) -> int:
        return worker.call({"do": "echo", "n": number}, timeout_s=SOON_S)[0]["n"]

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(ask, range(64))) == list(range(64))


def test_a_child_outlives_the_thread_that_first_called_it() -> None:
    with new_worker() as worker, ThreadPoolExecutor(1) as pool:
        first = pool.submit(worker.call, {"do": "facts"}, timeout_s=SOON_S).result()[0]["pid"]
        pool.shutdown()
        assert worker.call({"do": "facts"}, timeout_s=SOON_S)[0]["pid"] == first


def test_a_child_that_never_answers_is_killed_and_the_next_call_gets_a_fresh_one() -> None:
    with new_worker() as worker:
        first = worker.call({"do": "facts"}, timeout_s=SOON_S)[0]["pid"]
        with pytest.raises(errors.WorkerTimeout, match=r"within 0\.05 s"):
            worker.call({"do": "hang"}, timeout_s=0.05)
        assert ends(first)
        assert worker.call({"do": "facts"}, timeout_s=SOON_S)[0]["pid"] != first


def test_the_time_to_start_is_not_part_of_a_call() -> None:
    with new_worker() as worker:
        assert worker.call({"do": "echo"}, timeout_s=0.05)[0] == {"do": "echo"}


def test_a_crash_is_reported_with_its_signal() -> None:
    with new_worker() as worker:
        with pytest.raises(errors.WorkerDied, match="SIGSEGV") as caught:
            worker.call({"do": "crash"}, timeout_s=SOON_S)
        assert (caught.value.signal, caught.value.exit_code) == (signal.SIGSEGV, None)
        assert worker.call({"do": "echo"}, timeout_s=SOON_S)[0] == {"do": "echo"}


@pytest.mark.parametrize("policy", [Policy(), PROCESSES], ids=["alone", "guarded"])
def test_an_exit_is_reported_with_its_code_and_last_words(policy: Policy) -> None:
    with new_worker(policy) as worker, pytest.raises(errors.WorkerDied, match="exit code 3") as caught:
        worker.call({"do": "leave"}, timeout_s=SOON_S)
    assert caught.value.exit_code == 3
    assert caught.value.stderr_tail == "last words"


def test_a_bug_in_the_handler_ends_the_child_and_its_traceback_stays_out_of_the_message() -> None:
    with new_worker() as worker, pytest.raises(errors.WorkerDied) as caught:
        worker.call({"do": "fail"}, timeout_s=SOON_S)
    assert caught.value.exit_code == 1
    assert "a bug in the handler" in caught.value.stderr_tail
    assert "bug" not in str(caught.value)


def test_a_handler_that_leaves_the_interpreter_is_reported_with_its_code() -> None:
    with new_worker() as worker, pytest.raises(errors.WorkerDied) as caught:
        worker.call({"do": "exit_politely"}, timeout_s=SOON_S)
    assert caught.value.exit_code == 5


def test_a_child_inherits_no_descriptor_but_its_own(worker: Worker, tmp_path: Path) -> None:
    with (tmp_path / "open in the parent").open("w") as file:
        os.set_inheritable(file.fileno(), True)
        with new_worker() as fresh:
            kinds = fresh.call({"do": "descriptors"}, timeout_s=SOON_S)[0]["open"]
    assert kinds == ["character device", "pipe", "pipe", "socket"]


def test_a_kernel_fault_crosses_with_everything_it_knows(worker: Worker) -> None:
    with pytest.raises(errors.KernelFault) as caught:
        worker.call({"do": "raise_error", "kind": "KernelFault"}, timeout_s=SOON_S)
    other = errors.OtherParty(block=(1, 0, 0), thread=(3, 0, 0), line=None)
    assert caught.value.fault == errors.Fault(
        kind="race", access="write", bytes=4, address=64, block=(1, 0, 0), thread=(2, 0, 0), line=7, detail="d",
        other=other,
    )  # fmt: skip


def test_an_unsupported_feature_crosses_with_its_line(worker: Worker) -> None:
    with pytest.raises(errors.Unsupported) as caught:
        worker.call({"do": "raise_error", "kind": "Unsupported"}, timeout_s=SOON_S)
    assert (caught.value.feature, caught.value.line) == ("wgmma", 12)


@pytest.mark.parametrize(
    ("name", "kind", "message", "code"),
    [
        ("InvalidInput", errors.InvalidInput, "too long", "too_large"),
        ("SetupError", errors.SetupError, "no GPU", "no_device"),
        ("NotAccepted", errors.NotAccepted, "it is wrong", "not_accepted"),
        ("ToolFailed", errors.ToolFailed, "nvcc broke", "tool_failed"),
        ("PtxSyntaxError", errors.PtxSyntaxError, "line 3: not PTX", "invalid_params"),
        ("Subclass", errors.ToolFailed, "from elsewhere", "tool_failed"),
    ],
)
def test_an_error_of_ours_is_raised_again_in_the_parent(
    worker: Worker, name: str, kind: type[errors.OptimlError], message: str, code: str
) -> None:
    worker.call({"do": "echo"}, timeout_s=SOON_S)
    before = worker.pid
    with pytest.raises(kind, match=message) as caught:
        worker.call({"do": "raise_error", "kind": name}, timeout_s=SOON_S)
    assert type(caught.value) is kind
    assert caught.value.code == code
    assert worker.pid == before


@pytest.mark.parametrize("trick", ["send_garbage", "send_malformed_error", "answer_a_later_call_now"])
def test_a_child_that_breaks_the_protocol_is_killed(trick: str) -> None:
    with new_worker() as worker:
        with pytest.raises(errors.WorkerDied, match="not an answer"):
            worker.call({"do": trick}, timeout_s=SOON_S)
        assert worker.call({"do": "echo"}, timeout_s=SOON_S)[0] == {"do": "echo"}


def test_a_header_that_is_not_json_is_refused_and_the_child_lives_on(worker: Worker) -> None:
    worker.call({"do": "echo"}, timeout_s=SOON_S)
    before = worker.pid
    with pytest.raises(errors.ToolFailed, match="not JSON"):
        worker.call({"do": "echo", "x": float("nan")}, timeout_s=SOON_S)
    with pytest.raises(errors.ToolFailed, match="not JSON"):
        worker.call({"do": "send_nan"}, timeout_s=SOON_S)
    assert worker.pid == before


def test_output_on_stdout_is_no_part_of_an_answer_and_only_its_end_is_kept(capfd: pytest.CaptureFixture[str]) -> None:
    with new_worker() as worker:
        assert worker.call({"do": "flood", "lines": 500}, timeout_s=SOON_S)[0] == {"done": True}
        with pytest.raises(errors.WorkerDied) as caught:
            worker.call({"do": "leave"}, timeout_s=SOON_S)
    assert len(caught.value.stderr_tail) == 64 << 10
    assert caught.value.stderr_tail.endswith("last words")
    assert capfd.readouterr() == ("", "")


def test_a_child_that_only_floods_its_stdout_times_out() -> None:
    with new_worker() as worker, pytest.raises(errors.WorkerTimeout):
        worker.call({"do": "flood_for_ever"}, timeout_s=0.1)


def test_memory_beyond_the_limit_ends_the_child_as_out_of_memory() -> None:
    with new_worker(Policy(address_space_bytes=512 << 20)) as worker:
        with pytest.raises(errors.WorkerDied, match="out of memory") as caught:
            worker.call({"do": "allocate", "bytes": 1 << 30}, timeout_s=SOON_S)
        assert caught.value.out_of_memory
        assert worker.call({"do": "allocate", "bytes": 1 << 20}, timeout_s=SOON_S)[0] == {"bytes": 1 << 20}


def test_cpu_time_beyond_the_limit_ends_the_child() -> None:
    with new_worker(Policy(cpu_s=0)) as worker, pytest.raises(errors.WorkerDied, match="SIGXCPU"):
        worker.call({"do": "spin"}, timeout_s=SOON_S)


def test_a_running_call_can_be_cancelled_from_another_thread() -> None:
    with new_worker() as worker, ThreadPoolExecutor(1) as pool:
        pid = worker.call({"do": "facts"}, timeout_s=SOON_S)[0]["pid"]
        pending = pool.submit(worker.call, {"do": "hang"}, timeout_s=SOON_S)
        while not worker.cancel():
            pass
        with pytest.raises(errors.WorkerDied, match="cancelled") as caught:
            pending.result()
        assert caught.value.cancelled
        assert ends(pid)
        assert worker.call({"do": "echo"}, timeout_s=SOON_S)[0] == {"do": "echo"}


def test_cancelling_when_no_call_runs_leaves_the_child_warm(worker: Worker) -> None:
    worker.call({"do": "echo"}, timeout_s=SOON_S)
    before = worker.pid
    assert not worker.cancel()
    worker.call({"do": "echo"}, timeout_s=SOON_S)
    assert worker.pid == before


def test_a_cancel_that_comes_as_the_answer_does_spares_the_next_call(monkeypatch: pytest.MonkeyPatch) -> None:
    with new_worker() as worker:
        worker.call({"do": "echo"}, timeout_s=SOON_S)
        first = worker.pid
        assert worker._child is not None
        receive = worker._child.channel.receive

        def receive_then_cancel(**options: float) -> object:
            answer = receive(**options)
            assert worker.cancel()
            return answer

        monkeypatch.setattr(worker._child.channel, "receive", receive_then_cancel)
        assert worker.call({"do": "echo", "n": 1}, timeout_s=SOON_S)[0]["n"] == 1
        assert worker.call({"do": "echo", "n": 2}, timeout_s=SOON_S)[0]["n"] == 2
        assert worker.pid != first


def test_a_child_killed_from_outside_between_calls_is_replaced() -> None:
    with new_worker() as worker:
        first = worker.call({"do": "facts"}, timeout_s=SOON_S)[0]["pid"]
        os.kill(first, signal.SIGKILL)
        assert ends(first)
        assert worker.call({"do": "facts"}, timeout_s=SOON_S)[0]["pid"] != first


def test_closing_ends_the_child_and_removes_its_scratch_folder() -> None:
    worker = new_worker()
    facts = worker.call({"do": "facts"}, timeout_s=SOON_S)[0]
    assert Path(facts["folder"]).is_dir()
    worker.close()
    assert ends(facts["pid"])
    assert not Path(facts["folder"]).exists()


def test_a_forgotten_worker_takes_its_child_along() -> None:
    worker = new_worker()
    pid = worker.call({"do": "facts"}, timeout_s=SOON_S)[0]["pid"]
    del worker
    assert ends(pid)


def test_a_module_that_cannot_be_imported_is_a_death_at_the_start() -> None:
    with Worker("optiml.no_such_module") as worker, pytest.raises(errors.WorkerDied) as caught:
        worker.call({}, timeout_s=SOON_S)
    assert "no_such_module" in caught.value.stderr_tail


def test_the_environment_of_the_parent_stays_with_the_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OPENAI_API_KEY", "NVCC_APPEND_FLAGS", "PYTHONPATH", "LD_PRELOAD_X", "OPTIML_HOME"):
        monkeypatch.setenv(name, "secret")
    with new_worker(environment={"GIVEN": "1", "OMP_NUM_THREADS": "1"}) as worker:
        facts = worker.call({"do": "facts"}, timeout_s=SOON_S)[0]
    names = {"PATH", "LANG", "LC_ALL", "HOME", "TMPDIR", "GIVEN", "LD_LIBRARY_PATH"}
    threads = {"OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"}
    assert set(facts["environment"]) | {"LD_LIBRARY_PATH"} == names | threads
    assert (facts["environment"]["GIVEN"], facts["environment"]["OMP_NUM_THREADS"]) == ("1", "1")
    assert facts["environment"]["HOME"] == facts["environment"]["TMPDIR"] == facts["folder"]


PARENT = """
import sys, threading
from optiml.process import Worker, run
from optiml.sandbox import Policy
worker = Worker("worker_child", import_paths=[sys.argv[1]])
print(worker.call({"do": "facts"}, timeout_s=20)[0]["pid"], flush=True)
script = "sleep 1000 & echo $$ $! > told; wait"
run(["sh", "-c", script], policy=Policy(processes=True, scratch=sys.argv[2]), timeout_s=1000)
"""


def test_kill_minus_nine_of_the_parent_leaves_neither_child_nor_grandchild(tmp_path: Path) -> None:
    scratch = Path(tempfile.mkdtemp())
    os.mkfifo(scratch / "told", 0o666)
    (scratch / "told").chmod(0o666)
    (tmp_path / "parent.py").write_text(PARENT)
    parent = subprocess.Popen(
        [sys.executable, tmp_path / "parent.py", HERE, scratch],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(HERE.parent.parent), "TMPDIR": str(tmp_path)},
    )
    with parent:
        assert parent.stdout is not None
        worker = int(parent.stdout.readline())
        shell, sleeper = map(int, (scratch / "told").read_text().split())
        parent.kill()
    assert [ends(pid) for pid in (worker, shell, sleeper)] == [True, True, True]
    remove_folder(str(scratch))


def test_a_scratch_folder_of_a_dead_parent_is_swept_and_that_of_a_living_one_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    dead, living, fresh = (tmp_path / f"optiml-scratch-{name}" for name in ("dead", "living", "fresh"))
    for folder in (dead, living, fresh):
        folder.mkdir()
    (dead / "lock").touch()
    (dead / "left over").mkdir(mode=0)
    with (living / "lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        ScratchFolders().new()
    assert not dead.exists()
    assert living.exists()
    assert fresh.exists()


# --- outside programs ---


def test_a_program_is_run_with_its_arguments_and_no_shell() -> None:
    finished = run(["printf", "%s|", "a b", "$HOME", ";id"], policy=Policy(), timeout_s=SOON_S)
    assert (finished.exit_code, finished.stdout, finished.stderr) == (0, b"a b|$HOME|;id|", b"")
    assert not finished.truncated


def test_exit_codes_and_signals_of_a_program_are_told_apart() -> None:
    assert run(["sh", "-c", "exit 7"], policy=Policy(), timeout_s=SOON_S).exit_code == 7
    assert run(["sh", "-c", "kill -ABRT $$"], policy=PROCESSES, timeout_s=SOON_S).exit_code == -signal.SIGABRT


def test_a_program_gets_its_stdin_whole_and_both_outputs_are_drained() -> None:
    text = b"0123456789" * 200_000
    script = "cat; echo problem >&2"
    finished = run(["sh", "-c", script], policy=PROCESSES, timeout_s=SOON_S, stdin=text, output_cap_bytes=4 << 20)
    assert finished.stdout == text
    assert finished.stderr == b"problem\n"


def test_a_program_that_has_said_enough_is_ended() -> None:
    script = "echo first; echo second; exec sleep 1000"
    finished = run(
        ["sh", "-c", script], policy=PROCESSES, timeout_s=SOON_S, enough=lambda output: b"second" in output
    )  # fmt: skip
    assert finished.stdout == b"first\nsecond\n"
    assert finished.exit_code != 0


def test_output_beyond_the_cap_is_dropped_and_said_to_be() -> None:
    finished = run(["head", "-c", "3000000", "/dev/zero"], policy=Policy(), timeout_s=SOON_S, output_cap_bytes=1000)
    assert (len(finished.stdout), finished.truncated, finished.exit_code) == (1000, True, 0)


def test_what_a_program_leaves_running_ends_with_it(tmp_path: Path) -> None:
    finished = run(["sh", "-c", "sleep 1000 & echo $!"], policy=PROCESSES, timeout_s=SOON_S)
    assert finished.exit_code == 0
    assert ends(int(finished.stdout))


def fifo_folder() -> Path:
    folder = Path(tempfile.mkdtemp())
    os.mkfifo(folder / "told")
    (folder / "told").chmod(0o666)
    return folder


@pytest.mark.parametrize("how", ["timeout", "cancel"])
def test_a_program_that_is_stopped_takes_its_whole_group_along(how: str) -> None:
    folder = fifo_folder()
    stop = threading.Event()
    argv = ["sh", "-c", "sleep 1000 & echo $$ $! > told; wait"]
    policy = Policy(processes=True, scratch=str(folder))
    with ThreadPoolExecutor(1) as pool:
        pending = pool.submit(run, argv, policy=policy, timeout_s=2 if how == "timeout" else 1000, cancelled=stop)
        pids = [int(pid) for pid in (folder / "told").read_text().split()]
        if how == "cancel":
            stop.set()
        with pytest.raises(errors.WorkerTimeout if how == "timeout" else errors.WorkerDied):
            pending.result()
    assert [ends(pid) for pid in pids] == [True, True]
    remove_folder(str(folder))


@pytest.mark.skipif(shutil.which("setsid") is None, reason="needs setsid of util-linux")
def test_a_program_cannot_leave_its_process_group() -> None:
    finished = run(["setsid", "sleep", "1000"], policy=PROCESSES, timeout_s=SOON_S)
    assert finished.exit_code != 0


def test_a_program_that_may_not_start_others_fails_to() -> None:
    finished = run(["sh", "-c", "sleep 0 & wait"], policy=Policy(), timeout_s=SOON_S)
    assert finished.exit_code != 0
    assert b"fork" in finished.stderr


def test_a_fork_bomb_is_bounded() -> None:
    layers = process.probe(PROCESSES)
    if not layers.process_limit:
        pytest.skip("this machine cannot bound the processes of a child")
    script = "import os\nn = 0\ntry:\n    while os.fork(): n += 1\nexcept OSError:\n    print(n, flush=True)\n"
    policy = Policy(processes=True, task_limit=16, readable=process.sandbox.interpreter_paths())
    finished = run([sys.executable, "-I", "-c", script], policy=policy, timeout_s=SOON_S)
    assert 0 < max(map(int, finished.stdout.split())) <= 16


def test_a_program_sees_none_of_our_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVCC_APPEND_FLAGS", "-o /somewhere")
    monkeypatch.setenv("LD_LIBRARY_PATH", "/somewhere")
    names = {line.split(b"=")[0] for line in run(["env"], policy=Policy(), timeout_s=SOON_S).stdout.splitlines()}
    assert names == {b"PATH", b"LANG", b"LC_ALL", b"HOME", b"TMPDIR"}


def test_a_file_size_limit_stops_a_program_that_fills_the_disk() -> None:
    policy = Policy(file_size_bytes=10_000)
    finished = run(["head", "-c", "20000", "/dev/zero"], policy=policy, timeout_s=SOON_S)
    assert finished.exit_code == 0  # a pipe is no file
    finished = run(["sh", "-c", "exec head -c 20000 /dev/zero > big"], policy=policy, timeout_s=SOON_S)
    assert finished.exit_code == -signal.SIGXFSZ


def test_the_working_folder_of_a_program_is_its_scratch_folder_and_what_it_wrote_stays_there() -> None:
    folder = tempfile.mkdtemp()
    finished = run(["sh", "-c", "pwd; echo made > output"], policy=Policy(scratch=folder), timeout_s=SOON_S)
    assert finished.stdout.decode().strip() == folder
    assert Path(folder, "output").read_text() == "made\n"
    remove_folder(folder)


def test_a_program_that_does_not_exist_is_a_failed_tool() -> None:
    with pytest.raises(errors.ToolFailed, match="no-such-program"):
        run(["no-such-program"], policy=Policy(), timeout_s=SOON_S)
    with pytest.raises(errors.ToolFailed, match="NUL"):
        run(["printf", "a\0b"], policy=Policy(), timeout_s=SOON_S)


def test_serving_outside_a_worker_is_refused() -> None:
    with pytest.raises(errors.SetupError):
        process.serve(lambda header, blobs: (header, blobs))


def test_no_descriptor_is_left_open_by_a_closed_worker_or_a_finished_program() -> None:
    def descriptors() -> set[str]:
        return set(os.listdir("/proc/self/fd"))

    def use_both() -> None:
        with new_worker() as worker:
            worker.call({"do": "echo"}, timeout_s=SOON_S)
            with contextlib.suppress(errors.WorkerDied):
                worker.call({"do": "leave"}, timeout_s=SOON_S)
        run(["true"], policy=Policy(), timeout_s=SOON_S, stdin=b"unread")

    use_both()  # opens what stays open for the life of the process
    before = descriptors()
    use_both()
    assert descriptors() == before
