"""The search: ask for the next kernel to evaluate, tell what came of it; and the short loop over both.

The tree is a fold over the events of the journal, so a run that was killed is rebuilt by replaying them: nothing is
evaluated twice and the budget stays exact. All choices follow from the spec's seed.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np

from optiml.codec import encode, restore
from optiml.errors import InvalidInput, NotAccepted, ToolFailed
from optiml.llm.model import Model
from optiml.records import (
    Evaluation,
    ExpectedChange,
    Kernel,
    Problem,
    Reward,
    RunStatus,
    SearchResult,
    Verdict,
)
from optiml.reward import gate_reward, reward
from optiml.search.edit import Edit, EditContext
from optiml.search.edits import edits_named
from optiml.search.explain import summarise
from optiml.search.journal import Journal
from optiml.search.judge import JUDGE, NEUTRAL_SCORE, judge_by_rules
from optiml.search.judge_model import judge_by_model
from optiml.search.propose import Ranked, problem_dtype, propose
from optiml.search.puct import FIRST_PLAY_URGENCY, children_allowed, puct
from optiml.search.tree import MAX_DEPTH, Node, Tree

LOG = logging.getLogger(__name__)
CATALOGUE_EDIT = "swap_strategy"
FINALISTS = 3
MOST_REFUSED = 6  # confirmations that may fail before the search keeps the input
CONFIRMATIONS = 2  # runs of the final check, if the first one ended without saying anything of the kernel
SMALL_BUDGET = 16  # evaluations up to which the root's best proposals are tried first, then halved
PATIENCE = 12  # evaluations without a gain of at least GAIN before the search gives up; half the budget if that is more
GAIN = 0.01
ENOUGH_TIME_REWARD = 0.9  # R_t above which little is left to win
SPEED_OF_LIGHT_PCT = 95.0
PROMISE = 0.8  # reward that the judge's best score promises over its neutral one
SIBLING_DISCOUNT = 0.5  # of a proposal's prior, for each live sibling made by the same edit
ANCESTOR_DISCOUNT = 0.5  # of a proposal's prior, for each step of the path made by the same edit
OUTCOME_DISCOUNT = 0.6  # of a proposal's prior, for each earlier failure or loss of the same edit in this run
USELESS = 0.001  # a step that lowers the time by less changed nothing
MOST_WARNINGS = 20  # kept of a run
LEAST_REWARD_GAIN = 0.005  # below which a child is no better than its parent

Depth = Literal["reduced", "full", "confirm"]
Purpose = Literal["input", "node", "finalist", "confirm"]


@dataclass(frozen=True, kw_only=True)
class SearchSpec:
    """Everything that decides a run; the first event of its journal.

    Attributes:
        evaluations: budget of kernels evaluated, the input included; finalist and confirmation runs are free.
        seconds: wall-clock budget over all sessions of the run, or None.
        edits: allow-list of edit names; None for all.
        catalogue: whether the built-in strategies of the problem may be swapped in.
        dtype: what `//@ types` of strategies stands for; None derives it from the problem.
    """

    run_id: str
    problem: Problem
    kernel: Kernel
    evaluations: int = 40
    seconds: float | None = None
    seed: int = 0
    edits: tuple[str, ...] | None = None
    catalogue: bool = True
    dtype: str | None = None
    proposer: str = "builtin"
    judge: str = "rules"
    schema: int = 1

    def __post_init__(self) -> None:
        if self.evaluations < 1:
            raise InvalidInput(f"a search needs a budget of at least 1 evaluation, not {self.evaluations}")
        if self.seconds is not None and not self.seconds > 0:
            raise InvalidInput(f"the budget of seconds must be positive, not {self.seconds}")
        edits_named(self.edits)


@dataclass(frozen=True, kw_only=True)
class Task:
    """A kernel that the search wants evaluated, and how thoroughly."""

    node: int
    kernel: Kernel
    kernel_id: str
    depth: Depth
    purpose: Purpose
    edit: str
    rationale: str
    parent_kernel_id: str | None


@dataclass(frozen=True, kw_only=True)
class SearchProgress:
    """What a live display needs after each event."""

    run_id: str
    evaluations: int
    budget: int
    best_speedup: float
    best_kernel_id: str
    last: str
    seconds: float


class Evaluate(Protocol):
    """Builds, verifies and profiles a kernel; a wrong kernel is an Evaluation, not an exception."""

    def __call__(self, kernel: Kernel, *, depth: Depth) -> Evaluation: ...


class Search:
    """One run: ask() names the next task, tell() takes its evaluation. Not thread-safe."""

    def __init__(self, spec: SearchSpec, journal: Journal | None = None, *, judge: Model | None = None) -> None:
        """Start a run, or rebuild it from the events of `journal`.

        Args:
            judge: the model that rates proposals, where the spec names one; a search that is only looked at needs none.

        Raises:
            ToolFailed: the journal belongs to another run or does not fit the spec.
        """
        self.spec = spec
        self.tree = Tree(spec.kernel)
        self.status: RunStatus = "running"
        self.stopped_because: str | None = None
        self.duplicates = 0
        self.elapsed_s = 0.0
        self._edits = _edits_of(spec)
        self._journal = journal
        self._judge = judge
        self._warnings: list[str] = []
        self._ranked: dict[int, tuple[Ranked, ...]] = {}
        self._losses: dict[tuple[str, str], int] = {}
        self._gains: dict[
            tuple[str, str], list[float]
        ] = {}  # strategy -> reward gained over the parent, for each accepted kernel
        self._best_history: list[float] = []
        events = list(journal) if journal is not None else []
        if journal is not None and not events:
            journal.append({"event": "spec", "spec": encode(spec)})
        for event in events:
            self._replay(event)

    def follow(self, events: Iterable[Mapping[str, Any]]) -> None:
        """Take events that another process, which carries the run out, has written since this search was loaded."""
        for event in events:
            self._replay(event)

    # --- ask ---------------------------------------------------------------------------------------------------------
    def ask(self) -> Task | None:
        """The next task; None once the run has ended. Asking again without telling gives the same task."""
        if self.status != "running":
            return None
        pending = self.tree.pending()
        if pending is not None:
            return self._task(pending, "full" if pending.index == 0 else "reduced")
        reason = self._stop_reason()
        if reason is None:
            node = self._expand()
            if node is not None:
                return self._task(node, "reduced")
            reason = self._stop_reason() or "no untried edit is left"
        shorter = self._shorter_path() if self.evaluations < self.spec.evaluations else None
        if shorter is not None:
            return self._task(self._add(*shorter), "reduced")
        return self._ask_finalist(reason)

    def _ask_finalist(self, reason: str) -> Task | None:
        """Full checks of the fastest, then a confirmation in a fresh process of the one that leads."""
        for node in self._fastest(FINALISTS):
            if node.full is None:
                return self._task(node, "full")
        leader = self._leader()
        if leader.index == 0 or (leader.confirmed is not None and not _may_be_asked_again(leader)):
            self._end("finished", reason)
            return None
        return self._task(leader, "full" if leader.full is None else "confirm")

    def _task(self, node: Node, depth: Depth) -> Task:
        purpose: Purpose = "finalist" if depth == "full" else "confirm" if depth == "confirm" else "node"
        return Task(
            node=node.index, kernel=node.kernel, kernel_id=node.kernel_id, depth=depth,
            purpose="input" if node.index == 0 else purpose, edit=node.edit, rationale=node.rationale,
            parent_kernel_id=None if node.parent is None else node.parent.kernel_id,
        )  # fmt: skip

    # --- tell --------------------------------------------------------------------------------------------------------
    def tell(self, task: Task, evaluation: Evaluation, *, elapsed_s: float = 0.0) -> None:
        """Take the evaluation of a task.

        Args:
            elapsed_s: seconds that the run has used so far, over all its sessions.

        Raises:
            NotAccepted: it was the input kernel, and it was not accepted.
        """
        self._log(
            {"event": "evaluation", "node": task.node, "depth": task.depth, "elapsed_s": round(elapsed_s, 3),
             "evaluation": encode(evaluation)}
        )  # fmt: skip
        self._record(self.tree.nodes[task.node], task.depth, evaluation, elapsed_s)
        root = self.tree.root
        if task.node == 0 and root.state == "failed":
            verdict = evaluation.verdict
            why = f"{verdict.reason or verdict.status}: {verdict.detail or verdict.summary}"
            self._end("failed", f"the input kernel was not accepted: {why}")
            raise NotAccepted(f"{why}; give a kernel that passes before searching for a faster one")

    def tell_duplicate(self, task: Task) -> None:
        """Close a task whose kernel was found, before it ran, to compile to code that the tree holds already."""
        self._log({"event": "duplicate", "node": task.node})
        self._record_duplicate(self.tree.nodes[task.node])

    def cancel(self, reason: str = "cancelled") -> None:
        """End the run where it stands."""
        if self.status == "running":
            self._end("cancelled", reason)

    def _record(self, node: Node, depth: Depth, evaluation: Evaluation, elapsed_s: float) -> None:
        self.elapsed_s = max(self.elapsed_s, elapsed_s)
        if node.evaluation is None:
            self.tree.record(node, evaluation, self._reward(node, evaluation))
            self._best_history.append(self.best_time_us())
            self._remember(node)
            if depth == "full":
                self.tree.record_full(node, evaluation)
        elif depth == "full":
            self.tree.record_full(node, evaluation)
        else:
            self.tree.record_confirmed(node, evaluation)

    def _remember(self, node: Node) -> None:
        """Keep what came of an edit: the search asks it when the same edit is offered again."""
        if node.parent is None or node.reward is None or node.parent.reward is None:
            return
        if node.time_us > node.parent.time_us * (1.0 - GAIN):
            self._losses[node.strategy] = self._losses.get(node.strategy, 0) + 1
        gained = node.reward.total - node.parent.reward.total if node.state == "open" else 0.0
        self._gains.setdefault(node.strategy, []).append(max(-PROMISE, gained))

    def _record_duplicate(self, node: Node) -> None:
        self.tree.record_duplicate(node)
        self.duplicates += 1

    def _reward(self, node: Node, evaluation: Evaluation) -> Reward:
        if evaluation.verdict.status != "accepted" or evaluation.profile is None:
            if evaluation.verdict.status == "accepted":
                return Reward(time=0.0, proxies=0.0, guardrails=0.0, judge=0.0, total=0.0)
            return gate_reward(evaluation.verdict)
        root_profile = evaluation.profile
        if self.tree.root.evaluation is not None and self.tree.root.evaluation.profile is not None:
            root_profile = self.tree.root.evaluation.profile
        return reward(evaluation, root_profile, judge_score=self._judge_score(node, evaluation), visits=1)

    def _judge_score(self, node: Node, evaluation: Evaluation) -> float:
        if node.parent is None or node.parent.evaluation is None:
            return 0.5
        if self.spec.judge != JUDGE:
            return node.judge_score  # given before it was measured, and logged with the proposal
        before = node.parent.evaluation
        return judge_by_rules(
            self.spec.problem, node.parent.kernel, node.kernel, before_build=before.verdict.build,
            after_build=evaluation.verdict.build, profile=before.profile,
        ).score  # fmt: skip

    # --- selection ---------------------------------------------------------------------------------------------------
    def _expand(self) -> Node | None:
        """Walk down from the root to the most promising untried proposal and add it; None if none is left."""
        closed: set[int] = set()
        while 0 not in closed:
            node = self.tree.root
            while True:
                step = self._choose(node, closed)
                if step is None:
                    closed.add(node.index)
                    break
                if isinstance(step, Ranked):
                    return self._add(node, step)
                node = step
        return None

    def _choose(self, node: Node, closed: set[int]) -> Node | Ranked | None:
        """The child to descend into, or the proposal to try; None where this node has nothing to offer."""
        children = [item for item in node.children if item.state == "open" and item.index not in closed]
        live = [item for item in node.children if item.state in ("open", "pending")]
        fresh = self._fresh(node) if self._may_grow(node) else []
        if self._halving(node, live, fresh):
            return fresh[0][0]
        allowed = children_allowed(node.visits, is_root=node.index == 0)
        # A node that has nothing but exhausted children left may exceed its width: better than ending early.
        untried = fresh[:1] if len(live) < allowed or not children else []
        if not children and not untried:
            return None
        value = [self.tree.scaled(self._worth(item)) for item in children]
        value += [self._first_play(node, item) for item, _ in untried]
        visits = [float(item.visits) for item in children] + [0.0] * len(untried)
        prior = [item.prior for item in children] + [weight for _, weight in untried]
        scores = puct(
            np.array(value, dtype=np.float64), np.array(visits, dtype=np.float64), np.array(prior, dtype=np.float64),
            parent_visits=float(node.visits),
        )  # fmt: skip
        best = int(np.argmax(scores))
        return children[best] if best < len(children) else untried[0][0]

    def _first_play(self, node: Node, ranked: Ranked) -> float:
        """Normalised value of an untried edit: the kernel's own reward, and what the edit promises on top.

        Not the node's value, which holds the best of its subtree: a weak kernel with one good child would then keep
        drawing evaluations to its other edits. The promise is the judge's, averaged with what the edit brought
        elsewhere in this run.
        """
        own = 0.0 if node.reward is None else node.reward.total
        gains = self._gains.get(ranked.strategy, [])
        promise = (PROMISE * (ranked.judge_score - NEUTRAL_SCORE) + sum(gains)) / (1 + len(gains))
        return self.tree.scaled(own - FIRST_PLAY_URGENCY + promise)

    def _worth(self, node: Node) -> float:
        """Value of a child for selection; one that gained nothing, itself or below, ranks like an untried edit.

        Otherwise a step that changes nothing would be as good as the kernel it was made from, and the search would
        stack such steps.
        """
        parent = node.parent
        if parent is None or parent.reward is None or node.best > parent.reward.total + LEAST_REWARD_GAIN:
            return node.value
        return min(node.value, parent.reward.total) - FIRST_PLAY_URGENCY

    def _halving(self, node: Node, live: Sequence[Node], fresh: Sequence[tuple[Ranked, float]]) -> bool:
        """With a small budget: whether the root still tries its best proposals, each once, before any is deepened."""
        if node.index != 0 or self.spec.evaluations > SMALL_BUDGET or not fresh:
            return False
        return len(node.children) < max(1, self.spec.evaluations // 2)

    def _may_grow(self, node: Node) -> bool:
        """Depth at most MAX_DEPTH; a branch ends after two steps in a row that are worse than the input kernel."""
        if node.depth >= MAX_DEPTH or node.state != "open":
            return False
        last_two = [item for item in node.path()[1:] if item.reward is not None][-2:]
        return not (len(last_two) == 2 and all(item.reward is not None and item.reward.total < 0 for item in last_two))

    def _fresh(self, node: Node) -> list[tuple[Ranked, float]]:
        """Untried proposals of a node with their priors, best first.

        A second variant of an edit that already made a live child, and an edit that failed or lost time elsewhere in
        this run, count less: the widening draw prefers another strategy.
        """
        if node.index not in self._ranked:
            self._ranked[node.index] = self._propose(node)
        siblings = [item.strategy for item in node.children if item.state != "failed"]
        ancestors = [item.strategy for item in node.path()]
        weighted = [
            (
                item,
                item.prior
                * SIBLING_DISCOUNT ** siblings.count(item.strategy)
                * ANCESTOR_DISCOUNT ** ancestors.count(item.strategy)
                * OUTCOME_DISCOUNT ** self._losses.get(item.strategy, 0),
            )
            for item in self._ranked[node.index]
            if not self.tree.holds(item.kernel_id) and (item.repeatable or item.strategy != node.strategy)
        ]
        return sorted(weighted, key=lambda pair: (-pair[1], pair[0].edit, pair[0].kernel_id))

    def _propose(self, node: Node) -> tuple[Ranked, ...]:
        profile = None if node.evaluation is None else node.evaluation.profile
        context = EditContext(
            kernel=node.kernel, problem=self.spec.problem, profile=profile,
            dtype=self.spec.dtype or problem_dtype(self.spec.problem),
        )  # fmt: skip
        # A strategy replaces the whole kernel: below the input it would only throw the steps before it away.
        edits = [edit for edit in self._edits if node.index == 0 or edit.name != CATALOGUE_EDIT]
        return propose(context, edits, seed=f"{self.spec.seed}:{node.kernel_id}")

    def _add(self, parent: Node, ranked: Ranked) -> Node:
        ranked = self._judged(parent, ranked)
        self._log(
            {
                "event": "proposal",
                "node": len(self.tree.nodes),
                "parent": parent.index,
                "edit": ranked.edit,
                "target": ranked.target,
                "rationale": ranked.rationale,
                "expected": encode(ranked.expected),
                "prior": ranked.prior,
                "judge_score": ranked.judge_score,
                "kernel": encode(ranked.kernel),
            }
        )
        return self.tree.add(
            parent,
            ranked.kernel,
            edit=ranked.edit,
            target=ranked.target,
            rationale=ranked.rationale,
            expected=ranked.expected,
            prior=ranked.prior,
            judge_score=ranked.judge_score,
        )

    def _judged(self, parent: Node, ranked: Ranked) -> Ranked:
        """The proposal with the score of the judging model; as it is where rules judge."""
        if self._judge is None:
            return ranked
        profile = None if parent.evaluation is None else parent.evaluation.profile
        rules = judge_by_rules(self.spec.problem, parent.kernel, ranked.kernel, profile=profile)
        judgement = judge_by_model(self._judge, rules, parent.kernel, ranked.kernel, profile=profile)
        for warning in judgement.warnings:
            self._log({"event": "warning", "text": warning})
            self._warn(warning)
        return dataclasses.replace(ranked, judge_score=judgement.score)

    def _warn(self, text: str) -> None:
        if text not in self._warnings and len(self._warnings) < MOST_WARNINGS:
            self._warnings.append(text)

    def _shorter_path(self) -> tuple[Node, Ranked] | None:
        """The next kernel of the leader's path without the steps that changed nothing, if it is not in the tree.

        Asked once the search itself is over: what is left of the budget goes into an answer that is easier to read.
        """
        node = self.tree.root
        for step in self._leader().path()[1:]:
            if step.parent is None or step.time_us > step.parent.time_us * (1.0 - USELESS):
                continue
            made = [item for item in node.children if (item.edit, item.rationale) == (step.edit, step.rationale)]
            if made:
                node = made[0]
                if node.state != "open":
                    return None
                continue
            if node.state != "open" or node.depth >= MAX_DEPTH:
                return None
            offered = [pair[0] for pair in self._fresh(node)]
            same = [item for item in offered if (item.edit, item.rationale) == (step.edit, step.rationale)]
            return (node, same[0]) if same else None
        return None

    # --- stopping ----------------------------------------------------------------------------------------------------
    @property
    def evaluations(self) -> int:
        """Evaluations used, the input's included; finalist and confirmation runs are not counted."""
        return sum(node.evaluation is not None for node in self.tree.nodes)

    def best_time_us(self) -> float:
        """Time of the fastest kernel that nothing has spoken against."""
        return min((node.time_us for node in self.tree.nodes if _stands(node)), default=float("inf"))

    def best_node(self) -> Node:
        """The fastest kernel that nothing has spoken against; the input where none is faster."""
        return self._leader()

    def _stop_reason(self) -> str | None:
        spec, best = self.spec, self._leader()
        if self.evaluations >= spec.evaluations:
            return f"the budget of {spec.evaluations} evaluations is spent"
        if spec.seconds is not None and self.elapsed_s >= spec.seconds:
            return f"the budget of {spec.seconds:g} seconds is spent"
        profile = None if best.evaluation is None else best.evaluation.profile
        if profile is not None and profile.speed_of_light is not None:
            if profile.speed_of_light.pct >= SPEED_OF_LIGHT_PCT:
                return f"the best kernel reaches {profile.speed_of_light.pct:.0f} % of the speed of light"
            if best.reward is not None and best.reward.time > ENOUGH_TIME_REWARD:
                return f"the best kernel closed {100 * best.reward.time:.0f} % of the gap to the speed of light"
        patience = max(PATIENCE, spec.evaluations // 2)
        history = self._best_history
        if len(history) > patience and history[-1] > history[-1 - patience] * (1.0 - GAIN):
            return f"{patience} evaluations in a row gained less than {100 * GAIN:.0f} %"
        return None

    def _fastest(self, count: int) -> list[Node]:
        """The best kernels that beat the input and that nothing has spoken against, in the order of `_preferred`."""
        root = self.tree.root
        better = [
            node for node in self.tree.accepted() if node.index and _stands(node) and node.time_us < root.time_us
        ]  # fmt: skip
        chosen: list[Node] = []
        while better and len(chosen) < count:
            leader = _preferred(better)
            better.remove(leader)
            chosen.append(leader)
        return chosen

    def _leader(self) -> Node:
        """The best kernel; the input once so many kernels failed their confirmation that the device is in doubt."""
        refused = sum(node.confirmed is not None and not _stands(node) for node in self.tree.nodes)
        if refused >= MOST_REFUSED:
            return next((node for node in self._fastest(len(self.tree.nodes)) if node.confirmed), self.tree.root)
        return next(iter(self._fastest(1)), self.tree.root)

    def _end(self, status: RunStatus, reason: str) -> None:
        self._log({"event": "end", "status": status, "stopped_because": reason})
        self.status, self.stopped_because = status, reason

    # --- journal -----------------------------------------------------------------------------------------------------
    def _log(self, event: Mapping[str, Any]) -> None:
        if self._journal is not None:
            self._journal.append(event)

    def _replay(self, event: Mapping[str, Any]) -> None:
        kind = event.get("event")
        if kind == "spec":
            if event["spec"] != encode(self.spec):
                raise ToolFailed("the journal was written for another run; start a new one")
        elif kind == "proposal":
            expected = tuple(restore(ExpectedChange, item) for item in event["expected"])
            self.tree.add(
                self.tree.nodes[event["parent"]],
                restore(Kernel, event["kernel"]),
                edit=event["edit"],
                target=event["target"],
                rationale=event["rationale"],
                expected=expected,
                prior=event["prior"],
                judge_score=event["judge_score"],
            )
        elif kind == "evaluation":
            node = self.tree.nodes[event["node"]]
            self._record(node, event["depth"], restore(Evaluation, event["evaluation"]), event["elapsed_s"])
        elif kind == "duplicate":
            self._record_duplicate(self.tree.nodes[event["node"]])
        elif kind == "warning":
            self._warn(event["text"])
        elif kind == "end":
            self.status, self.stopped_because = event["status"], event["stopped_because"]
        else:
            raise ToolFailed(f"the journal holds an event of the unknown kind {kind!r}; a newer version wrote it")

    def result(self) -> SearchResult:
        """What the run found; before its end, the best so far."""
        found = summarise(
            self.tree, self._leader(), run_id=self.spec.run_id, status=self.status, seed=self.spec.seed,
            problem=self.spec.problem.name, stopped_because=self.stopped_because, evaluations=self.evaluations,
            seconds=self.elapsed_s, duplicates=self.duplicates,
        )  # fmt: skip
        return dataclasses.replace(found, warnings=(*found.warnings, *self._warnings))


def load_spec(journal: Journal) -> SearchSpec:
    """The spec that a journal begins with.

    Raises:
        ToolFailed: the journal has no spec.
    """
    first = next(iter(journal), None)
    if first is None or first.get("event") != "spec":
        raise ToolFailed("the journal does not begin with the spec of its run; start a new one")
    return restore(SearchSpec, first["spec"])


def optimise(
    search: Search,
    evaluate: Evaluate,
    *,
    fingerprint: Callable[[Kernel], str | None] | None = None,
    on_progress: Callable[[SearchProgress], None] | None = None,
    should_stop: Callable[[], bool] | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> SearchResult:
    """Run or resume a search to its end.

    Args:
        evaluate: builds, verifies and profiles one kernel.
        fingerprint: of the code that a kernel compiles to, where that is cheap; a kernel whose code the tree holds
            already is then closed as a duplicate without an evaluation.
        on_progress: called after each event.
        should_stop: asked before each task; true leaves the run as it is, to be resumed.
        clock: seconds, monotonic.

    Raises:
        NotAccepted: the input kernel was not accepted.
    """
    started = clock() - search.elapsed_s
    while (task := search.ask()) is not None:
        if should_stop is not None and should_stop():
            break
        if fingerprint is not None and task.purpose == "node":
            twin = search.tree.same_code(fingerprint(task.kernel))
            if twin is not None:
                search.tell_duplicate(task)
                continue
        evaluation = _evaluated(task, evaluate)
        search.tell(task, evaluation, elapsed_s=clock() - started)
        if on_progress is not None:
            on_progress(progress(search, _told(task, evaluation)))
    return search.result()


def _evaluated(task: Task, evaluate: Evaluate) -> Evaluation:
    """Evaluate a task; an edit that made something no launch plan can hold costs an evaluation, not the run."""
    try:
        return evaluate(task.kernel, depth=task.depth)
    except InvalidInput as error:
        if task.purpose != "node":
            raise
        LOG.warning("the edit %s made a kernel that is not well formed: %s", task.edit, error)
        verdict = Verdict(
            kernel_id=task.kernel_id, status="rejected", reason="bad_launch", detail=str(error), levels=(),
            summary=f"Rejected: {error}.", next_action="Leave this edit.",
        )  # fmt: skip
        return Evaluation(kernel_id=task.kernel_id, verdict=verdict, profile=None, fingerprint=None, seconds=0.0)


def progress(search: Search, last: str) -> SearchProgress:
    """Where a run stands."""
    best, root = search.best_node(), search.tree.root
    known = root.time_us != float("inf")
    return SearchProgress(
        run_id=search.spec.run_id, evaluations=search.evaluations, budget=search.spec.evaluations,
        best_speedup=root.time_us / best.time_us if known else 1.0, best_kernel_id=best.kernel_id, last=last,
        seconds=search.elapsed_s,
    )  # fmt: skip


def _told(task: Task, evaluation: Evaluation) -> str:
    name = {"input": "input kernel", "finalist": f"{task.edit}, full check", "confirm": f"{task.edit}, confirmation"}
    what = name.get(task.purpose, task.edit)
    if evaluation.verdict.status != "accepted":
        return f"{what}: {evaluation.verdict.reason or evaluation.verdict.status}"
    if evaluation.profile is None:
        return f"{what}: accepted"
    return f"{what}: {evaluation.profile.time.median_us:.4g} us ({evaluation.profile.time.source})"


def _may_be_asked_again(node: Node) -> bool:
    """Whether a confirmation said nothing of the kernel (a process that died), and was tried only once."""
    confirmed = node.confirmed
    return confirmed is not None and confirmed.verdict.status == "unverified" and node.confirmations < CONFIRMATIONS


def _preferred(nodes: Sequence[Node]) -> Node:
    """The fastest; of those that are less than 1 % slower the one with the shortest path, then the fastest of them.

    Source of the 1 %: design note on search, §3.5. Steps that bring less are not worth a reader's time.
    """
    least = min(node.time_us for node in nodes)
    alike = [node for node in nodes if node.time_us <= least * (1.0 + GAIN)]
    return min(alike, key=lambda node: (node.depth, node.time_us, node.index))


def _stands(node: Node) -> bool:
    """Accepted wherever it was checked, at L1 where a full check ran."""
    confirmed = None if _may_be_asked_again(node) else node.confirmed
    checks = [item for item in (node.full, confirmed) if item is not None]
    return node.state == "open" and all(
        item.verdict.status == "accepted" and "L1" in item.verdict.levels for item in checks
    )  # fmt: skip


def _edits_of(spec: SearchSpec) -> tuple[Edit, ...]:
    chosen = edits_named(spec.edits)
    return tuple(edit for edit in chosen if spec.catalogue or edit.name != CATALOGUE_EDIT)
