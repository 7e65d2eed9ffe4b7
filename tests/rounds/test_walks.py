"""Every walk hands out what the walk over single choices hands out."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.sample_utils import greedy_sampler

from mlx_spec.accept import exact, normalize
from mlx_spec.accept.exact import Exact
from mlx_spec.accept.proposal import Proposal
from mlx_spec.accept.walks import Block, BlockWalk, SequentialWalk, StepWalk, Token, Walk, open_walk
from mlx_spec.errors import NonFiniteLogits
from mlx_spec.sampling import Sampling
from tests.bits import assert_same_bits

EXACT = Exact()
GREEDY, SINGLE = Sampling(greedy_sampler, greedy=True), Sampling(greedy_sampler)
ODD = {"plain": None, "nan": np.nan, "inf": np.inf, "nothing": -np.inf}


def block_of(width: int, right: int, dtype: mx.Dtype, odd: str = "plain", at: int = 0) -> Block:
    """A block whose first `right` proposals are the target's choices; logits tie often."""
    random = np.random.default_rng(width * 31 + right)
    logits = np.round(random.standard_normal((1, width, 45)) * 3)
    if odd == "nothing":
        logits[0, at] = -np.inf
    elif ODD[odd] is not None:
        logits[0, at, [17, 31]] = ODD[odd]
    array = mx.array(logits).astype(dtype)
    choices = [GREEDY.choose(array[:, index, :], None)[0] for index in range(width)]
    proposals = mx.concatenate(choices)[None, :-1].astype(mx.int32)
    proposals = mx.where(mx.arange(width - 1) < right, proposals, 99)
    proposal = Proposal(proposals) if width > 1 else None
    return Block(width, array, mx.zeros((1, width), mx.int32), proposal, None, position=100)


def taken(walk: Walk) -> list[Token | str]:
    """What a round takes from a walk, up to the first token that was not proposed or the error."""
    tokens: list[Token | str] = []
    mx.eval(walk.pending())
    if walk.packed is not None:
        walk.receive(walk.packed.tolist())  # type: ignore[arg-type]
    try:
        while not tokens or tokens[-1].accepted:  # type: ignore[union-attr]
            tokens.append(walk.take(len(tokens)))
    except NonFiniteLogits as error:
        tokens.append(str(error))
    return tokens


def assert_same(block: Block) -> None:
    """The walk that calls nothing ahead of time is mlx-lm's loop; the others must not differ from it."""
    one_by_one = SequentialWalk(EXACT, SINGLE, block)
    wanted = taken(one_by_one)
    walks: list[Walk] = [BlockWalk(EXACT, GREEDY, block), BlockWalk(EXACT, SINGLE, block)]
    walks += [StepWalk(GREEDY, block), StepWalk(SINGLE, block)] if block.width == 1 else []
    for walk in walks:
        first, got = walk.array(0).tolist(), taken(walk)
        assert first == one_by_one.array(0).tolist()
        assert len(wanted) == len(got)
        for index, (theirs, mine) in enumerate(zip(wanted, got, strict=True)):
            if isinstance(theirs, str) or isinstance(mine, str):
                assert theirs == mine
                continue
            assert (theirs.id, theirs.accepted) == (mine.id, mine.accepted)
            assert walk.array(index).dtype == one_by_one.array(index).dtype == mx.uint32
            assert walk.array(index).tolist() == [mine.id]
            assert_same_bits(mine.logprobs, theirs.logprobs)


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
@pytest.mark.parametrize("width", [1, 2, 5, 33])
def test_every_number_of_right_proposals(width: int, dtype: mx.Dtype) -> None:
    for right in {0, 1, width // 2, width - 2, width - 1} & set(range(width)):
        assert_same(block_of(width, right, dtype))


@pytest.mark.parametrize("odd", [name for name in ODD if name != "plain"])
@pytest.mark.parametrize("at", [0, 1, 3])
def test_what_is_no_number(odd: str, at: int) -> None:
    for right in (0, 1, 3):
        assert_same(block_of(4, right, mx.bfloat16, odd, at))
    assert_same(block_of(1, 0, mx.bfloat16, odd, 0))


@pytest.mark.parametrize("width", [2, 5])
def test_where_several_rows_normalize_otherwise_each_is_normalized_alone(
    width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    monkeypatch.setattr(normalize, "reduces_alike", lambda *shape: calls.append(shape))
    assert_same(block_of(width, 1, mx.float32))
    assert {call[0] for call in calls} == {width}


def test_a_reduction_that_rounds_otherwise_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    holds, stock = normalize.reduces_alike.__wrapped__, mx.logsumexp
    assert holds(3, 57, mx.float32, mx.cpu)

    def other(logits: mx.array, axis: int | None = None, keepdims: bool = False) -> mx.array:
        out = stock(logits, axis=axis, keepdims=keepdims) if axis is not None else stock(logits, keepdims=keepdims)
        return out if axis is None else out * (1 + 1e-6)

    monkeypatch.setattr(mx, "logsumexp", other)
    assert not holds(3, 57, mx.float32, mx.cpu)


def test_the_kernel_is_asked_where_the_choice_is_the_likeliest(monkeypatch: pytest.MonkeyPatch) -> None:
    """It reads the logits once, so the log-probabilities of positions that are not reached are never made."""
    block = block_of(5, 1, mx.float32)
    monkeypatch.setattr(exact, "kernel_holds", lambda dtype: dtype == mx.float32)
    monkeypatch.setattr(exact.GreedyBlock, "by_kernel", exact.GreedyBlock.by_ops)
    assert_same(block)
    assert_same(block_of(5, 4, mx.float32))
    walk = BlockWalk(EXACT, GREEDY, block)
    assert not any(array.shape[-1] == 45 for array in walk.pending())


def test_which_walk_is_taken() -> None:
    block = block_of(3, 1, mx.float32)
    assert type(open_walk(EXACT, GREEDY, block)) is BlockWalk
    assert type(open_walk(EXACT, GREEDY, block_of(1, 0, mx.float32))) is StepWalk
    assert type(open_walk(EXACT, Sampling(greedy_sampler, pure=False), block)) is SequentialWalk
