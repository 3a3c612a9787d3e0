"""`optiml bench generate` for a mixture in two stages, so that the GPU is held for the writing alone.

    python tools/bench_mixture_replies.py write OUT/replies.json --home OUT [--samples 3]     where the GPU is
    python tools/bench_mixture_replies.py judge OUT/replies.json -o benchmarks/generate_tiny.json  anywhere

`write` lets every expert alone, the router's choice and the mixture answer all prompts, side by side in large batches
that `--processes` children share. Texts that end for want of tokens count as they are. `judge` runs the benchmark with
those texts in the place of the models. OUT is what train_tiny_experts.py left; the losses measured there go along.
"""

from __future__ import annotations

import argparse
import functools
import json
import multiprocessing
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from optiml.bench.generate import bench_generate
from optiml.bench.prompts import Prompt, load_prompts
from optiml.codec import encode
from optiml.errors import ModelFailed
from optiml.generate.writer import SPREAD, kernel_task
from optiml.llm.model import Completion, Message
from optiml.mixture.child import Models, active_experts
from optiml.mixture.conversation import prompt_of
from optiml.mixture.decode import Sampling
from optiml.mixture.decode import write as draw
from optiml.mixture.local import load_request
from optiml.mixture.mixture import Mixture
from optiml.settings import MixtureSettings, read_settings
from optiml.workbench import Workbench

ARMS = ("catalogue", "experts", "router_only", "best_of_k", "mixture")


@dataclass(frozen=True, kw_only=True)
class Job:
    """The prompts of one arm that the same experts answer."""

    mode: str | int  # the number of an expert, `router` or `mixture`
    active: tuple[int, ...]
    prompts: tuple[Prompt, ...]


def write(options: argparse.Namespace) -> None:
    """Ask every arm for every prompt."""
    settings = _settings(options)
    prompts = load_prompts()[: options.limit]
    mixture = _mixture(settings)
    asked = [_question(item, settings) for item in prompts]
    jobs = []
    for mode in ("mixture", "router", *range(len(settings.experts))):
        chosen = active_experts(mixture, asked, mode) or mixture.route(asked).active.tolist()
        for active in sorted({tuple(row) for row in chosen}):
            theirs = tuple(item for item, row in zip(prompts, chosen, strict=True) if tuple(row) == active)
            jobs.append(Job(mode=mode, active=active, prompts=theirs))
    replies: dict[str, dict[str, list[dict[str, Any]]]] = {}
    started = time.monotonic()
    with ProcessPoolExecutor(options.processes, multiprocessing.get_context("spawn")) as pool:
        for job, texts in zip(jobs, pool.map(answers, [options] * len(jobs), jobs), strict=True):
            for number, text in enumerate(texts):
                name = job.prompts[number // options.samples].id
                replies.setdefault(str(job.mode), {}).setdefault(name, []).append(text)
            ended = sum(text["ending"] == "stop" for text in texts)
            spent = time.monotonic() - started
            print(f"{job.mode} {job.active}: {len(texts)} texts, {ended} ended, {spent:.0f} s", flush=True)
    losses = options.home / "losses.json"
    record = {
        "prompts": len(prompts),
        "experts": [Path(name).name for name in settings.experts],
        "seed": options.seed,
        "samples": options.samples,
        "max_tokens": options.max_tokens,
        "training": json.loads(losses.read_text()) if losses.exists() else None,
    }
    options.replies.write_text(json.dumps({**record, "replies": replies}) + "\n")


def answers(options: argparse.Namespace, job: Job) -> list[dict[str, Any]]:
    """The texts of a job, `samples` for each prompt."""
    settings = _settings(options)
    rows = [_question(item, settings) for item in job.prompts for _ in range(options.samples)]
    sampling = Sampling(
        max_tokens=options.max_tokens,
        temperature=SPREAD,
        top_p=settings.top_p,
        seed=options.seed,
        refresh=settings.refresh,
    )
    written = draw(_mixture(settings), rows, sampling, active=[job.active] * len(rows))
    fields = ("text", "ending", "tokens_out", "active", "read", "forwarded")
    return [{name: getattr(item, name) for name in fields} for item in written]


def _settings(options: argparse.Namespace) -> MixtureSettings:
    settings = read_settings(home=str(options.home.resolve())).mixture
    if settings is None:
        raise SystemExit(f"{options.home} has no optiml.toml with a [mixture] table")
    return settings


@functools.cache
def _mixture(settings: MixtureSettings) -> Mixture:
    models = Models()  # in this process: nobody else waits for it
    models.handle(load_request(settings), [])
    assert models.mixture is not None
    return models.mixture


def _question(item: Prompt, settings: MixtureSettings) -> str:
    return prompt_of(kernel_task(item.problem, item.text), instructed=not settings.checkpoint)


class Recorded:
    """A `Model` (and `Ensemble`) that says again what was written."""

    def __init__(self, record: dict[str, Any], prompts: Sequence[Prompt], mode: str, name: str) -> None:
        self._record, self._prompts, self._mode = record, prompts, mode
        self._ids = {kernel_task(item.problem, item.text)[-1].text: item.id for item in prompts}
        self.name = name

    def experts(self) -> list[Recorded]:
        """Each by itself."""
        names = self._record["experts"]
        return [
            Recorded(self._record, self._prompts, str(at), f"expert-{at + 1}:{name}") for at, name in enumerate(names)
        ]

    def router_only(self) -> Recorded:
        """The router's first."""
        return Recorded(self._record, self._prompts, "router", "mixture:router")

    def complete(
        self, messages: Sequence[Message], *, samples: int = 1, seed: int | None = None, **_: object
    ) -> tuple[Completion, ...]:
        """The first `samples` texts that were written."""
        texts = self._record["replies"][self._mode][self._ids[messages[-1].text]]
        if seed != self._record["seed"] or samples > len(texts):
            raise ModelFailed(f"{samples} texts with seed {seed} were asked for; {len(texts)} were recorded")
        return tuple(
            Completion(
                text=text["text"],
                finish_reason="stop" if text["ending"] == "stop" else "length",
                tokens_in=sum(text["read"]),
                tokens_out=text["tokens_out"] + sum(text["forwarded"][1:]),
            )
            for text in texts[:samples]
        )

    def close(self) -> None:
        """Nothing is held."""


class Replayed(Workbench):
    """A workbench whose only model is a recorded one."""

    recorded: Recorded

    @property
    def models(self) -> dict[str, Any]:  # type: ignore[override]
        """The recorded mixture."""
        return {"mixture": self.recorded}


def judge(options: argparse.Namespace) -> None:
    """Verify what was written and sum up."""
    record = json.loads(options.replies.read_text())
    prompts = load_prompts()[: record["prompts"]]
    with Replayed(read_settings(device=options.device)) as bench:
        bench.recorded = Recorded(record, prompts, "mixture", "mixture")
        found = bench_generate(
            bench,
            prompts,
            arms=ARMS,
            samples=record["samples"],
            seed=record["seed"],
            on_progress=lambda text: print(text, flush=True),
        )
    result = {
        "what": "tiny experts trained from scratch on OptiML's own kernels: the table shows that the machinery works",
        **encode(found),
        "max_tokens": record["max_tokens"],
        "training": record["training"],
    }
    if options.output is not None:
        options.output.write_text(json.dumps(result, indent=1) + "\n")
    for arm in found.arms:
        rates = "" if arm.every is None else f"build@1 {arm.every.build_at['1']} pass@1 {arm.every.pass_at['1']}"
        print(f"{arm.arm:28} {arm.status:8} {rates} {arm.why or ''}")
        if arm.texts != 1:
            print(f"  {arm.counted}")
    for gap in found.differences:
        print(f"{gap.first} - {gap.second}: {gap.mean:+.3f} {gap.ci95}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    stages = parser.add_subparsers(required=True)
    writing = stages.add_parser("write")
    writing.add_argument("replies", type=Path)
    writing.add_argument("--home", type=Path, required=True, help="folder with optiml.toml")
    writing.add_argument("--samples", type=int, default=3)
    writing.add_argument("--max-tokens", type=int, default=1600)
    writing.add_argument("--processes", type=int, default=1, help="children that write, each with the models")
    writing.add_argument("--seed", type=int, default=0)
    writing.add_argument("--limit", type=int, help="only the first prompts")
    writing.set_defaults(run=write)
    judging = stages.add_parser("judge")
    judging.add_argument("replies", type=Path)
    judging.add_argument("-o", "--output", type=Path)
    judging.add_argument("--device", default="emulator:a100")
    judging.set_defaults(run=judge)
    options = parser.parse_args()
    options.run(options)


if __name__ == "__main__":
    main()
