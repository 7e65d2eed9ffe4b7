"""The greedy walk hands out what the walk over single choices hands out."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.sample_utils import greedy_sampler

from mlx_spec.errors import NonFiniteLogits
from mlx_spec.rounds import walks
from mlx_spec.rounds.walks import Block, BlockWalk, GreedyWalk, SequentialWalk, Token, Walk, open_walk
from mlx_spec.sampling import Sampling
from tests.bits import assert_same_bits

GREEDY = Sampling(greedy_sampler, greedy=True)
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
    return Block(width, array, mx.zeros((1, width), mx.int32), proposals if width > 1 else None, None, position=100)


def taken(walk: Walk) -> list[Token | str]:
    """What a round takes from a walk, up to the first token that was not proposed or the error."""
    tokens: list[Token | str] = []
    mx.eval(walk.pending())
    try:
        while not tokens or tokens[-1].accepted:  # type: ignore[union-attr]
            tokens.append(walk.take(len(tokens)))
    except NonFiniteLogits as error:
        tokens.append(str(error))
    return tokens


def assert_same(block: Block) -> None:
    wanted, got = taken(BlockWalk(GREEDY, block)), taken(GreedyWalk(block))
    assert len(wanted) == len(got)
    for theirs, mine in zip(wanted, got, strict=True):
        if isinstance(theirs, str) or isinstance(mine, str):
            assert theirs == mine
            continue
        assert (theirs.id, theirs.accepted) == (mine.id, mine.accepted)
        assert theirs.array.dtype == mine.array.dtype
        assert theirs.array.tolist() == mine.array.tolist() == [mine.id]
        assert_same_bits(mine.logprobs, theirs.logprobs)
    assert GreedyWalk(block).first().tolist() == BlockWalk(GREEDY, block).first().tolist()


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


def test_where_it_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    block = block_of(3, 1, mx.float32)
    assert type(open_walk(GREEDY, block)) is BlockWalk
    monkeypatch.setattr(walks, "kernel_holds", lambda dtype: dtype == mx.float32)
    assert type(open_walk(GREEDY, block)) is GreedyWalk
    assert type(open_walk(GREEDY, block_of(3, 1, mx.float16))) is BlockWalk
    assert type(open_walk(Sampling(greedy_sampler), block)) is BlockWalk
    assert type(open_walk(Sampling(greedy_sampler, pure=False), block)) is SequentialWalk
