"""Feeds changed PTX to the parser, the lowering and the engines: nothing may crash, hang or raise an unnamed error.

    python tools/fuzz_ptx.py [--inputs 100000] [--seed 0] [--seconds S] [--run]

Texts are single kernels of what nvcc, Triton and Numba emitted (tests/emulator/data), changed in one to four places:
bytes, tokens and lines are dropped, doubled, swapped and replaced. `--run` also runs what lowers, on a small grid
with all checks. Ends with 1 and prints the text at the first input that misbehaves.
"""

from __future__ import annotations

import argparse
import collections
import lzma
import random
import re
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from optiml.errors import KernelFault, OptimlError
from optiml.ptx import Limits, Machine, parse
from optiml.ptx.lower import program_of
from optiml.ptx.native import execute

DATA = Path(__file__).resolve().parent.parent / "tests" / "emulator" / "data"
HANG_S = 20
_TOKEN = re.compile(r"[%\w$.]+|\S")
_TRICKY = (
    "0", "-1", "4294967296", "18446744073709551615", "0f7FFFFFFF", "0dFFF0000000000000", "%tid.x", "%p1", "%rd1", "{",
    "}", ";", ",", "[", "]", "@", "@!", "_", ".reg", ".b8", ".b64", ".pred", ".shared", ".local", ".v4", ".param",
    ".loc 1 1 1", ":", "bra", "ret;", "bar.sync 0;", "\0", "\u00e9", '"', "//", "/*", "<1000000>", "9" * 400,
)  # fmt: skip


def seeds(*, longest: int = 6000) -> list[str]:
    """Texts of one kernel each, with what the file says before its first kernel."""
    files = [lzma.decompress(path.read_bytes()).decode() for path in sorted((DATA / "nvcc").glob("*_sm_90.ptx.xz"))]
    files += [path.read_text(encoding="utf-8") for path in sorted((DATA / "emitted").glob("*.ptx"))]
    found = []
    for text in files:
        starts = [
            match.start() for match in re.finditer(r"^\s*(?:\.visible\s+)?\.(?:entry|func)\b", text, re.MULTILINE)
        ]
        head = text[: starts[0]]
        head = head if len(head) < 1500 else "\n".join(head.splitlines()[:12]) + "\n"
        for start, end in zip(starts, [*starts[1:], len(text)], strict=True):
            if end - start <= longest:
                found.append(head + text[start:end])
    return found


def changed(text: str, pick: random.Random) -> str:
    """The text with one to four random changes."""
    for _ in range(pick.randrange(1, 5)):
        kind = pick.randrange(8)
        if kind == 0 and text:  # one character
            at = pick.randrange(len(text))
            text = text[:at] + chr(pick.choice([pick.randrange(32, 127), 0, 10, 0x2028])) + text[at + 1 :]
        elif kind == 1:  # cut off, or cut out
            at, length = pick.randrange(len(text) + 1), pick.choice([1, 2, 10, 100, 100000])
            text = text[:at] + text[at + length :]
        elif kind in (2, 3, 4):  # a token for another
            tokens = list(_TOKEN.finditer(text))
            if tokens:
                old = pick.choice(tokens)
                fresh = pick.choice(_TRICKY) if kind == 2 else pick.choice(tokens)[0]
                text = text[: old.start()] + fresh + text[old.end() :]
        else:  # lines dropped, doubled, swapped
            lines = text.split("\n")
            one, two = pick.randrange(len(lines)), pick.randrange(len(lines))
            if kind == 5:
                del lines[one]
            elif kind == 6:
                lines.insert(one, lines[two])
            else:
                lines[one], lines[two] = lines[two], lines[one]
            text = "\n".join(lines)
    return text


def tried(text: str, *, run: bool) -> str:
    """What becomes of a text: "lowered", "ran", "faulted", or the name of its error."""
    try:
        module = parse(text)
        outcome = "lowered"
        for name, kernel in module.kernels.items():
            native = execute.native_program(module, name)
            if native is None:
                program_of(module, name, counting=False)
            elif run:
                outcome = _ran(module, name, kernel)
    except KernelFault:
        return "faulted"
    except OptimlError as error:
        return type(error).__name__
    return outcome


def _ran(module: Any, name: str, kernel: Any) -> str:
    machine = Machine()
    loaded = machine.load(module)
    args = [
        machine.allocate(4096).to_bytes(8, "little") if p.bytes == 8 else (64).to_bytes(p.bytes, "little")
        for p in kernel.params
    ]
    block = kernel.required_threads or (48, 1, 1)
    machine.launch(loaded, name, grid=(2, 1, 1), block=block, shared_bytes=256, args=args, count=True,
                   checks=frozenset({"race", "uninitialised"}), limits=Limits(warp_instructions=3000))  # fmt: skip
    return "ran"


def fuzz(texts: Sequence[str], *, inputs: int, seed: int, seconds: float | None, run: bool) -> collections.Counter[str]:
    """Outcomes by name.

    Raises:
        AssertionError: an input misbehaved; the message holds it.
    """
    outcomes: collections.Counter[str] = collections.Counter()
    end = None if seconds is None else time.monotonic() + seconds
    for number in range(inputs):
        if end is not None and time.monotonic() > end:
            break
        pick = random.Random(f"{seed} {number}")
        text = changed(pick.choice(texts), pick)
        signal.alarm(HANG_S)
        try:
            outcomes[tried(text, run=run)] += 1
        except Exception as error:
            raise AssertionError(f"input {number} of seed {seed}: {type(error).__name__}: {error}\n{text}") from error
        finally:
            signal.alarm(0)
    return outcomes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--inputs", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float)
    parser.add_argument("--run", action="store_true", help="run what lowers")
    options = parser.parse_args()

    def hung(*_: Any) -> None:
        raise AssertionError(f"an input took more than {HANG_S} s")

    signal.signal(signal.SIGALRM, hung)
    try:
        outcomes = fuzz(seeds(), inputs=options.inputs, seed=options.seed, seconds=options.seconds, run=options.run)
    except AssertionError as error:
        print(error)
        return 1
    print(f"{sum(outcomes.values())} inputs: " + ", ".join(f"{name} {n}" for name, n in outcomes.most_common()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
