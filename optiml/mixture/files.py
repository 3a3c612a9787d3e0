"""Model files on disk: where an expert lies, how large it is, and the digest that a checkpoint pins. No torch."""

from __future__ import annotations

import hashlib
import json
import math
import struct
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from optiml.errors import ModelFailed

INSTALL = "pip install 'optiml[mixture]'"
_PACKAGES = ("torch", "transformers", "safetensors", "accelerate")
_HEADER_LIMIT_BYTES = 100 << 20  # of a safetensors file, as its own reader has it
_SMALL_FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")
_WANTED = ("*.json", "*.safetensors", "*.model", "merges.txt", "vocab.txt")

# Parameters and download size of the default experts, from the files that their pages list.
KNOWN_EXPERTS = {
    "Qwen/Qwen2.5-Coder-1.5B": (1.54e9, 3.1e9),
    "hpcgroup/hpc-coder-v2-1.3b": (1.35e9, 2.7e9),
    "bigcode/starcoder2-3b": (3.03e9, 12.1e9),
}
BYTES_PER_PARAMETER = {"float64": 8.0, "float32": 4.0, "bfloat16": 2.0, "float16": 2.0, "4bit": 0.6}
WORKING_SHARE = 1.2  # of the weights: caches and intermediate results come on top


@dataclass(frozen=True, kw_only=True)
class ExpertFiles:
    """An expert on disk.

    Attributes:
        name: as the user wrote it, without the folders of a path.
        path: a model folder, or a `.gguf` file.
        parameters: how many the weights hold.
    """

    name: str
    path: Path
    parameters: int

    @property
    def is_gguf(self) -> bool:
        """Whether it is one GGUF file, whose weights are unpacked when it is loaded."""
        return self.path.suffix == ".gguf"


def require_packages() -> None:
    """Check that the extra is installed.

    Raises:
        ModelFailed: code `model_unavailable`, naming the extra.
    """
    lacking = [name for name in _PACKAGES if find_spec(name) is None]
    if lacking:
        raise ModelFailed(f"the mixture needs {', '.join(lacking)}, which the extra `mixture` brings: {INSTALL}")


def locate(expert: str, *, allow_download: bool = False) -> ExpertFiles:
    """Find an expert.

    Args:
        expert: a model folder, a `.gguf` file, or the name of a repository on the Hugging Face hub ("owner/name").
        allow_download: fetch a repository that is not here yet; otherwise nothing leaves this machine.

    Raises:
        ModelFailed: it is not here, or its weights are in a format that could run code.
    """
    path = Path(expert).expanduser()
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ModelFailed(f"there is no GGUF file {path.name}: check `experts` below [mixture]")
        return ExpertFiles(name=path.stem, path=path.resolve(), parameters=gguf_parameters(path))
    if not path.is_dir():
        path = _from_hub(expert, allow_download=allow_download)
    if not (path / "config.json").is_file():
        raise ModelFailed(f"{path.name} is no model folder: it has no config.json")
    return ExpertFiles(name=_name_of(expert), path=path.resolve(), parameters=folder_parameters(path))


def _name_of(expert: str) -> str:
    return expert if not Path(expert).expanduser().is_dir() else Path(expert).expanduser().resolve().name


def _from_hub(expert: str, *, allow_download: bool) -> Path:
    if expert.count("/") != 1 or expert.startswith((".", "/", "~")):
        raise ModelFailed(f"expert {expert[:100]!r} is neither a folder nor a .gguf file nor a hub name (owner/name)")
    require_packages()
    from huggingface_hub import snapshot_download  # part of the extra
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(expert, local_files_only=not allow_download, allow_patterns=list(_WANTED)))
    except LocalEntryNotFoundError as error:
        size = f" (about {KNOWN_EXPERTS[expert][1] / 1e9:.1f} GB)" if expert in KNOWN_EXPERTS else ""
        raise ModelFailed(
            f"expert {expert} is not on this machine{size}: download it with `hf download {expert}`, or set "
            "allow_download = true below [mixture]"
        ) from error
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        raise ModelFailed(f"expert {expert} could not be downloaded: {type(error).__name__}") from error


def folder_parameters(folder: Path) -> int:
    """Parameters in the safetensors files of a model folder, from their headers.

    Raises:
        ModelFailed: there are none, or one cannot be read.
    """
    weights = sorted(folder.glob("*.safetensors"))
    if not weights:
        raise ModelFailed(
            f"{folder.name} has no .safetensors weights; pickled ones could run code when loaded: convert them"
        )
    return sum(_elements(header) for path in weights for header in _tensors(path))


def _tensors(path: Path) -> list[dict[str, Any]]:
    try:
        with path.open("rb") as file:
            (size,) = struct.unpack("<Q", file.read(8))
            if size > _HEADER_LIMIT_BYTES:
                raise ValueError("the header is too long")
            header = json.loads(file.read(size))
        return [entry for name, entry in header.items() if name != "__metadata__"]
    except (OSError, ValueError, struct.error, AttributeError) as error:
        raise ModelFailed(f"{path.parent.name}/{path.name} is damaged: get it again") from error


def _elements(entry: dict[str, Any]) -> int:
    return math.prod(int(size) for size in entry["shape"])


def gguf_parameters(path: Path) -> int:
    """Parameters in a GGUF file.

    Raises:
        ModelFailed: the package `gguf` is missing, or the file is damaged.
    """
    if find_spec("gguf") is None:
        raise ModelFailed(f"GGUF files need the package gguf, which the extra `mixture` brings: {INSTALL}")
    from gguf import GGUFReader  # part of the extra

    try:
        return sum(int(tensor.n_elements) for tensor in GGUFReader(path).tensors)
    except (OSError, ValueError, IndexError, KeyError) as error:
        raise ModelFailed(f"{path.name} is no GGUF file, or is damaged: get it again") from error


def memory_bytes(files: ExpertFiles, dtype: str) -> int:
    """Memory that an expert needs to be loaded and used, in bytes; `dtype` may be `4bit`."""
    factor = BYTES_PER_PARAMETER[dtype]
    if files.is_gguf:
        factor = max(factor, 2 * BYTES_PER_PARAMETER["float32"])  # unpacked to float32, and copied once
    return int(files.parameters * factor * WORKING_SHARE)


def memory_free_bytes() -> int:
    """Memory of this machine that is available, GPUs apart; 0 where the system does not say."""
    try:
        with Path("/proc/meminfo").open(encoding="ascii") as lines:
            return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return 0


def digest_of(path: Path) -> str:
    """sha256 over an expert's configuration, tokenizer and weights: every byte that decides what it computes."""
    files = [path]
    if path.is_dir():
        files = [path / name for name in _SMALL_FILES if (path / name).is_file()] + sorted(path.glob("*.safetensors"))
    return _digest(tuple((str(file), file.stat().st_mtime_ns, file.stat().st_size) for file in files))


@cache
def _digest(files: tuple[tuple[str, int, int], ...]) -> str:
    whole = hashlib.sha256()
    for name, _, size in files:
        with open(name, "rb") as file:
            part = hashlib.file_digest(file, "sha256").digest()
        whole.update(Path(name).name.encode() + b"\0" + str(size).encode() + b"\0" + part)
    return whole.hexdigest()
