"""What a GPU's child does, over a driver made of numpy."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import fake_cuda
import numpy as np
import pytest
from fake_cuda import FakeCuda, FakeDriverError

from optiml.device.cuda_job import JobItem, carry_out, write_job
from optiml.device.plan import Copy, Memset, Plan, PlannedArray, PlannedLaunch, Pointer, Upload, Value
from optiml.device.wire import argument_offsets, wire_arrays, wire_steps
from optiml.errors import InvalidInput, KernelFault
from optiml.records import Build, BuildReport

N = 100
PLAN = Plan(
    steps=(
        PlannedLaunch(
            symbol="double", grid=(1, 1, 1), block=(128, 1, 1), shared_bytes=0,
            args=(Pointer(name="x"), Pointer(name="y"), Value(data=N.to_bytes(4, "little"))),
        ),
    ),
    arrays={
        "x": PlannedArray(dtype="float32", shape=(N,), role="input"),
        "y": PlannedArray(dtype="float32", shape=(N,), role="output"),
    },
)  # fmt: skip
REPORT = BuildReport(
    arch="sm_80", compiler="none", registers_per_thread=8, shared_bytes_per_block=0, stack_bytes=0, spill_bytes=0,
    log="", seconds=0.0,
)  # fmt: skip
PTX = ".visible .entry double(.param .u64 x, .param .u64 y, .param .u32 n)"
BUILD = Build(kernel_id="0" * 16, report=REPORT, ptx=PTX, cubin=b"cubin", entries={"double": "double"}, resources={})


def double(cuda: FakeCuda, x: int, y: int, n: int) -> None:
    cuda.view(y, 4 * n).view(np.float32)[:] = 2 * cuda.view(x, 4 * n).view(np.float32)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> tuple[FakeCuda, Any]:
    fake, module = fake_cuda.install(monkeypatch)
    fake.kernels["double"] = double
    return fake, module


def test_offsets_follow_the_alignment_of_each_parameter() -> None:
    ptx = ".entry k(.param .u8 a, .param .align 8 .b8 s[12], .param .u32 b, .param .f64 c)"
    assert argument_offsets(ptx, "k") == [0, 8, 20, 24]


def header(runs: int = 1, **changes: Any) -> dict[str, Any]:
    return {"arrays": wire_arrays(PLAN), "steps": wire_steps(PLAN, PTX), "runs": runs, "outputs": True, **changes}


def values(*arrays: Any) -> list[memoryview]:
    return [np.asarray(item, dtype=np.float32).view(np.uint8).data for item in arrays]


def test_every_run_gets_its_own_contents_and_answers_all_arrays(cuda: tuple[FakeCuda, Any]) -> None:
    context = cuda[1].CudaContext(0)
    first, second = np.arange(N), np.ones(N)
    reply, answers = context.run(header(runs=2), memoryview(b"c"), values(first, np.zeros(N), second, [5.0]))
    found = [np.frombuffer(item, dtype=np.float32) for item in answers]
    assert np.array_equal(found[1], 2 * first)
    assert np.array_equal(found[2], second)
    assert np.array_equal(found[3], 2 * second)
    assert reply["launches"][0]["blocks_run"] == 1


def test_contents_that_are_too_short_are_repeated(cuda: tuple[FakeCuda, Any]) -> None:
    cuda[0].kernels["double"] = lambda *_: None
    _, answers = cuda[1].CudaContext(0).run(header(), memoryview(b"c"), values([1, 2, 3], np.zeros(N)))
    assert np.array_equal(np.frombuffer(answers[0], dtype=np.float32), np.resize([1, 2, 3], N))


@pytest.mark.parametrize(
    ("offset", "where"), [(4 * N, "0 bytes behind the end of y"), (-8, "8 bytes before the start")]
)
def test_a_write_between_the_arrays_is_an_access_out_of_bounds(
    cuda: tuple[FakeCuda, Any], offset: int, where: str
) -> None:
    def overrun(fake: FakeCuda, x: int, y: int, n: int) -> None:
        fake.view(y + offset, 1)[:] ^= 255

    cuda[0].kernels["double"] = overrun
    with pytest.raises(KernelFault, match=where) as caught:
        cuda[1].CudaContext(0).run(header(), memoryview(b"c"), values(np.zeros(N), np.zeros(N)))
    assert caught.value.fault.kind == "out_of_bounds"


def test_copying_one_guard_over_another_is_seen(cuda: tuple[FakeCuda, Any]) -> None:
    def copy_too_much(fake: FakeCuda, x: int, y: int, n: int) -> None:
        fake.view(y, 4 * n + 64)[:] = fake.view(x, 4 * n + 64).copy()

    cuda[0].kernels["double"] = copy_too_much
    with pytest.raises(KernelFault, match="behind the end of y"):
        cuda[1].CudaContext(0).run(header(), memoryview(b"c"), values(np.zeros(N), np.zeros(N)))


def test_nothing_of_an_earlier_call_is_left_in_memory(cuda: tuple[FakeCuda, Any]) -> None:
    context = cuda[1].CudaContext(0)
    context.run(header(), memoryview(b"c"), values(np.full(N, 7.0), np.zeros(N)))
    seen: list[int] = []

    def scan(fake: FakeCuda, x: int, y: int, n: int) -> None:
        seen.append(int((fake.memory.view(np.float32) == 14.0).sum()))

    cuda[0].kernels["double"] = scan
    context.run(header(), memoryview(b"c"), values(np.zeros(N), np.zeros(N)))
    assert seen == [0]


def test_arrays_lie_elsewhere_in_another_call(cuda: tuple[FakeCuda, Any]) -> None:
    places = set()
    cuda[0].kernels["double"] = lambda fake, x, y, n: places.add((x, y))
    context = cuda[1].CudaContext(0)
    for _ in range(12):
        context.run(header(), memoryview(b"c"), values(np.zeros(N), np.zeros(N)))
    assert len(places) > 3
    assert all(x % 256 == 0 and y % 256 == 0 for x, y in places)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("cuStreamSynchronize failed: an illegal memory access was encountered", "out_of_bounds"),
        ("cuStreamSynchronize failed: misaligned address", "misaligned"),
        ("cuStreamSynchronize failed: unspecified launch failure", "trap"),
        ("cuStreamSynchronize failed: something new", "illegal"),
    ],
)
def test_what_the_driver_reports_becomes_a_fault(cuda: tuple[FakeCuda, Any], text: str, kind: str) -> None:
    def broken(*_: Any) -> None:
        raise FakeDriverError(text)

    cuda[0].kernels["double"] = broken
    with pytest.raises(KernelFault) as caught:
        cuda[1].CudaContext(0).run(header(), memoryview(b"c"), values(np.zeros(N), np.zeros(N)))
    assert caught.value.fault.kind == kind


def test_a_refused_launch_is_no_fault(cuda: tuple[FakeCuda, Any]) -> None:
    def refused(*_: Any) -> None:
        raise FakeDriverError("cuLaunchKernel failed: too many resources requested for launch")

    cuda[0].kernels["double"] = refused
    with pytest.raises(InvalidInput, match="refused the launch"):
        cuda[1].CudaContext(0).run(header(), memoryview(b"c"), values(np.zeros(N), np.zeros(N)))


def test_shared_memory_above_48_kib_is_asked_for(cuda: tuple[FakeCuda, Any]) -> None:
    steps = [{**wire_steps(PLAN, PTX)[0], "shared_bytes": 64 << 10}]
    cuda[1].CudaContext(0).run(header(steps=steps), memoryview(b"c"), values(np.zeros(N), np.zeros(N)))
    assert cuda[0].attributes == [("shared", 64 << 10)]


def doubled(cuda: tuple[FakeCuda, Any], **changes: Any) -> bool:
    """Whether a launch with these changes computes what the ordinary one does."""
    steps = [{**wire_steps(PLAN, PTX)[0], **changes}]
    contents = values(np.arange(N), np.zeros(N))
    _, answers = cuda[1].CudaContext(0).run(header(steps=steps), memoryview(b"c"), contents)
    return np.array_equal(np.frombuffer(answers[1], dtype=np.float32), 2 * np.arange(N))


def test_a_launch_in_clusters_is_asked_for_as_such(cuda: tuple[FakeCuda, Any]) -> None:
    assert doubled(cuda, cluster=(2, 1, 1))
    ((name, value),) = cuda[0].node_attributes
    assert (name, value.clusterDim.x, value.clusterDim.z) == ("cluster", 2, 1)


def test_a_cooperative_launch_gets_its_sizes_and_arguments(cuda: tuple[FakeCuda, Any]) -> None:
    assert doubled(cuda, cooperative=True)
    assert cuda[0].cooperative == [(1, 1, 1, 128, 1, 1, 0)]


def test_a_launch_both_cooperative_and_in_clusters_is_refused(cuda: tuple[FakeCuda, Any]) -> None:
    with pytest.raises(InvalidInput, match="at once"):
        doubled(cuda, cooperative=True, cluster=(2, 1, 1))


def test_transfers_of_a_launcher_are_carried_out_in_order(cuda: tuple[FakeCuda, Any]) -> None:
    place = Pointer(name="y", offset=4)
    plan = Plan(
        steps=(
            Memset(target=Pointer(name="y"), value=1, nbytes=4 * N),
            Upload(target=place, content=Value(data=bytes(8), pointers=((0, Pointer(name="x", offset=16)),))),
            Copy(source=place, target=Pointer(name="y", offset=40), nbytes=8),
        ),
        arrays=PLAN.arrays,
    )
    context = cuda[1].CudaContext(0)
    _, answers = context.run(header(steps=wire_steps(plan, PTX)), memoryview(b"c"), values(np.zeros(N), np.zeros(N)))
    y = np.frombuffer(answers[1], dtype=np.uint8)
    address = int.from_bytes(y[4:12].tobytes(), "little")
    assert address % 256 == 16
    assert y[40:48].tobytes() == y[4:12].tobytes()
    assert set(y[12:40]) == {1}


def test_a_transfer_that_leaves_its_array_is_refused(cuda: tuple[FakeCuda, Any]) -> None:
    plan = Plan(steps=(Memset(target=Pointer(name="y", offset=8), value=1, nbytes=4 * N),), arrays=PLAN.arrays)
    with pytest.raises(InvalidInput, match="leave its 400 bytes"):
        cuda[1].CudaContext(0).run(header(steps=wire_steps(plan)), memoryview(b"c"), values(np.zeros(N), np.zeros(N)))


def test_a_timer_restores_every_run_from_the_next_set_and_runs_a_b_b_a(cuda: tuple[FakeCuda, Any]) -> None:
    fake, module = cuda
    order: list[tuple[str, float]] = []

    def noted(name: str) -> Any:
        def kernel(fake: FakeCuda, x: int, y: int, n: int) -> None:
            order.append((name, float(fake.view(x, 4).view(np.float32)[0])))
            fake.view(x, 4).view(np.float32)[0] = -1.0

        return kernel

    fake.kernels.update(a=noted("a"), b=noted("b"))
    blobs = [memoryview(b"c"), *values(np.zeros(N), np.full(N, 1.0), np.full(N, 2.0))]
    arrays = [{**array, "blobs": [0, 0] if array["name"] == "y" else [2, 3]} for array in wire_arrays(PLAN)]
    arrays[1]["blobs"] = [1, 1]
    subjects = [
        {"cubin": 0, "arrays": arrays, "steps": [{**wire_steps(PLAN, PTX)[0], "symbol": name}], "graph": False}
        for name in "ab"
    ]
    context = module.CudaContext(0)
    before = fake.live
    context.open_timer({"subjects": subjects}, blobs)
    _, answer = context.sample({"rounds": 2, "flush": True})
    times = np.frombuffer(answer[0], dtype=np.float32).reshape(2, 2, 2)
    assert order == [("a", 1), ("b", 1), ("b", 2), ("a", 2)] * 2
    assert np.all(times == 500.0)
    reply, arrays_now = context.timed_outputs({"subject": 0})
    assert reply["set"] == 1
    assert len(arrays_now) == 2
    context.close_timer()
    assert fake.live == before


def test_a_job_runs_its_items_in_order_and_leaves_unnamed_contents_alone(
    cuda: tuple[FakeCuda, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs: list[float] = []
    cuda[0].kernels["double"] = lambda fake, x, y, n: runs.append(float(fake.view(x, 4).view(np.float32)[0]))
    items = [
        JobItem(name=f"k{value}", build=BUILD, plan=PLAN, contents={"x": np.full(N, value, np.float32)}, runs=2)
        for value in (3.0, 4.0)
    ]
    write_job(tmp_path, items)
    assert json.loads((tmp_path / "job.json").read_text())["items"][0]["arrays"][1]["content"] is None
    assert carry_out(tmp_path) == 0
    assert runs == [3.0, 3.0, 4.0, 4.0]
    assert capsys.readouterr().out == "item 0 k3.0\nitem 1 k4.0\n"
    assert cuda[0].live == 0


def test_a_job_stops_at_the_kernel_that_breaks_the_context(
    cuda: tuple[FakeCuda, Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(*_: Any) -> None:
        raise FakeDriverError("cuStreamSynchronize failed: misaligned address")

    cuda[0].kernels["double"] = broken
    monkeypatch.setattr(os, "_exit", sys.exit)
    write_job(tmp_path, [JobItem(name=name, build=BUILD, plan=PLAN, contents={}) for name in "pq"])
    with pytest.raises(SystemExit, match="3"):
        carry_out(tmp_path)
    assert "failed 0 it made an access that is not aligned" in capsys.readouterr().out
