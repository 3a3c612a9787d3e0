"""From files to experts in memory: only what fits, only formats that hold no code, all or none."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from optiml.errors import ModelFailed
from optiml.mixture.experts import Expert
from optiml.mixture.files import ExpertFiles, digest_of, memory_bytes, memory_free_bytes
from optiml.mixture.tokens import TextTokenizer

LOG = logging.getLogger(__name__)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
_GIB = 1 << 30


def device_named(name: str) -> torch.device:
    """`auto` (the first GPU, or the CPU), `cpu`, or `cuda:N`.

    Raises:
        ModelFailed: there is no such device.
    """
    if name == "auto":
        return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ModelFailed(f"{name[:40]!r} is no device for a model: use auto, cpu or cuda:N") from error
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ModelFailed(f"{name} is not here: this machine has {torch.cuda.device_count()} CUDA devices for models")
    if device.type not in ("cpu", "cuda"):
        raise ModelFailed(f"{name[:40]!r} is no device for a model: use auto, cpu or cuda:N")
    return torch.device("cuda", device.index or 0) if device.type == "cuda" else device


def dtype_named(name: str, device: torch.device) -> str:
    """`auto` is bfloat16 on a GPU and float32 elsewhere."""
    if name == "auto":
        return "bfloat16" if device.type == "cuda" else "float32"
    if name not in DTYPES:
        raise ModelFailed(f"{name[:40]!r} is no dtype for a model: use auto, {', '.join(DTYPES)}")
    return name


def load_experts(
    files: Sequence[ExpertFiles],
    *,
    stacks: int,
    devices: Sequence[str] = ("auto",),
    dtype: str = "auto",
    four_bit: bool = False,
) -> tuple[Expert, ...]:
    """Load every expert, or none.

    Args:
        files: where they are.
        stacks: Q; each is cut into so many parts.
        devices: one for all, or one for each.
        dtype: of their weights.
        four_bit: keep the weights in 4 bits, with bitsandbytes.

    Raises:
        ModelFailed: they do not fit into memory, bitsandbytes is missing, or one cannot be used as an expert.
    """
    if len(devices) not in (1, len(files)):
        raise ModelFailed(f"{len(devices)} devices are named for {len(files)} experts: name one, or one for each")
    placed = [device_named(name) for name in (devices if len(devices) == len(files) else [devices[0]] * len(files))]
    if four_bit and find_spec("bitsandbytes") is None:
        raise ModelFailed("4-bit experts need bitsandbytes: pip install bitsandbytes, or set four_bit = false")
    dtypes = [dtype_named(dtype, device) for device in placed]
    kinds = ["4bit" if four_bit else name for name in dtypes]
    _refuse_too_big(files, placed, kinds)
    transformers.utils.logging.disable_progress_bar()
    return tuple(
        _load(item, stacks=stacks, device=device, dtype=name, four_bit=four_bit)
        for item, device, name in zip(files, placed, dtypes, strict=True)
    )


def free_bytes(device: torch.device) -> int:
    """Memory that is free on a device."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return memory_free_bytes()


def _refuse_too_big(files: Sequence[ExpertFiles], devices: Sequence[torch.device], dtypes: Sequence[str]) -> None:
    for device in dict.fromkeys(devices):
        here = [(item, kind) for item, where, kind in zip(files, devices, dtypes, strict=True) if where == device]
        needed = sum(memory_bytes(item, kind) for item, kind in here)
        free = free_bytes(device)
        if needed > free:
            names = ", ".join(item.name for item, _ in here)
            raise ModelFailed(
                f"{names} need about {needed / _GIB:.1f} GiB on {device} and {free / _GIB:.1f} GiB are free: use fewer "
                "or smaller experts, another dtype, or four_bit = true"
            )


def _load(files: ExpertFiles, *, stacks: int, device: torch.device, dtype: str, four_bit: bool) -> Expert:
    folder, extra = (files.path, {}) if files.path.is_dir() else (files.path.parent, {"gguf_file": files.path.name})
    options: dict[str, Any] = {"attn_implementation": "sdpa", "dtype": DTYPES[dtype], **extra}
    if four_bit:
        options["quantization_config"] = transformers.BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=DTYPES[dtype]
        )
        options["device_map"] = {"": device}
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True, **extra)
        text_tokenizer = TextTokenizer(tokenizer, files.name)
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, local_files_only=True, use_safetensors=not files.is_gguf, **options
        )
    except (OSError, ValueError, KeyError, RuntimeError, ImportError) as error:
        LOG.info("loading %s failed", files.name, exc_info=error)
        first_line = (str(error).splitlines() or [""])[0].replace(str(files.path.parent), "…")
        raise ModelFailed(f"expert {files.name} cannot be loaded: {first_line[:300]}") from error
    if not four_bit:
        model = model.to(device)
    return Expert(model, text_tokenizer, stacks=stacks, digest=digest_of(files.path))


class FrozenEncoder:
    """A frozen text model as encoder of prompts: its last hidden states, averaged over the tokens.

    Args:
        files: of an encoder or decoder that transformers' `AutoModel` knows.
        device: where it runs.
    """

    def __init__(self, files: ExpertFiles, device: torch.device) -> None:
        try:
            self._tokenizer = transformers.AutoTokenizer.from_pretrained(files.path, local_files_only=True)
            model = transformers.AutoModel.from_pretrained(files.path, local_files_only=True, use_safetensors=True)
        except (OSError, ValueError, KeyError, RuntimeError, ImportError) as error:
            raise ModelFailed(f"the prompt encoder {files.name} cannot be loaded") from error
        self._model: nn.Module = model.to(device).eval().requires_grad_(False)
        self._device = device
        self._longest = min(int(getattr(model.config, "max_position_embeddings", 512)), 4096)
        self.width = int(model.config.hidden_size)
        self.digest = digest_of(files.path)

    @torch.no_grad()
    def encode(self, prompts: Sequence[str]) -> Tensor:
        """`[B, width]`."""
        rows = []
        for prompt in prompts:
            ids = self._tokenizer(prompt, truncation=True, max_length=self._longest, return_tensors="pt")["input_ids"]
            rows.append(self._model(input_ids=ids.to(self._device)).last_hidden_state[0].float().mean(dim=0))
        return torch.stack(rows)
