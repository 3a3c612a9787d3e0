"""Connecting a client to the server over the fake workbench, in the process."""

import functools
from collections.abc import Awaitable, Callable

import anyio
import pytest
from fakes import FakeWorkbench
from mcp import Client

from optiml_mcp.server import build_server

Scenario = Callable[[Client], Awaitable[None]]


@pytest.fixture(params=["auto", "legacy"])
def era(request: pytest.FixtureRequest) -> str:
    """Both protocol eras: sessionless, and with a handshake."""
    mode: str = request.param
    return mode


@pytest.fixture
def bench() -> FakeWorkbench:
    return FakeWorkbench()


@pytest.fixture
def play(bench: FakeWorkbench, era: str) -> Callable[[Scenario], None]:
    """Run a scenario against a fresh server over `bench`; it may take 60 s."""

    async def connected(scenario: Scenario) -> None:
        with anyio.fail_after(60):
            async with Client(build_server(lambda: bench), mode=era) as client:  # type: ignore[arg-type, return-value]
                await scenario(client)

    return lambda scenario: anyio.run(functools.partial(connected, scenario))
