"""The search tree. `Node` is the one mutable record of the library, and only this module writes it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from optiml.codec import kernel_id
from optiml.records import Evaluation, ExpectedChange, Kernel, Reward
from optiml.search.puct import FAILED_WEIGHT, mixed_value, normalised

MAX_DEPTH = 6  # edits between the input kernel and a node
State = Literal["pending", "open", "failed", "duplicate"]


@dataclass(kw_only=True, eq=False)
class Node:
    """A kernel in the tree and what was learnt at and below it.

    Attributes:
        index: position in the tree; 0 is the input kernel.
        visits: finished evaluations at and below this node.
        total, weight: sums of weighted rewards and of weights at and below it.
        best: largest reward of an accepted kernel at or below it.
        full, confirmed: evaluations at those depths; they never change the tree's values.
    """

    index: int
    parent: Node | None
    kernel: Kernel
    kernel_id: str
    edit: str
    target: str
    rationale: str
    expected: tuple[ExpectedChange, ...]
    prior: float
    judge_score: float
    depth: int
    state: State = "pending"
    evaluation: Evaluation | None = None
    reward: Reward | None = None
    visits: int = 0
    total: float = 0.0
    weight: float = 0.0
    best: float = float("-inf")
    children: list[Node] = field(default_factory=list)
    full: Evaluation | None = None
    confirmed: Evaluation | None = None
    confirmations: int = 0

    @property
    def strategy(self) -> tuple[str, str]:
        """Edit and target: what the step did, whatever the variant."""
        return self.edit, self.target

    @property
    def value(self) -> float:
        """Mean and best of the rewards at and below, mixed; -1 where nothing but failures is known."""
        if self.weight == 0.0 or self.best == float("-inf"):
            return -1.0 if self.weight == 0.0 else self.total / self.weight
        return mixed_value(self.total / self.weight, self.best)

    @property
    def time_us(self) -> float:
        """Time of an accepted and profiled kernel, infinite for any other."""
        if self.state not in ("open", "duplicate") or self.evaluation is None or self.evaluation.profile is None:
            return float("inf")
        return self.evaluation.profile.time.median_us

    def path(self) -> list[Node]:
        """From the root to this node, both included."""
        nodes: list[Node] = []
        node: Node | None = self
        while node is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]


class Tree:
    """Nodes in the order in which they were added."""

    def __init__(self, root: Kernel) -> None:
        self.nodes: list[Node] = []
        self._ids: dict[str, Node] = {}
        self._fingerprints: dict[str, Node] = {}
        self._add(
            root, parent=None, edit="", target="", rationale="the input kernel", expected=(), prior=1.0, judge_score=0.5
        )

    @property
    def root(self) -> Node:
        return self.nodes[0]

    def add(
        self,
        parent: Node,
        kernel: Kernel,
        *,
        edit: str,
        target: str,
        rationale: str,
        expected: tuple[ExpectedChange, ...],
        prior: float,
        judge_score: float,
    ) -> Node:
        """A pending child of `parent`.

        Raises:
            ValueError: the tree holds this kernel already.
        """
        return self._add(
            kernel,
            parent=parent,
            edit=edit,
            target=target,
            rationale=rationale,
            expected=expected,
            prior=prior,
            judge_score=judge_score,
        )

    def _add(
        self,
        kernel: Kernel,
        *,
        parent: Node | None,
        edit: str,
        target: str,
        rationale: str,
        expected: tuple[ExpectedChange, ...],
        prior: float,
        judge_score: float,
    ) -> Node:
        identity = kernel_id(kernel)
        if identity in self._ids:
            raise ValueError(f"kernel {identity} is in the tree already")
        node = Node(
            index=len(self.nodes),
            parent=parent,
            kernel=kernel,
            kernel_id=identity,
            edit=edit,
            target=target,
            rationale=rationale,
            expected=expected,
            prior=prior,
            judge_score=judge_score,
            depth=0 if parent is None else parent.depth + 1,
        )
        self.nodes.append(node)
        self._ids[identity] = node
        if parent is not None:
            parent.children.append(node)
        return node

    def holds(self, identity: str) -> bool:
        """Whether a kernel of this id is in the tree."""
        return identity in self._ids

    def same_code(self, fingerprint: str | None) -> Node | None:
        """The node whose compiled code has this fingerprint."""
        return None if fingerprint is None else self._fingerprints.get(fingerprint)

    def record(self, node: Node, evaluation: Evaluation, reward: Reward) -> None:
        """Store the first evaluation of a node and back its reward up to the root.

        A kernel that compiles to the code of another node counts as a visit and opens no branch of its own. A failed
        one counts fully in the visits and with a quarter of the weight in the means.
        """
        accepted = evaluation.verdict.status == "accepted" and evaluation.profile is not None
        twin = self.same_code(evaluation.fingerprint)
        node.evaluation, node.reward = evaluation, reward
        node.state = "failed" if not accepted else "open" if twin is None else "duplicate"
        if accepted and twin is None and evaluation.fingerprint is not None:
            self._fingerprints[evaluation.fingerprint] = node
        self._back_up(node, reward.total, weight=1.0 if accepted else FAILED_WEIGHT, accepted=accepted)

    def record_duplicate(self, node: Node) -> None:
        """Close a pending node that was found, before it ran, to compile to the code of another one."""
        node.state = "duplicate"

    def record_full(self, node: Node, evaluation: Evaluation) -> None:
        node.full = evaluation

    def record_confirmed(self, node: Node, evaluation: Evaluation) -> None:
        node.confirmed = evaluation
        node.confirmations += 1

    def pending(self) -> Node | None:
        """The first node without an evaluation."""
        return next((node for node in self.nodes if node.state == "pending"), None)

    def value_range(self) -> tuple[float, float]:
        """Smallest and largest value of the open nodes: the scale on which values are compared."""
        values = [node.value for node in self.nodes if node.state == "open"]
        return (min(values), max(values)) if values else (0.0, 0.0)

    def scaled(self, reward: float) -> float:
        """A reward on the scale of the tree's values."""
        low, high = self.value_range()
        return normalised(reward, low, high)

    def accepted(self) -> Iterator[Node]:
        """Open nodes, in the order they were added."""
        return (node for node in self.nodes if node.state == "open")

    @staticmethod
    def _back_up(node: Node, total: float, *, weight: float, accepted: bool) -> None:
        current: Node | None = node
        while current is not None:
            current.visits += 1
            current.total += weight * total
            current.weight += weight
            if accepted:
                current.best = max(current.best, total)
            current = current.parent
