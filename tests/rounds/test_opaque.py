"""A sampler or processor that may hide state sees the stock loop's calls: same ids, same numbers, no more, no less."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step as stock_generate_step

from tests.bits import bits
from tests.rounds.runs import DRAFTERS, SEED, MoodyProcessor, MoodySampler, speculate
from tests.tiny import MIXES, PROMPT

WIDTH = 5
LONGEST = 12


class Diary:
    """Wraps callables and writes down what each is given, in one common order."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def kept(self, name: str, inner: Callable[..., mx.array]) -> Callable[..., mx.array]:
        def call(*given: mx.array) -> mx.array:
            self.calls.append((name, *((array.shape, bits(array).tobytes()) for array in given)))
            return inner(*given)

        return call


def callables(diary: Diary, kind: str) -> dict[str, Any]:
    """Fresh stateful callables that write into the diary."""
    sampler = {"sampler": diary.kept("sampler", MoodySampler())}
    processors = {
        "logits_processors": [diary.kept("first", MoodyProcessor()), diary.kept("second", MoodyProcessor())],
    }
    return {"sampler": sampler, "processors": processors, "both": {**sampler, **processors}}[kind]


@functools.cache
def stock_calls(mix: str, kind: str, length: int) -> tuple[list[tuple[Any, ...]], list[int]]:
    """The calls of a stock run closed after so many tokens, and the tokens."""
    diary = Diary()
    mx.random.seed(SEED)
    steps = stock_generate_step(
        mx.array(PROMPT), MIXES[mix].model(), max_tokens=-1, **callables(diary, kind), **MIXES[mix].kv
    )
    ids = [token for token, _ in itertools.islice(steps, length)]
    steps.close()
    return diary.calls, ids


def endings(ids: list[int]) -> dict[str, dict[str, Any]]:
    """Two ways to end after exactly these tokens: by closing, and by the end token at even lengths, else by budget."""
    other: dict[str, Any] = {"max_tokens": len(ids)}
    if len(ids) % 2 == 0 and ids[-1] not in ids[:-1]:
        other = {"max_tokens": LONGEST + 4, "eos_token_ids": [ids[-1]]}
    return {"closed": {"stop_after": len(ids), "max_tokens": -1}, f"ended by {other}": other}


@pytest.mark.part(2)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("mix", "drafter", "kind"),
    [
        *(("dense", drafter, "both") for drafter in ("none", "right", "cycling", "wrong", "eagle3")),
        *(("dense", "alternating", kind) for kind in ("sampler", "processors", "both")),
        *((mix, drafter, "both") for mix in ("sliding", "quantized_from_20") for drafter in ("none", "alternating")),
    ],
)
def test_stateful_callables_see_the_stock_calls_however_the_run_ends(mix: str, drafter: str, kind: str) -> None:
    right = stock_calls(mix, kind, LONGEST + 9)[1]
    made = None if drafter == "none" else DRAFTERS[drafter](mix, right, mx.float32)
    width = {} if drafter == "none" else {"draft_block_size": WIDTH}
    for length in range(1, LONGEST + 1, 1 if mix == "dense" else 5):
        calls, ids = stock_calls(mix, kind, length)
        for name, ending in endings(ids).items():
            diary = Diary()
            got = speculate(MIXES[mix], made, **width, **ending, **callables(diary, kind))
            assert got.ids == ids
            names = [call[0] for call in diary.calls]
            assert names == [call[0] for call in calls], f"{name} after {length} tokens"
            assert diary.calls == calls, f"{name} after {length} tokens: something else was shown"
            assert any("may hide state" in note for note in got.statistics.notes)


def test_diary_tells_one_call_or_one_bit_apart() -> None:
    calls, _ = stock_calls("dense", "both", 5)
    longer, _ = stock_calls("dense", "both", 6)
    assert [call[0] for call in calls] == ["first", "second", "sampler"] * 6
    assert longer[: len(calls)] == calls
    assert len(longer) == len(calls) + 3
    assert len({call[1:] for call in longer}) == len(longer)
