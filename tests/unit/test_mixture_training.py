"""Training of the mixture, its checkpoints and its data, on tiny random experts read from model folders."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed (extra `mixture`)")
pytest.importorskip("transformers", reason="transformers is not installed (extra `mixture`)")

from tiny_experts import write_experts  # noqa: E402

from optiml.errors import InvalidInput, ModelFailed  # noqa: E402
from optiml.mixture import checkpoint, files, loading  # noqa: E402
from optiml.mixture.experts import Expert  # noqa: E402
from optiml.mixture.mixture import Mixture, MixtureShape  # noqa: E402
from optiml.mixture.training import Pair, Progress, TrainSettings, evaluate, losses_of, split, train  # noqa: E402

SHAPE = MixtureShape(stacks=2, active=2, shared_width=16, heads=2, router_hidden=8)
PAIRS = tuple(
    Pair(prompt=f"{name} of {size} elements\n", answer=f"out[i] = {name}(in[i], {size});\n", family=family)
    for name, family in (("relu", "activation"), ("gelu", "activation"), ("sum", "reduction"))
    for size in (7, 64)
)
QUICK = TrainSettings(steps=4, batch=2, accumulate=1, learning_rate=5e-3, evaluate_every=2, save_every=2)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ...]:
    return write_experts(tmp_path_factory.mktemp("experts"))


@pytest.fixture(scope="module")
def experts(folders: tuple[Path, ...]) -> Iterator[tuple[Expert, ...]]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield loading.load_experts([files.locate(str(folder)) for folder in folders], stacks=SHAPE.stacks)
    torch.set_num_threads(before)


def fresh(experts: tuple[Expert, ...]) -> Mixture:
    torch.manual_seed(0)
    return Mixture(experts, SHAPE)


@pytest.fixture(scope="module")
def saved(experts: tuple[Expert, ...], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of four steps."""
    folder = tmp_path_factory.mktemp("checkpoint")
    train(fresh(experts), PAIRS, QUICK, folder)
    return folder


# --- training --------------------------------------------------------------------------------------------------------
def test_training_lowers_the_loss_and_changes_no_expert(experts: tuple[Expert, ...], tmp_path: Path) -> None:
    mixture = fresh(experts)
    weights = [value.clone() for expert in experts for value in expert.model.state_dict().values()]
    active = [(0, 1)] * len(PAIRS)
    before = sum(losses_of(mixture, PAIRS, active, 1))
    steps: list[Progress] = []
    quick = dataclasses.replace(QUICK, steps=30, learning_rate=0.01)
    train(mixture, PAIRS, quick, tmp_path, on_progress=steps.append)
    assert sum(losses_of(mixture, PAIRS, active, 1)) < 0.95 * before
    after = [value for expert in experts for value in expert.model.state_dict().values()]
    assert all(torch.equal(one, other) for one, other in zip(weights, after, strict=True))
    assert {"lm", "entropy", "balance", "consistency", "fit", "loss"} == set(steps[0].terms)


def test_a_run_that_was_stopped_ends_like_one_that_was_not(
    experts: tuple[Expert, ...], saved: Path, tmp_path: Path
) -> None:
    stopped = train(fresh(experts), PAIRS, QUICK, tmp_path, should_stop=lambda: True)
    assert stopped.step == 1
    done = train(fresh(experts), PAIRS, QUICK, tmp_path)
    assert done.step == 4
    whole = checkpoint.read_manifest(saved)
    assert done.files["mixture"]["sha256"] == whole.files["mixture"]["sha256"]
    assert done.files["optimizer"]["sha256"] == whole.files["optimizer"]["sha256"]


def test_held_out_families_are_measured_and_not_trained_on(experts: tuple[Expert, ...], tmp_path: Path) -> None:
    training, held_out = split(PAIRS, ["reduction"])
    assert {pair.family for pair in training} == {"activation"}
    assert {pair.family for pair in held_out} == {"reduction"}
    settings = dataclasses.replace(QUICK, held_out=("reduction",))
    manifest = train(fresh(experts), PAIRS, settings, tmp_path)
    assert [entry["step"] for entry in manifest.log] == [2, 4]
    assert {"1:llama", "2:qwen2", "3:starcoder2", "router only", "mixture"} <= set(manifest.log[0])
    with pytest.raises(InvalidInput, match="no pair is of the family 'softmax'"):
        split(PAIRS, ["softmax"])
    with pytest.raises(InvalidInput, match="no pair is left"):
        split(PAIRS, ["reduction", "activation"])


def test_an_untrained_mixture_loses_exactly_what_its_routed_primary_loses(experts: tuple[Expert, ...]) -> None:
    measured = evaluate(fresh(experts), PAIRS, refresh=4)
    assert measured.mixture == measured.router
    columns = list(measured.experts.values())
    assert measured.router == tuple(columns[primary][row] for row, primary in enumerate(measured.primaries))


def test_training_goes_on_with_its_own_settings_only(experts: tuple[Expert, ...], saved: Path) -> None:
    with pytest.raises(ModelFailed, match="was trained with seed 0 and 1 is asked"):
        train(fresh(experts), PAIRS, dataclasses.replace(QUICK, seed=1), saved)


def test_pairs_that_are_too_long_are_left_out_and_an_error_if_all_are(
    experts: tuple[Expert, ...], tmp_path: Path
) -> None:
    with pytest.raises(InvalidInput, match="longer than 5 tokens for some expert"):
        train(fresh(experts), PAIRS, dataclasses.replace(QUICK, max_tokens=5), tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_loss_that_is_not_finite_ends_the_training(experts: tuple[Expert, ...], tmp_path: Path) -> None:
    mixture = fresh(experts)
    mixture.interactions[0].out.weight.data.fill_(float("nan"))
    with pytest.raises(ModelFailed, match="the loss of step 1 is not finite"):
        train(mixture, PAIRS, QUICK, tmp_path)


# --- checkpoints -----------------------------------------------------------------------------------------------------
def test_a_checkpoint_brings_the_trained_parts_back(experts: tuple[Expert, ...], saved: Path) -> None:
    manifest = checkpoint.read_manifest(saved)
    checkpoint.refuse_other_experts(manifest, experts)
    torch.manual_seed(9)
    mixture = Mixture(experts, manifest.shape)
    checkpoint.load_into(saved, manifest, mixture)
    again = fresh(experts)
    train(again, PAIRS, QUICK, saved)  # nothing is left to do, so it is what was saved
    for name, value in mixture.state_dict().items():
        assert torch.equal(value, again.state_dict()[name])
    assert sorted(path.name.split("-")[0] for path in saved.iterdir()) == ["manifest.json", "mixture", "optimizer"]


def test_a_checkpoint_of_other_experts_is_refused(experts: tuple[Expert, ...], saved: Path) -> None:
    manifest = checkpoint.read_manifest(saved)
    with pytest.raises(ModelFailed, match=r"expert 1 of the checkpoint is llama .* and the one here is starcoder2"):
        checkpoint.refuse_other_experts(manifest, experts[::-1])
    with pytest.raises(ModelFailed, match="trained with 3 experts"):
        checkpoint.refuse_other_experts(manifest, experts[:2])
    with pytest.raises(ModelFailed, match="another prompt encoder"):
        checkpoint.refuse_other_experts(manifest, experts, "0123")


def test_the_digest_of_an_expert_changes_with_any_of_its_weights(folders: tuple[Path, ...], tmp_path: Path) -> None:
    copy = Path(shutil.copytree(folders[0], tmp_path / "copy"))
    assert files.digest_of(copy) == files.digest_of(folders[0])
    weights = copy / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    assert files.digest_of(copy) != files.digest_of(folders[0])


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: (folder / "manifest.json").write_text("{"),
        lambda folder: (folder / "manifest.json").write_text('{"schema": 1, "kind": "optiml-mixture"}'),
        lambda folder: (folder / "manifest.json").write_text('{"schema": 2, "kind": "optiml-mixture"}'),
        lambda folder: (folder / "manifest.json").unlink(),
        lambda folder: next(folder.glob("mixture-*")).unlink(),
        lambda folder: next(folder.glob("mixture-*")).write_bytes(b"\x08" + bytes(20)),
        lambda folder: _shorten(next(folder.glob("mixture-*"))),
    ],
    ids=["no JSON", "no fields", "other schema", "no manifest", "no tensors", "other tensors", "cut off"],
)
def test_a_damaged_checkpoint_is_refused_and_nothing_is_loaded(
    experts: tuple[Expert, ...], saved: Path, tmp_path: Path, damage
) -> None:
    folder = Path(shutil.copytree(saved, tmp_path / "damaged"))
    damage(folder)
    mixture = fresh(experts)
    before = {name: value.clone() for name, value in mixture.state_dict().items()}
    with pytest.raises(ModelFailed, match=r"damaged|checkpoint of another kind|holds no mixture|cannot be read"):
        checkpoint.load_into(folder, checkpoint.read_manifest(folder), mixture)
    assert all(torch.equal(value, before[name]) for name, value in mixture.state_dict().items())


def _shorten(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-9])


# --- experts on disk -------------------------------------------------------------------------------------------------
def test_experts_keep_their_weights_where_they_are(experts: tuple[Expert, ...]) -> None:
    layers = experts[1].model.model.layers
    assert experts[1].stacks == [(0, 1), (2, 3)]
    assert not hasattr(experts[1], "layers")
    assert all(parameter.data_ptr() for parameter in layers.parameters())
    assert [expert.facts.architecture for expert in experts] == ["llama", "qwen2", "starcoder2"]


def test_files_say_how_large_an_expert_is_without_loading_it(
    folders: tuple[Path, ...], experts: tuple[Expert, ...]
) -> None:
    located = files.locate(str(folders[1]))
    assert located.name == "qwen2"
    assert located.parameters == sum(value.numel() for value in experts[1].model.parameters())
    assert files.memory_bytes(located, "bfloat16") < files.memory_bytes(located, "float32")


def test_experts_that_do_not_fit_are_refused_before_any_is_loaded(
    folders: tuple[Path, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "free_bytes", lambda device: 1000)
    monkeypatch.setattr(loading, "_load", lambda *_, **__: pytest.fail("an expert was loaded"))
    with pytest.raises(ModelFailed, match=r"llama, qwen2 need about .* GiB on cpu and 0\.0 GiB are free"):
        loading.load_experts([files.locate(str(folder)) for folder in folders[:2]], stacks=2)


def test_what_is_no_expert_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    pickled = tmp_path / "pickled"
    pickled.mkdir()
    (pickled / "config.json").write_text("{}")
    (pickled / "pytorch_model.bin").write_bytes(b"x")
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_text("{}")
    (broken / "model.safetensors").write_bytes(b"\xff" * 9)
    (tmp_path / "odd.gguf").write_bytes(b"GGUF" + bytes(8))
    for expert, message in (
        (tmp_path / "empty", "no config.json"),
        (pickled, "pickled ones could run code"),
        (broken, "is damaged"),
        (tmp_path / "odd.gguf", "is no GGUF file, or is damaged"),
        (tmp_path / "none.gguf", "no GGUF file none.gguf"),
        (tmp_path / "nowhere", "neither a folder nor a .gguf file nor a hub name"),
    ):
        with pytest.raises(ModelFailed, match=message):
            files.locate(str(expert))


def test_nothing_is_downloaded_unless_the_user_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ModelFailed, match=r"not on this machine \(about 3.1 GB\).*allow_download"):
        files.locate("Qwen/Qwen2.5-Coder-1.5B")


def test_a_device_or_dtype_that_is_not_here_is_refused() -> None:
    for name in ("cuda:9", "tpu", "mps"):
        with pytest.raises(ModelFailed, match=r"not here|no device"):
            loading.device_named(name)
    with pytest.raises(ModelFailed, match="no dtype"):
        loading.dtype_named("int3", torch.device("cpu"))
    assert loading.dtype_named("auto", torch.device("cuda:0")) == "bfloat16"


def test_four_bits_need_bitsandbytes(folders: tuple[Path, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "find_spec", lambda name: None)
    with pytest.raises(ModelFailed, match="pip install bitsandbytes"):
        loading.load_experts([files.locate(str(folders[0]))], stacks=2, four_bit=True)


def test_a_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "find_spec", lambda name: None if name == "torch" else name)
    with pytest.raises(ModelFailed, match=r"torch, which the extra `mixture` brings: pip install 'optiml\[mixture\]'"):
        files.require_packages()


def test_a_prompt_encoder_takes_the_place_of_the_embeddings(
    experts: tuple[Expert, ...], folders: tuple[Path, ...]
) -> None:
    encoder = loading.FrozenEncoder(files.locate(str(folders[2])), torch.device("cpu"))
    mixture = Mixture(experts, SHAPE, encoder)
    scores = mixture.scores(["relu", "softmax over rows"])
    assert scores.shape == (2, 3)
    assert not torch.equal(scores[0], scores[1])
    assert json.loads((folders[2] / "config.json").read_text())["hidden_size"] == encoder.width
