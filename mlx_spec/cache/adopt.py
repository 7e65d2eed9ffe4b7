"""mlx-lm's cache objects and ours: the only file that names their classes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten
from mlx_lm.generate import maybe_quantize_kv_cache
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
    make_prompt_cache,
)

from mlx_spec.cache.alone import AloneByLength, AlonePacked
from mlx_spec.cache.append import AppendJournal, BatchAppendJournal, ConcatenateJournal, PackedJournal
from mlx_spec.cache.base import AskedMask, Drive, Forward, Journal, drive_by, make_nest
from mlx_spec.cache.batch_ring import BatchRingJournal
from mlx_spec.cache.chunked import ChunkedJournal
from mlx_spec.cache.recurrent import RecurrentJournal
from mlx_spec.cache.ring import FullRingJournal, RingJournal
from mlx_spec.cache.stepwise import StepwiseJournal
from mlx_spec.errors import InvalidRequest, TransactionError, UnsupportedOption

_Kinds = dict[type[Any], Callable[[Any, int], Journal]]

_KEPT_BY_LENGTH: _Kinds = {
    KVCache: AppendJournal,
    QuantizedKVCache: PackedJournal,
    BatchKVCache: BatchAppendJournal,
    ConcatenateKVCache: ConcatenateJournal,
}
_CUT_ANYWHERE: _Kinds = {**_KEPT_BY_LENGTH, ChunkedKVCache: ChunkedJournal}
_KEPT_IN_PART: _Kinds = {
    **_CUT_ANYWHERE,
    RotatingKVCache: RingJournal,
    ArraysCache: RecurrentJournal,
    BatchRotatingKVCache: BatchRingJournal,
}
"""Exact classes only: a subclass may keep more state than its parent, so it is stepped through."""

_CUT_ALONE: _Kinds = {KVCache: AloneByLength, QuantizedKVCache: AlonePacked}
_STEP_ALONE = frozenset({*_CUT_ALONE, ArraysCache})
_SHARED = frozenset(_KEPT_IN_PART)
_KEPT_IN_ROWS = frozenset(_KEPT_IN_PART) - {ArraysCache}
"""Attention reads every row of these that a forward writes, so whoever waits for the logits waits for the rows."""

_RINGS = (RotatingKVCache, BatchRotatingKVCache)


def new_append_cache() -> Any:
    """A fresh full-attention cache for a drafter's own layer."""
    return KVCache()


def new_caches(model: nn.Module, max_kv_size: int | None = None) -> list[Any]:
    """The caches mlx-lm would give this model, one per layer."""
    return list(make_prompt_cache(model, max_kv_size=max_kv_size))


def is_limited(caches: Sequence[Any], max_kv_size: int) -> bool:
    """Whether some cache keeps just this many tokens. mlx-lm drops the number where the model makes its own caches."""
    return any(isinstance(cache, _RINGS) and cache.max_size == max_kv_size for cache in leaves(caches))


def leaves(caches: Sequence[Any]) -> Iterator[Any]:
    """The caches that hold state, with nesting undone, each once."""
    # Asked several times a round: a list of caches that nest nothing is its own leaves.
    flat = _SHARED.issuperset(map(type, caches)) and len(set(map(id, caches))) == len(caches)
    return iter(caches) if flat else _unnested(caches)


def _unnested(caches: Sequence[Any]) -> Iterator[Any]:
    seen: set[int] = set()
    pending = list(reversed(caches))
    while pending:
        cache = pending.pop()
        if cache is None or id(cache) in seen:
            continue
        seen.add(id(cache))
        if isinstance(cache, CacheList):
            pending.extend(reversed(cache.caches))
        else:
            yield cache


def adopt(caches: Sequence[Any], members: Sequence[Any], width: int, drive: Drive) -> tuple[list[Any], list[Journal]]:
    """Open one round on a model's caches.

    Args:
        caches: what the model takes as `cache`: mlx-lm cache objects, nested or None.
        members: their `leaves`.
        width: tokens the round may append.
        drive: how the token mixers take them.

    Returns:
        The tree the model is handed, leaf for cache, and one journal per cache that holds state.
    """
    alone = drive is Drive.ALONE and _CUT_ALONE.keys() >= set(map(type, members))
    kinds = _CUT_ALONE if alone else _CUT_ANYWHERE if drive is Drive.WHOLE else _KEPT_IN_PART
    journals: dict[int, Journal] = {}
    masks: dict[int, AskedMask] = {}
    forward = Forward()
    for cache in members:
        kind = kinds.get(type(cache), StepwiseJournal)
        if type(cache) is RotatingKVCache and _keeps_every_row(cache):
            kind = FullRingJournal
        journals[id(cache)] = journal = kind(cache, width)
        journal.masks, journal.forward = masks, forward
        if journal.needs_mixer and drive is not Drive.WHOLE:
            forward.needs_mixers = True
    if alone:
        return list(caches), list(journals.values())
    drive_by(journals.values(), drive)
    made = {key: journal.make_leaf() for key, journal in journals.items()}
    return [_handed(cache, made) for cache in caches], list(journals.values())


def _keeps_every_row(cache: Any) -> bool:
    """Whether a window has no rows but those it never overwrites; mlx-lm writes later ones to nowhere."""
    return type(cache) is RotatingKVCache and cache.keep >= cache.max_size


def _handed(cache: Any, made: dict[int, Any]) -> Any:
    if cache is None:
        return None
    if isinstance(cache, CacheList):
        return make_nest(cache, tuple(_handed(member, made) for member in cache.caches))
    return made[id(cache)]


def members_of(cache: Any) -> tuple[Any, ...] | None:
    """The caches in a cache of caches; None for any other."""
    return tuple(cache.caches) if isinstance(cache, CacheList) else None


def is_shared_class(cache: Any) -> bool:
    """Whether its class, and no parent of it, is one that mlx-lm's models share."""
    return type(cache) in _KEPT_IN_PART


def steps_alone(caches: Sequence[Any]) -> bool:
    """Whether what one token does to each of these can be undone by what is noted before it."""
    return _STEP_ALONE.issuperset(map(type, caches))


def holds_states(cache: Any) -> bool:
    """Whether it holds states of fixed size, and no rows."""
    return isinstance(cache, ArraysCache)


def needs_mixers(caches: Sequence[Any]) -> bool:
    """Whether some cache can keep part of a block only with the help of its token mixer."""
    return any(type(cache) not in _KEPT_BY_LENGTH for cache in leaves(caches))


def runs_again(caches: Sequence[Any]) -> bool:
    """Whether part of a block is kept in some cache by running its mixer again."""
    return any(_KEPT_IN_PART.get(type(cache)) is RecurrentJournal for cache in leaves(caches))


def tokens_held(caches: Sequence[Any]) -> int:
    """Tokens the caches have read so far, padding of a batch included, as far as any of them counts; 0 when none does.

    States of fixed size count nothing. What follows from a length (edges of windows, numbers of keys, limits of a rope)
    concerns only caches that count.
    """
    held = 0
    for cache in leaves(caches):
        count = getattr(cache, _COUNTER.get(type(cache), "offset"), None)
        if isinstance(count, int) and count > held:
            held = count
    return held


_COUNTER: dict[type[Any], str] = {BatchKVCache: "_idx", BatchRotatingKVCache: "_offset"}
"""The number that counts, where `offset` holds one for each row."""


def quantized_entry(caches: Sequence[Any]) -> tuple[int, int] | None:
    """(bits, group size) of the first quantized cache, or None when all are float."""
    for cache in leaves(caches):
        if isinstance(cache, QuantizedKVCache):
            return cache.bits, cache.group_size
    return None


class Likeness:
    """Of what kinds a model's caches are; fresh ones of the same kinds can be made from it. Two alike are equal.

    Attributes:
        strangers: what those are called of which no part of a block is known to be kept: classes that are none of
            mlx-lm's shared ones, windows without a row to overwrite, batches of several rows.
        edges: lengths, ascending, at which some window wraps or is cut.
    """

    def __init__(self, caches: Sequence[Any]) -> None:
        self._kinds = tuple(map(_kind, caches))
        held = list(leaves(caches))
        self.strangers = sorted({name for cache in held if (name := _stranger(cache))})
        self.edges = sorted({getattr(cache, name) for cache in held for name in _EDGE.get(type(cache), ())})

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Likeness) and other._kinds == self._kinds

    def __hash__(self) -> int:
        return hash(self._kinds)

    def __str__(self) -> str:
        runs = groupby(map(_named, self._kinds))
        return ", ".join(f"{sum(1 for _ in run)} x {kind}" for kind, run in runs)

    def fresh(self) -> list[Any]:
        """Empty caches; those to be quantized are float as yet."""
        return list(map(_made, self._kinds))

    def quantize(self, caches: list[Any]) -> None:
        """Convert in place those of a fresh list that stand for quantized ones."""
        for place, kind in enumerate(self._kinds):
            if kind is not None and kind[0] is QuantizedKVCache:
                group_size, bits = kind[1]
                caches[place] = caches[place].to_quantized(group_size=group_size, bits=bits)


_MADE_FROM: dict[type[Any], tuple[str, ...]] = {
    KVCache: (),
    QuantizedKVCache: ("group_size", "bits"),
    ConcatenateKVCache: (),
    RotatingKVCache: ("max_size", "keep"),
    ChunkedKVCache: ("chunk_size",),
    ArraysCache: ("cache", "left_padding"),
    BatchKVCache: ("left_padding",),
    BatchRotatingKVCache: ("max_size", "left_padding"),
}
"""Fields that tell two caches of a class apart before they have read anything."""

_MAKERS: dict[type[Any], Callable[..., Any]] = {
    QuantizedKVCache: lambda group_size, bits: KVCache(),  # noqa: ARG005  converted once it has read something
    ArraysCache: lambda slots, rows: ArraysCache(slots, left_padding=rows and [0] * rows),
    BatchKVCache: lambda rows: BatchKVCache([0] * rows),
    BatchRotatingKVCache: lambda max_size, rows: BatchRotatingKVCache(max_size, [0] * rows),
}
"""How a fresh cache is made of these fields, lists and arrays given by their lengths, where not by the class itself.

Of a batch each row has a mask, whether or not there is padding for it to hide.
"""

_EDGE: dict[type[Any], tuple[str, ...]] = {
    RotatingKVCache: ("max_size",),
    BatchRotatingKVCache: ("max_size",),
    ChunkedKVCache: ("chunk_size",),
}


def _stranger(cache: Any) -> str | None:
    """What a cache is called of which no part of a block is known to be kept; None for the others."""
    name = type(cache).__name__
    if type(cache) not in _MADE_FROM:
        return name
    if _keeps_every_row(cache):
        return f"{name}(max_size={cache.max_size}, keep={cache.keep}), a window without a row to overwrite,"
    padding = getattr(cache, "left_padding", None)
    if padding is not None and padding.size > 1:
        return f"{name} of {padding.size} rows"
    if getattr(cache, "lengths", None) is not None:
        return f"{name} in the middle of a padded prompt"
    return None


def _kind(cache: Any) -> tuple[Any, ...] | None:
    if cache is None:
        return None
    if isinstance(cache, CacheList):
        return CacheList, tuple(map(_kind, cache.caches))
    fields = [getattr(cache, name) for name in _MADE_FROM.get(type(cache), ())]
    return type(cache), tuple(len(field) if isinstance(field, list | mx.array) else field for field in fields)


def _named(kind: tuple[Any, ...] | None) -> str:
    if kind is None:
        return "none"
    made_of, fields = kind
    inner = map(_named, fields) if made_of is CacheList else map(str, fields)
    return f"{made_of.__name__}({', '.join(inner)})"


def _made(kind: tuple[Any, ...] | None) -> Any:
    if kind is None:
        return None
    made_of, fields = kind
    if made_of is CacheList:
        return CacheList(*map(_made, fields))
    return _MAKERS.get(made_of, made_of)(*fields)


def stretch(caches: Sequence[Any], length: int) -> None:
    """Let caches that have read a little stand as one-token decode leaves them after `length` tokens.

    Their rows become random ones; states of fixed size stay. No forward is run.

    Args:
        caches: float ones, each of mlx-lm's shared classes.
    """
    key = mx.random.key(length)
    for cache in leaves(caches):
        if isinstance(cache, ArraysCache) or cache.keys is None:
            continue
        rows = min(length, getattr(cache, *_EDGE[type(cache)]) if type(cache) in _EDGE else length)
        cache.keys, cache.values = (_random_rows(array, rows, key) for array in (cache.keys, cache.values))
        cache.offset = length
        if isinstance(cache, BatchKVCache | BatchRotatingKVCache):
            _stretch_batch(cache, rows, length)
        if isinstance(cache, ChunkedKVCache):
            cache.start_position = length - rows
        if isinstance(cache, RotatingKVCache):
            beyond = length - rows
            cache._idx = rows if beyond == 0 else cache.keep + 1 + (beyond - 1) % (rows - cache.keep)


def _stretch_batch(cache: Any, rows: int, length: int) -> None:
    beyond = length - rows
    cache.offset = mx.full(cache.left_padding.shape, length)
    cache.left_padding = mx.full(cache.left_padding.shape, -beyond)
    cache._idx = rows if beyond == 0 else 1 + (beyond - 1) % rows
    if isinstance(cache, BatchRotatingKVCache):
        cache._offset, cache.rotated = length, beyond > 0


def _random_rows(like: mx.array, rows: int, key: mx.array) -> mx.array:
    batch, heads, _, size = like.shape
    return mx.random.normal((batch, heads, rows, size), like.dtype, key=key)


class KVQuantization:
    """When and how mlx-lm turns a float cache into a quantized one.

    Attributes:
        bits: bits per entry; None means never.
        group_size: entries per scale.
        start: cache length, in tokens, from which a cache is quantized.
    """

    def __init__(self, bits: int | None, group_size: int, start: int) -> None:
        self.bits = bits
        self.group_size = group_size
        self.start = start

    def check(self, caches: Sequence[Any]) -> None:
        """Refuse what mlx-lm itself cannot do, and caches that are quantized otherwise already.

        Raises:
            UnsupportedOption: a sliding-window cache cannot be quantized. Nothing was changed.
            InvalidRequest: the caches given contradict these settings. Nothing was changed.
        """
        rings = sorted({type(cache).__name__ for cache in leaves(caches) if isinstance(cache, _RINGS)})
        if self.bits is not None and rings:
            raise UnsupportedOption(
                f"kv_bits={self.bits} asks for a quantized cache, but this model keeps {', '.join(rings)}, "
                "which mlx-lm cannot quantize. Leave kv_bits (and max_kv_size) out."
            )
        held = quantized_entry(caches)
        if self.bits is not None and held not in (None, (self.bits, self.group_size)):
            raise InvalidRequest(
                f"kv_bits={self.bits} and kv_group_size={self.group_size} contradict the prompt cache, "
                f"which is quantized to {held[0]} bits in groups of {held[1]}."
            )

    def check_sizes(self, caches: Sequence[Any], used: Callable[[], Sequence[Any]]) -> None:
        """Refuse groups that do not divide a row of keys or values, wherever the run might come to quantize them.

        Args:
            caches: the run's.
            used: makes fresh caches that have read a token, lazily; called where these caches are empty.

        Raises:
            InvalidRequest: names both sizes. Nothing was changed.
        """
        if self.bits is None or not any(hasattr(cache, "to_quantized") for cache in caches):
            return
        held = [cache for cache in caches if isinstance(cache, KVCache)]
        if any(cache.keys is None for cache in held):
            held = [cache for cache in used() if isinstance(cache, KVCache)]
        sizes = {array.shape[-1] for cache in held for array in (cache.keys, cache.values) if array is not None}
        wrong = sorted(size for size in sizes if size % self.group_size)
        if wrong:
            sizes_in_words = " and ".join(map(str, wrong))
            raise InvalidRequest(
                f"kv_group_size={self.group_size} does not divide the {sizes_in_words} entries that "
                f"rows of this model's keys and values have, so kv_bits={self.bits} cannot be had. Give a "
                "kv_group_size that does, or leave kv_bits out."
            )

    def room(self, caches: Sequence[Any]) -> int | None:
        """Tokens until the next cache must be converted; None when none will be.

        A block may end there but not cross: the stock loop reads the tokens after that point from the converted cache.
        """
        if self.bits is None:
            return None
        # As mlx-lm asks, not by class: it converts subclasses too.
        lengths = [cache.offset for cache in caches if hasattr(cache, "to_quantized") and cache.offset < self.start]
        return self.start - max(lengths) if lengths else None

    def convert(self, caches: list[Any]) -> bool:
        """Convert in place, in the caller's list, every cache that is due. Returns whether any was."""
        if self.bits is None:
            return False
        before = list(caches)
        maybe_quantize_kv_cache(caches, self.start, self.group_size, self.bits)
        return any(old is not new for old, new in zip(before, caches, strict=True))


def visible_arrays(caches: Sequence[Any]) -> list[mx.array]:
    """What the caches' future reads can see: rows up to the length where a length counts, else everything."""
    arrays: list[mx.array] = []
    for cache in leaves(caches):
        by_length = type(cache) in _CUT_ANYWHERE and cache.keys is not None
        state = cache.keys_and_values() if by_length else cache.state
        arrays.extend(array for _, array in tree_flatten(state) if isinstance(array, mx.array))
    return arrays


def state_arrays(caches: Sequence[Any]) -> list[mx.array]:
    """What a forward leaves in the caches that its logits may not depend on: recurrent states, unknown classes.

    The caches' own array objects. A slice of one would be a second handle on its buffer.
    """
    if _KEPT_IN_ROWS.issuperset(map(type, caches)):
        return []
    return buffers([cache for cache in leaves(caches) if type(cache) not in _KEPT_IN_ROWS])


def buffers(caches: Sequence[Any]) -> list[mx.array]:
    """Every array the caches hold, as they hold it, for evaluation: no handle is made of a buffer."""
    arrays: list[mx.array] = []
    for cache in leaves(caches):
        for value in vars(cache).values():
            if isinstance(value, mx.array):
                arrays.append(value)
            elif isinstance(value, list | tuple | dict):
                arrays.extend(array for _, array in tree_flatten(value) if isinstance(array, mx.array))
    return arrays


def rows_in_order(cache: Any) -> tuple[mx.array, mx.array]:
    """The rows a cache holds, oldest first.

    Args:
        cache: one layer's attention cache, in no open round.

    Returns:
        keys [B, Hk, T, D] and values [B, Hk, T, Dv], lazy. A sliding window gives what it still holds.

    Raises:
        TransactionError: it holds none, or is of a class whose order is not known.

    Cost:
        Views for caches that grow at their end; a copy of the window for one that wraps; packed rows are unpacked.
    """
    keys, values = cache.keys, cache.values
    if keys is None:
        raise TransactionError(f"{type(cache).__name__} holds no rows yet: read the prompt first")
    if isinstance(cache, RotatingKVCache):
        return _unwrapped(cache, keys), _unwrapped(cache, values)
    if isinstance(cache, QuantizedKVCache):
        keys, values = (_unpacked(cache, side) for side in (keys, values))
    elif not isinstance(cache, KVCache):
        raise TransactionError(
            f"the order of the rows of {type(cache).__name__} is not known; it is for KVCache, QuantizedKVCache and "
            "RotatingKVCache"
        )
    return keys[..., : cache.offset, :], values[..., : cache.offset, :]


def _unpacked(cache: Any, side: tuple[mx.array, ...]) -> mx.array:
    weight, scales, biases = side
    return mx.dequantize(weight, scales, biases, group_size=cache.group_size, bits=cache.bits)


def _unwrapped(ring: Any, side: mx.array) -> mx.array:
    # The next row is written at `_idx`; where older rows lie behind it, they come first, those kept for good apart.
    begun = ring._idx
    if begun >= side.shape[2]:
        return side
    if begun >= ring.offset:
        return side[..., :begun, :]
    return mx.concatenate([side[..., : ring.keep, :], side[..., begun:, :], side[..., ring.keep : begun, :]], axis=2)
