"""Loads a target and a drafter, and refuses a pair that cannot work before the first token."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from mlx import nn
from mlx_lm import utils as mlx_lm_utils
from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlx_spec.drafters.base import Drafter
from mlx_spec.drafters.checkpoint import CONFIG_NAME, TENSOR_PATTERN, one_line, read_config, telling, tensor_names
from mlx_spec.drafters.ngram import NgramDrafter
from mlx_spec.drafters.registry import (
    check_target,
    drafter_family,
    open_family,
    resolve_family,
    validate_drafter_compatibility,
)
from mlx_spec.errors import CheckpointError, ModelNotFound, UnsupportedOption
from mlx_spec.model.target import Target, evaluate_arrays
from mlx_spec.verify.record import record_of

NGRAM = "ngram"

_HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")

_TARGET_FILES = ("*.json", "model*.safetensors", "tokenizer.model", "*.tiktoken", "*.txt", "*.jsonl", "*.jinja")
_SETTINGS_FILES = ("*.json",)


def load(
    path_or_id: str | Path,
    *,
    tokenizer_config: Mapping[str, Any] | None = None,
    model_config: Mapping[str, Any] | None = None,
    adapter_path: str | None = None,
    lazy: bool = False,
    revision: str | None = None,
) -> tuple[nn.Module, TokenizerWrapper]:
    """Load a target as mlx-lm does, and its tokenizer. The arguments are those of `mlx_lm.load`.

    Args:
        path_or_id: a local folder, or "owner/name" on the Hugging Face hub. Code in it is never run.
        tokenizer_config: settings for the tokenizer.
        model_config: entries that replace those of config.json.
        adapter_path: folder of LoRA adapters.
        lazy: whether to leave the weights on disk until they are used. Only what was not left can be used in every
            thread.
        revision: of the hub repository.

    Returns:
        The mlx-lm model and its tokenizer.

    Raises:
        ModelNotFound: no such folder or repository, or it could not be downloaded.
        CheckpointError: mlx-lm cannot load it (the cause is attached), or it is a drafter's.
    """
    folder = _target_folder(path_or_id, revision)
    _refuse_drafter(folder)
    with telling(folder):
        model, tokenizer = mlx_lm_utils.load(
            str(folder),
            # Left unsaid, a tokenizer with code of its own would ask on the terminal whether to run it.
            tokenizer_config={"trust_remote_code": False, **(tokenizer_config or {})},
            model_config=dict(model_config or {}),
            adapter_path=adapter_path,
            lazy=lazy,
        )
    if not lazy:
        evaluate_arrays(model)
    record_of(model).tokenizer = tokenizer
    return model, tokenizer


def _refuse_drafter(folder: Path) -> None:
    family = drafter_family(read_config(folder))
    if family is not None:
        raise CheckpointError(
            f"{folder} is a drafter (family {family.name!r}), not a target. Load the target it was made for, and this "
            "with load_drafter(path, target=model), or give it as --draft-model."
        )


def load_without_tokenizer(path_or_id: str | Path) -> nn.Module:
    """A target's model alone, its weights left on disk until they are used. Errors are those of `load`."""
    folder = _target_folder(path_or_id, None)
    with telling(folder):
        model, _ = mlx_lm_utils.load_model(folder, lazy=True)
    return model


def settings_folder(path_or_id: str | Path) -> Path:
    """The local folder with a checkpoint's JSON files; of a hub repository these alone are downloaded.

    Raises:
        ModelNotFound: as in `load`.
    """
    return _folder(path_or_id, _SETTINGS_FILES)


def target_without_weights(path_or_id: str | Path) -> Target:
    """A target that cannot compute: what it is, for drafters that ask. Downloads the settings alone.

    Raises:
        ModelNotFound, CheckpointError: as in `load`.
        UnsupportedOption: mlx-lm has no module for its `model_type`.
    """
    folder = settings_folder(path_or_id)
    config = read_config(folder)
    model_type = str(config.get("model_type"))
    name = _module_name(model_type, config.get("architectures"))
    if not name.isidentifier() or find_spec(f"mlx_lm.models.{name}") is None:
        raise UnsupportedOption(f"{folder / CONFIG_NAME}: model_type is {model_type!r}, for which mlx-lm has no module")
    with telling(folder):
        module = import_module(f"mlx_lm.models.{name}")
        return Target(module.Model(module.ModelArgs.from_dict(config)), has_weights=False)


def _module_name(model_type: str, architectures: object) -> str:
    """What mlx-lm calls the module that reads such a config."""
    for architecture in architectures if isinstance(architectures, list) else []:
        if (model_type, architecture) in mlx_lm_utils.MODEL_ARCHITECTURE_REMAPPING:
            return str(mlx_lm_utils.MODEL_ARCHITECTURE_REMAPPING[model_type, architecture])
    return str(mlx_lm_utils.MODEL_REMAPPING.get(model_type, model_type))


def _target_folder(path_or_id: str | Path, revision: str | None) -> Path:
    folder = _folder(path_or_id, _TARGET_FILES, revision)
    if not (folder / CONFIG_NAME).is_file():
        raise ModelNotFound(f"{folder} holds no {CONFIG_NAME}, so it is no checkpoint folder")
    return folder


def load_drafter(
    path_or_id: str | Path,
    target: nn.Module | Target,
    kind: str | None = None,
    taps: Sequence[int] | None = None,
    quantize: Mapping[str, Any] | None = None,
) -> Drafter:
    """Load a drafter for a target, and refuse it if the two do not fit.

    Args:
        path_or_id: a local folder, "owner/name" on the Hugging Face hub, or "ngram" for lookup in the text itself.
            What the folder holds may be an ordinary language model, or the target itself where it carries a
            prediction layer.
        target: an mlx-lm model, or a Target.
        kind: one of KNOWN_DRAFTER_KINDS. The checkpoint's own word wins, with a warning.
        taps: 0-based target layers whose outputs the drafter reads, instead of those its config lists.
        quantize: `group_size`, `bits` and, if it is not "affine", `mode` of one of mlx's formats, to quantize the
            drafter's matrices once they are loaded.

    Raises:
        ModelNotFound: no such folder or repository, or it could not be downloaded.
        CheckpointError: the checkpoint is incomplete, damaged, or of a variant that is not supported.
        UnknownDrafter: nothing says what kind of drafter it is.
        UnsupportedOption: that kind cannot be loaded yet, or not with these options.
        IncompatiblePair: hidden size, vocabulary or layers do not fit, or a language model's tokens are not those of
            the tokenizer that `load` gave with the target; names both values.
        UnknownAnatomy: nothing is known about the parts of the target that the drafter needs.

    Warns:
        UserWarning: `kind` contradicts the checkpoint; keys or tensors that are ignored.
    """
    paired = target if isinstance(target, Target) else Target(target)
    drafter = _drafter(path_or_id, paired, kind, {"taps": taps, "quantize": quantize})
    validate_drafter_compatibility(drafter, paired)
    drafter.check_tokenizer(record_of(paired.model).tokenizer)
    return drafter


def _drafter(path_or_id: str | Path, target: Target, kind: str | None, options: Mapping[str, Any]) -> Drafter:
    if str(path_or_id) == NGRAM:
        resolve_family({"model_type": NGRAM}, kind)
        given = [f"{name}={value}" for name, value in options.items() if value is not None]
        if given:
            raise UnsupportedOption(
                f"{' and '.join(given)} was given, but an n-gram drafter is text alone. Leave it out."
            )
        return NgramDrafter()
    folder = _drafter_folder(path_or_id, target, kind)
    family = resolve_family(read_config(folder), kind, tensor_names(folder))
    if family.name == NGRAM:
        raise UnsupportedOption(f"an n-gram drafter has no checkpoint: give {NGRAM!r} in place of {folder}.")
    module = open_family(family)
    check_target(family, target)
    drafter = module.load(folder, target, **options)
    drafter.architecture = family.architecture
    drafter.name = folder.name if Path(path_or_id).exists() else str(path_or_id)
    return drafter


def _drafter_folder(path_or_id: str | Path, target: Target, kind: str | None) -> Path:
    """The local folder, downloaded if need be. Of a target's own repository the prediction layer's shards alone are."""
    folder = settings_folder(path_or_id)
    if Path(path_or_id).expanduser().is_dir():
        return folder
    # Families are imported when one of their drafters is wanted: it takes a while, and most programs want one or none.
    from mlx_spec.drafters.mtp.files import files_to_fetch

    shards = files_to_fetch(folder, target, kind == "mtp")
    return _folder(path_or_id, (*_SETTINGS_FILES, *([TENSOR_PATTERN] if shards is None else shards)))


def _folder(path_or_id: str | Path, patterns: Sequence[str], revision: str | None = None) -> Path:
    """The local folder, downloaded if need be."""
    local = Path(path_or_id).expanduser()
    if local.is_dir():
        return local
    if local.exists():
        raise ModelNotFound(f"{local} is a file; expected the folder that holds {CONFIG_NAME} and the weights")
    if not _HUB_ID.fullmatch(str(path_or_id)):
        raise ModelNotFound(f"no folder {str(path_or_id)!r}, and it is no hub id either: those read 'owner/name'")
    try:
        return Path(snapshot_download(str(path_or_id), revision=revision, allow_patterns=list(patterns)))
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        reason = one_line(error)
    raise ModelNotFound(f"no folder {str(path_or_id)!r}, and the hub does not give it: {reason}")
