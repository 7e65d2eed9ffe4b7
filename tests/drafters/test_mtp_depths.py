"""Prediction layers of which each drafts one token, against a computation from scratch over the whole text."""

from __future__ import annotations

import functools
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache

from mlx_spec.cache.contents import cache_arrays
from mlx_spec.drafters.chain import PENDING_LIMIT, ChainState
from mlx_spec.drafters.mtp.layouts import layout_of
from mlx_spec.drafters.mtp.model import MtpDrafter, MtpNetwork, new_predictor
from mlx_spec.drafters.mtp.weights import file_name
from mlx_spec.errors import CheckpointError
from mlx_spec.generate import speculative_generate_step
from mlx_spec.pairing import load_drafter
from mlx_spec.split_mtp import split
from mlx_spec.stats import Statistics
from tests.host_reads import count_host_reads
from tests.oracle import assert_same_output, run_stock
from tests.reachable import longest
from tests.same_cache import assert_same_cache
from tests.tiny import randomise
from tests.tiny_mtp import VOCAB, Config, Tensors, plant, target, write

FAMILIES = ("step3p5", "mimo_v2_flash")
"""Of the first, each layer reads what the one before it gave; of the second, all read the target."""

each_family = pytest.mark.parametrize("family", FAMILIES)

PLACES = {"step3p5": "model.layers.{}.", "mimo_v2_flash": "model.mtp.layers.{}."}

TOLERANCE = 1e-5
DEPTHS = 2

SIZE = 40
"""Of the hidden states of both."""


def place(family: str, depth: int) -> str:
    return PLACES[family].format(depth + (3 if family == "step3p5" else 0))


def add_second(tensors: Tensors, family: str) -> None:
    """The layer for the second depth. Step 3.5's sees the whole text and has other heads than the first."""
    predictor = randomise(lambda: new_predictor(layout_of(family), target(family), 1)[0], seed=9)
    for name, array in tree_flatten(predictor.parameters()):
        stored = file_name(name, layout_of(family))
        shift = layout_of(family).zero_centred and "norm" in stored
        tensors[f"{place(family, 1)}{stored}"] = array - 1 if shift else array


def two(config: Config) -> None:
    config["num_nextn_predict_layers"] = DEPTHS


def plant_both(tensors: Tensors, family: str) -> None:
    add_second(tensors, family)
    plant(tensors, family)
    for name in [name for name in tensors if name.startswith(place(family, 1))]:
        if "o_proj" in name or "down_proj" in name:
            tensors[name] = mx.zeros_like(tensors[name])
    for part in ("enorm", "hnorm", "eh_proj", "shared_head.norm", "shared_head.output", "final_layernorm"):
        if f"{place(family, 0)}{part}.weight" in tensors:
            tensors[f"{place(family, 1)}{part}.weight"] = tensors[f"{place(family, 0)}{part}.weight"]


@functools.cache
def drafter(family: str, planted: bool = False) -> MtpDrafter:
    edit = functools.partial(plant_both if planted else add_second, family=family)
    with tempfile.TemporaryDirectory() as folder:
        loaded = load_drafter(write(Path(folder) / "checkpoint", family, two, edit), target(family))
    assert isinstance(loaded, MtpDrafter)
    assert len(loaded.networks) == DEPTHS
    return loaded


def text(length: int, seed: int = 3) -> tuple[list[int], mx.array]:
    rng = np.random.default_rng(seed)
    states = rng.standard_normal((1, length, SIZE), dtype=np.float32)
    return rng.integers(0, VOCAB, length).tolist(), mx.array(states)


def from_scratch(family: str, ids: Sequence[int], hidden: mx.array, bonus: int, count: int) -> list[int]:
    """What is proposed after a text, every layer run over all of it at once."""
    tokens, states, own = [*ids, bonus], hidden, target(family)
    for depth, network in enumerate(drafter(family).networks[:count]):
        rows = states if depth and family == "step3p5" else network.fuse(hidden, own)
        caches = network.new_caches()
        states = network.run(mx.array([tokens[depth + 1 :]]), rows, caches, 0, own)
        tokens.append(network.choose(states[:, -1:], own).item())
    last = states[:, -1:]
    for _ in range(count - DEPTHS):
        last = network.run(mx.array([[tokens[-1]]]), last, caches, 0, own)
        tokens.append(network.choose(last, own).item())
    return tokens[len(ids) + 1 :]


def cold(family: str, ids: list[int], hidden: mx.array) -> ChainState:
    state = drafter(family).open(target(family))
    state.read_prompt([ids], hidden)
    return state


def assert_right(family: str, state: ChainState, ids: list[int], hidden: mx.array) -> None:
    """It proposes what follows from the text alone, and its caches are those of a state that read it at once."""
    expected = from_scratch(family, ids, hidden, 7, 4)
    for count in (4, 1, 2):
        assert state.propose([7], count).ids.tolist() == [expected[:count]]
    other = cold(family, ids, hidden)
    for one in (state, other):
        # What is pending is run with the next token that is read.
        one.read_prompt([[7]], text(1)[1])
    caches = [one.cache_tree([])["draft"] for one in (state, other)]
    for depth, (ours, theirs) in enumerate(zip(*caches, strict=True)):
        assert ours.offset == theirs.offset == (done := len(ids) - depth)
        if done:
            for left, right in zip(cache_arrays([ours]), cache_arrays([theirs]), strict=True):
                assert mx.abs(left[..., :done, :] - right[..., :done, :]).max().item() < TOLERANCE
    for left, right in zip(waiting(state), waiting(other), strict=True):
        assert left.shape == right.shape
        assert mx.abs(left - right).max().item() < TOLERANCE


def waiting(state: ChainState) -> list[mx.array]:
    """The rows that are in no cache yet, depth by depth."""
    buffers = {id(array) for array in cache_arrays(state.cache_tree([])["draft"])}
    return [array for array in state.arrays() if id(array) not in buffers]


@each_family
def test_depths_disagree_so_that_one_for_another_would_be_seen(family: str) -> None:
    ids, hidden = text(12)
    first, second = drafter(family).networks
    if family == "step3p5":
        assert first.predictor.body.layers[0].self_attn.num_heads == 6
        assert second.predictor.body.layers[0].self_attn.num_heads == 4
        assert second.predictor.body.layers[0].self_attn.rope.base == 1e4
    twice = drafter(family).network
    states = twice.run(mx.array([[*ids[1:], 7]]), hidden, caches := twice.new_caches(), 0, target(family))
    token = twice.choose(states[:, -1:], target(family))
    again = twice.choose(twice.run(token, states[:, -1:], caches, 0, target(family)), target(family))
    assert from_scratch(family, ids, hidden, 7, 2) != [token.item(), again.item()]


@each_family
@pytest.mark.parametrize("length", [1, 2, 3, 4, 13])
def test_a_prompt_of_any_length_is_drafted_from(family: str, length: int) -> None:
    ids, hidden = text(length)
    assert_right(family, cold(family, ids, hidden), ids, hidden)


@each_family
@pytest.mark.parametrize("chunks", [(1, 12), (5, 1, 7), (1, 1, 1, 10), (13,)])
def test_reading_in_chunks_equals_reading_the_whole_prompt(family: str, chunks: Sequence[int]) -> None:
    ids, hidden = text(13)
    state, begin = drafter(family).open(target(family)), 0
    for length in chunks:
        state.read_prompt([ids[begin : begin + length]], hidden[:, begin : begin + length])
        begin += length
    assert_right(family, state, ids, hidden)


@each_family
@given(
    st.integers(1, 5),
    st.lists(
        st.tuples(st.sampled_from(["propose", "abort", "park", "stray"]), st.integers(1, 5), st.integers(1, 4)),
        max_size=6,
    ),
)
def test_whatever_happened_between_commits_the_state_depends_on_committed_tokens_alone(
    family: str, prompt: int, rounds: list[tuple[str, int, int]]
) -> None:
    ids, hidden = text(40, seed=11)
    state, end = cold(family, ids[:prompt], hidden[:, :prompt]), prompt
    for what, retained, count in rounds:
        if what != "park":
            # A stray bonus is one that the engine then did not commit.
            state.propose([ids[end] if what != "stray" else (ids[end] + 1) % VOCAB], count)
        if what == "abort":
            state.abort()
        state.catch_up([ids[end : end + retained]], hidden[:, end : end + retained])
        end += retained
    assert_right(family, state, ids[:end], hidden[:, :end])


@each_family
@pytest.mark.parametrize("count", [None, 1])
def test_neither_a_parked_drafter_nor_an_idle_layer_keeps_more_than_64_rows(family: str, count: int | None) -> None:
    ids, hidden = text(150, seed=5)
    state, most = cold(family, ids[:3], hidden[:, :3]), 0
    for end in range(3, 150):
        if count is not None:
            state.propose([ids[end]], count)
        state.catch_up([ids[end : end + 1]], hidden[:, end : end + 1])
        assert state.pending <= PENDING_LIMIT
        most = max(most, longest(state, list, besides=(drafter(family), target(family))))
    assert PENDING_LIMIT - DEPTHS <= most <= PENDING_LIMIT + DEPTHS
    assert_right(family, state, ids, hidden)


@each_family
@pytest.mark.parametrize("stray", [None, 0, 2])
def test_rows_of_a_batch_draft_as_they_do_alone(family: str, stray: int | None) -> None:
    texts = [text(12, seed) for seed in (1, 2, 3)]
    state = drafter(family).open(target(family))
    state.read_prompt([ids[:6] for ids, _ in texts], mx.concatenate([hidden[:, :6] for _, hidden in texts]))
    state.propose([(ids[6] + (row == stray)) % VOCAB for row, (ids, _) in enumerate(texts)], 3)
    state.catch_up([ids[6:9] for ids, _ in texts], mx.concatenate([hidden[:, 6:9] for _, hidden in texts]))
    together = state.propose([4, 5, 6], 3).ids.tolist()
    assert together == [
        from_scratch(family, ids[:9], hidden[:, :9], 4 + row, 3) for row, (ids, hidden) in enumerate(texts)
    ]


@each_family
def test_a_round_is_one_forward_per_layer_and_reads_nothing_on_the_host(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths: list[int] = []
    stock = MtpNetwork.run

    def counted(self: MtpNetwork, tokens: mx.array, *rest: Any) -> mx.array:
        lengths.append(tokens.shape[1])
        return stock(self, tokens, *rest)

    monkeypatch.setattr(MtpNetwork, "run", counted)
    ids, hidden = text(20)
    drafter(family)
    with count_host_reads() as reads:
        state = cold(family, ids[:6], hidden[:, :6])
        assert lengths == [5, 4]
        lengths.clear()
        proposals = state.propose([ids[6]], 2).ids
        # The last committed pair and the bonus's; the second layer has one pair more that hangs on a draft.
        assert lengths == [1, 2]
        state.catch_up([ids[6:9]], hidden[:, 6:9])
        lengths.clear()
        proposals = state.propose([ids[9]], 4).ids
        assert lengths == [3, 4, 1, 1]
        mx.eval(proposals, state.arrays())
    assert reads.count == 0


@each_family
def test_nothing_is_proposed_before_anything_was_read(family: str) -> None:
    with pytest.raises(ValueError, match="read the prompt first"):
        drafter(family).open(target(family)).propose([3], 2)


@each_family
@pytest.mark.parametrize("shape", [(1, 2, 40), (1, 3, 39), (3, 40), None])
def test_states_of_another_shape_are_refused(family: str, shape: tuple[int, ...] | None) -> None:
    with pytest.raises(ValueError, match=r"expected \[B, T, 40\]"):
        drafter(family).open(target(family)).read_prompt([[1, 2, 3]], None if shape is None else mx.zeros(shape))


@each_family
def test_a_failure_inside_a_proposal_leaves_the_state_as_it_was(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ids, hidden = text(9)
    state = cold(family, ids, hidden)
    stock, calls = MtpNetwork.run, iter([False, True])

    def failing(self: MtpNetwork, *rest: Any) -> mx.array:
        if next(calls):
            raise RuntimeError("no")
        return stock(self, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(MtpNetwork, "run", failing)
        with pytest.raises(RuntimeError, match="no"):
            state.propose([7], 3)
    assert_right(family, state, ids, hidden)


# End to end

PROMPT = (5, 17, 42, 8, 61, 3, 29, 11, 50)
LENGTH = 24


@pytest.mark.slow
@each_family
@pytest.mark.parametrize("planted", [True, False])
@pytest.mark.parametrize("width", [2, 3, 5])
def test_the_text_is_the_stock_loops_and_each_depth_is_accepted(family: str, planted: bool, width: int) -> None:
    model, statistics = target(family).model, Statistics()
    run, cache = run_stock(model, PROMPT, LENGTH), make_prompt_cache(model)
    options = {"num_draft_tokens": width - 1, "max_tokens": LENGTH, "statistics": statistics, "prompt_cache": cache}
    steps = speculative_generate_step(mx.array(PROMPT), model, drafter(family, planted), **options)
    assert_same_output([(token, logprobs) for token, logprobs, _ in steps], run)
    assert_same_cache(cache, run.cache_after(LENGTH))
    assert statistics.drafter_failures == 0
    if planted:
        assert statistics.accepted_tokens >= 3
        if width > 2:
            assert statistics.accepted_by_depth[1] > 0


@each_family
def test_the_width_is_what_the_depths_draft_and_the_bonus(family: str) -> None:
    assert drafter(family).default_width == DEPTHS + 1


# Files


@each_family
def test_each_missing_tensor_of_the_second_layer_is_named(family: str, tmp_path: Path) -> None:
    folder = write(tmp_path / "whole", family, two, functools.partial(add_second, family=family))
    names = [name for name in mx.load(str(folder / "model.safetensors")) if name.startswith(place(family, 1))]
    assert len(names) > 10
    for index, name in enumerate(names):

        def without(tensors: Tensors, name: str = name) -> None:
            add_second(tensors, family)
            del tensors[name]

        with pytest.raises(CheckpointError) as refused:
            load_drafter(write(tmp_path / str(index), family, two, without), target(family))
        assert f"{name} is missing" in str(refused.value)


@each_family
def test_a_layer_that_is_promised_and_not_there_is_an_error(family: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=re.escape(f"no safetensors file in it has a tensor {place(family, 1)}*")):
        load_drafter(write(tmp_path / "a", family, two), target(family))


@each_family
def test_a_layer_that_is_there_and_not_promised_is_read(family: str, tmp_path: Path) -> None:
    for key, value in (("a", None), ("b", 1)):
        folder = write(
            tmp_path / key,
            family,
            lambda config, value=value: config.update(num_nextn_predict_layers=value),
            functools.partial(add_second, family=family),
        )  # type: ignore[misc]
        loaded = load_drafter(folder, target(family))
        assert isinstance(loaded, MtpDrafter)
        assert len(loaded.networks) == DEPTHS


@each_family
def test_a_folder_of_their_own_drafts_as_the_checkpoint_does(family: str, tmp_path: Path) -> None:
    out = split(write(tmp_path / "source", family, two, functools.partial(add_second, family=family)), tmp_path / "out")
    loaded = load_drafter(out, target(family))
    assert isinstance(loaded, MtpDrafter)
    assert loaded.default_width == DEPTHS + 1
    for ours, theirs in zip(loaded.networks, drafter(family).networks, strict=True):
        parameters = dict(tree_flatten(theirs.predictor.parameters()))
        for name, array in tree_flatten(ours.predictor.parameters()):
            assert mx.array_equal(array, parameters[name]), name
