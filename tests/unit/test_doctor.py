"""What doctor says of models, without asking them."""

from __future__ import annotations

from pathlib import Path

import pytest

from optiml.doctor import examine
from optiml.settings import ModelEndpoint, Settings, TextMixture
from optiml.store import open_store


def states(tmp_path: Path, settings: Settings) -> dict[str, tuple[str, str]]:
    store = open_store(tmp_path / "store", size_limit_bytes=1 << 20)
    try:
        return {check.name: (check.state, check.detail + check.fix) for check in examine(settings, store)}
    finally:
        store.close()


def test_models_are_named_with_what_they_lack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SET", "sk-secret")
    monkeypatch.delenv("UNSET", raising=False)
    experts = (
        ModelEndpoint(name="a", url="https://host/v1", key_env="UNSET"),
        ModelEndpoint(name="b", url="http://host/v1", key_env="SET"),
        ModelEndpoint(name="c"),
    )
    settings = Settings(
        home=tmp_path,
        chat=ModelEndpoint(name="m", url="http://127.0.0.1:1/v1", key_env="SET"),
        text_mixture=TextMixture(experts=experts),
    )
    found = states(tmp_path, settings)
    assert found["chat model"][0] == "ok"
    assert found["text mixture, expert 1"] == ("missing", found["text mixture, expert 1"][1])
    assert "UNSET" in found["text mixture, expert 1"][1]
    assert found["text mixture, expert 2"][0] == "warn"
    assert "encryption" in found["text mixture, expert 2"][1]
    assert "no url" in found["text mixture, expert 3"][1]
    assert "sk-secret" not in str(found)


def test_without_models_doctor_says_where_to_name_one(tmp_path: Path) -> None:
    state, text = states(tmp_path, Settings(home=tmp_path))["chat model"]
    assert state == "warn"
    assert "optiml.toml" in text
