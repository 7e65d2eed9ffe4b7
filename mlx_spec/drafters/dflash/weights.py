"""The tensors of a block drafter: names and shapes as they stand in the file, mapped to one layout."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import mlx.core as mx

from mlx_spec.drafters.checkpoint import read_tensors
from mlx_spec.drafters.dflash.config import BlockConfig, Flavour
from mlx_spec.drafters.dflash.places import canonical_name
from mlx_spec.drafters.quantization import Format
from mlx_spec.drafters.stored_tensors import FLOATS, INTEGERS, dtypes_like, fault, fault_of_values, target_ids
from mlx_spec.errors import CheckpointError

Shape = tuple[int, ...]

_IGNORED = re.compile(r"t2d|verifier_.*|(.*\.)?rotary_emb\.inv_freq")

# Tensors whose presence means that the forward pass is another one, whatever the config says.
_UNSUPPORTED = re.compile(
    r".*\.(scales|biases|bias)|layers\.\d+\..*|(markov_head|candidate_selector|aux_hidden_norms)\..*|fc_norm.*"
)


@dataclass(frozen=True)
class BlockWeights:
    """What the file holds, checked.

    Attributes:
        tensors: name in the one layout -> array, all of one dtype, evaluated.
        target_ids: [V_draft] int32, the target's id of each id the output projection knows; None when they are the
            same.
        largest_id: the largest target id that can be proposed.
        dtype: the drafter's dtype.
        formats: path of a module -> how its weight is quantized, for those that are.
    """

    tensors: Mapping[str, mx.array]
    target_ids: mx.array | None
    largest_id: int
    dtype: mx.Dtype
    formats: Mapping[str, Format]

    def quantized(self, form: Format) -> tuple[BlockWeights, list[str]]:
        """The same with every matrix quantized that can be, and the paths of those that cannot.

        Those are matrices whose rows are no whole number of groups.
        """
        matrices = [name for name, array in self.tensors.items() if name.endswith(".weight") and array.ndim == 2]
        left = [name for name in matrices if self.tensors[name].shape[1] % form.group_size]
        tensors, formats = dict(self.tensors), dict(self.formats)
        for name in matrices:
            if name in left:
                continue
            module = name.removesuffix(".weight")
            parts = mx.quantize(tensors[name], form.group_size, form.bits, mode=form.mode)
            tensors |= {f"{module}.{part}": array for part, array in zip(_PARTS, parts, strict=False)}
            formats[module] = form
        mx.eval(tensors)
        return replace(self, tensors=tensors, formats=formats), [name.removesuffix(".weight") for name in left]


_PARTS = ("weight", "scales", "biases")


@dataclass
class _Wanted:
    """Shapes by name, which of them may be absent, and the dtypes of those that are not just floats."""

    shapes: dict[str, Shape] = field(default_factory=dict)
    optional: set[str] = field(default_factory=set)
    dtypes: dict[str, tuple[mx.Dtype, ...]] = field(default_factory=dict)

    def pack(self, module: str, form: Format) -> None:
        """Want a module's matrix in a quantized format."""
        rows, columns = self.shapes[f"{module}.weight"]
        packed = mx.quantize(mx.zeros((rows, columns)), form.group_size, form.bits, mode=form.mode)
        for part, array in zip(_PARTS, packed, strict=False):
            name = f"{module}.{part}"
            self.shapes[name] = array.shape
            self.dtypes[name] = dtypes_like(array.dtype)

    def add(self, name: str, *shape: int, optional: bool = False) -> None:
        self.shapes[name] = shape
        if optional:
            self.optional.add(name)

    def linear(self, name: str, rows: int, columns: int, bias: bool = False) -> None:
        self.add(f"{name}.weight", rows, columns)
        if bias:
            self.add(f"{name}.bias", rows)


def read_weights(folder: Path, config: BlockConfig) -> BlockWeights:
    """Read and check every tensor of a drafter.

    The dtype is that of fc.weight, or of norm.weight where fc is quantized.

    Raises:
        CheckpointError: names every tensor that is missing, misshapen, of a wrong dtype, not finite, or part of a
            variant the config does not ask for.

    Warns:
        UserWarning: once, naming the tensors that are not used.
    """
    found = _canonical(_split_fused(read_tensors(folder), config, folder), folder)
    wanted = _wanted(config)
    formats = _pack_as_stored(wanted, found, config, folder)
    unused = [name for name in found if name not in wanted.shapes and not _IGNORED.fullmatch(name)]
    refused = [found[name][0] for name in unused if _UNSUPPORTED.fullmatch(name)]
    spare = [found[name][0] for name in unused if not _UNSUPPORTED.fullmatch(name)]
    problems = [
        *_problems(found, wanted),
        *(f"{name} belongs to a variant that the config does not ask for" for name in refused),
    ]
    if problems:
        also = f" Present but not used: {', '.join(spare)}." if spare else ""
        raise CheckpointError(f"{folder}: {'; '.join(problems)}.{also}{_hint(problems)}")
    if spare:
        warnings.warn(
            f"{folder} holds tensors that this drafter does not have; they are ignored: {', '.join(spare)}",
            stacklevel=3,
        )
    used = {name: array for name, (_, array) in found.items() if name in wanted.shapes}
    d2t = used.pop("d2t", None)
    dtype = used["norm.weight" if "fc" in formats else "fc.weight"].dtype
    tensors = {name: array.astype(dtype) if array.dtype in FLOATS else array for name, array in used.items()}
    reduced = None if d2t is None else target_ids(d2t, config.vocab_size, folder)
    ids, largest = reduced or (None, config.draft_vocab_size - 1)
    mx.eval(tensors, ids)
    return BlockWeights(tensors, ids, largest, dtype, formats)


def _split_fused(tensors: Mapping[str, mx.array], config: BlockConfig, folder: Path) -> dict[str, mx.array]:
    """Cut `qkv_proj.weight` into the three it is made of. One of another size is left to be refused by its name."""
    heads = (config.num_attention_heads, config.num_key_value_heads, config.num_key_value_heads)
    rows = [count * config.head_dim for count in heads]
    split: dict[str, mx.array] = {}
    for name, array in tensors.items():
        if name.endswith(".self_attn.qkv_proj.weight") and array.shape == (sum(rows), config.hidden_size):
            for each, part in zip("qkv", mx.split(array, [rows[0], rows[0] + rows[1]]), strict=True):
                own = name.replace("qkv_proj", f"{each}_proj")
                if own in tensors:
                    raise CheckpointError(f"{folder}: {name} and {own} are the same tensor under two names")
                split[own] = part
        else:
            split[name] = array
    return split


def _pack_as_stored(
    wanted: _Wanted, found: Mapping[str, object], config: BlockConfig, folder: Path
) -> dict[str, Format]:
    """Want every matrix whose scales are stored in the format the config names. Module -> format."""
    modules = [name.removesuffix(".weight") for name, shape in wanted.shapes.items() if len(shape) == 2]
    stored = [module for module in modules if f"{module}.scales" in found]
    formats = {}
    for module in stored:
        form = None if config.quantization is None else config.quantization.format_of(module)
        if form is None:
            raise CheckpointError(
                f"{folder} holds {module}.scales, but its config.json has no quantization block for it, "
                "with group_size and bits"
            )
        rows = wanted.shapes[f"{module}.weight"][1]
        if rows % form.group_size:
            raise CheckpointError(
                f"{folder}: {module}.scales is there, but rows of {rows} are no whole groups of {form.group_size}"
            )
        wanted.pack(module, form)
        formats[module] = form
    return formats


def _canonical(tensors: Mapping[str, mx.array], folder: Path) -> dict[str, tuple[str, mx.array]]:
    """Name in the one layout -> (name in the file, array)."""
    found: dict[str, tuple[str, mx.array]] = {}
    for name, array in tensors.items():
        short = canonical_name(name)
        if short in found:
            raise CheckpointError(f"{folder}: {found[short][0]} and {name} are the same tensor under two names")
        found[short] = (name, array)
    return found


def _problems(found: Mapping[str, tuple[str, mx.array]], wanted: _Wanted) -> list[str]:
    """One sentence per tensor that is missing, misshapen, of a wrong dtype or not finite."""
    spell = _speller(found)
    problems = []
    for name, shape in wanted.shapes.items():
        if name not in found and name in wanted.optional:
            continue
        original, array = found.get(name, (spell(name), None))
        dtypes = wanted.dtypes.get(name, INTEGERS if name == "d2t" else FLOATS)
        said = fault(array, shape, dtypes) or fault_of_values(array)
        if said:
            problems.append(f"{original} {said}")
    return problems


def _speller(found: Mapping[str, tuple[str, mx.array]]) -> Callable[[str], str]:
    """Names what is missing as the file names the rest."""
    originals = [original for original, _ in found.values()]
    prefix = "model." if originals and all(original.startswith("model.") for original in originals) else ""
    encoder = any(original.startswith("encoder.") for original in originals)
    other = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}
    return lambda name: prefix + (other.get(name, name) if encoder else name)


def wanted_shapes(config: BlockConfig) -> tuple[dict[str, Shape], set[str]]:
    """Every tensor's shape, and the names among them that may be absent."""
    wanted = _wanted(config)
    return wanted.shapes, wanted.optional


def _wanted(config: BlockConfig) -> _Wanted:
    hidden, taps = config.hidden_size, len(config.taps)
    wanted = _Wanted()
    wanted.linear("fc", hidden, taps * config.target_hidden_size)
    wanted.add("hidden_norm.weight", hidden)
    wanted.add("norm.weight", hidden)
    if config.tap_norms:
        for index in range(taps):
            wanted.add(f"aux_hidden_norms.{index}.weight", config.target_hidden_size)
    for index in range(config.num_hidden_layers):
        _add_layer(wanted, config, f"layers.{index}.")
    reduced = config.draft_vocab_size != config.vocab_size
    borrows = not config.ships_tables
    wanted.add("embed_tokens.weight", config.vocab_size, hidden, optional=borrows)
    wanted.add("lm_head.weight", config.draft_vocab_size, hidden, optional=borrows and not reduced)
    wanted.add("d2t", config.draft_vocab_size, optional=not reduced)
    wanted.add("mask_embedding", hidden, optional=True)
    _add_heads(wanted, config)
    return wanted


def _add_layer(wanted: _Wanted, config: BlockConfig, layer: str) -> None:
    hidden, inner, size = config.hidden_size, config.intermediate_size, config.head_dim
    queries, keys = config.num_attention_heads * size, config.num_key_value_heads * size
    norms = ["input_layernorm", "post_attention_layernorm"]
    if config.flavour is Flavour.GEMMA:
        norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
        wanted.add(f"{layer}layer_scalar", 1)
    for name in norms:
        wanted.add(f"{layer}{name}.weight", hidden)
    attention = f"{layer}self_attn."
    if config.gated:
        wanted.linear(f"{attention}g_proj", config.num_attention_heads, hidden)
    wanted.linear(f"{attention}q_proj", queries, hidden, config.attention_bias)
    wanted.linear(f"{attention}k_proj", keys, hidden, config.attention_bias)
    if not config.attention_k_eq_v:
        wanted.linear(f"{attention}v_proj", keys, hidden, config.attention_bias)
    wanted.linear(f"{attention}o_proj", hidden, queries, config.attention_bias)
    wanted.add(f"{attention}q_norm.weight", size)
    wanted.add(f"{attention}k_norm.weight", size)
    if config.attention_sink_bias:
        wanted.add(f"{attention}attention_sink_bias", config.num_attention_heads)
    wanted.linear(f"{layer}mlp.gate_proj", inner, hidden)
    wanted.linear(f"{layer}mlp.up_proj", inner, hidden)
    wanted.linear(f"{layer}mlp.down_proj", hidden, inner)
    if config.flavour is Flavour.CONVOLVED:
        assert config.conv_kernel_size
        assert config.conv_group_size
        for name in ("attention_conv", "mlp_conv"):
            wanted.add(f"{layer}{name}.base_kernel", 2, config.conv_kernel_size, hidden)
            groups = hidden // config.conv_group_size
            wanted.linear(f"{layer}{name}.kernel_projection", 2 * config.conv_kernel_size * groups, hidden)


def _add_heads(wanted: _Wanted, config: BlockConfig) -> None:
    hidden, rank = config.hidden_size, config.markov_rank
    if config.selector_top_k:
        assert config.selector_rank
        wanted.add("candidate_selector.predecessor_codebook", config.vocab_size, config.selector_rank)
        wanted.add("candidate_selector.successor_codebook", config.vocab_size, config.selector_rank)
        wanted.linear("candidate_selector.hidden_projection", config.selector_rank, hidden)
    if rank:
        wanted.add("markov_head.markov_w1.weight", config.vocab_size, rank)
        wanted.add("markov_head.markov_w2.weight", config.draft_vocab_size, rank)
    if rank and config.markov_head_type == "gated":
        wanted.linear("markov_head.gate_proj", rank, hidden + rank, bias=True)
    if rank and config.markov_head_type == "rnn":
        wanted.linear("markov_head.joint_proj", 3 * rank, 2 * rank + hidden, bias=True)
    if config.enable_confidence_head:
        width = hidden + (rank if config.confidence_head_with_markov else 0)
        wanted.linear("confidence_head.proj", 1, width, bias=True)


def _hint(problems: list[str]) -> str:
    if any("fc.weight has shape" in problem for problem in problems):
        return " The columns of fc are the number of tapped layers times target_hidden_size (or hidden_size)."
    return ""
