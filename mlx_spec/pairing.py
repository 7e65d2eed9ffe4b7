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

from mlx_spec.arguments import FUNCTION, PATH, require, require_or_none, whole_numbers
from mlx_spec.drafters.base import Drafter
from mlx_spec.drafters.checkpoint import CONFIG_NAME, TENSOR_PATTERN, one_line, read_config, telling, tensor_names
from mlx_spec.drafters.ngram import NgramDrafter
from mlx_spec.drafters.quantization import wanted_format
from mlx_spec.drafters.registry import (
    check_target,
    drafter_family,
    open_family,
    resolve_family,
    validate_drafter_compatibility,
)
from mlx_spec.environment import expanded
from mlx_spec.errors import CheckpointError, ModelNotFound, UnsupportedOption
from mlx_spec.model.target import Target, evaluate_arrays
from mlx_spec.progress import Progress, tell, telling_progress
from mlx_spec.soundness import (
    Blueprint,
    check_arguments,
    check_built,
    check_files,
    check_settings,
    check_target_files,
    require_finite,
    telling_zeros,
)
from mlx_spec.verify.record import record_of

NGRAM = "ngram"

_WHERE = "the path of a folder or a hub id"

_HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")

_TARGET_FILES = ("*.json", "model*.safetensors", "tokenizer.model", "*.tiktoken", "*.txt", "*.jsonl", "*.jinja")
_SETTINGS_FILES = ("*.json",)


def load(
    path_or_id: str | Path,
    *,
    tokenizer_config: Mapping[str, Any] | None = None,
    model_config: Mapping[str, Any] | None = None,
    adapter_path: str | Path | None = None,
    lazy: bool = False,
    revision: str | None = None,
    check_weights: bool = False,
    progress: Progress | None = None,
) -> tuple[nn.Module, TokenizerWrapper]:
    """Load a target as mlx-lm does, and its tokenizer. The first arguments are those of `mlx_lm.load`.

    Args:
        path_or_id: a local folder, or "owner/name" on the Hugging Face hub. Code in it is never run.
        tokenizer_config: settings for the tokenizer.
        model_config: entries that replace those of config.json.
        adapter_path: folder of LoRA adapters.
        lazy: whether to leave the weights on disk until they are used. Only what was not left can be used in every
            thread.
        revision: of the hub repository.
        check_weights: whether to read all weights and refuse NaN and infinite ones.
        progress: told of every step; see `mlx_spec.Step`. What it raises ends the loading.

    Returns:
        The mlx-lm model and its tokenizer.

    Raises:
        ModelNotFound: no such folder or repository, or it could not be downloaded.
        CheckpointError: its files are damaged, or ask for what cannot be, or mlx-lm cannot load it (the cause is
            attached), or it is a drafter's.
        InvalidRequest: an argument is of another kind.
    """
    require("path_or_id", path_or_id, PATH, _WHERE)
    require_or_none("tokenizer_config", tokenizer_config, Mapping, "a dict of settings")
    require_or_none("model_config", model_config, Mapping, "a dict of settings")
    require_or_none("adapter_path", adapter_path, PATH, "the path of a folder")
    require_or_none("revision", revision, str, "the name of a branch, tag or commit")
    require("lazy", lazy, bool, "True or False")
    require("check_weights", check_weights, bool, "True or False")
    require_or_none("progress", progress, FUNCTION, "a function that is told each Step")
    with telling_progress(progress):
        tell("load", "looking at the files", 0, 3)
        folder = _target_folder(path_or_id, revision)
        _refuse_drafter(folder)
        changes = dict(model_config or {})
        check_target_files(folder, changes)
        adapter = _adapter_folder(adapter_path)
        tell("load", "loading the tokenizer", 1, 3)
        tokenizer = _tokenizer(folder, tokenizer_config or {}, changes)
        tell("load", "loading the model", 2, 3)
        model = _model(folder, changes, adapter)
        if not lazy:
            evaluate_arrays(model)
        if check_weights:
            require_finite(model, folder)
        tell("load", "loaded", 3, 3)
    record_of(model).tokenizer = tokenizer
    return model, tokenizer


def _adapter_folder(path: str | Path | None) -> Path | None:
    """Where adapters are, once its files were looked at."""
    if path is None:
        return None
    folder = expanded(path)
    check_files(folder)
    return folder


def _tokenizer(folder: Path, settings: Mapping[str, Any], changes: Mapping[str, Any]) -> TokenizerWrapper:
    """As `mlx_lm.load` gives it."""
    with telling(folder):
        config = {**mlx_lm_utils.load_config(folder), **changes}
        # An architecture that mlx-lm does not have is told before a tokenizer that it may be the reason for.
        mlx_lm_utils._get_classes(config)
        given, ends = {"trust_remote_code": False, **settings}, config.get("eos_token_id")
        # Left unsaid, a tokenizer with code of its own would ask on the terminal whether to run it.
        return mlx_lm_utils.load_tokenizer(folder, given, eos_token_ids=ends)


def _model(folder: Path, changes: dict[str, Any], adapter: Path | None = None) -> nn.Module:
    """As `mlx_lm.load` gives it, its weights left on disk until they are used."""
    blueprint = Blueprint()

    def classes(config: dict[str, Any]) -> tuple[Any, Any]:
        # Its own way to find them, with an eye on what it builds.
        model_class, args_class = mlx_lm_utils._get_classes(config)

        def build(args: Any) -> nn.Module:
            check_arguments(args, folder)
            with telling_zeros(args, folder):
                made = model_class(args)
            check_built(made, folder)
            blueprint.note(made)
            return made

        return build, args_class

    with telling(folder):
        model, _ = mlx_lm_utils.load_model(folder, lazy=True, model_config=changes, get_model_classes=classes)
        blueprint.require_floats(model, folder)
        if adapter is not None:
            model = mlx_lm_utils.load_adapters(model, str(adapter))
            model.eval()
    return model


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
    check_target_files(folder)
    return _model(folder, {})


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
    check_settings(config, folder)
    model_type = str(config.get("model_type"))
    name = _module_name(model_type, config.get("architectures"))
    if not name.isidentifier() or find_spec(f"mlx_lm.models.{name}") is None:
        raise UnsupportedOption(f"{folder / CONFIG_NAME}: model_type is {model_type!r}, for which mlx-lm has no module")
    with telling(folder):
        module = import_module(f"mlx_lm.models.{name}")
        args = module.ModelArgs.from_dict(config)
        check_arguments(args, folder)
        return Target(module.Model(args), has_weights=False)


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
    quantize: Mapping[str, Any] | str | int | None = None,
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
            drafter's matrices once they are loaded; or short, as at the command line: 4, "4,32", "mxfp4".

    Raises:
        ModelNotFound: no such folder or repository, or it could not be downloaded.
        CheckpointError: the checkpoint is incomplete, damaged, or of a variant that is not supported.
        UnknownDrafter: nothing says what kind of drafter it is.
        UnsupportedOption: that kind cannot be loaded yet, or not with these options.
        IncompatiblePair: hidden size, vocabulary or layers do not fit, or a language model's tokens are not those of
            the tokenizer that `load` gave with the target; names both values.
        UnknownAnatomy: nothing is known about the parts of the target that the drafter needs.
        InvalidRequest: an argument is of another kind.

    Warns:
        UserWarning: `kind` contradicts the checkpoint; keys or tensors that are ignored.
    """
    require("path_or_id", path_or_id, PATH, f'{_WHERE}, or "{NGRAM}"')
    require("target", target, (nn.Module, Target), "a model", "load gives a model and a tokenizer: give the model.")
    require_or_none("kind", kind, str, "the name of a kind")
    taps = None if taps is None else whole_numbers("taps", taps, "a list of layers of the target, counted from 0")
    form = wanted_format(quantize)
    tell("load", "loading the drafter", 0, 1)
    paired = target if isinstance(target, Target) else Target(target)
    drafter = _drafter(path_or_id, paired, kind, {"taps": taps, "quantize": form})
    validate_drafter_compatibility(drafter, paired)
    drafter.check_tokenizer(record_of(paired.model).tokenizer)
    tell("load", "loaded the drafter", 1, 1)
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
    drafter.name = folder.name if expanded(path_or_id).exists() else str(path_or_id)
    return drafter


def _drafter_folder(path_or_id: str | Path, target: Target, kind: str | None) -> Path:
    """The local folder, downloaded if need be. Of a target's own repository the prediction layer's shards alone are."""
    folder = settings_folder(path_or_id)
    if expanded(path_or_id).is_dir():
        return folder
    # Families are imported when one of their drafters is wanted: it takes a while, and most programs want one or none.
    from mlx_spec.drafters.mtp.files import files_to_fetch

    shards = files_to_fetch(folder, target, kind == "mtp")
    return _folder(path_or_id, (*_SETTINGS_FILES, *([TENSOR_PATTERN] if shards is None else shards)))


def _folder(path_or_id: str | Path, patterns: Sequence[str], revision: str | None = None) -> Path:
    """The local folder, downloaded if need be."""
    local = expanded(path_or_id)
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
