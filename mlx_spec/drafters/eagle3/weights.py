"""The tensors of an EAGLE-3 drafter: names and shapes as they stand in the file, mapped to one layout."""

from __future__ import annotations

import re
import warnings
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx

from mlx_spec.drafters.checkpoint import read_tensors
from mlx_spec.drafters.eagle3.config import SUPPORTED, Eagle3Config
from mlx_spec.errors import CheckpointError

Shape = tuple[int, ...]

FLOATS = (mx.bfloat16, mx.float16, mx.float32)
INTEGERS = (mx.int64, mx.int32)

LAYER = "midlayer."
_OTHER_LAYER = "layers.0."

_IGNORED = re.compile(r"t2d|(.*\.)?rotary_emb\.inv_freq")

# Tensors whose presence means that the forward pass is another one, whatever the config says.
_UNSUPPORTED = re.compile(
    r"(input_norm|fc_norm|aux_norm).*|.*\.(q_norm|k_norm|q_a_proj|q_b_proj|kv_a_proj_with_mqa|kv_b_proj)\..*"
    r"|layers\.[1-9].*|.*\.(scales|biases)|.*\.bias"
)


@dataclass(frozen=True)
class Eagle3Weights:
    """What the file holds, checked.

    Attributes:
        tensors: name in the one layout -> array, all of one dtype, evaluated.
        target_ids: [draft_vocab] int32, the target's id of each id the head proposes; None when they are the same.
        largest_id: the largest target id the head can propose.
        dtype: the drafter's dtype.
    """

    tensors: Mapping[str, mx.array]
    target_ids: mx.array | None
    largest_id: int
    dtype: mx.Dtype


def read_weights(folder: Path, config: Eagle3Config) -> Eagle3Weights:
    """Read and check every tensor of a drafter.

    `layers.0.*` becomes `midlayer.*`; a leading `model.` is dropped. The dtype is that of fc.weight.

    Raises:
        CheckpointError: names every tensor that is missing, misshapen, of a wrong dtype, not finite, or part of a
            variant that is not supported.

    Warns:
        UserWarning: once, naming the tensors that are not used.
    """
    found = _canonical(read_tensors(folder), folder)
    wanted, optional = _shapes(config)
    used = {name: array for name, (_, array) in found.items() if name in wanted}
    refused = [original for name, (original, _) in found.items() if name not in wanted and _is_unsupported(name)]
    unused = [
        original
        for name, (original, _) in found.items()
        if name not in wanted and not _is_unsupported(name) and not _IGNORED.fullmatch(name)
    ]
    problems = _problems(found, wanted, optional) + [f"{name} belongs to an unsupported variant" for name in refused]
    if problems:
        spare = f" Present but not used: {', '.join(unused)}." if unused else ""
        raise CheckpointError(f"{folder}: {'; '.join(problems)}.{spare} {_hint(problems)}")
    if unused:
        warnings.warn(
            f"{folder} holds tensors that an EAGLE-3 drafter does not have; they are ignored: {', '.join(unused)}",
            stacklevel=3,
        )
    d2t = used.pop("d2t", None)
    dtype = used["fc.weight"].dtype
    tensors = {name: array.astype(dtype) for name, array in used.items()}
    target_ids = None if d2t is None else _target_ids(d2t, config, folder)
    mx.eval(tensors, target_ids)
    largest_id = config.draft_vocab_size - 1 if target_ids is None else _to_int(target_ids.max())
    return Eagle3Weights(tensors, target_ids, largest_id, dtype)


def _canonical(tensors: Mapping[str, mx.array], folder: Path) -> dict[str, tuple[str, mx.array]]:
    """Name in the one layout -> (name in the file, array)."""
    found: dict[str, tuple[str, mx.array]] = {}
    for name, array in tensors.items():
        short = name.removeprefix("model.")
        if short.startswith(_OTHER_LAYER):
            short = LAYER + short.removeprefix(_OTHER_LAYER)
        if short in found:
            raise CheckpointError(f"{folder}: {found[short][0]} and {name} are the same tensor under two names")
        found[short] = (name, array)
    return found


def _problems(
    found: Mapping[str, tuple[str, mx.array]], wanted: Mapping[str, Shape], optional: Collection[str]
) -> list[str]:
    """One sentence per tensor that is missing, misshapen, of a wrong dtype or not finite."""
    # Tensors that are missing are named as the file names the others.
    prefix = _OTHER_LAYER if any(_OTHER_LAYER in name for name, _ in found.values()) else LAYER
    problems = []
    for name, shape in wanted.items():
        if name in found:
            problems += _faults(*found[name], shape, INTEGERS if name == "d2t" else FLOATS)
        elif name not in optional:
            problems.append(f"{name.replace(LAYER, prefix)} is missing, wanted {list(shape)}")
    return problems


def _faults(name: str, array: mx.array, shape: Shape, dtypes: tuple[mx.Dtype, ...]) -> list[str]:
    if array.shape != shape:
        return [f"{name} has shape {list(array.shape)}, wanted {list(shape)}"]
    if array.dtype not in dtypes:
        return [f"{name} has dtype {_short(array.dtype)}, wanted {' or '.join(map(_short, dtypes))}"]
    if not mx.isfinite(array).all().item():
        return [f"{name} holds NaN or infinity"]
    return []


def _shapes(config: Eagle3Config) -> tuple[dict[str, Shape], set[str]]:
    """Wanted shapes, and the names among them that may be absent."""
    hidden, inner = config.hidden_size, config.intermediate_size
    queries, keys = (heads * config.head_dim for heads in (config.num_attention_heads, config.num_key_value_heads))
    shapes: dict[str, Shape] = {
        "fc.weight": (hidden, len(config.taps) * config.target_hidden_size),
        "fc.bias": (hidden,),
        f"{LAYER}input_layernorm.weight": (hidden,),
        f"{LAYER}hidden_norm.weight": (hidden,),
        f"{LAYER}post_attention_layernorm.weight": (hidden,),
        "norm.weight": (hidden,),
        "lm_head.weight": (config.draft_vocab_size, hidden),
        "embed_tokens.weight": (config.vocab_size, hidden),
        "d2t": (config.draft_vocab_size,),
    }
    linears = {
        "self_attn.q_proj": (queries, 2 * hidden, config.attention_bias),
        "self_attn.k_proj": (keys, 2 * hidden, config.attention_bias),
        "self_attn.v_proj": (keys, 2 * hidden, config.attention_bias),
        "self_attn.o_proj": (hidden, queries, config.attention_bias),
        "mlp.gate_proj": (inner, hidden, config.mlp_bias),
        "mlp.up_proj": (inner, hidden, config.mlp_bias),
        "mlp.down_proj": (hidden, inner, config.mlp_bias),
    }
    for name, (rows, columns, has_bias) in linears.items():
        shapes[f"{LAYER}{name}.weight"] = (rows, columns)
        if has_bias:
            shapes[f"{LAYER}{name}.bias"] = (rows,)
    optional = {"embed_tokens.weight"}
    if not config.bias:
        optional.add("fc.bias")
    if config.draft_vocab_size == config.vocab_size:
        optional |= {"lm_head.weight", "d2t"}
    return shapes, optional


def _short(dtype: mx.Dtype) -> str:
    return str(dtype).removeprefix("mlx.core.")


def _is_unsupported(name: str) -> bool:
    return _UNSUPPORTED.fullmatch(name) is not None


def _to_int(array: mx.array) -> int:
    value = array.item()
    assert isinstance(value, int)
    return value


def _hint(problems: list[str]) -> str:
    hints = []
    if any(problem.startswith("lm_head.weight has shape") for problem in problems):
        hints.append("The rows of lm_head are config.json's draft_vocab_size, or vocab_size where it is absent.")
    if any(problem.startswith("fc.weight has shape") for problem in problems):
        hints.append("The columns of fc are the number of tapped layers times target_hidden_size (or hidden_size).")
    return " ".join([*hints, SUPPORTED])


def _target_ids(d2t: mx.array, config: Eagle3Config, folder: Path) -> mx.array:
    # d2t holds offsets: the id in the target's vocabulary is the proposed id plus its entry.
    ids = mx.arange(config.draft_vocab_size, dtype=mx.int64) + d2t.astype(mx.int64)
    beyond = (ids < 0) | (ids >= config.vocab_size)
    if beyond.any().item():
        first = _to_int(mx.argmax(beyond))
        raise CheckpointError(
            f"{folder}: d2t[{first}] maps draft id {first} to {ids[first].item()}, outside the vocabulary of "
            f"{config.vocab_size}. d2t holds offsets: target id = draft id + d2t[draft id]."
        )
    return ids.astype(mx.int32)
