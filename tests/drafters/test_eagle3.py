"""EAGLE-3: the reference's numbers, and a state that is a function of the committed tokens alone."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_spec.cache.adopt import new_append_cache
from mlx_spec.drafters.chain import PENDING_LIMIT, ChainState
from mlx_spec.drafters.eagle3.config import Eagle3Config
from mlx_spec.drafters.eagle3.model import Eagle3Drafter
from mlx_spec.drafters.eagle3.weights import read_stored, read_weights
from mlx_spec.errors import IncompatiblePair
from tests.drafters.eagle3_files import FLAT, FOLDER, config, drafter, golden, load, target, tensors, write
from tests.host_reads import count_host_reads

TOLERANCE = 1e-5
"""The reference ran in float32 on other kernels."""

VOCAB, TAPPED = 96, 96


def text(length: int, seed: int = 3) -> tuple[list[int], mx.array]:
    """Committed tokens and made-up tapped states for them, [1, length, K*H]."""
    rng = np.random.default_rng(seed)
    return rng.integers(0, VOCAB, length).tolist(), mx.array(rng.standard_normal((1, length, TAPPED)), mx.float32)


def cold(ids: list[int], hidden: mx.array, with_drafter: Eagle3Drafter | None = None) -> ChainState:
    """A state that read everything in one chunk."""
    state = (with_drafter or drafter()).open(target())
    state.read_prompt([ids], hidden)
    return state


def cached(state: ChainState, ids: list[int]) -> list[mx.array]:
    """Keys and values of all pairs of `ids` and one token more: reading it runs what was still pending."""
    state.read_prompt([[7]], text(1)[1])
    (cache,) = state.cache_tree([])["draft"]
    assert cache.offset == len(ids)
    return [cache.keys[..., : len(ids), :], cache.values[..., : len(ids), :]]


def assert_same_state(state: ChainState, other: ChainState, ids: list[int]) -> None:
    assert state.propose([7], 5).ids.tolist() == other.propose([7], 5).ids.tolist()
    for left, right in zip(cached(state, ids), cached(other, ids), strict=True):
        assert mx.abs(left - right).max().item() < TOLERANCE


# The reference's numbers


def test_fc_and_the_layer_give_the_reference_outputs_for_every_true_position() -> None:
    expected, network = golden(), drafter().network
    hidden = network.fuse(expected["aux_hidden"], target())
    assert mx.abs(hidden - expected["fc_out"]).max().item() < TOLERANCE
    tokens = expected["token_ids"][:, 1:].astype(mx.int32)
    states = network.run(tokens, hidden, [new_append_cache()], 0, target())
    assert mx.abs(states - expected["s0.layer_out"]).max().item() < TOLERANCE
    logits = network.logits(states, target())
    assert mx.abs(logits - expected["s0.logits"]).max().item() < TOLERANCE
    assert mx.array_equal(mx.argmax(logits, axis=-1), expected["s0.draft_ids"])


@pytest.mark.parametrize("position", range(11))
def test_feeding_the_output_back_gives_the_reference_chain(position: int) -> None:
    # The reference rolls all positions out at once, as in training: row t of step s saw true pairs up to t and then s
    # pairs of fed-back outputs with the true next tokens. Its last s rows lack such a token and are left out.
    expected, network = golden(), drafter().network
    tokens, cache = expected["token_ids"].astype(mx.int32), new_append_cache()
    hidden = network.fuse(expected["aux_hidden"][:, : position + 1], target())
    states = network.run(tokens[:, 1 : position + 2], hidden, [cache], 0, target())[:, -1:]
    for step in (1, 2):
        fed = position + 1 + step
        if fed == tokens.shape[1]:
            break
        states = network.run(tokens[:, fed : fed + 1], states, [cache], 0, target())
        logits = network.logits(states, target())[0, 0]
        assert mx.abs(states[0, 0] - expected[f"s{step}.layer_out"][0, position]).max().item() < TOLERANCE
        assert mx.abs(logits - expected[f"s{step}.logits"][0, position]).max().item() < TOLERANCE
        assert mx.argmax(logits).item() == expected[f"s{step}.draft_ids"][0, position].item()


def test_the_first_proposal_of_every_prefix_is_the_reference_id_mapped_to_the_target_vocabulary() -> None:
    expected = golden()
    tokens, offsets = expected["token_ids"][0].tolist(), tensors()["d2t"].tolist()
    for position, draft_id in enumerate(expected["s0.draft_ids"][0].tolist()):
        state = cold(tokens[: position + 1], expected["aux_hidden"][:, : position + 1])
        assert state.propose([tokens[position + 1]], 1).ids.tolist() == [[draft_id + offsets[draft_id]]]


def chain(source: Eagle3Drafter, ids: list[int], hidden: mx.array, feed_first: bool) -> list[int]:
    """Five greedy proposals after bonus 11, step by step; `feed_first` feeds the first one back every time."""
    network, cache = source.network, new_append_cache()
    tokens = mx.array([[*ids[1:], 11]])
    states = network.run(tokens, network.fuse(hidden, target()), [cache], 0, target())[:, -1:]
    chosen = [network.choose(states, target())]
    for _ in range(4):
        fed = chosen[0] if feed_first else chosen[-1]
        states = network.run(fed, states, [cache], 0, target())
        chosen.append(network.choose(states, target()))
    return mx.concatenate(chosen, axis=1)[0].tolist()


def test_the_chain_feeds_back_each_output_with_the_token_it_gave(tmp_path: Path) -> None:
    # The fixture's weights are small: what it drafts hardly depends on the token fed back.
    def loud(content: dict[str, mx.array]) -> None:
        content.update({k: mx.random.normal(v.shape) for k, v in content.items() if v.dtype == mx.float32})

    other = load(write(tmp_path, edit_tensors=loud))
    telling = 0
    for seed in range(20):
        ids, hidden = text(6, seed)
        expected = chain(other, ids, hidden, feed_first=False)
        assert cold(ids, hidden, other).propose([11], 5).ids.tolist() == [expected]
        telling += expected != chain(other, ids, hidden, feed_first=True)
    assert telling >= 3


def test_both_layouts_of_the_same_weights_draft_the_same(tmp_path: Path) -> None:
    def renamed(content: dict[str, mx.array]) -> None:
        for name in list(content):
            content[f"model.{name}".replace("midlayer.", "layers.0.")] = content.pop(name)

    ids, hidden = text(9)
    other = load(write(tmp_path, edit_tensors=renamed))
    assert cold(ids, hidden, other).propose([4], 4).ids.tolist() == cold(ids, hidden).propose([4], 4).ids.tolist()


def test_an_own_embedding_is_used_and_equals_the_shared_one(tmp_path: Path) -> None:
    table = mx.load(str(FOLDER / "llama" / "model.safetensors"))["embed_tokens.weight"]
    folder = write(tmp_path, edit_tensors=lambda content: content.update({"embed_tokens.weight": table}))
    own, ids = load(folder), mx.array([[3, 90]])
    assert own.network.has_embedding
    assert not drafter().network.has_embedding
    assert mx.array_equal(own.network.embed(ids, target()), drafter().network.embed(ids, target()))


# State


@pytest.mark.parametrize("chunks", [(1, 12), (5, 1, 7), (12, 1), (1, 1, 1, 10)])
def test_reading_in_chunks_equals_reading_the_whole_prompt(chunks: tuple[int, ...]) -> None:
    ids, hidden = text(13)
    state, begin = drafter().open(target()), 0
    for length in chunks:
        state.read_prompt([ids[begin : begin + length]], hidden[:, begin : begin + length])
        begin += length
    assert_same_state(state, cold(ids, hidden), ids)


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("accepted", [0, 1, 2, 4])
def test_catching_up_equals_a_cold_state_over_the_same_committed_tokens(count: int, accepted: int) -> None:
    ids, hidden = text(20)
    state, end = cold(ids[:6], hidden[:, :6]), 6
    for _ in range(2):
        state.propose([ids[end]], count)
        state.catch_up([ids[end : end + 1 + accepted]], hidden[:, end : end + 1 + accepted])
        end += 1 + accepted
    assert_same_state(state, cold(ids[:end], hidden[:, :end]), ids[:end])


@pytest.mark.slow
@given(
    st.lists(st.tuples(st.sampled_from(["propose", "abort", "repeat", "park", "stray"]), st.integers(1, 5)), max_size=8)
)
def test_whatever_happened_between_commits_the_state_depends_on_committed_tokens_alone(
    rounds: list[tuple[str, int]],
) -> None:
    ids, hidden = text(60, seed=11)
    state, end = cold(ids[:4], hidden[:, :4]), 4
    for what, retained in rounds:
        if what != "park":
            # A stray bonus is one that the engine then did not commit.
            state.propose([ids[end] if what != "stray" else (ids[end] + 1) % VOCAB], retained)
        if what == "abort":
            state.abort()
            state.abort()
        if what == "repeat":
            state.propose([ids[end]], 2)
        state.catch_up([ids[end : end + retained]], hidden[:, end : end + retained])
        end += retained
    assert_same_state(state, cold(ids[:end], hidden[:, :end]), ids[:end])


def test_proposing_again_gives_the_same_proposals_bit_by_bit() -> None:
    ids, hidden = text(15)
    state = cold(ids[:9], hidden[:, :9])
    state.catch_up([ids[9:12]], hidden[:, 9:12])
    first = state.propose([ids[12]], 4).ids.tolist()
    state.abort()
    assert state.propose([ids[12]], 4).ids.tolist() == first
    assert state.propose([ids[12]], 2).ids.tolist() == [first[0][:2]]


def test_pairs_that_propose_ran_are_not_run_again() -> None:
    ids, hidden = text(12)
    state = cold(ids[:6], hidden[:, :6])
    state.propose([ids[6]], 3)
    state.catch_up([ids[6:8]], hidden[:, 6:8])
    assert state.cache_tree([])["draft"][0].offset == 6  # 5 pairs of the prompt, and the one with the bonus
    assert state.pending == 2


def test_a_parked_drafter_keeps_at_most_64_rows() -> None:
    ids, hidden = text(200, seed=5)
    state, most = cold(ids[:3], hidden[:, :3]), 0
    for end in range(3, 200):
        state.catch_up([ids[end : end + 1]], hidden[:, end : end + 1])
        most = max(most, state.pending)
    assert most == PENDING_LIMIT == 64
    assert_same_state(state, cold(ids, hidden), ids)


def test_a_chunk_of_hidden_states_is_released_once_it_is_read() -> None:
    length = 4000
    ids, _ = text(length)
    state = drafter().open(target())
    before = mx.get_active_memory()
    hidden = mx.random.normal((1, length, TAPPED))
    mx.eval(hidden)
    held = mx.get_active_memory() - before
    state.read_prompt([ids], hidden)
    mx.eval(state.arrays())
    del hidden
    caches = sum(array.nbytes for array in state.arrays())
    assert mx.get_active_memory() - before - caches < held / 10


def test_nothing_is_read_on_the_host() -> None:
    ids, hidden = text(12)
    with count_host_reads() as reads:
        state = cold(ids[:6], hidden[:, :6])
        proposals = state.propose([ids[6]], 4).ids
        state.catch_up([ids[6:9]], hidden[:, 6:9])
        mx.eval(proposals, state.arrays())
    assert reads.count == 0
    assert proposals.dtype == mx.int32
    assert proposals.shape == (1, 4)


def test_rows_of_a_batch_draft_as_they_do_alone() -> None:
    texts = [text(9, seed) for seed in (1, 2, 3)]
    state = drafter().open(target())
    state.read_prompt([ids[:6] for ids, _ in texts], mx.concatenate([hidden[:, :6] for _, hidden in texts]))
    state.catch_up([ids[6:9] for ids, _ in texts], mx.concatenate([hidden[:, 6:9] for _, hidden in texts]))
    together = state.propose([4, 5, 6], 4).ids.tolist()
    assert together == [cold(*texts[row]).propose([4 + row], 4).ids.tolist()[0] for row in range(3)]


def test_a_warm_start_rotates_at_absolute_positions() -> None:
    ids, hidden = text(7)
    state = drafter().open(target(), start=1000)
    state.read_prompt([ids], hidden)
    shifted, plain = cached(state, ids)[0], cached(cold(ids, hidden), ids)[0]
    assert not mx.allclose(shifted, plain).item()
    rotate = drafter().config.rope.build(8)
    for row in range(6):
        back = rotate(shifted[..., row : row + 1, :], offset=-1000)
        # float32 angles near 1000 are exact to 2**-14.
        assert mx.abs(back - plain[..., row : row + 1, :]).max().item() < 1e-3


def test_two_requests_share_one_drafter() -> None:
    ids, hidden = text(9)
    one, other = cold(ids, hidden), cold(*text(9, seed=8))
    expected = cold(ids, hidden).propose([3], 3).ids.tolist()
    other.propose([5], 3)
    assert one.propose([3], 3).ids.tolist() == expected


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
def test_half_precision_drafts_finite_numbers_even_where_tapped_states_exceed_float16(
    tmp_path: Path, dtype: mx.Dtype
) -> None:
    def halved(content: dict[str, mx.array]) -> None:
        content.update({k: v.astype(dtype) for k, v in content.items() if v.dtype == mx.float32})

    half = load(write(tmp_path, edit_tensors=halved))
    ids, hidden = text(6)
    state = cold(ids, hidden * 1e5, half)
    fused = half.network.fuse(hidden * 1e5, target())
    assert fused.dtype == dtype
    if dtype == mx.bfloat16:
        assert mx.isfinite(fused).all().item()
    assert half.network.modules.fc.weight.dtype == (mx.float32 if dtype == mx.float16 else dtype)
    assert mx.isfinite(half.network.fuse(hidden * 1e4, target())).all().item()
    assert state.propose([3], 3).ids.dtype == mx.int32


def test_it_says_what_it_expected_when_states_and_tokens_do_not_match() -> None:
    ids, hidden = text(5)
    state = drafter().open(target())
    with pytest.raises(ValueError, match="read the prompt first"):
        state.propose([1], 2)
    for given_ids, given_hidden in [([ids], None), ([ids[:4]], hidden), ([ids, ids], hidden), ([ids], hidden[0])]:
        with pytest.raises(ValueError, match=r"expected \[B, T, 96\]"):
            state.read_prompt(given_ids, given_hidden)


# Pairs


def test_the_pair_it_was_made_for_passes() -> None:
    drafter().check(target())


def stand_in(**changed: object) -> SimpleNamespace:
    """What `check` asks of a target."""
    return SimpleNamespace(**{"name": "stand_in", "hidden_size": 32, "vocab_size": 96, "layer_count": 8, **changed})


@pytest.mark.parametrize(
    ("changed", "values"),
    [
        ({"hidden_size": 48}, ("32", "48")),
        ({"vocab_size": 64}, ("96", "64")),
        ({"vocab_size": 32000}, ("96", "32000")),
        ({"layer_count": 3}, ("4", "0..2")),
    ],
)
def test_a_pair_that_does_not_fit_is_refused_with_both_values(changed: dict[str, int], values: tuple[str, str]) -> None:
    with pytest.raises(IncompatiblePair) as refusal:
        drafter().check(stand_in(**changed))
    assert all(value in str(refusal.value) for value in values)


def test_a_layer_one_past_the_last_is_explained_as_the_other_way_of_counting() -> None:
    with pytest.raises(IncompatiblePair, match="counts hidden states, with the embedding as 0"):
        drafter().check(stand_in(layer_count=4))


def test_a_padded_target_table_is_fine_as_long_as_no_proposal_lies_outside() -> None:
    largest = int((mx.arange(40) + tensors()["d2t"]).max().item())
    drafter().check(stand_in(vocab_size=128))
    drafter().check(stand_in(vocab_size=largest + 1))
    with pytest.raises(IncompatiblePair, match=f"ids up to {largest}"):
        drafter().check(stand_in(vocab_size=largest))


def test_without_a_head_the_vocabularies_must_be_the_same(tmp_path: Path) -> None:
    def full_vocabulary(content: dict[str, mx.array]) -> None:
        for name in ("lm_head.weight", "d2t", "t2d"):
            del content[name]

    headless = load(write(tmp_path, lambda content: content.update(draft_vocab_size=96), full_vocabulary))
    headless.check(target())
    states = mx.random.normal((1, 1, 32))
    normed = mx.fast.rms_norm(states, headless.network.modules.norm.weight, 1e-5)
    assert mx.array_equal(headless.network.logits(states, target()), target().head(normed))
    with pytest.raises(IncompatiblePair, match="97"):
        headless.check(stand_in(vocab_size=97))


def test_a_tied_flag_copied_from_the_target_leaves_a_reduced_head_untied(tmp_path: Path) -> None:
    tied = load(write(tmp_path, lambda content: content.update(tie_word_embeddings=True)))
    states = mx.random.normal((1, 1, 32))
    assert mx.array_equal(tied.network.logits(states, target()), drafter().network.logits(states, target()))


def test_a_tied_full_vocabulary_without_a_head_uses_its_own_embedding(tmp_path: Path) -> None:
    table = mx.random.normal((96, 32))

    def tied(content: dict[str, mx.array]) -> None:
        for name in ("lm_head.weight", "d2t", "t2d"):
            del content[name]
        content["embed_tokens.weight"] = table

    network = load(
        write(tmp_path, lambda content: content.update(draft_vocab_size=96, tie_word_embeddings=True), tied)
    ).network
    states = mx.random.normal((1, 1, 32))
    normed = mx.fast.rms_norm(states, network.modules.norm.weight, 1e-5)
    assert mx.array_equal(network.logits(states, target()), normed @ table.T)


def test_a_drafter_of_another_width_needs_an_embedding_of_its_own(tmp_path: Path) -> None:
    ours = Eagle3Config.parse(config(), FLAT)
    narrow = ours.model_copy(update={"hidden_size": 16, "target_hidden_size": 32})
    other = Eagle3Drafter("narrow", narrow, read_weights(read_stored(FLAT), ours))
    with pytest.raises(IncompatiblePair, match=r"hidden size 16 .* have 32"):
        other.check(target())


def test_ids_past_a_smaller_own_embedding_are_clamped(tmp_path: Path) -> None:
    table = mx.random.normal((96, 32))
    own = load(write(tmp_path, edit_tensors=lambda content: content.update({"embed_tokens.weight": table})))
    assert mx.array_equal(own.network.embed(mx.array([[500]]), target())[0, 0], table[95])
