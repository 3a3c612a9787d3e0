"""Experts and trained parts put together: all of it, or an error and nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from optiml.mixture.checkpoint import load_into, read_manifest, refuse_other_experts
from optiml.mixture.files import ExpertFiles
from optiml.mixture.loading import FrozenEncoder, load_experts
from optiml.mixture.mixture import Mixture, MixtureShape


@dataclass(frozen=True, kw_only=True)
class Assembled:
    """A mixture in memory, and the digest of its prompt encoder (empty: the experts' embeddings)."""

    mixture: Mixture
    encoder: str


def open_mixture(
    files: Sequence[ExpertFiles],
    *,
    shape: Mapping[str, Any],
    encoder: ExpertFiles | None = None,
    checkpoint: Path | None = None,
    devices: Sequence[str] = ("auto",),
    dtype: str = "auto",
    four_bit: bool = False,
) -> Assembled:
    """Load experts and trained parts.

    Args:
        files: of the experts, in order.
        shape: fields of `MixtureShape` for an untrained mixture.
        encoder: of prompts.
        checkpoint: folder of trained parts, which bring their own shape.
        devices, dtype, four_bit: see `load_experts`.

    Raises:
        ModelFailed: see `load_experts` and `checkpoint`.
    """
    manifest = None if checkpoint is None else read_manifest(checkpoint)
    sizes = MixtureShape(**shape) if manifest is None else manifest.shape
    experts = load_experts(files, stacks=sizes.stacks, devices=devices, dtype=dtype, four_bit=four_bit)
    device = experts[0].device
    frozen = None if encoder is None else FrozenEncoder(encoder, device)
    digest = "" if frozen is None else frozen.digest
    torch.manual_seed(0)
    mixture = Mixture(experts, sizes, frozen)
    mixture.to(device)
    if manifest is not None and checkpoint is not None:
        refuse_other_experts(manifest, experts, digest)
        load_into(checkpoint, manifest, mixture)
    mixture.eval()
    return Assembled(mixture=mixture, encoder=digest)
