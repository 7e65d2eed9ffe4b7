"""One verify call for callers with a loop of their own: logits, and the open round that keeps a part of the block."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import mlx.core as mx
from mlx import nn

from mlx_spec.cache.adopt import new_caches
from mlx_spec.cache.contents import cache_arrays, rows_held
from mlx_spec.cache.transaction import SpeculativeCacheTransaction
from mlx_spec.errors import CannotMix, InvalidRequest
from mlx_spec.model.target import DRAWS, Target, TargetOutput
from mlx_spec.schedule.policy import MAX_WIDTH
from mlx_spec.stats import Statistics
from mlx_spec.verify.block import step_through, verify
from mlx_spec.verify.certified_routes import CertifiedRoutes
from mlx_spec.verify.record import record_of
from mlx_spec.verify.routes import STEP_THROUGH


class VerifiedBlock(NamedTuple):
    """What a model made of a block.

    Attributes:
        logits: [B, W, V] after each token, in the model's dtype.
        hidden: [B, W, K*H] the captured layers' outputs side by side, or None where none was asked for.
        transaction: open, with all W tokens in it. Commit a prefix of them, or abort.
    """

    logits: mx.array
    hidden: mx.array | None
    transaction: SpeculativeCacheTransaction


def verify_forward(
    model: nn.Module,
    tokens: mx.array,
    caches: Sequence[Any],
    *,
    capture: Sequence[int] = (),
    statistics: Statistics | None = None,
) -> VerifiedBlock:
    """Read a block so that every token gets the bits of one-token decode, and leave it open which of them stay.

    Takes the cheapest route that is certified for this model, these caches and this machine; with several rows, for
    which none is certified, and where nothing is found equal, the block is read token by token. Blocks wider than the
    widest verify call are read in parts.

    Args:
        model: as mlx-lm loads it. What the route needs is attached to it; `detach` takes it off.
        tokens: [B, W] token ids that the model has embeddings for.
        caches: the model's caches, of B rows, as mlx-lm makes them. Those of another model are refused, as far as
            kinds, heads and sizes tell; classes of your own are taken.
        capture: 0-based decoder layers whose outputs are wanted, each once; they come in this order.
        statistics: where it is told why a block was not taken, and by which routes it was read.

    Returns:
        Logits, hidden states and the open transaction. After its `commit(n)` the caches hold what n one-token forwards
        of these rows would have left, bit for bit.

    Raises:
        InvalidRequest: tokens, caches or capture do not fit the model or each other. Nothing was changed.
        TransactionError: a cache is in an open transaction already. Nothing was changed.
        Anything else: what the model raised. The round is aborted.

    Cost:
        Once for each width and kind of caches, the trial of its routes. Then one host read, of the tokens: an id past
        the table would have the model read foreign memory. The rest is lazy where the block is read in one
        forward; read in parts or token by token, all but the last are evaluated.

    Example:
        >>> import mlx.core as mx
        >>> from mlx_lm.models import cache, llama
        >>> from mlx_spec import verify_forward
        >>> sizes = dict(hidden_size=8, num_hidden_layers=1, intermediate_size=16, num_attention_heads=2, vocab_size=11)
        >>> model = llama.Model(llama.ModelArgs(model_type="llama", rms_norm_eps=1e-5, **sizes))
        >>> caches = cache.make_prompt_cache(model)
        >>> prompt = model(mx.array([[1, 2, 3]]), cache=caches)
        >>> logits, hidden, transaction = verify_forward(model, mx.array([[4, 5, 6]]), caches, capture=[0])
        >>> logits.shape, hidden.shape
        ((1, 3, 11), (1, 3, 8))
        >>> transaction.commit(2)
        >>> caches[0].offset
        5
    """
    target, statistics = Target(model), statistics or Statistics()
    record_of(model).own_caches.require(caches, new_caches(model), "the list of caches")
    _check_tokens(tokens, caches, target)
    taps = _taps(target, capture)
    target.attach_taps(taps)
    routes = CertifiedRoutes(target, "exact", statistics)
    if routes.model_draws(caches):
        raise InvalidRequest(f"{target.name} cannot verify a block: {DRAWS}.")
    return _Call(target, tokens, caches, taps, routes, statistics).opened_round()


@dataclass(frozen=True)
class _Call:
    """One call of `verify_forward`, its arguments checked."""

    target: Target
    tokens: mx.array
    caches: Sequence[Any]
    taps: tuple[int, ...]
    routes: CertifiedRoutes
    statistics: Statistics

    def opened_round(self) -> VerifiedBlock:
        """The block by its routes, or token by token."""
        rows, width = self.tokens.shape
        if rows > 1 and width > 1:
            self.statistics.note(f"verified one token at a time: no route is certified for {rows} rows")
            return self._opened(self._stepped)
        try:
            return self._opened(self._by_routes)
        except CannotMix as error:
            self.routes.demote(width, self.caches, error)
            return self._opened(self._stepped)

    def _opened(self, read: Callable[[SpeculativeCacheTransaction], TargetOutput]) -> VerifiedBlock:
        """What a way of reading the block gives, in a round that is open afterwards, or aborted if it raises."""
        tx = SpeculativeCacheTransaction(self.caches, self.tokens.shape[1])
        try:
            output = read(tx)
        except BaseException:
            tx.abort()
            raise
        return VerifiedBlock(output.logits, output.hidden, tx)

    def _stepped(self, tx: SpeculativeCacheTransaction) -> TargetOutput:
        """The block token by token."""
        self.statistics.verify_route = STEP_THROUGH.name
        return step_through(self.target, self.tokens, tx, self.taps)

    def _by_routes(self, tx: SpeculativeCacheTransaction) -> TargetOutput:
        """The block in parts no wider than a verify call, each by the route that is certified for it."""
        outputs: list[TargetOutput] = []
        names: dict[str, None] = {}
        while tx.position < tx.width:
            if outputs:
                # In one lazy graph every in-place write of the next part would copy its buffer.
                mx.eval(outputs[-1].logits, cache_arrays(self.caches))
            part = self.tokens[:, tx.position : tx.position + MAX_WIDTH]
            route = self.routes.route(part.shape[1], self.caches)
            tx.drive_by(route.drive)
            outputs.append(verify(self.target, part, tx, route, self.taps))
            names[route.name] = None
        self.statistics.verify_route = " and ".join(names)
        return _joined(outputs)


def _joined(outputs: list[TargetOutput]) -> TargetOutput:
    """What parts of a block gave, as one."""
    if len(outputs) == 1:
        return outputs[0]
    hidden = [output.hidden for output in outputs if output.hidden is not None]
    logits = mx.concatenate([output.logits for output in outputs], axis=1)
    return TargetOutput(logits, mx.concatenate(hidden, axis=1) if hidden else None)


def _check_tokens(tokens: mx.array, caches: Sequence[Any], target: Target) -> None:
    if tokens.ndim != 2 or 0 in tokens.shape or not mx.issubdtype(tokens.dtype, mx.integer):
        raise InvalidRequest(
            f"tokens are ids of shape [B, W], at least one each, got shape {tokens.shape} of {tokens.dtype}. "
            "For one row, give tokens[None]."
        )
    held = rows_held(caches)
    if held not in (None, tokens.shape[0]):
        raise InvalidRequest(f"tokens have {tokens.shape[0]} rows, the caches hold {held}. Give one row for each.")
    for row, ids in enumerate(cast(list[list[int]], tokens.tolist())):
        whose = "the block's" if len(tokens) == 1 else f"row {row}'s"
        target.require_readable(ids, whose, "Give ids of this model's own vocabulary.")


def _taps(target: Target, capture: Sequence[int]) -> tuple[int, ...]:
    taps = tuple(capture)
    known = range(target.layer_count)
    if any(isinstance(tap, bool) or not isinstance(tap, int) or tap not in known for tap in taps):
        raise InvalidRequest(f"capture names layers 0..{target.layer_count - 1} of {target.name}, got {list(taps)}.")
    if len(set(taps)) < len(taps):
        raise InvalidRequest(f"capture names each layer once, got {list(taps)}.")
    return taps
