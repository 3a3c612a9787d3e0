"""Children: warm workers of our own code, and outside programs. The only importer of `subprocess`.

Every child starts as a Python interpreter that runs `child` below: it ties its life to ours, takes its
`Policy` from a private socket, locks itself in (`sandbox.apply`) while it has one thread, and only then
imports a worker module or becomes the outside program. The parent never runs anything untrusted, reads
answers from that socket alone, and ends a child by killing its whole process group.

Where processes are allowed a small guard stays between the child and us: it kills the group when we die,
which the kernel does only for our direct children.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import runpy
import select
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from optiml import sandbox
from optiml.errors import OptimlError, SetupError, ToolFailed, WorkerDied, WorkerTimeout
from optiml.frames import FRAME_LIMIT_BYTES, Channel, FrameError, Unsendable, decode_error, encode_error
from optiml.sandbox import Layers, Policy
from optiml.scratch import ScratchFolders, remove_folder

if TYPE_CHECKING:
    from typing_extensions import Buffer

Handler = Callable[[dict[str, Any], list[memoryview]], "tuple[dict[str, Any], Sequence[Buffer]]"]

_LOG = logging.getLogger(__name__)
_TAIL_BYTES = 64 << 10  # kept of what a worker writes to its stdout and stderr
_OUT_OF_MEMORY = 71  # exit code by which a child says so
_END_TIMEOUT_S = 10.0  # for the kernel to take a killed process down; a GPU driver may be slow
_PROBE_TIMEOUT_S = 60.0
_POLL_S = 0.05  # how often a cancelled program is noticed
_PIPE_BYTES = 64 << 10
_LIBRARY_THREADS = 4  # each thread of a numeric library reserves tens of MB, which counts as address space

_BOOT = (
    "import sys; root, niceness = sys.argv[1:3]; sys.path.insert(0, root); "
    "from optiml.niceness import be_nice; be_nice(int(niceness)); "  # before the imports that take long
    "from optiml.process import child; sys.path.remove(root); sys.path.append(root); child()"
)


# --- the parent: workers ---------------------------------------------------------------------------------------


class Worker:
    """A warm child that answers calls, one at a time; it is started on demand and again after it died.

    Args:
        module: dotted name of our own module; run as a script in the child, it must end in `serve(handler)`.
        policy: what the child may do; its `scratch` is filled in with a fresh private folder per child.
        environment: variables added to the few that a child gets.
        import_paths: folders where the child also finds modules, which makes them readable.
        start_timeout_s: for the interpreter and the imports of `module`; not part of a call's time.
        frame_limit_bytes: largest message in either direction.
        niceness: how much further than we do the child, and all that it starts, lets others go first.
    """

    def __init__(
        self,
        module: str,
        *,
        policy: Policy | None = None,
        environment: Mapping[str, str] | None = None,
        import_paths: Sequence[str | os.PathLike[str]] = (),
        start_timeout_s: float = 60.0,
        frame_limit_bytes: int = FRAME_LIMIT_BYTES,
        niceness: int = 0,
    ) -> None:
        paths = tuple(os.path.abspath(path) for path in import_paths)
        policy = policy or Policy()
        self._module = module
        self._policy = replace(policy, readable=(*policy.readable, *paths))
        self._environment = dict(environment or {})
        self._import_paths = paths
        self._start_timeout_s = start_timeout_s
        self._frame_limit_bytes = frame_limit_bytes
        self._niceness = niceness
        self._one_call = threading.Lock()
        self._state = threading.Lock()  # guards the three below
        self._child: _Child | None = None
        self._calling = False
        self._cancelled = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def layers(self) -> Layers:
        """Which parts of the policy hold in the child; starts one if none was started yet.

        Raises:
            WorkerDied, WorkerTimeout, SetupError: as `call`.
        """
        with self._state:
            if self._child is not None and self._child.layers is not None:
                return self._child.layers
        with self._one_call, self._call_in_progress():
            layers = self._started().layers
        assert layers is not None
        return layers

    @property
    def pid(self) -> int | None:
        """Process id of the running child and of its process group, or None."""
        with self._state:
            return None if self._child is None else self._child.pid

    def call(
        self,
        header: dict[str, Any],
        blobs: Iterable[Buffer] = (),
        *,
        timeout_s: float,
        on_question: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
    ) -> tuple[dict[str, Any], list[memoryview]]:
        """Let the handler in the child answer one message.

        Args:
            header: a JSON object.
            blobs: arrays or bytes, sent from where they are.
            timeout_s: from the moment the child is ready; sending and receiving count.
            on_question: answers what the handler asks while it works (`ask`); without it a question is an error.

        Returns:
            The handler's header, and its blobs as writable memoryviews of bytes.

        Raises:
            WorkerTimeout: no answer in time; the process group is dead.
            WorkerDied: the child ended, was cancelled, or sent something that is not an answer.
            Unsendable: `header` is not JSON or the message is too large; the child lives on.
            SetupError: no child can be started here.
            OptimlError: whatever the handler raised of that family; the child lives on.
        """
        blobs = tuple(blobs)
        with self._one_call, self._call_in_progress():
            child = self._started()
            ticket = os.urandom(8).hex()
            deadline = time.monotonic() + timeout_s
            with self._ends_child_on_failure(child, limit_s=timeout_s):
                child.channel.send({"ticket": ticket, "header": header}, blobs, deadline=deadline)
                reply, answer = child.channel.receive(deadline=deadline)
                while on_question is not None and "question" in reply and reply.get("ticket") == ticket:
                    child.channel.send({"ticket": ticket, "told": on_question(reply["question"])}, deadline=deadline)
                    reply, answer = child.channel.receive(deadline=deadline)
                if reply.pop("ticket", None) != ticket:
                    raise FrameError("an answer does not belong to this call")
                error = decode_error(reply["error"]) if "error" in reply else None
                answer_header = reply.get("header")
                if error is None and not isinstance(answer_header, dict):
                    raise FrameError("an answer has no header")
        if error is not None:
            raise error
        assert isinstance(answer_header, dict)
        return answer_header, answer

    def cancel(self) -> bool:
        """Kill the child in the middle of the call that another thread waits for; that call raises WorkerDied.

        Returns:
            False if no call was running: then nothing happens, and the child stays warm.
        """
        with self._state:
            if not self._calling:
                return False
            self._cancelled = True
            if self._child is not None:
                self._child.kill()
            return True

    def close(self) -> None:
        """End the child and remove its scratch folder; a later call starts a fresh one."""
        self.cancel()
        with self._one_call:
            self._end_child()

    @contextlib.contextmanager
    def _call_in_progress(self) -> Iterator[None]:
        with self._state:
            self._calling, self._cancelled = True, False
        try:
            yield
        finally:
            with self._state:
                self._calling = False

    def _started(self) -> _Child:
        if self._child is not None and not self._child.has_spoken_or_ended():
            return self._child
        self._end_child()
        child = _start_worker(self._policy, self._environment, self._frame_limit_bytes, self._niceness)
        with self._state:
            self._child = child
            self._finalizer = weakref.finalize(self, child.end)
            if self._cancelled:
                child.kill()
        deadline = time.monotonic() + self._start_timeout_s
        paths = [*sandbox.package_folders(), *self._import_paths]
        with self._ends_child_on_failure(child, limit_s=self._start_timeout_s):
            child.channel.send(
                {"policy": child.policy.to_json(), "module": self._module, "paths": paths}, deadline=deadline
            )
            child.layers = _decode_layers(child.channel.receive(deadline=deadline)[0])
            ready, _ = child.channel.receive(deadline=deadline)
            if ready != _READY:
                raise FrameError("a worker did not say that it is ready")
        return child

    @contextlib.contextmanager
    def _ends_child_on_failure(self, child: _Child, *, limit_s: float) -> Iterator[None]:
        """Turn what can go wrong with a child into its typed error, and end it: the channel is out of step."""
        try:
            yield
        except Unsendable:
            raise
        except TimeoutError:
            self._end_child()
            raise WorkerTimeout(f"{self._module} did not answer within {limit_s:g} s and was stopped") from None
        except FrameError as error:
            ending = self._end_child()
            raise ending.died(f"{self._module} sent something that is not an answer: {error}") from error
        except (EOFError, OSError) as error:
            cancelled = self._cancelled
            ending = self._end_child(by_itself=not cancelled)
            told = "was cancelled" if cancelled else ending.told()
            raise ending.died(f"{self._module} {told}", cancelled=cancelled) from error
        except BaseException:
            self._end_child()
            raise

    def _end_child(self, *, by_itself: bool = False) -> _Ending:
        with self._state:
            child, self._child = self._child, None
        if child is None:
            return _Ending()
        self._finalizer.detach()
        return child.end(by_itself=by_itself)


def probe(policy: Policy | None = None) -> Layers:
    """Start one child to see which layers this machine offers; takes about 0.1 s, so ask once.

    Raises:
        SetupError: no child can be started here.
    """
    child = _start_worker(policy or Policy(), {}, FRAME_LIMIT_BYTES)
    deadline = time.monotonic() + _PROBE_TIMEOUT_S
    try:
        child.channel.send({"policy": child.policy.to_json(), "module": None, "paths": []}, deadline=deadline)
        return _decode_layers(child.channel.receive(deadline=deadline)[0])
    except (EOFError, OSError, FrameError) as error:
        raise SetupError("a child process did not start as it should", code="no_sandbox") from error
    finally:
        child.end()


# --- the parent: outside programs ------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Finished:
    """How an outside program ended, and what it said."""

    exit_code: int  # minus the signal's number if one ended it
    stdout: bytes
    stderr: bytes
    truncated: bool  # either output was longer than the cap
    seconds: float
    layers: Layers  # what held while it ran


def run(
    argv: Sequence[str],
    *,
    policy: Policy,
    timeout_s: float,
    stdin: bytes = b"",
    output_cap_bytes: int = 1 << 20,
    environment: Mapping[str, str] | None = None,
    cancelled: threading.Event | None = None,
    confined: bool = False,
    stop_at_cap: bool = False,
    enough: Callable[[bytes], bool] | None = None,
) -> Finished:
    """Run an outside program under `policy` and wait for it; no process of it remains.

    Args:
        argv: the program and its arguments; never seen by a shell.
        policy: what it may do; with `scratch` set that folder is its working folder and stays, otherwise
            it gets a private one that is removed.
        timeout_s: wall time in all, after which the process group is killed.
        stdin: fed to the program.
        output_cap_bytes: kept of each output; the rest is read and dropped.
        stop_at_cap: end the program as soon as an output is longer than that.
        enough: given each piece of its standard output in order; end the program as soon as it says True.
        environment: variables added to the few that it gets.
        cancelled: set by another thread to end the program early.
        confined: do not start it where the sandbox is not strong enough for a stranger's code (`Layers.strong`).

    Raises:
        WorkerTimeout: it outlived `timeout_s`.
        WorkerDied: it was cancelled.
        ToolFailed: it could not be started.
        SetupError: no child can be started here; code `no_sandbox` if it would not have been confined.
    """
    program = shutil.which(argv[0])
    if program is None:
        raise ToolFailed(f"{os.path.basename(argv[0])} is not a program that can be run here")
    program = os.path.abspath(program)
    name = os.path.basename(program)
    started = time.monotonic()
    deadline = started + timeout_s
    policy = replace(policy, readable=(*policy.readable, program, os.path.realpath(program)))
    child = _start_program(policy, environment or {}, has_stdin=bool(stdin))
    try:
        assert child.policy.scratch is not None
        child.channel.send(
            {
                "policy": child.policy.to_json(),
                "argv": [program, *argv[1:]],
                "environment": _environment(child.policy.scratch, environment or {}),
                "confined": confined,
            },
            deadline=deadline,
        )
        layers = _decode_layers(child.channel.receive(deadline=deadline)[0])
        if confined and not layers.strong:
            raise SetupError(_unconfined(layers), code="no_sandbox")
        with contextlib.suppress(EOFError):  # the end of file is the exec that succeeded
            reply, _ = child.channel.receive(deadline=deadline)
            raise ToolFailed(f"{name} could not be started: {reply.get('failed')}")
        output = _Conversation(child, stdin, output_cap_bytes, stop_at_cap=stop_at_cap, enough=enough)
        status = output.hold(deadline, cancelled)
    except TimeoutError:
        raise WorkerTimeout(f"{name} did not end within {timeout_s:g} s and was stopped") from None
    except _Cancelled:
        raise WorkerDied(f"{name} was cancelled", cancelled=True) from None
    except (EOFError, OSError, FrameError) as error:
        raise ToolFailed(f"{name} could not be started in its sandbox") from error
    finally:
        child.end()
    return Finished(
        exit_code=status,
        stdout=bytes(output.stdout),
        stderr=bytes(output.stderr),
        truncated=output.truncated,
        seconds=time.monotonic() - started,
        layers=layers,
    )


def _unconfined(layers: Layers) -> str:
    lacks = "; ".join(layers.notes) or "files, network or processes cannot be confined"
    return f"no sandbox can be made here that is strong enough for foreign code: {lacks}"


class _Cancelled(Exception):
    """The caller's event was set while its program ran."""


class _Conversation:
    """Feeds a program, drains both its outputs up to a cap, and waits for the guard to report its end."""

    def __init__(
        self,
        child: _Child,
        stdin: bytes,
        cap_bytes: int,
        *,
        stop_at_cap: bool,
        enough: Callable[[bytes], bool] | None,
    ) -> None:
        self.stdout, self.stderr, self.truncated = bytearray(), bytearray(), False
        self._child = child
        self._cap_bytes = cap_bytes
        self._stop_at_cap = stop_at_cap
        self._enough = enough
        self._told_enough = False
        self._unsent = memoryview(stdin)
        self._status: int | None = None
        self._selector = selectors.DefaultSelector()
        pipes = child.popen
        assert pipes.stdout is not None
        assert pipes.stderr is not None
        assert child.status_fd is not None
        self._selector.register(pipes.stdout, selectors.EVENT_READ, self.stdout)
        self._selector.register(pipes.stderr, selectors.EVENT_READ, self.stderr)
        self._selector.register(child.status_fd, selectors.EVENT_READ, None)
        if pipes.stdin is not None:
            os.set_blocking(pipes.stdin.fileno(), False)
            self._selector.register(pipes.stdin, selectors.EVENT_WRITE, None)

    def hold(self, deadline: float, cancelled: threading.Event | None) -> int:
        """Return the exit status when program and outputs are at their end."""
        with self._selector:
            while self._selector.get_map():
                left = deadline - time.monotonic()
                if left <= 0:
                    raise TimeoutError
                if cancelled is not None and cancelled.is_set():
                    raise _Cancelled
                wait_s = left if cancelled is None else min(left, _POLL_S)
                for key, _ in self._selector.select(wait_s):
                    self._advance(key)
                if self._told_enough or (self._stop_at_cap and self.truncated):
                    return -int(signal.SIGKILL)
        if self._status is None:
            raise EOFError("the guard of a program was killed")
        return self._status

    def _advance(self, key: selectors.SelectorKey) -> None:
        if key.events == selectors.EVENT_WRITE:
            self._feed(key)
        elif key.data is None:
            text = os.read(key.fd, 64)
            self._status = int(text) if text else None
            self._selector.unregister(key.fileobj)
            self._child.kill()  # what the program left running holds the outputs open
        else:
            chunk = os.read(key.fd, _PIPE_BYTES)
            if not chunk:
                self._selector.unregister(key.fileobj)
            if self._enough is not None and key.data is self.stdout:
                self._told_enough = self._told_enough or self._enough(chunk)
            room = self._cap_bytes - len(key.data)
            key.data.extend(chunk[:room])
            self.truncated = self.truncated or len(chunk) > room

    def _feed(self, key: selectors.SelectorKey) -> None:
        try:
            written = os.write(key.fd, self._unsent[:_PIPE_BYTES])
        except BrokenPipeError:
            written = len(self._unsent)  # it does not want to know
        self._unsent = self._unsent[written:]
        if not self._unsent:
            self._selector.unregister(key.fileobj)
            assert self._child.popen.stdin is not None
            self._child.popen.stdin.close()


# --- the parent: starting and ending a child -------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Ending:
    """How a child ended."""

    exit_code: int | None = None
    signal: int | None = None
    stderr_tail: str = ""

    def told(self) -> str:
        if self.exit_code == _OUT_OF_MEMORY:
            return "ran out of memory"
        if self.signal is not None:
            return f"was ended by {signal.Signals(self.signal).name}"
        return f"ended with exit code {self.exit_code}"

    def died(self, message: str, *, cancelled: bool = False) -> WorkerDied:
        if self.stderr_tail and not cancelled:
            _LOG.info("%s; its last output:\n%s", message, self.stderr_tail)
        return WorkerDied(
            message,
            exit_code=self.exit_code,
            signal=self.signal,
            stderr_tail=self.stderr_tail,
            out_of_memory=self.exit_code == _OUT_OF_MEMORY,
            cancelled=cancelled,
        )


class _Tail:
    """Reads a pipe to its end on a thread of its own and keeps the last of it."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._kept = bytearray()
        self._thread = threading.Thread(target=self._drain, name="optiml-output", daemon=True)
        self._thread.start()

    def _drain(self) -> None:
        while chunk := os.read(self._descriptor, _PIPE_BYTES):
            self._kept += chunk
            del self._kept[:-_TAIL_BYTES]
        os.close(self._descriptor)

    def text(self) -> str:
        """What was kept; waits shortly for the end of the pipe."""
        self._thread.join(timeout=1.0)
        return bytes(self._kept).decode("utf-8", errors="replace")


class _Child:
    """A started child with the parent's ends of its channel and pipes."""

    def __init__(
        self,
        popen: subprocess.Popen[bytes],
        channel: Channel,
        *,
        policy: Policy,
        status_fd: int | None,
        tail: _Tail | None,
        scratch: str | None,
    ) -> None:
        self.popen = popen
        self.channel = channel
        self.policy = policy
        self.status_fd = status_fd  # where a guard reports how its child ended
        self.layers: Layers | None = None  # until the child has told
        self._tail = tail
        self._scratch = scratch  # to remove at the end
        self._owner = os.getpid()
        self._lock = threading.Lock()
        self._killed = False
        self._reaped = False

    @property
    def pid(self) -> int:
        return self.popen.pid

    def has_spoken_or_ended(self) -> bool:
        """True if the child is of no more use: between calls it has nothing to say."""
        if self._killed:  # it may take a moment to fall
            return True
        waiting = select.poll()
        waiting.register(self.channel.fileno(), select.POLLIN)
        return bool(waiting.poll(0))

    def kill(self) -> None:
        """Kill the whole process group. Until it is reaped nobody else can have its number."""
        with self._lock:
            self._killed = True
            if not self._reaped:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self.popen.pid, signal.SIGKILL)

    def end(self, *, by_itself: bool = False) -> _Ending:
        """Kill what is left, and release everything; `by_itself` waits for a guard's word on how it ended."""
        if os.getpid() != self._owner:
            return _Ending()  # a fork of the owner has a copy of this object, not the child
        status = self._reported_status() if by_itself else None
        self.kill()
        with self._lock:
            if not self._reaped:
                try:
                    own_status = self.popen.wait(_END_TIMEOUT_S)
                    self._reaped = True
                except subprocess.TimeoutExpired:
                    _LOG.warning("child %d does not end although it was killed", self.popen.pid)
                    own_status = -int(signal.SIGKILL)
                status = own_status if status is None else status
        self.channel.close()
        for pipe in (self.popen.stdin, self.popen.stdout, self.popen.stderr):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
        if self.status_fd is not None:
            os.close(self.status_fd)
            self.status_fd = None
        tail = "" if self._tail is None else self._tail.text()
        if self._scratch is not None:
            remove_folder(self._scratch)
            self._scratch = None
        if status is None:
            return _Ending(stderr_tail=tail)
        if status < 0:
            return _Ending(signal=-status, stderr_tail=tail)
        return _Ending(exit_code=status, stderr_tail=tail)

    def _reported_status(self) -> int | None:
        if self.status_fd is None:
            return None
        waiting = select.poll()
        waiting.register(self.status_fd, select.POLLIN)
        text = os.read(self.status_fd, 64) if waiting.poll(1000) else b""
        return int(text) if text else None


def _start_worker(policy: Policy, environment: Mapping[str, str], limit_bytes: int, niceness: int = 0) -> _Child:
    reading, writing = os.pipe()
    try:
        child = _start_child(
            policy,
            environment,
            guarded=policy.processes,
            limit_bytes=limit_bytes,
            niceness=niceness,
            stdin=subprocess.DEVNULL,
            stdout=writing,
            stderr=writing,
            tail=reading,
        )
    finally:
        os.close(writing)
    return child


def _start_program(policy: Policy, environment: Mapping[str, str], *, has_stdin: bool) -> _Child:
    return _start_child(
        policy,
        environment,
        guarded=True,
        limit_bytes=FRAME_LIMIT_BYTES,
        niceness=0,
        stdin=subprocess.PIPE if has_stdin else subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        tail=None,
    )


def _start_child(
    policy: Policy,
    environment: Mapping[str, str],
    *,
    guarded: bool,
    limit_bytes: int,
    niceness: int,
    stdin: int,
    stdout: int,
    stderr: int,
    tail: int | None,
) -> _Child:
    own_scratch = None
    if policy.scratch is None:
        own_scratch = _scratch_folders.new()
        policy = replace(policy, scratch=own_scratch)
    assert policy.scratch is not None
    ours, theirs = socket.socketpair()
    status_reading, status_writing = os.pipe() if guarded else (None, None)
    inherited = [theirs.fileno(), *([] if status_writing is None else [status_writing])]
    try:
        popen = _spawner.start(
            [
                *(sys.executable, "-I", "-B", "-c", _BOOT, _import_root(), str(os.nice(0) + niceness)),
                *(str(os.getpid()), str(theirs.fileno())),
                *([] if status_writing is None else [str(status_writing)]),
            ],
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            pass_fds=inherited,
            cwd=policy.scratch,
            env=_environment(policy.scratch, {**_interpreter_environment(), **environment}),
        )
    except OSError as error:
        ours.close()
        if status_reading is not None:
            os.close(status_reading)
        if own_scratch is not None:
            remove_folder(own_scratch)
        raise SetupError(f"no child process can be started: {error.strerror}", code="no_sandbox") from error
    finally:
        theirs.close()
        if status_writing is not None:
            os.close(status_writing)
    return _Child(
        popen,
        Channel(ours, limit_bytes=limit_bytes),
        policy=policy,
        status_fd=status_reading,
        tail=None if tail is None else _Tail(tail),
        scratch=own_scratch,
    )


class _Spawner:
    """Starts every child from one thread that never ends: a parent-death signal follows the thread, not the process."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[tuple[Future[subprocess.Popen[bytes]], Sequence[str], dict[str, Any]]]
        self._lock = threading.Lock()
        self._owner: int | None = None

    def start(self, argv: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
        """Start a child in a session and process group of its own.

        Raises:
            OSError: the system has no room for one more process, or the interpreter is gone.
        """
        with self._lock:
            if self._owner != os.getpid():  # also after a fork, which copies this object but not its thread
                self._owner = os.getpid()
                self._jobs = queue.SimpleQueue()
                threading.Thread(target=self._work, args=(self._jobs,), name="optiml-spawner", daemon=True).start()
        future: Future[subprocess.Popen[bytes]] = Future()
        self._jobs.put((future, argv, options))
        return future.result()

    @staticmethod
    def _work(jobs: queue.SimpleQueue[tuple[Future[subprocess.Popen[bytes]], Sequence[str], dict[str, Any]]]) -> None:
        while True:
            future, argv, options = jobs.get()
            try:
                future.set_result(subprocess.Popen(argv, start_new_session=True, close_fds=True, **options))
            except (OSError, ValueError, subprocess.SubprocessError) as error:
                future.set_exception(error)


_spawner = _Spawner()
_scratch_folders = ScratchFolders()


def _environment(scratch: str, extra: Mapping[str, str]) -> dict[str, str]:
    """All that a child sees of the environment; nothing is passed on, so neither keys nor compiler flags are."""
    return {
        "PATH": "/usr/local/bin:/usr/bin:/bin",
        "LANG": "C.UTF-8",
        "LC_ALL": "C.UTF-8",
        "HOME": scratch,
        "TMPDIR": scratch,
        **extra,
    }


def _interpreter_environment() -> dict[str, str]:
    """What our own interpreter needs besides; an outside program does not get it."""
    threads = str(min(_LIBRARY_THREADS, os.cpu_count() or 1))
    needed = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), threads)
    loader = os.environ.get("LD_LIBRARY_PATH")  # where it, and the GPU driver in a container, find their libraries
    return needed if loader is None else {**needed, "LD_LIBRARY_PATH": loader}


def _import_root() -> str:
    return str(Path(sandbox.__file__).resolve().parent.parent)


def _decode_layers(message: dict[str, Any]) -> Layers:
    try:
        return Layers.from_json(message["layers"])
    except (KeyError, TypeError) as error:
        raise FrameError("a child did not say which layers hold") from error


# --- the child -------------------------------------------------------------------------------------------------


_READY = {"ready": True}


@dataclass(frozen=True, kw_only=True)
class _Service:
    """What `serve` needs in a child."""

    channel: Channel
    policy: Policy
    ticket: str = ""  # of the call that is being answered


_service: _Service | None = None


def child() -> None:
    """The whole life of a child, from the arguments that `_start_child` gave it."""
    global _service
    parent, channel_fd, *status_fds = (int(text) for text in sys.argv[3:])
    os.set_inheritable(channel_fd, False)
    if status_fds:
        _leave_guard_behind(parent, channel_fd, status_fds[0])
    else:
        sandbox.die_with_parent(parent, signal.SIGKILL)
    channel = Channel(socket.socket(fileno=channel_fd))
    try:
        orders, _ = channel.receive()
    except EOFError:  # the parent changed its mind
        os._exit(0)
    policy = Policy.from_json(orders["policy"])
    if "argv" in orders:
        _become_program(channel, policy, orders)
    sys.path += [path for path in orders["paths"] if path not in sys.path]
    layers = Layers(notes=("our own code, with our rights",)) if policy.trusted else sandbox.apply(policy)
    channel.send({"layers": layers.to_json()})
    if orders["module"] is None:  # a probe
        os._exit(0)
    _service = _Service(channel=channel, policy=policy)
    sys.excepthook = _leave_after
    try:
        runpy.run_module(orders["module"], run_name="__main__")
    except SystemExit as leaving:
        os._exit(leaving.code if isinstance(leaving.code, int) else 1)
    os._exit(0)


def _leave_after(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """End the child at once after an exception that nobody caught, so that the parent sees its exit code."""
    sys.__excepthook__(kind, error, trace)
    sys.stderr.flush()
    os._exit(_OUT_OF_MEMORY if issubclass(kind, MemoryError) else 1)


def serve(handler: Handler) -> None:
    """Answer calls until the parent closes the channel, then leave the process.

    Args:
        handler: gets the header and blobs of a call, returns those of the answer. An OptimlError that it
            raises is raised again in the parent; anything else ends the child.

    Raises:
        SetupError: this process was not started by a `Worker`.
    """
    global _service
    if _service is None:
        raise SetupError("this module is the inside of a worker and cannot be run by itself", code="no_sandbox")
    channel, policy = _service.channel, _service.policy
    channel.send(_READY)
    while True:
        try:
            message, blobs = channel.receive()
        except EOFError:
            os._exit(0)
        sandbox.limit_cpu_time(policy)
        ticket = {"ticket": message["ticket"]}
        _service = replace(_service, ticket=message["ticket"])
        try:
            header, answer = handler(message["header"], blobs)
            channel.send({**ticket, "header": header}, answer)
            del header, answer
        except OptimlError as error:
            channel.send({**ticket, "error": encode_error(error)})
        del message, blobs  # not kept while waiting


def ask(question: dict[str, Any]) -> dict[str, Any]:
    """From the thread of the handler, while it answers a call: ask the parent, and wait for what it says.

    Raises:
        EOFError: the parent is gone.
        SetupError: this process was not started by a `Worker`.
    """
    if _service is None:
        raise SetupError("only the inside of a worker can ask its parent", code="no_sandbox")
    _service.channel.send({"ticket": _service.ticket, "question": question})
    reply, _ = _service.channel.receive()
    told: dict[str, Any] = reply["told"]
    return told


def _leave_guard_behind(parent: int, channel_fd: int, status_fd: int) -> None:
    """Fork; the child returns, and the guard stays until the parent kills the group or the group must die."""

    def kill_group(*_: object) -> None:
        os.killpg(0, signal.SIGKILL)

    signal.signal(signal.SIGTERM, kill_group)
    sandbox.die_with_parent(parent, signal.SIGTERM)
    guard = os.getpid()
    guarded = os.fork()
    if guarded == 0:
        os.close(status_fd)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        sandbox.die_with_parent(guard, signal.SIGKILL)
        return
    os.close(channel_fd)
    _, status = os.waitpid(guarded, 0)
    os.write(status_fd, str(os.waitstatus_to_exitcode(status)).encode())
    while True:
        signal.pause()


def _become_program(channel: Channel, policy: Policy, orders: dict[str, Any]) -> None:
    argv, environment = orders["argv"], orders["environment"]
    for ignored in (signal.SIGPIPE, signal.SIGXFSZ):  # by Python, and the program would inherit that
        signal.signal(ignored, signal.SIG_DFL)
    trusted = Layers(notes=("a program of this machine, with our rights",))
    layers = trusted if policy.trusted else sandbox.apply(policy, before_exec=True)
    channel.send({"layers": layers.to_json()})
    if orders["confined"] and not layers.strong:
        os._exit(127)
    try:
        os.execve(argv[0], argv, environment)
    except (OSError, ValueError) as error:
        channel.send({"failed": getattr(error, "strerror", None) or "an argument holds a NUL byte"})
    os._exit(127)
