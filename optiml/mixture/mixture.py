"""The mixture: frozen experts, a router and interaction layers; a forward pass over whole texts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from optiml.errors import ModelFailed
from optiml.mixture.experts import Expert
from optiml.mixture.interaction import UNSEEN, Interaction, PeerStates
from optiml.mixture.router import EmbeddingEncoder, PromptEncoder, Router, Routing, choose


@dataclass(frozen=True, kw_only=True)
class MixtureShape:
    """Sizes of the trained parts. A checkpoint holds them."""

    stacks: int = 4  # Q; interaction layers stand between them
    active: int = 2  # K experts work on a prompt
    shared_width: int = 256  # d_s
    heads: int = 8
    router_hidden: int = 256
    router_temperature: float = 1.0

    def __post_init__(self) -> None:
        if min(self.stacks, self.active, self.shared_width, self.heads, self.router_hidden) < 1:
            raise ValueError(f"every size of a mixture is at least 1: {self}")
        if self.shared_width % self.heads:
            raise ValueError(f"the shared width {self.shared_width} is not divisible by {self.heads} heads")

    def to_json(self) -> dict[str, Any]:
        """As a JSON object."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Texts of one active set, as each of its experts sees them; rows are padded at their ends.

    Attributes:
        active: indices of the experts, the primary first.
        ids: for each active expert `[B, n_m]` token ids.
        ends: for each active expert `[B, n_m]` character offsets (`View.ends`), `UNSEEN` for padding.
        limits: `[B, n_primary]` offsets up to which each of the primary's tokens may see its peers; -1 for padding.
    """

    active: tuple[int, ...]
    ids: tuple[Tensor, ...]
    ends: tuple[Tensor, ...]
    limits: Tensor


class Mixture(nn.Module):
    """Experts that share hidden states. Only `router` and `interactions` are parameters of this module.

    Args:
        experts: at least one; all cut into `shape.stacks` stacks.
        shape: sizes of the trained parts.
        encoder: of prompts; by default the experts' own embeddings.
    """

    def __init__(self, experts: Sequence[Expert], shape: MixtureShape, encoder: PromptEncoder | None = None) -> None:
        super().__init__()
        if not 1 <= shape.active <= len(experts):
            raise ModelFailed(f"{shape.active} active experts were asked for and there are {len(experts)}")
        self.experts = tuple(experts)
        self.shape = shape
        self.encoder = encoder or EmbeddingEncoder(self.experts)
        self.router = Router(self.encoder.width, shape.router_hidden, len(experts), shape.router_temperature)
        widths = [expert.width for expert in experts]
        self.interactions = nn.ModuleList(
            Interaction(widths, shape.shared_width, shape.heads) for _ in range(shape.stacks - 1)
        )

    @property
    def device(self) -> torch.device:
        """Where the trained parts lie."""
        return self.router.layers[0].weight.device

    def scores(self, prompts: Sequence[str]) -> Tensor:
        """The router's scores of all experts: `[B, M]`."""
        first = self.router.layers[0].weight
        scores: Tensor = self.router(self.encoder.encode(prompts).to(first.device, first.dtype))
        return scores

    @torch.no_grad()
    def route(self, prompts: Sequence[str]) -> Routing:
        """The experts for some prompts, without noise."""
        return choose(self.scores(prompts), self.shape.active)

    def forward(self, batch: Batch, log_gates: Tensor) -> Tensor:
        """Logits of the primary, `[B, n_primary, vocabulary]`.

        Args:
            batch: rows of one active set.
            log_gates: `[B, K]` of the router, in the order of `batch.active`.
        """
        states = [self.experts[index].embed(ids) for index, ids in zip(batch.active, batch.ids, strict=True)]
        positions = [torch.arange(ids.shape[1], device=ids.device)[None] for ids in batch.ids]
        last = self.shape.stacks - 1
        for stack in range(self.shape.stacks):
            running = range(len(states)) if stack < last else range(1)  # nobody looks at a peer's last stack
            for place in running:
                expert = self.experts[batch.active[place]]
                states[place] = expert.run_stack(stack, states[place], positions[place])
            if stack < last:
                states = self._meet(stack, batch, states, log_gates)
        return self.experts[batch.active[0]].head(states[0])

    def _meet(self, stack: int, batch: Batch, states: list[Tensor], log_gates: Tensor) -> list[Tensor]:
        layer = self.interactions[stack]
        assert isinstance(layer, Interaction)
        peers, updated = [], []
        for place in range(1, len(states)):
            shared = layer.shared_state(batch.active[place], states[place])
            keys, values = layer.offer(shared)
            peers.append(PeerStates(keys=keys, values=values, ends=batch.ends[place], log_gate=log_gates[:, place]))
            updated.append(layer.peer_update(batch.active[place], states[place], shared))
        return [layer.primary_update(batch.active[0], states[0], batch.limits, peers), *updated]


def padded(rows: Sequence[Sequence[int]], fill: int, device: torch.device) -> Tensor:
    """Rows of different lengths as one `[B, longest]` tensor."""
    longest = max(len(row) for row in rows)
    return torch.tensor([[*row, *([fill] * (longest - len(row)))] for row in rows], device=device)


def lagged(limits: Sequence[int], prompt_tokens: int, refresh: int) -> tuple[int, ...]:
    """Limits of the primary's tokens when peers read the text only at every `refresh`-th written token.

    The tokens of the prompt see what they would anyway; written token i sees what token i - i % refresh may.
    """
    written = limits[prompt_tokens:]
    held = [written[index - index % refresh] for index in range(len(written))]
    return (*limits[:prompt_tokens], *held)


def batch_of(
    mixture: Mixture,
    active: tuple[int, ...],
    rows: Sequence[tuple[Sequence[int], Sequence[int], str]],
) -> Batch:
    """Put texts of one active set together.

    Args:
        mixture: whose experts read them.
        active: indices, the primary first.
        rows: for each text the primary's token ids, its limits, and the text as its peers read it.
    """
    experts, device = mixture.experts, mixture.device
    ids = [padded([row[0] for row in rows], 0, experts[active[0]].device)]
    ends = [torch.zeros_like(ids[0])]
    for index in active[1:]:
        views = [experts[index].tokenizer.view(text) for _, _, text in rows]
        ids.append(padded([view.ids for view in views], 0, experts[index].device))
        ends.append(padded([view.ends for view in views], UNSEEN, device))
    limits = padded([row[1] for row in rows], -1, device)
    return Batch(active=active, ids=tuple(ids), ends=tuple(ends), limits=limits)
