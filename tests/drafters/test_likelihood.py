"""A proposal's log-probabilities are those its ids are the likeliest of, over the target's vocabulary."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import pytest

from mlx_spec.cache.adopt import new_caches
from mlx_spec.drafters import NgramDrafter
from mlx_spec.drafters.base import Drafter
from mlx_spec.drafters.likelihood import spread
from mlx_spec.drafters.standalone import StandaloneDrafter
from mlx_spec.model.target import Target
from mlx_spec.pairing import load_drafter
from tests import tiny_blocks, tiny_eagle, tiny_mtp
from tests.host_reads import count_host_reads
from tests.tiny import MIXES, PROMPT

WIDTH = 4

Pair = tuple[Drafter, Target]


@functools.cache
def dense() -> Target:
    return Target(MIXES["dense"].model())


def mtp(family: str) -> Pair:
    target = tiny_mtp.target(family)
    with tempfile.TemporaryDirectory() as folder:
        return load_drafter(tiny_mtp.write(Path(folder) / "checkpoint", family), target), target


PAIRS: dict[str, Callable[[], Pair]] = {
    "standalone": lambda: (StandaloneDrafter(MIXES["sliding"].model()), dense()),
    "eagle3": lambda: (tiny_eagle.random_drafter("dense"), dense()),
    "mtp": lambda: mtp(tiny_mtp.FAMILIES[0]),
    "mtp, other family": lambda: mtp(tiny_mtp.FAMILIES[-1]),
    "dflash": lambda: (tiny_blocks.random_drafter("dflash", dense()), dense()),
    "dspark": lambda: (tiny_blocks.random_drafter("dspark", dense()), dense()),
}


@pytest.mark.every_case
@pytest.mark.parametrize("name", PAIRS)
def test_the_ids_are_the_likeliest_and_every_row_is_a_distribution(name: str) -> None:
    drafter, target = PAIRS[name]()
    target.attach_taps(drafter.taps)
    output = target.forward(mx.array([PROMPT]), new_caches(target.model), drafter.taps)
    columns = output.logits.shape[-1]
    state = drafter.open(target)
    state.read_prompt([list(PROMPT)], output.hidden)
    with count_host_reads() as reads:
        proposal = state.propose([7], WIDTH - 1)
        assert proposal.log_probabilities is not None
        rows = proposal.log_probabilities(columns)
    assert reads.count == 0
    assert (rows.shape, rows.dtype) == ((1, WIDTH - 1, columns), mx.float32)
    assert mx.argmax(rows, axis=-1).tolist() == proposal.ids.tolist()
    assert mx.allclose(mx.exp(rows).sum(axis=-1), mx.ones((1, WIDTH - 1)), atol=1e-5).item()


def test_who_looks_tokens_up_knows_none() -> None:
    state = NgramDrafter(min_ngram=1).open(dense())
    state.read_prompt([[1, 2, 3, 1, 2]], None)
    assert state.propose([3], 2).log_probabilities is None


def test_logits_are_spread_over_the_targets_vocabulary() -> None:
    logits = mx.array([[0.0, 1.0, 3.0]])
    want = logits - mx.logsumexp(logits)
    assert spread(logits, 3).tolist() == want.tolist()
    wider = spread(logits, 5).tolist()[0]
    assert wider == [*want.tolist()[0], float("-inf"), float("-inf")]
    placed = spread(logits, 4, mx.array([3, 0, 1])).tolist()[0]
    assert placed == [want[0, 1].item(), want[0, 2].item(), float("-inf"), want[0, 0].item()]
    # What the target does not have is never proposed, so it has no share.
    fewer = spread(logits, 2)
    assert fewer.shape == (1, 2)
    assert mx.exp(fewer).sum().item() == pytest.approx(1)
