"""What a GPU really reaches: built-in micro-benchmarks, timed like any kernel, kept per device and driver.

The speed of light of a profile comes from these instead of the data sheet.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from optiml.device.device import Array, TimedDevice, TimedSubject
from optiml.device.plan import Plan, PlannedArray, PlannedLaunch, Pointer, Value
from optiml.errors import Busy, OptimlError, ToolFailed
from optiml.measure.hardware import Hardware
from optiml.records import Build, Kernel, Launch
from optiml.toolchain.nvrtc import CompileFailure

VERSION = 1  # part of the key under which ceilings are kept
SOURCE = Path(__file__).with_name("ceilings.cu")
BIG_BYTES = 512 << 20  # far above any L2
WARP = 32
ROUNDS = 6
WARM_UP = 2
TIMEOUT_S = 60.0


@dataclass(frozen=True, kw_only=True)
class Ceilings:
    """Rates that micro-benchmarks reached; None where one could not run. A multiply-add counts two."""

    device: str
    driver: str
    copy_bytes_per_s: float | None  # read and written together
    read_bytes_per_s: float | None
    l2_bytes_per_s: float | None
    shared_bytes_per_s: float | None
    fp32_flops_per_s: float | None
    tensor_flops_per_s: Mapping[str, float] = field(default_factory=dict)  # element -> dense rate
    launch_us: float | None = None
    schema: int = 1


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What the driver says of a GPU and the benchmarks are cut to."""

    sms: int
    l2_bytes: int
    clock_hz: float
    arch: str


@dataclass(frozen=True, kw_only=True)
class _Bench:
    """One kernel at one size: what it moves or computes in a run."""

    kernel: str
    blocks: int
    threads: int
    amount: float
    integers: tuple[tuple[int, int], ...]  # value and bytes of each argument after the arrays
    arrays: Mapping[str, int]  # name -> bytes
    flush: bool = True


Compile = Callable[[Kernel, str], "Build | CompileFailure"]


def measure_ceilings(device: TimedDevice, facts: Facts, compile_kernel: Compile, *, driver: str) -> Ceilings:
    """Run every micro-benchmark that this GPU can run; about two seconds.

    Raises:
        ToolFailed: the benchmarks do not compile for this GPU.
        Busy: the device is in use.
    """
    build = _built(compile_kernel, facts.arch)
    special = _special_arch(facts.arch)
    wide = None if special is None else _built(compile_kernel, special, required=False)

    def rate(bench: _Bench, chosen: Build | None = build) -> float | None:
        us = None if chosen is None else _best_us(device, chosen, bench)
        return None if us is None else bench.amount / (us * 1e-6)

    tensor: dict[str, float] = {}
    for element, (name, flops) in _MMA.items():
        found = [rate(_arithmetic(facts, name, flops * 4 * 2000, blocks=blocks)) for blocks in (1, 2)]
        if element in _WGMMA:
            name, flops = _WGMMA[element]
            found.append(rate(_arithmetic(facts, name, flops * 4 * 500, blocks=1, groups=4, rounds=500), wide))
        reached = [value for value in found if value is not None]
        if reached:
            tensor[element] = max(reached)
    if wide is not None and "f8" not in tensor:
        name, flops = _WGMMA["f8"]
        reached_f8 = rate(_arithmetic(facts, name, flops * 4 * 500, blocks=1, groups=4, rounds=500), wide)
        if reached_f8 is not None:
            tensor["f8"] = reached_f8
    return Ceilings(
        device=device.info.name,
        driver=driver,
        copy_bytes_per_s=_largest(rate(bench) for bench in _copies(facts)),
        read_bytes_per_s=rate(_read(facts)),
        l2_bytes_per_s=rate(_l2(facts)),
        shared_bytes_per_s=rate(_shared(facts)),
        fp32_flops_per_s=_largest(
            rate(_arithmetic(facts, "multiply_add", 2.0 * 64 * WARP * 2000, blocks=blocks)) for blocks in (2, 4)
        ),
        tensor_flops_per_s=tensor,
        launch_us=_best_us(
            device, build, _Bench(kernel="empty", blocks=1, threads=32, amount=0, integers=(), arrays={}, flush=False),
            middle=True,
        ),
    )  # fmt: skip


def with_ceilings(table: Hardware, ceilings: Ceilings, facts: Facts) -> Hardware:
    """The table of a GPU with what was measured on it in place of the data sheet.

    DRAM takes the faster of copying and reading. A tensor rate that only instructions of one generation reach stays as
    it is where they could not be run and the table promises more.
    """
    dram = [item for item in (ceilings.copy_bytes_per_s, ceilings.read_bytes_per_s) if item is not None]
    clocks = facts.sms * facts.clock_hz
    tensor = {
        element: max(1, round(flops / 2 / clocks)) for element, flops in ceilings.tensor_flops_per_s.items()
    }  # fmt: skip
    fp32 = ceilings.fp32_flops_per_s
    return dataclasses.replace(
        table,
        name=ceilings.device,
        calibration=f"{table.calibration}; ceilings measured on this GPU",
        sms=facts.sms,
        clock_hz=facts.clock_hz,
        l2_bytes=facts.l2_bytes or table.l2_bytes,
        dram_bytes_per_s=max(dram) if dram else table.dram_bytes_per_s,
        dram_efficiency=1.0 if dram else table.dram_efficiency,
        l2_bytes_per_s=ceilings.l2_bytes_per_s or table.l2_bytes_per_s,
        fp32_lanes=table.fp32_lanes if fp32 is None else max(1, round(fp32 / 2 / clocks)),
        tensor_fmas={**table.tensor_fmas, **tensor},
        launch_us=table.launch_us if ceilings.launch_us is None else min(table.launch_us, ceilings.launch_us),
    )


# --- the benchmarks --------------------------------------------------------------------------------------------------
_MMA = {  # element -> kernel, operations of one warp instruction
    "f16": ("mma_f16", 2.0 * 16 * 8 * 16),
    "tf32": ("mma_tf32", 2.0 * 16 * 8 * 8),
    "s8": ("mma_s8", 2.0 * 16 * 8 * 32),
    "f64": ("mma_f64", 2.0 * 8 * 8 * 4),
}
_WGMMA = {  # per group of four warps
    "f16": ("wgmma_f16", 2.0 * 64 * 128 * 16),
    "tf32": ("wgmma_tf32", 2.0 * 64 * 128 * 8),
    "f8": ("wgmma_f8", 2.0 * 64 * 128 * 32),
    "s8": ("wgmma_s8", 2.0 * 64 * 128 * 32),
}
_OUT = {"out": 4096}


def _special_arch(arch: str) -> str | None:
    """The variant of an architecture with instructions of its own, where a benchmark uses them."""
    return "sm_90a" if arch == "sm_90" else None


def _arithmetic(
    facts: Facts, kernel: str, flops: float, *, blocks: int, groups: int | None = None, rounds: int = 2000
) -> _Bench:
    """`flops` in all of one warp's rounds, or of one group of warps where `groups` says how many a block has."""
    busy = facts.sms * blocks * (16 if groups is None else groups)
    return _Bench(
        kernel=kernel, blocks=facts.sms * blocks, threads=512, amount=flops * busy, integers=((rounds, 4),),
        arrays=_OUT, flush=False,
    )  # fmt: skip


def _copies(facts: Facts) -> list[_Bench]:
    count = BIG_BYTES // 16
    arrays = {"x": BIG_BYTES, "y": BIG_BYTES}
    shapes = [(facts.sms, 512), (2 * facts.sms, 1024), (count // 256 // 4, 256)]
    return [
        _Bench(
            kernel="copy", blocks=blocks, threads=threads, amount=2.0 * BIG_BYTES, integers=((count, 8),), arrays=arrays
        )
        for blocks, threads in shapes
    ]


def _read(facts: Facts) -> _Bench:
    count = BIG_BYTES // 16
    return _Bench(
        kernel="read", blocks=count // 256 // 8, threads=256, amount=float(BIG_BYTES),
        integers=((count, 8),), arrays={"x": BIG_BYTES, **_OUT},
    )  # fmt: skip


def _l2(facts: Facts) -> _Bench:
    size = max(1 << 20, facts.l2_bytes // 8 // (1 << 20) * (1 << 20))
    rounds, blocks, threads = 64, 2 * facts.sms, 512
    return _Bench(
        kernel="read_l2", blocks=blocks, threads=threads, amount=blocks * threads * rounds * 8 * 16.0,
        integers=((size // 16, 4), (rounds, 4)), arrays={"x": size, **_OUT}, flush=False,
    )  # fmt: skip


def _shared(facts: Facts) -> _Bench:
    rounds, blocks = 2000, 2 * facts.sms
    return _Bench(
        kernel="read_shared", blocks=blocks, threads=1024, amount=blocks * 1024 * rounds * 8 * 16.0,
        integers=((rounds, 4),), arrays=_OUT, flush=False,
    )  # fmt: skip


def _largest(values: Iterable[float | None]) -> float | None:
    present = [value for value in values if value is not None]
    return max(present) if present else None


# --- running them ----------------------------------------------------------------------------------------------------
def _built(compile_kernel: Compile, arch: str, *, required: bool = True) -> Build | None:
    entry = Launch(kernel="empty", grid=(1,), block=(1,), args=())
    made = compile_kernel(Kernel(source=SOURCE.read_text(encoding="utf-8"), launches=(entry,)), arch)
    if isinstance(made, Build):
        return made
    if required:
        raise ToolFailed(f"the micro-benchmarks do not compile for {arch}: {made.detail}")
    return None


def _plan(bench: _Bench) -> Plan:
    arrays = {
        name: PlannedArray(dtype="uint8", shape=(nbytes,), role="workspace") for name, nbytes in bench.arrays.items()
    }
    values = [Value(data=value.to_bytes(size, "little")) for value, size in bench.integers]
    launch = PlannedLaunch(
        symbol=bench.kernel,
        grid=(bench.blocks, 1, 1),
        block=(bench.threads, 1, 1),
        shared_bytes=0,
        args=(*(Pointer(name=name) for name in arrays), *values),
    )
    return Plan(steps=(launch,), arrays=arrays)


def _best_us(device: TimedDevice, build: Build | None, bench: _Bench, *, middle: bool = False) -> float | None:
    """The shortest of a few runs (a ceiling is what can be reached), or their median; None where it cannot run."""
    if build is None:
        return None
    contents: Mapping[str, Array] = {name: np.zeros(16, dtype=np.uint8) for name in bench.arrays}
    subject = TimedSubject(build=build, plan=_plan(bench), contents=(contents,))
    try:
        with device.timer([subject], timeout_s=TIMEOUT_S) as timer:
            timer.sample(WARM_UP, flush=bench.flush)
            times = timer.sample(ROUNDS, flush=bench.flush).times_us
    except Busy:
        raise
    except OptimlError:  # too little memory, an instruction that this GPU lacks: then there is no such ceiling
        return None
    return float(np.median(times) if middle else np.min(times))
