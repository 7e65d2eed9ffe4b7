"""Prediction layers: what mlx-lm's own layer gives, a state that hangs on committed tokens alone, and what it costs."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.cache import make_prompt_cache

from mlx_spec.cache.contents import cache_arrays
from mlx_spec.drafters.chain import PENDING_LIMIT, ChainState
from mlx_spec.drafters.mtp.layouts import LAYOUT_BY_ARCHITECTURE, WITHOUT_LAYOUT, layout_of
from mlx_spec.drafters.mtp.model import MtpDrafter, MtpNetwork
from mlx_spec.errors import IncompatiblePair, UnsupportedOption
from mlx_spec.model.anatomy import ANATOMY_BY_MODULE
from mlx_spec.model.target import Target
from mlx_spec.pairing import load_drafter
from tests.host_reads import count_host_reads
from tests.oracle import rng_key
from tests.tiny_mtp import CONFIGS, FAMILIES, VOCAB, checkpoint, deeper, names_of, target, write

EPSILONS = ("rms_norm_eps", "layer_norm_epsilon", "layernorm_epsilon")

TOLERANCE = 1e-5
"""Of the same layer in float32, in forwards of other lengths."""


@functools.cache
def drafter(family: str) -> MtpDrafter:
    """The family's random prediction layer."""
    with tempfile.TemporaryDirectory() as folder:
        loaded = load_drafter(write(Path(folder) / "checkpoint", family), target(family))
    assert isinstance(loaded, MtpDrafter)
    return loaded


def text(family: str, length: int, seed: int = 3) -> tuple[list[int], mx.array]:
    """Committed tokens and made-up tapped states for them, [1, length, H]."""
    rng = np.random.default_rng(seed)
    states = rng.standard_normal((1, length, target(family).hidden_size), dtype=np.float32)
    return rng.integers(0, VOCAB, length).tolist(), mx.array(states)


def cold(family: str, ids: list[int], hidden: mx.array) -> ChainState:
    """A state that read everything in one chunk."""
    state = drafter(family).open(target(family))
    state.read_prompt([ids], hidden)
    return state


def cached(family: str, state: ChainState, pairs: int) -> list[mx.array]:
    """What the caches hold of so many pairs once one token more is read, which runs what was still pending."""
    state.read_prompt([[7]], text(family, 1)[1])
    return [array[..., :pairs, :] for array in cache_arrays(state.cache_tree([])["draft"])]


def assert_same_state(family: str, state: ChainState, ids: list[int], hidden: mx.array) -> None:
    other = cold(family, ids, hidden)
    assert state.propose([7], 4).ids.tolist() == other.propose([7], 4).ids.tolist()
    ours, theirs = cached(family, state, len(ids)), cached(family, other, len(ids))
    assert ours
    for left, right in zip(ours, theirs, strict=True):
        assert left.shape == right.shape
        assert mx.abs(left - right).max().item() < TOLERANCE


# What the layer computes


@pytest.mark.parametrize("family", list(CONFIGS))
def test_the_layer_gives_what_the_last_layer_of_a_deeper_model_gives(family: str) -> None:
    # The model of one layer more is built by mlx-lm alone; the parts around the layer are written out here.
    ids, states = text(family, 9)
    names, tensors = names_of(family), checkpoint(family)[1]

    def norm(part: str, x: mx.array) -> mx.array:
        weight = tensors[f"{names.place}{part}.weight"]
        return mx.fast.rms_norm(x, weight + 1 if names.zero_centred else weight, _eps(family))

    pair = [norm(names.embedding_norm, target(family).embed(mx.array([ids]))), norm(names.hidden_norm, states)]
    joined = mx.concatenate(pair[::-1] if names.hidden_first else pair, axis=-1)
    projection = f"{names.place}{names.projection}"
    projected = joined @ tensors[f"{projection}.weight"].T + tensors.get(f"{projection}.bias", 0.0)
    last = _last_layer(family, projected)
    expected = target(family).final_norm(last) if names.final_norm is None else norm(names.final_norm, last)

    network = drafter(family).network
    got = network.run(mx.array([ids]), states, network.new_caches(), 0, target(family))
    assert mx.abs(got - (expected if names.reads_normed else last)).max().item() < TOLERANCE
    assert mx.abs(got).max().item() > 0.5
    own = tensors.get(f"{names.place}shared_head.output.weight")
    logits = target(family).head(expected) if own is None else expected @ own.T
    assert mx.abs(network.logits(got, target(family)) - logits).max().item() < 10 * TOLERANCE


def _last_layer(family: str, x: mx.array) -> mx.array:
    model = deeper(family)
    cache = make_prompt_cache(model)[-1]
    if family == "nemotron_h":
        mixed: mx.array = model.layers[-2](x, create_attention_mask(x, cache), cache)
        out: mx.array = model.layers[-1](mixed)
        return out
    window = {"step3p5": "sliding_window", "mimo_v2_flash": "sliding_window_size"}.get(family)
    mask = create_attention_mask(
        x,
        cache[0] if family in ("deepseek_v32", "glm_moe_dsa", "longcat_flash") else cache,
        window_size=window and CONFIGS[family][window],
        return_array=family not in ("mimo", "exaone_moe", "ernie4_5_moe"),
    )
    out = model.layers[-1](x, mask, cache)
    return out


def _eps(family: str) -> float:
    config = checkpoint(family)[0]
    text_config = config.get("text_config", config)
    (eps,) = [text_config[key] for key in EPSILONS if key in text_config]
    return float(eps)


@pytest.mark.parametrize("family", FAMILIES)
def test_hidden_states_are_taken_after_the_final_norm_and_handed_on_as_they_come(family: str) -> None:
    network, own = drafter(family).network, target(family)
    _, tapped = text(family, 5)
    reads_normed = names_of(family).reads_normed
    assert reads_normed == (family not in ("step3p5", "mimo_v2_flash"))
    assert mx.array_equal(network.fuse(tapped, own), own.final_norm(tapped) if reads_normed else tapped)
    assert drafter(family).taps == (own.layer_count - 1,)
    # mlx-lm's model of one layer ends with its norm, so what is handed on is normed, once.
    states = network.run(mx.array([[1, 2, 3, 4, 5]]), network.fuse(tapped, own), network.new_caches(), 0, own)
    assert network.carry(states) is states
    if reads_normed:
        assert mx.array_equal(network.logits(states, own), own.head(states))


@pytest.mark.parametrize("family", ["qwen35_moe_real", "deepseek_v32", "kimi_k25", "nemotron_h"])
def test_its_caches_are_those_mlx_lm_makes_for_such_a_layer(family: str) -> None:
    mine = drafter(family).network.new_caches()
    stock = make_prompt_cache(target(family).model)[-1]
    assert [type(cache) for cache in mine] == [type(stock)]


def test_loading_leaves_the_random_state_where_it_was(tmp_path: Path) -> None:
    folder, model = write(tmp_path / "a", "glm4_moe"), target("glm4_moe")
    mx.random.seed(5)
    before = rng_key()
    load_drafter(folder, model)
    assert rng_key() == before


# State


@pytest.mark.parametrize("family", ["qwen35_dense_real", "deepseek_v3", "glm_moe_dsa"])
@pytest.mark.parametrize("chunks", [(1, 12), (5, 1, 7), (1, 1, 1, 10)])
def test_reading_in_chunks_equals_reading_the_whole_prompt(family: str, chunks: Sequence[int]) -> None:
    ids, hidden = text(family, 13)
    state, begin = drafter(family).open(target(family)), 0
    for length in chunks:
        state.read_prompt([ids[begin : begin + length]], hidden[:, begin : begin + length])
        begin += length
    assert_same_state(family, state, ids, hidden)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("accepted", [0, 2, 3])
def test_catching_up_equals_a_cold_state_over_the_same_committed_tokens(family: str, accepted: int) -> None:
    # Zero, partial and full acceptance of three proposals.
    ids, hidden = text(family, 20)
    state, end = cold(family, ids[:6], hidden[:, :6]), 6
    for _ in range(2):
        state.propose([ids[end]], 3)
        state.catch_up([ids[end : end + 1 + accepted]], hidden[:, end : end + 1 + accepted])
        end += 1 + accepted
    assert_same_state(family, state, ids[:end], hidden[:, :end])


@given(
    st.sampled_from(["qwen35_moe_real", "deepseek_v32"]),
    st.lists(st.tuples(st.sampled_from(["propose", "abort", "park", "stray"]), st.integers(1, 5)), max_size=6),
)
def test_whatever_happened_between_commits_the_state_depends_on_committed_tokens_alone(
    family: str, rounds: list[tuple[str, int]]
) -> None:
    ids, hidden = text(family, 40, seed=11)
    state, end = cold(family, ids[:4], hidden[:, :4]), 4
    for what, retained in rounds:
        if what != "park":
            # A stray bonus is one that the engine then did not commit.
            state.propose([ids[end] if what != "stray" else (ids[end] + 1) % VOCAB], retained)
        if what == "abort":
            state.abort()
        state.catch_up([ids[end : end + retained]], hidden[:, end : end + retained])
        end += retained
    assert_same_state(family, state, ids[:end], hidden[:, :end])


def test_a_parked_drafter_keeps_at_most_64_rows() -> None:
    family = "qwen3_next"
    ids, hidden = text(family, 150, seed=5)
    state = cold(family, ids[:3], hidden[:, :3])
    for end in range(3, 150):
        state.catch_up([ids[end : end + 1]], hidden[:, end : end + 1])
        assert state.pending <= PENDING_LIMIT
    assert_same_state(family, state, ids, hidden)


@pytest.mark.parametrize("family", ["glm4_moe", "glm_moe_dsa", "qwen35_moe_real"])
def test_rows_of_a_batch_draft_as_they_do_alone(family: str) -> None:
    texts = [text(family, 9, seed) for seed in (1, 2, 3)]
    state = drafter(family).open(target(family))
    state.read_prompt([ids[:6] for ids, _ in texts], mx.concatenate([hidden[:, :6] for _, hidden in texts]))
    state.catch_up([ids[6:9] for ids, _ in texts], mx.concatenate([hidden[:, 6:9] for _, hidden in texts]))
    together = state.propose([4, 5, 6], 3).ids.tolist()
    assert together == [cold(family, *texts[row]).propose([4 + row], 3).ids.tolist()[0] for row in range(3)]


@pytest.mark.parametrize("family", ["glm_moe_dsa", "longcat_flash", "step3p5"])
@pytest.mark.parametrize("stray", [None, 0, 1, 2])
def test_rows_of_a_batch_catch_up_each_with_its_own_tokens(family: str, stray: int | None) -> None:
    # A proposal was made on each row's bonus; at most one of them was then not what its row went on with.
    texts = [text(family, 12, seed) for seed in (1, 2, 3)]
    state = drafter(family).open(target(family))
    state.read_prompt([ids[:6] for ids, _ in texts], mx.concatenate([hidden[:, :6] for _, hidden in texts]))
    state.propose([(ids[6] + (row == stray)) % VOCAB for row, (ids, _) in enumerate(texts)], 3)
    state.catch_up([ids[6:9] for ids, _ in texts], mx.concatenate([hidden[:, 6:9] for _, hidden in texts]))
    together = state.propose([4, 5, 6], 3).ids.tolist()
    alone = [cold(family, ids[:9], hidden[:, :9]).propose([4 + row], 3).ids for row, (ids, hidden) in enumerate(texts)]
    assert together == [proposed.tolist()[0] for proposed in alone]


@pytest.mark.parametrize("shape", [(1, 3, 32), (2, 2, 32), (2, 3, 31), (2, 3, 64), (6, 32), None])
def test_states_of_another_shape_are_refused(shape: tuple[int, ...] | None) -> None:
    state = drafter("deepseek_v3").open(target("deepseek_v3"))
    with pytest.raises(ValueError, match=r"expected \[B, T, 32\]"):
        state.read_prompt([[1, 2, 3], [4, 5, 6]], None if shape is None else mx.zeros(shape))


def test_rows_of_unequal_length_are_refused_and_not_padded() -> None:
    state = drafter("deepseek_v3").open(target("deepseek_v3"))
    with pytest.raises(ValueError, match=r"for rows of \[3, 2\] tokens"):
        state.read_prompt([[1, 2, 3], [4, 5]], mx.zeros((2, 3, 32)))


# Cost


@pytest.fixture
def forwards(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Pairs of each forward of a prediction layer, in order."""
    lengths: list[int] = []
    stock = MtpNetwork.run

    def counted(self: MtpNetwork, tokens: mx.array, *rest: Any) -> mx.array:
        lengths.append(tokens.shape[1])
        return stock(self, tokens, *rest)

    monkeypatch.setattr(MtpNetwork, "run", counted)
    return lengths


@pytest.mark.parametrize("count", [1, 2, 5])
def test_a_round_is_one_batched_catch_up_and_one_token_forwards_between_proposals(
    forwards: list[int], count: int
) -> None:
    family = "glm4_moe"
    ids, hidden = text(family, 20)
    state = cold(family, ids[:6], hidden[:, :6])
    assert forwards == [5]
    for retained in (3, 1, 4):
        forwards.clear()
        state.propose([ids[6]], count)
        state.catch_up([ids[6 : 6 + retained]], hidden[:, 6 : 6 + retained])
        assert forwards[1:] == [1] * (count - 1)
    # What the round before committed, and the bonus.
    assert forwards[0] == 1
    forwards.clear()
    state.propose([ids[6]], count)
    assert forwards == [4] + [1] * (count - 1)


def test_nothing_is_read_on_the_host() -> None:
    family = "deepseek_v32"
    ids, hidden = text(family, 12)
    drafter(family)
    with count_host_reads() as reads:
        state = cold(family, ids[:6], hidden[:, :6])
        proposals = state.propose([ids[6]], 4).ids
        state.catch_up([ids[6:9]], hidden[:, 6:9])
        mx.eval(proposals, state.arrays())
    assert reads.count == 0


# Pairs


def test_every_layout_is_of_a_target_whose_parts_are_known() -> None:
    assert set(LAYOUT_BY_ARCHITECTURE) <= set(ANATOMY_BY_MODULE)
    assert not set(LAYOUT_BY_ARCHITECTURE) & set(WITHOUT_LAYOUT)


@pytest.mark.parametrize("name", [*WITHOUT_LAYOUT, "llama"])
def test_a_target_whose_prediction_layers_are_not_known_is_refused_with_the_reason(name: str) -> None:
    with pytest.raises(IncompatiblePair, match="Targets it can serve: bailing_hybrid, .*, deepseek_v3, ") as refused:
        layout_of(name)
    assert WITHOUT_LAYOUT.get(name, "no layout of a prediction layer is known") in str(refused.value)


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ("glm4_moe", "decoder layers of 'deepseek_v3' against 'glm4_moe'"),
        ("qwen35_dense_real", "layers 3 against 4"),
        ("kimi_k25", "hidden size 32 against 36"),
    ],
)
def test_another_target_is_refused_with_both_values(other: str, words: str) -> None:
    with pytest.raises(IncompatiblePair, match=words):
        drafter("deepseek_v3").check(target(other))


def test_a_target_of_another_vocabulary_is_refused_with_both_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Target, "vocab_size", 65)
    with pytest.raises(IncompatiblePair, match="vocabulary 64 against 65"):
        drafter("deepseek_v3").check(target("deepseek_v3"))


def test_other_layers_cannot_be_tapped(tmp_path: Path) -> None:
    folder = write(tmp_path / "a", "mimo")
    assert load_drafter(folder, target("mimo"), taps=(2,)).taps == (2,)
    with pytest.raises(UnsupportedOption, match=r"taps=\(1,\) was given, but a prediction layer reads"):
        load_drafter(folder, target("mimo"), taps=(1,))


def test_two_requests_share_one_drafter() -> None:
    family = "mimo"
    ids, hidden = text(family, 9)
    one, other = cold(family, ids, hidden), cold(family, *text(family, 9, seed=8))
    expected = cold(family, ids, hidden).propose([3], 3).ids.tolist()
    other.propose([5], 3)
    assert one.propose([3], 3).ids.tolist() == expected
