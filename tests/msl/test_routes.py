"""Attention takes the kernel where it is equal on the machine, and goes by position where it is not."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.sample_utils import greedy_sampler, make_sampler

from mlx_spec.accept.exact import Exact
from mlx_spec.accept.proposal import Proposal
from mlx_spec.accept.walks import Block, open_walk
from mlx_spec.ops.attention import BY_POSITION, AttentionCall, KeyStretch
from mlx_spec.ops.base import OWN_KERNEL, STOCK
from mlx_spec.ops.block_attention import BlockAttention
from mlx_spec.ops.walk import ChosenBlock, GreedyBlock, kernel_holds
from mlx_spec.sampling import Sampling
from mlx_spec.verify.record import record_of
from mlx_spec.verify.routes import Plan, verifying
from tests.msl import stock, trials
from tests.msl.kernel import Run
from tests.msl.simulator import simulated
from tests.tiny import from_mlx_lm

SCALE = 0.1


def like_metal(queries: mx.array, keys: Any, values: Any, mask: Any) -> mx.array:
    """One query by MLX's Metal kernel; several by something that rounds otherwise."""
    if queries.shape[2] > 1:
        return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=SCALE, mask=mask)
    return stock.OneQuery(queries, keys, values, SCALE).run(0, Run())


def call(width: int, **changes: Any) -> AttentionCall:
    settings: dict[str, Any] = {
        "attend": like_metal,
        "queries": (1, 4, width, 64),
        "key_heads": 2,
        "values": 64,
        "dtypes": (mx.bfloat16, mx.bfloat16),
        "packing": None,
        "mask": "causal",
        "masked_alone": False,
        "sinks": False,
        "scale": SCALE,
    }
    return AttentionCall(**(settings | changes))


@pytest.mark.slow
def test_the_kernel_is_taken_where_stock_is_not_equal() -> None:
    with simulated():
        assert call(3).route_over(KeyStretch.short()) == OWN_KERNEL
    assert call(3).route_over(KeyStretch.short()) == BY_POSITION


def test_stock_is_taken_where_it_is_equal() -> None:
    def by_query(queries: mx.array, keys: Any, values: Any, mask: Any) -> mx.array:
        count, width = keys.shape[2], queries.shape[2]
        rows = [
            like_metal(
                queries[:, :, at : at + 1], *(side[:, :, : count - width + 1 + at] for side in (keys, values)), mask
            )
            for at in range(width)
        ]
        return mx.concatenate(rows, axis=2)

    with simulated():
        assert call(3, attend=by_query).route_over(KeyStretch.short()) == STOCK


def test_a_kernel_that_is_not_equal_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BlockAttention, "run", lambda self: self.queries)
    with simulated():
        assert call(3).route_over(KeyStretch.short()) == BY_POSITION


@pytest.mark.parametrize(
    "changes",
    [{"mask": mx.bool_}, {"packing": (32, 4)}, {"values": 96}, {"queries": (1, 4, 3, 80)}],
    ids=["a mask as an array", "packed keys", "values of another size", "a head size without a kernel"],
)
def test_what_the_kernel_does_not_know_goes_by_position(changes: dict[str, Any]) -> None:
    with simulated():
        draw = trials.draws(mx.bfloat16)
        block = call(3, **changes).block(40, lambda shape, dtype: next(draw)(shape))
        assert block.own_kernel() is None


@pytest.mark.slow
@pytest.mark.parametrize("drawn", [False, True])
def test_every_block_is_walked_by_the_kernel_where_that_is_equal(drawn: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    for kind in (GreedyBlock, ChosenBlock):
        stock = kind.by_kernel

        def noted(self: Any, stock: Any = stock) -> mx.array:
            made.append(type(self).__name__)
            return stock(self)

        monkeypatch.setattr(kind, "by_kernel", noted)
    logits = mx.round(mx.random.normal((1, 5, 300)) * 3)
    sampler = make_sampler(temp=0.8, top_p=0.9) if drawn else greedy_sampler
    sampling = Sampling(sampler, draws=drawn, greedy=not drawn)

    def packed() -> list[int]:
        mx.random.seed(5)
        block = Block(5, logits, mx.zeros((1, 5), mx.int32), Proposal(mx.array([[3, 4, 5, 6]])), None, 9)
        walk = open_walk(Exact(), sampling, block)
        assert walk.packed is not None
        read: list[int] = walk.packed.tolist()  # type: ignore[assignment]
        return read

    want = packed()
    assert made == []
    with simulated():
        assert kernel_holds(mx.float32)
        made.clear()
        assert packed() == want
    assert made == ["ChosenBlock" if drawn else "GreedyBlock"]


@pytest.mark.slow
def test_the_greedy_walk_takes_its_kernel_where_that_is_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not kernel_holds(mx.bfloat16)
    with simulated():
        assert kernel_holds(mx.bfloat16)

        def broken(self: GreedyBlock) -> mx.array:
            raise RuntimeError("the text was refused")

        monkeypatch.setattr(GreedyBlock, "by_kernel", broken)
        assert not kernel_holds(mx.float16)
        logits = mx.random.normal((1, 2, 9)).astype(mx.float16)
        assert GreedyBlock(logits, mx.zeros((1, 1), mx.int32)).walk().shape == (1, 5)


@pytest.mark.slow
@pytest.mark.parametrize("found", [OWN_KERNEL, BY_POSITION])
def test_a_plan_says_which_way_attention_goes(found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[KeyStretch] = []
    runs: list[BlockAttention] = []
    run = BlockAttention.run

    def counted(self: BlockAttention) -> mx.array:
        runs.append(self)
        return run(self)

    def route(call: AttentionCall, stretch: KeyStretch) -> str:
        asked.append(stretch)
        return found

    monkeypatch.setattr(BlockAttention, "run", counted)
    model = from_mlx_lm(
        "llama",
        hidden_size=128,
        num_hidden_layers=1,
        intermediate_size=64,
        num_attention_heads=2,
        num_key_value_heads=1,
        rms_norm_eps=1e-5,
        vocab_size=45,
    )
    plain = model(mx.array([[3, 1, 4]]))
    kinds = record_of(model).bindings.attach(model).kinds
    with simulated(), verifying(Plan(3, by_position=kinds, attention=route)):
        out = model(mx.array([[3, 1, 4]]))
    assert mx.allclose(out, plain, atol=1e-4).item()
    assert asked == [KeyStretch.short()]
    assert len(runs) == (found == OWN_KERNEL)
