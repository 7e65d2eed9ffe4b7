"""One speculative run beside the stock run it must equal: choices of token, drafters by name, and the comparison."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.generate import generate_step
from mlx_lm.sample_utils import make_logits_processors, make_sampler

from mlx_spec.drafters import CallableDrafter, Drafter, NgramDrafter
from mlx_spec.drafters.standalone import StandaloneDrafter
from mlx_spec.generate import speculative_generate_step
from mlx_spec.stats import Statistics
from tests.bits import independent_array
from tests.oracle import OracleRun, RngKey, assert_same_output, independent_copy, rng_key
from tests.same_cache import assert_same_cache
from tests.scripted import (
    AlternatingDrafter,
    CyclingDrafter,
    FewerDrafter,
    OutOfRangeDrafter,
    RaisingDrafter,
    RandomDrafter,
    RightDrafter,
    WrongCountDrafter,
    WrongDrafter,
)
from tests.tiny import LONG, MIXES, PROMPT, VOCAB, Mix
from tests.tiny_eagle import planted_drafter, random_drafter

SPARE = 9
"""Tokens a stock run goes on past `LONG`, so that a right drafter knows what to propose to the very end."""

SEED = 11


class MoodySampler:
    """Hides state: most calls take the likeliest token, every third one draws, every fifth takes the second best."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, logprobs: mx.array) -> mx.array:
        self.calls += 1
        if self.calls % 3 == 0:
            return mx.random.categorical(logprobs)
        if self.calls % 5 == 0:
            return mx.argsort(logprobs, axis=-1)[:, -2]
        return mx.argmax(logprobs, axis=-1)


class MoodyProcessor:
    """Hides state: what it adds depends on how often it was called and on every id it was ever shown."""

    def __init__(self) -> None:
        self.calls = 0
        self.seen = 0

    def __call__(self, ids: mx.array, logits: mx.array) -> mx.array:
        self.calls += 1
        self.seen += sum(ids.tolist())
        favoured = mx.arange(logits.shape[-1]) % (2 + (self.calls + self.seen) % 5) == 0
        return logits + favoured.astype(logits.dtype)


def penalties() -> list[Any]:
    """All four of mlx-lm's processors, with contexts shorter and longer than a block."""
    return make_logits_processors(
        logit_bias={4: 1.5, 9: -math.inf, 61: 0.5},
        repetition_penalty=1.3,
        repetition_context_size=9,
        presence_penalty=0.7,
        presence_context_size=3,
        frequency_penalty=0.4,
    )


CHOICES: Mapping[str, Callable[[], dict[str, Any]]] = {
    "greedy": dict,
    "top_p": lambda: {"sampler": make_sampler(temp=0.8, top_p=0.95)},
    "min_p": lambda: {"sampler": make_sampler(temp=1.1, min_p=0.05, min_tokens_to_keep=2)},
    "top_k": lambda: {"sampler": make_sampler(temp=0.9, top_k=13)},
    "xtc": lambda: {
        "sampler": make_sampler(temp=1.0, xtc_probability=0.5, xtc_threshold=0.1, xtc_special_tokens=[3, 90])
    },
    "penalties": lambda: {"logits_processors": penalties()},
    "repetition": lambda: {"logits_processors": make_logits_processors(repetition_penalty=1.8)},
    "sampled_penalties": lambda: {"sampler": make_sampler(temp=0.8, top_p=0.95), "logits_processors": penalties()},
    "opaque_sampler": lambda: {"sampler": MoodySampler()},
    "opaque_processor": lambda: {"logits_processors": [*penalties(), MoodyProcessor()]},
    "opaque_both": lambda: {"sampler": MoodySampler(), "logits_processors": [MoodyProcessor()]},
}
"""How a token is chosen: keyword arguments of `generate_step`, made for each run, since callables may remember."""

PREFILLS: Mapping[str, int] = {"whole": 2048, "chunks": 3, "ragged": 4}
"""`prefill_step_size` by name: the six tokens before the prompt's last as 6, 3 + 3 and 4 + 2."""

WIDTHS = (2, 3, 5, 8)


def _callable_drafter(right: Sequence[int]) -> Drafter:
    """Counts the ids it is shown to find its place, and misses every fourth token of the text."""

    def propose(ids: list[int], count: int) -> list[int]:
        start = len(ids) - len(PROMPT)
        return [(right[i] + (i % 4 == 0)) % VOCAB for i in range(start, start + count)] if len(ids) % 5 else []

    return CallableDrafter(propose)


Make = Callable[[str, Sequence[int], mx.Dtype], Drafter]

DRAFTERS: Mapping[str, Make] = {
    "right": lambda mix, right, dtype: RightDrafter(right, VOCAB),
    "wrong": lambda mix, right, dtype: WrongDrafter(right, VOCAB),
    "alternating": lambda mix, right, dtype: AlternatingDrafter(right, VOCAB),
    "cycling": lambda mix, right, dtype: CyclingDrafter(right, VOCAB, (0, 1, 2, 3, 4, 5, 6, 7)),
    "random": lambda mix, right, dtype: RandomDrafter(right, VOCAB, seed=2),
    "raising": lambda mix, right, dtype: RaisingDrafter(right, VOCAB, "propose"),
    "raising_once": lambda mix, right, dtype: RaisingDrafter(right, VOCAB, "propose", 2),
    "out_of_range": lambda mix, right, dtype: OutOfRangeDrafter(right, VOCAB),
    "too_many": lambda mix, right, dtype: WrongCountDrafter(right, VOCAB, 1),
    "too_few": lambda mix, right, dtype: WrongCountDrafter(right, VOCAB, -1),
    "fewer": lambda mix, right, dtype: FewerDrafter(right, VOCAB),
    "callable": lambda mix, right, dtype: _callable_drafter(right),
    "ngram": lambda mix, right, dtype: NgramDrafter(min_ngram=1, max_ngram=3),
    "eagle3_random": lambda mix, right, dtype: random_drafter(mix, dtype),
    "eagle3": lambda mix, right, dtype: planted_drafter(mix, dtype),
    "standalone": lambda mix, right, dtype: StandaloneDrafter(MIXES[mix].model(dtype)),
}
"""Drafter by name, for a mix, given the right continuation."""

NEVER_RIGHT = ("wrong", "raising", "too_many", "too_few")
SOMETIMES_RIGHT = ("alternating", "random", "out_of_range", "fewer", "callable", "raising_once")


def record_stock(
    mix: Mix, emitted: int, keep: Collection[int], dtype: mx.Dtype = mx.float32, **options: Any
) -> OracleRun:
    """The stock run, its cache kept after the lengths in `keep` alone: to copy it after each token takes longest.

    Args:
        options: keyword arguments of mlx-lm's `generate_step`, and `prompt` if it is not `PROMPT`.
    """
    prompt = options.pop("prompt", PROMPT)
    cache, ids, rows, rng, kept = mix.new_cache(dtype), [], [], {}, {}
    mx.random.seed(SEED)
    steps = generate_step(
        mx.array(prompt), mix.model(dtype), max_tokens=emitted, prompt_cache=cache, **mix.warm_kv, **options
    )
    for token, logprobs in steps:
        ids.append(token)
        rows.append(independent_array(logprobs))
        rng[len(ids)] = rng_key()
        if len(ids) in keep:
            kept[len(ids)] = independent_copy(cache)
    return OracleRun(tuple(prompt), tuple(ids), tuple(rows), rng, kept)


@functools.cache
def stock(mix: str, choice: str, prefill: int = 2048, dtype: mx.Dtype = mx.float32) -> OracleRun:
    """The stock run after `PROMPT`, `SPARE` tokens longer than `LONG`, its cache kept after `LONG` tokens alone."""
    return record_stock(MIXES[mix], LONG + SPARE, {LONG}, dtype, prefill_step_size=prefill, **CHOICES[choice]())


@dataclass
class SpeculativeRun:
    """What one of our runs handed out and left behind.

    Attributes:
        tokens: (id, [V] log-probabilities, from_draft).
        cache: the caller's prompt cache afterwards.
        rng: the random key afterwards.
    """

    tokens: list[tuple[int, mx.array, bool]]
    cache: list[Any]
    rng: RngKey
    statistics: Statistics

    @property
    def pairs(self) -> list[tuple[int, mx.array]]:
        return [(token, logprobs) for token, logprobs, _ in self.tokens]

    @property
    def ids(self) -> list[int]:
        return [token for token, _, _ in self.tokens]

    @property
    def drafted(self) -> int:
        """Tokens that had been proposed."""
        return sum(from_draft for _, _, from_draft in self.tokens)


def speculate(
    mix: Mix, drafter: Drafter | str | None, stop_after: int | None = None, dtype: mx.Dtype = mx.float32, **options: Any
) -> SpeculativeRun:
    """Run ours on an empty cache, or on `prompt_cache`; closed after `stop_after` tokens, otherwise to its own end.

    Args:
        options: keyword arguments of `speculative_generate_step`, and `prompt` if it is not `PROMPT`.
    """
    mx.random.seed(SEED)
    cache = options.pop("prompt_cache", None) or mix.new_cache(dtype)
    statistics = Statistics()
    steps = speculative_generate_step(
        mx.array(options.pop("prompt", PROMPT)),
        mix.model(dtype),
        drafter,
        prompt_cache=cache,
        statistics=statistics,
        **mix.warm_kv,
        **options,
    )
    tokens = list(itertools.islice(steps, stop_after))
    steps.close()
    return SpeculativeRun(tokens, cache, rng_key(), statistics)


def assert_equals_stock(got: SpeculativeRun, run: OracleRun, emitted: int) -> None:
    """Ids, log-probabilities, cache and random state are those of the stock run after `emitted` tokens."""
    assert_same_output(got.pairs, run, emitted)
    assert_same_cache(got.cache, run.cache_after(emitted))
    assert got.rng == run.rng[emitted], f"random key {got.rng}, want {run.rng[emitted]} after {emitted} tokens"


def assert_counts_add_up(got: SpeculativeRun) -> None:
    """The statistics count what was handed out, and every token came from the drafter or from the target."""
    counted = got.statistics
    assert counted.emitted_tokens == len(got.tokens)
    assert counted.accepted_tokens == got.drafted
    assert sum(counted.accepted_by_depth) == counted.accepted_tokens <= counted.proposed_tokens
    assert sum(counted.proposed_by_depth) == counted.proposed_tokens


def assert_accepts_as_scripted(got: SpeculativeRun, drafter: str, width: int) -> None:
    """A drafter's being right shows in the counts; `LONG` tokens, and no cache to be converted on the way."""
    if drafter == "right":
        # The first token comes with the prompt; after it every round adds one token of the target's own.
        own = 1 + -(-(LONG - 1) // width)
        assert got.drafted == LONG - own, f"{got.drafted} proposals accepted, want {LONG - own}"
    if drafter in NEVER_RIGHT:
        assert got.drafted == 0, f"{drafter}: {got.drafted} proposals accepted"
    if drafter in SOMETIMES_RIGHT:
        assert 0 < got.drafted < LONG - -(-LONG // width), f"{drafter}: {got.drafted} proposals accepted"
