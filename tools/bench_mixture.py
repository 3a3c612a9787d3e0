"""Times cached writing of the mixture against running the whole forward pass for each token, and counts tokens.

    python tools/bench_mixture.py [--quick] [-o benchmarks/mixture.json]

Three random experts of the sizes of a 135 M parameter model (30 layers of width 576, 49 152 tokens) stand in for real
ones: what they write is noise, what it costs is not. All figures are of one process with one thread, and ratios within
one run, so that a busy machine changes them little.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from optiml.mixture.decode import Sampling, write
from optiml.mixture.experts import Expert
from optiml.mixture.mixture import Mixture, MixtureShape, batch_of
from optiml.mixture.router import log_gates
from optiml.mixture.tokens import TextStream, TextTokenizer

PROMPT_TOKENS = 256
ORDER = (0, 1, 2)
CORPUS = (
    'extern "C" __global__ void softmax(const float* x, float* y, int R, int C) { int r = blockIdx.x; '
    "for (int c = threadIdx.x; c < C; c += blockDim.x) y[r * C + c] = __expf(x[r * C + c]); __syncthreads(); }",
)


def tokenizer(vocabulary: int, name: str) -> TextTokenizer:
    """Byte-level BPE, small: the embedding has the size of the real one all the same."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=["<end>"], initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(CORPUS, trainer)
    return TextTokenizer(transformers.PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>"), name)


def random_expert(kind: str, own: TextTokenizer, *, layers: int, width: int, vocabulary: int) -> Expert:
    """Of the given sizes; only tokens that its tokenizer knows can be drawn."""
    sizes: dict[str, Any] = {
        "vocab_size": vocabulary,
        "hidden_size": width,
        "intermediate_size": width * 8 // 3,
        "num_hidden_layers": layers,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "max_position_embeddings": 2048,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        "tie_word_embeddings": True,
        "attn_implementation": "sdpa",
    }
    build = {
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
        "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
        "starcoder2": (transformers.Starcoder2Config, transformers.Starcoder2ForCausalLM),
    }[kind]
    torch.manual_seed(len(kind))
    expert = Expert(build[1](build[0](**sizes)), own, stacks=4)
    expert.end_ids = frozenset()
    return expert


def printable_only(expert: Expert) -> None:
    """Make tokens that are no ASCII text impossible, so that each adds characters."""
    bias = torch.full((expert.facts.vocabulary_size,), -1e4)
    for number in range(1, expert.tokenizer.vocabulary_size):
        text = expert.tokenizer.decode([number])
        if text.isascii() and text.isprintable():
            bias[number] = 0.0
    head = expert.model.lm_head
    expert.model.lm_head = torch.nn.Linear(head.in_features, head.out_features, dtype=head.weight.dtype)
    expert.model.lm_head.weight, expert.model.lm_head.bias = head.weight, torch.nn.Parameter(bias, requires_grad=False)


@torch.no_grad()
def rerun(mixture: Mixture, prompt: str, ids: tuple[int, ...]) -> None:
    """One forward pass over the whole text for each token, as a mixture without caches writes."""
    own = mixture.experts[ORDER[0]].tokenizer
    view, stream = own.view(prompt), TextStream(own)
    limits = list(view.ends)
    gates = log_gates(mixture.scores([prompt]), torch.tensor([ORDER]))
    for token in ids:
        row = ((*view.ids, *stream.ids), limits, prompt + stream.text)
        mixture(batch_of(mixture, ORDER, [row]), gates)[0, -1].argmax()
        stream.push(token)
        limits.append(len(prompt + stream.text))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small experts and few tokens: shows that it runs")
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    layers, width, vocabulary = (8, 144, 4096) if options.quick else (30, 576, 49152)
    kinds = ("llama", "qwen2", "starcoder2")
    owns = [tokenizer(size, kind) for kind, size in zip(kinds, (300, 330, 360), strict=True)]
    experts = [
        random_expert(kind, own, layers=layers, width=width, vocabulary=vocabulary)
        for kind, own in zip(kinds, owns, strict=True)
    ]
    for expert in experts:
        printable_only(expert)
    mixture = Mixture(experts, MixtureShape(stacks=4, active=3, shared_width=256, heads=8)).eval()
    text = CORPUS[0] * 40
    prompt = owns[0].decode(owns[0].view(text).ids[:PROMPT_TOKENS])

    counted = {}
    for refresh in (1, 4, 16, 64):
        tokens = 32 if options.quick or refresh == 1 else 64
        sampling = Sampling(max_tokens=tokens, refresh=refresh, temperature=1.0, seed=1)
        started = time.process_time()
        (written,) = write(mixture, [prompt], sampling, active=[ORDER])
        counted[str(refresh)] = {
            "tokens": written.tokens_out,
            "forwarded": list(written.forwarded),
            "own": list(written.own),
            "ratio": round(sum(written.forwarded) / sum(written.own), 3),
            "cpu_s": round(time.process_time() - started, 2),
        }
        print(f"refresh {refresh}: {counted[str(refresh)]}", flush=True)

    tokens = 8
    times: dict[str, float] = {}
    for name, refresh in (("cached_refresh_16", 16), ("cached_refresh_1", 1)):
        started = time.process_time()
        (written,) = write(
            mixture, [prompt], Sampling(max_tokens=tokens, refresh=refresh, temperature=1.0, seed=1), active=[ORDER]
        )
        times[name] = time.process_time() - started
    started = time.process_time()
    rerun(mixture, prompt, written.ids)
    times["whole_forward"] = time.process_time() - started
    result = {
        "what": "random experts; CPU seconds of one process with one thread, prompt included",
        "parameters": [sum(value.numel() for value in expert.model.parameters()) for expert in experts],
        "prompt_tokens": len(owns[0].view(prompt).ids),
        "new_tokens": tokens,
        "cpu_s": {name: round(value, 2) for name, value in times.items()},
        "speedup": {
            name: round(times["whole_forward"] / value, 2) for name, value in times.items() if name != "whole_forward"
        },
        "forwarded_over_own_tokens": counted,
        "torch": torch.__version__,
        "machine": platform.machine(),
        "quick": options.quick,
    }
    print(json.dumps(result, indent=1))
    if options.output is not None:
        options.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
