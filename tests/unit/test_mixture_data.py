"""Pairs for the mixture's training, its settings, and what is said of its needs: none of this imports torch."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from optiml.codec import kernel_id
from optiml.errors import InvalidInput
from optiml.kernel_file import read_kernel_text
from optiml.llm.model import Message
from optiml.mixture.conversation import answer_of, prompt_of
from optiml.mixture.dataset import build_records, read_records
from optiml.mixture.needs import needs_of
from optiml.mixture.run import build_pairs
from optiml.records import Kernel, Problem, Verdict
from optiml.settings import MixtureSettings, read_settings


def judged(kernel: Kernel, *, accepted: bool) -> Verdict:
    return Verdict(
        summary="",
        next_action="",
        kernel_id=kernel_id(kernel),
        status="accepted" if accepted else "rejected",
        reason=None if accepted else "wrong_values",
        detail="",
        levels=("L0",),
        build=None,
        cases=(),
        domain="",
        oracle="reference",
        first_mismatch=None,
        fault=None,
        sanitizer=None,
        device=None,
        cached=False,
        seconds=0.0,
    )


def accept_all(kernel: Kernel, problem: Problem) -> Verdict:
    return judged(kernel, accepted=True)


def accept_blocks_of_256(kernel: Kernel, problem: Problem) -> Verdict:
    return judged(kernel, accepted=kernel.params.get("BLOCK") == 256)


def test_only_accepted_kernels_become_pairs_and_the_others_are_named() -> None:
    refused: list[str] = []
    records = list(
        build_records(
            accept_blocks_of_256,
            problems=["relu"],
            dtypes=["float32"],
            variants=3,
            on_refused=lambda kernel, verdict: refused.append(f"{kernel} {verdict.reason}"),
        )
    )
    assert records
    assert refused
    assert all(read_kernel_text(record.kernel).params["BLOCK"] == 256 for record in records)
    assert all(line.startswith("relu float32 ") and line.endswith(" wrong_values") for line in refused)


def test_a_kernel_comes_with_several_wordings_that_name_operator_and_type() -> None:
    records = list(build_records(accept_all, problems=["softmax"], dtypes=["float16"], variants=1, intents=4))
    by_kernel = {record.kernel_id: [] for record in records}
    for record in records:
        by_kernel[record.kernel_id].append(record.intent)
    assert all(len(set(intents)) >= 3 for intents in by_kernel.values())
    assert all("half" in record.intent or "16" in record.intent for record in records)
    assert {record.family for record in records} == {"softmax"}
    again = build_records(accept_all, problems=["softmax"], dtypes=["float16"], variants=1, intents=4)
    assert [record.intent for record in again] == [record.intent for record in records]


def test_pairs_are_written_when_all_are_there_and_read_back(tmp_path: Path) -> None:
    path = tmp_path / "pairs.jsonl"
    built = build_pairs(path, accept_all, problems=["relu"], dtypes=["float32"], variants=1, intents=2)
    records = read_records(path)
    assert len(records) == built.pairs
    assert [item.name for item in tmp_path.iterdir()] == ["pairs.jsonl"]
    assert "relu" in records[0].prompt
    assert records[0].answer.startswith("```cuda\n/* optiml\n")
    with pytest.raises(InvalidInput, match="exists"):
        build_pairs(path, accept_all, problems=["relu"])
    with pytest.raises(InvalidInput, match="no kernel was accepted"):
        build_pairs(tmp_path / "none.jsonl", lambda kernel, _: judged(kernel, accepted=False), problems=["relu"])
    assert [item.name for item in tmp_path.iterdir()] == ["pairs.jsonl"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2 is not JSON"),
        ("[]", "line 2 is not a JSON object"),
        ('{"intent": "relu"}', "line 2 has no kernel"),
        ('{"intent": " ", "kernel": "x"}', "line 2 has no intent"),
        ('{"intent": "relu", "kernel": "x", "kernal": "y"}', "unknown field 'kernal'"),
        ('{"intent": "relu", "kernel": "x", "schema": 9}', "another schema"),
        ('{"intent": "relu", "kernel": "x", "dtype": 3}', "every field is text"),
        ('{"intent": "relu", "kernel": "x", "problem": "reluu"}', "no built-in problem"),
    ],
)
def test_a_line_that_is_no_pair_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "pairs.jsonl"
    path.write_text('{"intent": "relu", "kernel": "x"}\n' + line + "\n")
    with pytest.raises(InvalidInput, match=message):
        read_records(path)


def test_a_bare_pair_is_asked_for_with_its_intent_alone(tmp_path: Path) -> None:
    path = tmp_path / "pairs.jsonl"
    path.write_text(json.dumps({"intent": "scale it", "kernel": "code"}) + "\n")
    (record,) = read_records(path)
    assert record.prompt == "### Task\nscale it\n\n### Answer\n"
    assert record.answer == answer_of("code") == "```cuda\ncode\n```\n"


def test_instructions_are_read_by_experts_that_were_not_trained_on_tasks() -> None:
    asked = (Message(role="system", text="Be brief."), Message(role="user", text="relu"))
    assert "Be brief." in prompt_of(asked, instructed=True)
    assert "Be brief." not in prompt_of(asked, instructed=False)
    assert prompt_of(asked, instructed=True).endswith("### Answer\n")


def test_the_settings_of_a_mixture_are_read_and_checked(tmp_path: Path) -> None:
    (tmp_path / "optiml.toml").write_text('[mixture]\nexperts = ["a", "b"]\nrefresh = 4\ndevices = ["cpu"]\n')
    settings = read_settings(environment={"OPTIML_HOME": str(tmp_path)})
    assert settings.mixture == MixtureSettings(experts=("a", "b"), refresh=4, devices=("cpu",))
    assert read_settings(environment={}, home=str(tmp_path / "other")).mixture is None
    for text, message in (
        ("expert = 1", "nearest is 'experts'"),
        ("refresh = 0", "whole number from 1"),
        ("top_p = 0", "between 0 and 1"),
        ('experts = "a"', "list of texts"),
        ('experts = ["a"]', "active is 2 and there are 1"),
    ):
        (tmp_path / "optiml.toml").write_text(f"[mixture]\n{text}\n")
        with pytest.raises(InvalidInput, match=message):
            read_settings(environment={"OPTIML_HOME": str(tmp_path)})


def test_the_needs_of_the_default_experts_are_known_without_them() -> None:
    pytest.importorskip("transformers", reason="transformers is not installed (extra `mixture`)")
    names = tuple(f"./nowhere/{name}" for name in ("one", "two"))
    needs = needs_of(dataclasses.replace(MixtureSettings(), experts=names), gpu=True)
    assert (needs.present, len(needs.missing), needs.dtype) == ((), 2, "bfloat16")
    assert needs.memory_free_bytes > 0
