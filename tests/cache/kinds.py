"""Every kind of mlx-lm cache with a stand-in for the layer that writes it, so that no model is needed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import (
    ArraysCache,
    BatchKVCache,
    BatchRotatingKVCache,
    CacheList,
    ChunkedKVCache,
    ConcatenateKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)
from mlx_lm.models.deepseek_v41 import LayerCache

HEADS, KEY_DIM, VALUE_DIM = 3, 32, 64
"""Both dimensions are multiples of the quantization group used here."""

STATE_DIM, WINDOW_STEPS = 10, 3
RING, KEEP = 11, 4
CHUNK = 13
NARROW = 4
GROWTH = 256
"""Rows by which mlx-lm's buffers grow."""


class UnknownCache(KVCache):
    """What a model of tomorrow may bring: it could keep more than its parent, so only whole states are trusted."""


@dataclass(frozen=True)
class Kind:
    """One cache class, or nest of them.

    Attributes:
        make: a fresh, empty cache.
        edge: length at which it changes its behaviour: grows, wraps or trims its front.
        batch: rows.
        by_length: a block of several tokens may be appended at once and cut anywhere.
        stepwise: a round can be cut only where a forward ended.
        pads: tokens by row that are padding at the left; empty where no row has any.
        can_save: mlx-lm can write it to a file and read it back.
    """

    name: str
    make: Callable[[], Any]
    edge: int
    batch: int = 1
    by_length: bool = False
    stepwise: bool = False
    pads: tuple[int, ...] = ()
    can_save: bool = True

    def filled(self, tokens: Sequence[int]) -> Any:
        """A cache that read these tokens one at a time."""
        cache = self.make()
        self.step(cache, tokens)
        return cache

    def step(self, cache: Any, tokens: Sequence[int]) -> None:
        """Append tokens one at a time and evaluate after each, as plain decoding does."""
        for token in tokens:
            append(cache, [token], self.batch)
            mx.eval(arrays_of(cache))

    def filled_at_once(self, tokens: Sequence[int]) -> Any:
        """A cache that read these tokens in one block, as prefill does."""
        cache = self.make()
        if tokens:
            append(cache, tokens, self.batch)
            mx.eval(arrays_of(cache))
        return cache


KINDS = {
    kind.name: kind
    for kind in (
        Kind("kv", KVCache, GROWTH, by_length=True),
        Kind("kv_of_three_rows", KVCache, GROWTH, batch=3, by_length=True),
        Kind("quantized", lambda: QuantizedKVCache(group_size=32, bits=8), GROWTH, by_length=True),
        Kind("list_by_length", lambda: CacheList(KVCache(), QuantizedKVCache(32, 4)), GROWTH, by_length=True),
        Kind("list_mixed", lambda: CacheList(KVCache(), ArraysCache(2)), GROWTH, stepwise=True),
        Kind("nested", lambda: CacheList(CacheList(KVCache(), RotatingKVCache(RING)), KVCache()), RING),
        Kind("ring", lambda: RotatingKVCache(RING, keep=KEEP), RING),
        Kind("ring_without_keep", lambda: RotatingKVCache(RING), RING),
        Kind("arrays", lambda: ArraysCache(2), WINDOW_STEPS, stepwise=True),
        Kind(
            "arrays_padded",
            lambda: ArraysCache(2, left_padding=[2, 0]),
            WINDOW_STEPS,
            batch=2,
            stepwise=True,
            pads=(2, 0),
        ),
        Kind("chunked", lambda: ChunkedKVCache(CHUNK), CHUNK, by_length=True),
        # Rounds wider than the window write over rows of their own.
        Kind("ring_narrow", lambda: RotatingKVCache(NARROW, keep=1), NARROW),
        Kind("chunked_narrow", lambda: ChunkedKVCache(NARROW), NARROW, by_length=True),
        Kind("concatenate", ConcatenateKVCache, WINDOW_STEPS, by_length=True),
        Kind("batch_kv", lambda: BatchKVCache([2, 0, 1]), GROWTH, batch=3, by_length=True, pads=(2, 0, 1)),
        # A batch ring read from a file lacks a field that its next write needs.
        Kind("batch_ring", lambda: BatchRotatingKVCache(RING, [2, 0]), RING, batch=2, pads=(2, 0), can_save=False),
        Kind(
            "batch_ring_narrow",
            lambda: BatchRotatingKVCache(NARROW, [2, 0]),
            NARROW,
            batch=2,
            pads=(2, 0),
            can_save=False,
        ),
        # mlx-lm reads from files only the classes of its own cache module.
        Kind("model_specific", lambda: LayerCache(RING), RING, stepwise=True, can_save=False),
    )
}


def append(cache: Any, tokens: Sequence[float], batch: int = 1) -> None:
    """What a layer does to its cache in one forward over these tokens, told apart by row."""
    append_rows(cache, [[token + row / 8 for token in tokens] for row in range(batch)])


def append_rows(cache: Any, tokens: Sequence[Sequence[float]]) -> None:
    """The same for tokens given by row. What is written for a row depends on its tokens alone."""
    if isinstance(cache, CacheList):
        for index in range(len(cache.caches)):
            append_rows(cache[index], tokens)
    elif isinstance(cache, ArraysCache):
        _recur(cache, tokens)
    elif isinstance(cache, LayerCache):
        cache.update_window(vectors(tokens, KEY_DIM)[:, 0])
        pending = vectors(tokens, STATE_DIM)[:, 0]
        held = cache.pending_kv
        cache.pending_kv = pending if held is None else mx.concatenate([held, pending], axis=1)
    else:
        if isinstance(cache, ChunkedKVCache):
            cache.maybe_trim_front()
        cache.update_and_fetch(vectors(tokens, KEY_DIM), -vectors(tokens, VALUE_DIM))


def vectors(tokens: Sequence[Sequence[float]], size: int) -> mx.array:
    """[B, HEADS, T, size]; entry [b, 0, t, 0] is the token itself."""
    head = np.arange(HEADS)[:, None, None] / 32
    return mx.array((np.asarray(tokens)[:, None, :, None] + head + np.arange(size) / 4096).astype(np.float32))


def arrays_of(cache: Any) -> list[mx.array]:
    """Every array in the state of a cache."""
    pending = [cache.caches] if isinstance(cache, CacheList) else [vars(cache)]
    found: list[mx.array] = []
    while pending:
        value = pending.pop()
        if isinstance(value, mx.array):
            found.append(value)
        elif isinstance(value, dict):
            pending.extend(value.values())
        elif isinstance(value, list | tuple):
            pending.extend(value)
        elif hasattr(value, "__dict__"):
            found.extend(arrays_of(value))
    return found


def _recur(cache: Any, tokens: Sequence[Sequence[float]]) -> None:
    """A recurrent state and a convolution window, masked and written slot by slot as mlx-lm's mixers do."""
    inputs = vectors(tokens, STATE_DIM)[:, 0]
    batch, count, _ = inputs.shape
    mask = cache.make_mask(count)
    if mask is not None:
        inputs = mx.where(mask[..., None], inputs, 0)
    state = mx.zeros((batch, STATE_DIM)) if cache[0] is None else cache[0]
    window = mx.zeros((batch, WINDOW_STEPS, STATE_DIM)) if cache[1] is None else cache[1]
    for index in range(count):
        stepped = state * 0.75 + inputs[:, index]
        state = stepped if mask is None else mx.where(mask[:, index, None], stepped, state)
    joined = mx.concatenate([window, inputs], axis=1)
    cache[0] = state
    if cache.lengths is None:
        cache[1] = mx.contiguous(joined[:, -WINDOW_STEPS:])
    else:
        ends = mx.clip(cache.lengths, 0, count)
        cache[1] = mx.take_along_axis(joined, (ends[:, None] + mx.arange(WINDOW_STEPS))[..., None], axis=1)
    cache.advance(count)
