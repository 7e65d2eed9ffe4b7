"""The tensors of an EAGLE-3 drafter: names and shapes as they stand in the file, mapped to one layout."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
from mlx.utils import tree_flatten

from mlx_spec.drafters.checkpoint import read_tensors
from mlx_spec.drafters.eagle3.config import Eagle3Config
from mlx_spec.drafters.eagle3.keys import REPEATING_ARCHITECTURE, SUPPORTED
from mlx_spec.drafters.eagle3.layers import Eagle3Modules
from mlx_spec.drafters.quantization import Quantization, quantize_as_stored
from mlx_spec.drafters.spelling import AS_IT_IS, Spelling
from mlx_spec.drafters.stored_tensors import FLOATS, INTEGERS, dtypes_like, fault, fault_of_values, target_ids
from mlx_spec.errors import CheckpointError

Shape = tuple[int, ...]

LAYER = "layers.0."
_OTHER_LAYER = "midlayer."
_AUX_NORMS = {"aux_norm_low.": "fc_norm.0.", "aux_norm_mid.": "fc_norm.1.", "aux_norm_high.": "fc_norm.2."}

_ATTENTION = f"{LAYER}self_attn."
_SPLIT = (f"{_ATTENTION}embed_q.weight", f"{_ATTENTION}unembed_out.weight")
_JOINT = f"{_ATTENTION}kv_b_proj"

_IGNORED = re.compile(r"t2d|(.*\.)?rotary_emb\.inv_freq|verifier_(norm|lm_head)\.weight")

# Tensors whose presence means that the forward pass is another one, whatever the config says.
_UNSUPPORTED = re.compile(r"layers\..*|(input_norm|fc_norm|aux_norm|mask_hidden).*|.*\.(scales|biases|bias)")


@dataclass(frozen=True)
class Stored:
    """What a folder holds.

    Attributes:
        folder: for messages.
        tensors: name in the one layout -> (name in the file, array).
    """

    folder: Path
    tensors: Mapping[str, tuple[str, mx.array]]

    def fc_columns(self, quantization: Quantization | None) -> int | None:
        """Columns of fc, in entries; None where that cannot be told."""
        if "fc.scales" in self.tensors:
            form = None if quantization is None else quantization.format_of("fc")
            return None if form is None else self.tensors["fc.scales"][1].shape[-1] * form.group_size
        weight = self.tensors.get("fc.weight")
        return None if weight is None or weight[1].ndim != 2 else weight[1].shape[-1]


@dataclass(frozen=True)
class Eagle3Weights:
    """What the folder holds, checked.

    Attributes:
        modules: with the weights in them, evaluated, all of one dtype.
        target_ids: [draft_vocab] int32, the target's id of each id the head proposes; None when they are the same.
        largest_id: the largest target id the head can propose.
        dtype: the drafter's dtype.
    """

    modules: Eagle3Modules
    target_ids: mx.array | None
    largest_id: int
    dtype: mx.Dtype


def canonical(name: str) -> str:
    """A tensor's or module's name in the one layout: `layers.0.*`, `fc_norm.0`, no leading `model.`."""
    short = name.removeprefix("model.")
    for other, ours in {_OTHER_LAYER: LAYER, **_AUX_NORMS}.items():
        if short.startswith(other):
            return ours + short.removeprefix(other)
    return short


def read_stored(folder: Path, spelling: Spelling = AS_IT_IS) -> Stored:
    """Every tensor of a folder, lazily.

    Raises:
        CheckpointError: see `read_tensors`; also when one tensor is there under two names.
    """
    found: dict[str, tuple[str, mx.array]] = {}
    for name, array in read_tensors(folder).items():
        short = canonical(spelling.tensor(name))
        if short in found:
            raise CheckpointError(f"{folder}: {found[short][0]} and {name} are the same tensor under two names")
        found[short] = (name, array)
    return Stored(folder, found)


def read_weights(stored: Stored, config: Eagle3Config) -> Eagle3Weights:
    """Check every tensor of a drafter, and put them into modules.

    The dtype is that of fc.weight, or of norm.weight where fc is quantized.

    Raises:
        CheckpointError: names every tensor that is missing, misshapen, of a wrong dtype, not finite, or part of a
            variant that is not supported.

    Warns:
        UserWarning: once, naming the tensors that are not used.
    """
    found, folder = stored.tensors, stored.folder
    modules = _modules(stored, config)
    wanted = _wanted(modules, config, found)
    unused = [name for name in found if name not in wanted]
    refused = [found[name][0] for name in unused if _UNSUPPORTED.fullmatch(name) and not _IGNORED.fullmatch(name)]
    spare = [found[name][0] for name in unused if not _UNSUPPORTED.fullmatch(name) and not _IGNORED.fullmatch(name)]
    problems = _problems(found, wanted) + [f"{name} belongs to an unsupported variant" for name in refused]
    if problems:
        present = f" Present but not used: {', '.join(spare)}." if spare else ""
        raise CheckpointError(f"{folder}: {'; '.join(problems)}.{present} {_hint(problems)}")
    if spare:
        warnings.warn(
            f"{folder} holds tensors that an EAGLE-3 drafter does not have; they are ignored: {', '.join(spare)}",
            stacklevel=4,
        )
    tensors = {name: found[name][1] for name in wanted}
    d2t = tensors.pop("d2t", None)
    reduced = None if d2t is None else target_ids(d2t, config.vocab_size, folder)
    weight = tensors["fc.weight"]
    dtype = (weight if weight.dtype in FLOATS else tensors["norm.weight"]).dtype
    floats = {name: array.astype(dtype) if array.dtype in FLOATS else array for name, array in tensors.items()}
    modules.load_weights(list(_split(floats, config).items()))
    ids, largest_id = reduced or (None, config.draft_vocab_size - 1)
    mx.eval(modules.parameters(), ids)
    return Eagle3Weights(modules, ids, largest_id, dtype)


def _modules(stored: Stored, config: Eagle3Config) -> Eagle3Modules:
    """Modules for what is stored, with weights that are yet to come."""
    found = stored.tensors
    modules = Eagle3Modules(
        config,
        has_embedding="embed_tokens.weight" in found,
        has_head="lm_head.weight" in found or config.draft_vocab_size != config.vocab_size,
        has_fc_bias=config.bias or "fc.bias" in found,
    )
    quantize_as_stored(modules, config.quantization, found, stored.folder)
    return modules


Wanted = dict[str, tuple[Shape, tuple[mx.Dtype, ...]]]


def _wanted(modules: Eagle3Modules, config: Eagle3Config, found: Mapping[str, object]) -> Wanted:
    """Name -> shape and dtypes of every tensor the modules need, as it stands in a file."""
    wanted: Wanted = {
        name: (array.shape, dtypes_like(array.dtype)) for name, array in tree_flatten(modules.parameters())
    }
    if config.latent is not None and not any(name in found for name in _SPLIT):
        heads, geometry = config.num_attention_heads, config.latent
        rows = heads * (geometry.qk_nope_head_dim + geometry.v_head_dim)
        for name in _SPLIT:
            del wanted[name]
        wanted |= _joint(rows, config)
    if "d2t" in found or config.draft_vocab_size != config.vocab_size:
        wanted["d2t"] = ((config.draft_vocab_size,), INTEGERS)
    return wanted


def _joint(rows: int, config: Eagle3Config) -> Wanted:
    """The matrix that files keep in one piece, in floating point or quantized."""
    assert config.latent is not None
    columns = config.latent.kv_lora_rank
    form = None if config.quantization is None else config.quantization.format_of(_JOINT)
    if form is None:
        return {f"{_JOINT}.weight": ((rows, columns), FLOATS)}
    parts = mx.quantize(mx.zeros((rows, columns)), form.group_size, form.bits, mode=form.mode)
    return {
        f"{_JOINT}.{part}": (array.shape, dtypes_like(array.dtype))
        for part, array in zip(("weight", "scales", "biases"), parts, strict=False)
    }


def _split(tensors: dict[str, mx.array], config: Eagle3Config) -> dict[str, mx.array]:
    """Latent attention's joint matrix, cut into what mlx-lm multiplies queries and outputs with."""
    weight = tensors.pop(f"{_JOINT}.weight", None)
    if weight is None or config.latent is None:
        return tensors
    scales, biases = (tensors.pop(f"{_JOINT}.{part}", None) for part in ("scales", "biases"))
    if scales is not None:
        form = config.quantization.format_of(_JOINT) if config.quantization else None
        assert form is not None
        dtype = tensors["norm.weight"].dtype
        weight = mx.dequantize(weight, scales, biases, form.group_size, form.bits, mode=form.mode, dtype=dtype)
    keys = config.latent.qk_nope_head_dim
    heads = weight.reshape(config.num_attention_heads, -1, config.latent.kv_lora_rank)
    embed, unembed = heads[:, :keys].swapaxes(-1, -2), heads[:, keys:]
    return {**tensors, _SPLIT[0]: mx.contiguous(embed), _SPLIT[1]: mx.contiguous(unembed)}


def _problems(found: Mapping[str, tuple[str, mx.array]], wanted: Wanted) -> list[str]:
    """One sentence per tensor that is missing, misshapen, of a wrong dtype or not finite."""
    # Tensors that are missing are named as the file names the others.
    prefix = _OTHER_LAYER if any(_OTHER_LAYER in name for name, _ in found.values()) else LAYER
    problems = []
    for name, (shape, dtypes) in wanted.items():
        original, array = found.get(name, (name.replace(LAYER, prefix), None))
        said = fault(array, shape, dtypes) or fault_of_values(array)
        if said:
            problems.append(f"{original} {said}")
    return problems


_HINTS = {
    "lm_head.weight has shape": "The rows of lm_head are draft_vocab_size, or vocab_size where it is absent.",
    "fc.weight has shape": (
        "The columns of fc are the number of tapped layers times target_hidden_size (or hidden_size)."
    ),
    "_proj.weight has shape": (
        "Heads have head_dim entries, or hidden_size / num_attention_heads where it is absent; a second layer reads "
        f"the embedding too if architectures is {REPEATING_ARCHITECTURE!r}."
    ),
    ".bias belongs": "Biases are asked for by attention_bias, mlp_bias and bias.",
}


def _hint(problems: list[str]) -> str:
    """What the config says about the tensors that are wrong."""
    said = "; ".join(problems)
    return " ".join([*(hint for words, hint in _HINTS.items() if words in said), SUPPORTED])
