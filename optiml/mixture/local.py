"""The mixture as a `Model`: its experts live in a child that starts on first use and ends when nobody needs it."""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from optiml.errors import ModelFailed, WorkerDied, WorkerTimeout
from optiml.llm.model import MAX_REPLY_CHARACTERS, MAX_TOKENS, Completion, FinishReason, Message
from optiml.mixture.conversation import prompt_of
from optiml.mixture.files import ExpertFiles, locate, require_packages
from optiml.process import Worker
from optiml.sandbox import Policy
from optiml.settings import MixtureSettings

LOADING_S = 1800.0  # several large models from a slow disk
_START_S = 180.0  # torch and transformers take many seconds to import on a busy machine
_POLL_S = 0.05  # how often a call that is to be ended is told so
_ROUTER, _MIXTURE = "router", "mixture"


class LocalModels:
    """The child that holds the experts, shared by every way to use them. Safe to call from several threads.

    Args:
        settings: the [mixture] table.
    """

    def __init__(self, settings: MixtureSettings) -> None:
        self.settings = settings
        self._lock = threading.Lock()  # one call at a time; a second one waits its turn
        self._worker: Worker | None = None
        self._idle: threading.Timer | None = None
        self._calls = 0

    @property
    def running(self) -> bool:
        """Whether models are loaded now."""
        worker = self._worker
        return worker is not None and worker.pid is not None

    @property
    def busy(self) -> bool:
        """Whether a call is in progress."""
        return self._lock.locked()

    def write(self, prompts: Sequence[str], sampling: dict[str, Any], mode: str | int) -> list[dict[str, Any]]:
        """Let the child write one text for each prompt; see `child.Models`.

        Raises:
            ModelFailed: the models cannot be loaded, or could not write.
        """
        with self._lock:
            self._stop_waiting()
            try:
                worker = self._loaded()
                header = {"op": "write", "prompts": list(prompts), "sampling": sampling, "mode": mode}
                reply, _ = worker.call(header, timeout_s=self.settings.timeout_s)
            except WorkerTimeout as error:
                self._end()
                raise ModelFailed(
                    f"the mixture wrote for more than {self.settings.timeout_s:g} s and was stopped: ask for fewer "
                    "samples, or raise timeout_s below [mixture]"
                ) from error
            except WorkerDied as error:
                self._end()
                why = "was cancelled" if error.cancelled else "ended without an answer, likely for lack of memory"
                raise ModelFailed(f"the process of the mixture {why}") from error
            finally:
                self._wait_for_idleness()
            texts: list[dict[str, Any]] = reply["texts"]
            return texts

    def close(self) -> None:
        """End the child, also in the middle of a call; a later call starts it again."""
        while not self._lock.acquire(timeout=_POLL_S):
            worker = self._worker
            if worker is not None:
                worker.cancel()
        try:
            self._stop_waiting()
            self._end()
        finally:
            self._lock.release()

    def _loaded(self) -> Worker:
        if self._worker is not None and self._worker.pid is not None:
            return self._worker
        self._end()
        header = load_request(self.settings)
        readable = {folder for item in (*header["experts"], header["encoder"]) if item for folder in _folders(item)}
        if header["checkpoint"]:
            readable.add(header["checkpoint"])
        self._worker = Worker(
            "optiml.mixture.child",
            policy=Policy(readable=tuple(sorted(readable)), gpu=_wants_gpu(self.settings)),
            environment=_ENVIRONMENT,
            start_timeout_s=_START_S,
        )
        try:
            self._worker.call(header, timeout_s=LOADING_S)
        except ModelFailed:
            self._end()  # whatever it had loaded goes with it
            raise
        return self._worker

    def _end(self) -> None:
        if self._worker is not None:
            self._worker.close()
            self._worker = None

    def _wait_for_idleness(self) -> None:
        if self._worker is not None:
            self._calls += 1
            self._idle = threading.Timer(self.settings.idle_s, self._end_if_idle, [self._calls])
            self._idle.daemon = True
            self._idle.start()

    def _stop_waiting(self) -> None:
        if self._idle is not None:
            self._idle.cancel()
            self._idle = None

    def _end_if_idle(self, calls: int) -> None:
        with self._lock:
            if calls == self._calls:  # nobody came in between
                self._end()


_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_NUM_THREADS": str(os.cpu_count() or 1),
    "MKL_NUM_THREADS": str(os.cpu_count() or 1),
}


def load_request(settings: MixtureSettings) -> dict[str, Any]:
    """The message that makes the child load what the settings name.

    Raises:
        ModelFailed: packages or experts are missing.
    """
    require_packages()
    names = [*settings.experts, *([settings.prompt_encoder] if settings.prompt_encoder else [])]
    found = [_record(locate(name, allow_download=settings.allow_download)) for name in names]
    checkpoint = Path(settings.checkpoint).expanduser().resolve() if settings.checkpoint else ""
    return {
        "op": "load",
        "experts": found[: len(settings.experts)],
        "encoder": found[-1] if settings.prompt_encoder else None,
        "checkpoint": str(checkpoint),
        "shape": {"stacks": settings.stacks, "active": settings.active},
        "devices": list(settings.devices),
        "dtype": settings.dtype,
        "four_bit": settings.four_bit,
    }


def _record(files: ExpertFiles) -> dict[str, Any]:
    return {**asdict(files), "path": str(files.path)}


def _folders(record: dict[str, Any]) -> set[str]:
    """What the child must be able to read: the folder, and where its links lead (a hub cache is made of them)."""
    path = Path(record["path"])
    if not path.is_dir():
        return {str(path.parent)}
    return {str(path), *(str(item.resolve().parent) for item in path.iterdir())}


def _wants_gpu(settings: MixtureSettings) -> bool:
    return any(device != "cpu" for device in settings.devices)


class MixtureModel:
    """A `Model` over local experts.

    Args:
        models: where they live; several `MixtureModel`s may share them.
        mode: `mixture`; `router`: only the expert that the router puts first writes; or the number of one expert.
    """

    def __init__(self, models: LocalModels, mode: str | int = _MIXTURE) -> None:
        self.models = models
        self.mode = mode

    @property
    def name(self) -> str:
        """`mixture`, `mixture:router` or `mixture:expert-1`."""
        if self.mode == _MIXTURE:
            return _MIXTURE
        return f"mixture:{self.mode if self.mode == _ROUTER else f'expert-{int(self.mode) + 1}'}"

    def experts(self) -> tuple[MixtureModel, ...]:
        """Each expert by itself, over the same child."""
        return tuple(MixtureModel(self.models, number) for number in range(len(self.models.settings.experts)))

    def router_only(self) -> MixtureModel:
        """The expert that the router puts first, by itself."""
        return MixtureModel(self.models, _ROUTER)

    def complete(
        self,
        messages: Sequence[Message],
        *,
        samples: int = 1,
        max_tokens: int = MAX_TOKENS,
        stop: Sequence[str] = (),
        temperature: float = 0.0,
        seed: int | None = None,
    ) -> tuple[Completion, ...]:
        """See `optiml.llm.model.Model`. Tokens are counted over all experts that worked.

        Raises:
            ModelFailed: see `LocalModels.write`; `model_reply_unusable` where every text repeats one phrase endlessly,
                or where prompt and `max_tokens` exceed what an expert takes.
        """
        return self.complete_all(
            [messages] * samples, max_tokens=max_tokens, stop=stop, temperature=temperature, seed=seed
        )

    def complete_all(
        self,
        conversations: Sequence[Sequence[Message]],
        *,
        max_tokens: int = MAX_TOKENS,
        stop: Sequence[str] = (),
        temperature: float = 0.0,
        seed: int | None = None,
    ) -> tuple[Completion, ...]:
        """One text for each conversation, written side by side."""
        settings = self.models.settings
        prompts = [prompt_of(messages, instructed=not settings.checkpoint) for messages in conversations]
        sampling = {
            "max_tokens": max_tokens,
            "temperature": temperature,
            "top_p": settings.top_p,
            "seed": secrets.randbits(32) if seed is None else seed,
            "stop": list(stop),
            "refresh": settings.refresh,
        }
        texts = self.models.write(prompts, sampling, self.mode)
        if all(text["ending"] == "repetition" for text in texts):
            raise ModelFailed(
                "every text of the mixture repeats one phrase without end: raise the temperature or train it further",
                code="model_reply_unusable",
                reply=texts[0]["text"][:200],
            )
        return tuple(_completion(text) for text in texts)

    def close(self) -> None:
        """End the child that holds the models; a later call starts it again."""
        self.models.close()


def _completion(text: dict[str, Any]) -> Completion:
    cut = text["text"][:MAX_REPLY_CHARACTERS]
    ended: FinishReason = "stop" if text["ending"] == "stop" and len(cut) == len(text["text"]) else "length"
    peers = sum(text["forwarded"][1:])
    return Completion(text=cut, finish_reason=ended, tokens_in=sum(text["read"]), tokens_out=text["tokens_out"] + peers)
