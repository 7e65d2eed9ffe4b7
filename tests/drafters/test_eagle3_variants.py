"""EAGLE-3 in every variant: the numbers of a computation by hand, and a state that follows the committed tokens."""

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from mlx_spec.drafters.eagle3.model import Eagle3Drafter
from mlx_spec.pairing import load_drafter
from tests.drafters.eagle3_by_hand import ByHand
from tests.drafters.eagle3_files import FOLDER
from tests.drafters.eagle3_made import HIDDEN, VARIANTS, made_config, made_tensors, target_of, write_made
from tests.drafters.parity import TOLERANCE
from tests.tiny import VOCAB

LENGTH, CHAIN = 7, 4


def loaded(folder: Path, variant: str) -> Eagle3Drafter:
    drafter = load_drafter(write_made(folder, variant), target_of(variant))
    assert isinstance(drafter, Eagle3Drafter)
    return drafter


def by_hand(variant: str) -> ByHand:
    table = np.array(target_of(variant).raw_embed(mx.arange(VOCAB)[None])[0], np.float64)
    return ByHand(made_config(variant), made_tensors(variant), table)


def text(variant: str, length: int, seed: int = 3) -> tuple[list[int], mx.array]:
    """Committed tokens and made-up tapped states for them, [1, length, K*H]."""
    rng = np.random.default_rng(seed)
    columns = VARIANTS[variant].taps * HIDDEN
    return rng.integers(0, VOCAB, length).tolist(), mx.array(rng.standard_normal((1, length, columns)), mx.float32)


def assert_close(got: mx.array, want: np.ndarray) -> None:
    difference = np.abs(np.array(got, np.float64) - want).max()
    assert difference <= TOLERANCE * max(1.0, np.abs(want).max()), f"differs by {difference:.3g}"


def test_the_computation_by_hand_gives_the_numbers_of_the_reference() -> None:
    expected = mx.load(str(FOLDER / "eagle31" / "golden.safetensors"))
    config = json.loads((FOLDER / "eagle31" / "config.json").read_text())
    flat = {**config, **config["transformer_layer_config"], "rope_theta": 1e4, "target_hidden_size": 32}
    tensors = mx.load(str(FOLDER / "eagle31" / "model.safetensors"))
    assert isinstance(tensors, dict)
    assert isinstance(expected, dict)
    hand = ByHand(flat, tensors, np.zeros((0, 0)))
    tokens = expected["token_ids"][0].tolist()
    for position in range(5):
        state = hand.step(tokens[position + 1], hand.fuse(np.array(expected["aux_hidden"][0, position], np.float64)))
        assert_close(expected["s0.logits"][0, position], hand.logits(state))
    for step in (1, 2):
        state = hand.step(tokens[position + 1 + step], hand.carry(state))
        assert_close(expected[f"s{step}.logits"][0, position], hand.logits(state))


@pytest.mark.parametrize("variant", VARIANTS)
def test_pairs_and_a_chain_give_the_numbers_by_hand(variant: str, tmp_path: Path) -> None:
    drafter, hand, target = loaded(tmp_path, variant), by_hand(variant), target_of(variant)
    ids, tapped = text(variant, LENGTH + 1)
    network, caches = drafter.network, drafter.network.new_caches()
    hidden = network.fuse(tapped[:, :LENGTH], target)
    states = network.run(mx.array([ids[1:]]), hidden, caches, 0, target)
    for position in range(LENGTH):
        fused = hand.fuse(np.array(tapped[0, position], np.float64))
        assert_close(hidden[0, position], fused)
        state = hand.step(ids[position + 1], fused)
        assert_close(states[0, position], state)
        assert_close(network.logits(states, target)[0, position], hand.logits(state))
    states = states[:, -1:]
    for token in (5, 17, 42, 8):
        states, state = (
            network.run(mx.array([[token]]), network.carry(states), caches, 0, target),
            hand.step(token, hand.carry(state)),
        )
        assert_close(network.logits(states, target)[0, 0], hand.logits(state))


@pytest.mark.parametrize("variant", VARIANTS)
def test_proposals_are_the_likeliest_tokens_by_hand(variant: str, tmp_path: Path) -> None:
    drafter, hand = loaded(tmp_path, variant), by_hand(variant)
    ids, tapped = text(variant, LENGTH)
    state = drafter.open(target_of(variant))
    state.read_prompt([ids], tapped)
    for token, row in zip([*ids[1:], 11], np.array(tapped[0], np.float64), strict=True):
        output = hand.step(token, hand.fuse(row))
    offsets = made_tensors(variant).get("d2t", mx.zeros((VOCAB,), mx.int64)).tolist()
    expected = []
    for _ in range(CHAIN):
        chosen = int(np.argmax(hand.logits(output)))
        expected.append(chosen + offsets[chosen])
        output = hand.step(expected[-1], hand.carry(output))
    assert state.propose([11], CHAIN).ids.tolist() == [expected]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("accepted", [0, 1, 3])
def test_catching_up_equals_a_cold_state_over_the_committed_tokens(variant: str, accepted: int, tmp_path: Path) -> None:
    drafter, target = loaded(tmp_path, variant), target_of(variant)
    ids, tapped = text(variant, 20)
    state = drafter.open(target, start=3)
    for begin, end in ((0, 1), (1, 4), (4, 6)):
        state.read_prompt([ids[begin:end]], tapped[:, begin:end])
    end = 6
    for parked in (False, True, False):
        if not parked:
            state.propose([ids[end]], 3)
        state.catch_up([ids[end : end + 1 + accepted]], tapped[:, end : end + 1 + accepted])
        end += 1 + accepted
    cold = drafter.open(target, start=3)
    cold.read_prompt([ids[:end]], tapped[:, :end])
    assert state.propose([7], 4).ids.tolist() == cold.propose([7], 4).ids.tolist()
    for one in (state, cold):
        # What is pending is run with the next token that is read.
        one.read_prompt([[7]], tapped[:, end : end + 1])
    caches = [one.cache_tree([])["draft"] for one in (state, cold)]
    assert len(caches[0]) == drafter.config.num_hidden_layers
    for ours, theirs in zip(*caches, strict=True):
        assert ours.offset == theirs.offset == end
        for left, right in ((ours.keys, theirs.keys), (ours.values, theirs.values)):
            assert mx.abs(left[..., :end, :] - right[..., :end, :]).max().item() < TOLERANCE


@pytest.mark.parametrize("variant", VARIANTS)
def test_drafted_tokens_leave_no_bit_behind(variant: str, tmp_path: Path) -> None:
    drafter, (ids, tapped) = loaded(tmp_path, variant), text(variant, 20)
    kept = []
    # The same pairs in calls of the same shapes: only what is drafted past them differs.
    for count in (1, 4):
        state, end = drafter.open(target_of(variant)), 6
        state.read_prompt([ids[:end]], tapped[:, :end])
        for retained in (1, 3, 5):
            state.propose([ids[end]], count)
            state.catch_up([ids[end : end + retained]], tapped[:, end : end + retained])
            end += retained
        state.propose([ids[end]], 1)
        state.read_prompt([ids[end : end + 1]], tapped[:, end : end + 1])
        caches = state.cache_tree([])["draft"]
        assert all(cache.offset == end for cache in caches)
        kept.append([rows[..., :end, :] for cache in caches for rows in (cache.keys, cache.values)])
    for one, other in zip(*kept, strict=True):
        assert mx.array_equal(one, other)


def test_the_width_is_what_the_drafter_was_trained_for_where_its_file_says_so(tmp_path: Path) -> None:
    assert loaded(tmp_path / "seven", "five_taps").default_width == 8
    assert loaded(tmp_path / "silent", "llama").default_width == 3
