"""The machine: global memory of one device, and launches of kernels on the interpreter."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from optiml.errors import InvalidInput, Unsupported
from optiml.ptx.counters import SECTOR_BYTES, Counters, Recorder
from optiml.ptx.lower import program_of
from optiml.ptx.memory import FIRST_ALLOCATION, WINDOW_BITS, Allocation
from optiml.ptx.native import execute
from optiml.ptx.native.library import library
from optiml.ptx.native.lowering import NativeProgram
from optiml.ptx.native.splitting import usable_threads
from optiml.ptx.parse import Function, Module
from optiml.ptx.program import Program
from optiml.ptx.registers import ALIGNMENT
from optiml.ptx.simt import WARP, Batch, Budget

BATCH_THREADS = 1 << 14  # arrays of this length stay in the caches
RESIDENT_THREADS = 1 << 16  # batches of kernels whose blocks may wait for one another
COOPERATIVE_THREADS = 1 << 18  # one batch of a kernel with a grid-wide barrier
BATCH_BYTES = 1 << 28  # shared and local memory of one batch
MAX_GRID = (2**31 - 1, 65535, 65535)
MAX_BLOCK = (1024, 1024, 64)
MAX_THREADS = 1024
MAX_SHARED_BYTES = 228 * 1024  # of a block, on any GPU so far
MAX_LOCAL_BYTES = 512 * 1024  # of a thread (CUDA programming guide, "technical specifications per compute capability")


@dataclass(frozen=True, kw_only=True)
class Limits:
    """When a launch is stopped, and what its L1 model assumes.

    Attributes:
        warp_instructions: budget of the launch, None for none.
        deadline: moment of `time.monotonic()`, None for none.
        l1_bytes: L1 capacity of a multiprocessor, shared by `resident_blocks` blocks.
    """

    warp_instructions: int | None = None
    deadline: float | None = None
    l1_bytes: int = 192 * 1024
    resident_blocks: int = 1


@dataclass(frozen=True, kw_only=True)
class LaunchResult:
    """What a launch left besides memory: counters if asked for, device printf text, blocks of the grid and run.

    `engine` says which engine ran it: "native" or "numpy"; `threads` how many threads of this computer shared the work.
    """

    counters: Counters | None
    printf: str
    blocks_total: int
    blocks_run: int
    engine: str = "numpy"
    threads: int = 1


def engine_name() -> str:
    """The engine that runs what it can: "native" if its library was built, else "numpy"."""
    return "numpy" if library() is None else "native"


class LoadedModule:
    """A module on a machine; its module-scope data are allocated when first needed and keep their values."""

    def __init__(self, machine: Machine, module: Module) -> None:
        self.machine = machine
        self.module = module
        self._addresses: dict[str, int] = {}

    def address(self, name: str) -> int:
        """Device address of a module-scope variable."""
        known = self._addresses.get(name)
        if known is not None:
            return known
        variable = self.module.globals[name]
        address = self._addresses[name] = self.machine.allocate(variable.bytes, name=name)
        if variable.initial is not None:
            data = self.machine.memory(address)
            data[: len(variable.initial)] = np.frombuffer(variable.initial, np.uint8)
            for offset, symbol, addend in variable.references:
                target = self.address(symbol) + addend
                data[offset : offset + 8] = np.frombuffer(target.to_bytes(8, "little"), np.uint8)
        return address


class Machine:
    """Global memory of one device plus the two engines.

    Args:
        engine: "auto" runs natively whatever the native engine covers; "numpy" never does.
        threads: threads of this computer that the native engine may use for one launch; by default up to four, and no
            more than this process has cores. Results, counters and faults are the same for any number.
    """

    def __init__(self, *, engine: str = "auto", threads: int | None = None) -> None:
        if engine not in ("auto", "numpy"):
            raise InvalidInput(f"{engine!r} is no engine; choose auto or numpy")
        if threads is not None and threads < 1:
            raise InvalidInput(f"a launch needs at least one thread, not {threads}")
        self._engine = engine
        self._threads = usable_threads() if threads is None else threads
        self._memory: dict[int, Allocation] = {}
        self._next = FIRST_ALLOCATION
        self._workspace: int | None = None  # of the grid-wide barrier

    def allocate(self, nbytes: int, *, name: str = "") -> int:
        """Reserve zeroed memory and return its device address, in a range of its own of 2**36 bytes."""
        if not 0 <= nbytes < 1 << WINDOW_BITS:
            raise InvalidInput(f"an allocation of {nbytes} bytes is out of range")
        try:
            allocation = Allocation(self._next, nbytes, name)
        except MemoryError:
            raise InvalidInput(f"an allocation of {nbytes} bytes does not fit in memory") from None
        self._memory[allocation.number] = allocation
        self._next += 1
        return allocation.base

    def track_writes(self, address: int) -> None:
        """Let the check "uninitialised" report reads of this allocation's bytes that no kernel has written."""
        allocation = self._memory.get(address >> WINDOW_BITS)
        if allocation is None or allocation.base != address:
            raise InvalidInput(f"0x{address:x} is not the start of an allocation")
        allocation.valid = np.zeros(allocation.nbytes, np.uint8)

    def mark_written(self, address: int, offset: int, nbytes: int) -> None:
        """Count bytes of the allocation that starts at `address` as written, where its writes are tracked."""
        allocation = self._memory.get(address >> WINDOW_BITS)
        if allocation is not None and allocation.valid is not None:
            allocation.valid[offset : offset + nbytes] = 1

    def memory(self, address: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """A live uint8 view of the allocation that starts at `address`."""
        allocation = self._memory.get(address >> WINDOW_BITS)
        if allocation is None or allocation.base != address:
            raise InvalidInput(f"0x{address:x} is not the start of an allocation")
        data: np.ndarray[Any, np.dtype[np.uint8]] = allocation.data
        return data

    def free_all(self) -> None:
        """Forget every allocation, module-scope data included; loaded modules must be loaded again."""
        self._memory.clear()
        self._next = FIRST_ALLOCATION
        self._workspace = None

    def _barrier_workspace(self) -> int:
        """Address of cleared memory for the grid-wide barrier of cooperative groups."""
        if self._workspace is None:
            self._workspace = self.allocate(256, name="grid barrier")
        self.memory(self._workspace)[:] = 0
        return self._workspace

    def load(self, module: Module) -> LoadedModule:
        """Make a module's kernels launchable on this machine."""
        return LoadedModule(self, module)

    def launch(
        self,
        loaded: LoadedModule,
        kernel: str,
        *,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        shared_bytes: int,
        args: Sequence[bytes],
        count: bool = False,
        blocks: Sequence[int] | None = None,
        limits: Limits | None = None,
        checks: frozenset[str] = frozenset(),
        unwritten: int = 0xFF,
    ) -> LaunchResult:
        """Run a kernel to its end.

        Args:
            shared_bytes: dynamic shared memory per block.
            args: one bytes object per parameter, as long as the parameter.
            count: fill `LaunchResult.counters`.
            blocks: linear ids of the blocks to run, in this order; None for the whole grid.
            checks: "race" and "uninitialised" look for these faults too, which takes longer. Only the native engine
                can; a kernel that it does not cover is run without (see `LaunchResult.engine`).
            unwritten: byte that shared and local memory hold until something is written; the numpy engine fills
                them with 0xFF whatever this says.

        Raises:
            KernelFault: the kernel broke a rule or outlived its limits.
            Unsupported: the kernel has an instruction that the interpreter does not execute.
            InvalidInput: the call does not fit the kernel.
        """
        limits = limits or Limits()
        function = loaded.module.functions.get(kernel)
        if function is None or not function.kernel:
            raise InvalidInput(f"the module has no kernel {kernel!r}")
        total = _check_call(function, grid, block, shared_bytes, args)
        if not checks <= set(execute.CHECKS):
            raise InvalidInput(f"unknown checks {sorted(checks - set(execute.CHECKS))}")
        shared = -(-function.static_shared_bytes // function.dynamic_shared_align) * function.dynamic_shared_align
        shared = shared + shared_bytes if shared_bytes else function.static_shared_bytes
        parameters = _parameter_area(function, args)
        native = execute.native_program(loaded.module, kernel) if self._engine == "auto" else None
        if native is not None:
            _check_local(native.program, kernel)
            return self._launch_natively(
                native, loaded, grid=grid, block=block, shared=shared, dynamic=shared_bytes, total=total,
                parameters=parameters, count=count, blocks=blocks, limits=limits, checks=checks,
                unwritten=unwritten,
            )  # fmt: skip
        aligned = frozenset(
            param.offset
            for param, value in zip(function.params, args, strict=True)
            if len(value) == 8 and value[0] % ALIGNMENT == 0
        )
        program = program_of(loaded.module, kernel, counting=count, aligned=aligned)
        _check_local(program, kernel)
        recorder = None
        if count:
            share = limits.l1_bytes // max(1, limits.resident_blocks)
            recorder = Recorder(program, share // SECTOR_BYTES)
        workspace = self._barrier_workspace() if program.grid_barrier else 0
        template = _template(program, loaded, parameters, grid, block, shared, shared_bytes, workspace)
        budget = Budget(limits.warp_instructions, limits.deadline)
        printed: list[str] = []
        ran = 0
        with np.errstate(all="ignore"):
            for chosen in _batches(program, total, blocks, block, shared):
                batch = Batch(
                    program,
                    template=template,
                    memory=self._memory,
                    parameters=parameters,
                    grid=grid,
                    block=block,
                    shared_bytes=shared,
                    blocks=chosen,
                    recorder=recorder,
                    budget=budget,
                    printed=printed,
                )
                ran += len(chosen)
                if recorder is not None:
                    recorder.begin(batch)
                batch.run()
                if recorder is not None:
                    recorder.end()
        return LaunchResult(
            counters=None if recorder is None else recorder.counters(),
            printf="".join(printed),
            blocks_total=total,
            blocks_run=ran,
        )

    def _launch_natively(
        self, native: NativeProgram, loaded: LoadedModule, *, grid: tuple[int, int, int],
        block: tuple[int, int, int], shared: int, dynamic: int, total: int, parameters: bytes, count: bool,
        blocks: Sequence[int] | None, limits: Limits, checks: frozenset[str], unwritten: int,
    ) -> LaunchResult:  # fmt: skip
        if blocks is not None:
            _check_blocks(np.asarray(blocks, np.int64), total)
        workspace = 0
        if native.program.grid_barrier:
            _check_cooperative(total, block, shared)
            workspace = self._barrier_workspace()
        addresses = {name: loaded.address(name) for _, name, _ in native.program.symbols}
        counters, printed, ran, shared_by = execute.run(
            execute.Call(
                program=native,
                allocations=self._memory,
                parameters=parameters,
                values={
                    name: _launch_value(name, grid, block, shared, dynamic, workspace)
                    for name in native.program.launch_values
                },
                addresses=addresses,
                grid=grid,
                block=block,
                shared_bytes=shared,
                total=total,
                blocks=blocks,
                count=count,
                checks=checks,
                unwritten=unwritten,
                warp_instructions=limits.warp_instructions,
                deadline=limits.deadline,
                l1_bytes=limits.l1_bytes // max(1, limits.resident_blocks),
                threads=self._threads,
            )
        )
        return LaunchResult(
            counters=counters, printf=printed, blocks_total=total, blocks_run=ran, engine="native", threads=shared_by
        )


def _check_local(program: Program, kernel: str) -> None:
    if program.local_bytes > MAX_LOCAL_BYTES:
        raise InvalidInput(
            f"{kernel} needs {program.local_bytes} bytes of local memory a thread; {MAX_LOCAL_BYTES} exist"
        )


def _check_cooperative(total: int, block: tuple[int, int, int], shared: int) -> None:
    """Refuse a grid-wide barrier over more blocks than fit in memory together."""
    pitch = -(-block[0] * block[1] * block[2] // WARP) * WARP
    most = max(1, min(COOPERATIVE_THREADS // pitch, BATCH_BYTES // max(1, shared)))
    if total > most:
        raise Unsupported(f"a grid-wide barrier over more than {most} blocks of this kernel")


def _check_call(
    function: Function,
    grid: tuple[int, int, int],
    block: tuple[int, int, int],
    shared_bytes: int,
    args: Sequence[bytes],
) -> int:
    """Refuse a launch that a driver would refuse; the number of blocks."""
    for what, value, most in (("grid", grid, MAX_GRID), ("block", block, MAX_BLOCK)):
        if len(value) != 3 or any(not 1 <= v <= m for v, m in zip(value, most, strict=True)):
            raise InvalidInput(f"{what} {tuple(value)} is outside 1..{most}")
    threads = block[0] * block[1] * block[2]
    limit = MAX_THREADS
    if function.max_threads is not None:
        limit = min(limit, function.max_threads[0] * function.max_threads[1] * function.max_threads[2])
    if threads > limit:
        raise InvalidInput(f"{threads} threads per block, but {function.name} may have at most {limit}")
    required = function.required_threads
    if required is not None and tuple(block) != required:
        raise InvalidInput(f"a block of {tuple(block)}, but {function.name} requires {required} threads")
    if not 0 <= shared_bytes <= MAX_SHARED_BYTES - function.static_shared_bytes:
        raise InvalidInput(
            f"{shared_bytes} bytes of dynamic and {function.static_shared_bytes} of static shared memory"
        )
    if len(args) != len(function.params):
        raise InvalidInput(f"{function.name} has {len(function.params)} parameters, {len(args)} were given")
    for param, content in zip(function.params, args, strict=True):
        if len(content) != param.bytes:
            raise InvalidInput(f"parameter {param.name} has {param.bytes} bytes, {len(content)} were given")
    return grid[0] * grid[1] * grid[2]


def _parameter_area(function: Function, args: Sequence[bytes]) -> bytes:
    area = bytearray(max((p.offset + p.bytes for p in function.params), default=0))
    for param, value in zip(function.params, args, strict=True):
        area[param.offset : param.offset + param.bytes] = value
    return bytes(area)


# special registers with a value that no program should depend on, and those of a cluster of one block
_FIXED = {
    "%nwarpid": 64, "%smid": 0, "%nsmid": 108, "%gridid": 1, "%WARP_SZ": WARP, "%cluster_nctaid": 1,
    "%cluster_ctaid": 0, "%cluster_ctarank": 0, "%cluster_nctarank": 1,
}  # fmt: skip


def _template(
    program: Program, loaded: LoadedModule, parameters: bytes, grid: tuple[int, int, int],
    block: tuple[int, int, int], shared: int, dynamic: int, workspace: int,
) -> list[Any]:  # fmt: skip
    """The frame every group starts from: literals, parameters, addresses and launch geometry."""
    frame = program.base.copy()
    for slot, offset, dtype in program.parameters:
        frame[slot] = np.frombuffer(parameters[offset : offset + dtype.itemsize], dtype).copy()
    for slot, name, addend in program.symbols:
        frame[slot] = np.array([loaded.address(name) + addend], np.uint64)
    for name, slot in program.launch_values.items():
        value = _launch_value(name, grid, block, shared, dynamic, workspace)
        frame[slot] = np.array([value], np.uint64 if name == "%gridid" else np.uint32)
    for slot, original in program.flat:
        frame[slot] = frame[original].reshape(())
    return frame


def _launch_value(
    name: str, grid: tuple[int, int, int], block: tuple[int, int, int], shared: int, dynamic: int, workspace: int
) -> int:
    """A special register with one value per launch."""
    if name.startswith("%ntid"):
        return block["xyz".index(name[-1])]
    if name.startswith(("%nctaid", "%nclusterid")):
        return grid["xyz".index(name[-1])]
    if name.startswith("%envreg"):
        return workspace >> 32 if name == "%envreg1" else workspace & 0xFFFFFFFF
    if name.endswith("_smem_size"):
        return dynamic if name.startswith("%dynamic") else shared
    return _FIXED[name.split(".")[0]]


def _batches(
    program: Program, total: int, blocks: Sequence[int] | None, block: tuple[int, int, int], shared: int
) -> Iterator[Any]:
    """Linear block ids, batch by batch."""
    pitch = -(-block[0] * block[1] * block[2] // WARP) * WARP
    target = RESIDENT_THREADS if program.waits else BATCH_THREADS
    weight = max(1, shared + program.local_bytes * pitch)
    size = max(1, min(target // pitch, BATCH_BYTES // weight))
    if program.grid_barrier:
        size = max(1, min(COOPERATIVE_THREADS // pitch, BATCH_BYTES // weight))
        if size < total:
            raise Unsupported(f"a grid-wide barrier over more than {size} blocks of this kernel")
    if blocks is None:
        for start in range(0, total, size):
            yield np.arange(start, min(start + size, total), dtype=np.int64)
        return
    chosen = np.asarray(blocks, np.int64)
    _check_blocks(chosen, total)
    for start in range(0, len(chosen), size):
        yield chosen[start : start + size]


def _check_blocks(chosen: Any, total: int) -> None:
    if len(chosen) and not 0 <= int(chosen.min()) <= int(chosen.max()) < total:
        raise InvalidInput(f"block ids must be in 0..{total - 1}")
