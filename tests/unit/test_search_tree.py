"""The tree: what evaluations do to values, and which kernels share a node."""

from __future__ import annotations

import dataclasses

import pytest
from search_fakes import FakeEvaluator, row_sum_kernel

from optiml.codec import kernel_id
from optiml.records import Evaluation, Kernel, Reward
from optiml.search.tree import Node, Tree


def reward(total: float) -> Reward:
    return Reward(time=total, proxies=0.0, guardrails=0.0, judge=0.0, total=total)


def variant(number: int) -> Kernel:
    return row_sum_kernel(row_sum_kernel().source + f"// {number}\n")


def child(tree: Tree, parent: Node, number: int) -> Node:
    return tree.add(
        parent, variant(number), edit="unroll", target="", rationale="r", expected=(), prior=0.5, judge_score=0.5
    )  # fmt: skip


def evaluated(node: Node, *, broken: bool = False) -> Evaluation:
    return FakeEvaluator(broken={"row_sum": ("reduced",)} if broken else None)(node.kernel, depth="reduced")


def test_a_reward_counts_at_every_ancestor() -> None:
    tree = Tree(variant(0))
    tree.record(tree.root, evaluated(tree.root), reward(0.0))
    first = child(tree, tree.root, 1)
    tree.record(first, evaluated(first), reward(0.4))
    second = child(tree, first, 2)
    tree.record(second, evaluated(second), reward(0.8))
    assert (tree.root.visits, first.visits, second.visits) == (3, 2, 1)
    assert tree.root.best == first.best == 0.8
    assert tree.root.value == pytest.approx(0.3 * (0.0 + 0.4 + 0.8) / 3 + 0.7 * 0.8)


def test_a_failed_kernel_is_a_full_visit_with_a_quarter_of_the_weight() -> None:
    tree = Tree(variant(0))
    tree.record(tree.root, evaluated(tree.root), reward(0.4))
    bad = child(tree, tree.root, 1)
    tree.record(bad, evaluated(bad, broken=True), reward(-0.8))
    assert bad.state == "failed"
    assert tree.root.visits == 2
    assert tree.root.best == 0.4
    assert tree.root.total / tree.root.weight == pytest.approx((0.4 - 0.25 * 0.8) / 1.25)


def test_a_kernel_is_in_the_tree_once() -> None:
    tree = Tree(variant(0))
    child(tree, tree.root, 1)
    assert tree.holds(kernel_id(variant(1)))
    with pytest.raises(ValueError, match="already"):
        child(tree, tree.root, 1)


def test_equal_code_opens_no_second_branch() -> None:
    tree = Tree(variant(0))
    first = evaluated(tree.root)
    tree.record(tree.root, first, reward(0.0))
    twin = child(tree, tree.root, 1)
    tree.record(twin, dataclasses.replace(evaluated(twin), fingerprint=first.fingerprint), reward(0.0))
    assert twin.state == "duplicate"
    assert list(tree.accepted()) == [tree.root]


def test_a_node_that_waits_for_its_evaluation_is_pending() -> None:
    tree = Tree(variant(0))
    assert tree.pending() is tree.root
    tree.record(tree.root, evaluated(tree.root), reward(0.0))
    assert tree.pending() is None


def test_the_path_runs_from_the_input_to_the_node() -> None:
    tree = Tree(variant(0))
    first = child(tree, tree.root, 1)
    second = child(tree, first, 2)
    assert second.path() == [tree.root, first, second]
    assert second.depth == 2
