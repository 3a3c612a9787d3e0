"""Every test here needs a GPU that CUDA shows; elsewhere it is skipped with the reason."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from optiml.device.cuda import find_gpus, has_gpu_nodes
from optiml.errors import SetupError
from optiml.settings import read_settings
from optiml.workbench import Workbench


def why_not() -> str | None:
    """Why no GPU can be used here."""
    if not has_gpu_nodes():
        return "no NVIDIA GPU here"
    try:
        return None if find_gpus() else "CUDA shows no GPU to this process"
    except SetupError as error:
        return str(error)


@pytest.fixture(scope="session")
def gpu(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workbench]:
    """A real workbench on cuda:0."""
    why = why_not()
    if why is not None:
        pytest.skip(why)
    home = tmp_path_factory.mktemp("home")
    with Workbench(
        read_settings(environment={}, home=str(home), roots=(Path("/"),), device="cuda:0", kernel_timeout_s=5.0)
    ) as made:
        yield made
