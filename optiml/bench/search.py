"""How far the search takes the built-in kernels, and the whole path from an intent to a searched kernel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from optiml.errors import OptimlError
from optiml.problems.problem import builtin_names
from optiml.records import SearchResult
from optiml.workbench import Workbench

SUITE = {  # kernels that papers on kernel generation report, as a user would ask for them
    "relu": "relu of a float array",
    "matmul": "multiply two float matrices of 1024 x 1024",
    "multi_head_attention": "multi-head attention with 8 heads of size 64, batch 4, sequence length 512, no mask",
    "max_pool3d": "3D max pooling with window 3, stride 2 and padding 1",
    "cross_entropy": "cross entropy of each row, not reduced",
    "dot": "dot product of two float vectors",
    "matrix_copy": "copy a 4096 x 4096 float matrix",
    "softmax": "softmax of each row of a 16384 x 1024 float matrix",
}
Progress = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One search."""

    problem: str
    start: str  # seed, or the strategy that the intent was answered with
    status: str
    before_us: float | None
    after_us: float | None
    speedup: float | None
    source: str | None  # modelled | measured
    evaluations: int
    path: tuple[str, ...]
    stopped_because: str | None


@dataclass(frozen=True, kw_only=True)
class SearchBench:
    """All searches, and the geometric mean of the speed-ups of those that ended well."""

    evaluations: int
    seed: int
    device: str
    proposer: str
    rows: tuple[Row, ...]
    geometric_mean: float | None
    schema: int = 1


def bench_search(
    bench: Workbench,
    *,
    problems: Sequence[str] | None = None,
    evaluations: int = 24,
    seed: int = 0,
    proposer: str = "builtin",
    device: str = "auto",
    on_progress: Progress = lambda text: None,
) -> SearchBench:
    """Search from the naive seed of each problem; all built-in ones unless named."""
    rows = []
    for name in problems or builtin_names():
        bench.problem(name)  # unknown ones are named before anything runs
    for name in problems or builtin_names():
        run_id = bench.start_search(name, evaluations=evaluations, seed=seed, proposer=proposer, device=device)
        rows.append(_row(name, "seed", run_id, bench))
        on_progress(_line(rows[-1]))
    return _bench(rows, evaluations, seed, proposer, bench, device)


def bench_suite(
    bench: Workbench,
    *,
    evaluations: int = 24,
    seed: int = 0,
    proposer: str = "builtin",
    device: str = "auto",
    on_progress: Progress = lambda text: None,
) -> SearchBench:
    """From an intent to a searched kernel: the catalogue's first answer is where each search starts."""
    rows = []
    for name, intent in SUITE.items():
        made = bench.generate(intent, generator="catalogue", device=device)
        if made.problem is None or not made.candidates:
            rows.append(
                Row(
                    problem=name, start="none", status="failed", before_us=None, after_us=None, speedup=None,
                    source=None, evaluations=0, path=(), stopped_because=made.summary,
                )
            )  # fmt: skip
            continue
        first = made.candidates[0]
        run_id = bench.start_search(
            made.problem, first.kernel, evaluations=evaluations, seed=seed, proposer=proposer, device=device
        )
        rows.append(_row(name, first.strategy, run_id, bench))
        on_progress(_line(rows[-1]))
    return _bench(rows, evaluations, seed, proposer, bench, device)


def _row(name: str, start: str, run_id: str, bench: Workbench) -> Row:
    stopped: str | None = None
    try:
        result: SearchResult = bench.run_search(run_id)
    except OptimlError as error:
        result, stopped = bench.search_result(run_id), f"{error.code}: {error}"
    before, after = (
        None if item is None or item.profile is None else item.profile.time.median_us
        for item in (result.baseline, result.best)
    )
    return Row(
        problem=name,
        start=start,
        status=result.status,
        before_us=before,
        after_us=after,
        speedup=None if result.speedup is None else round(result.speedup.median, 4),
        source=None if result.speedup is None else result.speedup.source,
        evaluations=result.spent.evaluations,
        path=tuple(step.edit for step in result.path),
        stopped_because=stopped or result.stopped_because,
    )


def _line(row: Row) -> str:
    found = "no result" if row.speedup is None else f"{row.speedup:.2f}x"
    return f"{row.problem}: {found} after {row.evaluations} kernels"


def _bench(
    rows: Sequence[Row], evaluations: int, seed: int, proposer: str, bench: Workbench, device: str
) -> SearchBench:  # fmt: skip
    speedups = [row.speedup for row in rows if row.speedup is not None]
    return SearchBench(
        evaluations=evaluations,
        seed=seed,
        device=bench.evaluator(device).device.info.name,
        proposer=proposer,
        rows=tuple(rows),
        geometric_mean=round(float(np.exp(np.mean(np.log(speedups)))), 4) if speedups else None,
    )
