"""The same kernels on the embedded device and on a GPU: results bit by bit, and counts against hardware counters.

    python tools/emulator_vs_gpu.py [--json FILE] [--only TEXT] [--no-ncu] [--emulator-only]

Kernels: the seed and the strategies of every built-in problem, the sound kernels of the PTX corpus with the arguments
that the tests give them, and one probe for each approximate instruction. All are compiled with -fmad=false. Bars: the
results of kernels without approximate instructions, floating-point atomics or tensor cores are equal bit by bit;
approximate instructions stay within what the PTX ISA allows; global sectors and requests are within 1 % on 90 % of the
kernels, the rest explained; bank conflicts within 5 %, or within 1 % of the wavefronts.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import json
import os
import re
import statistics
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "emulator"))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from optiml.device.cuda import CudaDevice, find_gpus
from optiml.device.cuda_job import JobItem
from optiml.device.emulated import MODELS, EmulatedDevice
from optiml.device.plan import Plan, PlannedArray, PlannedLaunch, Pointer, Value, resolve_plan
from optiml.errors import OptimlError
from optiml.generate.catalogue import applicable, strategies, strategy_kernel
from optiml.measure.hardware import hardware
from optiml.measure.measured import stand_in
from optiml.measure.metrics import Observation, metric_values
from optiml.measure.model import LaunchShape, model_launch, weighted_counts, weighted_terms_us
from optiml.measure.nsight import combined, open_ncu, profile_each
from optiml.problems.data import draw, storage_dtype
from optiml.problems.problem import builtin_names, kernel_from_text, load_builtin, main_dtype
from optiml.ptx import parse
from optiml.records import Build, DeviceInfo, Kernel, Launch, Problem, Workload
from optiml.toolchain.nvrtc import CompileFailure, Compiler
from optiml.toolchain.signatures import with_launches
from optiml.verify.inputs import cost

ROOT = Path(__file__).resolve().parent.parent
MOST_COST = 4e6  # operations of a built-in problem's case: the emulator runs every block
WORKERS = max(1, min(12, (os.cpu_count() or 2) - 2))
TIMEOUT_S = 60.0
REQUESTS = (
    "l1tex__t_requests_pipe_lsu_mem_global_op_ld.sum",
    "l1tex__t_requests_pipe_lsu_mem_global_op_st.sum",
    "l1tex__t_requests_pipe_lsu_mem_global_op_red.sum",
)
SECTORS = (
    "l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum",
    "l1tex__t_sectors_pipe_lsu_mem_global_op_st.sum",
    "l1tex__t_sectors_pipe_lsu_mem_global_op_red.sum",
)
CONFLICTS = {
    "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_ld.sum": "l1tex__data_pipe_lsu_wavefronts_mem_shared_op_ld.sum",
    "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_st.sum": "l1tex__data_pipe_lsu_wavefronts_mem_shared_op_st.sum",
}
PROXIES = (
    "smsp__inst_executed.sum",
    "smsp__thread_inst_executed.sum",
    "smsp__thread_inst_executed_per_inst_executed.ratio",
    "smsp__sass_thread_inst_executed_op_fadd_pred_on.sum",
    "smsp__sass_thread_inst_executed_op_fmul_pred_on.sum",
    "smsp__sass_thread_inst_executed_op_ffma_pred_on.sum",
    "smsp__sass_thread_inst_executed_op_integer_pred_on.sum",
    "smsp__sass_thread_inst_executed_op_memory_pred_on.sum",
    "sm__inst_executed_pipe_xu.sum",
    "sm__inst_executed_pipe_fma.sum",
    "sm__inst_executed_pipe_tensor.sum",
    "l1tex__t_sectors.sum",
    "l1tex__t_sector_hit_rate.pct",
    "lts__t_sectors.sum",
    "dram__bytes.sum",
    "l1tex__data_pipe_lsu_wavefronts_mem_shared.sum",
)
# Only of the GPU: what the machine code does, to explain what the PTX does not.
EXPLAINING = (
    "smsp__inst_executed_op_global_ld.sum",
    "smsp__inst_executed_op_global_st.sum",
    "smsp__inst_executed_op_global_red.sum",
    "smsp__inst_executed_op_global_atom.sum",
    "l1tex__t_requests_pipe_lsu_mem_global_op_atom.sum",
    "l1tex__t_sectors_pipe_lsu_mem_global_op_atom.sum",
)
COMPARED = (*REQUESTS, *SECTORS, *CONFLICTS, *CONFLICTS.values(), *PROXIES)

UNSOUND = {  # of the corpus: their results are not defined, so there is nothing to compare
    "k_uninit": "reads shared memory that nobody wrote",
    "k_ldcg": "threads store different values to one word",
    "k_misc": "stores the clock",
}
APPROXIMATE = re.compile(
    r"\b(?:ex2|lg2|rcp|rsqrt|sqrt|sin|cos|tanh|div)\.(?:approx|full)|\b(?:mma|wmma|wgmma)\b|"
    r"\b(?:atom|red)\.[\w.:]*(?:f16|bf16|f32|f64)"
)
ATOMIC = re.compile(r"\b(?:atom|red)\.")

# PTX instruction, inputs from, to, bound: the largest error that the PTX ISA states, in ulp or absolute.
PROBES: tuple[tuple[str, str, float, float, str, float], ...] = (
    ("ex2", "ex2.approx.ftz.f32 %y, %x0;", -120.0, 120.0, "ulp", 2.0),
    ("lg2 near 1", "lg2.approx.ftz.f32 %y, %x0;", 0.5, 2.0, "absolute", 2.0**-21),
    ("lg2", "lg2.approx.ftz.f32 %y, %x0;", 4.0, 1e30, "ulp", 2.0),
    ("rcp", "rcp.approx.ftz.f32 %y, %x0;", 1e-30, 1e30, "ulp", 1.0),
    ("rsqrt", "rsqrt.approx.ftz.f32 %y, %x0;", 1e-30, 1e30, "ulp", 2.0),
    ("sqrt", "sqrt.approx.ftz.f32 %y, %x0;", 1e-30, 1e30, "ulp", 2.0),
    ("sin", "sin.approx.ftz.f32 %y, %x0;", -3.14, 3.14, "absolute", 2.0**-20.5),
    ("cos", "cos.approx.ftz.f32 %y, %x0;", -3.14, 3.14, "absolute", 2.0**-20.5),
    ("tanh", "tanh.approx.f32 %y, %x0;", -9.0, 9.0, "relative", 2.0**-10.0),
    ("div.full", "div.full.ftz.f32 %y, %x0, %x1;", 1e-10, 1e10, "ulp", 2.0),
    ("div.approx", "div.approx.ftz.f32 %y, %x0, %x1;", 1e-10, 1e10, "ulp", 2.0),
    ("rcp.rn", "rcp.rn.f32 %y, %x0;", 1e-30, 1e30, "ulp", 0.0),
    ("sqrt.rn", "sqrt.rn.f32 %y, %x0;", 1e-30, 1e30, "ulp", 0.0),
    ("div.rn", "div.rn.f32 %y, %x0, %x1;", 1e-10, 1e10, "ulp", 0.0),
    ("fma.rn", "fma.rn.f32 %y, %x0, %x1, %x0;", -1e10, 1e10, "ulp", 0.0),
)
PROBED = 1 << 16


@dataclass(frozen=True, kw_only=True)
class Subject:
    """One kernel with everything it needs."""

    name: str
    group: str  # builtin | corpus | probe
    build: Build
    plan: Plan
    contents: Mapping[str, Any]


# --- what is compared ------------------------------------------------------------------------------------------------
def builtin_subjects(compiler: Compiler, arch: str, limits: DeviceInfo, only: str | None) -> list[Subject]:
    """Seeds and strategies at the dearest of the problem's small cases."""
    found = []
    for name in builtin_names():
        builtin = load_builtin(name)
        problem = builtin.problem
        dtype = main_dtype(problem)
        kernels = {f"{name}/seed": kernel_from_text(builtin.seed_text, dtype=dtype)}
        for strategy in strategies(name):
            if applicable(strategy, problem, dtype):
                kernels[f"{name}/{strategy.name}"] = strategy_kernel(strategy, dtype)
        workload = _dearest(problem)
        for label, kernel in kernels.items():
            if only is None or only in label:
                found += _built_in(compiler, arch, limits, label, kernel, problem, workload)
    return found


def _dearest(problem: Problem) -> Workload:
    affordable = [workload for workload in problem.workloads if cost(problem, workload) <= MOST_COST]
    return max(affordable or problem.workloads[:1], key=lambda workload: cost(problem, workload))


def _built_in(
    compiler: Compiler,
    arch: str,
    limits: DeviceInfo,
    label: str,
    kernel: Kernel,
    problem: Problem,
    workload: Workload,
) -> list[Subject]:  # fmt: skip
    kernel = dataclasses.replace(with_launches(kernel, problem)[0], flags=(*kernel.flags, "-fmad=false"))
    build = compiler.compile(kernel, arch)
    if isinstance(build, CompileFailure):
        print(f"{label}: does not compile: {build.detail}", file=sys.stderr)
        return []
    try:
        plan = resolve_plan(kernel, build, problem, workload, limits)
    except OptimlError as error:
        print(f"{label}: {error}", file=sys.stderr)
        return []
    drawn = draw(problem, workload, seed=7)
    contents = {
        name: drawn[name] if name in drawn else np.zeros(array.shape, dtype=storage_dtype(array.dtype))
        for name, array in plan.arrays.items()
    }
    return [Subject(name=label, group="builtin", build=build, plan=plan, contents=contents)]


def corpus_subjects(compiler: Compiler, arch: str, only: str | None) -> list[Subject]:
    """The launches of the corpus tests, recorded while they run; each kernel once, with its largest grid."""
    import launching
    import pytest

    recorded: dict[tuple[str, str], tuple[int, tuple[Any, ...], dict[str, Any]]] = {}
    modules: dict[int, str] = {}
    original_module, original_launch = launching.corpus_module, launching.launch

    def named(name: str, arch: str = "compute_80") -> Any:
        module = original_module(name, arch)
        modules[id(module)] = name
        return module

    def recording(module: Any, kernel: str, *args: Any, same: bool = True, **options: Any) -> Any:
        before = [value.copy() if isinstance(value, np.ndarray) else value for value in args]
        launched = original_launch(module, kernel, *args, same=same, **options)
        plain = all(isinstance(value, np.ndarray | int | float | np.generic) for value in before[2:])
        if id(module) in modules and plain and same:
            size = int(np.prod(before[0])) * int(np.prod(before[1]))
            key = (modules[id(module)], kernel)
            if key not in recorded or recorded[key][0] < size:
                recorded[key] = (size, tuple(before), options)
        return launched

    launching.corpus_module, launching.launch = named, recording
    files = [str(ROOT / "tests" / "emulator" / name) for name in ("test_corpus_a.py", "test_corpus_bc.py")]
    status = pytest.main(["-q", "-p", "no:cacheprovider", "-k", "not compute_80", "-W", "ignore", *files])
    launching.corpus_module, launching.launch = original_module, original_launch
    print(f"corpus tests: exit {int(status)}, {len(recorded)} kernels recorded", file=sys.stderr)
    builds = {}
    for name in ("a", "b", "c"):
        source = (ROOT / "tests" / "emulator" / "data" / f"{name}.cu").read_text(encoding="utf-8")
        symbols = [kernel for file, kernel in recorded if file == name]
        launches = tuple(Launch(kernel=symbol, grid=(1,), block=(1,), args=()) for symbol in symbols)
        build = compiler.compile(Kernel(source=source, launches=launches, flags=("-fmad=false",)), arch)
        if isinstance(build, CompileFailure):
            print(f"corpus {name}: does not compile: {build.detail}", file=sys.stderr)
            continue
        builds[name] = build
    found = []
    for (file, kernel), (_, args, options) in recorded.items():
        label = f"{file}.cu/{kernel}"
        if file in builds and kernel not in UNSOUND and (only is None or only in label):
            found.append(_recorded(label, builds[file], kernel, args, options, launching))
    return found


def _recorded(
    label: str, build: Build, kernel: str, args: Sequence[Any], options: Mapping[str, Any], launching: Any
) -> Subject:
    params = parse(build.ptx).kernels[kernel].params
    arrays: dict[str, PlannedArray] = {}
    contents: dict[str, Any] = {}
    given: list[Pointer | Value] = []
    for index, (value, param) in enumerate(zip(args[2:], params, strict=True)):
        if isinstance(value, np.ndarray):
            name = f"arg{index}"
            bits = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
            arrays[name] = PlannedArray(dtype="uint8", shape=bits.shape, role="inout")
            contents[name] = bits
            given.append(Pointer(name=name))
        else:
            given.append(Value(data=np.array(value).astype(np.dtype(launching.SCALARS[param.type])).tobytes()))
    launch = PlannedLaunch(
        symbol=kernel,
        grid=launching.triple(args[0]),
        block=launching.triple(args[1]),
        shared_bytes=options.get("shared_bytes", 0),
        args=tuple(given),
    )
    return Subject(
        name=label, group="corpus", build=build, plan=Plan(steps=(launch,), arrays=arrays), contents=contents
    )  # fmt: skip


def probe_subjects(compiler: Compiler, arch: str, only: str | None) -> list[Subject]:
    """One kernel for each approximate instruction (and some exact ones) over many inputs."""
    rng = np.random.default_rng(11)
    found = []
    for label, body, low, high, _, _ in PROBES:
        if only is not None and only not in label:
            continue
        inputs = [_spread(rng, low, high) for _ in range(2 if "%x1" in body else 1)]
        launch = Launch(kernel="k", grid=(1,), block=(1,), args=())
        build = compiler.compile(Kernel(source=_as_cuda(body, len(inputs)), launches=(launch,)), arch)
        if isinstance(build, CompileFailure):
            print(f"probe {label}: {build.detail}", file=sys.stderr)
            continue
        names = [*(f"x{index}" for index in range(len(inputs))), "y"]
        contents = dict(zip(names, [*inputs, np.zeros(PROBED, np.float32)], strict=True))
        plan = Plan(
            steps=(
                PlannedLaunch(
                    symbol="k", grid=(PROBED // 256, 1, 1), block=(256, 1, 1), shared_bytes=0,
                    args=tuple(Pointer(name=name) for name in names),
                ),
            ),
            arrays={name: PlannedArray(dtype="float32", shape=(PROBED,), role="inout") for name in names},
        )  # fmt: skip
        found.append(Subject(name=f"probe/{label}", group="probe", build=build, plan=plan, contents=contents))
    return found


def _spread(rng: np.random.Generator, low: float, high: float) -> Any:
    if low > 0 and high / low > 100:
        return np.exp(rng.uniform(np.log(low), np.log(high), PROBED)).astype(np.float32)
    return rng.uniform(low, high, PROBED).astype(np.float32)


def _as_cuda(body: str, inputs: int) -> str:
    operands = "".join(f', "f"(x{index}[i])' for index in range(inputs)).removeprefix(", ")
    text = body.replace("%y", "%0")
    for index in range(inputs):
        text = text.replace(f"%x{index}", f"%{index + 1}")
    params = "".join(f"const float* x{index}, " for index in range(inputs))
    return (
        f'extern "C" __global__ void k({params}float* y) {{ int i = blockIdx.x * blockDim.x + threadIdx.x; float r; '
        f'asm volatile("{text}" : "=f"(r) : {operands}); y[i] = r; }}'
    )


# --- running ---------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True)
class Emulated:
    outputs: Mapping[str, Any]
    metrics: Mapping[str, float | None]


def emulate(subjects: Sequence[Subject], model: str) -> list[Emulated | str]:
    """Every subject with all its blocks, several at a time; a text where the emulator cannot."""
    devices = [EmulatedDevice(MODELS[model]) for _ in range(WORKERS)]
    free = collections.deque(devices)

    def one(subject: Subject) -> Emulated | str:
        device = free.popleft()
        try:
            result = device.run(subject.build, subject.plan, (subject.contents,), timeout_s=TIMEOUT_S, count=True)
        except OptimlError as error:
            return f"{error.code}: {error}"
        finally:
            free.append(device)
        return Emulated(outputs=result.runs[0], metrics=_metrics(subject, result.launches, model))

    try:
        with ThreadPoolExecutor(WORKERS) as pool:
            return list(pool.map(one, subjects))
    finally:
        for device in devices:
            device.close()


def _metrics(subject: Subject, reports: Sequence[Any], model: str) -> dict[str, float | None]:
    table, module = hardware(model), parse(subject.build.ptx)
    launches = []
    for planned, report in zip(subject.plan.launches, reports, strict=True):
        resources = subject.build.resources.get(planned.symbol)
        shape = LaunchShape(
            symbol=planned.symbol,
            blocks=int(np.prod(planned.grid)),
            threads_per_block=int(np.prod(planned.block)),
            registers_per_thread=None if resources is None else resources.registers_per_thread,
            shared_bytes_per_block=planned.shared_bytes
            + (0 if resources is None else resources.shared_bytes_per_block),
        )
        launches.append((1.0, model_launch(shape, report.counters, module=module, hardware=table)))
    seen = Observation(
        counts=weighted_counts(launches),
        terms_us=weighted_terms_us(launches),
        time_us=sum(launch.total_us for _, launch in launches),
        longest=max((launch for _, launch in launches), key=lambda launch: launch.total_us),
        hardware=table,
    )
    return metric_values(seen, COMPARED)


def run_on_gpu(subjects: Sequence[Subject], device: CudaDevice) -> list[Mapping[str, Any] | str]:
    """Outputs of every subject, or why there are none."""
    answers: list[Mapping[str, Any] | str] = []
    for subject in subjects:
        try:
            result = device.run(subject.build, subject.plan, (subject.contents,), timeout_s=TIMEOUT_S)
            answers.append(result.runs[0])
        except OptimlError as error:
            answers.append(f"{error.code}: {error}")
    return answers


# --- comparing -------------------------------------------------------------------------------------------------------
def compare_results(subject: Subject, emulated: Mapping[str, Any], real: Mapping[str, Any]) -> dict[str, Any]:
    """Whether all bytes are the same; where approximate instructions make that too much to ask, how far they are."""
    same, worst = True, 0.0
    for name in subject.plan.arrays:
        mine, theirs = np.asarray(emulated[name]), np.asarray(real[name])
        if mine.tobytes() == theirs.tobytes():
            continue
        if mine.dtype.kind == "f" and _equal_but_for_nan(mine, theirs):
            continue
        same = False
        if mine.dtype.kind == "f":
            worst = max(worst, _relative(mine, theirs))
    text = _code_of(subject)
    return {
        "bit_equal": same,
        "relative": worst,
        "approximate": bool(APPROXIMATE.search(text)),
        "atomic": bool(ATOMIC.search(text)),
    }


def _code_of(subject: Subject) -> str:
    """PTX of the kernels that are launched, without that of the others in the same file."""
    parts = re.split(r"(?=\.(?:visible\s+)?\.?entry\s)", subject.build.ptx)
    symbols = {launch.symbol for launch in subject.plan.launches}
    chosen = [part for part in parts if (match := re.search(r"entry\s+([\w$]+)", part)) and match.group(1) in symbols]
    return "\n".join(chosen) or subject.build.ptx


def _equal_but_for_nan(mine: Any, theirs: Any) -> bool:
    bits = np.dtype(f"u{mine.dtype.itemsize}")
    both = np.isnan(mine) & np.isnan(theirs)
    return bool(np.all((mine.view(bits) == theirs.view(bits)) | both))


def _relative(mine: Any, theirs: Any) -> float:
    a, b = mine.astype(np.float64), theirs.astype(np.float64)
    usable = np.isfinite(a) & np.isfinite(b)
    scale = float(np.max(np.abs(b[usable]), initial=0.0)) or 1.0
    return float(np.max(np.abs(a - b)[usable], initial=0.0)) / scale


def probe_error(subject: Subject, emulated: Mapping[str, Any], real: Mapping[str, Any]) -> dict[str, Any]:
    """The largest difference between the two devices, in the unit of the instruction's bound."""
    label = subject.name.removeprefix("probe/")
    _, _, _, _, kind, bound = next(probe for probe in PROBES if probe[0] == label)
    mine, theirs = np.asarray(emulated["y"], np.float32), np.asarray(real["y"], np.float32)
    a, b = mine.astype(np.float64), theirs.astype(np.float64)
    if kind == "ulp":
        error = np.abs(_ordered(mine) - _ordered(theirs)).max()
    elif kind == "absolute":
        error = np.abs(a - b).max()
    else:
        error = (np.abs(a - b) / np.maximum(np.abs(b), 1e-30)).max()
    equal = float(np.mean(mine.view(np.uint32) == theirs.view(np.uint32)))
    return {"kind": kind, "bound": bound, "error": float(error), "ok": bool(error <= 2 * bound), "equal_share": equal}


def _ordered(values: Any) -> Any:
    """Integers in the order of the floats, one apart where the floats are neighbours."""
    bits = values.view(np.int32).astype(np.int64)
    return np.where(bits < 0, -(bits & 0x7FFFFFFF), bits)


def close_enough(mine: float | None, theirs: float | None, share: float) -> bool:
    if mine is None or theirs is None:
        return False
    return abs(mine - theirs) <= share * max(abs(theirs), 1.0)


def compare_counts(mine: Mapping[str, Any], theirs: Mapping[str, Any], code: str) -> dict[str, Any]:
    """Ratios emulator / GPU, which bars hold, and what the machine code says where they do not."""
    real = dict(theirs)
    for kind in ("requests", "sectors"):  # the emulator counts atomics and reductions as one
        red, atom = (f"l1tex__t_{kind}_pipe_lsu_mem_global_op_{op}.sum" for op in ("red", "atom"))
        if real.get(red) is not None:
            real[red] += real.get(atom) or 0.0
    ratios = {
        name: round(mine[name] / real[name], 4) for name in COMPARED if mine.get(name) is not None and real.get(name)
    }
    memory = {name: close_enough(mine.get(name), real.get(name), 0.01) for name in (*REQUESTS, *SECTORS)}
    conflicts, explained = {}, []
    for name, whole in CONFLICTS.items():
        if mine.get(name) is None or real.get(name) is None:
            continue
        off = abs(mine[name] - real[name])
        conflicts[name] = off <= 0.05 * real[name] or off <= 0.01 * (real.get(whole) or 0.0) or off <= 1.0
        passes = mine.get(whole) or 0.0
        if not conflicts[name] and passes > 1.2 * real[whole]:
            explained.append(
                f"shared: {real[whole]:.0f} passes where the PTX has {passes:.0f}: ptxas made accesses wider"
            )
    for kind, name in (("ld", REQUESTS[0]), ("st", REQUESTS[1])):
        executed = real.get(f"smsp__inst_executed_op_global_{kind}.sum")
        if not memory[name] and executed is not None and not close_enough(mine.get(name), executed, 0.01):
            explained.append(
                f"{kind}: the machine code executes {executed:.0f} instructions where the PTX has {mine[name]:.0f}: "
                "ptxas merged, removed or repeated them"
            )
    if not explained and not all(memory.values()) and "printf" in code:
        explained.append("device printf writes its buffer in global memory, which no PTX instruction shows")
    if not explained and not memory[REQUESTS[0]] and re.search(r"\.cas\b|\batom\.[\w.]*noftz", code):
        explained.append(
            "ld: atomics that the machine has no instruction for are loops, which load first and try again"
        )
    red = REQUESTS[2], SECTORS[2]
    if memory[red[0]] and not memory[red[1]]:
        explained.append(
            "red: as many requests; threads of a warp that hit one word go one after another, and the GPU counts the "
            "sectors of every pass"
        )
    return {
        "ratios": ratios, "memory_ok": all(memory.values()), "off": [name for name, ok in memory.items() if not ok],
        "conflicts_ok": all(conflicts.values()), "conflicts_off": [name for name, ok in conflicts.items() if not ok],
        "explained": explained,
        "values": {
            name: [mine.get(name), real.get(name)]
            for name in (*REQUESTS, *SECTORS, *CONFLICTS, *CONFLICTS.values(), *EXPLAINING)
            if real.get(name) or mine.get(name)
        },
    }  # fmt: skip


# --- the whole -------------------------------------------------------------------------------------------------------
def gather(only: str | None, arch: str, limits: DeviceInfo) -> list[Subject]:
    compiler = Compiler()
    try:
        return [
            *probe_subjects(compiler, arch, only),
            *builtin_subjects(compiler, arch, limits, only),
            *corpus_subjects(compiler, arch, only),
        ]
    finally:
        compiler.close()


def check(
    *, only: str | None = None, with_ncu: bool = True, leave_out: Collection[str] = ()
) -> dict[str, Any]:  # fmt: skip
    """Everything but the kernels of these names, as one record of figures."""
    started = time.monotonic()
    gpu = find_gpus()[0]
    model = stand_in(gpu.info.model, gpu.arch)
    subjects = [subject for subject in gather(only, gpu.arch, gpu.info) if subject.name not in leave_out]
    note(started, f"{len(subjects)} kernels compiled")
    emulated = emulate(subjects, model)
    note(started, "emulated")
    device = CudaDevice(gpu)
    try:
        real = run_on_gpu(subjects, device)
    finally:
        device.close()
    note(started, "run on the GPU")
    counted = profiled(subjects, real, gpu.index) if with_ncu else ["not asked for"] * len(subjects)
    note(started, "profiled")
    rows = {}
    for subject, mine, theirs, counters in zip(subjects, emulated, real, counted, strict=True):
        row: dict[str, Any] = {"group": subject.group}
        if isinstance(mine, str) or isinstance(theirs, str):
            row["emulator" if isinstance(mine, str) else "gpu"] = mine if isinstance(mine, str) else theirs
        else:
            row["result"] = (
                probe_error(subject, mine.outputs, theirs)
                if subject.group == "probe"
                else compare_results(subject, mine.outputs, theirs)
            )
            if isinstance(counters, str):
                row["ncu"] = counters
            elif subject.group != "probe":
                row["counts"] = compare_counts(mine.metrics, counters, _code_of(subject))
        rows[subject.name] = row
    return {"device": gpu.name, "arch": gpu.arch, "seconds": round(time.monotonic() - started, 1),
            "summary": summary(rows), "kernels": rows}  # fmt: skip


def profiled(subjects: Sequence[Subject], real: Sequence[Any], index: int) -> list[Mapping[str, Any] | str]:
    try:
        ncu = open_ncu()
    except OptimlError as error:
        return [f"{error.code}: {error}"] * len(subjects)
    wanted = [number for number, subject in enumerate(subjects)
              if subject.group != "probe" and not isinstance(real[number], str)]  # fmt: skip
    items = [
        JobItem(name=subjects[number].name, build=subjects[number].build, plan=subjects[number].plan,
                contents=subjects[number].contents)
        for number in wanted
    ]  # fmt: skip
    answers: list[Mapping[str, Any] | str] = ["not profiled"] * len(subjects)
    names = (*COMPARED, *EXPLAINING)
    try:
        found = profile_each(ncu, items, metrics=(*names, "gpu__time_duration.sum"), device=index)
    except OptimlError as error:
        return [f"{error.code}: {error}"] * len(subjects)
    for number, launches in zip(wanted, found, strict=True):
        answers[number] = (
            f"{launches.code}: {launches}"
            if isinstance(launches, OptimlError)
            else combined([(1.0, launch) for launch in launches], names)
        )
    return answers


def summary(rows: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The bars, and the ratio of every metric over all kernels."""
    results = {name: row["result"] for name, row in rows.items() if "result" in row and row["group"] != "probe"}
    exact = {name: item for name, item in results.items() if not item["approximate"]}
    rough = {name: item for name, item in results.items() if item["approximate"]}
    counts = {name: row["counts"] for name, row in rows.items() if "counts" in row}
    probes = {name: row["result"] for name, row in rows.items() if row["group"] == "probe" and "result" in row}
    ratios = {}
    for metric in COMPARED:
        values = [item["ratios"][metric] for item in counts.values() if metric in item["ratios"]]
        if values:
            ratios[metric] = {
                "kernels": len(values), "median": round(statistics.median(values), 4),
                "within_1_pct": round(sum(abs(value - 1) <= 0.01 for value in values) / len(values), 3),
                "least": round(min(values), 3), "most": round(max(values), 3),
            }  # fmt: skip
    off = {name: item for name, item in counts.items() if not item["memory_ok"]}
    return {
        "kernels": len(rows),
        "not_compared": {name: row.get("emulator") or row.get("gpu") or row.get("ncu") for name, row in rows.items()
                         if "result" not in row or ("counts" not in row and row["group"] != "probe")},
        "exact_kernels": len(exact),
        "exact_bit_equal": sum(item["bit_equal"] for item in exact.values()),
        "exact_different": [name for name, item in exact.items() if not item["bit_equal"]],
        "approximate_kernels": len(rough),
        "approximate_bit_equal": sum(item["bit_equal"] for item in rough.values()),
        "approximate_worst_relative": max((item["relative"] for item in rough.values()), default=0.0),
        "probes_within_bounds": sum(item["ok"] for item in probes.values()),
        "probes": len(probes),
        "counted": len(counts),
        "memory_within_1_pct": sum(item["memory_ok"] for item in counts.values()),
        "memory_share": round(sum(item["memory_ok"] for item in counts.values()) / max(1, len(counts)), 3),
        "memory_off": {name: {"off": item["off"], "why": item["explained"] or ["unexplained"]}
                       for name, item in off.items()},
        "conflicts_within": sum(item["conflicts_ok"] for item in counts.values()),
        "conflicts_off": {
            name: {"off": item["conflicts_off"], "why": [why for why in item["explained"] if why.startswith("shared")]
                   or ["unexplained"]}
            for name, item in counts.items() if not item["conflicts_ok"]
        },
        "ratios": ratios,
    }  # fmt: skip


def note(started: float, text: str) -> None:
    print(f"{time.monotonic() - started:6.1f} s  {text}", file=sys.stderr)


def emulator_only(only: str | None) -> None:
    """Without a GPU: which kernels compile and run on the emulator, and how long that takes."""
    started = time.monotonic()
    subjects = gather(only, "sm_90", MODELS["h200"])
    note(started, f"{len(subjects)} kernels compiled")
    for subject, answer in zip(subjects, emulate(subjects, "h200"), strict=True):
        if isinstance(answer, str):
            print(f"{subject.name}: {answer}")
    note(started, "emulated")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the record there")
    parser.add_argument("--only", help="kernels whose name contains this")
    parser.add_argument("--no-ncu", action="store_true", help="results only")
    parser.add_argument("--emulator-only", action="store_true", help="no GPU: what would be compared")
    options = parser.parse_args()
    if options.emulator_only:
        emulator_only(options.only)
        return
    record = check(only=options.only, with_ncu=not options.no_ncu)
    if options.json is not None:
        options.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(record["summary"], indent=1))


if __name__ == "__main__":
    main()
