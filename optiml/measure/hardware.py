"""One frozen table per GPU with every constant of the time model and of the emulated device.

`SOURCES` says for each field whether NVIDIA publishes it, whether it was read off micro-benchmarks on one H200, or
whether we assume it. The A100's measured-kind constants are carried over and therefore assumed. Calibrating the model
means replacing numbers in this file and nothing else: `tools/calibrate.py` fitted those of the H200 to 170 kernels of
17 problems timed on one, and its record is in `benchmarks/h200.json`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from optiml.errors import InvalidInput

SECTOR_BYTES = 32
WARP_THREADS = 32


@dataclass(frozen=True, kw_only=True)
class Latencies:
    """Cycles from issue to result."""

    alu: float  # integer, logic, fp32 add/mul/fma, conversions
    fp64: float
    sfu: float  # ex2, lg2, rcp, rsqrt, sin, cos
    shuffle: float
    tensor: float
    shared: float
    l1: float
    l2: float
    dram: float
    atomic: float  # global atomic whose result is used
    barrier: float


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """The limits, rates and latencies of one GPU."""

    key: str
    name: str
    arch: str
    calibration: str  # what stands behind the constants, for the reader of a profile
    # limits
    sms: int
    registers_per_sm: int
    max_registers_per_thread: int
    register_unit_per_warp: int  # registers are allocated to a warp in multiples of this
    shared_bytes_per_sm: int
    shared_bytes_per_block: int  # opt-in limit
    shared_unit_bytes: int  # shared memory is allocated to a block in multiples of this
    shared_reserved_bytes: int  # taken by the driver in every block
    l1_shared_bytes: int  # L1 and shared memory together, per SM
    l2_bytes: int
    max_threads_per_sm: int
    max_threads_per_block: int
    max_blocks_per_sm: int
    max_warps_per_sm: int
    # rates
    clock_hz: float
    dram_bytes_per_s: float  # peak
    dram_efficiency: float  # share of the peak that a plain copy reaches
    l2_bytes_per_s: float
    sm_l2_bytes_per_clock: float  # one SM's port into L2
    schedulers_per_sm: int  # one warp instruction a clock each
    fp32_lanes: int  # results per clock and SM, as all *_lanes
    int_lanes: int
    fp16_lanes: int  # instructions x threads; a packed instruction gives two results
    fp64_lanes: int
    sfu_lanes: int
    convert_lanes: int
    shuffle_lanes: int
    tensor_fmas: Mapping[str, int]  # element type -> dense multiply-adds per clock and SM
    l2_line_bytes: float  # L2 bandwidth that one 128-byte line of a request takes at least, however little it uses
    atomic_lanes_per_clock: float  # whole device, updates that do not collide
    atomic_request_clocks: float  # one warp request at one place of L2
    atomic_sector_clocks: float  # each further sector of that request
    atomic_place_bytes: int  # memory that one place of L2 is responsible for, in one piece
    shared_atomic_clocks: float  # per wavefront
    barrier_clocks: float  # of the load/store pipe, per warp
    latency: Latencies
    launch_us: float  # fixed cost of one launch, start to end on the device
    blocks_started_per_clock: float  # whole device
    warp_start_clocks: float  # an SM starts one warp in this time
    block_turnover_clocks: float  # from the end of a block to the first instruction of the one that takes its place
    overlap_loss: float  # share of the non-binding terms that does not hide behind the binding one

    @property
    def fp32_flops_per_s(self) -> float:
        """Peak of the fp32 pipes; a multiply-add counts two."""
        return 2 * self.fp32_lanes * self.sms * self.clock_hz

    def tensor_flops_per_s(self, element: str) -> float | None:
        """Dense tensor-core peak for an element type (`f16`, `tf32`, `f64`, `s8`, `f8`), None where there is none."""
        fmas = self.tensor_fmas.get(element)
        return None if fmas is None else 2 * fmas * self.sms * self.clock_hz


_TUNING = "NVIDIA tuning guide and CUDA programming guide, table of compute capabilities"
_THROUGHPUT = "CUDA programming guide, throughput of native arithmetic instructions"
_MEASURED = "micro-benchmarks on one H200, whose own values were then fitted to timed kernels; assumed for other GPUs"
SOURCES: Mapping[str, str] = {
    "sms": "NVIDIA data sheet", "registers_per_sm": _TUNING, "max_registers_per_thread": _TUNING,
    "register_unit_per_warp": "CUDA occupancy calculator", "shared_bytes_per_sm": _TUNING,
    "shared_bytes_per_block": _TUNING, "shared_unit_bytes": "CUDA occupancy calculator",
    "shared_reserved_bytes": _TUNING, "l1_shared_bytes": _TUNING, "l2_bytes": "NVIDIA data sheet",
    "max_threads_per_sm": _TUNING, "max_threads_per_block": _TUNING, "max_blocks_per_sm": _TUNING,
    "max_warps_per_sm": _TUNING, "clock_hz": "boost clock of the data sheet; H200 seen at 1980 MHz",
    "dram_bytes_per_s": "NVIDIA data sheet",
    "dram_efficiency": "a 1 GiB copy on one H200: 4.23 of 4.8 TB/s; fitted for the H200",
    "l2_bytes_per_s": _MEASURED, "sm_l2_bytes_per_clock": "64 B a clock and SM, architecture white paper",
    "schedulers_per_sm": "architecture white paper", "fp32_lanes": _THROUGHPUT, "int_lanes": _THROUGHPUT,
    "fp16_lanes": _THROUGHPUT + " (256 packed results)", "fp64_lanes": _THROUGHPUT, "sfu_lanes": _THROUGHPUT,
    "convert_lanes": _THROUGHPUT, "shuffle_lanes": _THROUGHPUT,
    "tensor_fmas": "architecture white paper, dense rates", "l2_line_bytes": _MEASURED,
    "atomic_lanes_per_clock": _MEASURED, "atomic_request_clocks": _MEASURED, "atomic_sector_clocks": _MEASURED,
    "atomic_place_bytes": _MEASURED, "shared_atomic_clocks": _MEASURED, "barrier_clocks": _MEASURED,
    "latency": _MEASURED + " (l1, l2, dram); the rest published microbenchmarks of the family, rounded",
    "launch_us": _MEASURED, "blocks_started_per_clock": _MEASURED, "warp_start_clocks": _MEASURED,
    "block_turnover_clocks": _MEASURED, "overlap_loss": _MEASURED,
}  # fmt: skip

_AMPERE_LATENCY = Latencies(
    alu=5, fp64=10, sfu=20, shuffle=24, tensor=33, shared=30, l1=36, l2=250, dram=550, atomic=600, barrier=20
)
_HOPPER_LATENCY = Latencies(
    alu=5, fp64=16, sfu=20, shuffle=24, tensor=33, shared=30, l1=36, l2=280, dram=680, atomic=700, barrier=20
)

A100 = Hardware(
    key="a100",
    name="NVIDIA A100 (80 GB SXM)",
    arch="sm_80",
    calibration="not calibrated on this GPU",
    sms=108,
    registers_per_sm=65536,
    max_registers_per_thread=255,
    register_unit_per_warp=256,
    shared_bytes_per_sm=164 * 1024,
    shared_bytes_per_block=163 * 1024,
    shared_unit_bytes=128,
    shared_reserved_bytes=1024,
    l1_shared_bytes=192 * 1024,
    l2_bytes=40 * 1024 * 1024,
    max_threads_per_sm=2048,
    max_threads_per_block=1024,
    max_blocks_per_sm=32,
    max_warps_per_sm=64,
    clock_hz=1.41e9,
    dram_bytes_per_s=2.039e12,
    dram_efficiency=0.88,
    l2_bytes_per_s=4.5e12,
    sm_l2_bytes_per_clock=64,
    schedulers_per_sm=4,
    fp32_lanes=64,
    int_lanes=64,
    fp16_lanes=128,
    fp64_lanes=32,
    sfu_lanes=16,
    convert_lanes=64,
    shuffle_lanes=32,
    tensor_fmas={"f16": 1024, "tf32": 512, "f64": 64, "s8": 2048},
    l2_line_bytes=64,
    atomic_lanes_per_clock=40,
    atomic_request_clocks=2.5,
    atomic_sector_clocks=0.8,
    atomic_place_bytes=2048,
    shared_atomic_clocks=3.0,
    barrier_clocks=1.2,
    latency=_AMPERE_LATENCY,
    launch_us=2.5,
    blocks_started_per_clock=0.83,
    warp_start_clocks=7,
    block_turnover_clocks=400,
    overlap_loss=0.10,
)
H100 = Hardware(
    key="h100",
    name="NVIDIA H100 (80 GB SXM)",
    arch="sm_90",
    calibration="not calibrated on this GPU",
    sms=132,
    registers_per_sm=65536,
    max_registers_per_thread=255,
    register_unit_per_warp=256,
    shared_bytes_per_sm=228 * 1024,
    shared_bytes_per_block=227 * 1024,
    shared_unit_bytes=128,
    shared_reserved_bytes=1024,
    l1_shared_bytes=256 * 1024,
    l2_bytes=50 * 1024 * 1024,
    max_threads_per_sm=2048,
    max_threads_per_block=1024,
    max_blocks_per_sm=32,
    max_warps_per_sm=64,
    clock_hz=1.98e9,
    dram_bytes_per_s=3.35e12,
    dram_efficiency=0.88,
    l2_bytes_per_s=7.0e12,
    sm_l2_bytes_per_clock=64,
    schedulers_per_sm=4,
    fp32_lanes=128,
    int_lanes=64,
    fp16_lanes=128,
    fp64_lanes=64,
    sfu_lanes=16,
    convert_lanes=64,
    shuffle_lanes=32,
    tensor_fmas={"f16": 2048, "tf32": 1024, "f64": 128, "s8": 4096, "f8": 4096},
    l2_line_bytes=64,
    atomic_lanes_per_clock=44,
    atomic_request_clocks=2.5,
    atomic_sector_clocks=0.8,
    atomic_place_bytes=2048,
    shared_atomic_clocks=3.0,
    barrier_clocks=1.2,
    latency=_HOPPER_LATENCY,
    launch_us=2.5,
    blocks_started_per_clock=0.83,
    warp_start_clocks=7,
    block_turnover_clocks=400,
    overlap_loss=0.10,
)
H200 = replace(  # the constants below `dram_bytes_per_s` were fitted by tools/calibrate.py
    H100,
    key="h200",
    name="NVIDIA H200 (141 GB SXM)",
    calibration="calibrated on one such GPU: median error 11 % on problems held out from the fit",
    dram_bytes_per_s=4.8e12,
    dram_efficiency=0.98,
    l2_bytes_per_s=5.035e12,
    atomic_request_clocks=3.062,
    atomic_sector_clocks=0.7048,
    launch_us=4.893,
    blocks_started_per_clock=0.9303,
    block_turnover_clocks=542.2,
    overlap_loss=0.08375,
    latency=replace(_HOPPER_LATENCY, alu=11.25, shuffle=44.65, dram=697.5),
)

HARDWARE: Mapping[str, Hardware] = {table.key: table for table in (A100, H100, H200)}


def hardware(model: str) -> Hardware:
    """The table of a device model (`DeviceInfo.model`).

    Raises:
        InvalidInput: no table for this model; the message lists those there are.
    """
    if model not in HARDWARE:
        raise InvalidInput(f"no time model for device model {model!r}; there is one for {', '.join(HARDWARE)}")
    return HARDWARE[model]
