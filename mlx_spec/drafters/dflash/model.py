"""Block drafters: one forward over the bonus token and mask tokens proposes several tokens at once.

Sources: DFlash, arXiv:2602.06036, and z-lab/dflash; DSpark, deepseek-ai/DeepSpec; Muse-Glimmer's assistant in
transformers. Left out: sampled drafts.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from mlx_spec.drafters.base import Drafter
from mlx_spec.drafters.dflash.config import EMBEDDING, BlockConfig
from mlx_spec.drafters.dflash.heads import ProposalHead, build_head, confidence_logits
from mlx_spec.drafters.dflash.layers import Tensors, build_layers
from mlx_spec.drafters.dflash.state import BlockState, Context
from mlx_spec.drafters.dflash.weights import BlockWeights
from mlx_spec.errors import IncompatiblePair, InvalidRequest, UnsupportedOption
from mlx_spec.model.target import Target
from mlx_spec.schedule.policy import MAX_WIDTH

PADDING_LIMIT = 1024
"""Rows by which two embedding tables of one vocabulary may differ: tables are padded, each to its own multiple."""

_NORMED_EMBEDDINGS = ("muse_glimmer", "muse_spark")
"""Targets that norm what they embed. Their drafters are trained on the table's own rows."""


class BlockNetwork:
    """The layers and what comes before and after them. Holds weights only.

    Attributes:
        layers: in order.
        tapped_size: entries per row of what is read of the target.
        embedded_size: how many of those are the embedding rather than a layer's output.
    """

    def __init__(self, config: BlockConfig, weights: BlockWeights) -> None:
        self.config = config
        self.dtype = weights.dtype
        # The tapped states of deep layers side by side exceed float16's range.
        self._fc_dtype = mx.float32 if self.dtype == mx.float16 else self.dtype
        wide = ("fc.", "hidden_norm.", "aux_hidden_norms.")
        arrays = {
            name: array.astype(self._fc_dtype) if name.startswith(wide) and array.dtype == self.dtype else array
            for name, array in weights.tensors.items()
        }
        mx.eval(arrays)
        self.tensors = Tensors(arrays, config.rms_norm_eps, weights.formats)
        self.layers = build_layers(self.tensors, config)
        self.tapped_size = len(config.taps) * config.target_hidden_size
        self.embedded_size = config.target_hidden_size if EMBEDDING in config.taps else 0

    def fuse(self, tapped: mx.array) -> mx.array:
        """[B, T, K*H_t] what was read of the target -> [B, T, H], the states every layer's context is made of."""
        tapped = tapped.astype(self._fc_dtype)
        if self.config.tap_norms:
            parts = mx.split(tapped, len(self.config.taps), axis=-1)
            normed = [self.tensors.norm(f"aux_hidden_norms.{index}", part) for index, part in enumerate(parts)]
            tapped = mx.concatenate(normed, axis=-1)
        return self.tensors.norm("hidden_norm", self.tensors.linear("fc", tapped)).astype(self.dtype)

    def embed(self, ids: mx.array, target: Target) -> mx.array:
        """[B, R] target ids -> [B, R, H] what the first layer reads."""
        scale = self.config.input_embedding_scale
        if "embed_tokens.weight" in self.tensors:
            rows = self.tensors.rows("embed_tokens", ids)
            if self.config.family == "gemma4_dspark":
                rows = rows * mx.array(self.config.hidden_size**0.5, rows.dtype)
        elif scale is not None or target.name in _NORMED_EMBEDDINGS:
            rows = target.raw_embed(ids).astype(self.dtype)
        else:
            rows = target.embed(ids).astype(self.dtype)
        return rows if scale is None else rows * scale

    def block(self, bonus: mx.array, rows: int, target: Target) -> mx.array:
        """[B] bonus tokens -> [B, R, H] their embeddings, each followed by those of masks."""
        masks = mx.full((bonus.shape[0], rows - 1), self.config.mask_token_id, mx.int32)
        if "mask_embedding" not in self.tensors:
            return self.embed(mx.concatenate([bonus[:, None], masks], axis=1), target)
        shape = (*masks.shape, self.config.hidden_size)
        own = mx.broadcast_to(self.tensors["mask_embedding"], shape)
        return mx.concatenate([self.embed(bonus[:, None], target), own], axis=1)

    def run(self, embedded: mx.array, contexts: Sequence[Context | None], start: int) -> mx.array:
        """[B, R, H] embedded block rows at positions start, start + 1, ... -> [B, R, H] normed states."""
        hidden = embedded
        for layer, context in zip(self.layers, contexts, strict=True):
            hidden = layer(hidden, context, start)
        return self.tensors.norm("norm", hidden)


class BlockDrafter(Drafter):
    """A checkpoint, ready to draft. Requests share it; each opens a state of its own.

    Attributes:
        proposals: tokens a whole block proposes; where the file names no block, as many as a width can ask for.
        network: the layers.
        heads: states to tokens.
    """

    kind = "dflash"

    def __init__(self, name: str, config: BlockConfig, weights: BlockWeights) -> None:
        self.name = name
        self.config = config
        self.architecture = config.architecture
        self.network = BlockNetwork(config, weights)
        self.heads: ProposalHead = build_head(self.network.tensors, config, weights.target_ids)
        self.taps = tuple(tap for tap in config.taps if tap != EMBEDDING)
        self.proposals = config.proposals if config.names_block else MAX_WIDTH - 1
        whole = config.proposals + 1
        # Where the file names no block, the width that is named is the one it was trained for.
        self.trained_width = whole if config.names_block else None
        self.methods = ("dflash2",) if config.family == "dflash2" else ("dflash",)
        self.reads_ids = EMBEDDING in config.taps
        self._largest_id = weights.largest_id
        self._threshold = 0.0

    @property
    def default_width(self) -> int:  # type: ignore[override]
        """That of its block, or the number of rows the file says runs begin with.

        Raises:
            InvalidRequest: the file names neither.
        """
        asked, whole = self.config.runtime_block_size, self.config.proposals + 1
        if asked is None and not self.config.names_block:
            raise InvalidRequest(
                f"the checkpoint of {self.name!r} names no block_size, so a run must name its width: give "
                "draft_block_size (--draft-block-size), or num_draft_tokens or num_speculative_tokens, one less."
            )
        return min(asked or whole, whole, MAX_WIDTH)

    @property
    def confidence_threshold(self) -> float:
        """A block is cut before the first proposal that is accepted with a smaller probability than this, 0..1.

        0, which it is at first, cuts nothing. The probability is what the checkpoint's confidence head says.
        """
        return self._threshold

    @confidence_threshold.setter
    def confidence_threshold(self, threshold: float) -> None:
        if not 0 <= threshold <= 1:
            raise InvalidRequest(f"confidence_threshold is {threshold!r}, expected a probability, 0 to 1")
        if threshold and not self.config.enable_confidence_head:
            raise UnsupportedOption(f"drafter {self.name!r} has no confidence head, so nothing can be cut by it")
        self._threshold = float(threshold)
        self.may_propose_fewer = threshold > 0

    def run(
        self, bonus: Sequence[int], count: int, contexts: Sequence[Context | None], start: int, target: Target
    ) -> mx.array:
        """Run one block.

        Args:
            bonus: [B] newest emitted tokens, at position `start`.
            count: proposals wanted. Only as many rows are run, where the drafter allows a smaller block.

        Returns:
            [B, n, H] the states of the rows that predict, n >= count.
        """
        skipped = 0 if self.config.from_anchor else 1
        rows = (self.proposals if self.config.whole_blocks else count) + skipped
        embedded = self.network.block(mx.array(list(bonus), mx.int32), rows, target)
        return self.network.run(embedded, contexts, start)[:, skipped:]

    def confidence(self, states: mx.array, bonus: mx.array, chosen: mx.array) -> mx.array:
        """[B, n, H] states, [B] bonus, [B, n] proposals -> [B, n] probability that each is accepted."""
        before = mx.concatenate([bonus[:, None], chosen[:, :-1]], axis=1)
        return mx.sigmoid(confidence_logits(self.network.tensors, self.config, states, before))

    def check(self, target: Target) -> None:
        """Compare hidden size, vocabulary, mask token and layers with the target.

        Raises:
            IncompatiblePair: names both values.
            UnknownAnatomy: nothing is known about the target's embedding.
        """
        self._check_hidden_size(target)
        self._check_vocabulary(target)
        layers, last = self.config.num_target_layers, target.layer_count - 1
        if layers is not None and layers != target.layer_count:
            raise IncompatiblePair(
                f"drafter {self.name!r} is for a target of {layers} layers, but {target.name!r} has "
                f"{target.layer_count}. Use a drafter made for this target."
            )
        if self.config.taps[-1] > last:
            raise IncompatiblePair(
                f"drafter {self.name!r} reads the output of layer {self.config.taps[-1]} ({self.config.taps_from}), "
                f"but target {target.name!r} has layers 0..{last}. Use a drafter made for this target."
            )

    def check_width(self, width: int) -> None:
        """Refuse a width the checkpoint was not trained for.

        Raises:
            UnsupportedOption: wider than its block; or another one, where the block's size is part of the network.
        """
        trained = self.trained_width
        if trained is None:
            return  # the file does not say for which one
        if width > trained:
            raise UnsupportedOption(
                f"drafter {self.name!r} proposes at most {self.proposals} tokens per round, so its rounds are at most "
                f"{trained} wide; got {width}."
            )
        if self.config.whole_blocks and width not in (1, trained):
            raise UnsupportedOption(
                f"the checkpoint of drafter {self.name!r} fixes the width at {trained}; got {width}. Leave it out."
            )

    def open(self, target: Target, start: int = 0) -> BlockState:
        """Make the state for one request; see `Drafter.open`."""
        return BlockState(self, target, start)

    def _borrows(self) -> list[str]:
        """What it takes from the target."""
        tensors = self.network.tensors
        embeds = "embed_tokens.weight" in tensors
        projects = "lm_head.weight" in tensors or (self.config.tie_word_embeddings and embeds)
        return [name for name, own in (("embedding", embeds), ("output projection", projects)) if not own]

    def _check_hidden_size(self, target: Target) -> None:
        if self.config.target_hidden_size != target.hidden_size:
            raise IncompatiblePair(
                f"drafter {self.name!r} reads states of hidden size {self.config.target_hidden_size}, but target "
                f"{target.name!r} has {target.hidden_size}. Use a drafter made for this target."
            )
        if self._borrows() and self.config.hidden_size != target.hidden_size:
            raise IncompatiblePair(
                f"drafter {self.name!r} has hidden size {self.config.hidden_size} and no {self._borrows()[0]} of its "
                f"own, and those of target {target.name!r} have {target.hidden_size}. Use a drafter made for it."
            )

    def _check_vocabulary(self, target: Target) -> None:
        config, rows = self.config, target.vocab_size
        if config.mask_token_id >= rows and "embedding" in self._borrows():
            raise IncompatiblePair(
                f"drafter {self.name!r} masks with token {config.mask_token_id}, but target {target.name!r} has a "
                f"vocabulary of {rows}. Use a drafter made for this target."
            )
        if config.vocab_size == rows:
            return
        padding_only = abs(config.vocab_size - rows) <= PADDING_LIMIT and self._largest_id < rows
        if not padding_only or self._borrows():
            raise IncompatiblePair(
                f"drafter {self.name!r} is for a vocabulary of {config.vocab_size} and proposes ids up to "
                f"{self._largest_id}, but target {target.name!r} has {rows}. Use a drafter made for this target."
            )
