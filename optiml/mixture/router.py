"""Which experts work on a prompt, and how much each counts.

    s = W3 relu(W2 relu(W1 z)) / tau          scores [B, M]; z: a frozen encoding of the prompt
    I = top-K(s), the first is the primary    in training top-K(s + Gumbel noise)
    w = softmax(s over I)                     gates, through which the task's gradient reaches the router

Source: the Mixture-of-Thoughts paper (arXiv 2509.21164); noisy selection and the use of w are ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from optiml.mixture.experts import Expert

GATE_FLOOR = 1e-6  # below which a gate no longer matters
_DROPOUT = 0.1
_INITIAL_SPREAD = 0.02


@dataclass(frozen=True, kw_only=True)
class Routing:
    """The experts chosen for each row of a batch.

    Attributes:
        active: `[B, K]` indices of experts, the primary first.
        log_gates: `[B, K]` log(w + a small floor), differentiable.
        scores: `[B, M]` of all experts, without noise.
    """

    active: Tensor
    log_gates: Tensor
    scores: Tensor

    @property
    def probabilities(self) -> Tensor:
        """`[B, M]`, softmax of all scores."""
        return torch.softmax(self.scores, dim=-1)


class PromptEncoder(Protocol):
    """Makes one vector of a prompt. It is frozen."""

    width: int

    def encode(self, prompts: Sequence[str]) -> Tensor:
        """`[B, width]` in float32, without gradient."""


class EmbeddingEncoder:
    """The experts' own input embeddings, averaged over the prompt's tokens and normalised, side by side."""

    def __init__(self, experts: Sequence[Expert]) -> None:
        self._experts = experts
        self.width = sum(expert.width for expert in experts)

    @torch.no_grad()
    def encode(self, prompts: Sequence[str]) -> Tensor:
        """`[B, width]`."""
        rows = []
        for prompt in prompts:
            parts = []
            for expert in self._experts:
                ids = torch.tensor([expert.tokenizer.view(prompt).ids], device=expert.device)
                mean = expert.embed(ids)[0].float().mean(dim=0)
                parts.append(nn.functional.layer_norm(mean, mean.shape))
            rows.append(torch.cat([part.to(parts[0].device) for part in parts]))
        return torch.stack(rows)


class Router(nn.Module):
    """A small network from a prompt's encoding to one score per expert.

    Args:
        width: of the encoding.
        hidden: of both hidden layers.
        experts: how many there are.
        temperature: scores are divided by it.
    """

    def __init__(self, width: int, hidden: int, experts: int, temperature: float = 1.0) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(width, hidden),
            nn.ReLU(),
            nn.Dropout(_DROPOUT),
            nn.Linear(hidden, hidden),
            nn.ReLU(),
            nn.Dropout(_DROPOUT),
            nn.Linear(hidden, experts),
        )
        self.temperature = temperature
        for part in self.layers:
            if isinstance(part, nn.Linear):
                nn.init.normal_(part.weight, std=_INITIAL_SPREAD)
                nn.init.zeros_(part.bias)

    def forward(self, encoding: Tensor) -> Tensor:
        """`[B, width]` to scores `[B, M]`."""
        scores: Tensor = self.layers(encoding) / self.temperature
        return scores


def choose(
    scores: Tensor, count: int, *, noise: torch.Generator | None = None, primary: Tensor | None = None
) -> Routing:
    """Take the `count` best experts of each row.

    Args:
        scores: `[B, M]`.
        count: K, at most M.
        noise: adds Gumbel noise to the scores that decide (not to the gates): a sample without replacement.
        primary: `[B]` experts that must come first, as in a second pass over the same rows.
    """
    deciding = scores.detach()
    if noise is not None:
        uniform = torch.rand(deciding.shape, generator=noise, device=noise.device).to(deciding.device)
        deciding = deciding - torch.log(-torch.log(uniform.clamp(1e-9, 1 - 1e-7)))
    if primary is not None:
        deciding = deciding.scatter(1, primary[:, None], float("inf"))
    active = deciding.topk(count, dim=-1).indices
    return Routing(active=active, log_gates=log_gates(scores, active), scores=scores)


def log_gates(scores: Tensor, active: Tensor) -> Tensor:
    """log(softmax over the active experts + floor): `[B, K]`."""
    return torch.log(torch.softmax(scores.gather(1, active), dim=-1) + GATE_FLOOR)


def load_balance(routing: Routing) -> Tensor:
    """M * sum_i f_i * mean(p_i): 1 when even, up to M when one expert gets everything; differentiable through p.

    f_i is the share of all selections that went to expert i.

    Source: Fedus et al. 2021 (Switch Transformers), equation 4.
    """
    experts = routing.scores.shape[-1]
    share = nn.functional.one_hot(routing.active, experts).float().mean(dim=(0, 1))
    return experts * (share * routing.probabilities.mean(dim=0)).sum()


def negative_entropy(routing: Routing) -> Tensor:
    """-H(p), averaged over rows: adding it keeps the router from deciding too early."""
    log_p = torch.log_softmax(routing.scores, dim=-1)
    return (log_p.exp() * log_p).sum(dim=-1).mean()
