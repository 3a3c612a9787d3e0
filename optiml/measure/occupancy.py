"""How many blocks of a launch fit on one SM at a time, and what limits them."""

from __future__ import annotations

from typing import Literal

from optiml.measure.hardware import WARP_THREADS, Hardware
from optiml.records import Occupancy

Limiter = Literal["threads", "blocks", "registers", "shared_memory"]


def occupancy(
    hardware: Hardware, *, threads_per_block: int, registers_per_thread: int | None, shared_bytes_per_block: int
) -> Occupancy:
    """Theoretical occupancy of a launch: the least of `block_limits`, and the warps that many blocks have.

    On a tie the first of threads, blocks, registers, shared memory is named: a launch that fills the SM's threads is
    limited by nothing else.
    """
    limits = block_limits(
        hardware,
        threads_per_block=threads_per_block,
        registers_per_thread=registers_per_thread,
        shared_bytes_per_block=shared_bytes_per_block,
    )
    limiter = min(limits, key=lambda name: limits[name])
    blocks = limits[limiter]
    warps = -(-threads_per_block // WARP_THREADS)
    return Occupancy(
        theoretical_pct=100.0 * blocks * warps / hardware.max_warps_per_sm, limiter=limiter, blocks_per_sm=blocks
    )


def block_limits(
    hardware: Hardware, *, threads_per_block: int, registers_per_thread: int | None, shared_bytes_per_block: int
) -> dict[Limiter, int]:
    """Blocks per SM that each resource allows.

        warps         = ceil(threads / 32)
        threads       = warps per SM // warps
        blocks        = blocks per SM
        registers     = round_down(registers per SM // round_up(32 x registers, 256), 4) // warps
        shared_memory = shared per SM // round_up(shared + 1 KiB, 128 B)

    Args:
        threads_per_block: product of the block's sizes, at least 1.
        registers_per_thread: from ptxas; None leaves registers out.
        shared_bytes_per_block: static and dynamic shared memory together; 0 leaves shared memory out.

    Source: CUDA occupancy calculator; unit sizes in `optiml.measure.hardware`.
    """
    warps = -(-threads_per_block // WARP_THREADS)
    limits: dict[Limiter, int] = {
        "threads": hardware.max_warps_per_sm // warps,
        "blocks": hardware.max_blocks_per_sm,
    }
    if registers_per_thread:
        per_warp = _round_up(WARP_THREADS * registers_per_thread, hardware.register_unit_per_warp)
        fitting = hardware.registers_per_sm // per_warp
        limits["registers"] = (fitting - fitting % hardware.schedulers_per_sm) // warps  # as many on each scheduler
    if shared_bytes_per_block:
        shared = _round_up(shared_bytes_per_block + hardware.shared_reserved_bytes, hardware.shared_unit_bytes)
        limits["shared_memory"] = hardware.shared_bytes_per_sm // shared
    return limits


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit
