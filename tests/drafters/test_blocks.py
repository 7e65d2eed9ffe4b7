"""Block drafters: what they keep, what a round costs, and equations that no golden file covers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import mlx.core as mx
import numpy as np
import pytest

from mlx_spec.drafters.dflash.layers import DraftLayer
from mlx_spec.drafters.dflash.model import BlockDrafter, BlockNetwork
from mlx_spec.drafters.dflash.state import GROWTH, PENDING_LIMIT, BlockState, Context, ContextRows
from mlx_spec.errors import InvalidRequest, UnsupportedOption
from tests.drafters.block_by_hand import LayerByHand, recurrent_head
from tests.drafters.block_files import FOLDERS, HIDDEN, Config, Tensors, cold, drafter, edited, target, tensors, text
from tests.host_reads import count_host_reads

TOLERANCE = 1e-5
NAMES = tuple(FOLDERS)


def ordered(context: Context | None) -> list[mx.array]:
    """Keys and values by position, whatever their order in the buffer."""
    assert context is not None
    order = mx.argsort(context.positions)
    return [context.keys[:, :, order], context.values[:, :, order], context.positions[order]]


def assert_right(source: BlockDrafter, state: BlockState, ids: list[int], hidden: mx.array) -> None:
    """It is what a state is that reads the text at once."""
    other, count = cold(source, ids, hidden), source.proposals
    assert state.propose([7], count).ids.tolist() == other.propose([7], count).ids.tolist()
    assert state.position == other.position
    for left, right in zip(state.contexts, other.contexts, strict=True):
        for mine, theirs in zip(ordered(left), ordered(right), strict=True):
            assert mine.shape == theirs.shape
            assert mx.abs(mine - theirs).max().item() < TOLERANCE


# What the state keeps


@pytest.mark.parametrize("name", NAMES)
def test_after_every_round_the_state_is_that_of_a_drafter_that_read_the_text_at_once(name: str) -> None:
    source = drafter(name)
    ids, hidden = text(64, source)
    state, read = source.open(target()), 0
    # 13 rows exceed every window, then one row at a time, then more than a window at once.
    for count in (13, 1, 1, 3, 1, 4, 1, 1, 2, 1, 20, 1, 1):
        take = state.read_prompt if read == 0 else state.catch_up
        take([ids[read : read + count]], hidden[:, read : read + count])
        read += count
        assert_right(source, state, ids[:read], hidden[:, :read])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("sizes", [(50,), (7,) * 8, (1,) * 50])
def test_a_prompt_is_the_same_context_in_whatever_chunks_it_comes(name: str, sizes: tuple[int, ...]) -> None:
    source = drafter(name)
    ids, hidden = text(50, source)
    state, read = source.open(target()), 0
    for size in sizes:
        state.read_prompt([ids[read : read + size]], hidden[:, read : read + size])
        assert state.pending == 0
        read += size
    assert_right(source, state, ids, hidden)


@pytest.mark.parametrize("name", ["dflash_sliding", "muse_glimmer_assistant", "dflash"])
def test_one_row_after_a_window_has_wrapped_is_where_its_position_says(name: str) -> None:
    # The known bug: a ring's in-place write leaves the buffer out of order, and a mask that assumes order is wrong.
    source = drafter(name)
    ids, hidden = text(40, source)
    state = source.open(target())
    state.read_prompt([ids[:30]], hidden[:, :30])
    for index in range(30, 40):
        state.catch_up([ids[index : index + 1]], hidden[:, index : index + 1])
        state.flush()
        for layer, context in zip(source.network.layers, state.contexts, strict=True):
            reach = layer.sight.reach
            first = 0 if reach is None else index + 1 - reach
            assert context is not None
            assert sorted(context.positions.tolist()) == list(range(first, index + 1))
    assert_right(source, state, ids, hidden)


@pytest.mark.parametrize("name", NAMES)
def test_a_mask_comes_from_positions_and_not_from_the_order_of_a_buffer(name: str) -> None:
    source = drafter(name)
    state = cold(source, *text(30, source))
    shuffled = []
    for seed, context in enumerate(state.contexts):
        assert context is not None
        order = mx.array(np.random.default_rng(seed).permutation(context.positions.size))
        shuffled.append(Context(context.keys[:, :, order], context.values[:, :, order], context.positions[order]))
    block = mx.random.normal((1, 5, HIDDEN))
    straight = source.network.run(block, state.contexts, state.position)
    assert mx.abs(straight - source.network.run(block, shuffled, state.position)).max().item() < TOLERANCE


@pytest.mark.parametrize("name", NAMES)
def test_a_proposal_leaves_nothing_behind_and_can_be_repeated(name: str) -> None:
    source = drafter(name)
    ids, hidden = text(20, source)
    state = cold(source, ids, hidden)
    first = state.propose([7], 3).ids.tolist()
    state.propose([9], source.proposals)
    state.abort()
    state.abort()
    assert state.propose([7], 3).ids.tolist() == first
    assert_right(source, state, ids, hidden)


def test_a_window_keeps_what_the_next_block_can_see_and_no_more() -> None:
    source = drafter("dflash_sliding")
    ids, hidden = text(1000, source)
    state = source.open(target())
    for start in range(0, 1000, 250):
        state.read_prompt([ids[start : start + 250]], hidden[:, start : start + 250])
        mx.eval(state.arrays())
    sliding, full = (context.keys.shape[2] for context in state.contexts if context is not None)
    assert (sliding, full) == (7, 1000)
    width = source.config.num_key_value_heads * source.config.head_dim
    numbers = sum(array.size for array in state.arrays())
    assert numbers == (7 + -(-1000 // GROWTH) * GROWTH) * (2 * width + 1)


def test_a_parked_drafter_keeps_few_rows_and_then_catches_up_at_once() -> None:
    source = drafter("dflash_sliding")
    ids, hidden = text(3 * PENDING_LIMIT, source)
    state, most = source.open(target()), 0
    state.read_prompt([ids[:5]], hidden[:, :5])
    for index in range(5, len(ids)):
        state.catch_up([ids[index : index + 1]], hidden[:, index : index + 1])
        most = max(most, state.pending)
    assert most == PENDING_LIMIT
    assert_right(source, state, ids, hidden)


def test_positions_start_where_the_cache_stood() -> None:
    source = drafter("dflash_sliding")
    ids, hidden = text(12, source)
    state = cold(source, ids, hidden, start=100)
    assert state.position == 112
    context = state.contexts[1]
    assert context is not None
    assert context.positions.tolist() == list(range(100, 112))
    # Rotary positions are relative, so the same text elsewhere drafts the same.
    assert state.propose([7], 4).ids.tolist() == cold(source, ids, hidden).propose([7], 4).ids.tolist()


def test_several_rows_are_drafted_as_each_alone() -> None:
    for name in NAMES:
        source = drafter(name)
        (ids, hidden), (others, theirs) = text(14, source, 1), text(14, source, 2)
        both = source.open(target())
        both.read_prompt([ids, others], mx.concatenate([hidden, theirs]))
        alone = [cold(source, ids, hidden).propose([7], 3).ids, cold(source, others, theirs).propose([9], 3).ids]
        assert both.propose([7, 9], 3).ids.tolist() == mx.concatenate(alone).tolist()


@pytest.mark.parametrize("shape", [(1, 3, 63), (1, 2, 64), (2, 3, 64), (3, 64), None])
def test_states_of_another_shape_are_refused(shape: tuple[int, ...] | None) -> None:
    state = drafter("dflash").open(target())
    with pytest.raises(ValueError, match=r"expected \[B, T, 64\]"):
        state.read_prompt([[1, 2, 3]], None if shape is None else mx.zeros(shape))


def test_a_failure_while_appending_leaves_every_layer_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    source = drafter("dflash")
    ids, hidden = text(9, source)
    state = cold(source, ids[:8], hidden[:, :8])
    original, calls = DraftLayer.context, []

    def failing(layer: DraftLayer, *args: Any) -> Context:
        calls.append(layer)
        if len(calls) == 2:
            raise RuntimeError("no memory")
        return original(layer, *args)

    with monkeypatch.context() as patched:
        patched.setattr(DraftLayer, "context", failing)
        with pytest.raises(RuntimeError, match="no memory"):
            state.read_prompt([ids[8:]], hidden[:, 8:])
    assert [context.keys.shape[2] for context in state.contexts if context is not None] == [8, 8]
    assert_right(source, state, ids, hidden)


# What a round costs


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("count", [1, 3])
def test_a_round_is_one_forward_over_as_many_rows_as_it_needs_and_reads_no_host(name: str, count: int) -> None:
    source = drafter(name)
    state = cold(source, *text(20, source))
    ran: list[int] = []
    original = BlockNetwork.run

    def counting(network: BlockNetwork, embedded: mx.array, *args: Any) -> mx.array:
        ran.append(embedded.shape[1])
        return original(network, embedded, *args)

    with mock.patch.object(BlockNetwork, "run", counting), count_host_reads() as reads:
        proposed = state.propose([7], count).ids
    assert proposed.shape == (1, count)
    assert len(reads) == 0
    rows = {"dflash2": 6}.get(name, count if source.config.from_anchor else count + 1)
    assert ran == [rows]


def test_the_second_version_drafts_whole_blocks_whatever_is_asked_for() -> None:
    source = drafter("dflash2")
    state = cold(source, *text(20, source))
    whole = state.propose([7], 5).ids.tolist()[0]
    assert [state.propose([7], count).ids.tolist()[0] for count in (1, 2, 4)] == [whole[:1], whole[:2], whole[:4]]


@pytest.mark.parametrize(
    ("name", "most"), [("dflash", 4), ("dflash2", 5), ("dspark", 4), ("muse_glimmer_assistant", 3)]
)
def test_no_more_is_proposed_than_the_checkpoint_was_trained_for(name: str, most: int) -> None:
    source = drafter(name)
    assert (source.proposals, source.default_width) == (most, most + 1)
    with pytest.raises(ValueError, match=f"a block of .* gives {most}"):
        cold(source, *text(5, source)).propose([7], most + 1)
    source.check_width(most + 1)
    source.check_width(1)
    with pytest.raises(UnsupportedOption, match=f"at most {most + 1} wide; got {most + 2}"):
        source.check_width(most + 2)


def test_a_narrower_round_suits_every_family_but_the_second_version() -> None:
    for name in NAMES:
        if name != "dflash2":
            drafter(name).check_width(3)
    with pytest.raises(UnsupportedOption, match="fixes the width at 6; got 3"):
        drafter("dflash2").check_width(3)


# Equations


SIGHTS: dict[str, tuple[Config, Callable[[int, int], bool]]] = {
    "all": ({"layer_types": ["full_attention"] * 2}, lambda query, key: True),
    "causal": ({"is_causal": True}, lambda query, key: key <= query),
    "nested_causal": ({"dflash_config": {"causal": True}}, lambda query, key: key <= query),
    "window": (
        {"layer_types": ["sliding_attention"] * 2, "sliding_window": 4},
        lambda query, key: key <= query and query - key < 4,
    ),
    "window_both_ways": (
        {"layer_types": ["sliding_attention"] * 2, "sliding_window": 3, "is_causal": False},
        lambda query, key: abs(query - key) < 3,
    ),
    "use_swa": (
        {"dflash_config": {"use_swa": True, "swa_window_size": 6}},
        lambda query, key: key <= query and query - key < 6,
    ),
    "window_of_one": (
        {"layer_types": ["sliding_attention"] * 2, "sliding_window": 1},
        lambda query, key: key == query,
    ),
}


def merge(content: Config, edit: Config) -> None:
    own = {**content["dflash_config"], **edit.get("dflash_config", {})}
    content.update({**edit, "dflash_config": own})


def assert_as_by_hand(
    source: BlockDrafter, content: Tensors, sees: Callable[[int, int], bool], neox: bool = True
) -> None:
    """The first layer over 9 context rows that came in three parts, and 5 block rows."""
    layer = source.network.layers[0]
    fused, block = mx.random.normal((1, 9, HIDDEN)), mx.random.normal((1, 5, HIDDEN))
    rows = ContextRows(layer.sight.reach)
    for start, end in ((0, 7), (7, 8), (8, 9)):
        rows.append(layer.context(fused[:, start:end], 20 + start))
    got = np.array(layer(block, rows.held(), 29))[0]
    by_hand = LayerByHand(content, "layers.0.", (4, 2, 8), source.config.rope.theta, neox)
    want = by_hand.run(np.array(fused, np.float64)[0], 20, np.array(block, np.float64)[0], sees)
    assert np.abs(got - want).max() < TOLERANCE


@pytest.mark.parametrize("sight", SIGHTS)
def test_a_row_sees_what_its_layer_lets_it_see(sight: str) -> None:
    edit, sees = SIGHTS[sight]
    assert_as_by_hand(edited("dflash", lambda content: merge(content, edit)), tensors("dflash"), sees)


def test_muse_glimmer_counts_the_window_as_a_distance() -> None:
    layers = drafter("muse_glimmer_assistant").network.layers
    assert [(layer.sight.reach, layer.sight.causal) for layer in layers] == [(6, False)] * 2


def test_a_sink_takes_its_share_of_every_head() -> None:
    def add(content: Tensors) -> None:
        for index in range(2):
            content[f"layers.{index}.self_attn.attention_sink_bias"] = mx.array([0.5, -1.0, 2.0, 0.0])

    content = tensors("dflash")
    add(content)
    source = edited("dflash", lambda config: merge(config, {"dflash_config": {"attention_sink_bias": True}}), add)
    assert_as_by_hand(source, content, lambda query, key: True)


@pytest.mark.parametrize("key", ["is_neox_style", "rope_is_neox_style"])
def test_neighbours_are_rotated_together_where_the_config_says_so(key: str) -> None:
    source = edited("dflash", lambda content: content.update({key: False}))
    assert_as_by_hand(source, tensors("dflash"), lambda query, key: True, neox=False)


def test_a_recurrent_head_remembers_the_block() -> None:
    rng = np.random.default_rng(8)

    def make(content: Tensors) -> None:
        content["markov_head.joint_proj.weight"] = mx.array(rng.standard_normal((18, 12 + HIDDEN)), mx.float32)
        content["markov_head.joint_proj.bias"] = mx.array(rng.standard_normal(18), mx.float32)
        content["markov_head.markov_w2.weight"] = 20 * content["markov_head.markov_w2.weight"]

    source = edited("dspark", lambda content: content.update(markov_head_type="rnn"), make)
    states = mx.array(rng.standard_normal((1, 4, HIDDEN)), mx.float32)
    base = source.heads.logits(states, target())
    ids, logits = source.heads.biased(states, mx.array([7]), target())
    arrays = dict(source.network.tensors.arrays)
    chosen, want = recurrent_head(arrays, np.array(base, np.float64)[0], np.array(states, np.float64)[0], 7)
    assert ids.tolist() == [chosen]
    assert np.abs(np.array(logits)[0] - want).max() < 1e-4
    assert mx.abs(logits - base).max().item() > 1


def test_gemmas_values_are_the_keys_projection_normed_without_a_weight_and_not_rotated() -> None:
    content, layer = tensors("gemma4_dspark"), drafter("gemma4_dspark").network.layers[1]
    assert "layers.1.self_attn.v_proj.weight" not in content
    states = mx.random.normal((1, 5, HIDDEN))
    context = layer.context(states, 40)
    projected = np.array(states @ content["layers.1.self_attn.k_proj.weight"].T, np.float64)[0]
    want = projected / np.sqrt((projected**2).mean(-1, keepdims=True) + 1e-6)
    assert np.abs(np.array(context.values)[0, 0] - want).max() < TOLERANCE
    assert np.abs(np.array(context.keys)[0, 0] - want).max() > 0.1


def test_gemma_with_a_projection_for_values_reads_it() -> None:
    def split(content: Config) -> None:
        content.update(attention_k_eq_v=False, num_key_value_heads=1)

    def with_values(content: Tensors) -> None:
        for index in range(2):
            content[f"layers.{index}.self_attn.v_proj.weight"] = mx.random.normal((16, HIDDEN))

    source = edited("gemma4_dspark", split, with_values)
    states = mx.random.normal((1, 5, HIDDEN))
    values = source.network.tensors["layers.0.self_attn.v_proj.weight"]
    want = mx.fast.rms_norm(states @ values.T, None, 1e-6)
    assert mx.abs(source.network.layers[0].context(states, 0).values[:, 0] - want).max().item() < TOLERANCE


def test_the_embedding_is_read_as_a_tap_below_the_first_layer() -> None:
    def taps(content: Config) -> None:
        content["target_layer_ids"] = [-1, 3]

    source, plain = edited("dspark", taps), drafter("dspark")
    assert source.taps == (3,)
    ids, hidden = text(6, source)
    assert hidden.shape[-1] == HIDDEN
    embedded = target().embed(mx.array([ids]))
    side_by_side = mx.concatenate([embedded, hidden], axis=-1)
    got, want = cold(source, ids, hidden), cold(plain, ids, side_by_side)
    assert got.propose([7], 4).ids.tolist() == want.propose([7], 4).ids.tolist()
    assert mx.abs(ordered(got.contexts[0])[0] - ordered(want.contexts[0])[0]).max().item() < TOLERANCE


def test_a_mask_embedding_of_its_own_stands_for_the_mask_token() -> None:
    row = target().raw_embed(mx.array([63]))[0]
    source = edited("dflash", edit_tensors=lambda content: content.update(mask_embedding=row))
    other = edited("dflash", lambda content: merge(content, {"dflash_config": {"mask_token_id": 5}}))
    ids, hidden = text(9, source)
    proposed = [cold(each, ids, hidden).propose([7], 4).ids.tolist() for each in (source, drafter("dflash"), other)]
    assert proposed[0] == proposed[1] != proposed[2]


def test_an_input_scale_multiplies_the_tables_own_rows() -> None:
    source = edited("dflash2", lambda content: merge(content, {"dflash_config": {"input_embedding_scale": 3.0}}))
    ids = mx.array([[4, 63]])
    assert mx.array_equal(source.network.embed(ids, target()), 3 * target().raw_embed(ids))


# The confidence head


def test_a_block_is_cut_before_the_first_proposal_that_is_unlikely_to_be_accepted() -> None:
    source = edited("dspark")
    state = cold(source, *text(9, source))
    whole = state.propose([7], 4).ids
    states = source.run([7], 4, state.contexts, state.position, target())
    odds = source.confidence(states, mx.array([7]), whole)[0].tolist()
    assert not source.may_propose_fewer
    for cut in range(4):
        below = min(odds[:cut], default=1.0)
        if odds[cut] < below:
            source.confidence_threshold = (odds[cut] + below) / 2
            assert source.may_propose_fewer
            assert state.propose([7], 4).ids.tolist() == whole[:, :cut].tolist()
    source.confidence_threshold = min(odds) / 2
    assert state.propose([7], 4).ids.tolist() == whole.tolist()
    source.confidence_threshold = 1.0
    assert state.propose([7], 4).ids.shape == (1, 0)
    source.confidence_threshold = 0
    assert not source.may_propose_fewer


def test_a_confidence_threshold_needs_a_head_and_a_probability() -> None:
    with pytest.raises(UnsupportedOption, match="no confidence head"):
        edited("dflash").confidence_threshold = 0.5
    for wrong in (-0.1, 1.5, float("nan")):
        with pytest.raises(InvalidRequest, match="expected a probability"):
            edited("dspark").confidence_threshold = wrong


# Laguna


def laguna(content: Config) -> None:
    content.update(architectures=["DFlashLagunaForCausalLM"], model_type="laguna", gating="per-head")
    content.update(layer_types=["sliding_attention"] * 2, sliding_window=5, draft_vocab_size=64)
    content["dflash_config"]["causal"] = True


def laguna_tensors(content: Tensors) -> None:
    rng = np.random.default_rng(4)
    for index in range(2):
        attention = f"layers.{index}.self_attn."
        split = [content.pop(f"{attention}{each}_proj.weight") for each in "qkv"]
        content[f"{attention}qkv_proj.weight"] = mx.concatenate(split)
        content[f"{attention}g_proj.weight"] = mx.array(rng.standard_normal((4, HIDDEN)), mx.float32)
        content[f"aux_hidden_norms.{index}.weight"] = mx.array(1 + rng.standard_normal(HIDDEN) / 9, mx.float32)


def test_laguna_scales_each_head_by_a_gate_and_norms_each_tapped_state() -> None:
    content = tensors("dflash")
    laguna_tensors(content)
    source = edited("dflash", laguna, laguna_tensors)
    by_hand = {**tensors("dflash"), **content}
    assert_as_by_hand(source, by_hand, lambda query, key: key <= query and query - key < 5)
    tapped = mx.random.normal((1, 3, 2 * HIDDEN))
    halves = [
        mx.fast.rms_norm(half, content[f"aux_hidden_norms.{index}.weight"], 1e-6)
        for index, half in enumerate(mx.split(tapped, 2, axis=-1))
    ]
    want = drafter("dflash").network.fuse(mx.concatenate(halves, axis=-1))
    assert mx.abs(source.network.fuse(tapped) - want).max().item() < TOLERANCE
