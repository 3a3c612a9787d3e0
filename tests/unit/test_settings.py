import os
import stat
from pathlib import Path

import pytest

from optiml.errors import InvalidInput, ModelFailed
from optiml.settings import ModelEndpoint, Settings, read_settings


@pytest.fixture
def home(tmp_path: Path) -> Path:
    folder = tmp_path / "home"
    folder.mkdir()
    return folder


def read(home: Path, toml: str = "", environment: dict[str, str] | None = None, **overrides: object) -> Settings:
    (home / "optiml.toml").write_text(toml, encoding="utf-8")
    return read_settings(environment={"OPTIML_HOME": str(home), **(environment or {})}, **overrides)


def test_without_any_source_the_defaults_hold(home: Path) -> None:
    settings = read_settings(environment={"OPTIML_HOME": str(home)})
    assert settings == Settings(home=home)
    assert (settings.compile_timeout_s, settings.kernel_timeout_s, settings.reference_timeout_s) == (30, 20, 20)
    assert settings.store_limit_bytes == 1 << 30
    assert not settings.trust_reference
    assert not settings.allow_commands
    assert settings.warnings == ()


def test_the_command_line_beats_the_environment_and_that_beats_the_file(home: Path) -> None:
    toml = 'device = "emulator:a100"\nkernel_timeout_s = 5\ncompile_timeout_s = 7.5\n'
    environment = {"OPTIML_DEVICE": "emulator:h100", "OPTIML_COMPILE_TIMEOUT_S": "8"}
    settings = read(home, toml, environment, device="emulator:h200")
    assert (settings.device, settings.compile_timeout_s, settings.kernel_timeout_s) == ("emulator:h200", 8.0, 5.0)


def test_a_flag_or_option_that_was_not_given_leaves_the_other_sources_alone(home: Path) -> None:
    settings = read(home, "", {"OPTIML_TRUST_REFERENCE": "1"}, trust_reference=False, device=None)
    assert settings.trust_reference
    assert settings.device == "auto"


@pytest.mark.parametrize(
    ("text", "flag"), [("1", True), ("yes", True), ("TRUE", True), ("0", False), ("no", False), ("", False)]
)
def test_a_flag_in_the_environment_is_a_word(home: Path, text: str, flag: bool) -> None:
    assert read(home, "", {"OPTIML_ALLOW_COMMANDS": text}).allow_commands is flag


def test_every_setting_can_come_from_the_file(home: Path) -> None:
    settings = read(
        home,
        'roots = ["/data"]\ndevice = "emulator"\ntrust_reference = true\nallow_commands = true\n'
        "compile_timeout_s = 1\ncompile_memory_bytes = 2\nkernel_timeout_s = 3\nreference_timeout_s = 4\n"
        'store_limit_bytes = 5\n[chat]\nname = "m"\nurl = "https://host/v1"\nkey_env = "KEY"\n',
    )
    model = ModelEndpoint(name="m", url="https://host/v1", key_env="KEY")
    assert settings == Settings(
        home=home, roots=(Path("/data"),), device="emulator", trust_reference=True, allow_commands=True,
        compile_timeout_s=1, compile_memory_bytes=2, kernel_timeout_s=3, reference_timeout_s=4, store_limit_bytes=5,
        chat=model,
    )  # fmt: skip


def test_roots_in_the_environment_are_a_path_list(home: Path) -> None:
    settings = read(home, "", {"OPTIML_ROOTS": os.pathsep.join(["/a", "/b c"])})
    assert settings.roots == (Path("/a"), Path("/b c"))


def test_the_working_folder_is_never_read(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    project = tmp_path / "project"
    project.mkdir()
    (project / "optiml.toml").write_text("trust_reference = true\n")
    monkeypatch.chdir(project)
    assert not read_settings(environment={"OPTIML_HOME": str(home)}).trust_reference
    assert not read_settings(environment={}).trust_reference
    assert not read_settings(environment={"HOME": "", "XDG_CACHE_HOME": "."}).trust_reference


@pytest.mark.parametrize(
    ("toml", "told"),
    [
        ("compile_timeot_s = 3", "'compile_timeot_s'; the nearest is 'compile_timeout_s'"),
        ('home = "/elsewhere"', "'home'"),
        ("[chat]\nkey = 'secret'", "'key'; the nearest is 'key_env'"),
        ("chat = 3", "chat is not a table"),
        ("device = 3", "device is not text"),
        ("trust_reference = 1", "trust_reference is neither true nor false"),
        ("compile_timeout_s = 0", "compile_timeout_s is not between"),
        ("compile_timeout_s = nan", "compile_timeout_s is not between"),
        ("compile_timeout_s = 1e9", "compile_timeout_s is not between"),
        ("kernel_timeout_s = true", "kernel_timeout_s is not a number"),
        ("store_limit_bytes = -1", "store_limit_bytes is not a positive"),
        ("store_limit_bytes = 1.5", "store_limit_bytes is not a whole"),
        ('roots = "/a"', "roots is not a list"),
        ('roots = ["relative"]', "'relative' is not an absolute path"),
        ('[chat]\nurl = "https://user:pass@host"', "url is not an http address"),
        ('[chat]\nurl = "file:///etc/passwd"', "url is not an http address"),
        ("compile_timeout_s = ", "is not TOML"),
    ],
)
def test_a_mistake_in_the_file_names_file_key_and_cure(home: Path, toml: str, told: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        read(home, toml)
    assert told in str(caught.value)
    assert str(home / "optiml.toml") in str(caught.value)


@pytest.mark.parametrize("content", [b"\xff\xfe\x00", b"x = 1\n" * 300_000, b"x = " + b"[" * 100_000])
def test_a_file_that_is_not_toml_is_refused(home: Path, content: bytes) -> None:
    (home / "optiml.toml").write_bytes(content)
    with pytest.raises(InvalidInput):
        read_settings(environment={"OPTIML_HOME": str(home)})


@pytest.mark.parametrize(
    ("name", "text"), [("COMPILE_TIMEOUT_S", "soon"), ("TRUST_REFERENCE", "maybe"), ("STORE_LIMIT_BYTES", "1 GB")]
)
def test_a_mistake_in_the_environment_names_the_variable(home: Path, name: str, text: str) -> None:
    with pytest.raises(InvalidInput, match=f"OPTIML_{name}"):
        read(home, "", {f"OPTIML_{name}": text})


def test_an_override_that_is_no_setting_is_refused(home: Path) -> None:
    with pytest.raises(InvalidInput, match="'device'"):
        read(home, devise="emulator")


# --- home ---


def test_the_home_is_in_the_cache_folder_of_the_user(tmp_path: Path) -> None:
    assert read_settings(environment={"HOME": str(tmp_path)}).home == tmp_path / ".cache" / "optiml"
    both = {"HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    assert read_settings(environment=both).home == tmp_path / "cache" / "optiml"
    relative = {"HOME": str(tmp_path), "XDG_CACHE_HOME": "cache"}
    assert read_settings(environment=relative).home == tmp_path / ".cache" / "optiml"


def test_a_new_home_is_private(tmp_path: Path) -> None:
    settings = read_settings(environment={"OPTIML_HOME": str(tmp_path / "new")})
    assert stat.S_IMODE(settings.home.stat().st_mode) == 0o700


@pytest.mark.parametrize("where", ["nowhere", "in a file", "on a read-only system"])
def test_a_home_that_cannot_be_written_is_replaced_by_a_private_one_with_a_warning(tmp_path: Path, where: str) -> None:
    (tmp_path / "file").touch()
    environment = {
        "nowhere": {},
        "in a file": {"HOME": str(tmp_path / "file")},
        "on a read-only system": {"OPTIML_HOME": "/proc/optiml"},
    }[where]
    settings = read_settings(environment=environment)
    assert stat.S_IMODE(settings.home.stat().st_mode) == 0o700
    assert os.listdir(settings.home) == []
    (warning,) = settings.warnings
    assert "set OPTIML_HOME" in warning


# --- the model ---


def test_model_and_key_never_mix_sources(home: Path) -> None:
    toml = '[chat]\nname = "mine"\nurl = "https://mine"\nkey_env = "MY_KEY"\n'
    settings = read(home, toml, {"OPTIML_CHAT_URL": "https://theirs"})
    assert settings.chat == ModelEndpoint(url="https://theirs")


def test_a_key_is_read_only_when_used_and_never_shown(home: Path, tmp_path: Path) -> None:
    (tmp_path / "key").write_text("  file secret\n")
    by_variable = ModelEndpoint(name="m", key_env="KEY")
    by_file = ModelEndpoint(name="m", key_file=str(tmp_path / "key"))
    assert by_variable.read_key({"KEY": "secret "}) == "secret"
    assert by_file.read_key() == "file secret"
    assert ModelEndpoint(name="m").read_key() is None
    settings = read(home, "", {"OPTIML_CHAT_KEY_ENV": "KEY", "KEY": "secret"})
    assert "secret" not in repr(settings)


@pytest.mark.parametrize("content", [None, "", "\n"])
def test_a_key_that_is_not_where_it_should_be_fails_without_showing_where(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "key"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ModelFailed) as caught:
        ModelEndpoint(key_file=str(path)).read_key()
    assert str(tmp_path) not in str(caught.value)
    with pytest.raises(ModelFailed, match="KEY"):
        ModelEndpoint(key_env="KEY").read_key({"KEY": content or ""})


def test_a_text_mixture_names_its_experts(home: Path) -> None:
    toml = """
[text_mixture]
active = 1
[[text_mixture.expert]]
name = "a"
url = "https://a/v1"
good_at = "reductions"
[[text_mixture.expert]]
name = "b"
url = "https://b/v1"
api = "anthropic"
timeout_s = 7
"""
    mixture = read(home, toml).text_mixture
    assert mixture is not None
    assert (mixture.active, [item.api for item in mixture.experts]) == (1, ["openai", "anthropic"])
    assert mixture.experts[1].timeout_s == 7.0


@pytest.mark.parametrize(
    ("toml", "told"),
    [
        ("[text_mixture]\nactive = 2", "at least two experts"),
        ('[text_mixture]\nexpert = [{name = "a"}]', "at least two experts"),
        ('[text_mixture]\nactive = 3\nexpert = [{name = "a"}, {name = "b"}]', "from 1 to 2"),
        ('[text_mixture]\nexpert = [{name = "a"}, {nmae = "b"}]', "'name'"),
        ('[chat]\napi = "soap"', "openai, anthropic"),
        ("[chat]\ntimeout_s = 0", "seconds"),
    ],
)
def test_a_mistake_in_the_models_is_named(home: Path, toml: str, told: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        read(home, toml)
    assert told in str(caught.value)
