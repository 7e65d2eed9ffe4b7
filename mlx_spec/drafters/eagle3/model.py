"""EAGLE-3: one decoder layer that reads the target's hidden states and drafts token after token.

Source: Li et al. 2025, arXiv:2503.01840. Left out: the draft tree (this drafts a chain), several layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx import nn

from mlx_spec.cache.adopt import new_append_cache
from mlx_spec.drafters.base import Drafter, DrafterState, Rows
from mlx_spec.drafters.eagle3.config import Eagle3Config
from mlx_spec.drafters.eagle3.weights import LAYER, Eagle3Weights
from mlx_spec.errors import IncompatiblePair
from mlx_spec.target.model import Target, evaluate_arrays

PENDING_LIMIT = 64
"""Tapped rows kept unread while nothing is proposed."""

PADDING_LIMIT = 1024
"""Rows by which two embedding tables of one vocabulary may differ: tables are padded, each to its own multiple."""


class Eagle3Network:
    """The drafter's equations. Holds weights only.

    Attributes:
        dtype: of the weights, and of everything computed but fc.
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
        mx.eval(self._tensors)
        evaluate_arrays(self._rotate)

    @property
    def tapped_size(self) -> int:
        """K*H_t, entries per row of tapped states."""
        return len(self.config.taps) * self.config.target_hidden_size

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

    def fuse(self, tapped: mx.array) -> mx.array:
        """[B, T, K*H_t] tapped states -> [B, T, H], the hidden states the layer reads."""
        return self._linear("fc", tapped.astype(self._fc_dtype)).astype(self.dtype)

    def layer(self, embedded: mx.array, hidden: mx.array, cache: Any, start: int) -> mx.array:
        """Run pairs (hidden state at t, token at t+1) and append them to the cache.

        Args:
            embedded: [B, T, H] of the tokens.
            hidden: [B, T, H] from `fuse`, or this function's own output for drafted positions.
            cache: the layer's cache; its offset counts the pairs in it.
            start: absolute position of the first pair in the cache.

        Returns:
            [B, T, H], not normalised.
        """
        pairs = mx.concatenate(
            [self._norm(f"{LAYER}input_layernorm", embedded), self._norm(f"{LAYER}hidden_norm", hidden)], axis=-1
        )
        attended = hidden + self._attention(pairs, cache, start)
        normed = self._norm(f"{LAYER}post_attention_layernorm", attended)
        gate, up = self._linear(f"{LAYER}mlp.gate_proj", normed), self._linear(f"{LAYER}mlp.up_proj", normed)
        return attended + self._linear(f"{LAYER}mlp.down_proj", nn.silu(gate) * up)

    def logits(self, states: mx.array, target: Target) -> mx.array:
        """[B, T, H] the layer's output -> [B, T, draft_vocab]."""
        normed = self._norm("norm", states)
        if "lm_head.weight" in self._tensors:
            return self._linear("lm_head", normed)
        if self.has_head:
            return normed @ self._tensors["embed_tokens.weight"].T
        return target.head(normed)

    def choose(self, states: mx.array, target: Target) -> mx.array:
        """[B, 1, H] the layer's output -> [B, 1] int32, the likeliest token in the target's vocabulary."""
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

    def open(self, target: Target, start: int = 0) -> Eagle3State:
        """Make the state for one request; see `Drafter.open`."""
        return Eagle3State(self.network, target, start)

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


class Eagle3State(DrafterState):
    """One request's cache of pairs (hidden state at t, token at t+1), and the committed rows not yet in it.

    Between calls the cache's offset counts pairs of committed tokens; what lies past it is scratch.
    """

    def __init__(self, network: Eagle3Network, target: Target, start: int) -> None:
        self._network = network
        self._target = target
        self._start = start
        self._cache = new_append_cache()
        # Tapped states that wait for their pair to be run, and the tokens that complete those pairs. There is one
        # token fewer: the last row is completed by the next bonus.
        self._rows: list[mx.array] = []
        self._ids: list[list[int]] = []
        # (bonus, pairs): propose left this many valid pairs past the offset, should this bonus be committed.
        self._scratch: tuple[list[int], int] | None = None

    @property
    def pending(self) -> int:
        """Tapped rows kept, at most PENDING_LIMIT."""
        return sum(rows.shape[1] for rows in self._rows)

    def read_prompt(self, ids: Rows, hidden: mx.array | None) -> None:
        """Run every complete pair of the chunk without the head, and keep the last row.

        Args:
            ids: [B][T] token ids of the chunk.
            hidden: [B, T, K*H_t] their tapped states.

        Cost:
            Lazy. Evaluate `arrays()` before the next chunk, or the chunk's states stay in memory.
        """
        self._append(ids, hidden)
        self._run_pending()

    def catch_up(self, ids: Rows, hidden: mx.array | None) -> None:
        """Keep the rows for the next proposal. Pairs that `propose` ran on true states and tokens are not run again.

        Args:
            ids: [B][n] the committed verify inputs, n >= 1.
            hidden: [B, n, K*H_t] their tapped states.
        """
        scratch, self._scratch = self._scratch, None
        if scratch is not None and scratch[0] == [row[0] for row in ids]:
            self._cache.offset += scratch[1]
            self._rows, self._ids = [], []
        self._append(ids, hidden)
        if self.pending > PENDING_LIMIT:
            self._run_pending()

    def propose(self, bonus: Sequence[int], count: int) -> mx.array:
        """Run the pending pairs, then draft a chain by feeding back each output with the token it gave.

        Repeating the call gives the same proposals.

        Args:
            bonus: [B] newest emitted token of each row.
            count: proposals wanted, >= 1.

        Returns:
            [B, count] int32 ids in the target's vocabulary, greedy, lazy.

        Raises:
            ValueError: nothing was read before, so there is no hidden state to start from.

        Cost:
            One forward of the layer over the pending pairs and count - 1 of one token, count heads, no host read.
            Within one lazy graph an in-place write copies its buffer, so the layer's cache is copied count - 1 times.
        """
        if not self._rows:
            raise ValueError("an EAGLE-3 drafter continues the target's hidden states: read the prompt first")
        self.abort()
        committed = self._cache.offset
        try:
            states = self._run([[*row, token] for row, token in zip(self._ids, bonus, strict=True)])[:, -1:]
            chosen = [self._network.choose(states, self._target)]
            for _ in range(count - 1):
                states = self._layer(chosen[-1], states)
                chosen.append(self._network.choose(states, self._target))
        finally:
            self._cache.offset = committed
        self._scratch = (list(bonus), self.pending)
        return mx.concatenate(chosen, axis=1)

    def abort(self) -> None:
        """Forget the pairs that `propose` ran; see `DrafterState.abort`."""
        self._scratch = None

    def arrays(self) -> list[mx.array]:
        """The cache's buffers and the pending rows."""
        buffers = [] if self._cache.keys is None else [self._cache.keys, self._cache.values]
        return [*buffers, *self._rows]

    def _append(self, ids: Rows, hidden: mx.array | None) -> None:
        tokens = [list(row) for row in ids]
        if hidden is None or hidden.ndim != 3 or any(hidden.shape[:2] != (len(tokens), len(row)) for row in tokens):
            raise ValueError(
                f"got hidden states of shape {None if hidden is None else hidden.shape} for rows of "
                f"{[len(row) for row in tokens]} tokens, expected [B, T, {self._network.tapped_size}]"
            )
        if self._rows:
            self._ids = [[*old, *new] for old, new in zip(self._ids, tokens, strict=True)]
        else:
            self._ids = [row[1:] for row in tokens]
        self._rows.append(hidden)

    def _run_pending(self) -> None:
        """Run the pairs whose token is committed, without the head."""
        last = self._rows[-1][:, -1:]
        if self.pending > 1:
            self._run(self._ids)
        # A slice would keep the whole chunk alive.
        self._rows = [mx.contiguous(last)]
        self._ids = [[] for _ in self._ids]

    def _run(self, ids: Rows) -> mx.array:
        """Run the first pending pairs, one per token; [B, T] ids -> [B, T, H]."""
        rows = self._rows[0] if len(self._rows) == 1 else mx.concatenate(self._rows, axis=1)
        tokens = mx.array([list(row) for row in ids], dtype=mx.int32)
        return self._layer(tokens, self._network.fuse(rows[:, : tokens.shape[1]]))

    def _layer(self, tokens: mx.array, hidden: mx.array) -> mx.array:
        return self._network.layer(self._network.embed(tokens, self._target), hidden, self._cache, self._start)
