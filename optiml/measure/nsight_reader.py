"""Hardware counters for a profile made on a GPU: all launches of all bench entries in one profiled process."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from optiml.device.cuda_job import JobItem
from optiml.device.device import TimedDevice
from optiml.errors import InvalidInput, SetupError
from optiml.measure.measured import Counters
from optiml.measure.nsight import Ncu, combined, metric_names, profile_job
from optiml.measure.nsight_report import read_report
from optiml.measure.nsight_rules import BASICS, bottleneck_of
from optiml.measure.timing import BenchInputs, Contender, contents_of
from optiml.records import HotLine, Kernel, ReportedKernel
from optiml.toolchain.nvrtc import SOURCE_NAME

VERSION = 1


class NsightReader:
    """Reads counters with Nsight Compute; see `CounterReader`.

    Args:
        ncu: the profiler, or why there is none, which every call then raises.
        gpu: index of the GPU among those that CUDA shows.
        hold: a block in which nobody else uses the GPU.
    """

    def __init__(self, ncu: Ncu | SetupError, *, gpu: int, hold: Callable[[], AbstractContextManager[object]]) -> None:
        self._ncu = ncu
        self._gpu = gpu
        self._hold = hold

    @property
    def version(self) -> str:
        """Also says that counters were refused, so that no profile without them is taken for one with them later."""
        return f"ncu/{self._ncu.code if isinstance(self._ncu, SetupError) else self._ncu.version}/{VERSION}"

    def read(
        self,
        kernel: Kernel,
        subject: Contender,
        inputs: BenchInputs,
        device: TimedDevice,
        *,
        metrics: Sequence[str] | None,
        timeout_s: float,
    ) -> Counters:
        """Counters of one run of each plan of `subject`, and the source lines where its warps were seen waiting."""
        del device, timeout_s  # what the profiler may take is known better by what it has to do
        ncu = self._ncu
        if isinstance(ncu, SetupError):
            raise SetupError(str(ncu), code=ncu.code)
        names = metric_names(metrics)
        items = [
            JobItem(
                name=f"entry {index}", build=subject.build, plan=plan, contents=contents_of(plan, inputs.sets[index][0])
            )
            for index, plan in enumerate(subject.plans)
        ]
        with tempfile.TemporaryDirectory(prefix="optiml-ncu-") as folder:
            report = Path(folder) / "kernel.ncu-rep"
            with self._hold():
                try:
                    entries = profile_job(
                        ncu, items, metrics=tuple(dict.fromkeys((*names, *BASICS))), device=self._gpu, report=report
                    )
                except SetupError as error:
                    self._ncu = error  # a missing permission does not come back by trying again
                    raise
            longest, warnings = _longest(report)
        weighted = [
            (workload.weight, launch)
            for workload, launches in zip(inputs.bench, entries, strict=True)
            for launch in launches
        ]
        lines = () if longest is None else hot_lines(longest, kernel.source)
        return Counters(
            values=combined(weighted, names),
            hot_lines=lines,
            bottleneck=bottleneck_of(combined(weighted, BASICS), hot_line=lines[0].line if lines else None),
            conditions={"ncu": ncu.version},
            warnings=warnings,
        )


def _longest(report: Path) -> tuple[ReportedKernel | None, tuple[str, ...]]:
    try:
        return read_report(report, metrics=()).kernels[0], ()
    except (SetupError, InvalidInput) as error:
        return None, (f"no source lines from the profiler: {error}",)


def hot_lines(kernel: ReportedKernel, source: str) -> tuple[HotLine, ...]:
    """The lines of a kernel's own text among those of a report; the others lie in headers."""
    text = source.splitlines()
    return tuple(
        HotLine(
            line=item.line,
            source=text[item.line - 1].strip()[:120] if 0 < item.line <= len(text) else "",
            sectors_per_request=item.sectors_per_request,
            share_pct=item.share_pct,
        )
        for item in kernel.hot_lines
        if item.file == SOURCE_NAME
    )
