"""Equality of prompt caches: what must hold between a committed transaction and stock single-token steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import (
    BatchKVCache,
    BatchRotatingKVCache,
    ChunkedKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)

from tests.bits import bit_difference, same_bits

VALID_ROWS: Mapping[type, Callable[[Any], int]] = {
    KVCache: lambda cache: cache.offset,
    QuantizedKVCache: lambda cache: cache.offset,
    ChunkedKVCache: lambda cache: cache.offset - cache.start_position,
}
"""Caches that own more rows than they show: capacity, and what lies past these rows, is never read.

ConcatenateKVCache is not here: its next update appends after the last row it has, so stale rows count.
"""


def assert_same_cache(got: Any, want: Any) -> None:
    """Raise AssertionError naming layer, field, first differing index and both values.

    Append caches: class, visible rows and every scalar. Batch forms: `extract(i)` of every row. Everything else
    (ring, recurrent and convolution state, model-specific): all arrays whole and all scalars. Arrays bitwise.

    Args:
        got: a prompt cache (list of layers) or one layer's cache.
        want: the same, as the stock loop leaves it.
    """
    difference = cache_difference(got, want)
    assert difference is None, difference


def cache_difference(got: Any, want: Any) -> str | None:
    """The first difference as a sentence, or None. What differs in kind, shape or number comes before what in bits."""
    pairs: list[_Pair] = []
    for found in _Comparison().differences(got, want, "cache"):
        if isinstance(found, str):
            return found
        pairs.append(found)
    same = [same_bits(pair.got, pair.want) for pair in pairs]
    # Together: waiting for each on its own costs more than comparing it.
    mx.eval(same)
    for pair, equal in zip(pairs, same, strict=True):
        if not np.array(equal):
            return f"{pair.where}: {bit_difference(pair.got, pair.want)}"
    return None


def assert_same_row(batch: Any, row: int, want: Any) -> None:
    """Row `row` of one layer's batch cache equals the cache of the same request run alone.

    A ring keeps its rows in another physical order alone than in a batch, so rings are compared oldest row first.
    """
    alone = _oldest_first(batch.extract(row))
    difference = cache_difference(alone, _oldest_first(want))
    assert difference is None, f"row {row}: {difference}"


def assert_same_rows(batch: Sequence[Any], rows: Sequence[Sequence[Any]]) -> None:
    """The same for every row of every layer: `batch` has one cache per layer, `rows` one such list per row."""
    got = [[_oldest_first(cache.extract(row)) for cache in batch] for row in range(len(rows))]
    difference = cache_difference(got, [[_oldest_first(cache) for cache in row] for row in rows])
    assert difference is None, difference


def _oldest_first(cache: Any) -> Any:
    if not isinstance(cache, RotatingKVCache) or cache.keys is None:
        return cache
    ordered = RotatingKVCache(cache.max_size, cache.keep)
    # A ring just fed a block holds more than `size()` rows; the surplus is the oldest and is never attended to.
    first = -cache.size()
    ordered.keys = cache._temporal_order(cache.keys)[..., first:, :]
    ordered.values = cache._temporal_order(cache.values)[..., first:, :]
    ordered.offset = cache.offset
    ordered._idx = ordered.keys.shape[2]
    return ordered


class _Pair(NamedTuple):
    """Two arrays of one dtype and shape whose bits are still to be compared."""

    where: str
    got: mx.array
    want: mx.array


class _Comparison:
    """One walk over two caches in step; remembers which objects were met, to see sharing between layers."""

    def __init__(self) -> None:
        self.partner_of_got: dict[int, int] = {}
        self.partner_of_want: dict[int, int] = {}
        # An object taken out of a batch for the comparison must outlive it, or another gets its id.
        self._taken_out: list[Any] = []

    def differences(self, got: Any, want: Any, where: str) -> Iterator[str | _Pair]:
        if isinstance(got, list | tuple) and isinstance(want, list | tuple):
            yield from self._sequence(got, want, where)
        elif type(got) is not type(want):
            yield f"{where}: got a {type(got).__name__} ({got!r}), want a {type(want).__name__} ({want!r})"
        elif isinstance(want, mx.array):
            if (got.dtype, got.shape) == (want.dtype, want.shape):
                yield _Pair(where, got, want)
            else:
                yield f"{where}: {bit_difference(got, want)}"
        elif isinstance(want, dict):
            yield from self._fields(got, want, where)
        elif hasattr(want, "__dict__"):
            yield from self._shared(got, want, where)
            fields = (visible_fields(got), visible_fields(want))
            self._taken_out.append(fields)
            yield from self._fields(*fields, f"{where} ({type(want).__name__})")
        elif not _same_scalar(got, want):
            yield f"{where}: got {got!r}, want {want!r}"

    def _sequence(self, got: Any, want: Any, where: str) -> Iterator[str | _Pair]:
        if len(got) != len(want):
            yield f"{where}: got {len(got)} entries, want {len(want)}"
            return
        for i, (mine, theirs) in enumerate(zip(got, want, strict=True)):
            yield from self.differences(mine, theirs, f"layer {i}" if where == "cache" else f"{where}[{i}]")

    def _fields(self, got: Mapping[str, Any], want: Mapping[str, Any], where: str) -> Iterator[str | _Pair]:
        if got.keys() != want.keys():
            yield f"{where}: got fields {sorted(got)}, want {sorted(want)}"
            return
        for name in want:
            yield from self.differences(got[name], want[name], f"{where}.{name}")

    def _shared(self, got: Any, want: Any, where: str) -> Iterator[str | _Pair]:
        same_partner = self.partner_of_got.setdefault(id(got), id(want)) == id(want)
        if not same_partner or self.partner_of_want.setdefault(id(want), id(got)) != id(got):
            yield f"{where}: the {type(want).__name__} is shared between layers on one side only"


def visible_fields(cache: Any) -> dict[str, Any]:
    """The fields of one cache object that a model or a caller can tell apart, rows nobody reads cut off."""
    if isinstance(cache, BatchKVCache | BatchRotatingKVCache) and cache.keys is not None:
        rows = [cache.extract(i) for i in range(cache.keys.shape[0])]
        return {"extract": rows, "offset": cache.offset}
    fields = dict(vars(cache))
    valid = next((count for kind, count in VALID_ROWS.items() if isinstance(cache, kind)), None)
    if valid is not None:
        rows = valid(cache)
        fields["keys"] = _first_rows(cache.keys, rows)
        fields["values"] = _first_rows(cache.values, rows)
    return fields


def _first_rows(held: Any, rows: int) -> Any:
    """Rows [0, rows) of an array or of a quantized triple; None when no row is visible."""
    if held is None or rows == 0:
        return None
    if isinstance(held, mx.array):
        return held[..., :rows, :]
    return tuple(_first_rows(part, rows) for part in held)


def _same_scalar(got: Any, want: Any) -> bool:
    if isinstance(want, float):
        both_nan = math.isnan(got) and math.isnan(want)
        return both_nan or (got == want and math.copysign(1.0, got) == math.copysign(1.0, want))
    return bool(got == want)
