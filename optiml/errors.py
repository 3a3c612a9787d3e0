"""Every exception the library raises on purpose.

A kernel that is wrong, slow or crashes is data (a `Verdict`), not an exception. Exceptions are for
everything else, and each carries the stable `code` under which a front end reports it.

    OptimlError
    ├── InvalidInput      the caller's mistake: invalid_params, too_large, unknown_problem, unknown_kernel, unknown_run
    ├── NotAccepted       a stage that needs an accepted kernel was given another one
    ├── SetupError        this machine cannot do it: no_device, no_compiler, no_profiler, profiler_forbidden, no_sandbox
    ├── ToolFailed        an outside program broke its contract
    ├── ModelFailed       the language model refused, or never gave parsable text
    ├── Busy              a bounded queue is full; try again
    ├── Unsupported       the emulator lacks an opcode or a feature; nothing is known of the kernel
    ├── PtxSyntaxError    text that is not PTX as the engine reads it
    ├── WorkerDied        a child ended without an answer (crash or kill)
    ├── WorkerTimeout     a child outlived its limit and was killed
    └── KernelFault       raised by a device, caught only in `verify`
"""

from __future__ import annotations

from dataclasses import dataclass


class OptimlError(Exception):
    """Base of all errors raised on purpose; `str(error)` is one sentence to act on."""

    code = "internal"


class InvalidInput(OptimlError):
    """The caller's mistake. `code` is one of the closed list of the contract."""

    def __init__(self, message: str, *, code: str = "invalid_params") -> None:
        super().__init__(message)
        self.code = code


class NotAccepted(OptimlError):
    """A kernel had to be accepted first, and was not."""

    code = "not_accepted"


class SetupError(OptimlError):
    """This machine lacks something: `code` says what, the message how to get it."""

    def __init__(self, message: str, *, code: str) -> None:
        super().__init__(message)
        self.code = code


class ToolFailed(OptimlError):
    """A program we called broke its contract: neither the caller's nor the kernel's fault."""

    code = "tool_failed"


class ModelFailed(OptimlError):
    """A language model could not be reached, refused, or never gave usable text.

    Attributes:
        reply: the start of what it answered instead, for logs only; it is a stranger's text.
    """

    def __init__(self, message: str, *, code: str = "model_unavailable", reply: str = "") -> None:
        super().__init__(message)
        self.code = code
        self.reply = reply


class Busy(OptimlError):
    """A bounded queue is full; the message says when to try again."""

    code = "busy"


class Unsupported(OptimlError):
    """The emulator cannot execute this; it says so instead of guessing.

    Attributes:
        feature: the opcode or feature, as written in the PTX ("wgmma.mma_async.sync").
        line: source line of the instruction, or None if the PTX carries none.
    """

    code = "unsupported"

    def __init__(self, feature: str, *, line: int | None = None) -> None:
        where = "" if line is None else f" (source line {line})"
        super().__init__(f"the emulator does not support {feature}{where}")
        self.feature = feature
        self.line = line


class PtxSyntaxError(OptimlError):
    """The text is not PTX that the engine can read."""

    code = "invalid_params"


class WorkerDied(OptimlError):
    """A child process ended before it answered.

    Attributes:
        exit_code: what the child passed to `exit`, or None if a signal ended it.
        signal: the signal that ended it, or None.
        stderr_tail: the last output of the child, for logs only: it may hold host paths.
        out_of_memory: the child ran into its memory limit.
        cancelled: another thread ended the call on purpose.
    """

    code = "worker_died"

    def __init__(
        self,
        message: str,
        *,
        exit_code: int | None = None,
        signal: int | None = None,
        stderr_tail: str = "",
        out_of_memory: bool = False,
        cancelled: bool = False,
    ) -> None:
        super().__init__(message)
        self.exit_code = exit_code
        self.signal = signal
        self.stderr_tail = stderr_tail
        self.out_of_memory = out_of_memory
        self.cancelled = cancelled


class WorkerTimeout(OptimlError):
    """A child process outlived its limit and was killed with its whole process group."""

    code = "timed_out"


@dataclass(frozen=True, kw_only=True)
class OtherParty:
    """The other access of a race, or the thread that a waiting one waits for in vain."""

    block: tuple[int, int, int]
    thread: tuple[int, int, int]
    line: int | None


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What a device saw go wrong while a kernel ran (contract §5 `fault`)."""

    kind: str  # out_of_bounds misaligned uninitialised illegal trap barrier_divergence deadlock race
    access: str | None = None  # read | write | atomic
    bytes: int | None = None
    address: int | None = None
    block: tuple[int, int, int] | None = None
    thread: tuple[int, int, int] | None = None
    line: int | None = None
    detail: str = ""  # one sentence, no host paths
    other: OtherParty | None = None


class KernelFault(OptimlError):
    """The kernel broke a rule of the machine while it ran."""

    code = "fault"

    def __init__(self, fault: Fault) -> None:
        super().__init__(fault.detail or fault.kind)
        self.fault = fault
