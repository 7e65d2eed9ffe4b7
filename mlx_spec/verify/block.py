"""A block of tokens through the target, by the route it was given."""

from __future__ import annotations

import mlx.core as mx

from mlx_spec.cache.contents import cache_arrays
from mlx_spec.cache.transaction import SpeculativeCacheTransaction
from mlx_spec.model.target import Target, TargetOutput
from mlx_spec.verify.routes import BLOCK, Route, verifying


def verify(
    target: Target,
    tokens: mx.array,
    tx: SpeculativeCacheTransaction,
    route: Route = BLOCK,
    taps: tuple[int, ...] = (),
) -> TargetOutput:
    """All W positions of a block, by a route whose drive the transaction was opened with.

    Args:
        target: whose forwards verify.
        tokens: [B, W] token ids.
        tx: open, over the target's caches.
        route: what its modules are to do; it was found for this many tokens.
        taps: 0-based layers whose outputs are wanted, ascending.

    Raises:
        CannotMix: a mixer refused a single position. The transaction is open and can be aborted.

    Cost:
        Lazy, but for a route that steps.
    """
    if route.stepped:
        return step_through(target, tokens, tx, taps)
    if route.plan is None:
        output = target.forward(tokens, tx.caches, taps)
    else:
        with verifying(route.plan):
            output = target.forward(tokens, tx.caches, taps)
    tx.mark(tokens.shape[1])
    return output


def step_through(
    target: Target, tokens: mx.array, tx: SpeculativeCacheTransaction, taps: tuple[int, ...] = ()
) -> TargetOutput:
    """W one-token forwards: every position gets the bits of plain decoding, whatever the model does.

    Cost:
        W decodes. The caches are evaluated after each step, since in one lazy graph every
        in-place write would copy its buffer.
    """
    outputs = []
    for position in range(tokens.shape[1]):
        output = target.forward(tokens[:, position : position + 1], tx.caches, taps)
        mx.eval(output.logits, cache_arrays(tx.caches))
        tx.mark(1)
        outputs.append(output)
    if len(outputs) == 1:
        return outputs[0]
    hidden = None
    if taps:
        hidden = mx.concatenate([output.hidden for output in outputs if output.hidden is not None], axis=1)
    return TargetOutput(mx.concatenate([output.logits for output in outputs], axis=1), hidden)
