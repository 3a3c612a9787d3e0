"""Every record of the pipeline, in pipeline order: Problem, Kernel, Build, Verdict, Profile, Judgement, search.

Field names are the wire names of the contract. Records are frozen and keyword-only; mappings inside them are
never written after construction. `optiml.codec` turns them into JSON and back.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import ConfigDict

from optiml.errors import Fault

STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
OMIT_IF_NONE: Mapping[str, Any] = {"omit_if_none": True}  # "not asked for -> no key"

Scalar = int | float | bool
Size = int | str  # an integer or an expression (optiml.expressions)

DTYPES = (
    "float64", "float32", "float16", "bfloat16", "float8_e4m3", "float8_e5m2",
    "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "bool",
)  # fmt: skip
Dtype = Literal[
    "float64", "float32", "float16", "bfloat16", "float8_e4m3", "float8_e5m2",
    "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "bool",
]  # fmt: skip


# --- Problem (contract §1) -------------------------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True)
class Axis:
    """A named size: a constant, or a variable with its domain."""

    __pydantic_config__ = STRICT
    type: Literal["var", "const"]
    value: int | None = None
    min: int | None = None
    max: int | None = None
    multiple_of: int | None = None
    choices: tuple[int, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class Tensor:
    """An array, or a scalar passed by value where `shape` is None."""

    __pydantic_config__ = STRICT
    dtype: Dtype
    shape: tuple[Size, ...] | None


@dataclass(frozen=True, kw_only=True)
class Distribution:
    """How the contents of one input are drawn: a named distribution, literal values, or a file."""

    __pydantic_config__ = STRICT
    distribution: str | None = None
    low: int | None = None
    high: int | None = None
    values: tuple[Any, ...] | None = None
    npy: str | None = None


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Concrete sizes, scalars and input distributions; `weight` counts in `bench` entries only."""

    __pydantic_config__ = STRICT
    axes: Mapping[str, int]
    scalars: Mapping[str, Scalar] = field(default_factory=dict)
    inputs: Mapping[str, str | Distribution] = field(default_factory=dict)
    weight: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Tolerance:
    """`|actual - expected| <= atol + rtol * |expected|`."""

    __pydantic_config__ = STRICT
    rtol: float
    atol: float


@dataclass(frozen=True, kw_only=True)
class KernelOracle:
    """A trusted kernel that defines what is right (optimise-only)."""

    __pydantic_config__ = STRICT
    kernel: Kernel


@dataclass(frozen=True, kw_only=True)
class Problem:
    """What a right kernel must compute."""

    __pydantic_config__ = STRICT
    name: str
    axes: Mapping[str, Axis]
    inputs: Mapping[str, Tensor]
    outputs: Mapping[str, Tensor]
    reference: str | KernelOracle
    workloads: tuple[Workload, ...]
    description: str = ""
    constraints: tuple[str, ...] = ()
    reference_framework: Literal["numpy", "torch"] = "numpy"
    bench: tuple[Workload, ...] = ()
    baselines: Mapping[str, str] = field(default_factory=dict)
    tolerance: Tolerance | None = None
    accumulation: Size | None = None
    flops: Size | None = None
    bytes: Size | None = None
    op_type: str = ""
    tags: tuple[str, ...] = ()
    drafted: bool = False
    schema: int = 1


# --- Kernel (contract §2) --------------------------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True)
class Launch:
    """One kernel launch; every size is an expression of axes, integer scalars and params."""

    __pydantic_config__ = STRICT
    kernel: str
    grid: tuple[Size, ...]
    block: tuple[Size, ...]
    args: tuple[Size | float, ...]
    shared_bytes: Size = 0
    cluster: tuple[Size, ...] | None = None
    cooperative: bool = False


@dataclass(frozen=True, kw_only=True)
class Workspace:
    """Scratch memory of a kernel, restored before every run."""

    __pydantic_config__ = STRICT
    dtype: Dtype
    shape: tuple[Size, ...]
    init: Literal["none", "zero"] = "none"


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """Device code with its launch plan. An empty `launches` is derived from the problem before use."""

    __pydantic_config__ = STRICT
    source: str
    language: Literal["cuda", "ptx"] = "cuda"
    launches: tuple[Launch, ...] = ()
    params: Mapping[str, Scalar] = field(default_factory=dict)
    tunables: Mapping[str, tuple[Scalar, ...]] = field(default_factory=dict)
    workspace: Mapping[str, Workspace] = field(default_factory=dict)
    flags: tuple[str, ...] = ()
    launcher: str | None = None
    schema: int = 1


# --- Build -----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True)
class Resources:
    """What ptxas reports of one kernel entry."""

    registers_per_thread: int
    shared_bytes_per_block: int
    stack_bytes: int
    spill_bytes: int


@dataclass(frozen=True, kw_only=True)
class BuildReport:
    """The part of a build that a caller sees (contract §5 `build`); resources are the largest over the launches."""

    arch: str
    compiler: str
    registers_per_thread: int | None
    shared_bytes_per_block: int | None
    stack_bytes: int | None
    spill_bytes: int | None
    log: str
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Build:
    """A compiled kernel: text and binary for one architecture."""

    kernel_id: str
    report: BuildReport
    ptx: str
    cubin: bytes
    entries: Mapping[str, str]  # name in the launch plan -> symbol in the binary
    resources: Mapping[str, Resources]  # symbol -> what ptxas said
    launcher_library: bytes = b""  # host code of a kernel with a launcher: a shared library without a CUDA runtime
    recorder: bytes = b""  # the program that calls it under the recording runtime


# --- Verdict (contract §5, §6) ---------------------------------------------------------------------------------------
Reason = Literal[
    "host_escape", "problem_degenerate", "forbidden_source", "compile_failed", "resource_limit", "bad_launch",
    "timed_out", "fault", "race", "mutated_input", "unwritten_output", "nonfinite", "state_across_runs",
    "hard_coded", "imprecise", "wrong_values", "too_fast",
]  # fmt: skip
Status = Literal["accepted", "rejected", "unverified"]
Level = Literal["L0", "L1", "L2"]


@dataclass(frozen=True, kw_only=True)
class DeviceInfo:
    """A device and the limits a launch has to respect. Rates are those of the hardware it is, or stands for."""

    name: str
    kind: Literal["cuda", "emulator"]
    arch: str  # "sm_80"
    model: str  # key of the hardware table: "a100" | "h100" | "h200" | "other"
    engine: str  # what executes: "native" or "numpy" on the embedded device, "cuda" on a GPU
    max_threads_per_block: int = 1024
    max_shared_bytes_per_block: int = 163 * 1024  # opt-in limit
    max_grid: tuple[int, int, int] = (2**31 - 1, 65535, 65535)
    max_block: tuple[int, int, int] = (1024, 1024, 64)


@dataclass(frozen=True, kw_only=True)
class CaseResult:
    """One comparison with the reference. The seed stays private."""

    axes: Mapping[str, int]
    scalars: Mapping[str, Scalar] = field(default_factory=dict)
    distribution: Mapping[str, str]
    ok: bool
    hidden: bool
    max_abs_error: float | None
    max_rel_error: float | None
    tolerance: Tolerance | None


@dataclass(frozen=True, kw_only=True)
class Mismatch:
    """The first element that is wrong."""

    output: str
    index: tuple[int, ...]
    expected: float | int | None
    actual: float | int | None
    axes: Mapping[str, int]
    unwritten: bool


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Whether a kernel is right, by which levels, and if not why not."""

    kernel_id: str
    status: Status
    reason: Reason | None
    detail: str | None
    levels: tuple[Level, ...]
    summary: str
    next_action: str
    warnings: tuple[str, ...] = ()
    build: BuildReport | None = None
    cases: tuple[CaseResult, ...] = ()
    domain: str = ""
    oracle: Literal["reference", "kernel", "drafted"] = "reference"
    first_mismatch: Mismatch | None = None
    fault: Fault | None = None
    sanitizer: Mapping[str, str] | None = field(default=None, metadata=OMIT_IF_NONE)
    likely_cause: str | None = field(default=None, metadata=OMIT_IF_NONE)  # a guess from the pattern of wrong values
    smallest_failing: Mapping[str, int] | None = field(default=None, metadata=OMIT_IF_NONE)  # sizes, as far as tried
    tolerance_policy: str | None = field(default=None, metadata=OMIT_IF_NONE)  # how values were compared
    device: DeviceInfo | None = None
    cached: bool = False
    seconds: float = 0.0
    uri: str = ""
    schema: int = 1

    def __post_init__(self) -> None:
        if self.status == "accepted" and (self.reason is not None or self.fault is not None):
            raise ValueError(f"an accepted kernel has no reason against it: {self.reason}")
        if self.status == "rejected" and self.reason is None:
            raise ValueError("a rejection names its reason")


# --- Profile (contract §7) -------------------------------------------------------------------------------------------
Source = Literal["measured", "modelled"]
MetricSource = Literal["ncu", "counted", "modelled"]


@dataclass(frozen=True, kw_only=True)
class Time:
    """Time of one run of the launch plan. Modelled times have no spread and no runs."""

    median_us: float
    p10_us: float | None
    p90_us: float | None
    runs: int
    noise_pct: float | None
    source: Source


@dataclass(frozen=True, kw_only=True)
class Bottleneck:
    """What bounds the kernel, with the figures that say so."""

    kind: Literal["memory", "compute", "latency", "launch"]
    evidence: tuple[str, ...]
    advice: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class HotLine:
    """A source line and its share of the work of the binding resource."""

    line: int
    source: str
    sectors_per_request: float | None
    share_pct: float


@dataclass(frozen=True, kw_only=True)
class Occupancy:
    """Theoretical occupancy and the resource that limits it."""

    theoretical_pct: float
    limiter: Literal["threads", "registers", "shared_memory", "blocks"]
    blocks_per_sm: int


@dataclass(frozen=True, kw_only=True)
class SpeedOfLight:
    """The least time the problem's own bytes and operations allow on this device."""

    us: float
    pct: float
    bound: str  # "dram" | "fp32" | "tensor" | "launch"


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A kernel against a baseline; `ratio` > 1 means the kernel is faster than the baseline."""

    ratio: float
    ci95: tuple[float, float] | None
    noise_pct: float | None
    verdict: Literal["faster", "same", "slower", "inconclusive"]
    metric_changes: Mapping[str, float]  # metric -> new / old, where it moved
    source: Source
    baseline_kernel_id: str = ""
    reasons: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class BenchProfile:
    """The profile of one bench entry."""

    axes: Mapping[str, int]
    weight: float
    time: Time
    metrics: Mapping[str, float | None]
    terms_us: Mapping[str, float]  # the terms of the time model; empty when measured
    blocks_total: int
    blocks_run: int


@dataclass(frozen=True, kw_only=True)
class Profile:
    """What a kernel costs on a device, and why."""

    kernel_id: str
    axes: Mapping[str, int]
    time: Time
    metrics: Mapping[str, float | None]
    metric_source: Mapping[str, MetricSource]
    bottleneck: Bottleneck
    hot_lines: tuple[HotLine, ...]
    occupancy: Occupancy | None
    speed_of_light: SpeedOfLight | None
    summary: str
    next_action: str
    warnings: tuple[str, ...] = ()
    energy_mj: float | None = None
    baselines: Mapping[str, float] = field(default_factory=dict)
    conditions: Mapping[str, str] = field(default_factory=dict)
    bench: tuple[BenchProfile, ...] = ()
    cached: bool = False
    report_uri: str = ""
    comparison: Comparison | None = field(default=None, metadata=OMIT_IF_NONE)
    schema: int = 1


# --- What a report of Nsight Compute says (profile_ncu with `report` or `command`) ------------------------------------
@dataclass(frozen=True, kw_only=True)
class ReportedLine:
    """A source line with its share of the profiler's samples, and what its warps waited for, in per cent of them."""

    file: str  # name without folders
    line: int
    source: str
    share_pct: float
    sectors_per_request: float | None
    stalls: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class RuleFinding:
    """What a rule of Nsight Compute found. `speedup_pct` is its own estimate of what a cure could save."""

    rule: str
    title: str
    message: str
    speedup_pct: float | None


@dataclass(frozen=True, kw_only=True)
class ReportedKernel:
    """One profiled launch."""

    name: str
    grid: tuple[int, int, int] | None
    block: tuple[int, int, int] | None
    metrics: Mapping[str, float | None]
    bottleneck: Bottleneck | None  # None where the report lacks the metrics that tell
    hot_lines: tuple[ReportedLine, ...]
    findings: tuple[RuleFinding, ...]


@dataclass(frozen=True, kw_only=True)
class NsightReport:
    """The kernels of one report, the longest first; `total` counts all that the report holds and the filter lets by."""

    summary: str
    next_action: str
    warnings: tuple[str, ...]
    device: str
    kernels: tuple[ReportedKernel, ...]
    total: int
    schema: int = 1


# --- Judgement (contract §8) -----------------------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    kind: Literal["memory", "compute", "latency", "launch", "unknown"]
    evidence: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class ExpectedChange:
    metric: str
    direction: Literal["down", "up"]
    factor: float | None


@dataclass(frozen=True, kw_only=True)
class Suggestion:
    edit: str
    why: str
    patch: str | None


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """An opinion on an edit: it ranks what to try and never accepts a kernel. `score` lies in 0..1."""

    summary: str
    next_action: str
    score: float
    verdict: Literal["try", "reject", "measure_again"]
    diagnosis: Diagnosis
    addresses_diagnosis: bool | None
    expected: tuple[ExpectedChange, ...]
    risks: tuple[str, ...]
    static_deltas: Mapping[str, tuple[float | None, float | None]]
    suggestions: tuple[Suggestion, ...]
    judge: str
    warnings: tuple[str, ...] = ()
    schema: int = 1


# --- Generated (contract §9) -----------------------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True)
class Candidate:
    kernel_id: str
    kernel: Kernel
    generator: str
    strategy: str
    rationale: str
    verdict: Verdict | None


@dataclass(frozen=True, kw_only=True)
class Generated:
    status: Literal["done", "needs_kernel"]
    candidates: tuple[Candidate, ...]
    problem: Problem | None
    assumed: tuple[str, ...]
    summary: str
    next_action: str
    warnings: tuple[str, ...] = ()
    template: str | None = None  # with needs_kernel: a kernel file to fill in
    schema: int = 1


# --- Evaluation and search (contract §10) ----------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True)
class Reward:
    """The composite reward and its four parts (optiml.reward), each in -1..1; `total` decides where to search."""

    time: float
    proxies: float
    guardrails: float
    judge: float
    total: float


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """One kernel, built, verified and profiled; stages after the first failure are None."""

    kernel_id: str
    verdict: Verdict
    profile: Profile | None
    fingerprint: str | None  # sha256 of the normalised PTX and the launch plan; equal code has equal fingerprints
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Speedup:
    median: float
    ci95: tuple[float, float] | None
    source: Source


@dataclass(frozen=True, kw_only=True)
class PathStep:
    """One edit between the input kernel and the best one."""

    edit: str
    rationale: str
    diagnosis: str
    kernel_id: str
    metric_changes: Mapping[str, float]
    reward: Reward
    time_ratio: float  # time before / time after; > 1 is faster
    ci95: tuple[float, float] | None
    kept_because: str | None = None  # set where the step did not lower the time


@dataclass(frozen=True, kw_only=True)
class Evaluated:
    """A kernel with what is known of it, as a search result shows it."""

    kernel_id: str
    kernel: Kernel
    verdict: Verdict
    profile: Profile | None


@dataclass(frozen=True, kw_only=True)
class Spent:
    evaluations: int
    seconds: float
    accepted: int
    rejected: int
    duplicates: int


RunStatus = Literal["running", "needs_proposals", "finished", "cancelled", "failed"]


@dataclass(frozen=True, kw_only=True)
class SearchResult:
    run_id: str
    status: RunStatus
    seed: int
    problem: str
    best: Evaluated | None
    baseline: Evaluated | None
    speedup: Speedup | None
    path: tuple[PathStep, ...]
    explanation: tuple[str, ...]
    spent: Spent
    stopped_because: str | None
    summary: str
    next_action: str
    warnings: tuple[str, ...] = ()
    report_uri: str = ""
    written_to: str | None = field(default=None, metadata=OMIT_IF_NONE)
    schema: int = 1
