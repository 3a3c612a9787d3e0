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
    folders = [root / "bin" for root in _roots()]
    return next((folder / name for folder in folders if os.access(folder / name, os.X_OK)), None)


def library_folders() -> tuple[str, ...]:
    """Folders of the CUDA libraries that pycuda is linked against and that the loader may not know."""
    candidates = [root / part for root in _roots() for part in ("lib64", "lib")]
    return tuple(str(folder) for folder in candidates if folder.is_dir())


def _roots() -> list[Path]:
    """The toolkit, then what its wheels fill."""
    named = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_ROOT"), TOOLKIT]
    spec = find_spec("nvidia")
    wheels = [Path(item) / "cu13" for item in (spec.submodule_search_locations or ())] if spec else []
    return list(dict.fromkeys([*(Path(root) for root in named if root), *wheels]))
