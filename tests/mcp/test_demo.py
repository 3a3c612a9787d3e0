"""The scripted client of tools/ against the fake workbench."""

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from fakes import FakeWorkbench
from mcp import Client

Play = Callable[[Callable[[Client], Any]], None]
TOOL = Path(__file__).parents[2] / "tools" / "mcp_demo.py"


@pytest.fixture(scope="module")
def mcp_demo() -> ModuleType:
    spec = importlib.util.spec_from_file_location("mcp_demo", TOOL)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["mcp_demo"] = module
    spec.loader.exec_module(module)
    return module


def test_the_demo_goes_from_generate_to_a_finished_search(play: Play, mcp_demo: ModuleType) -> None:
    lines: list[str] = []

    async def scenario(client: Client) -> None:
        await mcp_demo.demo(client, problem="relu", evaluations=3, show=lines.append)

    play(scenario)
    assert lines[0].startswith("tools")
    assert any("cached: true" in line for line in lines)
    assert lines[-1].startswith("report")


def test_the_demo_fails_when_a_step_does_not_give_what_it_should(
    play: Play, mcp_demo: ModuleType, bench: FakeWorkbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "profiles", _Forgetful())

    async def scenario(client: Client) -> None:
        with pytest.raises(mcp_demo.Unexpected, match="not cached"):
            await mcp_demo.demo(client, problem="relu", evaluations=3, show=lambda _: None)

    play(scenario)


class _Forgetful(dict[str, Any]):
    """A cache that keeps nothing."""

    def __setitem__(self, key: str, value: Any) -> None:
        pass


@pytest.mark.timeout(300)
def test_the_demo_succeeds_against_the_real_server(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(TOOL), "--problem", "relu", "--evaluations", "2"],
        env={**os.environ, "OPTIML_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("every step gave what it should\n")
