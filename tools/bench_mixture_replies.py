"""`optiml bench generate` for a mixture in two stages, so that the GPU is held for the writing alone.

    python tools/bench_mixture_replies.py write OUT/replies.json --home OUT [--samples 3]     where the GPU is
    python tools/bench_mixture_replies.py judge OUT/replies.json -o benchmarks/generate.json  anywhere

`write` lets every expert alone, the router's choice and the mixture answer all prompts, side by side in large batches.
`judge` runs the benchmark itself with those texts in the place of the models. OUT is what train_tiny_experts.py left.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from optiml.bench.generate import bench_generate
from optiml.bench.prompts import Prompt, load_prompts
from optiml.codec import encode
from optiml.generate.writer import SPREAD, kernel_task
from optiml.llm.model import Completion, Message
from optiml.mixture.child import Models
from optiml.mixture.conversation import prompt_of
from optiml.mixture.local import load_request
from optiml.settings import read_settings
from optiml.workbench import Workbench

ROUND = 1000  # between the seeds of the rounds of best-of-k
ARMS = ("catalogue", "experts", "router_only", "best_of_k", "mixture")


def write(options: argparse.Namespace) -> None:
    """Ask every arm for every prompt."""
    settings = read_settings(home=str(options.home.resolve())).mixture
    if settings is None:
        raise SystemExit(f"{options.home} has no optiml.toml with a [mixture] table")
    models = Models()  # in this process: nobody else waits for it
    models.handle(load_request(settings), [])
    prompts = load_prompts()[: options.limit]
    experts = list(range(len(settings.experts)))
    jobs = [(mode, options.seed, options.samples) for mode in (*experts, "router", "mixture")]
    jobs += [
        (mode, options.seed + ROUND * turn, options.best_of) for mode in experts for turn in range(1, options.samples)
    ]
    replies: dict[str, dict[str, dict[str, list[dict[str, Any]]]]] = {}
    for mode, seed, samples in jobs:
        samples = max(samples, options.best_of) if mode in experts and seed == options.seed else samples
        rows = [prompt for prompt in prompts for _ in range(samples)]
        asked = [prompt_of(kernel_task(item.problem, item.text), instructed=not settings.checkpoint) for item in rows]
        sampling = {
            "max_tokens": options.max_tokens,
            "temperature": SPREAD,
            "top_p": settings.top_p,
            "seed": seed,
            "stop": [],
            "refresh": settings.refresh,
        }
        started = time.monotonic()
        texts = models.handle({"op": "write", "prompts": asked, "sampling": sampling, "mode": mode}, [])[0]["texts"]
        found = replies.setdefault(str(mode), {}).setdefault(str(seed), {})
        for prompt, text in zip(rows, texts, strict=True):
            found.setdefault(prompt.id, []).append(text)
        print(f"{mode} seed {seed}: {len(rows)} texts in {time.monotonic() - started:.0f} s", flush=True)
    record = {
        "prompts": len(prompts),
        "experts": [Path(name).name for name in settings.experts],
        "seed": options.seed,
        "samples": options.samples,
    }
    options.replies.write_text(json.dumps({**record, "replies": replies}) + "\n")


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
        """The first `samples` texts that were written with this seed."""
        texts = self._record["replies"][self._mode][str(seed)][self._ids[messages[-1].text]][:samples]
        return tuple(
            Completion(
                text=text["text"],
                finish_reason="stop" if text["ending"] == "stop" else "length",
                tokens_in=sum(text["read"]),
                tokens_out=text["tokens_out"] + sum(text["forwarded"][1:]),
            )
            for text in texts
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
    result = {"what": "tiny experts trained from scratch on OptiML's own kernels", **encode(found)}
    if options.output is not None:
        options.output.write_text(json.dumps(result, indent=1) + "\n")
    for arm in found.arms:
        rates = "" if arm.every is None else f"build@1 {arm.every.build_at['1']} pass@1 {arm.every.pass_at['1']}"
        print(f"{arm.arm:28} {arm.status:8} {rates} {arm.why or ''}")
    for gap in found.differences:
        print(f"{gap.first} - {gap.second}: {gap.mean:+.3f} {gap.ci95}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    stages = parser.add_subparsers(required=True)
    writing = stages.add_parser("write")
    writing.add_argument("replies", type=Path)
    writing.add_argument("--home", type=Path, required=True, help="folder with optiml.toml")
    writing.add_argument("--samples", type=int, default=3)
    writing.add_argument("--best-of", type=int, default=2, help="texts of one expert against one of the mixture")
    writing.add_argument("--max-tokens", type=int, default=1600)
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
