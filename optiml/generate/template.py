"""A kernel file to fill in: launch plan, signature and the task as comments, for any problem."""

from __future__ import annotations

from collections.abc import Mapping

from optiml.kernel_file import write_kernel_text
from optiml.problems.dtypes import CUDA_TYPES
from optiml.records import Axis, Kernel, Launch, Problem, Tensor, Workload

INT32_MAX = 2**31 - 1
BLOCK = 256
MAX_REFERENCE_LINES = 60
_TAKEN = frozenset(  # C++ words that a problem may use as a name but a parameter may not
    """alignas alignof and asm auto bool break case catch char class const constexpr continue decltype default delete do
    double else enum explicit export extern false float for friend goto if inline int long mutable namespace new not
    operator or private protected public register return short signed sizeof static struct switch template this throw
    true try typedef typeid typename union unsigned using virtual void volatile while xor half""".split()  # noqa: SIM905
)

CONTRACT = (
    'A kernel is CUDA source with extern "C" __global__ functions and a launch plan, in one file: the block comment '
    "at its top gives grid, block and arguments as formulas of axes, scalars and params. Arrays pass as pointers, "
    "axes and scalars by value, in the order of `args`. Outputs are undefined on entry. No host code."
)


def kernel_template(problem: Problem) -> str:
    """A `.cu` file that compiles and launches, but computes nothing yet.

    One thread stands for one element of the first output; the parameters are the arrays in the order of inputs,
    then outputs, then axes, then scalars, each of the type that the problem declares.
    """
    arrays = {name: tensor for name, tensor in problem.inputs.items() if tensor.shape is not None}
    results = {name: tensor for name, tensor in problem.outputs.items() if name not in problem.inputs}
    scalars = {name: tensor for name, tensor in problem.inputs.items() if tensor.shape is None}
    block = _free_name("BLOCK", problem)
    first_name, first = next(iter(problem.outputs.items()))
    elements = _elements(first)
    counted = () if elements in problem.axes else (elements,)
    name = _parameter(f"{problem.name}_kernel")
    kernel = Kernel(
        source=_source(problem, name, arrays, results, scalars, first_name),
        launches=(
            Launch(
                kernel=name,
                grid=(f"ceil_div({elements}, {block})",),
                block=(block,),
                args=(*arrays, *results, *problem.axes, *scalars, *counted),
            ),
        ),
        params={block: BLOCK},
        tunables={block: (128, 256, 512)},
    )
    return write_kernel_text(kernel)


def blank_problem() -> Problem:
    """A problem to model one's own after, where nothing is known yet."""
    return Problem(
        name="my_operator",
        description="what y is, in terms of x",
        axes={"n": Axis(type="var", min=1)},
        inputs={"x": Tensor(dtype="float32", shape=("n",))},
        outputs={"y": Tensor(dtype="float32", shape=("n",))},
        reference="def run(x):\n    return ...  # numpy, in float64",
        workloads=(Workload(axes={"n": 1003}),),
    )


def _source(
    problem: Problem,
    name: str,
    arrays: Mapping[str, Tensor],
    results: Mapping[str, Tensor],
    scalars: Mapping[str, Tensor],
    first: str,
) -> str:
    dtypes = {tensor.dtype for tensor in (*problem.inputs.values(), *problem.outputs.values())}
    elements = _elements(problem.outputs[first])
    limit = elements if elements in problem.axes else _free_name("elements", problem)
    index = _free_name("i", problem)
    headers = sorted({CUDA_TYPES[dtype].header for dtype in dtypes} - {""})
    parameters = [
        *(
            f"{'' if array in problem.outputs else 'const '}{CUDA_TYPES[tensor.dtype].storage}* {_parameter(array)}"
            for array, tensor in (*arrays.items(), *results.items())
        ),
        *(f"{_axis_type(axis)} {_parameter(axis_name)}" for axis_name, axis in problem.axes.items()),
        *(f"{CUDA_TYPES[tensor.dtype].storage} {_parameter(scalar)}" for scalar, tensor in scalars.items()),
        *((f"long long {limit}",) if limit not in problem.axes else ()),
    ]
    lines = [*_task(problem), *(f"#include <{header}>" for header in headers), f'extern "C" __global__ void {name}(']
    lines += [f"    {parameter}," for parameter in parameters[:-1]]
    lines += [
        f"    {parameters[-1]})",
        "{",
        f"    long long {index} = (long long)blockIdx.x * blockDim.x + threadIdx.x;  // one element of {first}",
        f"    if ({index} >= {_parameter(limit)}) return;",
        f"    // write {', '.join(problem.outputs)} here",
        "}",
    ]
    return "\n".join(lines) + "\n"


def _task(problem: Problem) -> list[str]:
    """The problem as line comments."""
    lines = [f"{problem.name}: {problem.description}" if problem.description else problem.name]
    for role, tensors in (("input", problem.inputs), ("output", problem.outputs)):
        for name, tensor in tensors.items():
            shape = "scalar" if tensor.shape is None else f"[{', '.join(map(str, tensor.shape))}]"
            lines.append(f"  {role} {name}: {tensor.dtype} {shape}")
    lines += [f"  always: {constraint}" for constraint in problem.constraints]
    if isinstance(problem.reference, str):
        body = problem.reference.strip("\n").splitlines()
        lines += [
            f"reference ({problem.reference_framework}):",
            *(f"    {line}" for line in body[:MAX_REFERENCE_LINES]),
        ]
        if len(body) > MAX_REFERENCE_LINES:
            lines.append(f"    ({len(body) - MAX_REFERENCE_LINES} more lines)")
    else:
        lines.append("reference: what the caller's own kernel computes")
    split = [part for line in lines for part in (line.splitlines() or [""])]
    return [f"// {line}".rstrip().rstrip("\\").rstrip() for line in split]


def _elements(tensor: Tensor) -> str:
    """The number of elements of an array, as a formula."""
    sizes = [str(size) for size in tensor.shape or (1,)]
    return " * ".join(size if size.isalnum() or len(sizes) == 1 else f"({size})" for size in sizes)


def _axis_type(axis: Axis) -> str:
    largest = axis.value if axis.type == "const" else axis.max
    return "long long" if largest is not None and largest > INT32_MAX else "int"


def _parameter(name: str) -> str:
    return f"{name}_" if name in _TAKEN else name


def _free_name(name: str, problem: Problem) -> str:
    """`name`, with an underscore for as long as the problem uses it for something else."""
    while name in {*problem.axes, *problem.inputs, *problem.outputs}:
        name += "_"
    return name
