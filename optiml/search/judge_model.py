"""A language model as judge: it may move the score of an edit that the rules find sound. It never accepts a kernel.

What it is shown are measured facts and code without comments; what it says is one JSON object, and anything else counts
as nothing said.
"""

from __future__ import annotations

import dataclasses
import math

from optiml.errors import InvalidInput, ModelFailed
from optiml.generate.reply import object_in
from optiml.kernel_file import write_kernel_text
from optiml.llm.model import Message, Model
from optiml.llm.prompting import prompt, quoted
from optiml.records import Judgement, Kernel, Profile
from optiml.search.judge import REJECT_BELOW, TRY_ABOVE, Call, without_words

JUDGE_TOKENS = 600
DISAGREEMENT = (
    0.5  # between the scores of model and rules: beyond it one of them is wrong, and the rules can be checked
)
SENTENCE = 200


def judge_by_model(
    model: Model, rules: Judgement, before: Kernel, after: Kernel, *, profile: Profile | None
) -> Judgement:
    """The judgement of `rules` with the model's score, where that can be used; else as it is, with a warning.

    What the rules reject stays rejected: a model may lower a verdict and never raise one.
    """
    if rules.verdict == "reject":
        return rules
    try:
        said = object_in(model.complete(_question(before, after, profile), max_tokens=JUDGE_TOKENS)[0])
        score, addresses, risks = _read(said)
    except (ModelFailed, InvalidInput) as error:
        return _with_warning(rules, f"the judge {model.name} gave no judgement, the rules stand: {error}")
    if abs(score - rules.score) > DISAGREEMENT:
        return _with_warning(
            rules,
            f"the judge {model.name} says {score:.2f} where the rules say {rules.score:.2f}: too far apart, the rules "
            "stand",
        )
    verdict: Call = rules.verdict
    if score < REJECT_BELOW:
        verdict = "reject"
    elif score < TRY_ABOVE and verdict == "try":
        verdict = "measure_again"
    return dataclasses.replace(
        rules,
        score=score,
        verdict=verdict,
        addresses_diagnosis=rules.addresses_diagnosis if addresses is None else addresses,
        risks=(*rules.risks, *risks),
        judge=model.name,
    )


def brief(profile: Profile | None) -> str:
    """What limits a kernel, in a few lines for a prompt."""
    if profile is None:
        return "not measured"
    lines = [
        f"{profile.time.median_us:.4g} us ({profile.time.source}), {profile.bottleneck.kind}-bound",
        *profile.bottleneck.evidence,
        *(f"line {item.line} causes {item.share_pct:.0f} % of the traffic" for item in profile.hot_lines[:2]),
    ]
    return quoted("\n".join(lines), label="measured")


def _question(before: Kernel, after: Kernel, profile: Profile | None) -> tuple[Message, ...]:
    shown = {
        name: quoted(write_kernel_text(without_words(kernel)), label=f"the kernel {name}")
        for name, kernel in (("before", before), ("after", after))
    }
    return (
        Message(role="system", text=prompt("judge_system")),
        Message(role="user", text=prompt("judge_task", profile=brief(profile), **shown)),
    )


def _read(said: dict[str, object]) -> tuple[float, bool | None, tuple[str, ...]]:
    score, addresses, risks = said.get("score"), said.get("addresses"), said.get("risks", [])
    if isinstance(score, bool) or not isinstance(score, int | float) or not 0 <= score <= 1 or not math.isfinite(score):
        raise InvalidInput("its score is no number from 0 to 1")
    if not isinstance(addresses, bool | None) or not isinstance(risks, list):
        raise InvalidInput("its fields do not have the types asked for")
    texts = [" ".join(item.split())[:SENTENCE] for item in risks[:4] if isinstance(item, str) and item.strip()]
    return round(float(score), 4), addresses, tuple(texts)


def _with_warning(rules: Judgement, warning: str) -> Judgement:
    return dataclasses.replace(rules, warnings=(*rules.warnings, warning[:600]))
