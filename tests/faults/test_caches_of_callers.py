"""What callers do with a prompt cache around runs, by mlx-lm's own functions: ours leave and take what mlx-lm's do."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step as stock_generate_step
from mlx_lm.models.cache import can_trim_prompt_cache, load_prompt_cache, save_prompt_cache, trim_prompt_cache

from mlx_spec import generate_step
from tests.bits import assert_same_bits
from tests.rounds.runs import DRAFTERS
from tests.same_cache import assert_same_cache
from tests.tiny import MIXES, PROMPT

pytestmark = pytest.mark.faults

Pair = tuple[int, mx.array]
Steps = Iterator[Pair]
Decode = Callable[..., Steps]

TAKEN = 7
"""Tokens of the first run: one after a whole block of four, in the middle of the next."""

CONTINUED = 5

KINDS = ("dense", "sliding", "ring_with_keep", "hybrid", "mamba2", "chunked", "quantized_from_20", "cache_list")


def ours(mode: str, mix: str) -> Decode:
    """Our function, with or without somebody who drafts."""
    if mode == "plain":
        return generate_step
    right = MIXES[mix].oracle().ids
    return lambda *args, **given: generate_step(
        *args, draft_model=DRAFTERS[mode](mix, right, mx.float32), draft_block_size=4, **given
    )


def take(steps: Steps, count: int, how: str) -> list[Pair]:
    """The first tokens of a run that ends so."""
    pairs = [next(steps) for _ in range(count)]
    if how == "closed":
        steps.close()  # type: ignore[attr-defined]
    elif how == "dropped":
        del steps
        gc.collect()
    else:
        pairs += list(steps)
    return pairs


def assert_same_pairs(got: list[Pair], want: list[Pair]) -> None:
    assert [token for token, _ in got] == [token for token, _ in want]
    for (_, mine), (_, stocks) in zip(got, want, strict=True):
        assert_same_bits(mine, stocks, "log-probabilities")


def trimmed(cache: list[Any], folder: Path) -> list[Any]:
    if can_trim_prompt_cache(cache):
        assert trim_prompt_cache(cache, 3) == 3
    return cache


def copied(cache: list[Any], folder: Path) -> list[Any]:
    return copy.deepcopy(cache)


def saved(cache: list[Any], folder: Path) -> list[Any]:
    path = str(folder / f"{len(list(folder.iterdir()))}.safetensors")
    save_prompt_cache(path, cache)
    loaded: list[Any] = load_prompt_cache(path)
    return loaded


ACTIONS = {"trimmed": trimmed, "copied": copied, "saved and loaded": saved}


@pytest.mark.part(3)
@pytest.mark.parametrize("mix", KINDS)
@pytest.mark.parametrize("mode", ["plain", "ngram", "alternating"])
@pytest.mark.parametrize("ending", ["closed", "dropped", "spent"])
@pytest.mark.parametrize("action", ACTIONS)
def test_a_cache_left_by_a_run_serves_as_mlx_lms_does(
    mix: str, mode: str, ending: str, action: str, tmp_path: Path
) -> None:
    made = MIXES[mix]
    budget = TAKEN if ending == "spent" else -1
    results = []
    for decode in (ours(mode, mix), stock_generate_step):
        given: dict[str, Any] = {"prompt_cache": made.new_cache(), **made.warm_kv}
        first = take(decode(mx.array(PROMPT), made.model(), max_tokens=budget, **given), TAKEN, ending)
        cache = ACTIONS[action](given["prompt_cache"], tmp_path)
        step = mx.array([first[-1][0]])
        later = {**given, "prompt_cache": cache, "max_tokens": CONTINUED}
        results.append((first + list(decode(step, made.model(), **later)), cache))
    (got, mine), (want, stocks) = results
    assert_same_pairs(got, want)
    assert_same_cache(mine, stocks)


@pytest.mark.part(3)
@pytest.mark.parametrize("mix", KINDS)
@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("ending", ["closed", "dropped", "never"])
def test_a_cache_of_a_live_plain_run_is_the_callers(mix: str, action: str, ending: str, tmp_path: Path) -> None:
    """Two tokens are taken, the cache is used, and only then the run that made it ends, or never does."""
    made = MIXES[mix]
    results = []
    for decode in (generate_step, stock_generate_step):
        given: dict[str, Any] = {"prompt_cache": made.new_cache(), **made.warm_kv}
        live = decode(mx.array(PROMPT), made.model(), max_tokens=20, **given)
        first = [next(live) for _ in range(2)]
        cache = ACTIONS[action](given["prompt_cache"], tmp_path)
        later = {**given, "prompt_cache": cache, "max_tokens": CONTINUED}
        second = list(decode(mx.array([first[-1][0]]), made.model(), **later))
        if ending != "never":
            take(live, 0, ending)
        results.append((first + second, cache))
    (got, mine), (want, stocks) = results
    assert_same_pairs(got, want)
    assert_same_cache(mine, stocks)


@pytest.mark.part(2)
@pytest.mark.parametrize("mode", ["plain", "ngram", "alternating"])
@pytest.mark.parametrize("mix", ["dense", "sliding", "hybrid"])
def test_caches_of_two_runs_merge_as_mlx_lms_do(mix: str, mode: str) -> None:
    made = MIXES[mix]
    merged = []
    for decode in (ours(mode, mix), stock_generate_step):
        caches = [made.new_cache(), made.new_cache()]
        for cache, prompt in zip(caches, (PROMPT, PROMPT[:4]), strict=True):
            steps = decode(mx.array(prompt), made.model(), max_tokens=-1, prompt_cache=cache)
            take(steps, TAKEN, "closed")
        merged.append([layers[0].merge(list(layers)) for layers in zip(*caches, strict=True)])
    got, want = merged
    assert_same_cache(got, want)


@pytest.mark.part(2)
@pytest.mark.parametrize("mode", ["plain", "ngram", "alternating"])
@pytest.mark.parametrize("mix", ["dense", "quantized_from_20", "cache_list"])
def test_a_prompt_read_by_taking_one_token_is_gone_back_to(mix: str, mode: str) -> None:
    """A token is taken and its run forgotten, two more are taken by a second run, and all three are trimmed off."""
    made = MIXES[mix]
    results = []
    for decode in (ours(mode, mix), stock_generate_step):
        given: dict[str, Any] = {"prompt_cache": made.new_cache(), **made.warm_kv}
        last, _ = next(decode(mx.array(PROMPT), made.model(), **given))
        second = take(decode(mx.array([last]), made.model(), **given), 2, "dropped")
        if can_trim_prompt_cache(given["prompt_cache"]):
            trim_prompt_cache(given["prompt_cache"], 3)
        third = take(decode(mx.array([last]), made.model(), **given), 2, "dropped")
        results.append((second + third, given["prompt_cache"]))
    (got, mine), (want, stocks) = results
    assert_same_pairs(got, want)
    assert_same_cache(mine, stocks)
