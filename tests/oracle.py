"""The stock mlx-lm one-token loop, recorded: what every other way of decoding must reproduce."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache

from tests.bits import bit_difference, independent_array

RngKey = tuple[int, int]


def rng_key() -> RngKey:
    """The calling thread's RNG key, as two uint32 values."""
    first, second = np.array(mx.random.state[0])
    return int(first), int(second)


def seed_from_key(key: RngKey) -> None:
    """Make `key` the calling thread's RNG key."""
    mx.random.seed((key[0] << 32) | key[1])


def independent_copy(value: Any, memo: dict[int, Any] | None = None) -> Any:
    """Copy a prompt cache (or any part of one) so that no write to either side reaches the other.

    Arrays get buffers of their own with the same capacity; objects that were shared between layers
    are shared in the copy too.
    """
    memo = {} if memo is None else memo
    if id(value) in memo:
        return memo[id(value)]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, mx.array):
        copied: Any = independent_array(value)
    elif isinstance(value, list | tuple):
        copied = type(value)(independent_copy(item, memo) for item in value)
    elif isinstance(value, dict):
        copied = {key: independent_copy(item, memo) for key, item in value.items()}
    elif hasattr(value, "__dict__"):
        copied = type(value).__new__(type(value))
        vars(copied).update(independent_copy(vars(value), memo))
    else:
        raise TypeError(f"a cache holds a {type(value).__name__}, which this copy does not know: {value!r}")
    memo[id(value)] = copied
    return copied


@dataclass(frozen=True)
class OracleRun:
    """One run of the stock loop.

    Attributes:
        prompt: ids given.
        ids: ids emitted.
        logprobs: [V] per emitted id, evaluated.
        rng: RNG key after n emitted tokens, for every n in 1..len(ids) (0 if nothing was emitted).
    """

    prompt: tuple[int, ...]
    ids: tuple[int, ...]
    logprobs: tuple[mx.array, ...]
    rng: Mapping[int, RngKey]
    _caches: Mapping[int, list[Any]]

    def cache_after(self, emitted: int) -> list[Any]:
        """A fresh copy of the prompt cache as the stock loop leaves it when closed after `emitted` tokens."""
        return independent_copy(self._caches[emitted])


def run_stock(
    model: nn.Module,
    prompt: Sequence[int],
    max_tokens: int,
    *,
    seed: int | None = None,
    prompt_cache: list[Any] | None = None,
    max_kv_size: int | None = None,
    **options: Any,
) -> OracleRun:
    """Run the stock loop once and keep its state after every emitted token.

    Args:
        seed: what `mx.random.seed` is given first; None continues from the RNG as it stands.
        prompt_cache: a warm cache; a copy of it is used, the caller's stays as it is.
        options: further keyword arguments of mlx-lm's `generate_step`.
    """
    if prompt_cache is None:
        cache = make_prompt_cache(model, max_kv_size=max_kv_size)
    else:
        cache = independent_copy(prompt_cache)
    if seed is not None:
        mx.random.seed(seed)
    ids: list[int] = []
    logprobs: list[mx.array] = []
    caches: dict[int, list[Any]] = {}
    rng: dict[int, RngKey] = {}
    steps = generate_step(mx.array(prompt), model, max_tokens=max_tokens, prompt_cache=cache, **options)
    for token, row in steps:
        ids.append(token)
        logprobs.append(independent_array(row))
        caches[len(ids)] = independent_copy(cache)
        rng[len(ids)] = rng_key()
    if not ids:
        caches[0] = independent_copy(cache)
        rng[0] = rng_key()
    return OracleRun(tuple(prompt), tuple(ids), tuple(logprobs), rng, caches)


def continue_plainly(
    model: nn.Module, cache: list[Any], ids: Sequence[int], max_tokens: int, **options: Any
) -> OracleRun:
    """The stock loop from a warm cache, given the ids that follow what the cache holds. `cache` is left alone."""
    return run_stock(model, ids, max_tokens, prompt_cache=cache, **options)


_ABSENT = object()


def first_difference(got: Iterable[Any], want: Iterable[Any]) -> int | None:
    """Index of the first place where two sequences differ; a missing element differs. None if they are equal."""
    pairs = itertools.zip_longest(got, want, fillvalue=_ABSENT)
    return next((i for i, (mine, theirs) in enumerate(pairs) if mine != theirs), None)


def assert_same_output(got: Sequence[tuple[int, mx.array]], run: OracleRun, emitted: int | None = None) -> None:
    """Compare (token, logprobs) pairs with the first `emitted` (default: all) of the oracle, logprobs bitwise."""
    emitted = len(run.ids) if emitted is None else emitted
    ids = [token for token, _ in got]
    where = first_difference(ids, run.ids[:emitted])
    assert where is None, (
        f"token {where} differs after prompt of {len(run.prompt)}: "
        f"got {ids[max(0, where - 3) : where + 3]}, want {list(run.ids[:emitted][max(0, where - 3) : where + 3])} "
        f"(from index {max(0, where - 3)}); top-2 margin of the oracle there: {top_two_margin(run, where)}"
    )
    for i, (_, row) in enumerate(got):
        difference = bit_difference(row, run.logprobs[i])
        assert difference is None, f"logprobs of token {i} (id {ids[i]}): {difference}"


def top_two_margin(run: OracleRun, index: int) -> float | None:
    """How far the oracle's best logprob is above its second at an emitted index: small means a near-tie."""
    if index >= len(run.logprobs):
        return None
    ordered = np.sort(np.array(run.logprobs[index].astype(mx.float32)))
    return float(ordered[-1] - ordered[-2])
