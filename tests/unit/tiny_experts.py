"""Three tiny random experts of different architectures, vocabularies and widths, written as model folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Starcoder2Config,
    Starcoder2ForCausalLM,
)

CORPUS = (
    'extern "C" __global__ void relu(const float* x, float* y, int n) { int i = blockIdx.x * blockDim.x + threadIdx.x; '
    "if (i < n) y[i] = x[i] > 0.0f ? x[i] : 0.0f; }",
    "row softmax over the last axis, shared memory, warp shuffles; sum of all elements; naïve é 数 kernels",
)


def tokenizer(vocabulary: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE with up to `vocabulary` tokens; 256 and two special ones are the least."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=["<end>", "<pad>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    made.train_from_iterator(CORPUS, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>", pad_token="<pad>")


def model(kind: str, vocabulary: int, *, seed: int) -> Any:
    """A random model of four layers."""
    sizes = {
        "vocab_size": vocabulary,
        "num_hidden_layers": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "bos_token_id": None,
        "eos_token_id": 0,
        "pad_token_id": 1,
        "initializer_range": 0.2,
    }
    torch.manual_seed(seed)
    if kind == "llama":
        return LlamaForCausalLM(
            LlamaConfig(
                hidden_size=32, intermediate_size=48, num_attention_heads=4, attn_implementation="sdpa", **sizes
            )
        )
    if kind == "qwen2":
        return Qwen2ForCausalLM(
            Qwen2Config(
                hidden_size=24,
                intermediate_size=40,
                num_attention_heads=4,
                attn_implementation="sdpa",
                use_sliding_window=True,
                sliding_window=24,
                max_window_layers=2,
                **sizes,
            )
        )
    return Starcoder2ForCausalLM(
        Starcoder2Config(
            hidden_size=40,
            intermediate_size=64,
            num_attention_heads=4,
            attn_implementation="sdpa",
            sliding_window=32,
            **sizes,
        )
    )


KINDS = (("llama", 300), ("qwen2", 340), ("starcoder2", 258))
SPARE = 8  # rows of the embedding that no token uses, as real models have; some tokenizers add a token when loaded


def write_experts(folder: Path) -> tuple[Path, ...]:
    """Three model folders."""
    folders = []
    for seed, (kind, vocabulary) in enumerate(KINDS):
        made = tokenizer(vocabulary)
        where = folder / kind
        model(kind, len(made) + SPARE, seed=seed).save_pretrained(where)
        made.save_pretrained(where)
        folders.append(where)
    return tuple(folders)
