"""What the user decided, read once: command line, then environment, then optiml.toml in the home folder.

Nothing is ever read from the working folder, which may hold somebody else's files. A setting called
`compile_timeout_s` is `OPTIML_COMPILE_TIMEOUT_S` in the environment and a key of that name in the file.
"""

from __future__ import annotations

import atexit
import difflib
import math
import os
import tempfile
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from shutil import rmtree
from typing import Any

from optiml.errors import InvalidInput, ModelFailed, SetupError

FILE_NAME = "optiml.toml"
_PREFIX = "OPTIML_"
_MAX_FILE_BYTES = 1 << 20
_MAX_KEY_BYTES = 16 << 10
_MAX_TIMEOUT_S = 86_400.0
_MAX_COUNT = 4096
_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off", "")


@dataclass(frozen=True, kw_only=True)
class ModelEndpoint:
    """The language model to ask, and where its key lies; the key itself is read when it is used and never kept."""

    name: str = ""  # as the endpoint calls it
    url: str = ""  # of the API, up to its version: https://host/v1
    api: str = "openai"  # or anthropic
    key_env: str = ""  # name of an environment variable
    key_file: str = ""
    good_at: str = ""  # words for the tasks that an expert of a text mixture is chosen for
    timeout_s: float = 120.0  # of one call with all its retries

    def read_key(self, environment: Mapping[str, str] | None = None) -> str | None:
        """The key, or None where the endpoint needs none.

        Raises:
            ModelFailed: the variable or file that should hold it does not.
        """
        if self.key_env:
            key = (os.environ if environment is None else environment).get(self.key_env, "").strip()
            if not key:
                raise ModelFailed(f"the environment variable {self.key_env} holds no key: set it")
            return _checked_key(key)
        if self.key_file:
            try:
                with Path(self.key_file).expanduser().open("rb") as file:
                    key = file.read(_MAX_KEY_BYTES).decode("utf-8").strip()
            except (OSError, UnicodeDecodeError) as error:
                raise ModelFailed("the key file of the model cannot be read: check key_file") from error
            if not key:
                raise ModelFailed("the key file of the model is empty: check key_file")
            return _checked_key(key)
        return None


def _checked_key(key: str) -> str:
    if not (key.isascii() and key.isprintable()):
        raise ModelFailed("what stands in the place of the model's key is no key: it must be one line of ASCII")
    return key


@dataclass(frozen=True, kw_only=True)
class TextMixture:
    """Chat models that answer together: `active` of them draft, the best suited one writes the answer."""

    experts: tuple[ModelEndpoint, ...]
    active: int = 2


@dataclass(frozen=True, kw_only=True)
class MixtureSettings:
    """Local experts that write one text together; the [mixture] table. Nothing is loaded before its first use.

    Attributes:
        experts: model folders, `.gguf` files, or names on the Hugging Face hub.
        checkpoint: folder that `optiml train-mixture` wrote; empty: untrained, so whatever expert comes first writes.
        devices: `auto`, `cpu` or `cuda:N`, one for all experts or one for each.
        dtype: of the experts' weights: auto, float32, bfloat16 or float16.
        four_bit: keep the weights in 4 bits (needs bitsandbytes).
        active: K, how many experts work on a task; a checkpoint has its own.
        stacks: Q, into how many parts each expert is cut; a checkpoint has its own.
        refresh: r, peers read the text again after so many tokens; 1 is exact.
        prompt_encoder: model folder of a frozen encoder for the router; empty: the experts' own embeddings.
        top_p: only the likeliest tokens that together have this probability are drawn.
        allow_download: fetch experts that are not here.
        idle_s: after so long without a call the process that holds the models is ended.
        timeout_s: for one call, loading apart.
    """

    experts: tuple[str, ...] = ("Qwen/Qwen2.5-Coder-1.5B", "hpcgroup/hpc-coder-v2-1.3b", "bigcode/starcoder2-3b")
    checkpoint: str = ""
    devices: tuple[str, ...] = ("auto",)
    dtype: str = "auto"
    four_bit: bool = False
    active: int = 2
    stacks: int = 4
    refresh: int = 16
    prompt_encoder: str = ""
    top_p: float = 0.95
    allow_download: bool = False
    idle_s: float = 900.0
    timeout_s: float = 600.0

    def __post_init__(self) -> None:
        if not self.experts or not self.devices:
            raise InvalidInput("[mixture] needs at least one expert and one device")
        if self.active > len(self.experts):
            raise InvalidInput(f"[mixture] active is {self.active} and there are {len(self.experts)} experts")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """All settings of a process."""

    home: Path  # store, kernels and runs
    roots: tuple[Path, ...] = ()  # folders whose files may be named over MCP
    device: str = "auto"
    trust_reference: bool = False  # run a stranger's reference without a sandbox
    allow_commands: bool = False  # let profile_ncu run commands
    compile_timeout_s: float = 30.0
    compile_memory_bytes: int = 4 << 30
    kernel_timeout_s: float = 20.0
    reference_timeout_s: float = 20.0
    store_limit_bytes: int = 1 << 30
    chat: ModelEndpoint | None = None
    text_mixture: TextMixture | None = None
    mixture: MixtureSettings | None = None
    warnings: tuple[str, ...] = field(default=(), compare=False)  # one sentence each, for the user


def read_settings(*, environment: Mapping[str, str] | None = None, **overrides: Any) -> Settings:
    """Gather the settings of this process.

    A chat model's name, address and key come together from the highest source that names any of them: a key
    of one source must never be sent to the address of another.

    Args:
        environment: `os.environ` unless given.
        overrides: settings from the command line; None, and False for a flag, is one that was not given.

    Raises:
        InvalidInput: a value that cannot be, or an unknown key in optiml.toml, with its nearest known one.
        SetupError: neither the home folder nor a temporary one can be written.
    """
    environment = os.environ if environment is None else environment
    given = {name: value for name, value in overrides.items() if value is not None and value is not False}
    _refuse_unknown(given, (*_READERS, *_TABLES, "home"), "the command line")
    named_home = _named_home(given, environment)
    values = {} if named_home is None else _from_file(named_home / FILE_NAME)
    values |= _from_environment(environment)
    for name, value in given.items():
        values[name] = value if name in ("home", *_TABLES) else _READERS[name](value, f"the setting {name}")
    home, warnings = _writable_home(named_home)
    return Settings(**{**values, "home": home}, warnings=warnings)


# --- sources ---------------------------------------------------------------------------------------------------


def _from_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, read in _READERS.items():
        variable = _PREFIX + name.upper()
        text = environment.get(variable)
        if text is not None:
            values[name] = read(text.split(os.pathsep) if name == "roots" else text, variable)
    chat = {name: environment.get(f"{_PREFIX}CHAT_{name.upper()}", "") for name in _MODEL_KEYS}
    if any(chat.values()):
        values["chat"] = _read_model({name: text for name, text in chat.items() if text}, f"{_PREFIX}CHAT_*")
    return values


def _from_file(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_FILE_BYTES + 1)
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except OSError as error:
        raise InvalidInput(f"{path} cannot be read: {error.strerror}") from error
    if len(data) > _MAX_FILE_BYTES:
        raise InvalidInput(f"{path} has more than {_MAX_FILE_BYTES} bytes")
    try:
        table = tomllib.loads(data.decode("utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidInput(f"{path} is not TOML: {error}") from error
    _refuse_unknown(table, (*_READERS, *_TABLES), str(path))
    values: dict[str, Any] = {}
    for name, value in table.items():
        where = f"{path}: {name}"
        values[name] = _TABLES[name](value, where) if name in _TABLES else _READERS[name](value, where)
    return values


def _read_model(value: object, where: str) -> ModelEndpoint:
    """One [chat] or [[text_mixture.expert]] table."""
    table = _read_table(value, where, _MODEL_KEYS)
    texts = {name: _read_text(text, f"{where}.{name}") for name, text in table.items() if name != "timeout_s"}
    seconds = {"timeout_s": _read_seconds(table["timeout_s"], f"{where}.timeout_s")} if "timeout_s" in table else {}
    model = ModelEndpoint(**texts, **seconds)  # type: ignore[arg-type]
    if model.api not in _APIS:
        raise InvalidInput(f"{where}.api is none of {', '.join(_APIS)}")
    if model.url and not (model.url.startswith(("http://", "https://")) and "@" not in model.url):
        raise InvalidInput(
            f"{where}.url is not an http address without a password in it: keys go to key_env or key_file"
        )
    return model


def _read_text_mixture(value: object, where: str) -> TextMixture:
    table = _read_table(value, where, ("active", "expert"))
    experts = table.get("expert")
    if not isinstance(experts, list) or len(experts) < 2:
        raise InvalidInput(f"{where} needs at least two experts: write [[text_mixture.expert]] for each")
    active = table.get("active", TextMixture.active)
    if isinstance(active, bool) or not isinstance(active, int) or not 1 <= active <= len(experts):
        raise InvalidInput(f"{where}.active is not a number from 1 to {len(experts)}")
    read = tuple(_read_model(item, f"{where}.expert {number}") for number, item in enumerate(experts, start=1))
    return TextMixture(experts=read, active=active)


def _read_mixture(value: object, where: str) -> MixtureSettings:
    table = _read_table(value, where, tuple(_MIXTURE_READERS))
    return MixtureSettings(**{name: _MIXTURE_READERS[name](item, f"{where}.{name}") for name, item in table.items()})


def _read_table(value: object, where: str, known: tuple[str, ...]) -> dict[str, object]:
    if not isinstance(value, dict):
        raise InvalidInput(f"{where} is not a table: write [{where.split(': ')[-1]}] and its keys below")
    _refuse_unknown(value, known, where)
    return value


def _refuse_unknown(given: Mapping[str, object], known: tuple[str, ...], where: str) -> None:
    for name in given:
        if name not in known:
            nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]
            raise InvalidInput(f"{where}: there is no setting {name[:60]!r}; the nearest is {nearest!r}")


# --- values ----------------------------------------------------------------------------------------------------


def _read_text(value: object, where: str) -> str:
    if not isinstance(value, str) or "\0" in value:
        raise InvalidInput(f"{where} is not text")
    return value


def _read_flag(value: object, where: str) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in _TRUE + _FALSE:
        return value.lower() in _TRUE
    raise InvalidInput(f"{where} is neither true nor false")


def _read_seconds(value: object, where: str) -> float:
    try:
        if isinstance(value, bool) or not isinstance(value, int | float | str):
            raise ValueError
        seconds = float(value)
    except (ValueError, OverflowError) as error:
        raise InvalidInput(f"{where} is not a number of seconds") from error
    if not (math.isfinite(seconds) and 0 < seconds <= _MAX_TIMEOUT_S):
        raise InvalidInput(f"{where} is not between 0 and {_MAX_TIMEOUT_S:g} seconds")
    return seconds


def _read_bytes(value: object, where: str) -> int:
    try:
        if isinstance(value, bool) or not isinstance(value, int | str):
            raise ValueError
        size = int(value)
    except ValueError as error:
        raise InvalidInput(f"{where} is not a whole number of bytes") from error
    if not 0 < size < 1 << 63:
        raise InvalidInput(f"{where} is not a positive number of bytes")
    return size


def _read_count(value: object, where: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _MAX_COUNT:
        raise InvalidInput(f"{where} is not a whole number from 1 to {_MAX_COUNT}")
    return value


def _read_share(value: object, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
        raise InvalidInput(f"{where} is not between 0 and 1")
    return float(value)


def _read_texts(value: object, where: str) -> tuple[str, ...]:
    if not isinstance(value, list | tuple) or not value:
        raise InvalidInput(f"{where} is not a list of texts")
    return tuple(_read_text(item, where) for item in value)


def _read_folders(value: object, where: str) -> tuple[Path, ...]:
    if not isinstance(value, list | tuple):
        raise InvalidInput(f"{where} is not a list of folders")
    folders = []
    for item in value:
        folder = item if isinstance(item, Path) else Path(_read_text(item, where)).expanduser()
        if not folder.is_absolute():
            raise InvalidInput(f"{where}: {str(folder)[:100]!r} is not an absolute path")
        folders.append(folder)
    return tuple(folders)


_READERS: dict[str, Callable[[Any, str], Any]] = {
    "roots": _read_folders,
    "device": _read_text,
    "trust_reference": _read_flag,
    "allow_commands": _read_flag,
    "compile_timeout_s": _read_seconds,
    "compile_memory_bytes": _read_bytes,
    "kernel_timeout_s": _read_seconds,
    "reference_timeout_s": _read_seconds,
    "store_limit_bytes": _read_bytes,
}
_MODEL_KEYS = ("name", "url", "api", "key_env", "key_file", "good_at", "timeout_s")
_APIS = ("openai", "anthropic")
_MIXTURE_READERS: dict[str, Callable[[Any, str], Any]] = {
    "experts": _read_texts,
    "checkpoint": _read_text,
    "devices": _read_texts,
    "dtype": _read_text,
    "four_bit": _read_flag,
    "active": _read_count,
    "stacks": _read_count,
    "refresh": _read_count,
    "prompt_encoder": _read_text,
    "top_p": _read_share,
    "allow_download": _read_flag,
    "idle_s": _read_seconds,
    "timeout_s": _read_seconds,
}
_TABLES: dict[str, Callable[[object, str], Any]] = {
    "chat": _read_model,
    "text_mixture": _read_text_mixture,
    "mixture": _read_mixture,
}


# --- the home folder -------------------------------------------------------------------------------------------


def _named_home(given: Mapping[str, Any], environment: Mapping[str, str]) -> Path | None:
    """The folder that the user means, which need not exist; None if nothing says who the user is."""
    named = given.get("home") or environment.get(f"{_PREFIX}HOME")
    if named:
        return Path(named).expanduser().absolute()
    cache = environment.get("XDG_CACHE_HOME", "")
    if os.path.isabs(cache):  # a relative one is to be ignored, says the XDG base directory specification
        return Path(cache, "optiml")
    user = environment.get("HOME", "")
    return Path(user, ".cache", "optiml") if os.path.isabs(user) else None


def _writable_home(named: Path | None) -> tuple[Path, tuple[str, ...]]:
    """`named` if it can be written, else a private folder that lasts as long as this process, with a warning."""
    why = "there is no home folder for results"
    if named is not None:
        try:
            named.mkdir(mode=0o700, parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=named):
                return named, ()
        except OSError as error:
            why = f"{named} cannot be written ({error.strerror})"
    cure = "set OPTIML_HOME to a folder that can be written"
    try:
        private = tempfile.mkdtemp(prefix="optiml-home-")
    except OSError as error:
        raise SetupError(f"{why}, nor can a temporary one: {cure}", code="internal") from error
    atexit.register(rmtree, private, ignore_errors=True)
    return Path(private), (f"{why}: results are kept until the end of this process only; {cure}",)
