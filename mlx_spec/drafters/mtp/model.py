"""Multi-token prediction: the decoder layer a checkpoint carries past its last, drafting token after token."""

from __future__ import annotations

import copy
import dataclasses
import importlib
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx_lm.models.cache import make_prompt_cache

from mlx_spec.drafters.base import Drafter
from mlx_spec.drafters.chain import ChainNetwork, ChainState
from mlx_spec.drafters.mtp.layouts import Layout, layout_of
from mlx_spec.errors import IncompatiblePair
from mlx_spec.model.target import Target, evaluate_arrays
from mlx_spec.sampling import random_state_kept


class Passed(nn.Module):
    """Stands where mlx-lm looks tokens up: what comes is already what layer 0 reads."""

    def __call__(self, states: mx.array) -> mx.array:
        return states


class Predictor(nn.Module):
    """The modules of a prediction layer, so that their parameters have names and can be quantized.

    `body` is mlx-lm's own model of one layer: it makes the masks. It ends with the prediction layer's norm, if there is
    one, unless the next pair is made of what comes before it: then `final_norm` is passed on the way to the head.

    Args:
        layout: of the family.
        args: the target's, as mlx-lm keeps them.
        body: see above.
    """

    def __init__(self, layout: Layout, args: Any, body: nn.Module) -> None:
        super().__init__()
        size, eps = args.hidden_size, getattr(args, layout.epsilon)
        self.embedding_norm = nn.RMSNorm(size, eps=eps)
        self.hidden_norm = nn.RMSNorm(size, eps=eps)
        biased = layout.biased is not None and getattr(args, layout.biased)
        self.projection = nn.Linear(2 * size, size, bias=biased)
        self.body = body
        if not layout.reads_normed:
            self.final_norm = nn.RMSNorm(size, eps=eps)
        if layout.head is not None:
            self.head = nn.Linear(size, args.vocab_size, bias=False)
        self._layout = layout

    def __call__(self, embedded: mx.array, hidden: mx.array, caches: Sequence[Any]) -> mx.array:
        """[B, T, H] embeddings of the tokens at t + 1, [B, T, H] hidden states at t -> [B, T, H] what is handed on."""
        pair = [self.embedding_norm(embedded), self.hidden_norm(hidden)]
        joined = mx.concatenate(pair[::-1] if self._layout.hidden_first else pair, axis=-1)
        places = [*caches, *[None] * self._layout.empty_caches]
        states: mx.array = self.body(self.projection(joined), cache=places)
        return states


def new_predictor(layout: Layout, target: Target, depth: int = 0) -> tuple[Predictor, nn.Module]:
    """The prediction layer of a depth with weights yet to come, and the mlx-lm model of one layer it is made of.

    Cost:
        Nothing is evaluated. The thread's random state is left as it was, though mlx draws first weights from it.
    """
    args = prediction_args(layout, target, depth)
    with random_state_kept():
        module = importlib.import_module(layout.builder or f"mlx_lm.models.{layout.module}")
        sole = getattr(module, layout.model)(args)
        trunk = getattr(sole, layout.trunk)
        setattr(trunk, layout.lookup, Passed())
        if not layout.reads_normed or layout.final_norm is None:
            setattr(trunk, layout.trunk_norm, Passed())
        for name, value in layout.body.items():
            setattr(trunk, name, value)
        return Predictor(layout, args, trunk), sole


def target_args(target: Target) -> Any:
    """The arguments mlx-lm built the target's text model from."""
    return target.anatomy.text_model(target.model).args


def prediction_args(layout: Layout, target: Target, depth: int = 0) -> Any:
    """The target's arguments, changed so that the only layer is one that predicts."""
    args = copy.deepcopy(target_args(target))
    told = layout.sole_layer
    return dataclasses.replace(args, **(told(args, target.layer_count + depth) if callable(told) else told))


class MtpNetwork(ChainNetwork):
    """A prediction layer's equations. Holds weights only.

    Attributes:
        predictor: the modules.
        dtype: what the layer computes in.
        tapped_size: H, entries per row of the tapped state: the last layer's output.
    """

    def __init__(self, predictor: Predictor, sole: nn.Module, layout: Layout) -> None:
        self.predictor = predictor
        self._layout = layout
        self._sole = sole
        self.dtype = predictor.embedding_norm.weight.dtype
        self.tapped_size = int(predictor.embedding_norm.weight.shape[0])
        evaluate_arrays(predictor)

    def new_caches(self) -> list[Any]:
        """See `ChainNetwork.new_caches`."""
        # A trunk says nothing of caches, so it gets those that hold the whole text.
        caches: list[Any] = make_prompt_cache(self.predictor.body if self._layout.whole_caches else self._sole)
        return caches

    def fuse(self, tapped: mx.array, target: Target) -> mx.array:
        """See `ChainNetwork.fuse`. Most prediction layers read what the target's head reads: states after its norm."""
        read = target.final_norm(tapped) if self._layout.reads_normed else tapped
        return read.astype(self.dtype)

    def run(self, tokens: mx.array, hidden: mx.array, caches: Sequence[Any], start: int, target: Target) -> mx.array:
        """See `ChainNetwork.run`. The output is what `carry` hands on.

        Positions count from the first pair: attention sees their differences alone, so `start` changes nothing.
        """
        del start
        states = self.predictor(target.embed(tokens).astype(self.dtype), hidden, caches)
        return target.final_norm(states).astype(self.dtype) if self._layout.final_norm is None else states

    def carry(self, states: mx.array) -> mx.array:
        """See `ChainNetwork.carry`."""
        return states

    def logits(self, states: mx.array, target: Target) -> mx.array:
        """See `ChainNetwork.logits`."""
        normed = states if self._layout.reads_normed else self.predictor.final_norm(states)
        return self.predictor.head(normed) if self._layout.head else target.head(normed)

    def choose(self, states: mx.array, target: Target) -> mx.array:
        """See `ChainNetwork.choose`."""
        return mx.argmax(self.logits(states, target), axis=-1).astype(mx.int32)


class MtpDrafter(Drafter):
    """A prediction layer, or one per depth, ready to draft. Requests share it; each opens a state of its own."""

    kind = "mtp"

    def __init__(self, name: str, layout: Layout, networks: Sequence[MtpNetwork], target: Target, width: int) -> None:
        self.name = name
        self.networks = tuple(networks)
        self.network = self.networks[0]
        self.layout = layout
        self.default_width = width
        self.taps = (target.layer_count - 1,)
        self._vocab_size = target.vocab_size

    def check(self, target: Target) -> None:
        """Compare architecture, depth, hidden size and vocabulary with the target.

        Raises:
            IncompatiblePair: names both values.
            UnknownAnatomy: nothing is known about the target's norm and head.
        """
        layout = layout_of(target.name)
        pairs = {
            "decoder layers of": (self.layout.module, layout.module),
            "layers": (self.taps[0] + 1, target.layer_count),
            "hidden size": (self.network.tapped_size, target.hidden_size),
            "vocabulary": (self._vocab_size, target.vocab_size),
        }
        wrong = [f"{what} {own!r} against {other!r}" for what, (own, other) in pairs.items() if own != other]
        if wrong:
            raise IncompatiblePair(
                f"drafter {self.name!r} does not fit target {target.name!r}: {', '.join(wrong)}. "
                "Use a drafter made for this target."
            )

    def open(self, target: Target, start: int = 0) -> ChainState:
        """Make the state for one request; see `Drafter.open`."""
        return ChainState(self.networks, target, start, chained=self.layout.chained)
