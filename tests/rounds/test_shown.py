"""What a drafter is shown: every committed token once, in order, with the target's own hidden states."""

from __future__ import annotations

import functools

import mlx.core as mx
import pytest

from mlx_spec.model.target import Target
from tests.bits import assert_same_bits, independent_array
from tests.rounds.runs import CHOICES, DRAFTERS, PREFILLS, SpeculativeRun, assert_equals_stock, speculate, stock
from tests.scripted import RecordingDrafter, TappingDrafter
from tests.tiny import LONG, MIXES, PROMPT, REQUIRED, VOCAB

MIXES_WITH_STATE = (*REQUIRED, "mla_moe", "cache_list")


@functools.cache
def stock_states(mix: str, step: int, taps: tuple[int, ...]) -> mx.array:
    """[1, n, K*H] outputs of these layers over the prompt and the greedy text, read as the stock loop reads them."""
    target, run, cache = Target(MIXES[mix].model()), stock(mix, "greedy", step), MIXES[mix].new_cache()
    kv = MIXES[mix].kv
    target.attach_taps(taps)
    chunks = [list(PROMPT[i : min(i + step, len(PROMPT) - 1)]) for i in range(0, len(PROMPT) - 1, step)]
    rows = []
    for chunk in [*chunks, [PROMPT[-1]], *([token] for token in run.ids[:LONG])]:
        hidden = target.forward(mx.array([chunk]), cache, taps).hidden
        assert hidden is not None
        rows.append(independent_array(hidden))
        for layer, held in enumerate(cache):
            if "kv_bits" in kv and hasattr(held, "to_quantized") and held.offset >= kv["quantized_kv_start"]:
                cache[layer] = held.to_quantized(group_size=kv["kv_group_size"], bits=kv["kv_bits"])
    return mx.concatenate(rows, axis=1)


class Tapping(TappingDrafter):
    """Served by the loop that hands hidden states on; right, but every second round misses at some depth."""

    kind = "eagle3"

    def script(self, state: object, row: int, count: int) -> list[int]:
        proposals = super().script(state, row, count)
        miss = state.round % (count + 2)  # type: ignore[attr-defined]
        return [token + (i == miss) for i, token in enumerate(proposals)]


def run_tapping(mix: str, width: int, step: int) -> tuple[Tapping, SpeculativeRun]:
    run = stock(mix, "greedy", step)
    drafter = Tapping(run.ids, VOCAB, taps=(0, len(MIXES[mix].model().layers) - 1))
    got = speculate(MIXES[mix], drafter, max_tokens=LONG, draft_block_size=width, prefill_step_size=step)
    assert_equals_stock(got, run, LONG)
    return drafter, got


@pytest.mark.part(4)
@pytest.mark.slow
@pytest.mark.parametrize("step", PREFILLS.values(), ids=PREFILLS.keys())
@pytest.mark.parametrize("mix", MIXES_WITH_STATE)
def test_hidden_states_are_the_one_token_loops(mix: str, step: int) -> None:
    drafter, got = run_tapping(mix, 5, step)
    (state,) = drafter.states
    shown = len(state.ids[0])
    assert state.ids[0] == [*PROMPT, *got.ids][:shown]
    assert shown >= len(PROMPT) + LONG - 5, "rounds went by without the drafter being told"
    assert_same_bits(state.hidden, stock_states(mix, step, drafter.taps)[:, :shown], f"hidden states of {mix}")


@pytest.mark.parametrize("drafter", ["right", "cycling", "random", "fewer", "raising", "ngram", "eagle3"])
@pytest.mark.parametrize(
    ("mix", "choice"), [("dense", "sampled_penalties"), ("sliding", "greedy"), ("quantized_from_20", "opaque_both")]
)
def test_every_token_is_shown_once_and_in_order(mix: str, drafter: str, choice: str) -> None:
    run = stock(mix, choice, 4)
    recording = RecordingDrafter(DRAFTERS[drafter](mix, run.ids, mx.float32))
    options = {"draft_block_size": 5, "prefill_step_size": 4}
    got = speculate(MIXES[mix], recording, max_tokens=LONG, **options, **CHOICES[choice]())
    recording.log.assert_fed_exactly(PROMPT, run.ids)
    assert [len(ids[0]) for ids in recording.log.of("read_prompt")] == [4, 2, 1]
    assert all(1 <= count < 5 for _, count in recording.log.of("propose"))
    assert got.statistics.emitted_tokens == LONG


def test_drafter_without_taps_is_shown_no_hidden_states() -> None:
    recording = RecordingDrafter(DRAFTERS["alternating"]("dense", stock("dense", "greedy").ids, mx.float32))
    speculate(MIXES["dense"], recording, max_tokens=20, draft_block_size=5)
    assert set(recording.log.hidden_shapes) == {None}
