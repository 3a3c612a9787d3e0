"""Run a problem's reference, in a sandboxed child. Built-in references are our own code; a stranger's is not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from optiml.errors import Busy, InvalidInput, SetupError, WorkerDied, WorkerTimeout
from optiml.problems.data import array_shape, is_float, raw, storage_dtype, to_float64
from optiml.problems.problem import builtin_names, load_builtin, names_of
from optiml.process import Worker
from optiml.records import Problem, Workload
from optiml.sandbox import Policy

Array = NDArray[Any]
MEMORY_BYTES = 8 << 30


@dataclass(frozen=True, kw_only=True)
class Expected:
    """What the reference computed for one workload, by output name."""

    exact: Mapping[str, Array]  # float64, or the integers of an integer output
    same_dtype: Mapping[str, Array] | None  # the same computation in the declared dtype, None where it failed


class References:
    """References behind one warm child."""

    def __init__(self, *, timeout_s: float = 20.0, trust: bool = False) -> None:
        self._timeout_s = timeout_s
        self._trust = trust
        self._worker = Worker("optiml.verify.reference_child", policy=Policy(address_space_bytes=MEMORY_BYTES))

    def expected(self, problem: Problem, workload: Workload, inputs: Mapping[str, Array]) -> Expected:
        """Run the reference on `inputs` (storage dtype).

        Raises:
            InvalidInput: the reference fails, takes too long, or gives other shapes than declared.
            Busy: a built-in reference was not given the time or memory that it needs.
            SetupError: code `no_sandbox`: a foreign reference, no sandbox, and no trust.
        """
        source = problem.reference
        if not isinstance(source, str):
            raise TypeError("a kernel oracle is run on the device, not here")
        self._admit(source, drafted=problem.drafted)
        names = names_of(problem, workload.axes, workload.scalars)
        order = list(inputs)
        header = {
            "source": source,
            "framework": problem.reference_framework,
            "names": {key: value for key, value in names.items()},
            "arrays": [
                {"name": name, "shape": list(inputs[name].shape), "dtype": problem.inputs[name].dtype} for name in order
            ],
            "outputs": [{"name": name, "dtype": tensor.dtype} for name, tensor in problem.outputs.items()],
        }
        blobs = [
            raw(
                to_float64(inputs[name], problem.inputs[name].dtype)
                if is_float(problem.inputs[name].dtype)
                else inputs[name]
            )
            for name in order
        ]
        try:
            reply, answers = self._worker.call(header, blobs, timeout_s=self._timeout_s)
        except WorkerTimeout as error:
            if _is_built_in(source):
                raise Busy(
                    f"the reference of {problem.name} did not end within {self._timeout_s:g} s on this busy machine: "
                    "try again, or raise OPTIML_REFERENCE_TIMEOUT_S"
                ) from error
            raise InvalidInput(
                f"the reference of {problem.name} did not end within {self._timeout_s:g} s at {dict(workload.axes)}"
            ) from error
        except WorkerDied as error:
            if error.cancelled:  # we are closing: the reference is not to blame
                raise
            if _is_built_in(source):
                raise Busy(f"the process of {problem.name}'s reference was ended from outside: try again") from error
            raise InvalidInput(f"the reference of {problem.name} ended its process at {dict(workload.axes)}") from error
        if "error" in reply:
            raise InvalidInput(f"the reference of {problem.name} failed at {dict(workload.axes)}: {reply['error']}")
        shapes = {name: array_shape(tensor.shape or (), names) for name, tensor in problem.outputs.items()}
        count = len(problem.outputs)
        exact = _named(problem, shapes, answers[:count], reply["exact"])
        same = _named(problem, shapes, answers[count:], reply["same"]) if reply["same"] else None
        return Expected(exact=exact, same_dtype=same)

    def _admit(self, source: str, *, drafted: bool) -> None:
        """Refuse foreign text where nothing holds it; a model's text is nobody's own, so trust does not cover it."""
        if (self._trust and not drafted) or _is_built_in(source):
            return
        if not self._worker.layers.strong:
            raise SetupError(
                "this reference was drafted by a model and no sandbox can be set up here: optiml doctor says what is "
                "missing"
                if drafted
                else "this reference is not built in and no sandbox can be set up here: pass --trust-reference if you "
                "wrote it yourself (optiml doctor says what is missing)",
                code="no_sandbox",
            )

    def close(self) -> None:
        self._worker.close()


def _is_built_in(source: str) -> bool:
    """Whether a reference is our own code: then neither its author nor its caller is to blame for it."""
    return any(load_builtin(name).problem.reference == source for name in builtin_names())


def _fits(array: Array, dtype: str) -> bool:
    limits = np.iinfo(storage_dtype(dtype))
    least, most = (0, 1) if dtype == "bool" else (int(limits.min), int(limits.max))
    return least <= int(array.min()) and int(array.max()) <= most


def _without_ones(shape: Sequence[int]) -> list[int]:
    return [extent for extent in shape if extent != 1]


def _named(
    problem: Problem, shapes: Mapping[str, tuple[int, ...]], blobs: list[memoryview], facts: list[Mapping[str, Any]]
) -> dict[str, Array]:
    arrays = {}
    for (name, tensor), blob, fact in zip(problem.outputs.items(), blobs, facts, strict=True):
        array = np.frombuffer(blob, dtype=np.dtype(fact["dtype"]))
        if _without_ones(fact["shape"]) != _without_ones(shapes[name]):
            raise InvalidInput(
                f"the reference of {problem.name} gives {name} the shape {tuple(fact['shape'])}, not {shapes[name]}"
            )
        if not is_float(tensor.dtype) and array.dtype.kind == "f" and not np.array_equal(array, np.rint(array)):
            raise InvalidInput(f"the reference of {problem.name} gives fractions for the integer output {name}")
        if not is_float(tensor.dtype) and array.size and not _fits(array, tensor.dtype):
            raise InvalidInput(
                f"the reference of {problem.name} gives {name} values that {tensor.dtype} cannot hold: wrap or clip "
                "them, or declare a wider dtype"
            )
        arrays[name] = array.reshape(shapes[name])
    return arrays
