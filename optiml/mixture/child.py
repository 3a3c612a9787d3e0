"""The child in which the models live: it loads them once and writes what it is asked for."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from optiml.errors import InvalidInput, ModelFailed
from optiml.mixture.assembly import open_mixture
from optiml.mixture.decode import Sampling, write
from optiml.mixture.files import ExpertFiles
from optiml.mixture.mixture import Mixture
from optiml.process import serve

Reply = tuple[dict[str, Any], Sequence[bytes]]


class Models:
    """The mixture of this process, None before it is loaded."""

    def __init__(self) -> None:
        self.mixture: Mixture | None = None

    def handle(self, header: dict[str, Any], blobs: Sequence[memoryview]) -> Reply:
        """Answer `load` or `write`."""
        if header["op"] == "load":
            return self._load(header), ()
        return self._write(header), ()

    def _load(self, header: dict[str, Any]) -> dict[str, Any]:
        started = time.monotonic()
        assembled = open_mixture(
            [ExpertFiles(**{**item, "path": Path(item["path"])}) for item in header["experts"]],
            encoder=_files(header["encoder"]),
            checkpoint=Path(header["checkpoint"]) if header["checkpoint"] else None,
            shape=header["shape"],
            devices=header["devices"],
            dtype=header["dtype"],
            four_bit=header["four_bit"],
        )
        self.mixture = assembled.mixture
        return {
            "experts": [expert.name for expert in self.mixture.experts],
            "device": str(self.mixture.device),
            "seconds": time.monotonic() - started,
        }

    def _write(self, header: dict[str, Any]) -> dict[str, Any]:
        if self.mixture is None:
            raise InvalidInput("no models were loaded")
        prompts = header["prompts"]
        try:
            written = write(
                self.mixture,
                prompts,
                Sampling(**{**header["sampling"], "stop": tuple(header["sampling"]["stop"])}),
                active=active_experts(self.mixture, prompts, header["mode"]),
            )
        except torch.OutOfMemoryError as error:
            raise ModelFailed(
                "the models ran out of memory while writing: ask for fewer samples or fewer tokens"
            ) from error
        fields = ("text", "ending", "tokens_out", "active", "read", "forwarded", "own")
        return {"texts": [{name: getattr(item, name) for name in fields} for item in written]}


def _files(record: dict[str, Any] | None) -> ExpertFiles | None:
    return None if record is None else ExpertFiles(**{**record, "path": Path(record["path"])})


def active_experts(mixture: Mixture, prompts: Sequence[str], mode: str | int) -> list[tuple[int, ...]] | None:
    """The experts of each prompt: the router's (`mixture`), only its first one (`router`), or a fixed one."""
    if mode == "mixture":
        return None
    if mode == "router":
        return [(row[0],) for row in mixture.route(prompts).active.tolist()]
    return [(int(mode),)] * len(prompts)


def main() -> None:
    logging.disable(logging.WARNING)  # the library's advice is for notebooks
    serve(Models().handle)


if __name__ == "__main__":
    main()
