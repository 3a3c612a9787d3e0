"""Replies over MCP stay under 8 KB and say what they left out."""

import dataclasses
import json
from typing import Any

from fakes import RELU, FakeWorkbench
from hypothesis import given, settings
from hypothesis import strategies as st

from optiml.measure.metrics import METRICS
from optiml_mcp.replies import KEY_METRICS, MAX_REPLY_BYTES, brief_profile, fit, fit_text, size_of

URI = "optiml://runs/r-1"


def reply(**more: Any) -> dict[str, Any]:
    return {"summary": "Accepted.", "next_action": "Profile it.", "warnings": [], **more}


def test_a_reply_that_fits_is_left_alone() -> None:
    whole = reply(cases=[{"ok": True}] * 10, kernel={"source": "x"})
    assert fit(whole, uri=URI) == whole


def test_a_source_that_does_not_fit_becomes_null_with_the_uri_of_its_kernel() -> None:
    kernel = {"kernel_id": "0123456789abcdef", "kernel": {"source": "x" * 9000, "params": {"B": 1}}}
    cut = fit(reply(best=kernel), uri=URI)
    assert cut["best"]["kernel"] == {"source": None, "params": {"B": 1}}
    assert cut["cut"] == [{"path": "best.kernel.source", "total": 9000, "uri": "optiml://kernels/0123456789abcdef"}]


def test_the_arguments_of_a_kernel_are_never_cut_the_kernel_goes_whole() -> None:
    launches = [{"kernel": "k", "args": [f"x{n}" for n in range(200)], "grid": ["n"]} for _ in range(8)]
    entry = {"kernel_id": "0123456789abcdef", "kernel": {"source": "x" * 100, "launches": launches}}
    cut = fit(reply(requests=[entry] * 2, suggestions=[{"edit": "e", "patch": "+x\n" * 1000}] * 2), uri=URI)
    for item in cut["requests"]:
        kernel = item["kernel"]
        assert kernel is None or [len(launch["args"]) for launch in kernel["launches"]] == [200] * 8
    for item in cut["suggestions"] or ():
        assert item["patch"] in (None, "+x\n" * 1000)
    kernel_cuts = [note for note in cut["cut"] if note["path"].endswith(".kernel")]
    assert kernel_cuts
    assert kernel_cuts[0]["uri"] == "optiml://kernels/0123456789abcdef"


def test_the_best_kernel_keeps_its_source_when_only_the_others_must_go() -> None:
    kernels = [{"kernel_id": f"{n:016x}", "kernel": {"source": "x" * 2500}} for n in range(4)]
    cut = fit(reply(candidates=kernels), uri=URI)
    sources = [item["kernel"]["source"] for item in cut["candidates"]]
    assert sources[0] == "x" * 2500
    assert sources[-1] is None


def test_lists_inside_nested_records_go_before_the_source_of_the_best_kernel() -> None:
    cases = [{"axes": {"n": n}, "ok": True, "max_abs_error": 0.0} for n in range(200)]
    best = {"kernel_id": "0123456789abcdef", "kernel": {"source": "x" * 3000}, "verdict": {"cases": cases}}
    cut = fit(reply(best=best), uri=URI)
    assert cut["best"]["kernel"]["source"] == "x" * 3000
    assert 1 <= len(cut["best"]["verdict"]["cases"]) < 200


def test_a_list_keeps_its_first_entries_and_tells_the_full_count() -> None:
    cut = fit(reply(cases=[{"axes": {"n": n}} for n in range(2000)]), uri=URI)
    assert cut["cases"] == [{"axes": {"n": n}} for n in range(len(cut["cases"]))]
    assert len(cut["cases"]) > 50
    assert cut["cut"] == [{"path": "cases", "total": 2000, "uri": URI}]


def test_a_long_log_is_shortened_and_the_rest_stays() -> None:
    cut = fit(reply(build={"log": "warning " * 4000, "arch": "sm_80"}, kernel_id="0123456789abcdef"), uri=None)
    assert cut["build"]["arch"] == "sm_80"
    assert cut["build"]["log"].endswith("…")
    assert cut["cut"][0]["path"] == "build.log"


def test_small_lists_inside_nested_records_stay_whole() -> None:
    best = {"verdict": {"levels": ["L0", "L1"], "cases": [{"axes": {"n": n}} for n in range(2000)]}}
    cut = fit(reply(best=best), uri=URI)
    assert cut["best"]["verdict"]["levels"] == ["L0", "L1"]


def test_a_profile_shows_the_key_metrics_and_where_the_others_are() -> None:
    bench = FakeWorkbench()
    problem = bench.problem("relu")
    metrics = {name: 1.0 for name in KEY_METRICS} | {f"other{n}": 2.0 for n in range(40)}
    profile = dataclasses.replace(
        bench.profile_of(bench.kernel(RELU, problem), problem),
        metrics=metrics,
        metric_source=dict.fromkeys(metrics, "counted"),
    )
    brief = brief_profile(profile)
    assert tuple(brief["metrics"]) == tuple(brief["metric_source"]) == KEY_METRICS
    assert brief["cut"] == [{"path": "metrics", "total": len(metrics), "uri": profile.report_uri}]
    assert fit(brief, uri=None)["cut"] == brief["cut"]


def test_metrics_that_were_asked_for_are_all_shown() -> None:
    bench = FakeWorkbench()
    profile = bench.profile(RELU, "relu")
    assert set(brief_profile(profile)["metrics"]) == set(profile.metrics)


def test_every_key_metric_is_one_that_is_measured() -> None:
    assert set(KEY_METRICS) <= set(METRICS)


def test_cuts_inside_entries_that_are_gone_are_not_listed() -> None:
    entries = [{"log": "x" * 700} for _ in range(300)]
    cut = fit(reply(path=entries), uri=URI)
    shown = len(cut["path"])
    assert all(
        note["path"] == "path" or int(note["path"].split(".")[1]) < shown for note in cut["cut"] if "." in note["path"]
    )
    assert {"path": "path", "total": 300, "uri": URI} in cut["cut"]


def test_non_ascii_text_is_counted_as_a_client_may_escape_it() -> None:
    assert size_of("×" * 10) == 62
    assert len(json.dumps(fit(reply(log="×" * 3000), uri=URI))) <= MAX_REPLY_BYTES


def test_a_text_that_does_not_fit_says_that_it_was_cut() -> None:
    assert fit_text("short") == "short"
    for letter in "x×":
        cut = fit_text(letter * 9000)
        assert size_of(cut) <= MAX_REPLY_BYTES
        assert cut.endswith("the whole is too long for a reply)")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3000),
    lambda inner: st.lists(inner, max_size=30) | st.dictionaries(st.text(max_size=12), inner, max_size=30),
    max_leaves=60,
)


@settings(max_examples=30, deadline=None)
@given(st.dictionaries(st.sampled_from(["a", "summary", "warnings", "kernel_id", "cases"]), JSON, max_size=5))
def test_whatever_it_holds_a_reply_is_cut_to_the_limit(whole: dict[str, Any]) -> None:
    assert size_of(fit(whole, uri=URI)) <= MAX_REPLY_BYTES
