"""EAGLE-3: one decoder layer that reads the target's hidden states and drafts token after token.

Source: Li et al. 2025, arXiv:2503.01840. Left out: the draft tree (this drafts a chain), several layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx import nn

from mlx_spec.cache.adopt import new_append_cache
from mlx_spec.drafters.base import Drafter
from mlx_spec.drafters.chain import ChainNetwork, ChainState
from mlx_spec.drafters.eagle3.config import Eagle3Config
from mlx_spec.drafters.eagle3.weights import LAYER, Eagle3Weights
from mlx_spec.errors import IncompatiblePair
from mlx_spec.target.model import Target, evaluate_arrays

PADDING_LIMIT = 1024
"""Rows by which two embedding tables of one vocabulary may differ: tables are padded, each to its own multiple."""


class Eagle3Network(ChainNetwork):
    """The drafter's equations. Holds weights only.

    Attributes:
        dtype: of the weights, and of everything computed but fc.
        tapped_size: K*H_t, entries per row of tapped states.
    """

    def __init__(self, config: Eagle3Config, weights: Eagle3Weights) -> None:
        self.config = config
        self.dtype = weights.dtype
        # The tapped states of deep layers side by side exceed float16's range.
        self._fc_dtype = mx.float32 if self.dtype == mx.float16 else self.dtype
        self._tensors = {
            name: array.astype(self._fc_dtype) if name.startswith("fc.") else array
            for name, array in weights.tensors.items()
        }
        self._target_ids = weights.target_ids
        self._rotate = config.rope.build(config.head_dim)
        self.tapped_size = len(config.taps) * config.target_hidden_size
        mx.eval(self._tensors)
        evaluate_arrays(self._rotate)

    @property
    def has_embedding(self) -> bool:
        """Whether the drafter embeds tokens with a table of its own."""
        return "embed_tokens.weight" in self._tensors

    @property
    def has_head(self) -> bool:
        """Whether the drafter has an output projection of its own."""
        return "lm_head.weight" in self._tensors or (self.config.tie_word_embeddings and self.has_embedding)

    def embed(self, ids: mx.array, target: Target) -> mx.array:
        """[B, T] target ids -> [B, T, H] rows of the drafter's table, or of the target's when it has none."""
        if not self.has_embedding:
            return target.raw_embed(ids).astype(self.dtype)
        # The target's table may have more rows, padding that no real token has.
        return self._tensors["embed_tokens.weight"][mx.minimum(ids, self.config.vocab_size - 1)]

    def new_caches(self) -> list[Any]:
        """One full-attention cache per layer."""
        return [new_append_cache()]

    def fuse(self, tapped: mx.array, target: Target) -> mx.array:
        """See `ChainNetwork.fuse`."""
        del target
        return self._linear("fc", tapped.astype(self._fc_dtype)).astype(self.dtype)

    def run(self, tokens: mx.array, hidden: mx.array, caches: Sequence[Any], start: int, target: Target) -> mx.array:
        """See `ChainNetwork.run`. The output is not normalised."""
        (cache,) = caches
        embedded = self.embed(tokens, target)
        pairs = mx.concatenate(
            [self._norm(f"{LAYER}input_layernorm", embedded), self._norm(f"{LAYER}hidden_norm", hidden)], axis=-1
        )
        attended = hidden + self._attention(pairs, cache, start)
        normed = self._norm(f"{LAYER}post_attention_layernorm", attended)
        gate, up = self._linear(f"{LAYER}mlp.gate_proj", normed), self._linear(f"{LAYER}mlp.up_proj", normed)
        return attended + self._linear(f"{LAYER}mlp.down_proj", nn.silu(gate) * up)

    def carry(self, states: mx.array) -> mx.array:
        """See `ChainNetwork.carry`."""
        return states

    def logits(self, states: mx.array, target: Target) -> mx.array:
        """See `ChainNetwork.logits`."""
        normed = self._norm("norm", states)
        if "lm_head.weight" in self._tensors:
            return self._linear("lm_head", normed)
        if self.has_head:
            return normed @ self._tensors["embed_tokens.weight"].T
        return target.head(normed)

    def choose(self, states: mx.array, target: Target) -> mx.array:
        """See `ChainNetwork.choose`."""
        ids = mx.argmax(self.logits(states, target), axis=-1)
        return ids.astype(mx.int32) if self._target_ids is None else self._target_ids[ids]

    def _attention(self, pairs: mx.array, cache: Any, start: int) -> mx.array:
        rows, length, _ = pairs.shape
        position = start + cache.offset

        def heads(name: str, count: int) -> mx.array:
            projected = self._linear(f"{LAYER}self_attn.{name}", pairs)
            return projected.reshape(rows, length, count, self.config.head_dim).transpose(0, 2, 1, 3)

        queries = self._rotate(heads("q_proj", self.config.num_attention_heads), offset=position)
        keys = self._rotate(heads("k_proj", self.config.num_key_value_heads), offset=position)
        keys, values = cache.update_and_fetch(keys, heads("v_proj", self.config.num_key_value_heads))
        attended = mx.fast.scaled_dot_product_attention(
            queries, keys, values, scale=self.config.head_dim**-0.5, mask="causal" if length > 1 else None
        )
        return self._linear(f"{LAYER}self_attn.o_proj", attended.transpose(0, 2, 1, 3).reshape(rows, length, -1))

    def _linear(self, name: str, x: mx.array) -> mx.array:
        weight, bias = self._tensors[f"{name}.weight"], self._tensors.get(f"{name}.bias")
        return x @ weight.T if bias is None else mx.addmm(bias, x, weight.T)

    def _norm(self, name: str, x: mx.array) -> mx.array:
        return mx.fast.rms_norm(x, self._tensors[f"{name}.weight"], self.config.rms_norm_eps)


class Eagle3Drafter(Drafter):
    """An EAGLE-3 checkpoint, ready to draft. Requests share it; each opens a state of its own."""

    kind = "eagle3"
    default_width = 3

    def __init__(self, name: str, config: Eagle3Config, weights: Eagle3Weights) -> None:
        self.name = name
        self.config = config
        self.network = Eagle3Network(config, weights)
        self.taps = config.taps
        self._largest_id = weights.largest_id

    def check(self, target: Target) -> None:
        """Compare hidden size, vocabulary and tapped layers with the target.

        Raises:
            IncompatiblePair: names both values.
            UnknownAnatomy: nothing is known about the target's embedding.
        """
        self._check_hidden_size(target)
        self._check_vocabulary(target)
        last = target.layer_count - 1
        if self.taps[-1] > last:
            off_by_one = (
                " Such a list counts hidden states, with the embedding as 0; pass taps=(...) one lower."
                if self.taps[-1] == target.layer_count
                else ""
            )
            raise IncompatiblePair(
                f"drafter {self.name!r} reads the output of layer {self.taps[-1]} ({self.config.taps_from}), "
                f"but target {target.name!r} has layers 0..{last}.{off_by_one} Use a drafter made for this target."
            )

    def open(self, target: Target, start: int = 0) -> ChainState:
        """Make the state for one request; see `Drafter.open`."""
        return ChainState(self.network, target, start)

    def _check_hidden_size(self, target: Target) -> None:
        if self.config.target_hidden_size != target.hidden_size:
            raise IncompatiblePair(
                f"drafter {self.name!r} reads states of hidden size {self.config.target_hidden_size}, but target "
                f"{target.name!r} has {target.hidden_size}. Use a drafter made for this target."
            )
        borrowed = not (self.network.has_embedding and self.network.has_head)
        if borrowed and self.config.hidden_size != target.hidden_size:
            raise IncompatiblePair(
                f"drafter {self.name!r} has hidden size {self.config.hidden_size} and lacks an embedding or a head, "
                f"and those of target {target.name!r} have {target.hidden_size}. Use a drafter made for this target."
            )

    def _check_vocabulary(self, target: Target) -> None:
        drafter_rows, target_rows = self.config.vocab_size, target.vocab_size
        if drafter_rows == target_rows:
            return
        padding_only = abs(drafter_rows - target_rows) <= PADDING_LIMIT and self._largest_id < target_rows
        if not padding_only or not self.network.has_head:
            raise IncompatiblePair(
                f"drafter {self.name!r} is for a vocabulary of {drafter_rows} and proposes ids up to "
                f"{self._largest_id}, but target {target.name!r} has {target_rows}. Use a drafter made for this target."
            )
