"""A drafter's logits as log-probabilities over the vocabulary of its target."""

from __future__ import annotations

import mlx.core as mx


def spread(logits: mx.array, vocab_size: int, target_ids: mx.array | None = None) -> mx.array:
    """Normalize a drafter's logits and put them where the target has its tokens.

    Args:
        logits: [..., V_draft] of the tokens it may propose.
        vocab_size: V, columns of the target's logits. What a drafter knows beyond them it may not propose.
        target_ids: [V_draft] int32, the target's id of each of the drafter's; None when they are the same.

    Returns:
        [..., V] float32, -inf where the drafter has no token. Lazy.

    Example:
        >>> spread(mx.zeros((1, 2)), 4, mx.array([3, 1])).tolist()
        [[-inf, -0.6931471824645996, -inf, -0.6931471824645996]]
    """
    known = (logits if target_ids is not None else logits[..., :vocab_size]).astype(mx.float32)
    normalized = known - mx.logsumexp(known, axis=-1, keepdims=True)
    places = mx.arange(known.shape[-1]) if target_ids is None else target_ids
    everywhere = mx.full((*known.shape[:-1], vocab_size), -mx.inf)
    everywhere[..., places] = normalized
    return everywhere
