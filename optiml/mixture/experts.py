"""Frozen causal language models, cut into stacks of layers that share the model's weights."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from optiml.errors import ModelFailed
from optiml.mixture.slots import SlotCache
from optiml.mixture.tokens import TextTokenizer

_CHECKED_TOKENS = 12
_UNLIMITED = 1 << 30
_ROUNDING = 1e-3  # of the largest logit: a GPU may add in another order


@dataclass(frozen=True, kw_only=True)
class ExpertFacts:
    """What a checkpoint remembers of an expert, to refuse another one."""

    name: str
    digest: str  # sha256 over its files; see `files.digest_of`
    architecture: str
    layers: int
    width: int
    vocabulary_size: int


class Expert:
    """A frozen decoder-only model whose layers run in stacks.

    The model must have transformers' usual parts: `model.embed_tokens`, `layers`, `norm` and `rotary_emb`, and
    `lm_head`. Whether the stacks compute what the whole model does is tried once, on a few tokens.

    Args:
        model: a causal language model of transformers, using its `sdpa` attention.
        tokenizer: its own.
        stacks: in how many parts it is cut, which differ by at most one layer.

    Raises:
        ModelFailed: the model cannot be cut, or its vocabulary is smaller than its tokenizer's.
    """

    def __init__(self, model: Any, tokenizer: TextTokenizer, *, stacks: int, digest: str = "") -> None:
        name = tokenizer.name
        body = getattr(model, "model", None)
        if body is None or any(getattr(body, part, None) is None for part in _PARTS) or not hasattr(model, "lm_head"):
            raise ModelFailed(
                f"expert {name} ({model.config.model_type}) is not built like a Llama, Qwen2 or StarCoder2 model, "
                "so it cannot be cut into stacks: choose another expert"
            )
        self.model = model.eval().requires_grad_(False)
        self.tokenizer = tokenizer
        self.name = name
        config = model.config
        bounds = [index * len(body.layers) // stacks for index in range(stacks + 1)]
        self.stacks = [tuple(range(low, high)) for low, high in itertools.pairwise(bounds)]
        if not all(self.stacks):
            raise ModelFailed(f"expert {name} has {len(body.layers)} layers, too few for {stacks} stacks")
        self.context: int = getattr(config, "max_position_embeddings", None) or _UNLIMITED
        self.end_ids = _end_ids(model, tokenizer)
        self.windows = _windows(config, len(body.layers))
        self._cache_argument = _cache_argument(body.layers[0])
        self.facts = ExpertFacts(
            name=name,
            digest=digest,
            architecture=config.model_type,
            layers=len(body.layers),
            width=config.hidden_size,
            vocabulary_size=config.vocab_size,
        )
        if tokenizer.vocabulary_size > config.vocab_size:
            raise ModelFailed(
                f"the tokenizer of expert {name} has {tokenizer.vocabulary_size} tokens and the model knows "
                f"{config.vocab_size}: they do not belong together"
            )
        self._check()

    @property
    def device(self) -> torch.device:
        """Where its weights lie."""
        device: torch.device = self.model.model.embed_tokens.weight.device
        return device

    @property
    def width(self) -> int:
        """Of its hidden states."""
        return self.facts.width

    def embed(self, ids: Tensor) -> Tensor:
        """`[B, n]` token ids to `[B, n, width]`."""
        embedded: Tensor = self.model.model.embed_tokens(ids)
        return embedded

    def run_stack(self, stack: int, hidden: Tensor, positions: Tensor, cache: SlotCache | None = None) -> Tensor:
        """Run the layers of one stack.

        Args:
            stack: which one, from 0.
            hidden: `[B, n, width]`.
            positions: `[B, n]` (or `[1, n]` without a cache, and then 0 .. n-1); a token sees those at its own and
                smaller positions.
            cache: where keys and values are put and found, after its `place`; without one, only the tokens given
                see one another.
        """
        body = self.model.model
        turned = body.rotary_emb(hidden, position_ids=positions)
        extra: dict[str, Any] = {}
        if cache is not None:
            extra = {self._cache_argument: cache, "use_cache": True}
        for index in self.stacks[stack]:
            hidden = body.layers[index](
                hidden,
                attention_mask=self._mask(positions, self.windows[index], cache),
                position_ids=positions,
                position_embeddings=turned,
                **extra,
            )
        return hidden

    def head(self, hidden: Tensor) -> Tensor:
        """`[B, n, width]` after the last stack to logits `[B, n, vocabulary]`."""
        logits: Tensor = self.model.lm_head(self.model.model.norm(hidden))
        return logits

    def _mask(self, positions: Tensor, window: int | None, cache: SlotCache | None) -> Tensor | None:
        if cache is not None:
            return cache.mask(window)
        length = positions.shape[1]
        if window is None or length <= window:
            return None  # plain causal attention
        distance = positions[:, :, None] - positions[:, None, :]
        return ((distance >= 0) & (distance < window))[:, None]

    @torch.no_grad()
    def _check(self) -> None:
        ids = torch.arange(_CHECKED_TOKENS, device=self.device)[None] % self.facts.vocabulary_size
        whole = self.model(input_ids=ids, use_cache=False).logits
        hidden, positions = self.embed(ids), torch.arange(_CHECKED_TOKENS, device=self.device)[None]
        for stack in range(len(self.stacks)):
            hidden = self.run_stack(stack, hidden, positions)
        apart = (self.head(hidden) - whole).abs().max()
        if not apart <= _ROUNDING * whole.abs().max():
            raise ModelFailed(
                f"expert {self.name} ({self.facts.architecture}) does something between its layers that stacks would "
                "lose: choose another expert"
            )


_PARTS = ("embed_tokens", "layers", "norm", "rotary_emb")


def _windows(config: Any, layers: int) -> list[int | None]:
    """How many tokens back each layer sees; None: all."""
    window = getattr(config, "sliding_window", None)
    kinds: Sequence[str] | None = getattr(config, "layer_types", None)
    if kinds is None:
        return [window] * layers
    return [window if kind == "sliding_attention" else None for kind in kinds]


def _end_ids(model: Any, tokenizer: TextTokenizer) -> frozenset[int]:
    """The tokens that end a text."""
    named = getattr(model.generation_config, "eos_token_id", None)
    ids = named if isinstance(named, list) else [named]
    return frozenset(number for number in (*ids, tokenizer.end_id) if number is not None)


def _cache_argument(layer: Any) -> str:
    """What this version of transformers calls the cache that a layer is given."""
    known = inspect.signature(layer.self_attn.forward).parameters
    return "cache" if "cache" in known else "past_key_values"
