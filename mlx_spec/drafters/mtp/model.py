"""Multi-token prediction: the decoder layer a checkpoint carries past its last, drafting token after token."""

from __future__ import annotations

import copy
import dataclasses
import importlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx_lm.models.cache import make_prompt_cache

from mlx_spec.drafters.base import Drafter
from mlx_spec.drafters.chain import ChainNetwork, ChainState
from mlx_spec.drafters.mtp.layouts import Layout, layout_of
from mlx_spec.errors import IncompatiblePair
from mlx_spec.sampling import random_key, rewind_random_state
from mlx_spec.target.model import Target, evaluate_arrays


class Passed(nn.Module):
    """Stands where mlx-lm looks tokens up: what comes is already what layer 0 reads."""

    def __call__(self, states: mx.array) -> mx.array:
        return states


class Predictor(nn.Module):
    """The modules of a prediction layer, so that their parameters have names and can be quantized.

    `body` is mlx-lm's own model of one layer: it makes the masks, and ends with the prediction layer's norm.

    Args:
        layout: of the family.
        args: the target's, as mlx-lm keeps them.
        body: see above.
    """

    def __init__(self, layout: Layout, args: Any, body: nn.Module) -> None:
        super().__init__()
        size, eps = args.hidden_size, args.rms_norm_eps
        self.embedding_norm = nn.RMSNorm(size, eps=eps)
        self.hidden_norm = nn.RMSNorm(size, eps=eps)
        self.projection = nn.Linear(2 * size, size, bias=False)
        self.body = body
        self._hidden_first = layout.hidden_first

    def __call__(self, embedded: mx.array, hidden: mx.array, caches: Sequence[Any]) -> mx.array:
        """[B, T, H] embeddings of the tokens at t + 1, [B, T, H] hidden states at t -> [B, T, H] normed output."""
        pair = [self.embedding_norm(embedded), self.hidden_norm(hidden)]
        joined = mx.concatenate(pair[::-1] if self._hidden_first else pair, axis=-1)
        states: mx.array = self.body(self.projection(joined), cache=list(caches))
        return states


def new_predictor(layout: Layout, target: Target) -> tuple[Predictor, nn.Module]:
    """A prediction layer with weights yet to come, and the mlx-lm model of one layer it is made of.

    Cost:
        Nothing is evaluated. The thread's random state is left as it was, though mlx draws first weights from it.
    """
    args = prediction_args(layout, target)
    with _random_state_kept():
        module = importlib.import_module(f"mlx_lm.models.{layout.module}")
        sole = getattr(module, layout.model)(args)
        sole.model.embed_tokens = Passed()
        for name, value in layout.body.items():
            setattr(sole.model, name, value)
        return Predictor(layout, args, sole.model), sole


def target_args(target: Target) -> Any:
    """The arguments mlx-lm built the target's text model from."""
    return target.anatomy.text_model(target.model).args


def prediction_args(layout: Layout, target: Target) -> Any:
    """The target's arguments, changed so that the only layer is one that predicts."""
    return dataclasses.replace(copy.deepcopy(target_args(target)), **layout.sole_layer)


@contextmanager
def _random_state_kept() -> Iterator[None]:
    key: list[int] = random_key().tolist()  # type: ignore[assignment]
    try:
        yield
    finally:
        rewind_random_state(key)


class MtpNetwork(ChainNetwork):
    """A prediction layer's equations. Holds weights only.

    Attributes:
        predictor: the modules.
        dtype: what the layer computes in.
        tapped_size: H, entries per row of the tapped state: the last layer's output.
    """

    def __init__(self, predictor: Predictor, sole: nn.Module) -> None:
        self.predictor = predictor
        self._sole = sole
        self.dtype = predictor.embedding_norm.weight.dtype
        self.tapped_size = int(predictor.embedding_norm.weight.shape[0])
        evaluate_arrays(predictor)

    def new_caches(self) -> list[Any]:
        """See `ChainNetwork.new_caches`."""
        caches: list[Any] = make_prompt_cache(self._sole)
        return caches

    def fuse(self, tapped: mx.array, target: Target) -> mx.array:
        """See `ChainNetwork.fuse`. A prediction layer reads what the target's head reads: states after its norm."""
        return target.final_norm(tapped).astype(self.dtype)

    def run(self, tokens: mx.array, hidden: mx.array, caches: Sequence[Any], start: int, target: Target) -> mx.array:
        """See `ChainNetwork.run`. The output is normalised.

        Positions count from the first pair: attention sees their differences alone, so `start` changes nothing.
        """
        del start
        return self.predictor(target.embed(tokens).astype(self.dtype), hidden, caches)

    def carry(self, states: mx.array) -> mx.array:
        """See `ChainNetwork.carry`."""
        return states

    def logits(self, states: mx.array, target: Target) -> mx.array:
        """See `ChainNetwork.logits`."""
        return target.head(states)

    def choose(self, states: mx.array, target: Target) -> mx.array:
        """See `ChainNetwork.choose`."""
        return mx.argmax(self.logits(states, target), axis=-1).astype(mx.int32)


class MtpDrafter(Drafter):
    """A prediction layer, ready to draft. Requests share it; each opens a state of its own."""

    kind = "mtp"

    def __init__(self, name: str, layout: Layout, network: MtpNetwork, target: Target, width: int) -> None:
        self.name = name
        self.network = network
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
        return ChainState(self.network, target, start)
