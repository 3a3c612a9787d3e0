"""Writing: one text comes from the primary, token by token, with every active expert's keys and values kept.

Every `refresh` tokens the peers read the text again under their own tokenizers, each only from the first token that
changed. With refresh 1 the primary also goes back to the first of its tokens that had seen something that changed, so
that its states are those of a forward pass over the whole text: exact, and dearer. With a larger refresh the primary
keeps what it computed; training with the same `refresh` shows it peers that lag as much.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from optiml.errors import ModelFailed
from optiml.mixture.interaction import UNSEEN, Interaction, PeerStates
from optiml.mixture.mixture import Mixture, padded
from optiml.mixture.router import choose, log_gates
from optiml.mixture.slots import SlotCache, put
from optiml.mixture.tokens import TextStream, View

Ending = Literal["stop", "length", "repetition"]
MAX_PERIOD = 64  # tokens in a phrase whose endless repetition is noticed
REPEATS = 4  # of such a phrase, and at least this many tokens in all:
REPEATED_TOKENS = 96
_LOOKED_EVERY = 16  # tokens between two looks for it


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How tokens are drawn.

    Attributes:
        max_tokens: of each text.
        temperature: 0 takes the likeliest.
        top_p: only the likeliest tokens that together have this probability.
        seed: row i of a call draws from the stream (seed, i); the same row gets the same text in any batch.
        stop: a text ends before the first of these.
        refresh: r; peers read the text again after so many tokens.
    """

    max_tokens: int = 512
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    stop: tuple[str, ...] = ()
    refresh: int = 16

    def __post_init__(self) -> None:
        if self.max_tokens < 1 or self.refresh < 1 or self.temperature < 0 or not 0 < self.top_p <= 1:
            raise ValueError(f"these cannot be used to draw tokens: {self}")


@dataclass(frozen=True, kw_only=True)
class Written:
    """One text, and what it cost.

    Attributes:
        text: without the prompt and without the stop string.
        ending: `stop` (end token or stop string), `length`, or `repetition` of one phrase without end.
        tokens_out: of the primary.
        active: the experts, the primary first.
        read: for each active expert the tokens of the prompt.
        forwarded: for each active expert the tokens that went through it after the prompt.
        own: for each active expert the tokens of the text under its own tokenizer: what it would forward alone.
        ids: the primary's tokens.
    """

    text: str
    ending: Ending
    tokens_out: int
    active: tuple[int, ...]
    read: tuple[int, ...]
    forwarded: tuple[int, ...]
    own: tuple[int, ...]
    ids: tuple[int, ...]


@dataclass(kw_only=True)
class _Row:
    """One text in the making."""

    number: int  # in the call, for its random stream
    prompt: str
    prompt_view: View
    stream: TextStream
    limits: list[int]  # of the primary's tokens whose states are in its cache
    peer_views: list[View]
    forwarded: list[int]
    prompt_tokens_of_peers: list[int]
    budget: int  # tokens that may be written
    text: str = ""
    ending: Ending | None = None
    draws: np.ndarray = field(default_factory=lambda: np.zeros(0))

    @property
    def ids(self) -> tuple[int, ...]:
        return (*self.prompt_view.ids, *self.stream.ids)


@dataclass(kw_only=True)
class _Peer:
    """A peer's caches for all rows, and what it offers at each interaction layer."""

    expert: int
    cache: SlotCache
    keys: list[Tensor | None]
    values: list[Tensor | None]
    ends: Tensor  # [B, slots]


@torch.inference_mode()
def write(
    mixture: Mixture,
    prompts: Sequence[str],
    sampling: Sampling,
    *,
    active: Sequence[tuple[int, ...]] | None = None,
    gate_logs: Tensor | None = None,
    watch: Callable[[int, Tensor], None] | None = None,
) -> tuple[Written, ...]:
    """Write one text for each prompt.

    Args:
        mixture: in evaluation mode.
        prompts: repeat one to get several samples of it.
        sampling: how.
        active: the experts of each row instead of the router's choice; one expert alone writes as if by itself.
        gate_logs: `[B, K]` that belong to `active`; by default the router's.
        watch: for tests: called with the number of a row and its logits `[vocabulary]` before each token is drawn.

    Raises:
        ModelFailed: a prompt is empty or fills an expert's context, or logits are not finite.
    """
    if any(not prompt.strip() for prompt in prompts):
        raise ModelFailed("the prompt is empty: say what the kernel has to compute", code="model_reply_unusable")
    scores = mixture.scores(prompts)
    if active is None:
        active = [tuple(row) for row in choose(scores, mixture.shape.active).active.tolist()]
    groups: dict[tuple[int, ...], list[int]] = {}
    for number, chosen in enumerate(active):
        groups.setdefault(chosen, []).append(number)
    written: dict[int, Written] = {}
    for chosen, numbers in groups.items():
        indices = torch.tensor([chosen], device=scores.device).expand(len(numbers), -1)
        gates = log_gates(scores[numbers], indices) if gate_logs is None else gate_logs[numbers]
        group = _Group(mixture, chosen, [(number, prompts[number]) for number in numbers], gates, sampling)
        for row in group.write(watch):
            written[row.number] = _finished(row, mixture, chosen)
    return tuple(written[number] for number in range(len(prompts)))


def _finished(row: _Row, mixture: Mixture, active: tuple[int, ...]) -> Written:
    own = [len(row.stream.ids)]
    for place, index in enumerate(active[1:]):
        whole = mixture.experts[index].tokenizer.view(row.prompt + row.stream.text)
        own.append(max(len(whole.ids) - row.prompt_tokens_of_peers[place], 0))
    assert row.ending is not None
    return Written(
        text=row.text,
        ending=row.ending,
        tokens_out=len(row.stream.ids),
        active=active,
        read=(len(row.prompt_view.ids), *row.prompt_tokens_of_peers),
        forwarded=tuple(row.forwarded),
        own=tuple(own),
        ids=tuple(row.stream.ids),
    )


class _Group:
    """The rows of one call that share an active set."""

    def __init__(
        self,
        mixture: Mixture,
        active: tuple[int, ...],
        prompts: Sequence[tuple[int, str]],
        gates: Tensor,
        sampling: Sampling,
    ) -> None:
        self.mixture, self.active, self.sampling = mixture, active, sampling
        self.primary = mixture.experts[active[0]]
        self.log_gates = gates
        self.cache = SlotCache()
        layers = mixture.shape.stacks - 1
        self.peers = [
            _Peer(
                expert=index,
                cache=SlotCache(),
                keys=[None] * layers,
                values=[None] * layers,
                ends=torch.full((len(prompts), 0), UNSEEN, device=mixture.device),
            )
            for index in active[1:]
        ]
        self.rows = [self._row(number, prompt) for number, prompt in prompts]
        self.done: list[_Row] = []

    def _row(self, number: int, prompt: str) -> _Row:
        view = self.primary.tokenizer.view(prompt)
        budget = self.sampling.max_tokens
        for index in self.active:
            expert = self.mixture.experts[index]
            taken = len(expert.tokenizer.view(prompt).ids)
            if taken >= expert.context:
                raise ModelFailed(
                    f"the prompt has {taken} tokens for expert {expert.name}, which takes {expert.context}: "
                    "shorten the intent",
                    code="model_reply_unusable",
                )
            budget = min(budget, expert.context - taken)
        draws = np.random.default_rng([self.sampling.seed, number]).random(self.sampling.max_tokens)
        return _Row(
            number=number,
            prompt=prompt,
            prompt_view=view,
            stream=TextStream(self.primary.tokenizer),
            limits=[],
            peer_views=[View(ids=(), ends=()) for _ in self.peers],
            forwarded=[0] * len(self.active),
            prompt_tokens_of_peers=[
                len(self.mixture.experts[peer.expert].tokenizer.view(prompt).ids) for peer in self.peers
            ],
            draws=draws,
            budget=budget,
        )

    def write(self, watch: Callable[[int, Tensor], None] | None) -> list[_Row]:
        """Draw tokens until every row has ended."""
        self._read_again()
        logits = self._forward([(0, row.prompt_view.ids, row.prompt_view.ends) for row in self.rows])
        for row in self.rows:
            row.forwarded = [0] * len(self.active)  # reading the prompt is not writing
        step = 0
        while True:
            if watch is not None:
                for row, row_logits in zip(self.rows, logits, strict=True):
                    watch(row.number, row_logits)
            self._draw(logits, step)
            self._drop_ended()
            if not self.rows:
                return self.done
            stale: list[int] | None = None
            if self.peers and step % self.sampling.refresh == 0:
                stale = self._read_again()
            logits = self._forward(self._unread(stale))
            step += 1

    # --- the primary -----------------------------------------------------------------------------------------------
    def _unread(self, stale: list[int] | None) -> list[tuple[int, Sequence[int], Sequence[int]]]:
        """For each row: the position, tokens and limits with which the primary goes on.

        Args:
            stale: character offsets from which peers' tokens changed; None if they did not read.
        """
        ahead: list[tuple[int, Sequence[int], Sequence[int]]] = []
        for place, row in enumerate(self.rows):
            if stale is None and self.peers and row.stream.ids:
                limit = row.limits[-1]  # what the peers have read
            else:
                limit = len(row.prompt) + len(row.stream.text)
            start = len(row.limits)
            if stale is not None and self.sampling.refresh == 1:
                start = next((index for index, seen in enumerate(row.limits) if seen >= stale[place]), start)
            limits = [*row.limits[start:], limit]
            ahead.append((start, row.ids[start:], limits))
        return ahead

    def _forward(self, ahead: Sequence[tuple[int, Sequence[int], Sequence[int]]]) -> Tensor:
        """Run the primary; returns the logits `[B, vocabulary]` of each row's last token."""
        positions, ids, extent = _placed([(start, tokens) for start, tokens, _ in ahead], self.primary.device)
        limits = padded([row_limits for _, _, row_limits in ahead], -1, self.mixture.device)
        self.cache.place(positions, extent)
        hidden = self.primary.embed(ids)
        for stack in range(self.mixture.shape.stacks):
            hidden = self.primary.run_stack(stack, hidden, positions, self.cache)
            if stack < self.mixture.shape.stacks - 1:
                layer = self.mixture.interactions[stack]
                assert isinstance(layer, Interaction)
                hidden = layer.primary_update(self.active[0], hidden, limits, self._offers(stack))
        last = torch.tensor([len(tokens) - 1 for _, tokens, _ in ahead], device=hidden.device)
        hidden = hidden[torch.arange(len(ahead), device=hidden.device), last][:, None]
        for row, (start, tokens, row_limits) in zip(self.rows, ahead, strict=True):
            row.limits[start:] = row_limits
            row.forwarded[0] += len(tokens)
        return self.primary.head(hidden)[:, 0]

    # --- the peers -------------------------------------------------------------------------------------------------
    def _offers(self, stack: int) -> list[PeerStates]:
        offers = []
        for place, peer in enumerate(self.peers):
            keys, values = peer.keys[stack], peer.values[stack]
            assert keys is not None
            assert values is not None
            used = peer.ends.shape[1]
            offers.append(
                PeerStates(
                    keys=keys[:, :, :used],
                    values=values[:, :, :used],
                    ends=peer.ends,
                    log_gate=self.log_gates[:, place + 1],
                )
            )
        return offers

    def _read_again(self) -> list[int]:
        """Let every peer read each row's text from its first changed token; returns where, in characters."""
        stale = [UNSEEN] * len(self.rows)
        for place, peer in enumerate(self.peers):
            tokenizer = self.mixture.experts[peer.expert].tokenizer
            tails: list[tuple[int, Sequence[int]]] = []
            for number, row in enumerate(self.rows):
                old, new = row.peer_views[place], tokenizer.view(row.prompt + row.stream.text)
                same = _common(old, new)
                for view in (old, new):
                    if same < len(view.ids):
                        stale[number] = min(stale[number], view.ends[same])
                tails.append((same, new.ids[same:]))
                row.peer_views[place] = new
                row.forwarded[place + 1] += len(new.ids) - same
            peer.ends = padded([row.peer_views[place].ends for row in self.rows], UNSEEN, self.mixture.device)
            if any(tail for _, tail in tails):
                self._read(peer, tails)
        return stale

    def _read(self, peer: _Peer, tails: Sequence[tuple[int, Sequence[int]]]) -> None:
        expert = self.mixture.experts[peer.expert]
        positions, ids, extent = _placed(tails, expert.device)
        shared_positions = positions.to(self.mixture.device)
        peer.cache.place(positions, extent)
        hidden = expert.embed(ids)
        for stack in range(self.mixture.shape.stacks - 1):
            hidden = expert.run_stack(stack, hidden, positions, peer.cache)
            layer = self.mixture.interactions[stack]
            assert isinstance(layer, Interaction)
            shared = layer.shared_state(peer.expert, hidden)
            keys, values = layer.offer(shared)
            peer.keys[stack] = put(peer.keys[stack], keys, shared_positions, extent)
            peer.values[stack] = put(peer.values[stack], values, shared_positions, extent)
            if stack < self.mixture.shape.stacks - 2:
                hidden = layer.peer_update(peer.expert, hidden, shared)

    # --- drawing ---------------------------------------------------------------------------------------------------
    def _draw(self, logits: Tensor, step: int) -> None:
        if not bool(torch.isfinite(logits).all()):
            raise ModelFailed("the mixture computed numbers that are not finite: use a wider dtype, or train it again")
        if self.sampling.temperature == 0:
            tokens = logits.argmax(dim=-1).tolist()
        else:
            uniform = torch.tensor([row.draws[step] for row in self.rows], device=logits.device)
            tokens = _drawn(logits, self.sampling, uniform).tolist()
        for row, token in zip(self.rows, tokens, strict=True):
            if token in self.primary.end_ids:
                row.ending = "stop"
                row.text = row.stream.text
                continue
            new = row.stream.push(token)
            row.text = row.stream.text
            cut = _stopped(row.text, len(new), self.sampling.stop)
            if cut is not None:
                row.text, row.ending = row.text[:cut], "stop"
            elif step % _LOOKED_EVERY == 0 and repeats(row.stream.ids):
                row.ending = "repetition"
            elif step + 1 >= row.budget or self._full(row):
                row.ending = "length"

    def _full(self, row: _Row) -> bool:
        """Whether a peer, which may need more tokens for the same text, has no room for what comes next."""
        return any(
            len(view.ids) + self.sampling.refresh >= self.mixture.experts[peer.expert].context
            for peer, view in zip(self.peers, row.peer_views, strict=True)
        )

    def _drop_ended(self) -> None:
        if all(row.ending is None for row in self.rows):
            return
        self.done += [row for row in self.rows if row.ending is not None]
        kept = [place for place, row in enumerate(self.rows) if row.ending is None]
        self.rows = [self.rows[place] for place in kept]
        if not kept:
            return
        here = torch.tensor(kept, device=self.primary.device)
        self.cache.select(here)
        shared = here.to(self.mixture.device)
        self.log_gates = self.log_gates[shared]
        for peer in self.peers:
            peer.cache.select(here.to(self.mixture.experts[peer.expert].device))
            peer.ends = peer.ends[shared]
            peer.keys = [None if keys is None else keys[shared] for keys in peer.keys]
            peer.values = [None if values is None else values[shared] for values in peer.values]


def _placed(rows: Sequence[tuple[int, Sequence[int]]], device: torch.device) -> tuple[Tensor, Tensor, int]:
    """Positions and ids `[B, n]` of tokens that go on at `start` in each row, and the number of slots they need.

    Padding stands beyond a row's last token, where nobody looks until something real is written there.
    """
    longest = max(len(tokens) for _, tokens in rows)
    positions = torch.tensor([[start + offset for offset in range(longest)] for start, _ in rows], device=device)
    ids = padded([tokens for _, tokens in rows], 0, device)
    return positions, ids, max(start for start, _ in rows) + longest


def _common(old: View, new: View) -> int:
    """How many tokens both begin with."""
    pairs = zip(old.ids, new.ids, strict=False)
    ends = zip(old.ends, new.ends, strict=False)
    count = 0
    for (one, other), (end, other_end) in zip(pairs, ends, strict=True):
        if one != other or end != other_end:
            return count
        count += 1
    return count


def _drawn(logits: Tensor, sampling: Sampling, uniform: Tensor) -> Tensor:
    """Tokens `[B]` by inverting the cumulative distribution of the likeliest ones at `uniform` `[B]`."""
    probabilities, order = torch.softmax(logits.double() / sampling.temperature, dim=-1).sort(dim=-1, descending=True)
    before = probabilities.cumsum(dim=-1) - probabilities
    kept = probabilities.masked_fill(before >= sampling.top_p, 0.0)
    cumulative = kept.cumsum(dim=-1)
    threshold = uniform[:, None].to(cumulative.dtype) * cumulative[:, -1:]
    index = (cumulative <= threshold).sum(dim=-1, keepdim=True).clamp(max=logits.shape[-1] - 1)
    return order.gather(1, index)[:, 0]


def _stopped(text: str, new: int, stop: Sequence[str]) -> int | None:
    """Where the first stop string begins that the last `new` characters completed."""
    found = []
    for phrase in stop:
        at = text.find(phrase, max(len(text) - new - len(phrase) + 1, 0))
        if at >= 0:
            found.append(at)
    return min(found, default=None)


def repeats(ids: Sequence[int]) -> bool:
    """Whether the text ends in one phrase of up to `MAX_PERIOD` tokens, again and again."""
    for period in range(1, MAX_PERIOD + 1):
        span = max(period * REPEATS, REPEATED_TOKENS)
        if len(ids) < span:
            return False
        tail = ids[-span:]
        if tail[period:] == tail[:-period]:
            return True
    return False
