"""A search whose proposals come from outside: it says which kernels it wants improved, and takes what it is told.

The tree, the evaluations, the stopping rules and the final checks are those of `Search`; only the built-in edits are
left out. Two logs make a run resumable, each with one writer at a time: the journal of the search, and the log of what
was told, which a teller appends to while another process evaluates. A proposal is queued from the moment it is in that
log until the tree holds its kernel.

Requests come in rounds. A round stays open until one of its requests was answered and everything queued is evaluated;
then the next round follows, and what is left of the old one is stale.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from optiml.codec import decode, encode, kernel_id, restore
from optiml.errors import InvalidInput
from optiml.llm.model import Model
from optiml.records import STRICT, Diagnosis, ExpectedChange, HotLine, Kernel, Profile
from optiml.search.journal import Event, Journal
from optiml.search.judge import diagnose, score_expected
from optiml.search.optimise import Search, SearchSpec, Task
from optiml.search.propose import Ranked
from optiml.search.puct import FIRST_PLAY_URGENCY, children_allowed, puct
from optiml.search.tree import Node

AGENT_EDIT = "agent"  # what the path of a result calls a step that was told
ROUND = 2  # requests open at once: a choice, and still a small reply
TRIED_SHOWN = 8
LONGEST_RATIONALE = 600
KEY_METRICS = (
    "dram__bytes.sum",
    "l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum",
    "l1tex__t_requests_pipe_lsu_mem_global_op_ld.sum",
    "l1tex__t_sectors_pipe_lsu_mem_global_op_st.sum",
    "l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum",
    "smsp__inst_executed.sum",
    "sm__warps_active.avg.pct_of_peak_sustained_active",
    "launch__registers_per_thread",
)
ASK = (
    "Rewrite this kernel to be faster for the same problem. Answer with run_mcts action=tell, one or more proposals "
    'with this request_id: kernel as {"base": parent_kernel_id, "diff": a unified diff} or in full, rationale in one '
    "sentence, expected metric changes if you can name them."
)

Outcome = Literal["queued", "duplicate", "stale", "invalid"]
ReadKernel = Callable[[Any], Kernel]  # any form of contract §2; raises InvalidInput


@dataclass(frozen=True, kw_only=True)
class ProfileBrief:
    """What a proposer needs of a profile."""

    time_us: float
    source: str
    time_ratio: float  # of the input kernel's time; above 1 is faster
    bottleneck: str
    advice: tuple[str, ...]
    metrics: Mapping[str, float | None]
    hot_lines: tuple[HotLine, ...]
    speed_of_light_pct: float | None


@dataclass(frozen=True, kw_only=True)
class Tried:
    """An earlier proposal for the same kernel, and what came of it."""

    kernel_id: str
    rationale: str
    outcome: str  # faster | slower | same | rejected | unverified | duplicate | waiting
    time_ratio: float | None  # of the parent's time; above 1 is faster
    why: str | None


@dataclass(frozen=True, kw_only=True)
class Request:
    """A kernel that the search wants improved."""

    request_id: str
    parent_kernel_id: str
    kernel: Kernel
    diagnosis: Diagnosis
    profile_brief: ProfileBrief | None
    tried: tuple[Tried, ...]
    ask: str = ASK


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What became of one proposal."""

    request_id: str
    outcome: Outcome
    why: str
    kernel_id: str | None = None


@dataclass(frozen=True, kw_only=True)
class Expectation:
    """A metric change that a proposer expects."""

    __pydantic_config__ = STRICT
    metric: str
    direction: Literal["down", "up"]
    factor: float | None = None


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """What a proposer sends."""

    __pydantic_config__ = STRICT
    request_id: str
    kernel: Any  # any form of contract §2
    rationale: str = ""
    expected: tuple[Expectation, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Told:
    """A queued proposal, as the log of what was told holds it."""

    request_id: str
    kernel: Kernel
    rationale: str
    expected: tuple[ExpectedChange, ...] = ()


class AskTell(Search):
    """A search that asks an agent. `status` is `needs_proposals` while it waits for `tell`."""

    def __init__(
        self, spec: SearchSpec, journal: Journal | None = None, *, told: Callable[[], Sequence[Event]] = tuple,
        judge: Model | None = None,
    ) -> None:  # fmt: skip
        """Start a run, or rebuild it.

        Args:
            told: reads the log of what was told, as it stands now.
        """
        self._told = told
        self._parents: dict[str, int] = {}  # request id -> node, of every round
        self._open: tuple[str, ...] = ()  # request ids of the last round
        super().__init__(spec, journal, judge=judge)
        self._settle()

    def follow(self, events: Iterable[Event]) -> None:
        """Take events that another process has written; what was told since counts too."""
        super().follow(events)
        self._settle()

    def _settle(self) -> None:
        if self.status in ("running", "needs_proposals"):
            self.status = "needs_proposals" if self._waits() else "running"

    # --- ask ---------------------------------------------------------------------------------------------------------
    def ask(self) -> Task | None:
        """The next task; None at the end of the run and while proposals are needed."""
        if self.status == "needs_proposals":
            self.status = "running"  # something may have been told since
        if self.status == "running" and self.tree.pending() is None and self._stop_reason() is None:
            queue = self._queue()
            if queue:
                self._take(queue[0])
            elif self._waits() or self._open_round():
                self.status = "needs_proposals"
                return None
        return super().ask()

    def cancel(self, reason: str = "cancelled") -> None:
        """End the run where it stands."""
        if self.status == "needs_proposals":
            self.status = "running"
        super().cancel(reason)

    def _waits(self) -> bool:
        """Whether the open round has no answer yet and nothing is left to evaluate."""
        if self.tree.pending() is not None or self._stop_reason() is not None or not self._open:
            return False
        return not {item.request_id for item in self._proposals()} & set(self._open)

    def _open_round(self) -> bool:
        """Ask for the next improvements; false where no kernel may be improved further."""
        nodes = self._worth_asking(ROUND)
        if not nodes:
            return False
        opened = {f"q{len(self._parents) + number}": node.index for number, node in enumerate(nodes, start=1)}
        self._log({"event": "requests", "requests": opened})
        self._opened(opened)
        return True

    def _opened(self, requests: Mapping[str, int]) -> None:
        self._parents.update(requests)
        self._open = tuple(requests)

    def _take(self, told: Told) -> None:
        parent = self.tree.nodes[self._parents[told.request_id]]
        profile = None if parent.evaluation is None else parent.evaluation.profile
        score = score_expected(told.expected, profile)
        self._add(
            parent,
            Ranked(
                kernel=told.kernel, kernel_id=kernel_id(told.kernel), edit=AGENT_EDIT, target="",
                rationale=told.rationale, expected=told.expected, judge_score=score, prior=score,
            ),
        )  # fmt: skip

    def _worth_asking(self, count: int) -> list[Node]:
        """The kernels whose improvement promises most: walks from the root as the built-in search does."""
        chosen: list[Node] = []
        closed: set[int] = set()
        while len(chosen) < count and 0 not in closed:
            node = self.tree.root
            while True:
                step = self._descend(node, closed, chosen)
                if step is None:
                    closed.add(node.index)
                    break
                if step is node:
                    chosen.append(node)
                    break
                node = step
        return chosen

    def _descend(self, node: Node, closed: set[int], chosen: Sequence[Node]) -> Node | None:
        """The child to go on from, the node itself to ask here, None where nothing is left."""
        children = [item for item in node.children if item.state == "open" and item.index not in closed]
        live = [item for item in node.children if item.state in ("open", "pending")]
        allowed = children_allowed(node.visits, is_root=node.index == 0)
        here = self._may_grow(node) and node not in chosen and (len(live) < allowed or not children)
        if not here and not children:
            return None
        own = 0.0 if node.reward is None else node.reward.total
        value = [self.tree.scaled(self._worth(item)) for item in children]
        value += [self.tree.scaled(own - FIRST_PLAY_URGENCY)] if here else []
        visits = [float(item.visits) for item in children] + ([0.0] if here else [])
        prior = np.full(len(value), 1.0 / len(value), dtype=np.float64)
        scores = puct(
            np.array(value, dtype=np.float64), np.array(visits, dtype=np.float64), prior,
            parent_visits=float(node.visits),
        )  # fmt: skip
        best = int(np.argmax(scores))
        return children[best] if best < len(children) else node

    def _propose(self, node: Node) -> tuple[Ranked, ...]:
        return ()  # the built-in edits: an agent searches without them

    def _stop_reason(self) -> str | None:
        if any(event.get("event") == "done" for event in self._told()):
            return "the agent has no further proposals"
        return super()._stop_reason()

    # --- tell --------------------------------------------------------------------------------------------------------
    def answer(self, proposals: Sequence[Any], read_kernel: ReadKernel, log: Journal) -> tuple[Answer, ...]:
        """Take proposals `{request_id, kernel, rationale, expected}` into the log; none at all says there are no more.

        The caller holds the lock of that log.
        """
        if not proposals:
            log.append({"event": "done"})
        return tuple(self._answer(item, read_kernel, log) for item in proposals)

    def _answer(self, proposal: Any, read_kernel: ReadKernel, log: Journal) -> Answer:
        request_id = str(proposal.get("request_id", ""))[:40] if isinstance(proposal, Mapping) else ""
        stale = self._why_stale(request_id)
        if stale is not None:
            return Answer(request_id=request_id, outcome=stale[0], why=stale[1])
        try:
            told = _read(proposal, read_kernel)
        except InvalidInput as error:
            return Answer(request_id=request_id, outcome="invalid", why=f"{error.code}: {error}"[:600])
        identity = kernel_id(told.kernel)
        if self.tree.holds(identity):
            node = next(item for item in self.tree.nodes if item.kernel_id == identity)
            why = f"kernel {identity} is in the tree already: {_outcome(node)[0]}"
            return Answer(request_id=request_id, outcome="duplicate", why=why, kernel_id=identity)
        if any(kernel_id(item.kernel) == identity for item in self._queue()):
            why = f"kernel {identity} is waiting to be evaluated already"
            return Answer(request_id=request_id, outcome="duplicate", why=why, kernel_id=identity)
        log.append({"event": "told", "told": encode(told)})
        why = "it will be built, verified and profiled next"
        return Answer(request_id=request_id, outcome="queued", why=why, kernel_id=identity)

    def _why_stale(self, request_id: str) -> tuple[Outcome, str] | None:
        open_now = ", ".join(self._open) or "none"
        if request_id not in self._parents:
            return "invalid", f"there is no such request in this run; open requests: {open_now}"
        if self.status not in ("running", "needs_proposals"):
            return "stale", f"the search is {self.status}: {self.stopped_because}"
        if request_id not in self._open:
            return "stale", f"the search has moved on from this request; open requests: {open_now}"
        reason = self._stop_reason()
        if reason is not None:
            return "stale", f"the search is doing its final checks: {reason}"
        left = self.spec.evaluations - self.evaluations - len(self._queue()) - (self.tree.pending() is not None)
        if left <= 0:
            return "stale", f"the budget of {self.spec.evaluations} evaluations is spoken for"
        return None

    def _proposals(self) -> list[Told]:
        return [restore(Told, event["told"]) for event in self._told() if event.get("event") == "told"]

    def _queue(self) -> list[Told]:
        """What was told and is not in the tree, in order."""
        return [item for item in self._proposals() if not self.tree.holds(kernel_id(item.kernel))]

    # --- what the agent is shown -------------------------------------------------------------------------------------
    def requests(self) -> tuple[Request, ...]:
        """The open requests; none while the search evaluates, and after its end."""
        if self.status != "needs_proposals":
            return ()
        return tuple(self._request(identity, self.tree.nodes[self._parents[identity]]) for identity in self._open)

    def _request(self, identity: str, node: Node) -> Request:
        profile = None if node.evaluation is None else node.evaluation.profile
        return Request(
            request_id=identity, parent_kernel_id=node.kernel_id, kernel=node.kernel, diagnosis=diagnose(profile),
            profile_brief=None if profile is None else _brief(profile, self.tree.root.time_us),
            tried=tuple(_tried(child) for child in node.children[-TRIED_SHOWN:]),
        )  # fmt: skip

    # --- journal -----------------------------------------------------------------------------------------------------
    def _replay(self, event: Mapping[str, Any]) -> None:
        if event.get("event") == "requests":
            self._opened(event["requests"])
        else:
            super()._replay(event)


def _read(proposal: Any, read_kernel: ReadKernel) -> Told:
    given = decode(Proposal, proposal, what="proposal")
    return Told(
        request_id=given.request_id, kernel=read_kernel(given.kernel),
        rationale=" ".join(given.rationale.split())[:LONGEST_RATIONALE] or "no rationale was given",
        expected=tuple(
            ExpectedChange(metric=item.metric, direction=item.direction, factor=item.factor) for item in given.expected
        ),
    )  # fmt: skip


def _brief(profile: Profile, root_us: float) -> ProfileBrief:
    return ProfileBrief(
        time_us=profile.time.median_us, source=profile.time.source, time_ratio=root_us / profile.time.median_us,
        bottleneck=profile.bottleneck.kind, advice=profile.bottleneck.advice,
        metrics={name: profile.metrics[name] for name in KEY_METRICS if name in profile.metrics},
        hot_lines=profile.hot_lines[:3],
        speed_of_light_pct=None if profile.speed_of_light is None else profile.speed_of_light.pct,
    )  # fmt: skip


def _tried(node: Node) -> Tried:
    outcome, why = _outcome(node)
    parent = node.parent
    ratio = None if parent is None or node.time_us == float("inf") else parent.time_us / node.time_us
    return Tried(kernel_id=node.kernel_id, rationale=node.rationale, outcome=outcome, time_ratio=ratio, why=why)


def _outcome(node: Node) -> tuple[str, str | None]:
    """What came of a kernel, in one word, and why where it failed."""
    if node.state == "pending":
        return "waiting", None
    if node.state == "duplicate":
        return "duplicate", "it compiles to the code of a kernel that was evaluated before"
    if node.evaluation is not None and node.state == "failed":
        verdict = node.evaluation.verdict
        return verdict.status, f"{verdict.reason or verdict.status}: {verdict.detail or verdict.summary}"[:300]
    if node.parent is None:
        return "the input kernel", None
    ratio = node.parent.time_us / node.time_us
    return ("faster" if ratio > 1.01 else "slower" if ratio < 0.99 else "same"), None
