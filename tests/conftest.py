"""Puts this folder on the path, so that tests can import `fakes`; shares one workbench between the slower tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from optiml.settings import read_settings
from optiml.workbench import Workbench


@pytest.fixture(scope="session")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workbench]:
    """A real workbench with an empty store and no GPU."""
    home = tmp_path_factory.mktemp("home")
    with Workbench(
        read_settings(environment={}, home=str(home), roots=(Path("/"),), device="emulator:a100", kernel_timeout_s=8.0)
    ) as made:
        yield made
