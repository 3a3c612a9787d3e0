"""The child in which the models live, with tiny experts read from disk."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="torch is not installed (extra `mixture`)")
pytest.importorskip("transformers", reason="transformers is not installed (extra `mixture`)")

from tiny_experts import write_experts

from optiml.errors import ModelFailed
from optiml.llm.model import Message
from optiml.mixture.local import LocalModels, MixtureModel
from optiml.settings import MixtureSettings

ASKED = (Message(role="system", text="Answer."), Message(role="user", text="relu, please"))


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> MixtureSettings:
    folders = write_experts(tmp_path_factory.mktemp("experts"))
    return MixtureSettings(experts=tuple(map(str, folders)), devices=("cpu",), stacks=2, active=2, refresh=4)


@pytest.fixture(scope="module")
def models(settings: MixtureSettings) -> Iterator[LocalModels]:
    made = LocalModels(settings)
    yield made
    made.close()


def test_nothing_runs_before_the_first_use(settings: MixtureSettings) -> None:
    models = LocalModels(settings)
    assert MixtureModel(models).name == "mixture"
    assert not models.running
    models.close()


def test_a_mixture_and_its_parts_write_through_one_child(models: LocalModels) -> None:
    mixture = MixtureModel(models)
    router, experts = mixture.router_only(), mixture.experts()
    texts = mixture.complete(ASKED, samples=3, max_tokens=9, temperature=1.0, seed=5)
    assert models.running
    assert all(text.tokens_out is not None and text.tokens_out > 9 for text in texts)  # the peer read some too
    assert texts == mixture.complete(ASKED, samples=3, max_tokens=9, temperature=1.0, seed=5)
    assert len({text.text for text in texts}) == 3
    assert {text.finish_reason for text in texts} == {"length"}
    assert [model.name for model in (router, experts[2])] == ["mixture:router", "mixture:expert-3"]
    alone = [model.complete(ASKED, max_tokens=9)[0].text for model in experts]
    assert router.complete(ASKED, max_tokens=9)[0].text in alone  # of an untrained mixture
    assert len(set(alone)) == 3


def test_what_cannot_be_read_is_refused_and_the_child_lives_on(models: LocalModels) -> None:
    mixture = MixtureModel(models)
    with pytest.raises(ModelFailed, match="shorten the intent") as refused:
        mixture.complete([Message(role="user", text="x" * 100_000)], max_tokens=4)
    assert refused.value.code == "model_reply_unusable"
    assert mixture.complete([Message(role="user", text="дай мне ядро relu 数")], max_tokens=4)


def test_closing_in_the_middle_of_a_call_ends_the_child(models: LocalModels) -> None:
    mixture = MixtureModel(models)
    mixture.complete(ASKED, max_tokens=1)
    failed: list[ModelFailed] = []

    def write_for_long() -> None:
        try:
            mixture.complete([ASKED[1]] * 1, samples=64, max_tokens=400, temperature=1.0)
        except ModelFailed as error:
            failed.append(error)

    writer = threading.Thread(target=write_for_long)
    writer.start()
    while not models.busy:
        writer.join(0.01)
    mixture.close()
    writer.join(30)
    assert "was cancelled" in str(failed[0])
    assert not models.running


def test_a_child_that_nobody_calls_is_ended(settings: MixtureSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    timers: list[FakeTimer] = []

    class FakeTimer:
        def __init__(self, seconds: float, call, args) -> None:
            self.seconds, self.fire, self.daemon = seconds, lambda: call(*args), False
            timers.append(self)

        def start(self) -> None:
            pass

        def cancel(self) -> None:
            """As one that is too late to be cancelled."""

    class FakeWorker:
        pid = 1

        def __init__(self, *_: object, **__: object) -> None:
            pass

        def call(self, header: dict[str, object], *, timeout_s: float) -> tuple[dict[str, object], list[object]]:
            return {"texts": []}, []

        def close(self) -> None:
            pass

    monkeypatch.setattr("optiml.mixture.local.threading.Timer", FakeTimer)
    monkeypatch.setattr("optiml.mixture.local.Worker", FakeWorker)
    models = LocalModels(dataclasses.replace(settings, idle_s=7.0))
    models.write(["relu"], {}, "mixture")
    models.write(["relu"], {}, "mixture")
    assert [timer.seconds for timer in timers] == [7.0, 7.0]
    timers[0].fire()  # somebody has called since
    assert models.running
    timers[1].fire()
    assert not models.running


def test_models_that_cannot_be_loaded_leave_nothing_behind(settings: MixtureSettings, tmp_path: Path) -> None:
    models = LocalModels(dataclasses.replace(settings, checkpoint=str(tmp_path)))
    with pytest.raises(ModelFailed, match="holds no mixture: train one with `optiml train-mixture`"):
        MixtureModel(models).complete(ASKED)
    assert not models.running
    with pytest.raises(ModelFailed, match="neither a folder nor"):
        MixtureModel(LocalModels(dataclasses.replace(settings, experts=("nowhere", "else")))).complete(ASKED)
