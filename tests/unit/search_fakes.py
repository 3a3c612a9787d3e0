"""Small kernels and an evaluation that models time from the source text, for tests of the search."""

from __future__ import annotations

import hashlib
import math

from optiml.codec import kernel_id
from optiml.records import (
    Axis,
    BenchProfile,
    Bottleneck,
    BuildReport,
    Evaluation,
    Kernel,
    Launch,
    Occupancy,
    Problem,
    Profile,
    SpeedOfLight,
    Tensor,
    Time,
    Verdict,
    Workload,
)
from optiml.search.edit import EditContext
from optiml.search.optimise import Depth

LOAD_SECTORS = "l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum"
INSTRUCTIONS = "smsp__inst_executed.sum"

ROW_SUM = """\
extern "C" __global__ void row_sum(const float* x, float* y, int R, int C) {
    int r = blockIdx.x * blockDim.x + threadIdx.x;
    if (r >= R) return;
    float s = 0.0f;
    for (int c = 0; c < C; ++c) s += x[r * C + c];
    y[r] = s;
}
"""


def rows_problem() -> Problem:
    return Problem(
        name="row_sum",
        axes={"R": Axis(type="var"), "C": Axis(type="var")},
        inputs={"x": Tensor(dtype="float32", shape=("R", "C"))},
        outputs={"y": Tensor(dtype="float32", shape=("R",))},
        reference="def run(x):\n    return x.sum(axis=1)\n",
        workloads=(Workload(axes={"R": 64, "C": 100}),),
        bench=(Workload(axes={"R": 4096, "C": 1024}),),
    )


def items_problem() -> Problem:
    return Problem(
        name="scale",
        axes={"n": Axis(type="var")},
        inputs={"x": Tensor(dtype="float32", shape=("n",))},
        outputs={"y": Tensor(dtype="float32", shape=("n",))},
        reference="def run(x):\n    return 2 * x\n",
        workloads=(Workload(axes={"n": 1000}),),
        bench=(Workload(axes={"n": 1 << 20}),),
    )


def row_sum_kernel(source: str = ROW_SUM) -> Kernel:
    return Kernel(
        source=source,
        launches=(Launch(kernel="row_sum", grid=("ceil_div(R, 128)",), block=(128,), args=("x", "y", "R", "C")),),
    )


def context(kernel: Kernel, problem: Problem, *, profile: Profile | None = None, dtype: str = "float32") -> EditContext:
    return EditContext(kernel=kernel, problem=problem, profile=profile, dtype=dtype)


def profile(
    identity: str = "0" * 16, *, time_us: float = 100.0, sectors: float = 1e6, instructions: float = 1e6,
    kind: str = "memory", speed_of_light_us: float | None = 10.0, terms: dict[str, float] | None = None,
    limiter: str = "threads", occupancy_pct: float = 100.0,
) -> Profile:  # fmt: skip
    time = Time(median_us=time_us, p10_us=None, p90_us=None, runs=0, noise_pct=None, source="modelled")
    metrics = {LOAD_SECTORS: sectors, INSTRUCTIONS: instructions}
    return Profile(
        kernel_id=identity,
        axes={"R": 4096},
        time=time,
        metrics=metrics,
        metric_source={name: "counted" for name in metrics},
        bottleneck=Bottleneck(kind=kind, evidence=("32 sectors per request",), advice=()),  # type: ignore[arg-type]
        hot_lines=(),
        occupancy=Occupancy(theoretical_pct=occupancy_pct, limiter=limiter, blocks_per_sm=8),  # type: ignore[arg-type]
        speed_of_light=None
        if speed_of_light_us is None
        else SpeedOfLight(us=speed_of_light_us, pct=100.0 * speed_of_light_us / time_us, bound="dram"),
        summary="modelled",
        next_action="search",
        conditions={"device": "emulator A100"},
        bench=(
            BenchProfile(
                axes={"R": 4096}, weight=1.0, time=time, metrics=metrics, blocks_total=32, blocks_run=32,
                terms_us=terms if terms is not None else {"lsu": 80.0, "dram": 20.0, "issue": 15.0, "latency": 10.0},
            ),
        ),
    )  # fmt: skip


def verdict(
    identity: str, *, status: str = "accepted", reason: str | None = None, levels: tuple[str, ...] = ("L0", "L1")
) -> Verdict:  # fmt: skip
    return Verdict(
        kernel_id=identity,
        status=status,  # type: ignore[arg-type]
        reason=reason,  # type: ignore[arg-type]
        detail=None if reason is None else "the fake said so",
        levels=levels,  # type: ignore[arg-type]
        summary=status,
        next_action="go on",
        build=BuildReport(
            arch="sm_80", compiler="fake", registers_per_thread=32, shared_bytes_per_block=0, stack_bytes=0,
            spill_bytes=0, log="", seconds=0.0,
        ),
    )  # fmt: skip


def modelled_us(kernel: Kernel) -> float:
    """A time that rewards a warp per row most, then unrolling, qualifiers and blocks of 256."""
    text = kernel.source
    time_us = 100.0
    if "__shfl_xor_sync" in text:
        time_us *= 0.3
    if "__shared__" in text:
        time_us *= 1.4
    if "#pragma unroll 4" in text:
        time_us *= 0.9
    if "__restrict__" in text:
        time_us *= 0.95
    size = kernel.launches[0].block[0]
    threads = size if isinstance(size, int) else int(kernel.params[str(size)])
    return time_us * (1.0 + 0.1 * abs(math.log2(threads / 256)))


class FakeEvaluator:
    """Counts its calls; kernels whose text contains a word of `broken` are rejected at the depths given."""

    def __init__(self, *, broken: dict[str, tuple[Depth, ...]] | None = None, same_code: bool = False) -> None:
        self.calls: list[tuple[str, Depth]] = []
        self._broken = broken or {}
        self._same_code = same_code

    def __call__(self, kernel: Kernel, *, depth: Depth) -> Evaluation:
        identity = kernel_id(kernel)
        self.calls.append((identity, depth))
        for word, depths in self._broken.items():
            if word in kernel.source and depth in depths:
                rejected = verdict(identity, status="rejected", reason="wrong_values")
                return Evaluation(kernel_id=identity, verdict=rejected, profile=None, fingerprint=None, seconds=0.1)
        time_us = modelled_us(kernel)
        levels = ("L0", "L1")
        return Evaluation(
            kernel_id=identity,
            verdict=verdict(identity, levels=levels),
            profile=profile(identity, time_us=time_us, sectors=1e4 * time_us, instructions=2e4 * time_us),
            fingerprint=self.fingerprint(kernel),
            seconds=0.1,
        )

    def fingerprint(self, kernel: Kernel) -> str:
        """With `same_code`, qualifiers change no code."""
        text = kernel.source.replace(" __restrict__", "") if self._same_code else kernel.source
        plan = f"{kernel.launches}{kernel.params}{kernel.flags}"
        return hashlib.sha256((text + plan).encode()).hexdigest()
