"""Where the experts meet: after a stack of layers the primary looks at what its peers made of the text so far.

    u_m = P_m LN_m(h_m)                                          into a shared width, for every active expert m
    o   = Wo softmax(Wq u_p (Wk u_m)^T / sqrt(d) + log w_m) Wv u_m     over the tokens of all peers that t may see
    h_p += tanh(a_p) * B_p o                                     the primary
    h_m += tanh(b_m) * B_m MLP_m(u_m)                            each peer, token by token

A peer's token is seen by the primary's token t only if it ends, in characters, at or before the end of t's text. One
more slot with value 0 can always be seen, so that a token without visible peers gets nothing. The gates `a`, `b` start
at 0: a new layer changes nothing.

Source: the Mixture-of-Thoughts paper (arXiv 2509.21164). Ours are the alignment by characters in place of
interpolation, the causal limit, the router's gate in the scores, the empty slot, the zero gates, and that the primary
looks at peers only: alone, it is left as it was.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

UNSEEN = 1 << 30  # the end of a token that nobody may see: padding
_SPREAD = 0.02


@dataclass(frozen=True, kw_only=True)
class PeerStates:
    """What one peer offers at one interaction layer.

    Attributes:
        keys, values: `[B, heads, n, d_s / heads]`.
        ends: `[B, n]` character offsets up to which each token has spelled the text; `UNSEEN` for padding.
        log_gate: `[B]`.
    """

    keys: Tensor
    values: Tensor
    ends: Tensor
    log_gate: Tensor


class Interaction(nn.Module):
    """One interaction layer. Its arithmetic is in float32 (or wider, if its parameters are).

    Args:
        widths: hidden width of each expert.
        shared: d_s, divisible by `heads`.
        heads: of the cross-attention.
    """

    def __init__(self, widths: Sequence[int], shared: int, heads: int) -> None:
        super().__init__()
        if shared % heads:
            raise ValueError(f"the shared width {shared} is not divisible by {heads} heads")
        self.heads, self.shared = heads, shared
        self.norms = nn.ModuleList(nn.LayerNorm(width) for width in widths)
        self.inward = nn.ModuleList(nn.Linear(width, shared) for width in widths)
        self.outward = nn.ModuleList(nn.Linear(shared, width) for width in widths)
        self.adapters = nn.ModuleList(
            nn.Sequential(nn.Linear(shared, shared), nn.ReLU(), nn.Linear(shared, shared)) for _ in widths
        )
        self.query, self.key, self.value, self.out = (nn.Linear(shared, shared, bias=False) for _ in range(4))
        self.empty_key = nn.Parameter(torch.zeros(heads, shared // heads))
        self.primary_gates = nn.Parameter(torch.zeros(len(widths)))
        self.peer_gates = nn.Parameter(torch.zeros(len(widths)))
        for part in self.modules():
            if isinstance(part, nn.Linear):
                nn.init.normal_(part.weight, std=_SPREAD)
                if part.bias is not None:
                    nn.init.zeros_(part.bias)

    def shared_state(self, expert: int, hidden: Tensor) -> Tensor:
        """u_m: `[B, n, d_m]` to `[B, n, d_s]`."""
        norm, inward = self.norms[expert], self.inward[expert]
        shared: Tensor = inward(norm(hidden.to(inward.weight.device, inward.weight.dtype)))
        return shared

    def offer(self, shared: Tensor) -> tuple[Tensor, Tensor]:
        """A peer's keys and values, `[B, heads, n, d_s / heads]` each."""
        return self._heads(self.key(shared)), self._heads(self.value(shared))

    def peer_update(self, expert: int, hidden: Tensor, shared: Tensor) -> Tensor:
        """A peer's hidden states after the layer, `[B, n, d_m]`."""
        change = self.peer_gates[expert].tanh() * self.outward[expert](self.adapters[expert](shared))
        return hidden + change.to(hidden.device, hidden.dtype)

    def primary_update(self, expert: int, hidden: Tensor, limits: Tensor, peers: Sequence[PeerStates]) -> Tensor:
        """The primary's hidden states after the layer.

        Args:
            expert: index of the primary.
            hidden: `[B, n, d_p]`.
            limits: `[B, n]` character offsets up to which each token may see its peers.
            peers: the other active experts; none leaves `hidden` as it is.
        """
        if not peers:
            return hidden
        query = self._heads(self.query(self.shared_state(expert, hidden)))
        scale = 1 / math.sqrt(query.shape[-1])
        scores = [(query * self.empty_key[:, None]).sum(-1, keepdim=True) * scale]
        for peer in peers:
            seen = peer.ends[:, None, None, :] <= limits[:, None, :, None]
            bias = peer.log_gate[:, None, None, None].masked_fill(~seen, float("-inf"))
            scores.append(query @ peer.keys.transpose(-1, -2) * scale + bias)
        weights = torch.softmax(torch.cat(scores, dim=-1), dim=-1)[..., 1:]
        attended = weights @ torch.cat([peer.values for peer in peers], dim=2)
        batch, _, length, _ = attended.shape
        mixed = self.out(attended.transpose(1, 2).reshape(batch, length, self.shared))
        change = self.primary_gates[expert].tanh() * self.outward[expert](mixed)
        return hidden + change.to(hidden.device, hidden.dtype)

    def _heads(self, states: Tensor) -> Tensor:
        batch, length, _ = states.shape
        return states.view(batch, length, self.heads, -1).transpose(1, 2)
