"""Trains three tiny code models from scratch on the catalogue's kernels, a mixture on top of them, and measures both.

    optiml train-mixture PAIRS.jsonl --build [--dtypes float32]
    python tools/train_tiny_experts.py PAIRS.jsonl... OUT [--seconds 60] [--mixture-steps 400] [--seeds 3]

The experts are a Llama, a Qwen2 and a StarCoder2 model of a few million parameters, each with a tokenizer of its own.
All see every family of operators that is trained on, then each goes on with a third of them: so they differ in what
they are good at. What comes out says how a mixture compares with its own experts where they are tiny and were trained
on our own kernels, and nothing about models of any other size.

Measured, in nats per character of the kernel, on two sets that no expert and no mixture was trained on: families of
operators that were held out, and held-out strategies of the other families. Intervals: 95 % by bootstrap over
strategies for each seed of the mixture's training, and Student's t over seeds.

`--mixture-seconds` lowers the number of steps to what fits, the same for every seed. Every stage leaves a file or
folder below OUT and is skipped where that exists; a mixture's training also goes on from its last checkpoint.
`OUT/optiml.toml` then holds the settings to use the mixture: OPTIML_HOME=OUT optiml generate ...
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import multiprocessing
import shutil
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from optiml.mixture.assembly import open_mixture
from optiml.mixture.dataset import Record, read_records
from optiml.mixture.files import locate
from optiml.mixture.mixture import Mixture
from optiml.mixture.training import HeldOut, Pair, Progress, TrainSettings, evaluate, train

HELD_OUT_FAMILIES = ("softmax", "copy")
HELD_OUT_SHARE = 0.12  # of the strategies of the other families
PARTS = (  # which families each expert goes on with
    ("activation", "elementwise", "transpose", "histogram", "loss"),
    ("reduction", "normalization", "scan"),
    ("gemm", "convolution", "pooling", "attention"),
)
CONTEXT = 4096
TRIED = 12  # steps that say how long one takes
EVALUATED = 96  # pairs at most in each held-out set
T_95 = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}


@dataclass(frozen=True, kw_only=True)
class Data:
    """Pairs by use."""

    training: tuple[Pair, ...]
    held_out: dict[str, tuple[Pair, ...]]  # sets by name
    groups: dict[str, tuple[str, ...]]  # strategy of each of those pairs


def divided(records: Sequence[Record]) -> Data:
    """Held-out families, held-out strategies of the rest, and what is trained on; the same every time."""
    rest = sorted({_strategy(record) for record in records if record.family not in HELD_OUT_FAMILIES})
    chosen = np.random.default_rng(7).permutation(len(rest))[: max(1, round(HELD_OUT_SHARE * len(rest)))]
    kept_back = {rest[index] for index in chosen}
    sets: dict[str, list[Record]] = {"families": [], "strategies": []}
    training = []
    for record in records:
        if record.family in HELD_OUT_FAMILIES:
            sets["families"].append(record)
        elif _strategy(record) in kept_back:
            sets["strategies"].append(record)
        else:
            training.append(record)
    thinned = {name: _thinned(found) for name, found in sets.items()}
    return Data(
        training=tuple(map(_pair, training)),
        held_out={name: tuple(map(_pair, found)) for name, found in thinned.items()},
        groups={name: tuple(map(_strategy, found)) for name, found in thinned.items()},
    )


def _strategy(record: Record) -> str:
    """What is kept back together: a strategy in all its element types and settings."""
    return f"{record.problem}/{record.strategy}"


def _thinned(records: Sequence[Record]) -> list[Record]:
    order = np.random.default_rng(8).permutation(len(records))[:EVALUATED]
    return [records[index] for index in sorted(order)]


def _pair(record: Record) -> Pair:
    return Pair(prompt=record.prompt, answer=record.answer, family=record.family)


# --- experts ---------------------------------------------------------------------------------------------------------
def tokenizer_of(texts: Sequence[str], vocabulary: int) -> transformers.PreTrainedTokenizerFast:
    """Byte-level BPE."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=["<end>", "<pad>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    made.train_from_iterator(texts, trainer)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>", pad_token="<pad>")


def new_model(kind: str, vocabulary: int, width: int, layers: int) -> Any:
    """A random model with `width / 32` heads."""
    sizes = {
        "vocab_size": vocabulary + 8,
        "hidden_size": width,
        "intermediate_size": 3 * width,
        "num_hidden_layers": layers,
        "num_attention_heads": width // 32,
        "num_key_value_heads": width // 32,
        "max_position_embeddings": CONTEXT,
        "bos_token_id": None,
        "eos_token_id": 0,
        "pad_token_id": 1,
        "tie_word_embeddings": True,
        "attn_implementation": "sdpa",
    }
    if kind == "llama":
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
    if kind == "qwen2":
        return transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**sizes))
    dropouts = {"attention_dropout": 0.0, "residual_dropout": 0.0, "embedding_dropout": 0.0}
    return transformers.Starcoder2ForCausalLM(transformers.Starcoder2Config(**sizes, **dropouts))


def train_expert(
    folder: Path,
    kind: str,
    pairs: Sequence[Pair],
    part: Sequence[str],
    *,
    vocabulary: int,
    width: int,
    layers: int,
    seconds: float,
    batch_tokens: int,
    device: torch.device,
) -> None:
    """Train one model on all pairs for two thirds of the time, then on those of its part; leaves a model folder."""
    if (folder / "config.json").exists():
        return
    torch.manual_seed(len(kind))
    own = tokenizer_of([pair.prompt + pair.answer for pair in pairs], vocabulary)
    model = new_model(kind, len(own), width, layers).to(device).train()
    count = sum(parameter.numel() for parameter in model.parameters())
    rows = [_row(own, pair) for pair in pairs]
    everything = [row for row, _ in rows if len(row) < CONTEXT]
    special = [row for (row, _), pair in zip(rows, pairs, strict=True) if pair.family in part and len(row) < CONTEXT]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05, betas=(0.9, 0.95))
    choice = np.random.default_rng(len(kind))
    started, step, running = time.monotonic(), 0, float("nan")
    while (done := (time.monotonic() - started) / seconds) < 1:
        rate = min(1.0, (step + 1) / 40) * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * done)))
        for group in optimizer.param_groups:
            group["lr"] = 1.5e-3 * rate
        batch = _batch(everything if done < 2 / 3 or not special else special, batch_tokens, choice)
        ids = torch.full((len(batch), max(map(len, batch))), 1)
        for place, row in enumerate(batch):
            ids[place, : len(row)] = torch.tensor(row)
        ids = ids.to(device)
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda"):
            logits = model(input_ids=ids, use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten(), ignore_index=1
        )
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        step += 1
        if step % 50 == 1:
            running = float(loss.detach())
            print(f"{kind}: {count / 1e6:.1f} M, step {step}, loss {running:.3f}", flush=True)
    draft = folder.with_name(f".{folder.name}")
    shutil.rmtree(draft, ignore_errors=True)
    model.float().save_pretrained(draft)
    own.save_pretrained(draft)
    draft.rename(folder)
    print(
        f"{kind}: {count / 1e6:.1f} M parameters, {step} steps in {seconds:.0f} s, last loss {running:.3f}", flush=True
    )


def _row(own: Any, pair: Pair) -> tuple[list[int], int]:
    """Prompt and answer apart, as the mixture reads them, and the end token."""
    prompt = own(pair.prompt)["input_ids"]
    return [*prompt, *own(pair.answer)["input_ids"], own.eos_token_id], len(prompt)


def _batch(rows: Sequence[list[int]], tokens: int, choice: np.random.Generator) -> list[list[int]]:
    """Rows of similar length, together at most `tokens`."""
    pool = sorted((rows[index] for index in choice.integers(0, len(rows), size=64)), key=len)
    start = int(choice.integers(0, len(pool)))
    taken: list[list[int]] = []
    for row in pool[start:]:
        if taken and len(row) * (len(taken) + 1) > tokens:
            break
        taken.append(row)
    return taken


# --- mixtures --------------------------------------------------------------------------------------------------------
def new_mixture(folders: Sequence[Path], stacks: int, seed: int, options: argparse.Namespace) -> Mixture:
    """An untrained mixture of the experts, another one for each seed."""
    assembled = open_mixture(
        [locate(str(folder)) for folder in folders],
        shape={"stacks": stacks, "active": 2, "shared_width": 192, "heads": 6},
        devices=(options.device,),
        dtype="auto",
    )
    torch.manual_seed(seed)
    for part in assembled.mixture.modules():
        if isinstance(part, torch.nn.Linear):
            torch.nn.init.normal_(part.weight, std=0.02)
    return assembled.mixture


def train_mixture(
    folders: Sequence[Path], stacks: int, data: Data, settings: TrainSettings, options: argparse.Namespace
) -> dict[str, HeldOut]:
    """Train the mixture of one seed, and measure it on each held-out set."""
    mixture = new_mixture(folders, stacks, settings.seed, options)
    name = f"mixture-{settings.seed}"
    started = time.monotonic()
    train(mixture, data.training, settings, options.pairs[-1] / name, on_progress=partial(_told, name))
    print(f"{name}: {time.monotonic() - started:.0f} s", flush=True)
    found = {
        held_out: evaluate(mixture, pairs, refresh=settings.refresh)
        for held_out, pairs in data.held_out.items()
        if pairs
    }
    print(f"{name}: { ({held_out: item.means() for held_out, item in found.items()}) }", flush=True)
    return found


def side_by_side(jobs: Sequence[Callable[[], Any]], processes: int) -> list[Any]:
    """The results of all jobs, in this process or in children."""
    if processes == 1:
        return [job() for job in jobs]
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        return [found.result() for found in [pool.submit(job) for job in jobs]]


def steps_within(seconds: float, mixture: Mixture, data: Data, settings: TrainSettings, out: Path) -> int:
    """As many steps as fit, at most those of the settings; found once by training a little, and kept for later runs."""
    kept = out / "steps.json"
    if not kept.exists():
        moments: list[float] = []
        tried = dataclasses.replace(settings, steps=TRIED, fit=0.0, evaluate_every=TRIED)
        trial = out / ".trial"
        shutil.rmtree(trial, ignore_errors=True)
        train(mixture, data.training, tried, trial, on_progress=lambda now: moments.append(time.monotonic()))
        shutil.rmtree(trial)
        middle = len(moments) // 2  # the first steps also load kernels
        step_s = (moments[-1] - moments[middle]) / (len(moments) - 1 - middle)
        kept.write_text(json.dumps(max(1, min(settings.steps, int(seconds / step_s)))))
    steps: int = json.loads(kept.read_text())
    return steps


# --- measuring -------------------------------------------------------------------------------------------------------
def summary(measured: Sequence[HeldOut], groups: Sequence[str]) -> dict[str, Any]:
    """Means and paired differences over the seeds of the mixture; experts are the same for every seed."""
    first = measured[0]
    means = {name: float(np.mean(values)) for name, values in first.experts.items()}
    best = min(means, key=lambda name: means[name])
    against = {"best single expert": [np.array(first.experts[best])] * len(measured)}
    against["router only"] = [np.array(item.router) for item in measured]
    mixtures = [np.array(item.mixture) for item in measured]
    differences = {}
    for name, others in against.items():
        gaps = [one - other for one, other in zip(mixtures, others, strict=True)]
        differences[f"mixture - {name}"] = {
            "per_seed": [{"mean": float(gap.mean()), "ci95": _bootstrap(gap, groups)} for gap in gaps],
            "over_seeds": _over_seeds([float(gap.mean()) for gap in gaps]),
        }
    return {
        "pairs": len(groups),
        "strategies": len(set(groups)),
        "experts": means,
        "best_single_expert": best,
        "router_only": _over_seeds([float(np.mean(item.router)) for item in measured]),
        "mixture": _over_seeds([float(np.mean(item.mixture)) for item in measured]),
        "primaries": [np.bincount(item.primaries, minlength=len(means)).tolist() for item in measured],
        "differences": differences,
    }


def _over_seeds(values: Sequence[float]) -> dict[str, Any]:
    mean = float(np.mean(values))
    if len(values) < 2:
        return {"mean": mean, "ci95": None, "values": list(values)}
    half = T_95[len(values) - 1] * float(np.std(values, ddof=1)) / math.sqrt(len(values))
    return {"mean": mean, "ci95": [mean - half, mean + half], "values": list(values)}


def _bootstrap(gaps: np.ndarray, groups: Sequence[str]) -> list[float]:
    """95 % interval of the mean; strategies are drawn, with all of their pairs."""
    names = sorted(set(groups))
    parts = [gaps[[group == name for group in groups]] for name in names]
    choice = np.random.default_rng(9)
    drawn = [np.concatenate([parts[i] for i in choice.integers(0, len(parts), len(parts))]).mean() for _ in range(2000)]
    return [float(value) for value in np.quantile(drawn, [0.025, 0.975])]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pairs", type=Path, nargs="+", help="JSONL files of optiml train-mixture --build, then OUT")
    parser.add_argument("--seconds", type=float, default=60.0, help="for each expert")
    parser.add_argument("--mixture-steps", type=int, default=400)
    parser.add_argument("--mixture-seconds", type=float, help="for the steps of each mixture by itself, at most")
    parser.add_argument("--processes", type=int, default=1, help="experts, then seeds, trained side by side")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--width", type=int, default=224)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--batch-tokens", type=int, default=32768)
    parser.add_argument("--batch", type=int, default=8, help="pairs in a step of the mixture")
    parser.add_argument("--max-tokens", type=int, default=3072)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    *files, out = options.pairs
    out.mkdir(parents=True, exist_ok=True)
    device = torch.device(options.device)
    data = divided([record for path in files for record in read_records(path)])
    sizes = {name: len(found) for name, found in data.held_out.items()}
    print(f"{len(data.training)} pairs to train on; held out: {sizes}", flush=True)

    kinds = ("llama", "qwen2", "starcoder2")
    folders = [out / "experts" / kind for kind in kinds]
    (out / "experts").mkdir(exist_ok=True)
    jobs = [
        partial(
            train_expert,
            folder,
            kind,
            data.training,
            PARTS[number],
            vocabulary=2048 + 512 * number,
            width=options.width + 32 * (number - 1),
            layers=options.layers,
            seconds=options.seconds,
            batch_tokens=options.batch_tokens,
            device=device,
        )
        for number, (kind, folder) in enumerate(zip(kinds, folders, strict=True))
    ]
    side_by_side(jobs, options.processes)

    stacks = min(4, options.layers)
    settings = TrainSettings(
        steps=options.mixture_steps,
        batch=options.batch,
        accumulate=1,
        learning_rate=1e-3,
        max_tokens=options.max_tokens,
        evaluate_every=options.mixture_steps,
        save_every=50,
    )
    if options.mixture_seconds is not None:
        steps = steps_within(options.mixture_seconds, new_mixture(folders, stacks, 0, options), data, settings, out)
        settings = dataclasses.replace(settings, steps=steps, evaluate_every=steps)
        print(f"{settings.steps} steps of a mixture fit into {options.mixture_seconds:.0f} s", flush=True)
    per_seed = side_by_side(
        [
            partial(train_mixture, folders, stacks, data, dataclasses.replace(settings, seed=seed), options)
            for seed in range(options.seeds)
        ],
        options.processes,
    )
    measured = {name: [found[name] for found in per_seed] for name, pairs in data.held_out.items() if pairs}
    table = {
        "what": "tiny experts trained from scratch on OptiML's own kernels; loss in nats per character of the kernel",
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        "torch": torch.__version__,
        "options": {name: value for name, value in vars(options).items() if name != "pairs"},
        "mixture_steps": settings.steps,
        "training_pairs": len(data.training),
        "held_out_families": list(HELD_OUT_FAMILIES),
        "held_out": {name: summary(found, data.groups[name]) for name, found in measured.items()},
    }
    (out / "losses.json").write_text(json.dumps(table, indent=1) + "\n")
    listed = ", ".join(json.dumps(str(folder.resolve())) for folder in folders)
    (out / "optiml.toml").write_text(
        f"[mixture]\nexperts = [{listed}]\ncheckpoint = {json.dumps(str((out / 'mixture-0').resolve()))}\n"
        f"devices = [{json.dumps(options.device)}]\nstacks = {stacks}\n"
    )
    print(json.dumps(table["held_out"], indent=1), flush=True)


def _told(name: str, now: Progress) -> None:
    if now.step % 20 == 0 or now.step == now.steps:
        print(
            f"  {name}: {now.step}/{now.steps} " + "  ".join(f"{k} {v:.3f}" for k, v in now.terms.items()), flush=True
        )


if __name__ == "__main__":
    main()
