"""Where NVIDIA's programs lie: on PATH, in the CUDA toolkit, or in the folders that its wheels fill."""

from __future__ import annotations

import os
import shutil
from importlib.util import find_spec
from pathlib import Path

TOOLKIT = "/usr/local/cuda"


def find_tool(name: str) -> Path | None:
    """The full path of a program of the CUDA toolkit (`ncu`, `compute-sanitizer`, `nvcc`), None if it is not here."""
    found = shutil.which(name)
    if found is not None:
        return Path(found)
    roots = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_ROOT"), TOOLKIT]
    folders = [Path(root) / "bin" for root in roots if root]
    spec = find_spec("nvidia")
    folders += [Path(item) / "cu13" / "bin" for item in (spec.submodule_search_locations or ())] if spec else []
    return next((folder / name for folder in folders if os.access(folder / name, os.X_OK)), None)
