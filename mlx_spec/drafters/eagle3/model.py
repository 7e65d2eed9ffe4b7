"""EAGLE-3: a decoder layer or a few that read the target's hidden states and draft token after token.

Source: Li et al. 2025, arXiv:2503.01840. Left out: the draft tree (this drafts a chain).
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
from mlx_spec.drafters.eagle3.lineage import Lineage
from mlx_spec.drafters.eagle3.weights import Eagle3Weights
from mlx_spec.errors import IncompatiblePair
from mlx_spec.model.target import Target, evaluate_arrays

PADDING_LIMIT = 1024
"""Rows by which two embedding tables of one vocabulary may differ: tables are padded, each to its own multiple."""

DEFAULT_WIDTH = 3
"""Verify width where the file does not say how many tokens the drafter was trained to propose."""


class Eagle3Network(ChainNetwork):
    """The drafter's equations. Holds weights only.

    Attributes:
        modules: everything with weights.
        dtype: of the weights, and of everything computed but what leads up to fc. The caches have it too, whatever
            the target's caches hold.
        tapped_size: K*H_t, entries per row of tapped states.
        target_ids: [draft_vocab] int32, the target's id of each id it can propose; None when they are the same.
    """

    def __init__(self, config: Eagle3Config, weights: Eagle3Weights) -> None:
        self.config = config
        self.dtype = weights.dtype
        self.modules = weights.modules
        # The tapped states of deep layers side by side exceed float16's range.
        self._fc_dtype = mx.float32 if self.dtype == mx.float16 else self.dtype
        for name in ("input_norm", "fc_norm", "fc"):
            if name in self.modules:
                _cast(self.modules[name], self._fc_dtype)
        self.target_ids = weights.target_ids
        self.tapped_size = len(config.taps) * config.target_hidden_size
        mx.eval(self.modules.parameters())
        evaluate_arrays(self.modules)

    @property
    def has_embedding(self) -> bool:
        """Whether the drafter embeds tokens with a table of its own."""
        return "embed_tokens" in self.modules

    @property
    def has_head(self) -> bool:
        """Whether the drafter has an output projection of its own."""
        return "lm_head" in self.modules or (self.config.tie_word_embeddings and self.has_embedding)

    def embed(self, ids: mx.array, target: Target) -> mx.array:
        """[B, T] target ids -> [B, T, H] rows of the drafter's table, or of the target's when it has none."""
        if not self.has_embedding:
            return target.raw_embed(ids).astype(self.dtype)
        # The target's table may have more rows, padding that no real token has.
        embedded: mx.array = self.modules.embed_tokens(mx.minimum(ids, self.config.vocab_size - 1))
        return embedded

    def new_caches(self) -> list[Any]:
        """One full-attention cache per layer."""
        return [new_append_cache() for _ in self.modules.layers]

    def fuse(self, tapped: mx.array, target: Target) -> mx.array:
        """See `ChainNetwork.fuse`."""
        del target
        tapped = tapped.astype(self._fc_dtype)
        if self.config.norm_before_fc:
            tapped = self.modules.input_norm(tapped)
        if self.config.fc_norm:
            states = mx.split(tapped, len(self.config.taps), axis=-1)
            normed = [norm(state) for norm, state in zip(self.modules.fc_norm, states, strict=True)]
            tapped = mx.concatenate(normed, axis=-1)
        return self.modules.fc(tapped).astype(self.dtype)

    def run(self, tokens: mx.array, hidden: mx.array, caches: Sequence[Any], start: int, target: Target) -> mx.array:
        """See `ChainNetwork.run`. The output is not normalised."""
        embedded = self.embed(tokens, target)
        for layer, cache in zip(self.modules.layers, caches, strict=True):
            hidden = layer(embedded, hidden, cache, start)
        return hidden

    def carry(self, states: mx.array) -> mx.array:
        """See `ChainNetwork.carry`."""
        if not self.config.norm_output:
            return states
        normed: mx.array = self.modules.norm(states)
        return normed

    def logits(self, states: mx.array, target: Target) -> mx.array:
        """See `ChainNetwork.logits`."""
        normed = self.modules.norm(states)
        if "lm_head" in self.modules:
            logits: mx.array = self.modules.lm_head(normed)
            return logits
        if self.has_head:
            tied: mx.array = self.modules.embed_tokens.as_linear(normed)
            return tied
        return target.head(normed)

    def choose(self, states: mx.array, target: Target) -> mx.array:
        """See `ChainNetwork.choose`."""
        ids = mx.argmax(self.logits(states, target), axis=-1)
        return ids.astype(mx.int32) if self.target_ids is None else self.target_ids[ids]


def _cast(module: nn.Module | list[nn.Module], dtype: mx.Dtype) -> None:
    for each in module if isinstance(module, list) else [module]:
        each.set_dtype(dtype)


class Eagle3Drafter(Drafter):
    """An EAGLE-3 checkpoint, ready to draft. Requests share it; each opens a state of its own."""

    kind = "eagle3"

    def __init__(self, name: str, config: Eagle3Config, weights: Eagle3Weights) -> None:
        self.name = name
        self.config = config
        self.network = Eagle3Network(config, weights)
        self.taps = config.taps
        self.default_width = DEFAULT_WIDTH if config.proposals is None else config.proposals + 1
        self.remarks = self._remarks()
        self._largest_id = weights.largest_id

    def _remarks(self) -> tuple[str, ...]:
        own = (("embedding", self.network.has_embedding), ("output projection", self.network.has_head))
        taken = " and ".join(part for part, brought in own if not brought)
        return (f"{self.name} takes the target's {taken}: its file has none",) if taken else ()

    def check(self, target: Target) -> None:
        """Compare hidden size, vocabulary and tapped layers with the target.

        Raises:
            IncompatiblePair: names both values.
            UnknownAnatomy: nothing is known about the target's embedding.
        """
        self._check_hidden_size(target)
        self._check_vocabulary(target)
        self._check_depth(target)

    def open(self, target: Target, start: int = 0) -> ChainState:
        """Make the state for one request; see `Drafter.open`."""
        return ChainState([self.network], target, start)

    def _check_depth(self, target: Target) -> None:
        made_for = self.config.num_target_layers
        if made_for is not None and made_for != target.layer_count:
            raise IncompatiblePair(
                f"drafter {self.name!r} is for a target of {made_for} layers, but target {target.name!r} has "
                f"{target.layer_count}. Use a drafter made for this target."
            )
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

    def _check_hidden_size(self, target: Target) -> None:
        if self.config.target_hidden_size != target.hidden_size:
            raise IncompatiblePair(
                f"drafter {self.name!r} reads states of hidden size {self.config.target_hidden_size}, but target "
                f"{target.name!r} has {target.hidden_size}. Use a drafter made for this target."
            )
        if not self.network.has_head and not self._may_borrow_head(target):
            raise IncompatiblePair(
                f"drafter {self.name!r} has no lm_head.weight, and for {target.name!r} targets only the embedding is "
                "shared. Use a complete checkpoint."
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

    def _may_borrow_head(self, target: Target) -> bool:
        """Files for DeepSeek-V3 always bring a head; of those for Kimi, the ones with ordinary attention may not."""
        lineage = Lineage.of(target)
        return not lineage.deepseek or (lineage.kimi and self.config.latent is None)
