"""What a plan is made of: addresses, steps and arrays with every size known."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from optiml.errors import OptimlError
from optiml.problems.data import element_bytes
from optiml.records import DeviceInfo, Reason

MOST_CLUSTER_BLOCKS = 8  # that every device with clusters has room for (CUDA C++ programming guide, clusters)
CLUSTER_ARCH = 90

Role = Literal["input", "output", "inout", "workspace"]


class BadLaunch(OptimlError):
    """The launch plan cannot be carried out at these sizes: the kernel's fault, for `reason` of contract §6."""

    code = "bad_launch"

    def __init__(self, message: str, *, reason: Reason = "bad_launch") -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True, kw_only=True)
class Pointer:
    """An address: `offset` bytes from the start of a named array, or of a module-scope variable if `symbol`."""

    name: str
    offset: int = 0
    symbol: bool = False


@dataclass(frozen=True, kw_only=True)
class Value:
    """Bytes: an argument passed by value, or what a launcher uploads.

    Each of `pointers` (byte position, address) is written over eight bytes of `data` once addresses are known.
    """

    data: bytes
    pointers: tuple[tuple[int, Pointer], ...] = ()


@dataclass(frozen=True, kw_only=True)
class PlannedLaunch:
    """One launch with every size known. `grid`, `block` and `cluster` are x, y, z; a cluster is counted in blocks."""

    symbol: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_bytes: int
    args: tuple[Pointer | Value, ...]
    cluster: tuple[int, int, int] | None = None
    cooperative: bool = False


@dataclass(frozen=True, kw_only=True)
class Memset:
    """Set `nbytes` bytes from `target` on to `value` (0..255)."""

    target: Pointer
    value: int
    nbytes: int


@dataclass(frozen=True, kw_only=True)
class Copy:
    """Copy `nbytes` bytes of device memory; the two ranges do not overlap."""

    source: Pointer
    target: Pointer
    nbytes: int


@dataclass(frozen=True, kw_only=True)
class Upload:
    """Write bytes that the launcher computed on the host into device memory."""

    target: Pointer
    content: Value


Step = PlannedLaunch | Memset | Copy | Upload


@dataclass(frozen=True, kw_only=True)
class PlannedArray:
    """One array of device memory. Workspaces with `zero` are cleared before every run."""

    dtype: str
    shape: tuple[int, ...]
    role: Role
    zero: bool = False

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * element_bytes(self.dtype)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What one call of a kernel does: steps in order on one stream, over arrays.

    A plan in formulas holds launches only; one recorded from a launcher may hold every kind of step, and what the
    launcher allocated is among the arrays as a workspace.
    """

    steps: tuple[Step, ...]
    arrays: Mapping[str, PlannedArray]

    @property
    def launches(self) -> tuple[PlannedLaunch, ...]:
        """The launches among the steps."""
        return tuple(step for step in self.steps if isinstance(step, PlannedLaunch))


def check_limits(
    where: str,
    grid: tuple[int, int, int],
    block: tuple[int, int, int],
    shared: int,
    static: int,
    limits: DeviceInfo,
    *,
    cluster: tuple[int, int, int] | None = None,
) -> None:
    """Refuse what the device would refuse.

    Args:
        where: names the launch in the message.
        shared: bytes of dynamic shared memory per block; `static` those that the kernel declares.

    Raises:
        BadLaunch: a grid, block, cluster or amount of shared memory outside `limits`.
    """
    if min(grid) < 0 or any(size > most for size, most in zip(grid, limits.max_grid, strict=True)):
        raise BadLaunch(f"{where}: a grid of {grid} is outside the device's limits {limits.max_grid}")
    if min(block) <= 0 or any(size > most for size, most in zip(block, limits.max_block, strict=True)):
        raise BadLaunch(f"{where}: a block of {block} is outside the device's limits {limits.max_block}")
    threads = block[0] * block[1] * block[2]
    if threads > limits.max_threads_per_block:
        raise BadLaunch(f"{where}: {threads} threads a block exceed the limit of {limits.max_threads_per_block}")
    if cluster is not None:
        _check_cluster(where, cluster, grid, limits)
    if shared < 0 or shared + static > limits.max_shared_bytes_per_block:
        raise BadLaunch(
            f"{where}: {shared} bytes of dynamic and {static} of static shared memory were asked for; "
            f"the device allows {limits.max_shared_bytes_per_block} a block"
        )


def _check_cluster(
    where: str, cluster: tuple[int, int, int], grid: tuple[int, int, int], limits: DeviceInfo
) -> None:  # fmt: skip
    blocks = cluster[0] * cluster[1] * cluster[2]
    if min(cluster) <= 0 or blocks > MOST_CLUSTER_BLOCKS:
        raise BadLaunch(f"{where}: a cluster of {cluster} is not one of 1 to {MOST_CLUSTER_BLOCKS} blocks")
    if any(size % part for size, part in zip(grid, cluster, strict=True)):
        raise BadLaunch(f"{where}: a grid of {grid} is not a multiple of the cluster of {cluster}")
    if blocks > 1 and int(limits.arch.removeprefix("sm_").rstrip("af")) < CLUSTER_ARCH:
        raise BadLaunch(f"{where}: clusters need sm_{CLUSTER_ARCH} or later, and the device is {limits.arch}")
