"""The text of a request made ready for reading: spelling, quoted code and ranges of values."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence

from optiml.generate.refusal import Refused
from optiml.generate.words import plain

MAX_CHARACTERS = 4_000


def normalised(text: str) -> str:
    """The text in the spelling that the other stages read.

    Raises:
        Refused: it is too long, has no letters, or is written in another script.
    """
    if len(text) > MAX_CHARACTERS:
        raise Refused(
            f"the text has {len(text)} characters and at most {MAX_CHARACTERS} are read; say in a sentence or two what "
            "the kernel has to compute"
        )
    letters = [char for char in unicodedata.normalize("NFKC", text) if unicodedata.category(char).startswith("L")]
    if not letters:
        raise Refused("the text names no operator; say in English what the kernel has to compute")
    if any(not unicodedata.name(char, "").startswith(("LATIN", "GREEK")) for char in letters):
        raise Refused("only English is read whole; say in English what the kernel has to compute")
    text = re.sub(r"<\s*([a-z])\s*,\s*([a-z])\s*>", r"\1 . \2", plain(text))  # an inner product
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text)
    return _ARRAY.sub(_as_shape, _LETTERS.sub(_one_by_one, text))


_ARRAY = re.compile(r"\b([A-Za-z]\w*)((?:\[\d+\]){2,})")  # "logits[512][128]"
_LETTERS = re.compile(r"\b([A-Z]{2,6})\s*=\s*[(\[]?(\d+(?:\s*[,x]\s*\d+)+)[)\]]?")  # "NCHW = 8, 3, 32, 32"


def _as_shape(match: re.Match[str]) -> str:
    return f"{match[1]} ({', '.join(re.findall(r'[0-9]+', match[2]))})"


def _one_by_one(match: re.Match[str]) -> str:
    sizes = re.findall(r"\d+", match[2])
    if len(sizes) != len(match[1]) or len(set(match[1])) != len(sizes):
        return match[0]
    return ", ".join(f"{letter}={size}" for letter, size in zip(match[1], sizes, strict=True))


_REWRITES = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"(?i)\b([1-5])[\s-]?d(?:imensional)?\b(?!\s*=)", r"\1d"),  # "3-D", "2 dimensional"
        (r"(\w)'\(", r"\1 derivative ("),  # "gelu'(x)"
        (r"\b([A-Z])\s*\(\s*[A-Z]\s?x\s?[A-Z]\s*\)", r"\1"),  # "C(MxN) = A(MxK) * B(KxN)"
        (
            r"(?i)(?<!mean )\bsquare(?= (?:[\w-]+ )?(?:matrix|matrices|matmul|gemm|sgemm|hgemm|\d))",
            "squareshaped",
        ),  # no power of two
        (r"\b([A-Z]) transposed?\b|\btransposed? (?:of )?([A-Z])\b", r"\1\2^T"),
        (r"(\d[\])]?)\s*[@*]\s*(?=\w*[\[(]?\d+\s*[x,]\s*\d)", r"\1, "),  # a product of shapes
        (r"(\d+)\s*(?:->|to)\s*(\d+) channels", r"\1 input channels, \2 output channels"),
        (r"(\d+) in(?:put)?(?:,| and|, and) (\d+) out(?:put)? channels", r"\1 input channels, \2 output channels"),
        (r"(?i)\b(matri(?:x|ces)(?: is| are)) square\b", r"\1 squareshaped"),
        (r"(?i)\b(?:one|a single) channel\b", "1 channel"),
        (r"(?i)\b(\d+) cubed\b", r"\1x\1x\1"),
        (r"(?i)\b(\d+)[\s-]*bits?\b", r"\1bit"),
        (r"(?i)\bsingle[\s-]precision\b", "fp32"),  # so that no "single" stands between two words of a phrase
        (r"(?i)\bdouble[\s-]precision\b", "fp64"),
        (r"\(\s*M\s?x\s?N\s?x\s?K\s*\)", " "),  # the order in which three sizes of a product are read anyway
        (r"\b([A-Z]) by \1(?= matri)", r"\1 x \1"),
        (r"\bin R\^[a-z]\b", " "),
        (r"(\w\[\w\]) plus (?=\w+\[\w\])", r"\1 + "),
        (r"(\w\[\w\]) (?:should be|must be|shall be|is set to|becomes|gets|equals) (?=\w+\[\w\])", r"\1 = "),
        (r"\bLN\b(?!\s*\()", "layer norm"),
        (r"\s/\s(?=[A-Za-z]+: )", "; "),  # "operator: relu / size: 8192"
        (r"\b[Nn]um_?(Elements|elements|Rows|rows|Cols|cols|Columns|columns)(?=\s*[=:])", r"\1"),
        (r"(?i)\baccumulate (?:it |them |the results? )?into (?:one|a single) (?:number|value|scalar)\b", "sum"),
        (r"\b([A-Z]) times ([A-Z])\b(?!\s*\^)", r"\1 @ \2"),
        (r"(?i)\b(?:stored )?(?:in )?row[\s-]major(?: (?:order|layout|format|storage))?\b", " "),  # as everywhere here
        (r"(?i)\bcubic (?=(?:\d\S* )?(?:window|kernel|pool))", " "),
        (r"\b(?:std|thrust|cub|torch|at|tf|jnp|np)::", " "),
        (r"\b\w+\.(?:begin|end|data|size)\(\)", " "),
        (r"(?i)\b(?:sizes|lengths) (\d[\d,]*) and \1\b", r"size \1"),
        (r"\b([A-Z])x([A-Z])\b", r"\1 x \2"),
        (r"(?i)\b[\w.]+ (?:million|thousand|billion) \((\d[\d,]{3,})\)", r"\1"),
        (r"(\d) times (?=\d+ ?x ?\d)", r"\1, "),
        (r"\b([A-Z]) (?:has|with) (\d+) rows and (\d+) columns", r"\1 \2x\3"),
        (r"\+[- ]?(?=scan\b)", "sum "),
        (r"(?i)(\d+) channels to (\d+) channels", r"\1 input channels, \2 output channels"),
        (
            r"(?i)(?<!matrix )\bproduct of (?:an? )?(\d+ ?x ?\d+(?: \w+)?) and (?:an? )?(?=\d+ ?x ?\d+)",
            r"matrix product of \1 and ",
        ),
        (r"(?i)\bpointwise \(?1x1\)? (?=conv)", "1x1 "),
        (r"(?i)\b((?:scale|weight|gain|gamma)(?: and (?:shift|bias|beta))?) per (?:column|feature)\b", r"\1"),
        (r"(?i)\b(\d+) sequences of (\d+) (?:tokens|positions)\b", r"batch \1, sequence length \2"),
        (r"\b(?!10+\b)(\d{2,5})\s?(?:\^|\*\*)\s?3\b", r"\1x\1x\1"),
        (r"[\"'](\w+)[\"']\s*:", r"\1:"),
        (r"\b(?:np\.|torch\.)?exp\(([a-z]) - \1\.max\([^()]*\)\)", r"exp of \1"),
        (r"(?i)\bso that nothing (?:can )?overflows?\b", " "),
        (r"(\d) square\b", r"\1 squareshaped"),
        (r"(\d) RGB images?\b", r"\1 images, 3 channels,"),
        (r"\bRGB images?\b", "3 channel images"),
        (r"(?i)\beach (?:vector|array|of them) (?:holds|has|contains) (?=\d)", "length "),
        (r"(?i)\b(\d+) (\d+x\d+) (?:filters|kernels)\b", r"\1 output channels, \2 kernel"),
        (r"(?i)\b(?:already )?(?:projected and )?split into heads\b", " "),
        (r"(?i)\b(\d+)-(?:dimensional|dim)\b", r"\1 dim"),
        (r"(?i)\bapproximate\s*=\s*['\"]?none['\"]?", "exact"),
        (r"(?i)\b(\w+)\s*=\s*['\"]?(?:false|none)\b['\"]?", r"no \1"),
        (r"(?i)\b(\w+)\s*=\s*true\b", r"with \1"),
        (r"(?i)\b(?:alpha\s*=\s*1(?:\.0*)?|beta\s*=\s*0(?:\.0*)?)(?![\d.])", " "),  # a plain product
        (r"\b([a-z]) \. (?!\1\b)([a-z])\b", r"dot product of \1 and \2"),
        (r"([A-Za-z]{3,}) \+ (?=[A-Za-z]{3,})", r"\1 plus "),
        (r"`{1,3}", " "),
    )
)

_ELEMENT = r"(?:float|double|half2?|int|char|bool|long|__half|__nv_bfloat16|nv_bfloat16|u?int\d+_t)"
_SIGNATURE = re.compile(
    r"(?:template\s*<[^<>]*>\s*)?(?:extern\s*\"C\"\s*)?(?:__global__\s+|__device__\s+)?"
    r"(?:(?:void|float|double|int)\s+)?(?:__launch_bounds__\([^)]*\)\s*)?(?P<name>[A-Za-z_]\w*)\s*"
    rf"\((?P<parameters>[^()]*\b{_ELEMENT}\s*(?:const\s*)?\*[^()]*)\)\s*(?P<body>;|\{{[^{{}}]*(?:\}}|\Z))?"
)
_POINTER = re.compile(r"(?:const\s+)?(?P<type>[\w:]+(?:\s+(?:char|int|long|short|const))*)\s*(?:const\s*)?\*")
_CODE_DTYPES = {
    "float": "float32", "float4": "float32", "double": "float64", "half": "float16", "__half": "float16",
    "half2": "float16", "__nv_bfloat16": "bfloat16", "nv_bfloat16": "bfloat16", "bool": "bool", "char": "int8",
    "signed char": "int8", "int8_t": "int8", "unsigned char": "uint8", "uint8_t": "uint8", "short": "int16",
    "int": "int32", "int32_t": "int32", "unsigned": "uint32", "unsigned int": "uint32", "uint32_t": "uint32",
    "long": "int64", "long long": "int64", "int64_t": "int64",
}  # fmt: skip
_WORKED = re.compile(r"(?is)/\*.*\bexamples?\b|\bexample:\s*\n?\s*(?:input|x|A)\b")
_EXAMPLE = re.compile(r"(?is)\b(?:for\s+)?examples?\s*(?:[12]\s*)?[:\n].*?(?=\*/|__global__|\bextern\b|\Z)")


def without_code(text: str) -> tuple[str, str | None]:
    """The text with worked examples removed and signatures replaced by their function's name; the element dtype."""
    text = re.sub(r"(?m)^\s*#\s*include.*$", " ", text)
    if _WORKED.search(text):
        text = _EXAMPLE.sub(" ", text)
    text = re.sub(r"/\*|\*/|(?<!:)//", "\n", text)
    dtypes: list[str] = []

    def name_only(match: re.Match[str]) -> str:
        body = (match["body"] or "").strip("{}; \n\t.")
        if body:
            raise Refused(
                "the text holds the body of a function; give existing code as a kernel, or say in words what it does"
            )
        pointers = [pointer["type"].split("::")[-1].strip() for pointer in _POINTER.finditer(match["parameters"])]
        dtypes.extend(_CODE_DTYPES[name] for name in pointers if name in _CODE_DTYPES)
        return f" {match['name']} ; "

    text = _SIGNATURE.sub(name_only, text)
    if len(re.findall(r"(?m);\s*$", text)) >= 3 or re.search(r"(?m)^\s*(?:def|class|import|return|for\s*\()\b", text):
        raise Refused("the text holds source code; give it as a kernel, or say in words what it computes")
    text = re.sub(r"__global__|\bvoid\b|extern\s*\"C\"", " ", text)
    return text, _element_dtype(dtypes)


def _element_dtype(dtypes: Sequence[str]) -> str | None:
    """The one dtype of a signature's arrays: the floating one, where integer arrays stand beside it."""
    floating = sorted({dtype for dtype in dtypes if "float" in dtype})
    if len(floating) > 1:
        raise Refused(
            f"the signature mixes {' and '.join(floating)} arrays; the built-in kernels have one element type"
        )
    distinct = floating or sorted(set(dtypes))
    return distinct[0] if len(distinct) == 1 else None


_RANGE = re.compile(
    r"(?:\bin\s+)?\[\s*0\s*,\s*(?P<below>\d+)\s*\)|(?:\bin\s+)?\[\s*0\s*,\s*(?P<closed>\d+)\s*\]"
    r"|(?:\bfrom\s+|\bbetween\s+)?\b0\s*(?:-|\.\.\.?|to|and|through)\s*(?P<last>\d+)(?:\s+inclusive)?\b"
)
_COUNTING = re.compile(r"(?i)\bhistogram\b|\bbincount\b")
_BELOW = re.compile(r"(?i)(?:\bwith )?\bvalues? (?:below|under|less than|smaller than) (?P<below>[1-9]\d*)\b")
OTHER_RANGE = re.compile(r"\b(?:from|between)\s+-?[\d.]+\s+(?:to|and)\s+-?[\d.]+|\[\s*-[\d.]+\s*,")


def value_range(text: str) -> tuple[str, int | None]:
    """The text without the first range of values from 0 on ("0-255", "[0, 256)"), and how many integers it holds."""
    below = _BELOW.search(text)
    if below is not None and _COUNTING.search(text):
        return f"{text[: below.start()]} {text[below.end() :]}", int(below["below"])
    match = _RANGE.search(text)
    if match is None:
        return text, None
    count = int(match["below"]) if match["below"] else int(match["closed"] or match["last"]) + 1
    return f"{text[: match.start()]} {text[match.end() :]}", count


_NEGATIVE_SHAPE = re.compile(r"(?:^|(?<=[\s(=:]))-\d[\d,]*\s*(?:x|X|by|\*)\s*\d")
_UNEQUAL = re.compile(r"(?i)\b(?:sizes|lengths) (\d[\d,]*) and (?!\1\b)\d")

_TWO_SETTINGS = re.compile(
    r"(?i)\b(?:strides?|paddings?|windows?|dilations?|kernel sizes?) (?:of )?(\d+) and (?!\1\b)\d+\b(?! \w+s\b)"
)


def check_stated_sizes(text: str) -> None:
    """Refuse sizes that no operator can have.

    Raises:
        Refused: one is negative, or operands are said to be of two sizes.
    """
    if _NEGATIVE_SHAPE.search(text):
        raise Refused("the text gives a negative size")
    unequal = _UNEQUAL.search(text) or _TWO_SETTINGS.search(text)
    if unequal is not None:
        raise Refused(f"{unequal[0]!r} are two sizes; say what each is the size of")
