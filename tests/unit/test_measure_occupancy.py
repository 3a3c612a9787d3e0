"""Occupancy: figures of NVIDIA's calculator for sm_80 and sm_90."""

from __future__ import annotations

import pytest

from optiml.errors import InvalidInput
from optiml.measure.hardware import A100, H100, HARDWARE, SOURCES, hardware
from optiml.measure.occupancy import occupancy


@pytest.mark.parametrize(
    ("threads", "registers", "shared", "blocks", "limiter"),
    [
        (256, 32, 0, 8, "threads"),
        (32, 16, 0, 32, "blocks"),
        (256, 40, 0, 6, "registers"),
        (256, 255, 0, 1, "registers"),
        (96, 40, 0, 16, "registers"),  # 51 warps fit, 48 of them four to a round
        (128, 32, 48 * 1024, 3, "shared_memory"),
        (1024, 32, 0, 2, "threads"),
        (1, 16, 0, 32, "blocks"),
    ],
)
def test_an_a100_holds_as_many_blocks_as_the_calculator_says(
    threads: int, registers: int, shared: int, blocks: int, limiter: str
) -> None:
    found = occupancy(A100, threads_per_block=threads, registers_per_thread=registers, shared_bytes_per_block=shared)
    assert (found.blocks_per_sm, found.limiter) == (blocks, limiter)


def test_occupancy_counts_warps_not_threads() -> None:
    found = occupancy(A100, threads_per_block=33, registers_per_thread=16, shared_bytes_per_block=0)
    assert found.theoretical_pct == 100.0  # 32 blocks of two warps


def test_unknown_registers_limit_nothing() -> None:
    found = occupancy(A100, threads_per_block=256, registers_per_thread=None, shared_bytes_per_block=0)
    assert found.blocks_per_sm == 8


def test_each_block_pays_the_reserved_kibibyte_of_shared_memory() -> None:
    exactly_half = A100.shared_bytes_per_sm // 2
    assert occupancy(
        A100, threads_per_block=64, registers_per_thread=16, shared_bytes_per_block=exactly_half
    ).blocks_per_sm == 1  # fmt: skip
    assert occupancy(
        A100, threads_per_block=64, registers_per_thread=16, shared_bytes_per_block=exactly_half - 1024
    ).blocks_per_sm == 2  # fmt: skip


def test_a_hopper_sm_has_room_for_more_shared_memory() -> None:
    found = occupancy(H100, threads_per_block=128, registers_per_thread=32, shared_bytes_per_block=48 * 1024)
    assert found.blocks_per_sm == 4


def test_every_constant_has_a_source() -> None:
    fields = set(vars(A100)) - {"key", "name", "arch", "calibration"}
    assert fields == set(SOURCES)


def test_an_unknown_model_names_the_known_ones() -> None:
    assert set(HARDWARE) == {"a100", "h100", "h200"}
    with pytest.raises(InvalidInput, match="a100, h100, h200"):
        hardware("other")
