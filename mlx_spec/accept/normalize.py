"""Logits -> log-probabilities, every position of a block with the bits that mlx-lm's loop gives one alone."""

from __future__ import annotations

import functools

import mlx.core as mx

from mlx_spec.sampling import log_sum_exp


def normalized(logits: mx.array) -> tuple[mx.array, mx.array]:
    """Normalize every position of a block.

    Args:
        logits: [1, W, V].

    Returns:
        logprobs: [1, W, V] in the logits' dtype. sums: [1, W] their log-sum-exp, NaN where one of the logits is.

    Cost:
        Two ops where one reduction over all positions gives each the bits it has alone, which is tried once for each
        shape and dtype; else three for each position. Lazy but for that trial.
    """
    _, width, vocabulary = logits.shape
    if width > 1 and reduces_alike(width, vocabulary, logits.dtype, mx.default_device().type):
        sums = mx.logsumexp(logits, axis=-1, keepdims=True)
    else:
        sums = mx.stack([log_sum_exp(logits[:, index]) for index in range(width)], axis=1)
    return logits - sums, sums[..., 0]


_ROWS_TRIED = 24


@functools.cache
def reduces_alike(width: int, vocabulary: int, dtype: mx.Dtype, device: mx.DeviceType) -> bool:
    """Whether the reduction over the last axis of so many rows equals mlx-lm's over one row, in all bits."""
    del device
    spread = mx.array([[[1.0], [8.0], [30.0]][index % 3] for index in range(width)])
    alike = []
    for trial in range(-(-_ROWS_TRIED // width)):
        keys = mx.random.split(mx.random.key(vocabulary + trial), 2)
        random = mx.random.normal((1, width, vocabulary), key=keys[0]) * spread
        ruled_out = mx.random.uniform(shape=random.shape, key=keys[1]) < 0.1 * (trial % 2)
        logits = mx.where(ruled_out, -mx.inf, random).astype(dtype)
        block = mx.logsumexp(logits, axis=-1)[0]
        alone = mx.concatenate([log_sum_exp(logits[:, index])[0] for index in range(width)])
        alike.append(mx.array_equal(block, alone))
    return bool(mx.stack(alike).all().item())
