"""Loading a pair: found or not, fitting or not, and told in one line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError
from mlx import nn
from mlx_lm import utils as mlx_lm_utils

from mlx_spec import pairing
from mlx_spec.drafters import NgramDrafter
from mlx_spec.drafters.eagle3.model import Eagle3Drafter
from mlx_spec.drafters.standalone import StandaloneDrafter
from mlx_spec.errors import (
    CheckpointError,
    IncompatiblePair,
    MlxSpecError,
    ModelNotFound,
    UnknownAnatomy,
    UnknownDrafter,
    UnsupportedOption,
)
from mlx_spec.pairing import load, load_drafter
from tests.drafters.eagle3_files import FLAT, FOLDER, target, write


def told_in_one_line(error: BaseException) -> bool:
    return "\n" not in str(error) and (
        error.__cause__ is None and (error.__context__ is None or error.__suppress_context__)
    )


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Callable[[object], list[dict[str, Any]]]:
    """Stand in for downloads: `hub(folder or exception)` returns the list of requests made."""
    requests: list[dict[str, Any]] = []

    def answer_with(answer: object) -> list[dict[str, Any]]:
        def snapshot_download(name: str, **options: Any) -> str:
            requests.append({"name": name, **options})
            if isinstance(answer, BaseException):
                raise answer
            return str(answer)

        monkeypatch.setattr(pairing, "snapshot_download", snapshot_download)
        return requests

    answer_with(AssertionError("no download was expected"))
    return answer_with


# Targets


def test_a_target_is_loaded_as_mlx_lm_loads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    # The fixture has no tokenizer files.
    monkeypatch.setattr(mlx_lm_utils, "load_tokenizer", lambda *args, **kwargs: "tokenizer")
    model, tokenizer = load(FOLDER / "target", model_config={"rope_theta": 5e4}, lazy=True)
    assert tokenizer == "tokenizer"
    assert len(model.layers) == 8
    assert model.args.rope_theta == 5e4


@pytest.mark.parametrize("name", ["/nowhere/at/all", "./nowhere", "nowhere", "~/no where", "a/b/c"])
@pytest.mark.usefixtures("hub")
def test_a_path_that_does_not_exist_is_told_in_one_line(name: str) -> None:
    for attempt in (lambda: load(name), lambda: load_drafter(name, target())):
        with pytest.raises(ModelNotFound) as missing:
            attempt()
        assert name in str(missing.value)
        assert told_in_one_line(missing.value)


def test_a_folder_without_a_config_or_a_file_is_no_checkpoint(tmp_path: Path) -> None:
    for attempt in (lambda path: load(path), lambda path: load_drafter(path, target())):
        with pytest.raises(ModelNotFound, match=r"holds no config\.json"):
            attempt(tmp_path)
        with pytest.raises(ModelNotFound, match="is a file"):
            attempt(FLAT / "config.json")


def test_a_hub_id_is_downloaded_without_code(hub: Callable[[object], list[dict[str, Any]]]) -> None:
    requests = hub(FLAT)
    loaded = load_drafter("someone/drafter-EAGLE3", target())
    assert loaded.name == "someone/drafter-EAGLE3"
    asked = {"name": "someone/drafter-EAGLE3", "revision": None}
    assert requests == [
        {**asked, "allow_patterns": ["*.json"]},
        {**asked, "allow_patterns": ["*.json", "*.safetensors"]},
    ]
    with pytest.raises(CheckpointError):
        load("someone/target", revision="main", lazy=True)
    assert requests[2]["revision"] == "main"
    assert not any(pattern.endswith((".py", ".bin")) for pattern in requests[2]["allow_patterns"])


@pytest.mark.parametrize(
    "failure",
    [
        LocalEntryNotFoundError("no network\nlong story"),
        HFValidationError("not a repository id"),
        ConnectionError("reset"),
        OSError("disk full"),
        TimeoutError(),
    ],
)
def test_what_the_hub_does_wrong_is_told_in_one_line(
    hub: Callable[[object], list[dict[str, Any]]], failure: Exception
) -> None:
    hub(failure)
    for attempt in (lambda: load("someone/model"), lambda: load_drafter("someone/model", target())):
        with pytest.raises(ModelNotFound, match=r"'someone/model', and the hub does not give it: \w+") as missing:
            attempt()
        assert told_in_one_line(missing.value)


def test_what_mlx_lm_cannot_load_is_a_checkpoint_error_with_its_cause(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "no_such_model"}))
    mx.save_safetensors(str(tmp_path / "model.safetensors"), {"a": mx.zeros((2,))})
    with pytest.raises(CheckpointError, match="no_such_model") as refused:
        load(tmp_path)
    assert isinstance(refused.value.__cause__, ValueError)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(CheckpointError, match=str(tmp_path)):
        load(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=str(tmp_path)):
        load(tmp_path)


def test_a_target_with_code_of_its_own_is_not_run(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "model_file": "evil.py"}))
    (tmp_path / "evil.py").write_text("raise SystemExit('ran')")
    mx.save_safetensors(str(tmp_path / "model.safetensors"), {"a": mx.zeros((2,))})
    with pytest.raises(CheckpointError, match=r"evil\.py"):
        load(tmp_path)


# Drafters


@pytest.mark.parametrize("as_model", [True, False])
def test_a_drafter_is_loaded_for_a_model_or_a_target(as_model: bool) -> None:
    loaded = load_drafter(str(FLAT), target=target().model if as_model else target())
    assert isinstance(loaded, Eagle3Drafter)
    assert (loaded.kind, loaded.name, loaded.taps, loaded.default_width) == ("eagle3", "safeailab", (1, 3, 4), 3)
    assert loaded.architecture == "LlamaForCausalLMEagle3"


def test_an_original_file_that_calls_itself_a_language_model_is_recognised(tmp_path: Path) -> None:
    def original(content: dict[str, Any]) -> None:
        content["architectures"] = ["LlamaForCausalLM"]
        del content["eagle_config"], content["draft_vocab_size"]

    with (
        pytest.warns(UserWarning, match=r"does not list the target layers .* layers \[1, 3, 4\] are taken"),
        pytest.raises(CheckpointError, match="draft_vocab_size"),
    ):
        load_drafter(write(tmp_path, original), target())
    folder = write(tmp_path, lambda content: content.update(architectures=["LlamaForCausalLM"], eagle_config=None))
    assert load_drafter(folder, target(), taps=(1, 3, 4)).taps == (1, 3, 4)


def test_ngram_needs_no_checkpoint() -> None:
    assert isinstance(load_drafter("ngram", target()), NgramDrafter)
    assert isinstance(load_drafter("ngram", target(), kind="ngram"), NgramDrafter)
    with pytest.warns(UserWarning, match="'eagle3' was asked for, but the checkpoint is 'ngram'"):
        assert isinstance(load_drafter("ngram", target(), kind="eagle3"), NgramDrafter)
    with pytest.raises(UnsupportedOption, match="taps="):
        load_drafter("ngram", target(), taps=(1,))


def test_a_folder_is_no_ngram_drafter(tmp_path: Path) -> None:
    folder = write(
        tmp_path, lambda content: content.clear(), lambda content: content.pop("midlayer.hidden_norm.weight")
    )
    with pytest.raises(UnsupportedOption, match="give 'ngram' in place of"):
        load_drafter(folder, target(), kind="ngram")


def test_a_contradicting_kind_is_overridden_with_one_warning() -> None:
    with pytest.warns(UserWarning, match="'mtp' was asked for, but the checkpoint is 'eagle3'") as warned:
        assert load_drafter(FLAT, target(), kind="mtp").kind == "eagle3"
    assert len(warned) == 1


@pytest.mark.parametrize(
    ("edit", "error", "words"),
    [
        ({"speculators_model_type": "mtp"}, IncompatiblePair, "made for qwen3_5 or qwen3_5_moe or qwen3_next"),
        ({"speculators_model_type": "medusa"}, UnknownDrafter, "medusa"),
        ({"model_type": "qwen2"}, CheckpointError, "model_type='qwen2'"),
        ({"model_type": "qwen3"}, CheckpointError, "q_norm.weight is missing"),
        ({"num_target_layers": 9}, IncompatiblePair, "for a target of 9 layers, but target 'llama' has 8"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 8]}}, IncompatiblePair, "counts hidden states"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 30]}}, IncompatiblePair, "has layers 0..7"),
        ({"vocab_size": 5000}, IncompatiblePair, "vocabulary of 5000"),
    ],
)
def test_a_pair_that_cannot_work_is_refused_before_the_first_token(
    tmp_path: Path, edit: dict[str, Any], error: type[MlxSpecError], words: str
) -> None:
    with pytest.raises(error, match=words) as refused:
        load_drafter(write(tmp_path, lambda content: content.update(edit)), target())
    assert told_in_one_line(refused.value)


def test_a_language_model_drafts_for_a_target() -> None:
    loaded = load_drafter(FOLDER / "target", target())
    assert isinstance(loaded, StandaloneDrafter)
    assert (loaded.kind, loaded.name, loaded.taps, loaded.default_width) == ("standalone", "target", (), 3)
    assert loaded.architecture is None
    with pytest.raises(UnsupportedOption, match="taps="):
        load_drafter(FOLDER / "target", target(), taps=(1,))


def test_taps_given_by_the_caller_are_checked_against_the_target() -> None:
    assert load_drafter(FLAT, target(), taps=(0, 2, 7)).taps == (0, 2, 7)
    with pytest.raises(IncompatiblePair, match=r"layer 9 \(taps=\)"):
        load_drafter(FLAT, target(), taps=(0, 2, 9))
    with pytest.raises(CheckpointError, match=r"fc\.weight has shape"):
        load_drafter(FLAT, target(), taps=(0, 2))


def test_a_target_of_unknown_anatomy_is_refused() -> None:
    class Stranger(nn.Module):
        layers = (None,) * 8

    with pytest.raises(UnknownAnatomy):
        load_drafter(FLAT, Stranger())
