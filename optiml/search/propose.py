"""The built-in proposer: every edit that applies, ranked by how well it answers the profile's diagnosis."""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from optiml.codec import encode, kernel_id
from optiml.diffs import make_diff
from optiml.records import ExpectedChange, Kernel, Problem, Suggestion
from optiml.search.edit import Edit, EditContext, Proposal
from optiml.search.judge import score_expected
from optiml.search.puct import priors
from optiml.search.source import OverlappingChanges

LOG = logging.getLogger(__name__)

JITTER = 0.02  # of seeded noise on the judge's score: equal proposals are tried in an order that the seed decides


@dataclass(frozen=True, kw_only=True)
class Ranked:
    """A proposal with its place in the search."""

    kernel: Kernel
    kernel_id: str
    edit: str
    target: str
    rationale: str
    expected: tuple[ExpectedChange, ...]
    judge_score: float
    prior: float
    repeatable: bool = True

    @property
    def strategy(self) -> tuple[str, str]:
        """Edit and target: what is done, whatever the variant."""
        return self.edit, self.target


def problem_dtype(problem: Problem) -> str:
    """The dtype that the problem is about: of its first floating array, else of its first array."""
    arrays = [item for item in (*problem.inputs.values(), *problem.outputs.values()) if item.shape is not None]
    floating = [item.dtype for item in arrays if "float" in item.dtype]
    return floating[0] if floating else arrays[0].dtype if arrays else "float32"


def propose(context: EditContext, edits: Sequence[Edit], *, seed: str) -> tuple[Ranked, ...]:
    """Every distinct rewrite that `edits` offer for a kernel, most promising first.

    Args:
        seed: text that decides the order among equals; the same text gives the same order.
    """
    own = kernel_id(context.kernel)
    found: dict[str, tuple[Edit, Proposal, float]] = {}
    noise = random.Random(seed)
    for edit in edits:
        for proposal in _proposals(edit, context):
            identity = kernel_id(proposal.kernel)
            if identity == own or identity in found:
                continue
            score = score_expected(proposal.expected, context.profile, risks=proposal.risks)
            score = min(1.0, max(0.0, score + JITTER * (noise.random() - 0.5)))
            found[identity] = (edit, proposal, score)
    weights = priors(np.array([score for _, _, score in found.values()], dtype=np.float64))
    ranked = [
        Ranked(
            kernel=proposal.kernel,
            kernel_id=identity,
            edit=edit.name,
            target=proposal.target,
            rationale=proposal.rationale,
            expected=proposal.expected,
            judge_score=score,
            prior=float(weight),
            repeatable=edit.repeatable,
        )
        for (identity, (edit, proposal, score)), weight in zip(found.items(), weights, strict=True)
    ]
    return tuple(sorted(ranked, key=lambda item: (-item.prior, item.edit, item.kernel_id)))


def _proposals(edit: Edit, context: EditContext) -> tuple[Proposal, ...]:
    try:
        return tuple(edit.propose(context))
    except (OverlappingChanges, RecursionError) as error:  # source nested deeper than the analyses can follow
        LOG.warning("the edit %s is left out for this kernel: %s", edit.name, error)
        return ()


def suggest(context: EditContext, edits: Sequence[Edit], *, limit: int = 3) -> tuple[Suggestion, ...]:
    """The most promising edits of a kernel, one variant each, as patches to its source.

    A change of the launch plan cannot stand in a source diff: it is said in `why`, and an edit that changes nothing
    else has no patch.
    """
    found: list[Suggestion] = []
    for ranked in propose(context, edits, seed=""):
        if len(found) == limit:
            break
        if any(item.edit == ranked.edit for item in found):
            continue
        plan = plan_changes(context.kernel, ranked.kernel)
        why = ranked.rationale + (f" (launch plan: {'; '.join(plan)})" if plan else "")
        patch = make_diff(context.kernel.source, ranked.kernel.source) or None
        found.append(Suggestion(edit=ranked.edit, why=why, patch=patch))
    return tuple(found)


def plan_changes(before: Kernel, after: Kernel) -> list[str]:
    """What differs between two kernels outside their source, in words."""
    changes = []
    for old, new in zip(before.launches, after.launches, strict=False):
        for name in ("kernel", "grid", "block", "shared_bytes", "args"):
            was, now = getattr(old, name), getattr(new, name)
            if was != now:
                changes.append(f"{name} {encode(was)} -> {encode(now)}")
    if len(before.launches) != len(after.launches):
        changes.append(f"{len(before.launches)} launches -> {len(after.launches)}")
    for name in ("params", "flags", "workspace"):
        was, now = encode(getattr(before, name)), encode(getattr(after, name))
        if was != now:
            changes.append(f"{name} {was} -> {now}")
    return changes
