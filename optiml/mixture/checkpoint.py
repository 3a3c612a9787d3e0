"""Trained parts on disk: tensors in safetensors, and a manifest that pins the experts they were trained with.

A checkpoint is a folder with `manifest.json`. The manifest names its tensor files with their sha256; it is replaced
in one step after they are written, so that a reader finds the old checkpoint or the new one.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from optiml.errors import ModelFailed
from optiml.mixture.experts import Expert, ExpertFacts
from optiml.mixture.mixture import Mixture, MixtureShape

SCHEMA = 1
MANIFEST = "manifest.json"
_MAX_MANIFEST_BYTES = 16 << 20


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a checkpoint says of itself.

    Attributes:
        shape: sizes of the trained parts.
        experts: those that it was trained with, in order.
        encoder: digest of the prompt encoder; empty for the experts' own embeddings.
        step: optimiser steps done.
        refresh: how many tokens its peers lagged in training, at most.
        training: settings of the training, to go on with the same ones.
        files: tensor files: kind (`mixture`, `optimizer`) to name and sha256.
        log: what training reported, oldest first.
    """

    shape: MixtureShape
    experts: tuple[ExpertFacts, ...]
    encoder: str = ""
    step: int = 0
    refresh: int = 16
    training: Mapping[str, Any] = field(default_factory=dict)
    files: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    log: tuple[Mapping[str, Any], ...] = ()


def save(folder: Path, mixture: Mixture, manifest: Manifest, optimizer: Mapping[str, Tensor] | None = None) -> None:
    """Write a checkpoint; whatever was in `folder` stays valid until the new one is complete."""
    folder.mkdir(parents=True, exist_ok=True)
    files = {"mixture": _write(folder, "mixture", mixture.state_dict())}
    if optimizer is not None:
        files["optimizer"] = _write(folder, "optimizer", optimizer)
    record = {"schema": SCHEMA, "kind": "optiml-mixture", **asdict(manifest), "files": files}
    _publish(folder / MANIFEST, json.dumps(record, indent=1).encode())
    kept = {entry["name"] for entry in files.values()}
    for path in folder.glob("*.safetensors"):
        if path.name not in kept:
            path.unlink()


def _write(folder: Path, kind: str, tensors: Mapping[str, Tensor]) -> dict[str, str]:
    data = safetensors.torch.save({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()})
    digest = hashlib.sha256(data).hexdigest()
    name = f"{kind}-{digest[:12]}.safetensors"
    _publish(folder / name, data)
    return {"name": name, "sha256": digest}


def _publish(path: Path, data: bytes) -> None:
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    with draft.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(draft, path)


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint.

    Raises:
        ModelFailed: there is none, or it is damaged.
    """
    try:
        with (folder / MANIFEST).open("rb") as file:
            record = json.loads(file.read(_MAX_MANIFEST_BYTES))
        if record.pop("schema") != SCHEMA or record.pop("kind") != "optiml-mixture":
            raise ModelFailed(f"{folder.name} is a checkpoint of another kind or version")
        return Manifest(
            **{
                **record,
                "shape": MixtureShape(**record["shape"]),
                "experts": tuple(ExpertFacts(**facts) for facts in record["experts"]),
                "log": tuple(record["log"]),
            }
        )
    except FileNotFoundError as error:
        raise ModelFailed(f"{folder.name} holds no mixture: train one with `optiml train-mixture`") from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelFailed(f"the manifest of the checkpoint {folder.name} is damaged: train again") from error


def refuse_other_experts(manifest: Manifest, experts: Sequence[Expert], encoder: str = "") -> None:
    """Check that a checkpoint was trained with these very experts, in this order.

    Raises:
        ModelFailed: naming the first that differs.
    """
    if len(manifest.experts) != len(experts):
        raise ModelFailed(
            f"the checkpoint was trained with {len(manifest.experts)} experts ({_names(manifest)}) and "
            f"{len(experts)} are configured"
        )
    for position, (known, expert) in enumerate(zip(manifest.experts, experts, strict=True), start=1):
        facts = expert.facts
        if known.digest != facts.digest:
            raise ModelFailed(
                f"expert {position} of the checkpoint is {known.name} ({known.digest[:12]}) and the one here is "
                f"{facts.name} ({facts.digest[:12]}): use the experts it was trained with, or train again"
            )
    if manifest.encoder != encoder:
        raise ModelFailed("the checkpoint was trained with another prompt encoder: use that one, or train again")


def _names(manifest: Manifest) -> str:
    return ", ".join(facts.name for facts in manifest.experts)


def load_into(folder: Path, manifest: Manifest, mixture: Mixture) -> None:
    """Put the trained parts into a mixture of the same shape; on any error it is left as it was.

    Raises:
        ModelFailed: a file is missing, damaged, or does not belong to this mixture.
    """
    tensors = read_tensors(folder, manifest, "mixture")
    own = mixture.state_dict()
    if {name: tensor.shape for name, tensor in tensors.items()} != {name: item.shape for name, item in own.items()}:
        raise ModelFailed(f"the tensors of the checkpoint {folder.name} do not fit its own manifest: train again")
    mixture.load_state_dict(tensors)


def read_tensors(folder: Path, manifest: Manifest, kind: str) -> dict[str, Tensor]:
    """The tensors of one file of a checkpoint, checked against its sha256.

    Raises:
        ModelFailed: the file is missing or damaged.
    """
    entry = manifest.files.get(kind)
    if entry is None:
        raise ModelFailed(f"the checkpoint {folder.name} has no {kind} tensors")
    try:
        data = (folder / Path(entry["name"]).name).read_bytes()
        if hashlib.sha256(data).hexdigest() != entry["sha256"]:
            raise ModelFailed(f"{entry['name']} of the checkpoint {folder.name} is damaged: train again")
        tensors: dict[str, Tensor] = safetensors.torch.load(data)
    except (OSError, KeyError, TypeError, safetensors.SafetensorError) as error:
        raise ModelFailed(f"the {kind} tensors of the checkpoint {folder.name} cannot be read: train again") from error
    return tensors


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The state of an optimiser as named tensors; the order of its parameters is the key."""
    state = optimizer.state_dict()["state"]
    return {
        f"{index}.{name}": torch.as_tensor(value) for index, entry in state.items() for name, value in entry.items()
    }


def restore_optimizer(optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor]) -> None:
    """The inverse of `optimizer_tensors`, for an optimiser over the same parameters."""
    record = optimizer.state_dict()
    entries: dict[int, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        index, name = key.split(".", 1)
        entries.setdefault(int(index), {})[name] = tensor
    optimizer.load_state_dict({**record, "state": entries})
