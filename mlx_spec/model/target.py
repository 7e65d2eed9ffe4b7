"""What a round asks of a target model: ordinary forwards, some hidden states, a few shared parts."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx import nn

from mlx_spec.errors import IncompatiblePair, InvalidRequest, UnknownAnatomy
from mlx_spec.model.anatomy import Anatomy, anatomy_of, architecture, embedding_without_anatomy
from mlx_spec.model.swap import own_class
from mlx_spec.model.taps import attach, recording
from mlx_spec.sampling import random_state

DRAWS = (
    "the model draws random numbers in its forward, as dropout does in training, so a block cannot stand for single "
    "tokens; call model.eval() to speculate"
)
"""Why `Target.draws` leaves plain decoding alone."""


@dataclass(frozen=True)
class TargetOutput:
    """What forwards over W tokens computed, lazily.

    Attributes:
        logits: [B, W, V] raw logits, in the model's dtype.
        hidden: [B, W, K*H] the K tapped states side by side, or None when nothing is tapped.
    """

    logits: mx.array
    hidden: mx.array | None


def evaluate_arrays(model: nn.Module) -> None:
    """Evaluate every array of a model, also those that are no parameters, as the frequencies of scaled ropes are.

    What is left lazy can be computed only in the thread that made it, so a model could not be used in another.
    """
    mx.eval([value for module in model.modules() for value in module.values() if isinstance(value, mx.array)])


class Target:
    """An mlx-lm model as the round engine sees it. Holds nothing but the model; requests own the rest.

    Attributes:
        model: the mlx-lm model, untouched but for the class of tapped layers.
        name: its architecture, e.g. "llama".
        has_weights: False while there are only shapes, so that nothing can be computed.
        draws: a forward moved the thread's random state, as dropout does in training.
    """

    def __init__(self, model: nn.Module, has_weights: bool = True) -> None:
        self.model = model
        self.has_weights = has_weights
        self.draws = False
        self.name = architecture(model)

    @property
    def layer_count(self) -> int:
        return len(self.model.layers)

    def forward(
        self,
        tokens: mx.array,
        caches: Sequence[Any],
        taps: tuple[int, ...] = (),
        embeddings: mx.array | None = None,
    ) -> TargetOutput:
        """One ordinary forward of the model.

        Args:
            tokens: [B, W] token ids.
            caches: what the model takes as `cache`.
            taps: 0-based layers whose outputs are wanted, ascending.
            embeddings: [B, W, H] what is read in place of the embedded tokens, of which there may then be none.

        Cost:
            Lazy: nothing is evaluated here.
        """
        more = {} if embeddings is None else {"input_embeddings": embeddings}
        state = random_state()
        if taps:
            with recording([self.model.layers[index] for index in taps]) as outputs:
                logits = self.model(tokens, cache=caches, **more)
            hidden = mx.concatenate(outputs, axis=-1)
        else:
            logits, hidden = self.model(tokens, cache=caches, **more), None
        self.draws = self.draws or random_state() is not state
        return TargetOutput(logits, hidden)

    def attach_taps(self, taps: tuple[int, ...]) -> None:
        """Make the outputs of these layers recordable.

        Raises:
            IncompatiblePair: a layer that does not exist.
        """
        beyond = [tap for tap in taps if not 0 <= tap < self.layer_count]
        if beyond:
            raise IncompatiblePair(
                f"the drafter taps the output of layer {beyond[0]}, "
                f"but {self.name} has layers 0..{self.layer_count - 1}. "
                "Some files count hidden states from the embedding, one more than the layer."
            )
        attach([self.model.layers[tap] for tap in taps])

    @property
    def anatomy(self) -> Anatomy:
        """Raises UnknownAnatomy where the table has no row."""
        return anatomy_of(self.model)

    @property
    def hidden_size(self) -> int:
        """Columns of an embedded token."""
        return int(self.raw_embed(mx.zeros((1, 1), mx.int32)).shape[-1])

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding; where it has no table of its own, an adapter's for one, the columns that it has as a
        head, or else those of the head."""
        embedding = self._embedding
        if "weight" in embedding:
            return int(embedding["weight"].shape[0])
        normed = self.raw_embed(mx.zeros((1, 1), mx.int32))
        head = embedding.as_linear if hasattr(embedding, "as_linear") else self.raw_head
        return int(head(normed).shape[-1])

    @property
    def head_size(self) -> int:
        """Columns of the logits."""
        return int(self.raw_head(self.raw_embed(mx.zeros((1, 1), mx.int32))).shape[-1])

    @property
    def readable_ids(self) -> int | None:
        """Ids it can embed, from 0 on, whatever its config says; None where no table of embeddings is found."""
        try:
            table = self._embedding
        except UnknownAnatomy:
            table = embedding_without_anatomy(self.model)
        # An adapter keeps the table it stands on inside.
        found = [each for each in table.modules() if isinstance(each, nn.Embedding | nn.QuantizedEmbedding)]
        return max((int(each.weight.shape[0]) for each in found), default=None)

    def require_readable(self, ids: Sequence[int], whose: str, way_out: str) -> None:
        """Refuse ids that it has no embedding for.

        Past its table a model reads foreign memory, or ends the process; a negative id counts from the table's end.

        Args:
            ids: on the host.
            whose: what they belong to, for the message.
            way_out: what the caller can do, a sentence.

        Raises:
            InvalidRequest: names the id and the range.
        """
        rows = self.readable_ids
        for place, token in enumerate(ids):
            if token < 0 or (rows is not None and token >= rows):
                known = "0 or more" if rows is None else f"0 to {rows - 1}"
                raise InvalidRequest(
                    f"{whose} token {place} is id {token}, but {self.name} embeds ids {known}. {way_out}"
                )

    @property
    def sayable_ids(self) -> int | None:
        """Ids that may come out of it, from 0 on; None where nothing is known about its head."""
        try:
            return max(self.readable_ids or 0, self.head_size)
        except UnknownAnatomy:
            return None

    @property
    def reads_embeddings(self) -> bool:
        """Whether its forward takes embeddings in place of tokens."""
        return "input_embeddings" in inspect.signature(own_class(type(self.model)).__call__).parameters

    def used_caches(self, caches: list[Any]) -> list[Any]:
        """Fresh caches after one token, of which nothing is evaluated: they tell the shapes of what they will hold."""
        self.forward(mx.zeros((1, 1), mx.int32), caches)
        return caches

    @property
    def dtype(self) -> mx.Dtype:
        """The dtype of activations: what an embedded token has."""
        return self.raw_embed(mx.zeros((1, 1), mx.int32)).dtype

    def raw_embed(self, ids: mx.array) -> mx.array:
        """[B, T] ids -> [B, T, H] rows of the embedding table, unscaled."""
        embedded: mx.array = self._embedding(ids)
        return embedded

    def embed(self, ids: mx.array) -> mx.array:
        """[B, T] ids -> [B, T, H] what layer 0 reads."""
        return self.anatomy.scale_embedding(self.anatomy.text_model(self.model), self.raw_embed(ids))

    def final_norm(self, hidden: mx.array) -> mx.array:
        """[B, T, H] last layer's output -> [B, T, H] what the head reads."""
        normed: mx.array = self.anatomy.part(self.model, self.anatomy.norm)(hidden)
        return normed

    def head(self, normed: mx.array) -> mx.array:
        """[B, T, H] normed states -> [B, T, V] logits."""
        return self.anatomy.scale_logits(self.anatomy.text_model(self.model), self.raw_head(normed))

    def raw_head(self, normed: mx.array) -> mx.array:
        """[B, T, H] normed states -> [B, T, V] what the output projection gives, unscaled and uncapped."""
        module = self.anatomy.head_module(self.model)
        logits: mx.array = self._embedding.as_linear(normed) if module is None else module(normed)
        return logits

    @property
    def _embedding(self) -> Any:
        return self.anatomy.part(self.model, self.anatomy.embedding)
