"""One POST of JSON to a model's address: a total deadline, a size cap, and retries only where they can help.

Nothing of the reply is trusted: no redirect is followed, no compressed body is unpacked, and a text of the endpoint
reaches an error message short and without the key. The environment's proxies and .netrc are not read, so that key and
address come from one source, the settings.
"""

from __future__ import annotations

import json
import math
import random
import ssl
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

import anyio
import httpx

from optiml.errors import ModelFailed

MAX_REPLY_BYTES = 8 << 20
KEPT_REPLY_CHARACTERS = 2_000  # of a reply that could not be used, for whoever looks into it
ATTEMPTS = 4
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 8.0
_PASSING = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 529})  # states that another try may not meet
_KEY_REFUSED = frozenset({401, 403})


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """An answer other than 2xx."""

    status: int
    text: str  # of its body, short


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """Where and how to post.

    Attributes:
        deadline_s: for one post with all its retries; nothing the other side does makes it last longer.
        transport: of httpx; None for the network.
        sleep: waits between tries; `jitter` draws from 0..1.
    """

    url: str
    deadline_s: float
    transport: httpx.AsyncBaseTransport | None = None
    sleep: Callable[[float], Awaitable[None]] = anyio.sleep
    jitter: Callable[[], float] = field(default=random.random)

    async def post(
        self, body: Mapping[str, Any], headers: Mapping[str, str], *, secret: str | None
    ) -> Mapping[str, Any] | Refusal:
        """The JSON object that the endpoint answers with, or its refusal of this body (400, 404, 413, 422 and such).

        Args:
            secret: the key within `headers`; it is cut out of every text that leaves here.

        Raises:
            ModelFailed: `model_unavailable` or `model_reply_unusable`, with what to do.
        """
        try:
            with anyio.fail_after(self.deadline_s):
                return await self._tried(json.dumps(body).encode("utf-8"), headers, secret)
        except TimeoutError as error:
            raise ModelFailed(
                f"the model did not answer within {self.deadline_s:g} s: try again, or raise timeout_s"
            ) from error

    async def _tried(
        self, content: bytes, headers: Mapping[str, str], secret: str | None
    ) -> Mapping[str, Any] | Refusal:
        until = anyio.current_time() + self.deadline_s
        async with httpx.AsyncClient(
            transport=self.transport, timeout=None, follow_redirects=False, trust_env=False
        ) as client:
            for attempt in range(1, ATTEMPTS + 1):
                pause = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** (attempt - 1)) * (0.5 + 0.5 * self.jitter())
                try:
                    status, asked_pause, reply = await self._once(client, content, headers)
                except httpx.InvalidURL as error:
                    raise ModelFailed("the model's url is no address: check url") from error
                except (httpx.TransportError, ssl.SSLError) as error:
                    if _is_tls(error):
                        raise ModelFailed("the model's certificate was not accepted: check its url") from error
                    if attempt == ATTEMPTS:
                        raise ModelFailed(
                            f"the model cannot be reached ({type(error).__name__}): check url and network"
                        ) from error
                else:
                    if status not in _PASSING:
                        return _understood(status, reply, secret)
                    pause = pause if asked_pause is None else asked_pause
                    if attempt == ATTEMPTS or anyio.current_time() + pause >= until:
                        waited = "" if asked_pause is None else f" and asks to wait {asked_pause:.0f} s"
                        raise ModelFailed(f"the model answers with status {status}{waited}: try again later")
                await self.sleep(pause)
        raise AssertionError("the last attempt returns or raises")

    async def _once(
        self, client: httpx.AsyncClient, content: bytes, headers: Mapping[str, str]
    ) -> tuple[int, float | None, bytes]:
        sent = {**headers, "content-type": "application/json", "accept-encoding": "identity"}
        async with client.stream("POST", self.url, content=content, headers=sent) as response:
            if response.headers.get("content-encoding", "identity") != "identity":
                raise ModelFailed("the model sent a compressed reply though none was asked for", **_UNUSABLE)
            parts, size = [], 0
            async for part in response.aiter_raw():
                size += len(part)
                if size > MAX_REPLY_BYTES:
                    raise ModelFailed(f"the model's reply is larger than {MAX_REPLY_BYTES >> 20} MiB", **_UNUSABLE)
                parts.append(part)
            return response.status_code, _asked_pause(response.headers.get("retry-after")), b"".join(parts)


_UNUSABLE = {"code": "model_reply_unusable"}


def _understood(status: int, reply: bytes, secret: str | None) -> Mapping[str, Any] | Refusal:
    text = _without(secret, reply[: 4 * KEPT_REPLY_CHARACTERS].decode("utf-8", errors="replace"))
    text = text[:KEPT_REPLY_CHARACTERS]
    if status in _KEY_REFUSED:
        raise ModelFailed(f"the model refuses the key (status {status}): check key_env or key_file")
    if 300 <= status < 400:
        raise ModelFailed(f"the model's url leads elsewhere (status {status}): give the final address")
    if status >= 400:
        return Refusal(status=status, text=" ".join(_message(reply, text).split())[:300])
    try:
        answer = json.loads(reply)
    except (ValueError, RecursionError) as error:
        raise ModelFailed(
            "the model's reply is not JSON: check that url is its API", reply=text, **_UNUSABLE
        ) from error
    if not isinstance(answer, dict):
        raise ModelFailed("the model's reply is no JSON object", reply=text, **_UNUSABLE)
    return answer


def _message(reply: bytes, text: str) -> str:
    """What an API says in `error.message`, else the start of the body."""
    try:
        said = json.loads(reply)["error"]["message"]
    except (ValueError, RecursionError, KeyError, TypeError):
        return text
    return said if isinstance(said, str) and said in text else text


def _without(secret: str | None, text: str) -> str:
    return text.replace(secret, "***") if secret else text


def _is_tls(error: BaseException) -> bool:
    chain: BaseException | None = error
    while chain is not None:
        if isinstance(chain, ssl.SSLError):
            return True
        chain = chain.__cause__ or chain.__context__
    return False


def _asked_pause(text: str | None) -> float | None:
    """Seconds of a Retry-After header, which holds a number or a date; None where it says nothing usable."""
    if text is None:
        return None
    try:
        seconds = float(text)
    except ValueError:
        try:
            seconds = (parsedate_to_datetime(text) - datetime.now(UTC)).total_seconds()
        except (ValueError, TypeError):
            return None
    return max(0.0, seconds) if math.isfinite(seconds) else None
