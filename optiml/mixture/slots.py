"""Keys and values of a batch whose rows have different lengths: slot p of a row holds the token at position p.

Rows are shortened by writing over them: a token sees the slots up to its own position only, so what lies beyond a
row's end is never seen.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_ROUND_UP = 64  # slots are added in such steps


class SlotCache:
    """A cache for the attention layers of transformers (they call `update`)."""

    def __init__(self) -> None:
        self._keys: dict[int, Tensor] = {}
        self._values: dict[int, Tensor] = {}
        self._positions: Tensor | None = None
        self._extent = 0
        self._masks: dict[int | None, Tensor] = {}

    def place(self, positions: Tensor, extent: int) -> None:
        """Say where the tokens of the next `update`s stand: `[B, n]`, all below `extent`."""
        self._positions = positions
        self._extent = extent
        self._masks = {}

    def mask(self, window: int | None) -> Tensor:
        """`[B, 1, n, slots]`: which slots the placed tokens see."""
        if window not in self._masks:
            assert self._positions is not None
            slots = torch.arange(self._extent, device=self._positions.device)
            seen = slots <= self._positions[:, :, None]
            if window is not None:
                seen &= slots > self._positions[:, :, None] - window
            self._masks[window] = seen[:, None]
        return self._masks[window]

    def update(self, keys: Tensor, values: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Put `[B, heads, n, d]` into the slots of the placed tokens; returns all slots up to the last one in use."""
        assert self._positions is not None
        stored_keys = self._keys[layer] = put(self._keys.get(layer), keys, self._positions, self._extent)
        stored_values = self._values[layer] = put(self._values.get(layer), values, self._positions, self._extent)
        return stored_keys[:, :, : self._extent], stored_values[:, :, : self._extent]

    def select(self, rows: Tensor) -> None:
        """Keep some rows only."""
        self._keys = {layer: kept[rows] for layer, kept in self._keys.items()}
        self._values = {layer: kept[rows] for layer, kept in self._values.items()}
        self._positions, self._masks = None, {}


def put(store: Tensor | None, new: Tensor, positions: Tensor, extent: int) -> Tensor:
    """Write `[B, heads, n, d]` into a store `[B, heads, slots, d]` at `positions` `[B, n]`, growing it if needed."""
    batch, heads, _, size = new.shape
    have = 0 if store is None else store.shape[2]
    if extent > have:
        grown = new.new_zeros((batch, heads, -(-max(extent, 2 * have) // _ROUND_UP) * _ROUND_UP, size))
        if store is not None:
            grown[:, :, :have] = store
        store = grown
    assert store is not None
    store.scatter_(2, positions[:, None, :, None].expand(batch, heads, -1, size), new)
    return store
