"""Sizes in a request: "rows of 4096", "M=N=K=2048", "8x16x1024x64", "a million elements", "3x3 kernel, stride 2"."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from optiml.errors import InvalidInput
from optiml.generate import vocabulary as words
from optiml.generate.vocabulary import Grammar, ShapeReading
from optiml.generate.words import COUNTING, Token, fold
from optiml.problems.problem import Builtin, in_domain
from optiml.records import Scalar

MAX_AXIS_WORDS = 4
CONNECTORS = frozenset(
    fold(word)
    for word in """of is are was being equals equal to at a an the with each length size dimension dim
    count""".split()  # noqa: SIM905
)
BETWEEN = frozenset(
    fold(word)
    for word in """input different separate random attention float double fp16 fp32 bf16 half int integer int32 the of
    total individual distinct independent single precision floating point data long parallel equal sized bfloat16
    float32 float64""".split()  # noqa: SIM905
)
CONTENTS = {
    "row": ("column", "cols", "features"),
    "vector": ("column", "features"),
    "head": ("head dim",),
    "column": ("rows",),
}
WINDOWS = ("kernel", "filter", "window", "pool")
ALL_FIGURES_COUNT = ("multi_head_attention", "conv2d", "max_pool3d")  # operators with settings that a figure may name
SMALL_WINDOW = 11
SMALLEST_COUNT = 100  # of what a text counts "within N values"; smaller figures after "within" are tolerances
_WINDOWED = frozenset(map(fold, ("conv", "conv2d", "convolution", "convolutions")))
LEADING_LETTERS = ("B", "T", "S", "L")  # batch, tokens, sequence, length: all of them count rows


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Axes and scalars that a text gives, and notes on how ambiguous figures were read."""

    axes: Mapping[str, int] = field(default_factory=dict)
    scalars: Mapping[str, Scalar] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def read_sizes(
    found: Sequence[Token],
    builtin: Builtin,
    grammar: Grammar,
    *,
    ignored: Collection[int] = (),
    text: str = "",
    value_count: int | None = None,
) -> Sizes:
    """The sizes that the tokens of a text give to a problem's axes and scalars.

    Args:
        found: tokens of the whole text.
        builtin: the operator that was chosen.
        grammar: how people speak of it.
        ignored: positions of tokens that name a dtype.
        text: the text itself, for shapes in letters ("A is MxK").
        value_count: how many values a range such as "0-255" holds; the number of bins where none is given.

    Raises:
        InvalidInput: two statements contradict each other, a shape does not fit, or a setting is one the operator
            does not have.
    """
    reader = _Reader(builtin, grammar, found, ignored, text)
    reader.read_letter_shapes()
    reader.read_directions()
    reader.read_calls()
    reader.read_statements()
    reader.read_shapes()
    reader.fold_leading()
    reader.read_loose_numbers()
    reader.settle_scalars()
    if grammar.fold == "all":
        reader.read_groups()
    if value_count is not None and "bins" in builtin.problem.axes:
        reader.axes.setdefault("bins", value_count)
    return Sizes(axes=reader.axes, scalars=reader.scalars, notes=tuple(dict.fromkeys(reader.notes)))


_GROUPS = re.compile(
    r"(?<![\w.])(?P<groups>\d[\d,]*) (?:rows?(?:,| and| by| x| of| with) (?=\d[\d,]* (?:columns|cols|elements|values))"
    r"|(?:vectors|sequences|samples|batches|images) of (?:length |size |width )?)(?P<each>\d[\d,]*)"
    r"(?! (?:million|thousand))(?=\s|$|[.;)])"
)


class _Reader:
    """Walks the tokens once and collects what they say; each figure is used at most once."""

    def __init__(
        self, builtin: Builtin, grammar: Grammar, found: Sequence[Token], ignored: Collection[int], text: str
    ) -> None:
        self.builtin, self.grammar = builtin, grammar
        self.problem = builtin.problem
        self.found, self.text = found, text
        self.used: set[int] = set(ignored)
        self.axes: dict[str, int] = {}
        self.scalars: dict[str, Scalar] = {}
        self.leading: dict[str, int] = {}
        self.letters: dict[str, tuple[str, ...]] = {}
        self.notes: list[str] = []
        self.scalar_names = {name for name, tensor in self.problem.inputs.items() if tensor.shape is None}
        self.targets = self._axis_phrases()

    # -- names --
    def _axis_phrases(self) -> dict[str, tuple[str, ...]]:
        """Squeezed phrase -> the axes or scalars that it names."""
        targets: dict[str, tuple[str, ...]] = {}
        known = {*self.problem.axes, *self.scalar_names}
        for table in (self.grammar.axes, self.builtin.intent.axes):
            for names, phrases in table.items():
                axes = tuple(name for name in names.split() if name in known)
                for phrase in phrases:
                    key = "".join(fold(word) for word in re.findall(r"[A-Za-z0-9]+", phrase))
                    if axes and len(key) > 1:
                        targets.setdefault(key, axes)
        for name in known:
            if len(name) > 1:
                targets.setdefault(fold(name), (name,))
        return targets

    def _resolve(self, name: str) -> tuple[str, ...]:
        """The axes behind a name in an assignment; none if it is not one of this problem's."""
        if name in self.letters:
            return self.letters[name]
        letters = self.grammar.letters
        if name == "N" and letters.get("N") == "C" and self._names_columns():
            return ("R",)
        if name in letters:
            return tuple(letters[name].split())
        known = {*self.problem.axes, *self.scalar_names}
        if name in known:
            return (name,)
        key = "".join(fold(part) for part in re.findall(r"[A-Z]+(?=[A-Z][a-z])|[A-Z]?[a-z0-9]+|[A-Z]+|\d+", name))
        if key in self.targets:
            return self.targets[key]
        same = [axis for axis in known if axis.lower() == name.lower()]
        if len(same) == 1:
            return (same[0],)
        same = [axis for letter, axis in letters.items() if letter.lower() == name.lower()]
        if len(set(same)) == 1:
            return tuple(same[0].split())
        if len(self.problem.axes) == 1 and (len(name) == 1 or name.lower() in ("len", "size", "numel", "count")):
            return tuple(self.problem.axes)
        return ()

    def _names_columns(self) -> bool:
        """Whether another letter beside N stands for the columns, as in "N=16, D=4096"."""
        columns = {name for name, axis in self.grammar.letters.items() if axis == "C" and name != "N"} | {"C"}
        return any(
            token.text in columns and self._symbol(index + 1) in ("=", ":") for index, token in enumerate(self.found)
        )

    def _assign(self, name: str, value: float, where: str) -> None:
        target: dict[str, int] | dict[str, Scalar] = self.scalars if name in self.scalar_names else self.axes
        if not float(value).is_integer() or abs(value) > 2**62:
            raise InvalidInput(f"{where}: {value:g} is no size for {name}")
        if name in target and target[name] != int(value):
            raise InvalidInput(
                f"the sizes contradict each other: {name} is {target[name]} and {int(value)} ({where!r})"
            )
        target[name] = int(value)

    # -- letters: "A is MxK", "an N x D matrix" --
    def read_letter_shapes(self) -> None:
        shapes = [
            tuple(re.split(r"\s*[xX]\s*|\s*,\s*|\s+by\s+", match.group(1)))
            for match in re.finditer(
                r"(?<![\w])\(?([A-Z](?:\s?x\s?[A-Z]){1,4}|[A-Z](?:,\s?[A-Z]){1,4}(?=\s*\)\s*=)|[A-Z] by [A-Z])(?!\w)",
                self.text,
            )
        ]
        unused = {rank: self._readings(rank) for rank in set(map(len, shapes))}
        for letters in shapes:
            rank = len(letters)
            if rank < len(self.problem.axes) and set(letters) <= set(self.problem.axes):
                continue  # the axes' own letters mean what they say
            if unused[rank]:
                axes: tuple[str, ...] = unused[rank].pop(0).axes
            elif self.grammar.fold == "leading" and rank == 2:
                axes = tuple(self.problem.axes)[:2]
            else:
                continue
            for letter, axis in zip(letters, axes, strict=True):
                self.letters[letter] = tuple(dict.fromkeys((*self.letters.get(letter, ()), axis)))
        if self.builtin.name == "matmul" and len(shapes) == 1 and len(set(shapes[0])) == 1:  # "two N x N matrices"
            self.letters[shapes[0][0]] = ("M", "N", "K")

    def _readings(self, rank: int) -> list[ShapeReading]:
        """What a shape of that many numbers may give."""
        if self.grammar.shapes:
            return [reading for reading in self.grammar.shapes if len(reading.axes) == rank]
        order = self.builtin.intent.shape_order or tuple(self.problem.axes)
        return [ShapeReading(axes=tuple(order))] if len(order) == rank else []

    # -- "dim=-1", "along axis 0" --
    def read_directions(self) -> None:
        for index, token in enumerate(self.found):
            if token.kind != "word" or token.folded not in ("dim", "axis", "dimension"):
                continue
            number = self._next_number(index + 1, signs="=:-")
            before = [item.folded for item in self.found[max(0, index - 2) : index] if item.kind == "word"]
            if (
                number is None
                or self.found[number].kind != "number"
                or self.found[number].value > 4
                or "head" in before
            ):
                continue
            between = self.found[index + 1 : number]
            if any(item.kind == "word" and item.folded != "is" for item in between):
                continue
            self.used.add(number)
            negative = self.found[number].value < 0 or any(item.text == "-" for item in between)
            value = -abs(self.found[number].value) if negative else self.found[number].value
            self._check_direction(int(value))

    def _check_direction(self, direction: int) -> None:
        ranks = [len(token.dims) for token in self.found if token.kind == "shape"]
        rank = ranks[0] if ranks else len(next(tensor.shape for tensor in self.problem.inputs.values() if tensor.shape))
        last = direction in (-1, rank - 1)
        first_of_one = direction == 0 and rank == 1
        if self.grammar.fold == "all" and self.builtin.name in ("relu", "gelu", "vector_add"):
            return
        if self.builtin.name == "cross_entropy" and direction == 1:
            return
        if self.builtin.name == "sum" or not (last or first_of_one):
            raise InvalidInput(f"along dimension {direction} this is another operator than {self.builtin.name}")

    # -- "nn.Conv2d(64, 128, 3)" --
    def read_calls(self) -> None:
        names = self._name_ends()
        for index, token in enumerate(self.found[:-1]):
            following = self.found[index + 1]
            called = following.text[0] == "(" and self.text[following.start - 1].isalnum()
            if token.folded not in names or not called:
                continue
            if (
                following.kind == "shape"
                and following.bracketed
                and len(following.dims) <= len(self.grammar.positional)
            ):
                self._assign_positions(following.dims, following.text)
                self.used.add(index + 1)
            elif following.text == "(" and self.grammar.positional:
                self._assign_positions(self._arguments(index + 2), token.text)

    def _name_ends(self) -> set[str]:
        """The last words of the operator's names."""
        return {fold(phrase.split()[-1]) for phrase in self.grammar.unique}

    def _arguments(self, index: int) -> tuple[int, ...]:
        """The plain numbers that open an argument list; they count as read."""
        values: list[int] = []
        while index < len(self.found) and self.found[index].kind == "number" and self._symbol(index + 1) in (",", ")"):
            values.append(int(self.found[index].value))
            self.used.add(index)
            index += 2
        return tuple(values)

    def _assign_positions(self, values: Sequence[int], where: str) -> None:
        for names, value in zip(self.grammar.positional, values, strict=False):
            for name in names.split():
                self._assign(name, value, where)

    # -- statements --
    def read_statements(self) -> None:
        readers = (self._assignment, self._quantity, self._named_size, self._counted)
        index = 0
        while index < len(self.found):
            index = next((end for reader in readers if (end := reader(index)) > index), index + 1)

    def _assignment(self, index: int) -> int:
        """`M=N=K=2048`, `n: 100`, `B,H,S,D = 8,16,1024,64`; the position after it, or 0."""
        if self.found[index].kind != "word" or index in self.used:
            return 0
        groups: list[list[str]] = []
        position = index
        while position < len(self.found) and self.found[position].kind not in ("number", "shape"):
            names: list[str] = []
            while True:
                name, position = self._name(position)
                if name is None:
                    return 0
                names.append(name)
                if self._symbol(position) != ",":
                    break
                position += 1
            if self._symbol(position) == ")":
                position += 1
            if self._symbol(position) not in ("=", ":"):
                return 0
            groups.append(names)
            position += 1
            if self._symbol(position - 1) == ":" and self._name(position)[0] is not None:
                return 0  # the colon of a sentence
        if position >= len(self.found) or position in self.used:
            return 0
        if self._symbol(position - 1) == ":" and (not self._resolve(groups[-1][-1]) or self._belongs_to_next(position)):
            return 0
        return self._assign_groups(groups, position)

    def _assign_groups(self, groups: list[list[str]], position: int) -> int:
        token = self.found[position]
        values: list[float] = list(token.dims) if token.kind == "shape" else [token.value]
        end = position
        while token.kind == "number" and len(values) < len(groups[-1]) and self._symbol(end + 1) == ",":
            if end + 2 >= len(self.found) or self.found[end + 2].kind != "number":
                break
            end += 2
            values.append(self.found[end].value)
        if len(groups[-1]) != len(values) and token.kind == "shape":
            return 0
        counted, after, _ = self._counted_target(end)
        if (
            counted and len(groups) == len(values) == 1 and self._next_number(after, signs=":=") is None
        ):  # "N = 2048 rows"
            self.letters[groups[0][-1]] = counted
            end = max(end, after - 1)
        for names in groups:
            for name, value in zip(names[-len(values) :], values, strict=True):  # in "a, b = 4" only b is given
                self._assign_name(name, value, position)
        self._note(token)
        self.used.update(range(position, end + 1))
        return end + 1

    def _assign_name(self, name: str, value: float, position: int) -> None:
        where = f"{name} = {value:g}"
        if self.grammar.leading and (name in LEADING_LETTERS or _squeeze(name) in map(_squeeze, self.grammar.leading)):
            self.leading[name] = int(value)
            return
        targets = self._resolve(name)
        if targets:
            for target in targets:
                self._assign(target, value, where)
            return
        if self._is_machine(position) or name.lower() in _MACHINE_NAMES:
            return
        quantity = next(
            (label for label, phrases in words.QUANTITIES.items() if _squeeze(name) in map(_squeeze, phrases)), None
        )
        if quantity is not None:
            self._check_fixed(quantity, value)
            return
        raise InvalidInput(
            f"{self.builtin.name} has no size or setting {name!r}; "
            f"it has {', '.join([*self.problem.axes, *sorted(self.scalar_names)])}"
        )

    def _name(self, position: int) -> tuple[str | None, int]:
        """The name at `position` as written (its snake or camel pieces joined), and the position after it."""
        if position >= len(self.found) or self.found[position].kind != "word":
            return None, position
        start = self.found[position].start
        pieces = [self.found[position].text]
        position += 1
        while (
            position < len(self.found) and self.found[position].kind == "word" and self.found[position].start == start
        ):
            pieces.append(self.found[position].text)
            position += 1
        return ("_".join(pieces) if len(pieces) > 1 else pieces[0]), position

    def _symbol(self, position: int) -> str | None:
        if 0 <= position < len(self.found) and self.found[position].kind == "symbol":
            return self.found[position].text
        return None

    def _quantity(self, index: int) -> int:
        """`stride 2`, `padding of 1`, `dilation 2`, `no padding`, `same padding`."""
        for label, phrases in words.QUANTITIES.items():
            length = self._phrase_at(index, phrases)
            if not length:
                continue
            before = [token.text.lower() for token in self.found[max(0, index - 2) : index] if token.kind == "word"]
            if label == "padding" and before and label in self.scalar_names:
                if (
                    before[-1] in ("no", "without", "valid", "zero")
                    and self._next_number(index + length) is None
                    and before[-1] != "zero"
                ):
                    self._assign("padding", 0, "no padding")
                    return index + length
                if before[-1] == "same":
                    self.notes.append("same padding")
                    return index + length
            number = self._next_number(index + length)
            if number is None and self._before_is_number(index):
                number = index - 1 if self.found[index - 1].kind in ("number", "shape") else index - 2
            if number is None or number in self.used:
                return 0
            self.used.add(number)
            token = self.found[number]
            for value in token.dims or (token.value,):
                if label in self.scalar_names:
                    self._assign(label, value, f"{label} {token.text}")
                else:
                    self._check_fixed(label, value)
            return max(number + 1, index + length)
        return 0

    def _before_is_number(self, index: int) -> bool:
        """Whether a figure stands right before, as in "2x2 stride"."""
        at = index - 1 if index and self.found[index - 1].kind != "symbol" else index - 2
        return (
            at >= 0
            and self.found[at].kind in ("number", "shape")
            and at not in self.used
            and not self.targets.get(self.found[index].folded)
        )

    def _check_fixed(self, label: str, value: float) -> None:
        if label not in self.grammar.fixed:
            if label == "padding" and value == 0:
                return
            raise InvalidInput(f"the built-in {self.builtin.name} has no {label}")
        fixed = self.grammar.fixed[label]
        if not math.isclose(value, fixed, rel_tol=1e-3):
            raise InvalidInput(f"the built-in {self.builtin.name} is written for {label} {fixed:g}, not {value:g}")

    def _phrase_at(self, index: int, phrases: Sequence[str]) -> int:
        """How many tokens of the longest of `phrases` stand at `index`; 0 for none."""
        keys = _squeezed(tuple(phrases))
        squeezed, best = "", 0
        for length in range(1, 2 * MAX_AXIS_WORDS):
            position = index + length - 1
            if position >= len(self.found):
                break
            token = self.found[position]
            if token.kind == "symbol" and token.text in "-_" and squeezed:
                continue
            if token.kind not in ("word", "number"):
                break
            squeezed += token.folded if token.kind == "word" else token.text
            if squeezed in keys:
                best = length
        return best

    def _target_at(self, index: int) -> tuple[tuple[str, ...], int, str]:
        """The longest axis phrase at `index`: its axes, its length in tokens, its first word."""
        squeezed = ""
        best: tuple[tuple[str, ...], int, str] = ((), 0, "")
        count = 0
        for position in range(index, min(index + 2 * MAX_AXIS_WORDS, len(self.found))):
            token = self.found[position]
            if token.kind == "symbol" and token.text in "-_" and squeezed:
                continue
            if token.kind != "word":
                break
            squeezed += token.folded
            count += 1
            if squeezed in self.targets:
                best = (self.targets[squeezed], position - index + 1, squeezed)
            if count == MAX_AXIS_WORDS:
                break
        return best

    def _named_size(self, index: int) -> int:
        """`sequence length 1024`, `rows of 4096`, `batch of 8`."""
        if self.found[index].kind != "word" or index in self.used:
            return 0
        targets, length, phrase = self._target_at(index)
        if not targets and self.found[index].folded in WINDOWS and self._has_number(index + 1):  # "kernel 7"
            targets, length, phrase = tuple(self.grammar.window.split()), 1, self.found[index].folded
        if not targets:
            return 0
        position = index + length
        joining: list[str] = []
        while position < len(self.found) and len(joining) < 4:
            token = self.found[position]
            if token.kind == "word" and token.folded in CONNECTORS:
                joining.append(token.folded)
            elif not (token.kind == "symbol" and token.text in "=:-("):
                break
            position += 1
        if position >= len(self.found) or position in self.used or self.found[position].kind != "number":
            return 0
        if self._is_machine(position) or (phrase not in CONTENTS and self._belongs_to_next(position)):
            return 0
        number = self.found[position]
        if phrase in CONTENTS and self._counted_target(position)[0] == targets and joining[:1] != ["of"]:
            return 0
        counted, _, counted_phrase = self._counted_target(position)
        if phrase in CONTENTS and counted and counted != targets and joining:  # "rows are 2048 long"
            targets, phrase = counted, counted_phrase
        elif phrase in CONTENTS and ("of" in joining or "length" in joining or "siz" in joining or "with" in joining):
            inner = next((self.targets[key] for key in map(_squeeze, CONTENTS[phrase]) if key in self.targets), ())
            targets = inner or targets
            phrase = f"{phrase} of"
        self._assign_all(targets, phrase, number, position)
        return position + 1

    def _has_number(self, position: int) -> bool:
        return position < len(self.found) and self.found[position].kind == "number"

    def _belongs_to_next(self, position: int) -> bool:
        """In "8 rows, 16 columns" and "rows and 16 columns" the figure belongs to what follows it."""
        targets, end, _ = self._counted_target(position)
        if not targets or self._symbol(position - 1) == "=":
            return False
        after = end + (self._symbol(end) in (":", "="))
        return not self._has_number(after)  # "rows 16 columns 32" goes on so

    def _counted_target(self, index: int) -> tuple[tuple[str, ...], int, str]:
        position = index + 1
        for _ in range(4):
            targets, length, phrase = self._target_at(position)
            if targets:
                return targets, position + length, phrase
            if position >= len(self.found):
                break
            token = self.found[position]
            passing = (token.kind == "word" and token.folded in BETWEEN) or (
                token.kind == "symbol" and token.text == "-"
            )
            if not passing and position not in self.used:
                break
            position += 1
        return (), 0, ""

    def _counted(self, index: int) -> int:
        """`16 heads`, `1024 input channels`, `4096-element rows`, `sixteen heads`."""
        token = self.found[index]
        if index in self.used:
            return 0
        if token.kind == "word" and COUNTING.get(token.text.lower(), 0) >= 3:
            token = Token(kind="number", text=token.text, start=token.start, value=COUNTING[token.text.lower()])
        if token.kind != "number" or self._is_machine(index):
            return 0
        targets, end, phrase = self._counted_target(index)
        if not targets:
            return 0
        self._assign_all(targets, phrase, token, index)
        return self._contents(end, phrase) or end

    def _contents(self, index: int, phrase: str) -> int:
        """In "16 rows of 8192" what each of the counted things holds; the position after it, or 0."""
        inner = next((self.targets[key] for key in map(_squeeze, CONTENTS.get(phrase, ())) if key in self.targets), ())
        number = self._next_number(index, signs="")
        if not inner or number is None or number == index or self.found[number].kind != "number":
            return 0
        if self._is_machine(number) or self._counted_target(number)[0] not in ((), inner):
            return 0
        self._assign_all(inner, f"{phrase} of", self.found[number], number)
        return number + 1

    def _assign_all(self, targets: Sequence[str], phrase: str, number: Token, position: int) -> None:
        self.used.add(position)
        self._note(number)
        if phrase in map(_squeeze, self.grammar.leading):
            self.leading[phrase] = int(number.value)
            return
        for target in targets:
            self._assign(target, number.value, f"{phrase} {number.text}")

    def _note(self, token: Token) -> None:
        if token.note is not None:
            self.notes.append(token.note)

    # -- shapes --
    def read_shapes(self) -> None:
        shapes = [
            (index, token)
            for index, token in enumerate(self.found)
            if token.kind == "shape" and index not in self.used and not self._is_machine(index)
        ]
        taken: set[tuple[str, ...]] = set()
        folded: list[tuple[int, ...]] = []
        for index, token in shapes:
            self.used.add(index)
            self._note(token)
            if self.grammar.fold != "none":
                folded.append(token.dims)
            else:
                self._unify(index, token, taken)
        if len(set(folded)) > 1:
            raise InvalidInput(
                f"the shapes {' and '.join(map(str, folded))} differ; {self.builtin.name} needs equal ones"
            )
        if folded:
            self._fold(folded[0])
        if self.builtin.name == "matmul" and len(shapes) == 1 and len(shapes[0][1].dims) == 2:
            self._one_matrix_shape(shapes[0][1])

    def _fold(self, dims: tuple[int, ...]) -> None:
        names = list(self.builtin.intent.shape_order or self.problem.axes)
        if self.builtin.name == "histogram":
            names = names[:1]
        if self.grammar.fold == "all":
            self._assign(names[0], math.prod(dims), f"shape {dims}")
            return
        rows, columns = names[:2]
        self.leading.clear()
        self._assign(columns, dims[-1], f"shape {dims}")
        self._assign(rows, math.prod(dims[:-1]), f"shape {dims}")
        if len(dims) > 2:
            self.notes.append(f"{dims} was read as {math.prod(dims[:-1])} rows of {dims[-1]}")

    def _one_matrix_shape(self, token: Token) -> None:
        rows, columns = token.dims
        if rows != columns and not {"M", "N", "K"} <= set(self.axes):
            raise InvalidInput(f"{token.text} is the shape of one matrix; give both, or M, N and K")
        for name in ("M", "N", "K"):
            self._assign(name, rows, token.text) if rows == columns else None

    def _unify(self, index: int, token: Token, taken: set[tuple[str, ...]]) -> None:
        readings = self._readings(len(token.dims))
        if not readings or (token.bracketed and self.builtin.name == "matmul" and len(token.dims) == 3):
            raise InvalidInput(f"the shape {token.text} does not fit {self.builtin.name}")
        reading = self._nearest(index, readings, token, taken)
        if reading is None:
            raise InvalidInput(f"the shape {token.text} does not fit {self.builtin.name} beside the others")
        taken.add(reading.axes)
        for axis, size in zip(reading.axes, token.dims, strict=True):
            self._assign(axis, size, token.text)

    def _nearest(
        self, index: int, readings: Sequence[ShapeReading], token: Token, taken: set[tuple[str, ...]]
    ) -> ShapeReading | None:
        """The reading whose words stand nearest to the shape; without any, the first that is free and fits."""
        following = self.found[index + 1] if index + 1 < len(self.found) else None
        window = tuple(self.grammar.window.split())
        if following is not None and following.folded in _WINDOWED:  # "3x3 convolution"
            return next((reading for reading in readings if reading.axes == window), None)
        scored = []
        for reading in readings:
            distance = self._distance(index, reading.words)
            if reading.axes == window and max(token.dims) > SMALL_WINDOW and len(readings) > 1:
                continue
            if distance is not None and (reading.axes not in taken or reading.axes == window):
                scored.append((distance, reading))
        if scored:
            return min(scored, key=lambda item: item[0])[1]
        free = [reading for reading in readings if reading.axes not in taken]
        free = [reading for reading in free if self._fits(reading, token)] or free
        if len(free) > 1 and free[0].words and len(token.dims) <= 3:
            small = max(token.dims) <= SMALL_WINDOW
            return free[0] if small else free[-1]
        return free[0] if free else None

    def _fits(self, reading: ShapeReading, token: Token) -> bool:
        axes = self.problem.axes
        return all(
            name not in axes or in_domain(axes[name], size) for name, size in zip(reading.axes, token.dims, strict=True)
        )

    def _distance(self, index: int, phrases: Sequence[str]) -> int | None:
        keys = {fold(word) for phrase in phrases for word in phrase.split()}
        distances = []
        for step, reach in ((1, 3), (-1, 4)):
            for distance in range(1, reach + 1):
                position = index + step * distance
                if not 0 <= position < len(self.found):
                    break
                near = self.found[position]
                if near.kind == "shape" or (near.kind == "symbol" and near.text in ",.;()"):
                    break
                if near.kind == "word" and near.folded in keys:
                    distances.append(2 * distance + (step < 0))
                    break
        return min(distances) if distances else None

    # -- what is left --
    def fold_leading(self) -> None:
        """Batch, heads and tokens are rows of a row-wise operator: their product."""
        if not self.leading:
            return
        rows = next(iter(self.builtin.intent.shape_order or self.problem.axes))
        if rows in self.axes:
            raise InvalidInput(f"{rows} is given both as such and through {', '.join(self.leading)}")
        self.axes[rows] = math.prod(self.leading.values())
        if len(self.leading) > 1:
            self.notes.append(f"{' x '.join(self.leading)} was read as {self.axes[rows]} rows")

    def read_loose_numbers(self) -> None:
        loose = [
            index
            for index, token in enumerate(self.found)
            if token.kind == "number" and index not in self.used and not self._is_machine(index)
        ]
        sizes = [
            index for index in loose if self.found[index].value >= 8 and float(self.found[index].value).is_integer()
        ]
        if len(sizes) == 1 and len(self.problem.axes) == 1 and not self.axes:
            axis = next(iter(self.problem.axes))
            token = self.found[sizes[0]]
            self._assign(axis, token.value, token.text)
            self._note(token)
            self.notes.append(f"{token.text} was read as the size {axis}")
            loose.remove(sizes[0])
        elif self.builtin.name == "matmul" and len(sizes) == 1 and not self.axes and self._says_square(sizes[0]):
            for name in ("M", "N", "K"):
                self._assign(name, self.found[sizes[0]].value, self.found[sizes[0]].text)
            loose.remove(sizes[0])
        square = any(token.text.lower() == "squareshaped" for token in self.found)
        if self.builtin.name == "matmul" and square and len(self.axes) == 1:
            side = next(iter(self.axes.values()))
            self.axes.update(M=side, N=side, K=side)
        for index in loose:
            value, text = self.found[index].value, self.found[index].text
            part_of_name = index > 0 and self.found[index - 1].folded in self._name_ends()  # "relu 6"
            if value >= 3 and (self.builtin.name in ALL_FIGURES_COUNT or (part_of_name and value < 8)):
                raise InvalidInput(f"the figure {text} is not understood; say what it is the size of")
            operands = sum(tensor.shape is not None for tensor in self.problem.inputs.values())
            if value >= 8 and operands == 2 and len(self.problem.axes) == 1 and value not in self.axes.values():
                raise InvalidInput(f"the figure {text} is not understood; say what it is the size of")
            if value not in (0, 1, 2, *self.axes.values()):
                self.notes.append(f"the figure {text} was not understood and is not used")

    def read_groups(self) -> None:
        """ "64 vectors of 1024 floats" and "1000 rows and 500 columns" of an operator that sees one flat array."""
        match = _GROUPS.search(self.text)
        if match is None:
            return
        groups, each = (int(match[name].replace(",", "")) for name in ("groups", "each"))
        axis = next(iter(self.problem.axes))
        if self.axes.get(axis) in (None, groups, each):
            self.axes[axis] = groups * each
            self.notes.append(f"{match[0]!r} was read as {groups * each} elements in all")

    def _says_square(self, index: int) -> bool:
        before = {token.folded for token in self.found[max(0, index - 3) : index]}
        called = index > 0 and self.found[index - 1].text.lower() in ("gemm", "sgemm", "hgemm", "dgemm", "matmul")
        return (
            called
            or bool(before & {"siz", "dimension", "dim", "order"})
            or any(token.text.lower() == "squareshaped" for token in self.found)
        )

    def settle_scalars(self) -> None:
        """Stride and padding by the usual defaults once the window or one of them is given."""
        same = "same padding" in self.notes
        self.notes = [note for note in self.notes if note != "same padding"]
        if not self.scalar_names >= {"stride", "padding"}:
            return
        window = self.scalars.get("window") if "window" in self.scalar_names else self.axes.get("R")
        if window is None and not self.scalars and not same:
            return
        if "window" in self.scalar_names and window is not None:
            self.scalars.setdefault("stride", window)
        elif "window" not in self.scalar_names:
            self.scalars.setdefault("stride", 1)
        if same:
            if window is None or window % 2 == 0 or self.scalars.get("stride") != 1:
                raise InvalidInput("same padding needs an odd window and stride 1; give the padding as a number")
            self.scalars.setdefault("padding", (int(window) - 1) // 2)
        self.scalars.setdefault("padding", 0)
        given = ", ".join(f"{name} {value}" for name, value in sorted(self.scalars.items()))
        self.notes.append(f"settings: {given}")

    def _next_number(self, index: int, *, signs: str = "=:-") -> int | None:
        """Position of the number or shape that follows, over connecting words and signs."""
        for position in range(index, min(index + 4, len(self.found))):
            token = self.found[position]
            if token.kind in ("number", "shape"):
                return None if position in self.used else position
            passing = (token.kind == "word" and token.folded in CONNECTORS) or (
                token.kind == "symbol" and token.text in signs
            )
            if not passing:
                return None
        return None

    def _is_machine(self, index: int) -> bool:
        """Whether the figure says how the kernel runs (threads, tiles, milliseconds), not what it computes."""
        after = index + 1
        while self._symbol(after) == "-":
            after += 1
        if self._phrase_at(after, words.MACHINE_WORDS_AFTER) or self._symbol(index + 1) == "%":
            return (
                not self._target_at(after)[0]
                or self._phrase_at(after, words.MACHINE_WORDS_AFTER) > self._target_at(after)[1]
            )
        clause: list[str] = []
        signs = "-=" if self.found[index].kind == "shape" else "-=:"  # "last step: a 3000x2000 matrix"
        for token in reversed(self.found[max(0, index - 7) : index]):
            if token.kind == "symbol" and token.text not in signs:
                break
            if token.kind == "word":
                clause.insert(0, token.text.lower())
        if re.search(r"\b(?:each|every|per|a) (?:thread|warp|lane|iteration|instruction|block)\b", " ".join(clause)):
            return True
        before = [fold(word) for word in clause]
        if before[-1:] == ["within"] and self.found[index].value >= SMALLEST_COUNT:
            return False  # no tolerance
        while before:
            if any("".join(before[-count:]) in _MACHINE_BEFORE for count in range(1, len(before) + 1)):
                return True
            if before.pop() not in _LINKING:
                break
        return False


@lru_cache(maxsize=256)
def _squeezed(phrases: tuple[str, ...]) -> frozenset[str]:
    return frozenset(map(_squeeze, phrases))


@lru_cache(maxsize=8192)
def _squeeze(phrase: str) -> str:
    return "".join(fold(word) for word in re.findall(r"[A-Za-z0-9]+", phrase))


_LINKING = frozenset(
    map(fold, ("of", "is", "to", "by", "at", "should", "be", "must", "set", "around", "about", "equal", "a", "the"))
)
_MACHINE_BEFORE = frozenset(map(_squeeze, words.MACHINE_WORDS_BEFORE))
_MACHINE_NAMES = frozenset(
    """block threads tile bm bn bk tm tn block_size unroll warps num_warps grid rtol atol tol seed nthreads block_dim
    tile_size numthreads num_threads block_m block_n block_k sm""".split()  # noqa: SIM905
)
