"""Training of the router and the interaction layers on (prompt, answer) pairs; the experts stay frozen.

    L = L_LM + entropy * L_ent + balance * L_bal + consistency * L_con + fit * L_fit

    L_LM   cross-entropy of the primary's tokens of the answer, averaged per text
    L_ent  minus the entropy of the router                               L_bal  see `router.load_balance`
    L_con  T^2/2 [KL(p1 || p2) + KL(p2 || p1)] at temperature T, against a pass in which the same primary works with
           other peers (chosen again with other noise, one of them dropped)
    L_fit  cross-entropy of the router against softmax(-loss of each expert alone, in nats per character): the choice
           of the primary is discrete, so the task's gradient reaches the gates but not this choice

Source: the Mixture-of-Thoughts paper (arXiv 2509.21164) for the first four; the form of L_bal, T^2, the peers of the
second pass and L_fit are ours.

The trained parts and their optimiser are in float32; the frozen experts in whatever dtype they were loaded. All
randomness of a step comes from (seed, step), so a run that was interrupted goes on as if it had not been.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from optiml.errors import InvalidInput, ModelFailed
from optiml.mixture.checkpoint import (
    MANIFEST,
    Manifest,
    load_into,
    optimizer_tensors,
    read_manifest,
    read_tensors,
    refuse_other_experts,
    restore_optimizer,
    save,
)
from optiml.mixture.mixture import Mixture, batch_of, lagged
from optiml.mixture.router import Routing, choose, load_balance, log_gates, negative_entropy

_WARM_UP = 0.05  # of all steps
_LAST_RATE = 0.1  # of the learning rate, at the end of the cosine
_EVALUATED_TOGETHER = 16


@dataclass(frozen=True, kw_only=True)
class Pair:
    """One example.

    Attributes:
        prompt: as the mixture will read it.
        answer: what it should write.
        family: of the operator; a family that is held out is not trained on.
    """

    prompt: str
    answer: str
    family: str


@dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """How to train. The defaults fit experts of one to seven billion parameters on one large GPU."""

    steps: int = 1000
    batch: int = 4  # texts per pass
    accumulate: int = 2  # passes per step
    learning_rate: float = 3e-4
    router_rate: float = 2.0  # times the learning rate
    weight_decay: float = 0.01
    clip: float = 1.0
    entropy: float = 0.01
    balance: float = 0.01
    consistency: float = 0.05
    consistency_temperature: float = 2.0
    fit: float = 0.1
    fit_temperature: float = 0.05  # nats per character
    refresh: int = 16  # peers lag by less than this in half of the passes, and not at all in the others
    max_tokens: int = 2048  # of a text under any tokenizer; longer pairs are left out
    held_out: tuple[str, ...] = ()
    evaluate_every: int = 200
    save_every: int = 100
    seed: int = 0

    def __post_init__(self) -> None:
        counts = ("steps", "batch", "accumulate", "refresh", "max_tokens", "evaluate_every", "save_every")
        for name in counts:
            if getattr(self, name) < 1:
                raise InvalidInput(f"{name} is {getattr(self, name)}: give at least 1")
        if not 0 < self.learning_rate < 1:
            raise InvalidInput(f"learning_rate is {self.learning_rate}: give something between 0 and 1")


@dataclass(frozen=True, kw_only=True)
class HeldOut:
    """Losses on held-out pairs in nats per character of the answer, each `[N]`.

    Attributes:
        experts: each expert alone, by name.
        router: the expert that the router makes primary, alone.
        mixture: the mixture.
        primaries: index of the primary for each pair.
    """

    experts: Mapping[str, tuple[float, ...]]
    router: tuple[float, ...]
    mixture: tuple[float, ...]
    primaries: tuple[int, ...]

    def means(self) -> dict[str, float]:
        """The average of each."""
        columns = {**self.experts, "router only": self.router, "mixture": self.mixture}
        return {name: float(np.mean(values)) for name, values in columns.items()}


@dataclass(frozen=True, kw_only=True)
class Progress:
    """A step that was done; `held_out` every `evaluate_every` steps and at the end."""

    step: int
    steps: int
    loss: float
    terms: Mapping[str, float] = field(default_factory=dict)
    held_out: Mapping[str, float] | None = None


def split(pairs: Sequence[Pair], held_out: Sequence[str]) -> tuple[tuple[Pair, ...], tuple[Pair, ...]]:
    """Pairs to train on, and those of the held-out families.

    Raises:
        InvalidInput: a family that no pair has, or nothing is left to train on.
    """
    families = {pair.family for pair in pairs}
    for name in held_out:
        if name not in families:
            raise InvalidInput(f"no pair is of the family {name!r}; there are {', '.join(sorted(families))}")
    training = tuple(pair for pair in pairs if pair.family not in held_out)
    if not training:
        raise InvalidInput("no pair is left to train on: hold out fewer families or give more pairs")
    return training, tuple(pair for pair in pairs if pair.family in held_out)


def train(
    mixture: Mixture,
    pairs: Sequence[Pair],
    settings: TrainSettings,
    folder: Path,
    *,
    encoder: str = "",
    on_progress: Callable[[Progress], None] | None = None,
    should_stop: Callable[[], bool] | None = None,
) -> Manifest:
    """Train, or go on with the checkpoint in `folder`, and leave one there.

    Args:
        mixture: its trained parts are changed in place.
        pairs: all of them; `settings.held_out` are evaluated on only.
        settings: must be those of the checkpoint, but for `steps`, `evaluate_every` and `save_every`.
        folder: of the checkpoint.
        encoder: digest of the prompt encoder, if there is one.
        on_progress: called after each step.
        should_stop: asked after each step; True saves and returns.

    Raises:
        InvalidInput: unusable pairs or settings.
        ModelFailed: the checkpoint belongs to other experts or other settings, or the loss is not finite.
    """
    training, held_out = split(pairs, settings.held_out)
    training = _short_enough(training, mixture, settings.max_tokens)
    held_out = _short_enough(held_out, mixture, settings.max_tokens, needed=False)
    optimizer = _optimizer(mixture, settings)
    manifest = Manifest(
        shape=mixture.shape,
        experts=tuple(expert.facts for expert in mixture.experts),
        encoder=encoder,
        refresh=settings.refresh,
        training={**asdict(settings), "held_out": list(settings.held_out)},
    )
    if (folder / MANIFEST).exists():
        manifest = _resumed(mixture, optimizer, settings, folder, encoder)
    fits = _fits(mixture, training, settings) if settings.fit else None
    log = list(manifest.log)
    step = manifest.step
    while step < settings.steps:
        mixture.train()
        terms = _step(mixture, optimizer, training, fits, settings, step)
        step += 1
        stopping = should_stop is not None and should_stop()
        last = stopping or step == settings.steps
        scores = None
        if held_out and (last or step % settings.evaluate_every == 0):
            scores = evaluate(mixture, held_out, refresh=settings.refresh).means()
            log.append({"step": step, **{name: round(value, 5) for name, value in {**terms, **scores}.items()}})
        if last or step % settings.save_every == 0:
            manifest = replace(manifest, step=step, log=tuple(log))
            save(folder, mixture, manifest, optimizer_tensors(optimizer))
        if on_progress is not None:
            progress = Progress(step=step, steps=settings.steps, loss=terms["loss"], terms=terms, held_out=scores)
            on_progress(progress)
        if stopping:
            break
    mixture.eval()
    return read_manifest(folder)


def _optimizer(mixture: Mixture, settings: TrainSettings) -> torch.optim.AdamW:
    gates = [value for name, value in mixture.interactions.named_parameters() if name.endswith("_gates")]
    known = {id(value) for value in gates}
    layers = [value for value in mixture.interactions.parameters() if id(value) not in known]
    groups: list[dict[str, Any]] = [
        {"params": layers, "scale": 1.0},
        {"params": list(mixture.router.parameters()), "scale": settings.router_rate},
        {"params": gates, "scale": 10.0, "weight_decay": 0.0},  # they start at 0 and hold everything else back
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]], lr=settings.learning_rate, weight_decay=settings.weight_decay
    )


_MAY_CHANGE = ("steps", "evaluate_every", "save_every")


def _resumed(
    mixture: Mixture, optimizer: torch.optim.Optimizer, settings: TrainSettings, folder: Path, encoder: str
) -> Manifest:
    manifest = read_manifest(folder)
    refuse_other_experts(manifest, mixture.experts, encoder)
    if manifest.shape != mixture.shape:
        raise ModelFailed(f"the checkpoint {folder.name} has another shape: train into another folder")
    before = {**manifest.training, "held_out": tuple(manifest.training.get("held_out", ()))}
    for item in fields(settings):
        now = getattr(settings, item.name)
        if item.name not in _MAY_CHANGE and before.get(item.name) != now:
            raise ModelFailed(
                f"the checkpoint {folder.name} was trained with {item.name} {before.get(item.name)} and {now} is asked "
                "for: train into another folder"
            )
    state = read_tensors(folder, manifest, "optimizer")
    load_into(folder, manifest, mixture)
    restore_optimizer(optimizer, state)
    return manifest


def _short_enough(pairs: Sequence[Pair], mixture: Mixture, limit: int, *, needed: bool = True) -> tuple[Pair, ...]:
    limits = [min(limit, expert.context) for expert in mixture.experts]
    kept = tuple(
        pair
        for pair in pairs
        if all(
            len(expert.tokenizer.view(pair.prompt + pair.answer).ids) < most
            for expert, most in zip(mixture.experts, limits, strict=True)
        )
    )
    if needed and not kept:
        raise InvalidInput(
            f"every pair is longer than {min(limits)} tokens for some expert: raise max_tokens or give shorter pairs"
        )
    return kept


# --- one step --------------------------------------------------------------------------------------------------------
def _step(
    mixture: Mixture,
    optimizer: torch.optim.Optimizer,
    pairs: Sequence[Pair],
    fits: Tensor | None,
    settings: TrainSettings,
    step: int,
) -> dict[str, float]:
    torch.manual_seed(settings.seed * 1_000_003 + step)
    noise = torch.Generator().manual_seed(settings.seed * 1_000_003 + step)
    choice = np.random.default_rng([settings.seed, 1, step])
    rate = settings.learning_rate * _schedule(step, settings.steps)
    for group in optimizer.param_groups:
        group["lr"] = rate * group["scale"]
    optimizer.zero_grad(set_to_none=True)
    totals: dict[str, float] = {}
    for part in range(settings.accumulate):
        indices = _drawn(len(pairs), settings, step * settings.accumulate + part)
        refresh = settings.refresh if choice.random() < 0.5 else 1
        chosen = [pairs[index] for index in indices]
        terms = _losses(mixture, chosen, None if fits is None else fits[indices], settings, noise, refresh)
        loss = sum(terms.values(), start=torch.zeros((), device=mixture.device))
        if not bool(torch.isfinite(loss)):
            raise ModelFailed(f"the loss of step {step + 1} is not finite: lower the learning rate or widen the dtype")
        (loss / settings.accumulate).backward()
        for name, value in {**terms, "loss": loss}.items():
            totals[name] = totals.get(name, 0.0) + float(value.detach()) / settings.accumulate
    nn.utils.clip_grad_norm_(mixture.parameters(), settings.clip)
    optimizer.step()
    return totals


def _schedule(step: int, steps: int) -> float:
    warm_up = max(1, round(steps * _WARM_UP))
    if step < warm_up:
        return (step + 1) / warm_up
    done = (step - warm_up) / max(1, steps - warm_up)
    return _LAST_RATE + (1 - _LAST_RATE) * 0.5 * (1 + math.cos(math.pi * done))


def _drawn(count: int, settings: TrainSettings, number: int) -> list[int]:
    """The pairs of pass `number`: each epoch is a fresh permutation."""
    drawn = []
    for position in range(number * settings.batch, (number + 1) * settings.batch):
        epoch, place = divmod(position, count)
        drawn.append(int(np.random.default_rng([settings.seed, 0, epoch]).permutation(count)[place]))
    return drawn


def _losses(
    mixture: Mixture,
    pairs: Sequence[Pair],
    fits: Tensor | None,
    settings: TrainSettings,
    noise: torch.Generator,
    refresh: int,
) -> dict[str, Tensor]:
    scores = mixture.scores([pair.prompt for pair in pairs])
    routing = choose(scores, mixture.shape.active, noise=noise)
    terms = {
        "entropy": settings.entropy * negative_entropy(routing),
        "balance": settings.balance * load_balance(routing),
    }
    first, labels = _logits(mixture, pairs, routing, refresh)
    per_text = [_per_token(logits, label).mean() for logits, label in zip(first, labels, strict=True)]
    terms["lm"] = torch.stack(per_text).mean()
    if settings.consistency and mixture.shape.active > 1:
        second = _second_routing(routing, mixture.shape.active, noise)
        other, _ = _logits(mixture, pairs, second, refresh)
        temperature = settings.consistency_temperature
        apart = [
            _symmetric_divergence(one, two, label, temperature)
            for one, two, label in zip(first, other, labels, strict=True)
        ]
        terms["consistency"] = settings.consistency * torch.stack(apart).mean()
    if fits is not None:
        target = torch.softmax(-fits.to(scores.device) / settings.fit_temperature, dim=-1).to(scores.dtype)
        terms["fit"] = -settings.fit * (target * torch.log_softmax(scores, dim=-1)).sum(dim=-1).mean()
    return terms


def _second_routing(routing: Routing, active: int, noise: torch.Generator) -> Routing:
    """The same primaries with peers chosen again, and one fewer where there are several."""
    count = active - 1 if active > 2 else active
    again = choose(routing.scores, count, noise=noise, primary=routing.active[:, 0])
    return Routing(active=again.active, log_gates=log_gates(routing.scores, again.active), scores=routing.scores)


def _logits(
    mixture: Mixture, pairs: Sequence[Pair], routing: Routing, refresh: int
) -> tuple[list[Tensor], list[Tensor]]:
    """For each pair the logits `[n, V]` and labels `[n]` of its answer's tokens."""
    logits: list[Tensor] = [torch.empty(0)] * len(pairs)
    labels = list(logits)
    groups: dict[tuple[int, ...], list[int]] = {}
    for number, row in enumerate(routing.active.tolist()):
        groups.setdefault(tuple(row), []).append(number)
    for active, numbers in groups.items():
        rows, starts, ids = [], [], []
        for number in numbers:
            row, start = _text(mixture, active[0], pairs[number], refresh)
            rows.append(row)
            starts.append(start)
            ids.append(row[0])
        output = mixture(batch_of(mixture, active, rows), routing.log_gates[numbers])
        for place, number in enumerate(numbers):
            start, length = starts[place], len(ids[place])
            logits[number] = output[place, start - 1 : length - 1]
            labels[number] = torch.tensor(ids[place][start:], device=output.device)
    return logits, labels


def _text(
    mixture: Mixture, primary: int, pair: Pair, refresh: int
) -> tuple[tuple[Sequence[int], Sequence[int], str], int]:
    """A pair as its primary writes it: ids, limits, the text for its peers; and where the answer begins."""
    tokenizer = mixture.experts[primary].tokenizer
    prompt, answer = tokenizer.view(pair.prompt), tokenizer.view(pair.answer, start=len(pair.prompt))
    end = () if tokenizer.end_id is None else (tokenizer.end_id,)
    ids = (*prompt.ids, *answer.ids, *end)
    ends = (*prompt.ends, *answer.ends, *(answer.ends[-1:] if end else ()))
    return (ids, lagged(ends, len(prompt.ids), refresh), pair.prompt + pair.answer), len(prompt.ids)


def _per_token(logits: Tensor, labels: Tensor) -> Tensor:
    loss: Tensor = nn.functional.cross_entropy(logits.float(), labels, reduction="none")
    return loss


def _symmetric_divergence(first: Tensor, second: Tensor, labels: Tensor, temperature: float) -> Tensor:
    one, two = (torch.log_softmax(logits.float() / temperature, dim=-1) for logits in (first, second))
    forth = (one.exp() * (one - two)).sum(dim=-1)
    back = (two.exp() * (two - one)).sum(dim=-1)
    return temperature**2 / 2 * (forth + back).mean()


# --- measuring -------------------------------------------------------------------------------------------------------
@torch.no_grad()
def losses_of(mixture: Mixture, pairs: Sequence[Pair], active: Sequence[tuple[int, ...]], refresh: int) -> list[float]:
    """Loss of each pair with the given experts, in nats per character of the answer."""
    mixture.eval()
    losses = [0.0] * len(pairs)
    order = sorted(range(len(pairs)), key=lambda number: (active[number], len(pairs[number].answer)))
    for chosen, numbers in itertools.groupby(order, key=lambda number: active[number]):
        same = list(numbers)
        for low in range(0, len(same), _EVALUATED_TOGETHER):
            some = same[low : low + _EVALUATED_TOGETHER]
            texts = [_text(mixture, chosen[0], pairs[number], refresh) for number in some]
            scores = mixture.scores([pairs[number].prompt for number in some])
            gates = log_gates(scores, torch.tensor([chosen] * len(some), device=scores.device))
            logits = mixture(batch_of(mixture, chosen, [row for row, _ in texts]), gates)
            for place, (number, (row, start)) in enumerate(zip(some, texts, strict=True)):
                labels = torch.tensor(row[0][start:], device=logits.device)
                loss = _per_token(logits[place, start - 1 : len(row[0]) - 1], labels).sum()
                losses[number] = float(loss) / len(pairs[number].answer)
    return losses


def _fits(mixture: Mixture, pairs: Sequence[Pair], settings: TrainSettings) -> Tensor:
    """`[N, M]`: the loss of each expert alone on each pair."""
    columns = [losses_of(mixture, pairs, [(index,)] * len(pairs), 1) for index in range(len(mixture.experts))]
    return torch.tensor(columns).T


@torch.no_grad()
def evaluate(mixture: Mixture, pairs: Sequence[Pair], *, refresh: int) -> HeldOut:
    """Losses on pairs that were not trained on, paired over {each expert, router only, mixture}."""
    mixture.eval()
    routed = [tuple(mixture.route([pair.prompt]).active[0].tolist()) for pair in pairs]
    alone = {
        f"{index + 1}:{expert.name}": tuple(losses_of(mixture, pairs, [(index,)] * len(pairs), 1))
        for index, expert in enumerate(mixture.experts)
    }
    columns = list(alone.values())
    return HeldOut(
        experts=alone,
        router=tuple(columns[chosen[0]][number] for number, chosen in enumerate(routed)),
        mixture=tuple(losses_of(mixture, pairs, routed, refresh)),
        primaries=tuple(chosen[0] for chosen in routed),
    )
