"""A search whose edits a language model writes.

The tree, the evaluations, the stopping rules and the final checks are those of `Search`. For a kernel that it wants
improved the search asks the model, which is shown the code, the profile and what was tried. What the model answered is
logged before it is used, so a run that is resumed asks nothing twice. A call that fails leaves its kernel without
proposals; after a few in a row the search ends with the best it has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from optiml.codec import encode, kernel_id, restore
from optiml.errors import InvalidInput, ModelFailed
from optiml.generate.reply import kernel_in
from optiml.generate.template import kernel_template
from optiml.kernel_file import write_kernel_text
from optiml.llm.model import Message, Model
from optiml.llm.prompting import prompt, quoted
from optiml.records import Kernel
from optiml.search.journal import Journal
from optiml.search.judge import judge_by_rules, without_words
from optiml.search.judge_model import brief
from optiml.search.optimise import Search, SearchSpec
from optiml.search.propose import Ranked
from optiml.search.puct import children_allowed
from optiml.search.tree import Node

SAMPLES = 2  # proposals of one call
TEMPERATURE = 0.8
ROUNDS = 3  # calls for one kernel, where it may widen
FAILURES = 3  # calls without a usable text, in a row, after which the model is not asked again
TRIED_SHOWN = 6


class ModelSearch(Search):
    """See the module. Without a model it can be looked at, not carried out."""

    def __init__(
        self, spec: SearchSpec, journal: Journal | None = None, *, model: Model | None = None,
        judge: Model | None = None,
    ) -> None:  # fmt: skip
        self._model = model
        self._rounds: dict[int, int] = {}  # node -> calls made for it
        self._failures = 0  # in a row
        super().__init__(spec, journal, judge=judge)

    def _propose(self, node: Node) -> tuple[Ranked, ...]:
        return ()  # what the model offers is kept in `_ranked` as it comes

    def _shorter_path(self) -> None:
        return None  # the model's steps cannot be made again on another kernel

    def _fresh(self, node: Node) -> list[tuple[Ranked, float]]:
        """Untried proposals of a node; the model is asked for more where there are none and the node may widen."""
        found = super()._fresh(node)
        live = [item for item in node.children if item.state in ("open", "pending")]
        wide = len(live) >= children_allowed(node.visits, is_root=node.index == 0)
        while (
            not found
            and not wide
            and self._failures < FAILURES
            and self._rounds.get(node.index, 0) < ROUNDS
            and self._ask_model(node)
        ):
            found = super()._fresh(node)
        return found

    def _ask_model(self, node: Node) -> bool:
        """Ask for proposals and log what came; false where the call failed."""
        if self._model is None:
            raise ModelFailed(f"the search needs the {self.spec.proposer} model, which is not set up here")
        ranked: list[Ranked] = []
        failure: str | None = None
        try:
            for completion in self._model.complete(
                self._question(node), samples=SAMPLES, temperature=TEMPERATURE,
                seed=self.spec.seed + len(self.tree.nodes),
            ):  # fmt: skip
                try:
                    ranked.append(self._rated(node, kernel_in(completion, self.spec.problem)))
                except InvalidInput as error:
                    failure = f"its text cannot be used: {error}"[:300]
        except ModelFailed as error:
            failure = f"{error.code}: {error}"
        event = {
            "event": "offered",
            "node": node.index,
            "offered": [encode(item) for item in ranked],
            "failure": None if ranked else failure,
        }
        self._log(event)
        self._take_offer(event, ranked)
        return bool(ranked)

    def _take_offer(self, event: Mapping[str, Any], ranked: Sequence[Ranked]) -> None:
        index, failure = event["node"], event["failure"]
        self._rounds[index] = self._rounds.get(index, 0) + 1
        self._ranked[index] = (*self._ranked.get(index, ()), *ranked)
        self._failures = 0 if failure is None else self._failures + 1
        if failure is not None:
            self._warn(f"the model offered nothing for kernel {self.tree.nodes[index].kernel_id}: {failure}")

    def _rated(self, node: Node, kernel: Kernel) -> Ranked:
        profile = None if node.evaluation is None else node.evaluation.profile
        rules = judge_by_rules(self.spec.problem, node.kernel, kernel, profile=profile)
        promised = ", ".join(f"{item.metric} {item.direction}" for item in rules.expected[:2])
        return Ranked(
            kernel=kernel,
            kernel_id=kernel_id(kernel),
            edit=self.spec.proposer,
            target="",
            rationale="the model rewrote it" + (f"; its code promises {promised}" if promised else ""),
            expected=rules.expected,
            judge_score=rules.score,
            prior=1.0 / SAMPLES,
        )

    def _question(self, node: Node) -> tuple[Message, ...]:
        problem = quoted(kernel_template(self.spec.problem), label="the problem as a file to fill in")
        code = quoted(write_kernel_text(without_words(node.kernel)), label="the kernel")
        tried = [
            f"- {item.kernel_id}: " + (
                "failed" if item.state == "failed" else "the same program" if item.state == "duplicate"
                else f"{node.time_us / item.time_us:.2f} times as fast" if item.state == "open" else "not measured yet"
            )
            for item in node.children[-TRIED_SHOWN:]
        ]  # fmt: skip
        device = self._device_of(node)
        return (
            Message(role="system", text=prompt("kernel_system")),
            Message(
                role="user",
                text=prompt(
                    "edit_task",
                    device=device,
                    kernel=problem + "\n" + code,
                    profile=brief(None if node.evaluation is None else node.evaluation.profile),
                    tried="\n".join(["Tried before, do something else:", *tried]) + "\n" if tried else "",
                ),
            ),
        )

    @staticmethod
    def _device_of(node: Node) -> str:
        device = None if node.evaluation is None else node.evaluation.verdict.device
        return "the GPU" if device is None else device.name

    def _stop_reason(self) -> str | None:
        if self._failures >= FAILURES:
            return f"the model failed {FAILURES} times in a row"
        return super()._stop_reason()

    def _replay(self, event: Mapping[str, Any]) -> None:
        if event.get("event") == "offered":
            self._take_offer(event, [restore(Ranked, item) for item in event["offered"]])
        else:
            super()._replay(event)
