"""Plain English to a problem: the prompt lists, and the rules one by one."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from intent_prompts import FOREIGN, KNOWN

from optiml.errors import InvalidInput
from optiml.generate.intent import Intention, intended_problem, read_intent
from optiml.generate.vocabulary import ARITHMETIC, GRAMMARS, MODIFIERS
from optiml.generate.vocabulary import FOREIGN as FOREIGN_LABELS
from optiml.problems.problem import Builtin, Intent, builtin_names, load_builtin, main_dtype
from optiml.records import Axis, Problem, Tensor, Workload

LONG_KNOWN = 150


@pytest.mark.parametrize("problem", sorted({item[1] for item in KNOWN}))
def test_prompts_are_read_as_their_problem_with_sizes_and_dtype(problem: str) -> None:
    wrong = []
    for text, name, axes, dtype in KNOWN:
        intention = read_intent(text) if name == problem else None
        if intention is not None and (
            intention.problem_name != problem
            or {axis: intention.axes.get(axis) for axis in axes} != axes
            or (dtype is not None and intention.dtype != dtype)
        ):
            wrong.append((text, intention))
    assert wrong == []


def test_prompts_outside_the_catalogue_are_refused_with_a_reason() -> None:
    read = [(text, read_intent(text)) for text in FOREIGN]
    assert [(text, item.problem_name) for text, item in read if item.problem_name is not None or not item.refused] == []


def test_requests_of_many_kinds_are_read_right_or_refused() -> None:
    wrong = []
    for line in (Path(__file__).parent / "data" / "intents.tsv").read_text(encoding="utf-8").splitlines()[1:]:
        text, name, sizes, dtype = [*line.split("\t"), "", "", ""][:4]
        intention = read_intent(text)
        if name == "-":
            if intention.problem_name is not None or not intention.refused:
                wrong.append((text, intention))
            continue
        if intention.problem_name != name:
            wrong.append((text, intention))
            continue
        problem = intended_problem(intention)
        asked = {axis: int(size) for axis, size in (item.split("=") for item in sizes.split(",") if item)}
        if main_dtype(problem) != dtype or not asked.items() <= problem.bench[0].axes.items():
            wrong.append((text, intention))
    assert wrong == []


def lines_of(name: str) -> list[list[str]]:
    text = (Path(__file__).parent / "data" / name).read_text(encoding="utf-8")
    return [line.split("\t") for line in text.splitlines()[1:]]


def test_requests_near_the_operators_are_refused_with_a_reason() -> None:
    near = [line for line in lines_of("intents_fresh.tsv") if line[2] == "-"]
    read = [(kind, text, read_intent(text)) for kind, text, *_ in (*lines_of("intents_adversarial.tsv"), *near)]
    assert [(kind, text, item.problem_name) for kind, text, item in read if item.problem_name or not item.refused] == []


def test_nine_in_ten_requests_of_many_phrasings_are_read_right_and_none_is_read_wrong() -> None:
    fresh = [line for line in lines_of("intents_fresh.tsv") if line[2] != "-"]
    lines = [*lines_of("intents_varied.tsv"), *fresh]
    wrong, right = [], 0
    for _, text, name, sizes, dtype in lines:
        intention = read_intent(text)
        if intention.refused:
            continue
        problem = intended_problem(intention)
        asked = {axis: int(size) for axis, size in (item.split("=") for item in sizes.split(",") if item)}
        read = (intention.problem_name == name, asked.items() <= problem.bench[0].axes.items())
        if all(read) and dtype in ("-", main_dtype(problem)):
            right += 1
        else:
            wrong.append((text, intention))
    assert wrong == []
    assert right >= 0.9 * len(lines)


@pytest.mark.parametrize(
    ("text", "name", "told"),
    [
        ("Zeilenweise Softmax über eine 4096 x 1024 Matrix", "softmax", "German"),
        ("transposée d'une matrice de 100 lignes et 200 colonnes", "transpose", "French"),
        ("suma de dos vectores con 1000 elementos", "vector_add", "Spanish"),
        ("矩阵乘法 512x512 半精度", "matmul", "Chinese"),
        ("行列の転置 4096x4096", "transpose", "Japanese"),
    ],
)
def test_a_short_request_in_another_language_is_read_and_the_reading_is_told(text: str, name: str, told: str) -> None:
    intention = read_intent(text)
    assert intention.problem_name == name
    assert told in intention.assumed[0]


@pytest.mark.parametrize(
    "text",
    [
        "Matrixmultiplikation ohne Vorzeichen", "Softmax sin máximo por filas", "softmax par ligne puis relu",
        "对每一列做 softmax", "矩阵乘法 然后 relu", "行列の逆行列", "сумма двух векторов", "LayerNorm ohne Bias",
    ],
)  # fmt: skip
def test_another_language_is_refused_where_a_word_may_be_lost(text: str) -> None:
    assert read_intent(text).refused


def test_every_problem_has_prompts_and_a_grammar() -> None:
    assert {problem for _, problem, _, _ in KNOWN} == set(builtin_names()) == set(GRAMMARS)
    assert len(KNOWN) >= LONG_KNOWN
    assert len(FOREIGN) >= LONG_KNOWN


def test_a_grammar_names_only_axes_and_scalars_of_its_problem() -> None:
    for name, grammar in GRAMMARS.items():
        problem = load_builtin(name).problem
        known = {*problem.axes, *problem.inputs}
        groups = [*grammar.axes, *grammar.letters.values(), *grammar.positional]
        groups += [axis for reading in grammar.shapes for axis in reading.axes]
        assert {part for group in groups for part in group.split()} <= known, name


def test_a_description_of_an_operator_explains_only_labels_that_exist() -> None:
    labels = {*FOREIGN_LABELS, *ARITHMETIC, *GRAMMARS}
    for name, grammar in GRAMMARS.items():
        assert {*grammar.explains, *grammar.needs} <= labels, name


def test_modifiers_are_harmless_only_for_problems_that_exist() -> None:
    for label, modifier in MODIFIERS.items():
        assert set(modifier.harmless_for) <= set(GRAMMARS), label


# --- a worked task with an example and a signature -----------------------------------------------------------------
TASK = """/* Write to total the sum of the vector x.
   The kernel is launched with at least as many threads as there are values in x.
   Example:

   input: [3, 1, 4, 1, 5]
   output: 14
*/
__global__ void reduceSum(const double *x, size_t N, double *total) {"""


def test_an_example_in_a_task_gives_no_sizes_and_the_signature_gives_the_dtype() -> None:
    intention = read_intent(TASK)
    assert (intention.problem_name, intention.axes, intention.dtype) == ("sum", {}, "float64")


def test_a_body_of_code_is_not_interpreted() -> None:
    intention = read_intent("__global__ void softmax(float* x, int n) { x[threadIdx.x] = exp(x[threadIdx.x]); }")
    assert intention.refused is not None
    assert "give existing code as a kernel" in intention.refused


def test_a_signature_that_mixes_element_types_is_refused() -> None:
    intention = read_intent("Implement __global__ void matmul(const half* a, const half* b, float* c, int n)")
    assert intention.refused is not None
    assert "mixes" in intention.refused


# --- what was assumed ------------------------------------------------------------------------------------------------
def test_sizes_that_were_not_given_are_listed_as_assumed() -> None:
    rows = load_builtin("softmax").problem.bench[0].axes["R"]
    assumed = " | ".join(read_intent("fp16 softmax over rows of 512").assumed)
    assert f"axis R (rows) was not given; {rows} assumed" in assumed
    assert "axis C" not in assumed
    assert "dtype" not in assumed


def test_an_assumed_size_shrinks_where_the_stated_ones_are_large() -> None:
    intention = read_intent("softmax over rows of 65536")
    assert intention.axes["C"] == 65536
    assert intention.axes["R"] * 65536 <= 1 << 24
    assert any(f"{intention.axes['R']} assumed" in note for note in intention.assumed)


def test_a_dtype_that_was_not_given_is_listed_as_assumed() -> None:
    assert "no dtype was given; float32 assumed" in read_intent("gelu").assumed


def test_a_size_with_a_binary_unit_says_how_it_was_read() -> None:
    intention = read_intent("relu over 4k elements")
    assert intention.axes == {"n": 4096}
    assert "4k was read as 4096" in intention.assumed


def test_a_misspelt_name_is_put_right_and_said_so() -> None:
    intention = read_intent("trasnpose a matrix")
    assert intention.problem_name == "transpose"
    assert "'trasnpose' was read as 'transpose'" in intention.assumed


def test_the_exact_gelu_is_assumed_aloud() -> None:
    assert any("tanh" in note for note in read_intent("gelu").assumed)


# --- sizes -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1,000,000", 1000000), ("1_000_000", 1000000), ("2^20", 1 << 20), ("2**20", 1 << 20), ("1<<20", 1 << 20),
        ("16 Mi", 16 << 20), ("64k", 65536), ("100k", 100000), ("1e6", 1000000), ("a million", 1000000),
        ("half a million", 500000), ("2.5 million", 2500000), ("3 thousand", 3000), ("1024*1024", 1 << 20),
        ("1024x1024", 1 << 20), ("2 to the power of 10", 1024),
    ],
)  # fmt: skip
def test_a_count_is_read_in_the_ways_people_write_it(text: str, size: int) -> None:
    assert read_intent(f"relu over {text} elements").axes == {"n": size}


def test_threads_tiles_and_tolerances_are_no_sizes() -> None:
    text = "matmul with 32x32 tiles, 256 threads per block, tolerance 1e-5, on an A100 with CUDA 12, M=N=K=512"
    assert read_intent(text).axes == {"M": 512, "N": 512, "K": 512}


def test_leading_dimensions_fold_into_the_rows_of_a_row_operator() -> None:
    intention = read_intent("softmax of shape (8, 16, 1024, 64)")
    assert intention.axes == {"R": 8 * 16 * 1024, "C": 64}


def test_sizes_that_contradict_each_other_are_refused() -> None:
    intention = read_intent("softmax with 512 columns of shape 16x1024")
    assert intention.refused is not None
    assert "contradict" in intention.refused


def test_inner_sizes_of_a_product_have_to_match() -> None:
    assert read_intent("multiply a 512x256 matrix by a 128x64 matrix").refused is not None


def test_window_stride_and_padding_become_scalars() -> None:
    intention = read_intent("3D max pooling, 3x3x3 window, stride 2, padding 1")
    assert intention.scalars == {"window": 3, "stride": 2, "padding": 1}


def test_an_unstated_stride_follows_the_usual_default_of_the_operator() -> None:
    assert read_intent("3D max pooling with a 2x2x2 window").scalars == {"window": 2, "stride": 2, "padding": 0}
    assert read_intent("conv2d with 3x3 filters").scalars == {"stride": 1, "padding": 0}
    assert read_intent("conv2d with 5x5 filters and same padding").scalars == {"stride": 1, "padding": 2}


def test_a_setting_that_the_kernels_do_not_have_is_refused_by_name() -> None:
    intention = read_intent("conv2d with 3x3 filters and dilation 2")
    assert intention.refused is not None
    assert "dilation" in intention.refused


def test_a_size_outside_the_domain_is_refused_with_the_domain() -> None:
    intention = read_intent("attention with head dim 4096")
    assert intention.refused is not None
    assert "D = 4096" in intention.refused


def test_sizes_given_by_the_caller_win_over_the_text() -> None:
    intention = read_intent("softmax over rows of 4096", axes={"C": 100, "R": 7}, dtype="float64")
    assert intention.axes == {"C": 100, "R": 7}
    assert intention.dtype == "float64"
    assert not any("was not given" in note for note in intention.assumed)


# --- dtypes ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("text", "dtype"),
    [
        ("fp16", "float16"), ("half precision", "float16"), ("in half", "float16"), ("float16", "float16"),
        ("bf16", "bfloat16"), ("bfloat16", "bfloat16"), ("fp32", "float32"), ("single precision", "float32"),
        ("floats", "float32"), ("fp64", "float64"), ("double precision", "float64"), ("16-bit floats", "float16"),
        ("fp16 with fp32 accumulation", "float16"), ("mixed precision", "float16"),
    ],
)  # fmt: skip
def test_a_dtype_is_read_in_the_ways_people_write_it(text: str, dtype: str) -> None:
    assert read_intent(f"softmax, {text}").dtype == dtype


def test_an_unavailable_dtype_is_refused_by_name() -> None:
    intention = read_intent("matmul in int8")
    assert intention.refused == "matmul is not available in int8; choose from float32, float16, bfloat16, float64"


def test_the_type_of_labels_is_not_the_type_of_elements() -> None:
    assert read_intent("cross entropy with bf16 logits and int64 labels").dtype == "bfloat16"


# --- guards ----------------------------------------------------------------------------------------------------------
def test_a_hundred_kilobytes_are_refused_at_once() -> None:
    intention = read_intent("softmax " * 12_500)
    assert intention.refused is not None
    assert "characters" in intention.refused


def test_a_nul_character_is_the_callers_mistake() -> None:
    with pytest.raises(InvalidInput, match="NUL"):
        read_intent("soft\0max")


def test_an_unknown_problem_is_named_with_its_nearest() -> None:
    with pytest.raises(InvalidInput, match="softmax") as error:
        read_intent("rows of 4096", problem="sofmax")
    assert error.value.code == "unknown_problem"


def test_a_given_problem_takes_sizes_and_dtype_from_the_text() -> None:
    intention = read_intent("fp16, rows of 4096", problem="softmax")
    assert (intention.problem_name, intention.axes["C"], intention.dtype) == ("softmax", 4096, "float16")


def test_a_text_that_speaks_against_the_given_problem_is_refused() -> None:
    assert read_intent("causal, 8 heads", problem="multi_head_attention").refused is not None
    assert read_intent("log softmax", problem="softmax").refused is not None


# --- the lexicon is an argument --------------------------------------------------------------------------------------
def frobnicate() -> Builtin:
    problem = Problem(
        name="frobnicate",
        axes={"n": Axis(type="var", min=4, max=1000, multiple_of=4)},
        inputs={"x": Tensor(dtype="float32", shape=("n",))},
        outputs={"y": Tensor(dtype="float32", shape=("n",))},
        reference="def run(x):\n    return x",
        workloads=(Workload(axes={"n": 8}),),
        constraints=("n != 12",),
    )
    intent = Intent(names=("frobnication", "frobnicate"), axes={"n": ("widgets",)}, shape_order=("n",))
    return Builtin(
        name="frobnicate",
        problem=problem,
        dtypes=("float32",),
        intent=intent,
        seed_text="",
        cheats={},
        bytes_formula=None,
    )


def test_a_new_problem_is_found_by_its_own_words() -> None:
    intention = read_intent("a fast frobnication of 64 widgets", lexicon={"frobnicate": frobnicate()})
    assert intention == Intention(
        problem_name="frobnicate", axes={"n": 64}, dtype=None, assumed=("no dtype was given; float32 assumed",)
    )


def test_domain_and_constraints_of_a_new_problem_hold() -> None:
    lexicon = {"frobnicate": frobnicate()}
    assert "multiples of 4" in (read_intent("frobnicate 6 widgets", lexicon=lexicon).refused or "")
    assert "n != 12" in (read_intent("frobnicate 12 widgets", lexicon=lexicon).refused or "")


def test_the_intended_problem_carries_sizes_scalars_and_dtype_in_its_bench() -> None:
    intention = read_intent("fp16 3D max pooling, 2x2x2 window, 1x4x8x8x8 input")
    problem = intended_problem(intention)
    assert problem.name == "max_pool3d"
    assert problem.inputs["x"].dtype == "float16"
    assert problem.bench[0].axes == {"N": 1, "C": 4, "D": 8, "H": 8, "W": 8}
    assert problem.bench[0].scalars == {"window": 2, "stride": 2, "padding": 0}


def test_an_unknown_word_is_refused_in_the_sentence_of_the_operator_and_told_elsewhere() -> None:
    assert "'frumious'" in (read_intent("relu of a frumious array").refused or "")
    intention = read_intent("Write a relu kernel for 1000 floats. Frumious regards.")
    assert intention.problem_name == "relu"
    assert any("Frumious" in note for note in intention.assumed)


@pytest.mark.parametrize(
    "text", ["For our frumious solver we need a dot product of doubles.", "Our network needs a relu over 1000 floats."]
)
def test_what_a_kernel_is_for_may_be_said_in_any_words(text: str) -> None:
    assert read_intent(text).refused is None


def test_a_refused_intention_has_no_problem() -> None:
    with pytest.raises(InvalidInput, match="no problem"):
        intended_problem(dataclasses.replace(read_intent("sort"), assumed=()))


def test_scalars_that_were_asked_for_are_among_those_that_a_verdict_covers() -> None:
    problem = intended_problem(read_intent("3d max pooling with window 4, stride 3 and no padding"))
    asked = {"window": 4, "stride": 3, "padding": 0}
    assert problem.bench[0].scalars == asked
    assert asked in [dict(item.scalars) for item in problem.workloads]
    known = intended_problem(read_intent("softmax of 512 rows of 1000"))
    assert known.workloads == load_builtin("softmax").problem.workloads
