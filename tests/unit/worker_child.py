"""A worker for the tests of process and sandbox: does as it is told, and says what the system answered."""

import ctypes
import errno
import os
import signal
import socket
import stat
import sys
import threading
from collections.abc import Sequence
from typing import Any

from optiml import errors, process

Header = dict[str, Any]
ERRORS = {
    "KernelFault": lambda: errors.KernelFault(
        errors.Fault(
            kind="race", access="write", bytes=4, address=64, block=(1, 0, 0), thread=(2, 0, 0), line=7, detail="d",
            other=errors.OtherParty(block=(1, 0, 0), thread=(3, 0, 0), line=None),
        )
    ),
    "Unsupported": lambda: errors.Unsupported("wgmma", line=12),
    "InvalidInput": lambda: errors.InvalidInput("too long", code="too_large"),
    "SetupError": lambda: errors.SetupError("no GPU", code="no_device"),
    "NotAccepted": lambda: errors.NotAccepted("it is wrong"),
    "ToolFailed": lambda: errors.ToolFailed("nvcc broke"),
    "PtxSyntaxError": lambda: errors.PtxSyntaxError("line 3: not PTX"),
    "Subclass": lambda: SpecialFailure("from elsewhere"),
}  # fmt: skip


class SpecialFailure(errors.ToolFailed):
    pass


def handle(header: Header, blobs: Sequence[memoryview]) -> tuple[Header, Sequence[Any]]:
    return getattr(Actions, header["do"])(header, blobs)


class Actions:
    def echo(header, blobs):
        return header, blobs

    def ask(header, blobs):
        return {"told": [process.ask({"number": number})["twice"] for number in range(header["questions"])]}, []

    def facts(header, blobs):
        return {
            "pid": os.getpid(), "uid": os.getuid(), "environment": dict(os.environ), "folder": os.getcwd(),
            "threads": threading.active_count(), "argv": sys.argv,
        }, []  # fmt: skip

    def hang(header, blobs):
        signal.pause()

    def spin(header, blobs):
        while True:
            pass

    def flood(header, blobs):
        for _ in range(header["lines"]):
            sys.stdout.write("noise " * 1000)
        sys.stdout.flush()
        return {"done": True}, []

    def flood_for_ever(header, blobs):
        while True:
            os.write(1, b"noise " * 10_000)

    def crash(header, blobs):
        ctypes.string_at(0)

    def leave(header, blobs):
        sys.stderr.write("last words")
        sys.stderr.flush()
        os._exit(3)

    def fail(header, blobs):
        raise ValueError("a bug in the handler")

    def exit_politely(header, blobs):
        sys.exit(5)

    def descriptors(header, blobs):
        """The kind of each open descriptor, in order."""
        kinds = []
        for number in range(64):
            try:
                mode = os.fstat(number).st_mode
            except OSError:
                continue
            tests = {"socket": stat.S_ISSOCK, "pipe": stat.S_ISFIFO, "character device": stat.S_ISCHR}
            kinds.append(next((kind for kind, test in tests.items() if test(mode)), "file"))
        return {"open": kinds}, []

    def allocate(header, blobs):
        return {"bytes": len(bytearray(header["bytes"]))}, []

    def raise_error(header, blobs):
        raise ERRORS[header["kind"]]()

    def send_garbage(header, blobs):
        process._service.channel._connection.sendall(b"this is no message at all")
        signal.pause()

    def send_malformed_error(header, blobs):
        process._service.channel.send({"ticket": "forged", "error": {"kind": "SystemExit"}})
        signal.pause()

    def answer_a_later_call_now(header, blobs):
        process._service.channel.send({"ticket": "0" * 16, "header": {"forged": True}})
        return {}, []

    def send_nan(header, blobs):
        return {"value": float("nan")}, []

    def attempt(header, blobs):
        """Try one forbidden thing; the answer is the errno, or 0 if it worked."""
        try:
            ATTEMPTS[header["what"]](header)
        except OSError as error:
            return {"errno": error.errno}, []
        except ValueError:  # what `setrlimit` makes of a refusal
            return {"errno": errno.EPERM}, []
        return {"errno": 0}, []


def read(header):
    with open(header["path"], "rb") as file:
        file.read(1)


def write(header):
    with open(header["path"], "wb") as file:
        file.write(b"x")


def call(name, *args):
    libc = ctypes.CDLL(None, use_errno=True)
    words = [ctypes.c_long(arg) if isinstance(arg, int) else arg for arg in args]
    number = {"clone3": 435, "ptrace": {"x86_64": 101, "aarch64": 117}[os.uname().machine], "io_uring_setup": 425,
              "bpf": {"x86_64": 321, "aarch64": 280}[os.uname().machine], "unassigned": 9999}[name]  # fmt: skip
    if libc.syscall(ctypes.c_long(number), *words) < 0:
        raise OSError(ctypes.get_errno(), "")


ATTEMPTS = {
    "read": read,
    "write": write,
    "list": lambda header: os.listdir(header["path"]),
    "make a link": lambda header: os.symlink("/etc/passwd", header["path"]),
    "fork": lambda header: os._exit(0) if os.fork() == 0 else None,
    "exec": lambda header: os.execv("/bin/true", ["true"]),
    "start a thread": lambda header: threading.Thread(target=int).start(),
    "internet socket": lambda header: socket.socket(socket.AF_INET),
    "unix socket": lambda header: socket.socket(socket.AF_UNIX),
    "socket pair": lambda header: socket.socketpair(),
    "signal the parent": lambda header: os.kill(os.getppid(), 0),
    "signal itself": lambda header: os.kill(os.getpid(), 0),
    "raise its limits": lambda header: __import__("resource").setrlimit(7, (10**6, 10**6)),
    "lower its own limit": lambda header: __import__("resource").setrlimit(7, (64, 64)),
    "limit the parent": lambda header: __import__("resource").prlimit(os.getppid(), 7, (64, 64)),
    "become root": lambda header: os.setresuid(0, 0, 0),
    "change a mode": lambda header: os.chmod(header["path"], 0o777),
    "new session": lambda header: os.setsid(),
    "clone3": lambda header: call("clone3", 0, 0),
    "ptrace": lambda header: call("ptrace", 16, os.getppid(), 0, 0),
    "bpf": lambda header: call("bpf", 0, 0, 0),
    "io_uring": lambda header: call("io_uring_setup", 8, 0),
    "unassigned": lambda header: call("unassigned"),
}


if __name__ == "__main__":
    process.serve(handle)
