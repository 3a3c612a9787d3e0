"""The built-in problems in PyTorch, and the library under each by its name. Imported in the baselines' child only."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

Function = Callable[..., Any]
NEEDS: Mapping[str, str] = {"flash_attention": "FlashAttention takes float16 and bfloat16 only"}


def vendor_paths(problem: str) -> dict[str, Function]:
    """Functions by name: `torch` is what a user writes, the others force one library where torch has a choice."""
    return {"torch": _EAGER[problem], **_VENDOR.get(problem, {})}


def _matmul(a: Any, b: Any) -> Any:
    return torch.matmul(a, b)


def _through(library: str) -> Function:
    def run(a: Any, b: Any) -> Any:
        before = torch.backends.cuda.preferred_blas_library()
        torch.backends.cuda.preferred_blas_library(library)
        try:
            return torch.mm(a, b)
        finally:
            torch.backends.cuda.preferred_blas_library(before)

    return run


def _conv2d(x: Any, w: Any, stride: int, padding: int) -> Any:
    return functional.conv2d(x, w, stride=stride, padding=padding)


def _conv2d_cudnn(x: Any, w: Any, stride: int, padding: int) -> Any:
    with torch.backends.cudnn.flags(enabled=True, benchmark=True, allow_tf32=False):
        return functional.conv2d(x, w, stride=stride, padding=padding)


def _attention(q: Any, k: Any, v: Any) -> Any:
    scores = torch.matmul(q, k.transpose(2, 3)) / q.shape[3] ** 0.5
    return torch.matmul(torch.softmax(scores, dim=3), v)


def _sdpa(q: Any, k: Any, v: Any) -> Any:
    return functional.scaled_dot_product_attention(q, k, v)


def _sdpa_flash(q: Any, k: Any, v: Any) -> Any:
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return functional.scaled_dot_product_attention(q, k, v)


def _sdpa_efficient(q: Any, k: Any, v: Any) -> Any:
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
        return functional.scaled_dot_product_attention(q, k, v)


def _histogram(x: Any, bins: int) -> Any:
    return torch.bincount(x.clamp(-1, bins) + 1, minlength=bins + 2)[1 : bins + 1].to(torch.int32)


def _cross_entropy(x: Any, labels: Any) -> Any:
    return functional.cross_entropy(x, labels.long(), ignore_index=-100, reduction="none")


def _max_pool3d(x: Any, window: int, stride: int, padding: int) -> Any:
    return functional.max_pool3d(x, window, stride=stride, padding=padding)


_EAGER: Mapping[str, Function] = {
    "relu": lambda x: torch.relu(x),
    "gelu": lambda x: functional.gelu(x),
    "vector_add": lambda a, b: a + b,
    "dot": lambda a, b: torch.dot(a, b),
    "sum": lambda x: torch.sum(x),
    "softmax": lambda x: torch.softmax(x, dim=1),
    "layernorm": lambda x, weight, bias: functional.layer_norm(x, (x.shape[1],), weight, bias, 1e-5),
    "rmsnorm": lambda x, weight: functional.rms_norm(x, (x.shape[1],), weight, 1e-6),
    "matmul": _matmul,
    "matrix_copy": lambda x: x.clone(),
    "transpose": lambda x: x.t().contiguous(),
    "max_pool3d": _max_pool3d,
    "cross_entropy": _cross_entropy,
    "multi_head_attention": _attention,
    "histogram": _histogram,
    "prefix_sum": lambda x: torch.cumsum(x, dim=0),
    "conv2d": _conv2d,
}
_VENDOR: Mapping[str, Mapping[str, Function]] = {
    "matmul": {"cublas": _through("cublas"), "cublaslt": _through("cublaslt")},
    "dot": {"cublas": lambda a, b: torch.dot(a, b)},
    "conv2d": {"cudnn": _conv2d_cudnn},
    "multi_head_attention": {
        "sdpa": _sdpa,
        "sdpa_efficient": _sdpa_efficient,
        "flash_attention": _sdpa_flash,
    },
    "prefix_sum": {"cub": lambda x: torch.cumsum(x, dim=0)},
}
