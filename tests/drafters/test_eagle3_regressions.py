"""Faults that other libraries had with EAGLE-3 drafters, each once: what would be wrong here if we had it too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_spec.errors import CheckpointError, MlxSpecError
from mlx_spec.pairing import load_drafter
from tests.drafters.eagle3_made import HIDDEN, Tensors, made_target, made_tensors, target_of, write_made
from tests.drafters.test_eagle3_variants import by_hand, text
from tests.rounds.runs import assert_equals_stock, speculate, stock
from tests.tiny import LONG, MIXES, VOCAB
from tests.tiny_eagle import planted_drafter


def logits(folder: Path, variant: str) -> mx.array:
    """Of the last of six pairs."""
    drafter: Any = load_drafter(folder, target_of(variant))
    ids, tapped = text(variant, 6)
    network, target = drafter.network, target_of(variant)
    states = network.run(mx.array([ids]), network.fuse(tapped, target), network.new_caches(), 0, target)
    return network.logits(states[:, -1:], target)


def differ(one: mx.array, other: mx.array) -> bool:
    return mx.abs(one - other).max().item() > 1e-3


@pytest.mark.parametrize("name", ["q_norm", "k_norm"])
def test_norms_of_queries_and_keys_are_not_dropped(name: str, tmp_path: Path) -> None:
    def louder(content: Tensors) -> None:
        content[f"layers.0.self_attn.{name}.weight"] *= 4

    assert differ(
        logits(write_made(tmp_path, "qwen3"), "qwen3"),
        logits(write_made(tmp_path, "qwen3", edit_tensors=louder), "qwen3"),
    )


@pytest.mark.parametrize(
    "key",
    [
        {"rope_scaling": {"type": "linear", "factor": 8.0}},
        {"partial_rotary_factor": 0.5},
        {"rope_theta": 10.0},
    ],
)
def test_scaled_and_partial_rotation_is_not_ignored(key: dict[str, Any], tmp_path: Path) -> None:
    plain = logits(write_made(tmp_path, "llama"), "llama")
    assert differ(plain, logits(write_made(tmp_path, "llama", lambda content: content.update(key)), "llama"))


def test_the_usual_layers_follow_from_the_depth_of_the_target_and_not_of_the_drafter(tmp_path: Path) -> None:
    folder = write_made(tmp_path, "two_layers", lambda content: content.pop("target_layer_ids"))
    for layers, taps in ((8, (1, 3, 4)), (12, (1, 5, 8)), (30, (1, 14, 26))):
        with pytest.warns(UserWarning, match="does not list the target layers"):
            assert load_drafter(folder, made_target(layers=layers)).taps == taps


def test_a_normalised_output_is_fed_back_where_the_drafter_was_trained_so(tmp_path: Path) -> None:
    network: Any = load_drafter(write_made(tmp_path, "eagle31"), target_of("eagle31")).network
    states = 5 * mx.random.normal((1, 1, HIDDEN))
    assert mx.array_equal(network.carry(states), network.modules.norm(states))
    plain: Any = load_drafter(write_made(tmp_path, "llama"), target_of("llama")).network
    assert mx.array_equal(plain.carry(states), states)


def test_the_first_proposal_pairs_the_bonus_with_the_prompts_last_state_however_the_prompt_was_cut(
    tmp_path: Path,
) -> None:
    drafter, hand = load_drafter(write_made(tmp_path, "llama"), target_of("llama")), by_hand("llama")
    ids, tapped = text("llama", 7)
    for token, row in zip([*ids[1:], 11], np.array(tapped[0], np.float64), strict=True):
        output = hand.step(token, hand.fuse(row))
    chosen = int(np.argmax(hand.logits(output)))
    expected = chosen + made_tensors("llama")["d2t"][chosen].item()
    for cuts in ((7,), (1, 6), (3, 3, 1), (1,) * 7):
        state, begin = drafter.open(target_of("llama")), 0
        for length in cuts:
            state.read_prompt([ids[begin : begin + length]], tapped[:, begin : begin + length])
            begin += length
        assert state.propose([11], 1).ids.tolist() == [[expected]]


def test_a_borrowed_head_is_the_targets_head_and_not_its_embedding(tmp_path: Path) -> None:
    def headless(content: Tensors) -> None:
        del content["lm_head.weight"], content["d2t"]

    folder = write_made(tmp_path, "llama", lambda content: content.pop("draft_vocab_size"), headless)
    target, states = target_of("llama"), mx.random.normal((1, 1, HIDDEN))
    network: Any = load_drafter(folder, target).network
    normed = network.modules.norm(states)
    assert mx.array_equal(network.logits(states, target), target.head(normed))
    assert differ(network.logits(states, target), normed @ target.model.model.embed_tokens.weight.T)


def test_a_reduced_vocabulary_never_keeps_the_target_from_its_own_choice() -> None:
    drafter: Any = planted_drafter("dense")
    run = stock("dense", "greedy")
    got = speculate(MIXES["dense"], drafter, draft_block_size=3, max_tokens=LONG)
    assert_equals_stock(got, run, LONG)
    assert got.drafted > 0
    reachable = set(drafter.network.target_ids.tolist())
    assert len(reachable) < VOCAB
    assert set(got.ids) - reachable


def test_a_head_of_the_older_kind_is_not_run_as_an_eagle3_drafter(tmp_path: Path) -> None:
    # It reads one state beside the embedding, and has neither the norm of that state nor pairs in its attention.
    def older(content: Tensors) -> None:
        content["fc.weight"] = mx.zeros((HIDDEN, 2 * HIDDEN))
        del content["layers.0.hidden_norm.weight"]

    folder = write_made(tmp_path, "llama", lambda content: content.pop("target_layer_ids"), older)
    with pytest.raises(CheckpointError, match="does not list the target layers"):
        load_drafter(folder, target_of("llama"))
    with pytest.raises(CheckpointError, match=r"hidden_norm\.weight is missing"):
        load_drafter(folder, target_of("llama"), taps=(1, 3))


def test_a_mismatched_pair_is_refused_at_load_with_both_sizes(tmp_path: Path) -> None:
    folder = write_made(tmp_path, "llama", lambda content: content.update(target_hidden_size=48))
    with pytest.raises(MlxSpecError) as refused:
        load_drafter(folder, target_of("llama"))
    assert "48" in str(refused.value) or "144" in str(refused.value)
    assert str(HIDDEN) in str(refused.value) or str(3 * HIDDEN) in str(refused.value)


def test_a_nested_file_without_norm_before_residual_is_not_guessed(tmp_path: Path) -> None:
    def nested(content: dict[str, Any]) -> None:
        around = {"speculators_model_type": "eagle3", "target_layer_ids": content.pop("target_layer_ids")}
        around["draft_vocab_size"] = content.pop("draft_vocab_size")
        inner = dict(content)
        content.clear()
        content.update(around, transformer_layer_config=inner)

    with pytest.raises(CheckpointError, match="lacks norm_before_residual. It is not guessed"):
        load_drafter(write_made(tmp_path, "llama", nested), target_of("llama"))


def test_a_window_of_no_rows_is_no_window_and_any_other_is_refused(tmp_path: Path) -> None:
    off = write_made(tmp_path, "llama", lambda content: content.update(sliding_window=0))
    assert load_drafter(off, target_of("llama")).kind == "eagle3"
    with pytest.raises(CheckpointError, match="sliding_window=4096"):
        load_drafter(
            write_made(tmp_path, "llama", lambda content: content.update(sliding_window=4096)), target_of("llama")
        )
