"""What `optiml train-mixture` does: make the pairs, and train on them in this process."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from optiml.errors import InvalidInput
from optiml.mixture.dataset import Record, Verify, build_records, read_records
from optiml.mixture.files import locate, require_packages
from optiml.records import Verdict
from optiml.settings import MixtureSettings

if TYPE_CHECKING:  # torch comes with it
    from optiml.mixture.training import Progress


@dataclass(frozen=True, kw_only=True)
class BuiltPairs:
    """A data set that was written.

    Attributes:
        path: of the file.
        pairs, kernels, families: how many.
        refused: kernels that were not accepted and so left out, with the reason.
    """

    path: str
    pairs: int
    kernels: int
    families: tuple[str, ...]
    refused: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Trained:
    """A checkpoint that training left.

    Attributes:
        checkpoint: its folder, for `checkpoint` below [mixture].
        step, steps: done and asked for.
        experts: their names, in order.
        pairs, held_out_pairs: trained on and measured on.
        held_out: losses on the held-out families, in nats per character; empty where none are held out.
    """

    checkpoint: str
    step: int
    steps: int
    experts: tuple[str, ...]
    pairs: int
    held_out_pairs: int
    held_out: Mapping[str, float]


def build_pairs(
    path: Path,
    verify: Verify,
    *,
    problems: Sequence[str] | None = None,
    dtypes: Sequence[str] | None = None,
    variants: int = 2,
    intents: int = 4,
    seed: int = 0,
    on_pair: Callable[[Record], None] | None = None,
    should_stop: Callable[[], bool] | None = None,
) -> BuiltPairs:
    """Write verified pairs of the catalogue to a new file; it appears when it is complete.

    Raises:
        InvalidInput: the file exists, cannot be written, or no kernel was accepted.
    """
    if path.exists():
        raise InvalidInput(f"{path.name} exists: name another file, or leave --build out to train on it")
    refused: list[str] = []

    def note(kernel: str, verdict: Verdict) -> None:
        refused.append(f"{kernel}: {verdict.reason or verdict.status}: {verdict.detail}"[:300])

    records: list[Record] = []
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with draft.open("w", encoding="utf-8") as file:
            for record in build_records(
                verify,
                problems=problems,
                dtypes=dtypes,
                variants=variants,
                intents=intents,
                seed=seed,
                on_refused=note,
            ):
                file.write(record.to_line())
                records.append(record)
                if on_pair is not None:
                    on_pair(record)
                if should_stop is not None and should_stop():
                    break
        if not records:
            raise InvalidInput(f"no kernel was accepted, so {path.name} was not written: {'; '.join(refused[:2])}")
        os.replace(draft, path)
    except OSError as error:
        raise InvalidInput(f"{path.name} cannot be written: {error.strerror}") from error
    finally:
        draft.unlink(missing_ok=True)
    return BuiltPairs(
        path=str(path),
        pairs=len(records),
        kernels=len({record.kernel_id for record in records}),
        families=tuple(sorted({record.family for record in records})),
        refused=tuple(refused),
    )


def train_on_file(
    settings: MixtureSettings,
    data: Path,
    folder: Path,
    *,
    shared_width: int = 256,
    on_progress: Callable[[Progress], None] | None = None,
    should_stop: Callable[[], bool] | None = None,
    **options: object,
) -> Trained:
    """Train a mixture of the configured experts, or go on with the checkpoint in `folder`.

    Args:
        settings: the [mixture] table; its `checkpoint` is not read.
        data: JSON lines of pairs.
        folder: of the checkpoint.
        shared_width: d_s of a new mixture.
        on_progress: called after each step.
        should_stop: asked after each step.
        options: fields of `TrainSettings`.

    Raises:
        ModelFailed: packages or experts are missing, do not fit, or are not those of the checkpoint.
        InvalidInput: unusable pairs or options.
    """
    records = read_records(data)
    require_packages()
    from optiml.mixture.assembly import open_mixture  # torch, which takes seconds
    from optiml.mixture.checkpoint import MANIFEST, read_manifest
    from optiml.mixture.training import Pair, TrainSettings, split, train

    wanted = TrainSettings(**{"refresh": settings.refresh, **options})  # type: ignore[arg-type]
    pairs = [Pair(prompt=record.prompt, answer=record.answer, family=record.family) for record in records]
    training, held_out = split(pairs, wanted.held_out)
    shape = {"stacks": settings.stacks, "active": settings.active, "shared_width": shared_width}
    if (folder / MANIFEST).exists():
        shape = dataclasses.asdict(read_manifest(folder).shape)
    assembled = open_mixture(
        [locate(name, allow_download=settings.allow_download) for name in settings.experts],
        shape=shape,
        encoder=locate(settings.prompt_encoder) if settings.prompt_encoder else None,
        devices=settings.devices,
        dtype=settings.dtype,
        four_bit=settings.four_bit,
    )
    manifest = train(
        assembled.mixture,
        pairs,
        wanted,
        folder,
        encoder=assembled.encoder,
        on_progress=on_progress,
        should_stop=should_stop,
    )
    last = dict(manifest.log[-1]) if manifest.log else {}
    measured = [name for name in last if name[0].isdigit() or name in ("router only", "mixture")]
    return Trained(
        checkpoint=str(folder),
        step=manifest.step,
        steps=wanted.steps,
        experts=tuple(facts.name for facts in manifest.experts),
        pairs=len(training),
        held_out_pairs=len(held_out),
        held_out={name: float(last[name]) for name in measured},
    )
