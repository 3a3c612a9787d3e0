"""The fake workbench takes what the real one takes, so that front ends tested on it work on the real one."""

import inspect

import pytest
from fakes import FakeCheck, FakeProgress, FakeSummary, FakeWorkbench

from optiml.workbench import Check, RunSummary, SearchProgress, Workbench

METHODS = [
    "problem",
    "kernel",
    "verify",
    "profile",
    "judge",
    "generate",
    "start_search",
    "run_search",
    "search_result",
    "runs",
    "cancel_search",
    "report",
    "tree",
    "doctor",
    "ptx",
    "last_profile",
    "known_kernel",
    "close",
]


@pytest.mark.parametrize("method", METHODS)
def test_a_method_has_the_parameters_and_defaults_of_the_real_one(method: str) -> None:
    real, fake = (inspect.signature(getattr(kind, method)).parameters for kind in (Workbench, FakeWorkbench))
    assert [(item.name, item.kind, item.default) for item in fake.values()] == [
        (item.name, item.kind, item.default) for item in real.values()
    ]


@pytest.mark.parametrize(
    ("fake", "real"), [(FakeProgress, SearchProgress), (FakeSummary, RunSummary), (FakeCheck, Check)]
)
def test_a_record_has_the_fields_of_the_real_one(fake: type, real: type) -> None:
    assert list(inspect.get_annotations(fake)) == list(inspect.get_annotations(real))
