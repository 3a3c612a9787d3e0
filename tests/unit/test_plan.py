"""From formulas to concrete launches."""

from __future__ import annotations

import struct
from typing import Any

import pytest

from optiml.codec import decode
from optiml.device.emulated import MODELS
from optiml.device.plan import BadLaunch, Plan, Pointer, Value, resolve_plan
from optiml.records import Build, BuildReport, Kernel, Problem, Resources, Workload

A100 = MODELS["a100"]
PROBLEM = decode(
    Problem,
    {
        "name": "p",
        "axes": {"n": {"type": "var"}},
        "inputs": {
            "x": {"dtype": "float32", "shape": ["n"]},
            "a": {"dtype": "float32", "shape": None},
            "k": {"dtype": "int32", "shape": None},
        },
        "outputs": {"y": {"dtype": "float32", "shape": ["n"]}},
        "reference": "def run(x): return x",
        "workloads": [{"axes": {"n": 1000}, "scalars": {"a": 0.5, "k": -3}}],
    },
    what="problem",
)


def plan(params: str = "", *, n: int = 1000, static_shared: int = 0, **launch: Any) -> Plan:
    ptx = f".visible .entry k(\n{params}\n)\n{{ ret; }}"
    fields = {"kernel": "k", "grid": ["ceil_div(n, B)"], "block": ["B"], "args": [], **launch}
    kernel = decode(Kernel, {"source": "k", "launches": [fields], "params": {"B": 256}}, what="kernel")
    report = BuildReport(
        arch="sm_80", compiler="c", registers_per_thread=8, shared_bytes_per_block=0, stack_bytes=0, spill_bytes=0,
        log="", seconds=0.0,
    )  # fmt: skip
    resources = Resources(registers_per_thread=8, shared_bytes_per_block=static_shared, stack_bytes=0, spill_bytes=0)
    build = Build(kernel_id="0" * 16, report=report, ptx=ptx, cubin=b"", entries={"k": "k"}, resources={"k": resources})
    return resolve_plan(kernel, build, PROBLEM, Workload(axes={"n": n}, scalars={"a": 0.5, "k": -3}), A100)


def test_sizes_are_evaluated_and_missing_extents_are_one() -> None:
    launch = plan().launches[0]
    assert (launch.grid, launch.block) == ((4, 1, 1), (256, 1, 1))


def test_arguments_take_the_type_that_the_ptx_declares() -> None:
    params = ",\n".join(
        [
            ".param .u64 .ptr .align 1 k_param_0", ".param .f32 k_param_1", ".param .u32 k_param_2",
            ".param .u64 k_param_3", ".param .f64 k_param_4", ".param .align 4 .b8 k_param_5[4]",
        ]
    )  # fmt: skip
    args = plan(params, args=["x", "a", "k", "n * 2", 1.5, "n"]).launches[0].args
    assert args[0] == Pointer(name="x")
    assert args[1:] == tuple(
        Value(data=data)
        for data in (
            struct.pack("<f", 0.5), struct.pack("<i", -3), struct.pack("<q", 2000), struct.pack("<d", 1.5),
            struct.pack("<i", 1000),
        )
    )  # fmt: skip


def test_clusters_and_cooperative_launches_are_kept() -> None:
    launch = plan(cluster=[1], cooperative=True).launches[0]
    assert (launch.cluster, launch.cooperative) == ((1, 1, 1), True)


def test_an_empty_grid_skips_the_launch() -> None:
    assert plan(n=0).launches == ()


@pytest.mark.parametrize(
    ("params", "launch", "message"),
    [
        ("", {"grid": ["0 - n"]}, "grid"),
        ("", {"grid": [1, 70000]}, "grid"),
        ("", {"block": [0]}, "block"),
        ("", {"block": [2048]}, "block"),
        ("", {"block": [1024, 2]}, "threads"),
        ("", {"block": [1, 1, 65]}, "block"),
        ("", {"shared_bytes": 163 * 1024 + 1}, "shared"),
        ("", {"shared_bytes": -1}, "shared"),
        ("", {"cluster": [2]}, "clusters need sm_90"),
        ("", {"cluster": [3]}, "multiple of the cluster"),
        ("", {"cluster": [16]}, "1 to 8 blocks"),
        ("", {"grid": ["n // (n - n)"]}, "divides by zero"),
        ("", {"args": ["x"]}, "takes 0 parameters and the plan gives 1"),
        (".param .u32 p", {"args": ["x"]}, "array is passed"),
        (".param .u32 p", {"args": [0.5]}, "fraction"),
        (".param .u32 p", {"args": ["n * 10000000000"]}, "does not fit"),
        (".param .align 8 .b8 p[24]", {"args": ["n"]}, "struct of 24 bytes"),
    ],
)
def test_a_launch_that_a_device_would_refuse_is_the_kernels_fault(
    params: str, launch: dict[str, Any], message: str
) -> None:
    with pytest.raises(BadLaunch, match=message):
        plan(params, **launch)


def test_static_and_dynamic_shared_memory_count_together() -> None:
    assert plan(shared_bytes=100 * 1024, static_shared=63 * 1024).launches[0].shared_bytes == 100 * 1024
    with pytest.raises(BadLaunch, match="static"):
        plan(shared_bytes=100 * 1024, static_shared=64 * 1024)
