"""Fixtures of the emulator tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from launching import Launched, corpus_module, launch


@pytest.fixture(scope="session")
def corpus() -> Callable[..., Launched]:
    """Launch a kernel of the corpus: corpus("a", "vadd", grid, block, *args)."""

    def run(name: str, kernel: str, *args: Any, arch: str = "compute_80", **options: Any) -> Launched:
        return launch(corpus_module(name, arch), kernel, *args, **options)

    return run
