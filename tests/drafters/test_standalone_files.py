"""A language model's folder as drafter: its tokens are compared with the target's, and damage is told by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

import mlx_spec
from mlx_spec.drafters.standalone import StandaloneDrafter
from mlx_spec.errors import CheckpointError, IncompatiblePair
from mlx_spec.pairing import load, load_drafter
from mlx_spec.stats import Statistics
from tests.checkpoints import ASCII_VOCAB, ascii_tokenizer, tiny_model, write_target
from tests.commandlines import run
from tests.oracle import rng_key

SMALL = {"num_hidden_layers": 1, "hidden_size": 24, "intermediate_size": 40, "num_attention_heads": 3}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`target`, `copy` of it, and `small`, another model with the same tokens."""
    made = tmp_path_factory.mktemp("models")
    write_target(made / "target")
    write_target(made / "copy")
    write_target(made / "small", seed=9, **{**SMALL, "num_key_value_heads": 1})
    return made


def retold(folder: Path, edit: Callable[[dict[str, Any]], object]) -> Path:
    """A small model with an edited tokenizer.json."""
    write_target(folder, seed=9, **{**SMALL, "num_key_value_heads": 1})
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    edit(content)
    path.write_text(json.dumps(content))
    return folder


def swapped(content: dict[str, Any]) -> None:
    """Two letters change places."""
    vocabulary = content["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]


@pytest.mark.slow
def test_the_same_tokens_are_let_through(folder: Path) -> None:
    model, tokenizer = load(folder / "target")
    drafter = load_drafter(folder / "small", target=model)
    assert isinstance(drafter, StandaloneDrafter)
    statistics = Statistics()
    text = mlx_spec.generate(model, tokenizer, "the sea", draft_model=drafter, max_tokens=12, statistics=statistics)
    assert text == mlx_spec.generate(model, tokenizer, "the sea", max_tokens=12)
    assert (statistics.loop, statistics.drafter) == ("standalone", "small")
    assert not any("compared" in note for note in statistics.notes)


@pytest.mark.slow
def test_a_copy_of_the_target_is_always_right(folder: Path) -> None:
    model, tokenizer = load(folder / "target")
    statistics = Statistics()
    mlx_spec.generate(
        model, tokenizer, "the sea", draft_model=str(folder / "copy"), max_tokens=24, statistics=statistics
    )
    assert 0 < statistics.proposed_tokens == statistics.accepted_tokens


def test_two_letters_that_changed_places_are_named(folder: Path, tmp_path: Path) -> None:
    drafter = retold(tmp_path, swapped)
    model, tokenizer = load(folder / "target")
    words = r"split text into different tokens: id \d+ is '[ab]' for the drafter and '[ab]' for the target; 2 of 96"
    with pytest.raises(IncompatiblePair, match=words):
        load_drafter(drafter, target=model)
    # A target that was loaded elsewhere has a tokenizer only where text is wanted.
    other = tiny_model()
    loaded = load_drafter(drafter, target=other)
    with pytest.raises(IncompatiblePair, match=words):
        mlx_spec.stream_generate(other, tokenizer, "the sea", draft_model=loaded)
    with pytest.raises(IncompatiblePair, match=words):
        mlx_spec.stream_generate(other, tokenizer, "the sea", draft_model=str(drafter))


def test_tokens_added_later_may_differ(folder: Path, tmp_path: Path) -> None:
    def renamed(content: dict[str, Any]) -> None:
        (added,) = [token for token in content["added_tokens"] if token["content"] == "<unk>"]
        added["content"] = "<pad>"
        vocabulary = content["model"]["vocab"]
        vocabulary["<pad>"] = vocabulary.pop("<unk>")

    model, _ = load(folder / "target")
    assert load_drafter(retold(tmp_path, renamed), target=model).kind == "standalone"


@pytest.mark.slow
def test_padding_beyond_the_tokens_does_not_count(folder: Path, tmp_path: Path) -> None:
    model, tokenizer = load(folder / "target")
    padded = write_target(tmp_path, seed=9, **{**SMALL, "num_key_value_heads": 1, "vocab_size": 128})
    drafter = load_drafter(padded, target=model)
    text = mlx_spec.generate(model, tokenizer, "the sea", draft_model=drafter, max_tokens=12)
    assert text == mlx_spec.generate(model, tokenizer, "the sea", max_tokens=12)


def test_what_could_not_be_compared_is_told(folder: Path, tmp_path: Path) -> None:
    model, tokenizer = load(folder / "target")
    write_target(tmp_path, seed=9, **{**SMALL, "num_key_value_heads": 1})
    (tmp_path / "tokenizer.json").unlink()
    for drafter in (load_drafter(tmp_path, target=model), tiny_model(3)):
        statistics = Statistics()
        mlx_spec.generate(model, tokenizer, "the sea", draft_model=drafter, max_tokens=4, statistics=statistics)
        assert any("were not compared" in note for note in statistics.notes)


def test_a_tokenizer_is_compared_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokenizer = load(folder / "target")
    drafter = load_drafter(folder / "small", target=model)
    want = mlx_spec.generate(model, tokenizer, "the sea", max_tokens=4)
    monkeypatch.setattr(type(tokenizer), "get_vocab", lambda self: pytest.fail("asked again"), raising=False)
    assert mlx_spec.generate(model, tokenizer, "the sea", draft_model=drafter, max_tokens=4) == want


def test_loading_a_drafter_leaves_the_random_state_alone(folder: Path) -> None:
    model, _ = load(folder / "target")
    before = rng_key()
    load_drafter(folder / "small", target=model)
    assert rng_key() == before


# Damaged folders


def damaged(folder: Path, edit: Callable[[dict[str, mx.array]], object]) -> Path:
    write_target(folder, seed=9, **{**SMALL, "num_key_value_heads": 1})
    path = str(folder / "model.safetensors")
    tensors = dict(mx.load(path))  # type: ignore[arg-type]
    mx.eval(tensors)
    edit(tensors)
    mx.save_safetensors(path, tensors, {"format": "mlx"})
    return folder


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda tensors: tensors.pop("model.layers.0.mlp.up_proj.weight"), "model.layers.0.mlp.up_proj.weight"),
        (lambda tensors: tensors.update(surprise=mx.zeros((2,))), "surprise"),
        (lambda tensors: tensors.update({"model.norm.weight": mx.zeros((7,))}), "model.norm.weight"),
        (
            lambda tensors: tensors.update({"model.norm.weight": mx.full((24,), float("nan"))}),
            "model.norm.weight holds NaN",
        ),
        (
            lambda tensors: tensors.update({"lm_head.weight": mx.zeros((96, 24), mx.int32)}),
            "lm_head.weight has dtype int32, wanted floats",
        ),
    ],
)
def test_a_damaged_tensor_is_named(tmp_path: Path, edit: Callable[[dict[str, mx.array]], object], words: str) -> None:
    with pytest.raises(CheckpointError) as refused:
        load_drafter(damaged(tmp_path, edit), target=tiny_model())
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("content", ["", "{}", "not json", '{"model": {"type": "BPE"}}'])
def test_a_damaged_tokenizer_is_named(tmp_path: Path, content: str) -> None:
    write_target(tmp_path, seed=9, **{**SMALL, "num_key_value_heads": 1})
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is no tokenizer"):
        load_drafter(tmp_path, target=tiny_model())


def test_code_in_the_folder_is_not_run(tmp_path: Path) -> None:
    write_target(tmp_path, seed=9, **{**SMALL, "num_key_value_heads": 1})
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_file": "evil.py"}))
    (tmp_path / "evil.py").write_text("raise SystemExit('ran')")
    with pytest.raises(CheckpointError, match=r"evil\.py"):
        load_drafter(tmp_path, target=tiny_model())


# The command


@pytest.mark.slow
@pytest.mark.parametrize("kind", [(), ("--draft-kind", "standalone")], ids=str)
def test_the_command_drafts_with_a_language_model(
    capsys: pytest.CaptureFixture[str], folder: Path, kind: tuple[str, ...]
) -> None:
    common = ("--model", folder / "target", "--prompt", "the sea", "-m", "16")
    plain = run(capsys, *common)
    drafted = run(capsys, *common, "--draft-model", folder / "small", *kind, "--check")
    assert (plain.code, drafted.code) == (0, 0), drafted.err
    assert drafted.out == plain.out
    assert any("drafter small | loop standalone" in line for line in drafted.lines)
    assert any(line.startswith("check: 16 ids compared") for line in drafted.lines)


def test_the_command_needs_a_folder_for_a_language_model(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    told = run(capsys, "--model", folder / "target", "--draft-kind", "standalone")
    assert told.code == 2
    assert "--draft-kind standalone needs --draft-model" in told.err


def test_the_tokenizer_has_the_size_the_models_have() -> None:
    assert len(ascii_tokenizer().get_vocab()) == ASCII_VOCAB
