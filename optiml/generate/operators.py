"""The one built-in operator that a text asks for; whatever would make it another one is refused."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from functools import cache

from optiml.generate import vocabulary as words
from optiml.generate.framing import check_framing
from optiml.generate.phrases import Mention, is_light
from optiml.generate.refusal import Refused, not_built_in, spoken_name
from optiml.generate.vocabulary import GRAMMARS, UNIQUE, Grammar
from optiml.generate.words import Token, fold, sentences
from optiml.problems.problem import Builtin

NETWORK_LAYER = "a layer of a network"  # a label of the vocabulary: often where a kernel is used, not what it is


def find_operator(
    found: Sequence[Token],
    mentions: Sequence[Mention],
    formulas: Sequence[str],
    foreign_formulas: Sequence[str],
    operators: Mapping[str, Builtin],
) -> str:
    """The one built-in operator that the text asks for.

    Args:
        found: tokens of the text.
        mentions: phrases in it.
        formulas: operators that its formulas name.
        foreign_formulas: what its other formulas compute.
        operators: the built-in problems to choose from.

    Raises:
        Refused: there is none, or several, or something in the text makes it another one.
    """
    if foreign_formulas:
        raise Refused(not_built_in(foreign_formulas[0]))
    asked = [item for item in _asked(found, mentions) if item.kind == "operator"]
    hinted = [item for item in mentions if item.label in words.RANK_HINTS and not item.negated]
    names = list(dict.fromkeys([*(item.label for item in asked), *formulas]))
    for item in hinted:
        name = _with_rank(item, found)
        if name is not None and name not in names:
            names.append(name)
    names = [name for name in names if name in operators]
    if not names:
        raise Refused(_nothing_found(mentions))
    chosen = _primary(names, asked)
    check_framing(found, mentions, chosen)
    _check_sequence(found, mentions, chosen)
    check_changes(found, mentions, chosen)
    _check_composition(found, mentions, chosen)
    return chosen


def _asked(found: Sequence[Token], mentions: Sequence[Mention]) -> list[Mention]:
    """Mentions that are the task, not denied and not its surroundings ("the softmax used in attention")."""
    asked = [item for item in mentions if not item.negated]
    central = [item for item in asked if item.kind == "modifier" or not _is_surroundings(item, found, mentions)]
    return central if any(item.kind == "operator" for item in central) else asked


def _stands_apart(mention: Mention, found: Sequence[Token], mentions: Sequence[Mention]) -> bool:
    """Whether another sentence or clause than its own names the operators: "I train a CNN and need a fast relu"."""
    sentence = sentences(found)
    return all(sentence[item.first] != sentence[mention.first] for item in mentions if item.kind == "operator")


def _is_surroundings(mention: Mention, found: Sequence[Token], mentions: Sequence[Mention]) -> bool:
    before = " ".join(token.text.lower() for token in found[max(0, mention.first - 6) : mention.first])
    if mention.label == NETWORK_LAYER and _stands_apart(mention, found, mentions):
        return True
    if mention.label == NETWORK_LAYER and re.search(r"\b(?:for|in|of|from|inside)(?: [\w']+){0,3}$", before):
        return True
    return _surroundings().search(before) is not None


@cache
def _surroundings() -> re.Pattern[str]:
    phrases = "|".join(words.SURROUNDINGS)
    return re.compile(
        rf"\b(?:{phrases})(?: (?:a|an|the|each|every|its|transformer|multi|standard|flash|decoder|encoder))*$"
    )


def _with_rank(mention: Mention, found: Sequence[Token]) -> str | None:
    """The operator behind a name whose number of dimensions has to be read elsewhere in the text."""
    hint = words.RANK_HINTS[mention.label]
    text = " ".join(token.folded for token in found if token.kind == "word")
    if any(f" {' '.join(map(fold, phrase.split()))} " in f" {text} " for phrase in hint.excluded_by):
        return None
    ranks = {len(token.dims) for token in found if token.kind == "shape"}
    by_shape = ranks & {len(reading.axes) for reading in GRAMMARS[hint.operator].shapes}
    by_word = any(f" {' '.join(map(fold, phrase.split()))} " in f" {text} " for phrase in hint.settled_by)
    return hint.operator if by_word or by_shape else None


def _primary(names: Sequence[str], asked: Sequence[Mention]) -> str:
    """The operator that explains all the others that are mentioned."""
    if len(names) == 1:
        return names[0]
    able = [
        name
        for name in names
        if all(other == name or other in GRAMMARS[name].explains for other in names if name in GRAMMARS)
    ]
    if len(able) == 1:
        return able[0]
    raise Refused(f"the text asks for several operators ({', '.join(map(spoken_name, names))}); ask for one at a time")


def _check_sequence(found: Sequence[Token], mentions: Sequence[Mention], chosen: str) -> None:
    """Two different operators joined by "then", "followed by" and the like are two tasks."""
    telling = [item for item in mentions if item.kind in ("operator", "foreign", "arithmetic") and not item.negated]
    for left, right in itertools.pairwise(telling):
        if left.label == right.label or chosen not in (left.label, right.label):
            continue
        between = " ".join(token.text.lower() for token in found[left.last + 1 : right.first] if token.text not in ",-")
        named = left.kind == right.kind == "operator" and min(left.strength, right.strength) == UNIQUE
        if between in words.AFTERWARDS or (named and (between in words.THEN or between in ("+", "&", "/"))):
            raise Refused(f"the text asks for {left.text!r} and {right.text!r}; ask for one at a time")


def _check_composition(found: Sequence[Token], mentions: Sequence[Mention], chosen: str) -> None:
    """Refuse "the sum of the softmax", "2 * softmax(x)" and "softmax(x) - y"."""
    telling = [item for item in mentions if item.kind not in ("plain", "dtype")]
    for other, item in itertools.pairwise([None, *telling]):
        if item is None or item.kind != "operator":
            continue
        if other is not None and not other.negated and chosen in (other.label, item.label):
            between = [token.text.lower() for token in found[other.last + 1 : item.first] if token.kind == "word"]
            named = other.label != chosen or item.strength == UNIQUE
            if named and "of" in between and set(between) <= {"of", "the", "a", "all", "its", "each"}:
                raise Refused(f"the text asks for {other.text!r} of {item.text!r}; ask for one at a time")
        if item.label != chosen:
            continue
        if item.first >= 2 and found[item.first - 1].text == "(" and _calls(found, item.first - 2):
            raise Refused(f"the text asks for {found[item.first - 2].text!r} of {item.text!r}; ask for one at a time")
        beside = {
            token.text.lower() for token in (*found[max(0, item.first - 1) : item.first], *found[item.last + 1 :][:1])
        }
        following = found[item.last + 1].text.lower() if item.last + 1 < len(found) else ""
        if "plus" in beside or following in ("times", "minus", "divided"):
            raise Refused(f"the text asks for something done to {item.text!r}; ask for one at a time")
        after = " ".join(token.text.lower() for token in found[item.last + 1 : item.last + 3])
        if re.match(rf"(?:{'|'.join(words.AFTERWARDS)})\b", after):
            raise Refused(f"the text asks for something more after {item.text!r}; ask for one at a time")
        if _symbol_before(found, item.first) or _symbol_after_call(found, item.last):
            raise Refused(f"the formula around {item.text!r} asks for more than {spoken_name(chosen)}")


def _calls(found: Sequence[Token], index: int) -> bool:
    """Whether the word opens a call whose first argument is a call again: "max(relu(x), y)"."""
    token, bracket = found[index], found[index + 1]
    touching = token.kind == "word" and token.start + len(token.text) == bracket.start
    following = next((item for item in found[index + 2 :] if item.kind == "symbol"), None)
    return touching and following is not None and following.text == "("


def _symbol_before(found: Sequence[Token], first: int) -> bool:
    if first == 0 or found[first - 1].kind != "symbol" or found[first - 1].text not in "*+^@-/":
        return False
    if first < 2 or found[first - 1].text in "*+^@":
        return first >= 2
    operand = found[first - 2]
    touching = operand.start + len(operand.text) == found[first - 1].start
    return not touching and found[first - 1].text == "-" and (operand.kind == "number" or len(operand.text) == 1)


def _symbol_after_call(found: Sequence[Token], last: int) -> bool:
    """Whether arithmetic follows the closing parenthesis of a call right after the name."""
    index = last + 1
    if index < len(found) and found[index].kind == "symbol" and found[index].text in "*+^@":
        return True
    if index < len(found) and found[index].text.lower() == "of":  # "softmax of x/T"
        operand, sign = found[index + 1 : index + 2], found[index + 2 : index + 3]
        return bool(operand and sign) and len(operand[0].text) == 1 and sign[0].text in tuple("*+^@/")
    if index >= len(found) or found[index].text != "(":
        return False
    depth = 0
    for position in range(index, len(found)):
        depth += (found[position].text == "(") - (found[position].text == ")")
        if depth == 0:
            following = found[position + 1 : position + 2]
            return bool(following) and following[0].kind == "symbol" and following[0].text in "*+^@-/"
    return False


def check_changes(found: Sequence[Token], mentions: Sequence[Mention], chosen: str) -> None:
    """Refuse what would make the chosen operator another one: other operators, qualifiers, further arithmetic."""
    grammar = GRAMMARS.get(chosen, Grammar())
    for item in _asked(found, mentions):
        if item.kind == "operator" and item.label != chosen and item.label not in grammar.explains:
            raise Refused(
                f"the text asks for {spoken_name(item.label)} besides {spoken_name(chosen)}; ask for one at a time"
            )
        if item.kind == "foreign" and not _explained(item, grammar, chosen):
            raise Refused(not_built_in(item.label, item.text))
        if item.kind == "modifier" and chosen not in words.MODIFIERS[item.label].harmless_for:
            figured = any(token.kind == "number" for token in found[item.first : item.last + 1])
            if figured and item.label in ("columns one by one", "another direction"):
                continue  # "over 12288 columns" is a size
            following = found[item.last + 1] if item.last + 1 < len(found) else None
            if (
                item.label == "dilation"
                and following is not None
                and (following.kind == "number" or following.text in "=:")
            ):
                continue  # the sizes judge its value
            raise Refused(f"the built-in {spoken_name(chosen)} has no {item.text!r} ({item.label})")
        if item.kind == "arithmetic" and item.label not in grammar.explains:
            raise Refused(f"the text asks for {item.text!r}, which is not part of {spoken_name(chosen)}")
    _check_columns(found, chosen)
    _check_number_of_operands(found, chosen)
    if chosen in _ONE_RESULT:
        _check_groups(found, mentions)
        _check_result(found, mentions, chosen)
    for item in mentions:
        if item.negated and item.kind in ("arithmetic", "operator") and item.label in grammar.needs:
            raise Refused(f"{spoken_name(chosen)} without {item.text!r} is another operator, and that is not built in")


_ONE_RESULT = ("sum", "dot", "histogram", "prefix_sum")
_ELEMENTS = frozenset(  # folded; "each element" asks for nothing more, "each row" for one result each
    map(
        fold,
        """element elements value values entry number item items integer int float double half byte pixel sample index
        position thread threads block blocks warp warps lane sm iteration launch second bin bins bucket character char
        key word one of in is time other pair component term occurrence occurs appears i x""".split(),  # noqa: SIM905
    )
)


def _check_groups(found: Sequence[Token], mentions: Sequence[Mention]) -> None:
    """Refuse "per channel" and "each customer" of an operator that gives one result for the whole array."""
    negated = {index for item in mentions if item.negated for index in range(item.first, item.last + 1)}
    for index, token in enumerate(found):
        if token.kind != "word" or token.text.lower() not in ("per", "each", "every") or index in negated:
            continue
        following = next((item for item in found[index + 1 : index + 4] if not is_light(item)), None)
        if following is not None and following.kind == "word" and following.folded not in _ELEMENTS:
            raise Refused(
                f"'{token.text} {following.text}' may ask for several results; say in other words what to compute"
            )


_BY_ROWS = ("softmax", "layernorm", "rmsnorm", "cross_entropy")
_DIRECTIONS = frozenset("over on along across down through per each every by among".split())  # noqa: SIM905


def _check_columns(found: Sequence[Token], chosen: str) -> None:
    """Refuse "softmax on the columns" of an operator that works on rows."""
    if chosen not in _BY_ROWS:
        return
    for index, token in enumerate(found):
        if token.folded != fold("column"):
            continue
        before = index - 1
        while before >= 0 and found[before].text.lower() in ("the", "all", "its", "a"):
            before -= 1
        if before >= 0 and found[before].text.lower() in _DIRECTIONS and not _says_each_row(found):
            raise Refused(f"the built-in {spoken_name(chosen)} works on rows, not {found[before].text} columns")


def _says_each_row(found: Sequence[Token]) -> bool:
    """ "over the columns of each row" says the same as "row by row"."""
    return any(
        first.text.lower() in ("each", "every", "per") and second.folded == "row"
        for first, second in itertools.pairwise(found)
    )


_ARRAYS = frozenset(map(fold, ("array", "vector", "matrix", "tensor", "list", "signal", "sequence")))
_OF_TWO = ("vector_add", "dot")


def _check_number_of_operands(found: Sequence[Token], chosen: str) -> None:
    """Refuse "the sums of 1000 arrays" of an operator that takes one or two."""
    if chosen not in (*_OF_TWO, "sum", "prefix_sum", "histogram", "transpose", "matrix_copy"):
        return
    for index, token in enumerate(found):
        if token.kind != "number" or token.value <= (2 if chosen in _OF_TWO else 1):
            continue
        if index and (found[index - 1].text == "-" or found[index - 1].folded in ("length", "siz")):
            continue  # "two length-2048 vectors"
        following = next((item for item in found[index + 1 :] if not is_light(item) or item.folded in _ARRAYS), None)
        if following is not None and following.folded in _ARRAYS and following.text.lower() != following.folded:
            raise Refused(f"'{token.text} {following.text}' are more than {spoken_name(chosen)} takes")


_PARTS = frozenset(
    map(fold, ("row", "column", "col", "channel", "group", "image", "batch", "user", "class", "segment"))
)
_RESULTS = re.compile(
    r"\b(?:give|gives|giving|returns?|returning|yields?|yielding|produces?|producing|resulting|outputs?|outputting)"
    r"(?: (?:in|into|as|is|a|an|one|the|whole)){0,3} (?:vector|array|matrix|row|column|list)s?\b"
)


def _check_result(found: Sequence[Token], mentions: Sequence[Mention], chosen: str) -> None:
    """Refuse "column totals" and "giving a vector" of an operator that gives one number."""
    for item in mentions:
        before = found[item.first - 1] if item.first else None
        if item.kind == "operator" and item.label == chosen and before is not None and before.folded in _PARTS:
            raise Refused(
                f"'{before.text} {item.text}' may ask for several results; say in other words what to compute"
            )
    said = _RESULTS.search(" ".join(token.text.lower() for token in found if token.kind == "word"))
    if said is not None and chosen in ("sum", "dot"):
        raise Refused(f"{said[0]!r} is no single number; say in other words what to compute")


def _explained(item: Mention, grammar: Grammar, chosen: str) -> bool:
    if item.label in words.RANK_HINTS:
        return words.RANK_HINTS[item.label].operator == chosen
    return item.label in grammar.explains


def check_formulas(labels: Sequence[str], chosen: str) -> None:
    """Refuse formulas that are neither the chosen operator nor part of its description."""
    for label in labels:
        if label != chosen and label not in GRAMMARS.get(chosen, Grammar()).explains:
            raise Refused(f"the formula in the text is not {spoken_name(chosen)}")


def _nothing_found(mentions: Sequence[Mention]) -> str:
    foreign = [item for item in mentions if item.kind == "foreign" and not item.negated]
    if foreign:
        return not_built_in(foreign[0].label, foreign[0].text)
    return f"the text names none of the built-in operators: {', '.join(map(spoken_name, sorted(GRAMMARS)))}"
