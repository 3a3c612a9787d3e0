"""What the configured experts need of disk and memory, found without loading or downloading anything."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from optiml.errors import ModelFailed
from optiml.mixture.files import (
    BYTES_PER_PARAMETER,
    KNOWN_EXPERTS,
    WORKING_SHARE,
    ExpertFiles,
    locate,
    memory_bytes,
    memory_free_bytes,
)
from optiml.settings import MixtureSettings


@dataclass(frozen=True, kw_only=True)
class Needs:
    """What it takes to use a set of experts.

    Attributes:
        present: names of the experts that lie on this machine.
        missing: the others, each with the sentence that says how to get it.
        disk_bytes: what the missing ones would take, where that is known.
        memory_bytes: what all of them take once loaded, on all devices together.
        memory_free_bytes: of this machine, GPUs apart.
        disk_free_bytes: where downloads would go.
        dtype: in which they would be loaded.
    """

    present: tuple[str, ...]
    missing: tuple[str, ...]
    disk_bytes: int
    memory_bytes: int
    memory_free_bytes: int
    disk_free_bytes: int
    dtype: str


def needs_of(settings: MixtureSettings, *, gpu: bool) -> Needs:
    """Look the experts up.

    Args:
        settings: the [mixture] table.
        gpu: whether a GPU is there, which decides what `dtype = "auto"` means.
    """
    dtype = settings.dtype if settings.dtype != "auto" else "bfloat16" if gpu else "float32"
    kind = "4bit" if settings.four_bit else dtype
    present: list[ExpertFiles] = []
    missing: list[str] = []
    disk = memory = 0.0
    for name in settings.experts:
        try:
            present.append(locate(name))
        except ModelFailed as error:
            missing.append(str(error))
            parameters, size = KNOWN_EXPERTS.get(name, (0.0, 0.0))
            disk += size
            memory += parameters * BYTES_PER_PARAMETER.get(kind, 4.0) * WORKING_SHARE
    memory += sum(memory_bytes(item, kind) for item in present)
    return Needs(
        present=tuple(item.name for item in present),
        missing=tuple(missing),
        disk_bytes=int(disk),
        memory_bytes=int(memory),
        memory_free_bytes=memory_free_bytes(),
        disk_free_bytes=shutil.disk_usage(Path.home() if Path.home().exists() else "/").free,
        dtype=kind,
    )
