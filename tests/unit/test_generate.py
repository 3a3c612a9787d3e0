"""First kernels from the catalogue, and what a caller gets where there is none."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest

from optiml.codec import kernel_id
from optiml.errors import InvalidInput, ModelFailed
from optiml.generate.catalogue import strategies
from optiml.generate.generate import SEED, catalogue_candidates, expected_order, generate
from optiml.generate.template import blank_problem, kernel_template
from optiml.kernel_file import read_kernel_text
from optiml.problems.kernel_check import check_kernel
from optiml.problems.problem import builtin_names, load_builtin
from optiml.records import Axis, Build, Kernel, KernelOracle, Problem, Tensor, Verdict, Workload
from optiml.toolchain.nvrtc import Compiler


def verdict(kernel: Kernel, status: str) -> Verdict:
    return Verdict(
        kernel_id=kernel_id(kernel),
        status=status,  # type: ignore[arg-type]
        reason="wrong_values" if status == "rejected" else None,
        detail="off by one" if status == "rejected" else None,
        levels=("L0",),
        summary="as told",
        next_action="read the source",
    )


class Judge:
    """Accepts every kernel but those whose position in the order of asking is given."""

    def __init__(self, *rejected: int, status: str = "rejected") -> None:
        self.rejected, self.status = rejected, status
        self.seen: list[str] = []

    def __call__(self, kernel: Kernel, problem: Problem) -> Verdict:
        self.seen.append(kernel_id(kernel))
        return verdict(kernel, self.status if len(self.seen) - 1 in self.rejected else "accepted")


def test_a_request_near_an_operator_gets_a_reason_and_a_template() -> None:
    for text in ("softmin over rows of 512", "like relu, but keeps a tenth of negative values", "grouped conv2d"):
        made = generate(text, generator="catalogue")
        assert (made.status, made.candidates) == ("needs_kernel", ())
        assert "__global__" in (made.template or "")


class Late:
    """Times out as often as told, then accepts."""

    def __init__(self, times: int) -> None:
        self.left = times

    def __call__(self, kernel: Kernel, problem: Problem) -> Verdict:
        self.left -= 1
        late = dataclasses.replace(verdict(kernel, "rejected"), reason="timed_out", detail="it did not end within 20 s")
        return late if self.left >= 0 else verdict(kernel, "accepted")


def outline() -> Problem:
    return dataclasses.replace(load_builtin("softmax").problem, name="outline", reference="def run(x):\n    return x")


# --- from an intent --------------------------------------------------------------------------------------------------
def test_an_intent_becomes_a_kernel_of_its_problem_at_its_size_and_dtype() -> None:
    made = generate("fp16 softmax over rows of 512")
    assert made.status == "done"
    assert made.problem is not None
    assert made.problem.name == "softmax"
    assert made.problem.inputs["x"].dtype == "float16"
    assert made.problem.bench[0].axes["C"] == 512
    assert len(made.candidates) == 1
    assert "__half" in made.candidates[0].kernel.source
    assert made.candidates[0].generator == "catalogue"
    assert made.candidates[0].verdict is None
    assert "C=512" in made.summary
    assert made.candidates[0].kernel_id in made.next_action


def test_what_was_assumed_is_passed_on() -> None:
    assert any("float32 assumed" in note for note in generate("softmax over rows of 512").assumed)


def test_an_intent_outside_the_catalogue_needs_a_kernel_and_gets_a_template() -> None:
    made = generate("causal attention with rotary embeddings")
    assert made.status == "needs_kernel"
    assert made.problem is None
    assert made.candidates == ()
    assert "not built in" in made.summary
    assert made.template is not None
    assert "__global__" in made.template
    assert "compile_verify" in made.next_action


# --- from a problem --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", builtin_names())
def test_every_problem_has_its_strategies_and_then_its_seed(name: str) -> None:
    made = generate(problem=name, count=16)
    kinds = [candidate.strategy for candidate in made.candidates]
    assert kinds[-1] == SEED
    assert len(kinds) >= 3
    assert len({candidate.kernel_id for candidate in made.candidates}) == len(kinds)


def test_axes_and_dtype_are_applied_to_a_named_problem() -> None:
    made = generate(problem="relu", axes={"n": 77}, dtype="float64")
    assert made.problem is not None
    assert made.problem.bench[0].axes == {"n": 77}
    assert made.problem.outputs["y"].dtype == "float64"
    assert made.assumed == ()


def test_an_intent_beside_a_problem_adds_sizes() -> None:
    made = generate("2048 columns, bf16", problem="softmax")
    assert made.problem is not None
    assert made.problem.bench[0].axes["C"] == 2048
    assert made.problem.inputs["x"].dtype == "bfloat16"


def test_a_problem_object_of_a_built_in_keeps_its_domain_and_bench() -> None:
    narrow = dataclasses.replace(
        load_builtin("relu").problem,
        axes={"n": Axis(type="var", min=1, max=5000)},
        bench=(Workload(axes={"n": 5000}),),
        workloads=(Workload(axes={"n": 100}),),
    )
    made = generate(problem=narrow, dtype="float16")
    assert made.problem is not None
    assert made.problem.axes["n"].max == 5000
    assert made.problem.bench == narrow.bench
    assert made.problem.inputs["x"].dtype == "float16"


def test_a_problem_that_only_looks_like_a_built_in_one_needs_a_kernel() -> None:
    made = generate(problem=outline())
    assert made.status == "needs_kernel"
    assert made.problem == outline()
    assert made.template is not None
    assert "outline_kernel" in made.template


def test_the_dtype_of_a_problem_of_ones_own_is_its_own() -> None:
    with pytest.raises(InvalidInput, match="change them in the problem"):
        generate(problem=outline(), dtype="float16")


# --- verification ----------------------------------------------------------------------------------------------------
def test_the_first_accepted_kernel_ends_the_search_for_one() -> None:
    judge = Judge()
    made = generate(problem="matmul", verify=judge)
    assert len(judge.seen) == 1
    assert made.candidates[0].verdict is not None
    assert made.candidates[0].verdict.status == "accepted"
    assert made.warnings == ()
    assert "run_mcts" in made.next_action


def test_a_rejected_kernel_gives_its_place_to_the_next_and_is_warned_of() -> None:
    judge = Judge(0)
    made = generate(problem="matmul", verify=judge)
    assert [candidate.kernel_id for candidate in made.candidates] == judge.seen[1:2]
    assert len(made.warnings) == 1
    assert "wrong_values: off by one" in made.warnings[0]


def test_accepted_kernels_stand_before_the_others() -> None:
    made = generate(problem="matmul", count=16, verify=Judge(0, 2))
    states = [candidate.verdict.status for candidate in made.candidates if candidate.verdict is not None]
    assert states == sorted(states)
    assert states.count("rejected") == 2


def test_a_kernel_of_the_catalogue_that_was_late_is_verified_again() -> None:
    made = generate("attention", verify=Late(1))
    assert made.candidates[0].verdict is not None
    assert made.candidates[0].verdict.status == "accepted"
    assert made.warnings == ()


def test_a_machine_too_busy_to_verify_gives_an_answer_to_try_again_and_no_rejection() -> None:
    made = generate("attention", verify=Late(1000))
    assert made.status == "done"
    assert {item.verdict.status for item in made.candidates if item.verdict is not None} == {"unverified"}
    assert "Try again when less runs on this machine" in made.next_action
    assert "unverified: it did not end within 20 s, twice" in made.warnings[0]


def test_if_nothing_is_accepted_the_answer_says_so() -> None:
    everything = range(16)
    made = generate(problem="matmul", verify=Judge(*everything, status="unverified"))
    assert len(made.candidates) == 1
    assert "0 accepted" in made.summary
    assert "read the source" in made.next_action


def test_a_strategy_for_fewer_dtypes_is_expected_to_be_better_and_tried_first() -> None:
    ordered = sorted(strategies("matmul"), key=expected_order)
    assert [len(item.dtypes) for item in ordered] == sorted(len(item.dtypes) for item in ordered)
    assert catalogue_candidates(load_builtin("matmul").problem)[-1].strategy == SEED


# --- arguments -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("generator", ["mixture", "chat"])
def test_a_generator_without_a_model_says_how_to_enable_it(generator: str) -> None:
    with pytest.raises(ModelFailed, match="catalogue") as error:
        generate("relu", generator=generator)
    assert error.value.code == "model_unavailable"


def test_arguments_out_of_range_are_named() -> None:
    with pytest.raises(InvalidInput, match="generator"):
        generate("relu", generator="magic")
    with pytest.raises(InvalidInput, match="count is 0"):
        generate("relu", count=0)
    with pytest.raises(InvalidInput, match="intent"):
        generate()
    with pytest.raises(InvalidInput, match="softmax"):
        generate(problem="sofmax")


# --- templates -------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def compiler() -> Iterator[Compiler]:
    made = Compiler(timeout_s=30)
    yield made
    made.close()


def odd_problem() -> Problem:
    """Names that collide with the template's own and with C++ words, shapes that are formulas, mixed dtypes."""
    return Problem(
        name="double",
        description="two lines\nof text \\",
        axes={
            "BLOCK": Axis(type="var", min=1, max=1 << 40),
            "i": Axis(type="const", value=3),
            "elements": Axis(type="var"),
        },
        inputs={
            "new": Tensor(dtype="bfloat16", shape=("BLOCK", "i")),
            "mask": Tensor(dtype="bool", shape=("elements",)),
            "alpha": Tensor(dtype="float16", shape=None),
            "state": Tensor(dtype="float8_e4m3", shape=("BLOCK",)),
        },
        outputs={
            "y": Tensor(dtype="int64", shape=("BLOCK + 1", "max(i, elements)")),
            "state": Tensor(dtype="float8_e4m3", shape=("BLOCK",)),
        },
        reference=KernelOracle(kernel=Kernel(source="")),
        workloads=(Workload(axes={"BLOCK": 2, "elements": 5}, scalars={"alpha": 1.0}),),
    )


@pytest.mark.parametrize(
    "problem",
    [load_builtin("conv2d").problem, load_builtin("cross_entropy").problem, blank_problem(), odd_problem()],
    ids=lambda problem: problem.name,
)
def test_a_template_compiles_as_it_is_and_fits_its_problem(problem: Problem, compiler: Compiler) -> None:
    kernel = check_kernel(read_kernel_text(kernel_template(problem)), problem)
    build = compiler.compile(kernel, "sm_80")
    assert isinstance(build, Build), build
    (launch,) = kernel.launches
    parameters = kernel.source.split("void")[1].split(")")[0].split(",")
    assert len(launch.args) == len(parameters)


def test_a_template_shows_the_reference_as_comments() -> None:
    text = kernel_template(load_builtin("relu").problem)
    assert "// reference (numpy):" in text
    assert "//     def run(x):" in text


def test_an_array_updated_in_place_is_one_parameter_without_const() -> None:
    text = kernel_template(odd_problem())
    assert "const __nv_fp8_e4m3* state" not in text
    assert text.count("* state") == 1
