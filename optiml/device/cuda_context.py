"""A CUDA context and what is done in it: load cubins, keep buffers, carry out launch plans, take event times.

The one file that imports pycuda, and only children import it: a kernel that breaks the context breaks a process that
is thrown away. Nothing here judges a kernel; it answers raw contents and raw times.

Memory of a plan is one allocation: guard, array, guard, array, ..., guard. Guards hold random NaNs, so that what a
kernel reads there spoils its results, and what it writes there is seen. The order of the arrays and the first address
differ from call to call.
"""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from cuda.bindings import driver as cu  # what pycuda does not wrap: graphs, the persisting part of L2
from numpy.typing import NDArray
from pycuda import driver

from optiml.errors import Fault, InvalidInput, KernelFault, SetupError

Header = dict[str, Any]
Bytes = NDArray[np.uint8]
Step = Callable[[Any], object]  # puts one step on a stream

NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING
ALIGNMENT = 256  # as cudaMalloc gives, in bytes
GUARD_BYTES = 16 << 10
MOST_OFFSETS = 16  # different places of the first array, in steps of ALIGNMENT
KEPT_BYTES = 1 << 30  # an allocation larger than this is freed after its call
SPARE_BYTES = 512 << 20  # left to the driver and to others
LEAST_FLUSH_BYTES = 256 << 20
DEFAULT_SHARED_BYTES = 48 << 10  # dynamic shared memory above this has to be asked for
# What cuGetErrorString says -> kind of fault and what it means (CUDA driver API, CUresult).
FAULTS: Mapping[str, tuple[str, str]] = {
    "illegal memory access": ("out_of_bounds", "it touched an address outside every allocation"),
    "misaligned address": ("misaligned", "it made an access that is not aligned to its size"),
    "unspecified launch failure": ("trap", "it was stopped by a trap or an exception of the hardware"),
    "illegal instruction": ("trap", "it executed a trap or an illegal instruction"),
    "device-side assert": ("trap", "an assertion of its own failed"),
    "invalid program counter": ("illegal", "it jumped outside its code"),
    "operation not supported on global/shared address space": ("illegal", "it used an address of the wrong space"),
    "hardware stack error": ("illegal", "it overran its stack"),
    "launch timed out": ("timed_out", "the driver stopped it because it ran too long"),
}
REFUSALS = ("invalid argument", "too many resources", "invalid resource", "cooperative launch", "invalid value",
            "misconfiguration", "named symbol not found", "invalid cluster", "not supported",
            "out of memory")  # fmt: skip


def describe_devices() -> list[Header]:
    """What the driver says of every device that this process may see; empty where there is none.

    Raises:
        SetupError: code `no_device`, with what the driver says.
    """
    try:
        driver.init()
    except driver.Error as error:
        if "no CUDA-capable device" in str(error):
            return []
        raise SetupError(f"the CUDA driver cannot be used: {error}", code="no_device") from error
    return [_description(index, driver.Device(index)) for index in range(driver.Device.count())]


def _description(index: int, device: Any) -> Header:
    attribute = driver.device_attribute

    def read(name: str) -> int:
        return int(device.get_attribute(getattr(attribute, name)))

    major, minor = device.compute_capability()
    version = driver.get_driver_version()
    return {
        "index": index,
        "name": device.name(),
        "arch": f"sm_{major}{minor}",
        "pci_bus_id": device.pci_bus_id(),
        "memory_bytes": int(device.total_memory()),
        "driver_cuda": f"{version // 1000}.{version % 1000 // 10}",
        "sms": read("MULTIPROCESSOR_COUNT"),
        "l2_bytes": read("L2_CACHE_SIZE"),
        "clock_khz": read("CLOCK_RATE"),
        "max_threads_per_block": read("MAX_THREADS_PER_BLOCK"),
        "max_shared_bytes_per_block": read("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN"),
        "max_grid": [read(f"MAX_GRID_DIM_{axis}") for axis in "XYZ"],
        "max_block": [read(f"MAX_BLOCK_DIM_{axis}") for axis in "XYZ"],
        "max_threads_per_sm": read("MAX_THREADS_PER_MULTIPROCESSOR"),
        "registers_per_sm": read("MAX_REGISTERS_PER_MULTIPROCESSOR"),
        "shared_bytes_per_sm": read("MAX_SHARED_MEMORY_PER_MULTIPROCESSOR"),
    }


@dataclass(frozen=True, kw_only=True)
class Span:
    """One array in an arena."""

    address: int
    nbytes: int


class Arena:
    """The arrays of one plan in one allocation, with guards between them."""

    def __init__(self, base: int, sizes: Mapping[str, int]) -> None:
        names = list(sizes)
        random.shuffle(names)
        self.spans: dict[str, Span] = {}
        self._guards: list[Span] = []
        end = base
        address = base + ALIGNMENT * random.randrange(1, MOST_OFFSETS) + GUARD_BYTES
        for name in names:
            self._guards.append(Span(address=end, nbytes=address - end))
            self.spans[name] = Span(address=address, nbytes=sizes[name])
            end = address + sizes[name]
            address = -(-(end + GUARD_BYTES) // ALIGNMENT) * ALIGNMENT
        self._guards.append(Span(address=end, nbytes=GUARD_BYTES))
        self._written: list[Bytes] = []

    @staticmethod
    def bytes_needed(sizes: Mapping[str, int]) -> int:
        return sum(sizes.values()) + (len(sizes) + 1) * (GUARD_BYTES + ALIGNMENT) + ALIGNMENT * MOST_OFFSETS

    def set_guards(self) -> None:
        """Fill every guard with random quiet NaNs."""
        self._written = []
        for span in self._guards:
            words = np.random.default_rng().integers(0, 1 << 20, -(-span.nbytes // 4), dtype=np.uint32)
            pattern = (words | np.uint32(0x7FC00000)).view(np.uint8)[: span.nbytes]
            driver.memcpy_htod(span.address, pattern)
            self._written.append(pattern)

    def check_guards(self) -> None:
        """Raises: KernelFault: something was written between two arrays."""
        found = np.empty(max(span.nbytes for span in self._guards), dtype=np.uint8)
        for span, written in zip(self._guards, self._written, strict=True):
            read = found[: span.nbytes]
            driver.memcpy_dtoh(read, span.address)
            if not np.array_equal(read, written):
                raise KernelFault(self._overrun(span, int(np.flatnonzero(read != written)[0])))

    def _overrun(self, guard: Span, position: int) -> Fault:
        place = guard.address + position
        before = [
            (place - span.address - span.nbytes, name) for name, span in self.spans.items() if span.address <= place
        ]
        after = [(span.address - place, name) for name, span in self.spans.items() if span.address > place]
        behind, ahead = min(before, default=(place, "")), min(after, default=(place, ""))
        if behind[1] and behind[0] <= ahead[0]:
            where = f"{behind[0]} bytes behind the end of {behind[1]}"
        else:
            where = f"{ahead[0]} bytes before the start of {ahead[1]}"
        return Fault(kind="out_of_bounds", access="write", detail=f"it wrote {where}")


class CudaContext:
    """One context on one device, with a non-blocking stream and memory kept from call to call."""

    def __init__(self, index: int) -> None:
        driver.init()
        self._device = driver.Device(index)
        self._context = self._device.make_context()
        cu.cuCtxSetLimit(cu.CUlimit.CU_LIMIT_PERSISTING_L2_CACHE_SIZE, 0)
        self.stream = driver.Stream(NON_BLOCKING)
        self._memory: Any = None
        self._memory_bytes = 0
        self._timer: Timer | None = None

    def close(self) -> None:
        """Leave the context; the process may then end in an orderly way."""
        self._release()
        self._context.pop()
        self._context.detach()

    def description(self) -> Header:
        return _description(0, self._device)

    # --- running -----------------------------------------------------------------------------------------------------
    def run(self, header: Header, cubin: memoryview, blobs: Sequence[memoryview]) -> tuple[Header, list[memoryview]]:
        """Carry out one plan, once for each set of contents; see `Device.run`."""
        arrays = header["arrays"]
        sizes = {item["name"]: item["nbytes"] for item in arrays}
        needed = Arena.bytes_needed(sizes)
        base = self._allocated(needed)
        answers: list[memoryview] = []
        with _faults():
            module = load(cubin)
            driver.memset_d8_async(base, 0, needed, self.stream)  # nothing that others computed is left to find
            self.stream.synchronize()
            arena = Arena(base, sizes)
            steps = Steps(module, header["steps"], arena.spans)
            for run in range(header["runs"]):
                arena.set_guards()
                for position, item in enumerate(arrays):
                    self.fill(arena.spans[item["name"]], blobs[run * len(arrays) + position])
                driver.Context.synchronize()
                for call in steps.calls:
                    call(self.stream)
                    self.stream.synchronize()
                arena.check_guards()
                if header["outputs"]:
                    answers += [self.contents(arena.spans[item["name"]]) for item in arrays]
            steps.free()
        if self._memory_bytes > KEPT_BYTES:
            self._release()
        return {"launches": [_report(step) for step in header["steps"] if step["kind"] == "launch"]}, answers

    def run_plainly(self, item: Header, folder: Path) -> None:
        """One item of a job (`cuda_job`): every array an allocation of its own, no guards, nothing read back."""
        memory = {array["name"]: allocate(array["nbytes"]) for array in item["arrays"]}
        spans = {
            array["name"]: Span(address=int(memory[array["name"]]), nbytes=array["nbytes"]) for array in item["arrays"]
        }
        with _faults():
            module = load((folder / item["cubin"]).read_bytes())
            for array in item["arrays"]:
                if array["content"] is not None:
                    self.fill(spans[array["name"]], memoryview((folder / array["content"]).read_bytes()))
            driver.Context.synchronize()
            steps = Steps(module, item["steps"], spans)
            for _ in range(item["runs"]):
                for call in steps.calls:
                    call(self.stream)
                    self.stream.synchronize()
            steps.free()
            for piece in memory.values():
                piece.free()

    def fill(self, span: Span, blob: memoryview) -> None:
        """Copy a blob to an array, again and again where it is shorter."""
        if not span.nbytes:
            return
        first = min(len(blob), span.nbytes)
        driver.memcpy_htod(span.address, np.frombuffer(blob, dtype=np.uint8, count=first))
        driver.Context.synchronize()
        done = first
        while done < span.nbytes:
            piece = min(done, span.nbytes - done)
            driver.memcpy_dtod_async(span.address + done, span.address, piece, self.stream)
            done += piece

    def contents(self, span: Span) -> memoryview:
        """What an array holds now."""
        found = np.empty(span.nbytes, dtype=np.uint8)
        if span.nbytes:
            driver.memcpy_dtoh(found, span.address)
        return found.data

    def _allocated(self, nbytes: int) -> int:
        if nbytes > self._memory_bytes:
            self._release()
            self._memory = allocate(nbytes)
            self._memory_bytes = nbytes
        return int(self._memory)

    def _release(self) -> None:
        if self._memory is not None:
            self._memory.free()
        self._memory, self._memory_bytes = None, 0

    # --- timing ------------------------------------------------------------------------------------------------------
    def open_timer(self, header: Header, blobs: Sequence[memoryview]) -> tuple[Header, list[memoryview]]:
        """Load what is to be timed; see `Timer`."""
        self.close_timer()
        self._release()
        with _faults():
            self._timer = Timer(self, header, blobs)
        return {}, []

    def sample(self, header: Header) -> tuple[Header, list[memoryview]]:
        """More samples of the open timer: float32 of shape (rounds, subjects, 2), in microseconds."""
        with _faults():
            times = self._opened().sample(header["rounds"], flush=header["flush"])
        return {}, [np.ascontiguousarray(times).reshape(-1).view(np.uint8).data]

    def timed_outputs(self, header: Header) -> tuple[Header, list[memoryview]]:
        """What the arrays of one subject hold after its last timed launch, and which set it was given."""
        with _faults():
            return self._opened().outputs(header["subject"])

    def repeat(self, header: Header) -> tuple[Header, list[memoryview]]:
        """Launch one subject over and over for some seconds, nothing restored in between: how often, how long."""
        with _faults():
            count, elapsed_s = self._opened().repeat(header["subject"], header["seconds"])
        return {"count": count, "elapsed_s": elapsed_s}, []

    def close_timer(self) -> tuple[Header, list[memoryview]]:
        """Free what the open timer holds."""
        if self._timer is not None:
            self._timer.close()
            self._timer = None
        return {}, []

    def _opened(self) -> Timer:
        if self._timer is None:
            raise InvalidInput("no timer is open on this device")
        return self._timer


class Timer:
    """Several plans ready to be timed in turns.

    Every subject keeps its arrays at one place, and subjects whose arrays have one name and size share that place, so
    that none has the luckier addresses. Before each timed run all arrays of its subject are restored from one of
    several pristine sets in device memory, and L2 is overwritten; neither counts.
    """

    def __init__(self, context: CudaContext, header: Header, blobs: Sequence[memoryview]) -> None:
        self._context = context
        self._stream = context.stream
        self._subjects: list[_Subject] = []
        self._allocations: list[Any] = []
        self._pristine: dict[tuple[int, int], Span] = {}
        self._rounds = 0
        description = context.description()
        self._flush_bytes = max(4 * description["l2_bytes"], LEAST_FLUSH_BYTES)
        self._flush = self._allocate(self._flush_bytes)
        sizes = {_place(array): array["nbytes"] for item in header["subjects"] for array in item["arrays"]}
        self._arena = Arena(self._allocate(Arena.bytes_needed(sizes)), sizes)
        self._last = 0  # the subject that was timed last
        for item in header["subjects"]:
            self._subjects.append(self._load(item, blobs))
        self._arena.set_guards()
        driver.Context.synchronize()

    def _allocate(self, nbytes: int) -> int:
        memory = allocate(nbytes)
        self._allocations.append(memory)
        return int(memory)

    def _load(self, item: Header, blobs: Sequence[memoryview]) -> _Subject:
        spans = {array["name"]: self._arena.spans[_place(array)] for array in item["arrays"]}
        sets: list[dict[str, Span]] = []
        for index in range(len(item["arrays"][0]["blobs"]) if item["arrays"] else 1):
            sets.append({array["name"]: self._upload(array, array["blobs"][index], blobs) for array in item["arrays"]})
        module = load(blobs[item["cubin"]])
        subject = _Subject(spans=spans, sets=sets, steps=Steps(module, item["steps"], spans))
        if item["graph"] and not any(step.get("cluster") for step in item["steps"]):  # those are graphs already
            subject.capture(self._stream)
        return subject

    def _upload(self, array: Header, blob: int, blobs: Sequence[memoryview]) -> Span:
        """A pristine copy in device memory; subjects that are given the same contents share it."""
        key = (blob, array["nbytes"])
        if key not in self._pristine:
            span = Span(address=self._allocate(max(array["nbytes"], 1)), nbytes=array["nbytes"])
            self._context.fill(span, blobs[blob])
            self._pristine[key] = span
        return self._pristine[key]

    def sample(self, rounds: int, *, flush: bool) -> NDArray[np.float32]:
        times = np.zeros((rounds, len(self._subjects), 2), dtype=np.float32)
        for index in range(rounds):
            order = [(number, 0) for number in range(len(self._subjects))]
            order += [(number, 1) for number in reversed(range(len(self._subjects)))]  # A B B A
            taken = []
            for number, half in order:
                subject = self._subjects[number]
                subject.restore(2 * self._rounds + half, self._stream)
                if flush:
                    cu.cuCtxResetPersistingL2Cache()
                    driver.memset_d8_async(self._flush, half, self._flush_bytes, self._stream)
                start, end = driver.Event(), driver.Event()
                start.record(self._stream)
                subject.launch(self._stream)
                end.record(self._stream)
                taken.append((number, half, start, end))
            self._stream.synchronize()
            for number, half, start, end in taken:
                times[index, number, half] = 1000.0 * start.time_till(end)
            self._rounds += 1
            self._last = 0  # A came last
        self._arena.check_guards()
        return times

    def repeat(self, number: int, seconds: float) -> tuple[int, float]:
        subject = self._subjects[number]
        subject.restore(0, self._stream)
        self._last = number
        start, end = driver.Event(), driver.Event()
        start.record(self._stream)
        count, batch, elapsed_s = 0, 1, 0.0
        while elapsed_s < seconds:
            for _ in range(batch):
                subject.launch(self._stream)
            end.record(self._stream)
            end.synchronize()
            count += batch
            elapsed_s = 1e-3 * start.time_till(end)
            batch = min(2 * batch, 1000)
        return count, elapsed_s

    def outputs(self, number: int) -> tuple[Header, list[memoryview]]:
        if number != self._last:
            raise InvalidInput(f"subject {number} was not the last to run: its arrays hold what another one left")
        subject = self._subjects[number]
        contents = [self._context.contents(span) for span in subject.spans.values()]
        return {"names": list(subject.spans), "set": subject.last_set}, contents

    def close(self) -> None:
        driver.Context.synchronize()
        for subject in self._subjects:
            subject.free()
        for memory in self._allocations:
            memory.free()
        self._allocations = []


def _place(array: Header) -> str:
    return f"{array['name']}, {array['nbytes']} bytes"


class _Subject:
    """One loaded plan with its arrays and the sets that they are restored from."""

    def __init__(self, *, spans: dict[str, Span], sets: list[dict[str, Span]], steps: Steps) -> None:
        self.spans = spans
        self.last_set = 0
        self._sets = sets
        self._steps = steps
        self._graph: Any = None

    def capture(self, stream: Any) -> None:
        """Turn the launches into one graph, so that a launch costs the host one call."""
        self._graph = _checked(cu.cuGraphInstantiate(_captured(self._steps, stream), 0))

    def restore(self, turn: int, stream: Any) -> None:
        self.last_set = turn % len(self._sets)
        for name, pristine in self._sets[self.last_set].items():
            if pristine.nbytes:
                driver.memcpy_dtod_async(self.spans[name].address, pristine.address, pristine.nbytes, stream)

    def launch(self, stream: Any) -> None:
        if self._graph is not None:
            _checked(cu.cuGraphLaunch(self._graph, cu.CUstream(stream.handle)))
            return
        self._steps(stream)

    def free(self) -> None:
        self._steps.free()


class Steps:
    """The steps of a plan with every address in place; calling it puts them all on a stream."""

    def __init__(self, module: Any, steps: Sequence[Header], spans: Mapping[str, Span]) -> None:
        self._module = module
        self._spans = spans
        self._staged: list[Any] = []  # device memory of what a launcher computed on the host
        self.calls = [self._prepared(step) for step in steps]
        driver.Context.synchronize()

    def __call__(self, stream: Any) -> None:
        for call in self.calls:
            call(stream)

    def free(self) -> None:
        for memory in self._staged:
            memory.free()
        self._staged = []

    def _prepared(self, step: Header) -> Step:
        if step["kind"] == "launch":
            return self._launch(step)
        if step["kind"] == "memset":
            target, nbytes = self._range(step["target"], step["nbytes"]), step["nbytes"]
            return lambda stream: driver.memset_d8_async(target, step["value"], nbytes, stream)
        if step["kind"] == "copy":
            nbytes = step["nbytes"]
            source, target = self._range(step["source"], nbytes), self._range(step["target"], nbytes)
        else:
            content = self._data(step["content"])
            nbytes, target = len(content), self._range(step["target"], len(content))
            staged = allocate(nbytes)
            self._staged.append(staged)
            driver.memcpy_htod(int(staged), np.frombuffer(content, dtype=np.uint8))
            source = int(staged)
        return lambda stream: driver.memcpy_dtod_async(target, source, nbytes, stream)

    def _launch(self, step: Header) -> Step:
        function = self._module.get_function(step["symbol"])
        grid, block, shared_bytes = tuple(step["grid"]), tuple(step["block"]), step["shared_bytes"]
        if shared_bytes > DEFAULT_SHARED_BYTES:
            function.set_attribute(driver.function_attribute.MAX_DYNAMIC_SHARED_SIZE_BYTES, shared_bytes)
        packed = bytearray()
        for offset, arg in zip(step["offsets"], step["args"], strict=True):
            packed += bytes(offset - len(packed)) + self._data(arg)
        function.prepare([f"{len(packed)}s"])
        arguments = bytes(packed)

        def launch(stream: Any) -> None:
            function.prepared_async_call(grid, block, stream, arguments, shared_size=shared_bytes)

        if step.get("cluster"):
            return _in_clusters(launch, step["cluster"], cooperative=step.get("cooperative", False))
        if step.get("cooperative"):
            return _cooperative(launch, step, arguments)
        return launch

    def _base(self, place: Header) -> tuple[int, int]:
        """Address and size of the array or module-scope variable that a step names."""
        if "array" in place:
            span = self._spans[place["array"]]
            return span.address, span.nbytes
        address, nbytes = self._module.get_global(place["symbol"])
        return int(address), int(nbytes)

    def _range(self, place: Header, nbytes: int) -> int:
        address, size = self._base(place)
        if not 0 <= place["offset"] <= size - nbytes:
            name = place.get("array") or place.get("symbol")
            raise InvalidInput(f"{nbytes} bytes from byte {place['offset']} of {name} on leave its {size} bytes")
        return address + int(place["offset"])

    def _data(self, arg: Header) -> bytes:
        """The bytes of an argument or an upload."""
        if "value" not in arg:
            address = self._base(arg)[0] + int(arg["offset"])
            return (address % (1 << 64)).to_bytes(8, "little")
        content = bytearray.fromhex(arg["value"])
        for position, place in arg["pointers"]:
            content[position : position + 8] = self._data(place)
        return bytes(content)


def _in_clusters(launch: Step, cluster: Sequence[int], *, cooperative: bool) -> Step:
    """A launch in clusters: pycuda's own knows none, so it becomes a graph whose one node is given them."""
    if cooperative:
        raise InvalidInput("a launch that is cooperative and in clusters at once is not supported")
    graph, node = _node(launch)
    value = cu.CUkernelNodeAttrValue()
    value.clusterDim.x, value.clusterDim.y, value.clusterDim.z = cluster
    _checked(cu.cuGraphKernelNodeSetAttribute(node, cu.CUkernelNodeAttrID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION, value))
    executable = _checked(cu.cuGraphInstantiate(graph, 0))
    return lambda stream: _checked(cu.cuGraphLaunch(executable, cu.CUstream(stream.handle)))


def _cooperative(launch: Step, step: Header, arguments: bytes) -> Step:
    """A cooperative launch by the driver's own call, for which the node of a graph tells the function's handle."""
    _, node = _node(launch)
    function = _checked(cu.cuGraphKernelNodeGetParams(node)).func
    packed = ctypes.create_string_buffer(arguments, max(len(arguments), 1))
    base = ctypes.addressof(packed)
    places = (ctypes.c_void_p * max(len(step["offsets"]), 1))(*(base + offset for offset in step["offsets"]))
    sizes = (*step["grid"], *step["block"], step["shared_bytes"])

    def call(stream: Any, _read_at_every_call: object = packed) -> None:
        handle = cu.CUstream(stream.handle)
        _checked(cu.cuLaunchCooperativeKernel(function, *sizes, handle, ctypes.addressof(places)))

    return call


def _node(launch: Step) -> tuple[Any, Any]:
    """One launch as a graph, and the graph's only node."""
    graph = _captured(launch, driver.Stream(NON_BLOCKING))
    nodes, _ = _checked(cu.cuGraphGetNodes(graph, 1))
    return graph, nodes[0]


def _captured(launches: Step, stream: Any) -> Any:
    """The graph of what is put on a stream."""
    handle = cu.CUstream(stream.handle)
    _checked(cu.cuStreamBeginCapture(handle, cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL))
    launches(stream)
    return _checked(cu.cuStreamEndCapture(handle))


def load(cubin: memoryview | bytes) -> Any:
    """A module from a cubin.

    Raises:
        InvalidInput: the driver does not take it.
    """
    try:
        return driver.module_from_buffer(bytes(cubin))
    except driver.Error as error:
        raise InvalidInput(f"the driver refused the binary: {error}") from error


def allocate(nbytes: int) -> Any:
    """Device memory.

    Raises:
        InvalidInput: there is not that much.
    """
    free, _ = driver.mem_get_info()
    if nbytes > free - SPARE_BYTES:
        raise InvalidInput(f"{nbytes} bytes of device memory are needed and {max(free - SPARE_BYTES, 0)} are free")
    return driver.mem_alloc(max(nbytes, 1))


class _faults:
    """Turns what the driver reports inside the block into a fault of the kernel, or a refusal of its launch."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if not isinstance(error, driver.Error):
            return
        raise translated(str(error)) from error


def translated(text: str) -> KernelFault | InvalidInput:
    """What an error of the driver means for the kernel that ran."""
    for phrase, (fault, meaning) in FAULTS.items():
        if phrase in text:
            return KernelFault(Fault(kind=fault, detail=meaning))
    if any(phrase in text for phrase in REFUSALS):
        return InvalidInput(f"the driver refused the launch: {text}")
    return KernelFault(Fault(kind="illegal", detail=f"the driver says: {text}"[:300]))


def _checked(answer: tuple[Any, ...]) -> Any:
    status, *values = answer
    if status != cu.CUresult.CUDA_SUCCESS:
        _, text = cu.cuGetErrorString(status)
        raise translated(text.decode())
    return values[0] if len(values) == 1 else tuple(values) or None


def _report(launch: Header) -> Header:
    total = launch["grid"][0] * launch["grid"][1] * launch["grid"][2]
    return {**{key: launch[key] for key in ("symbol", "grid", "block", "shared_bytes")},
            "blocks_total": total, "blocks_run": total}  # fmt: skip
