"""The whole corpus by both compilers for both architectures: every kernel runs natively, faulty ones are caught.

What the sound kernels compute is checked in test_corpus_a.py and test_corpus_bc.py; set OPTIML_CORPUS to run those on
the other texts.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from launching import CHECKS, corpus_module, launch_once

from optiml.errors import KernelFault
from optiml.ptx import Limits, engine_name
from optiml.ptx.native.lowering import NativeLowering

pytestmark = pytest.mark.skipif(engine_name() != "native", reason="the native engine was not built")
TEXTS = ("compute_80", "compute_90", "sm_80", "sm_90")


def zeros(*shape: int, dtype: Any = np.float32) -> np.ndarray[Any, Any]:
    return np.zeros(shape, dtype)


# k_lockbad and k_misal are left out: threads of one warp may take a lock in turns since Volta, and both compilers make
# an aligned scalar load of k_misal.
FAULTY = {
    "oob": ("a", 4, 256, (zeros(1000), zeros(1000), 1000), "out_of_bounds", {16, 17, 18}),
    "race": ("a", 1, 256, (zeros(256) + np.arange(256, dtype=np.float32), zeros(256)), "race", {21, 22}),
    "bardiv": ("a", 1, 64, (zeros(64),), "barrier_divergence", {52}),
    "hang": ("a", 1, 32, (zeros(2, dtype=np.int32),), "timed_out", {53}),
    "k_uninit": ("c", 1, 64, (zeros(64),), "uninitialised", {29}),
    "k_misal2": ("c", 1, 8, (zeros(64), zeros(64)), "misaligned", {37}),
    "k_shoob": ("c", 1, 64, (zeros(64),), "out_of_bounds", {31}),
}


@pytest.mark.parametrize("text", TEXTS)
def test_every_kernel_is_lowered_for_the_native_engine(text: str) -> None:
    count = 0
    for name in "abc":
        module = corpus_module(name, text)
        for kernel in module.kernels.values():
            NativeLowering(module, kernel)
            count += 1
    assert count == 71


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("kernel", FAULTY)
def test_faulty_kernels_are_reported_with_kind_and_line(kernel: str, text: str) -> None:
    file, grid, block, args, kind, lines = FAULTY[kernel]
    with pytest.raises(KernelFault) as raised:
        launch_once(corpus_module(file, text), kernel, grid, block, *args, checks=CHECKS,
                    limits=Limits(warp_instructions=20_000))  # fmt: skip
    assert raised.value.fault.kind == kind
    assert raised.value.fault.line in lines
    assert raised.value.fault.block is not None
    assert raised.value.fault.thread is not None
