"""What a plain list of tokens says a cache must show."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import (
    ArraysCache,
    BatchKVCache,
    BatchRotatingKVCache,
    ChunkedKVCache,
    ConcatenateKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)

from mlx_spec.cache.adopt import leaves
from tests.cache.kinds import WINDOW_STEPS

Kept = Sequence[Sequence[int]]
"""The tokens every row should hold, oldest first."""


def assert_shows(caches: Sequence[Any], kept: Kept) -> None:
    """Wherever tokens can be read back from what the stand-ins wrote, they are the ones in the lists."""
    for cache in leaves(caches):
        if isinstance(cache, BatchKVCache | BatchRotatingKVCache):
            assert cache.offset.tolist() == [len(tokens) for tokens in kept]
            for row, tokens in enumerate(kept):
                _assert_row(cache.extract(row), 0, tokens)
        else:
            for row, tokens in enumerate(kept):
                _assert_row(cache, row, tokens)


def assert_counts(caches: Sequence[Any], kept: Kept) -> None:
    """Wherever a cache counts the tokens it has read, it counts those in the lists."""
    for cache in leaves(caches):
        if isinstance(getattr(cache, "offset", None), mx.array):
            assert cache.offset.tolist() == [len(tokens) for tokens in kept]
        elif hasattr(cache, "offset"):
            assert cache.offset == len(kept[0])


def _assert_row(cache: Any, row: int, tokens: Sequence[int]) -> None:
    if isinstance(cache, ArraysCache):
        window = [0] * WINDOW_STEPS if cache[1] is None else _tokens(cache[1][row, :, 0])
        assert window == [*[0] * WINDOW_STEPS, *tokens][-WINDOW_STEPS:]
        return
    if not isinstance(cache, KVCache | ConcatenateKVCache | QuantizedKVCache | RotatingKVCache | ChunkedKVCache):
        return
    assert cache.offset == len(tokens)
    shown = [] if cache.keys is None or not tokens else _keys_of_row(cache, row)
    if isinstance(cache, RotatingKVCache):
        # The first rows of a window with `keep` stay; until they are all there, it is a plain list.
        kept_first = min(cache.keep, len(shown))
        assert len(shown) >= min(len(tokens), cache.max_size)
        assert shown == [*tokens[:kept_first], *tokens[len(tokens) - (len(shown) - kept_first) :]]
    elif isinstance(cache, ChunkedKVCache):
        assert shown == list(tokens[cache.start_position :])
    else:
        assert shown == list(tokens)


def _keys_of_row(cache: Any, row: int) -> list[int]:
    if isinstance(cache, RotatingKVCache):
        return _tokens(cache._temporal_order(cache.keys)[row, 0, :, 0])
    keys, _ = cache.keys_and_values()
    if isinstance(cache, QuantizedKVCache):
        keys = mx.dequantize(*(part[row, 0] for part in keys), group_size=cache.group_size, bits=cache.bits)
        return _tokens(keys[:, 0])
    return _tokens(keys[row, 0, :, 0])


def _tokens(entries: mx.array) -> list[int]:
    return [round(float(entry)) for entry in np.array(entries)]
