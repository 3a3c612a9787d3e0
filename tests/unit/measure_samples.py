"""Hand-made counters of a copy kernel, and a device that answers with them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from optiml.device.device import LaunchReport, RunResult, Scrutiny
from optiml.device.plan import Plan
from optiml.measure.model import LaunchShape
from optiml.ptx import Module, parse
from optiml.ptx.counters import AllocationCounters, Counters, LineCounters, SharedCounters, SpaceCounters
from optiml.records import Build, BuildReport, DeviceInfo, Kernel, Launch, Resources

COPY_PTX = """\
.version 8.0
.target sm_80
.address_size 64
.visible .entry copy(.param .u64 x, .param .u64 y, .param .u32 n)
{
.reg .b64 %rd<9>; .reg .b32 %r<9>; .reg .f32 %f<9>; .reg .pred %p<9>;
ld.param.u64 %rd1, [x]; ld.param.u64 %rd2, [y]; ld.param.u32 %r1, [n];
mov.u32 %r2, %ctaid.x; mov.u32 %r3, %ntid.x; mov.u32 %r4, %tid.x;
mad.lo.s32 %r5, %r2, %r3, %r4; setp.ge.s32 %p1, %r5, %r1; @%p1 bra $END;
mul.wide.s32 %rd3, %r5, 4; add.s64 %rd4, %rd1, %rd3; ld.global.f32 %f1, [%rd4];
add.s64 %rd5, %rd2, %rd3; st.global.f32 [%rd5], %f1;
$END: ret;
}
"""
COPY_SOURCE = """\
extern "C" __global__ void copy(const float* x, float* y, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = x[i];
}
"""
A100_EMULATED = DeviceInfo(
    name="NVIDIA A100 (emulated)", kind="emulator", arch="sm_80", model="a100", engine="numpy"
)  # fmt: skip
WARPS = 8  # of a block


def copy_module() -> Module:
    return parse(COPY_PTX)


def copy_counters(
    *,
    blocks: int = 16,
    array_bytes: int = 64 << 20,
    sectors_per_request: int = 4,
    lines_per_request: int | None = None,
    **changes: Any,
) -> Counters:
    """What `blocks` blocks of 256 threads of the copy kernel do; `sectors_per_request` 4 is coalesced, 32 is not."""
    warps = blocks * WARPS
    sectors = warps * sectors_per_request
    lines = warps * (lines_per_request or max(1, sectors_per_request // 4))
    space = SpaceCounters(
        requests=warps, sectors=sectors, bytes=warps * 128, ideal_sectors=warps * 4, lines=lines
    )  # fmt: skip
    distinct = warps * 4
    ops = {"int": 4, "memory": 2, "control": 2, "other": 6}
    made = Counters(
        blocks=blocks,
        warps=warps,
        warp_instructions=14 * warps,
        thread_instructions=14 * 32 * warps,
        branches=warps,
        divergent_branches=0,
        barriers=0,
        thread_ops={kind: 32 * number * warps for kind, number in ops.items()},
        warp_ops={kind: number * warps for kind, number in ops.items()},
        global_load=space,
        global_store=space,
        global_atomic=SpaceCounters(),
        local_load=SpaceCounters(),
        local_store=SpaceCounters(),
        shared_load=SharedCounters(),
        shared_store=SharedCounters(),
        shared_atomic=SharedCounters(),
        allocations={
            "x": AllocationCounters(
                bytes=array_bytes, load_sectors=sectors, load_misses=distinct, distinct_load_sectors=distinct
            ),
            "y": AllocationCounters(bytes=array_bytes, store_sectors=sectors, distinct_store_sectors=distinct),
        },
        block_executions={("copy", 0): warps, ("copy", 1): warps, ("copy", 2): warps},
        lines={
            2: LineCounters(warp_instructions=5 * warps, thread_instructions=160 * warps),
            3: LineCounters(
                warp_instructions=9 * warps, thread_instructions=288 * warps, load_requests=warps,
                load_sectors=sectors, store_requests=warps, store_sectors=sectors,
            ),
        },
    )  # fmt: skip
    return dataclasses.replace(made, **changes)


def copy_shape(blocks: int = 65536, **changes: Any) -> LaunchShape:
    shape = LaunchShape(
        symbol="copy", blocks=blocks, threads_per_block=256, registers_per_thread=16, shared_bytes_per_block=0
    )
    return dataclasses.replace(shape, **changes)


def copy_kernel() -> Kernel:
    launch = Launch(kernel="copy", grid=("ceil_div(n, 256)",), block=(256,), args=("x", "y", "n"))
    return Kernel(source=COPY_SOURCE, launches=(launch,))


def copy_build(*, spill_bytes: int = 0) -> Build:
    report = BuildReport(
        arch="sm_80", compiler="nvrtc 13.0", registers_per_thread=16, shared_bytes_per_block=0, stack_bytes=0,
        spill_bytes=spill_bytes, log="", seconds=0.0,
    )  # fmt: skip
    resources = Resources(registers_per_thread=16, shared_bytes_per_block=0, stack_bytes=0, spill_bytes=spill_bytes)
    return Build(
        kernel_id="0" * 16,
        report=report,
        ptx=COPY_PTX,
        cubin=b"",
        entries={"copy": "copy"},
        resources={"copy": resources},
    )


class CountingDevice:
    """Answers every run with the counters of the copy kernel for as many blocks as were asked for."""

    def __init__(
        self, info: DeviceInfo = A100_EMULATED, *, fails: Mapping[int | None, Exception] | None = None
    ) -> None:
        self.info = info
        self.asked: list[int | None] = []
        self.contents: list[Mapping[str, Any]] = []
        self._fails = fails or {}
        self.changes: dict[str, Any] = {}

    def run(
        self,
        build: Build,
        plan: Plan,
        contents: tuple[Mapping[str, Any], ...],
        *,
        timeout_s: float,
        count: bool = False,
        sample_blocks: int | None = None,
        l1_share_bytes: int = 0,
        outputs: bool = True,
        scrutiny: Scrutiny | None = None,
    ) -> RunResult:
        self.asked.append(sample_blocks)
        self.contents.append(contents[0])
        if sample_blocks in self._fails:
            raise self._fails[sample_blocks]
        launch = plan.launches[0]
        total = launch.grid[0]
        run = total if sample_blocks is None else min(total, sample_blocks)
        report = LaunchReport(
            symbol=launch.symbol,
            grid=launch.grid,
            block=launch.block,
            shared_bytes=0,
            blocks_total=total,
            blocks_run=run,
            counters=copy_counters(blocks=run, array_bytes=plan.arrays["x"].nbytes, **self.changes),
        )
        return RunResult(runs=(), launches=(report,))

    def close(self) -> None: ...
