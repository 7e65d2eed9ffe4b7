"""Our kernels against MLX's own text for one row, in the simulator, over shapes, dtypes, data and orders.

A trial is a generator of cases; `run` counts what they compare. Sizes step past every edge where a kernel takes
another way, every axis has another size, and orders take turns.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple
from unittest import mock

import mlx.core as mx
import numpy as np

from mlx_spec.ops import block_attention
from mlx_spec.ops.block_attention import BlockAttention
from mlx_spec.ops.choose import kinds_of_data
from mlx_spec.ops.linear import row_exact_gemv
from mlx_spec.ops.packed import Packing, row_exact_qmv
from mlx_spec.ops.walk import ChosenBlock, GreedyBlock
from tests.msl import stock
from tests.msl.kernel import BACKWARD, FORWARD, HALVES_FIRST, NEIGHBOURS_FIRST, SHUFFLED, Run
from tests.msl.simulator import running, simulated

FLOATS = (mx.float32, mx.float16, mx.bfloat16)
RUNS = (
    Run(NEIGHBOURS_FIRST, FORWARD),
    Run(HALVES_FIRST, BACKWARD, at_end=False),
    Run(NEIGHBOURS_FIRST, SHUFFLED, at_end=False),
    Run(HALVES_FIRST, FORWARD),
)


@dataclass(frozen=True)
class Case:
    """One comparison.

    Attributes:
        family: what it counts for, such as a dtype or a packing.
        ours: computes by our kernel.
        wanted: computes the reference in the same orders.
    """

    family: str
    ours: Callable[[], list[mx.array]]
    wanted: Callable[[Run], list[mx.array]]


@dataclass
class Tally:
    """What was compared, for each family."""

    cases: dict[str, int] = field(default_factory=dict)
    outputs: dict[str, int] = field(default_factory=dict)
    differing: int = 0
    orders: set[tuple[int, int]] = field(default_factory=set)

    def add(self, family: str, outputs: int, differing: int, run: Run) -> None:
        self.cases[family] = self.cases.get(family, 0) + 1
        self.outputs[family] = self.outputs.get(family, 0) + outputs
        self.differing += differing
        self.orders.add((run.sum_order, run.lane_order))

    def line(self, name: str) -> str:
        """One line of a report."""
        cases, outputs, fewest = sum(self.cases.values()), sum(self.outputs.values()), min(self.outputs.values())
        sums, lanes = ({order[place] for order in self.orders} for place in (0, 1))
        return (
            f"{name}: {cases} cases of {len(self.cases)} families, {outputs} outputs (fewest of a family {fewest}),"
            f" {self.differing} differ, {len(sums)} sum orders, {len(lanes)} lane orders"
        )


def run(cases: Iterator[Case]) -> Tally:
    """Compute every case both ways, and count."""
    tally = Tally()
    for _ in _compared(cases, tally):
        pass
    return tally


def thinned(cases: Iterator[Case], step: int) -> Iterator[Case]:
    """The first case of every family, and each `step`-th after it."""
    counts: Counter[str] = Counter()
    for case in cases:
        if counts[case.family] % step == 0:
            yield case
        counts[case.family] += 1


def each(cases: Iterator[Case]) -> Iterator[Tally]:
    """The count so far, after each case."""
    return _compared(cases, Tally())


def _compared(cases: Iterator[Case], tally: Tally) -> Iterator[Tally]:
    """Orders take turns."""
    for case, settings in zip(cases, itertools.cycle(RUNS), strict=False):
        with simulated(), running(settings):
            ours = case.ours()
            mx.eval(ours)
        wanted = case.wanted(settings)
        for mine, theirs in zip(ours, wanted, strict=True):
            tally.add(case.family, mine.size, differing(mine, theirs), settings)
        yield tally


def differing(a: mx.array, b: mx.array) -> int:
    """Elements whose bits differ. What a NaN carries beside being one is the hardware's affair."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return a.size
    bits = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32}[a.dtype.size]
    unequal = mx.contiguous(a).view(bits) != mx.contiguous(b).view(bits)
    return int((unequal & ~(mx.isnan(a) & mx.isnan(b))).sum())


def hostile(shape: tuple[int, ...], dtype: mx.Dtype, seed: int) -> mx.array:
    """Denormals, infinities, NaN, both zeros, and magnitudes to the ends of the dtype."""
    random = np.random.default_rng(seed)
    reach = 4 if dtype == mx.float16 else 18
    values = random.standard_normal(shape) * 10.0 ** random.integers(-reach - 2, reach, shape)
    values[random.random(shape) < 0.15] = -0.0
    values[random.random(shape) < 0.15] = 0.0
    values[random.random(shape) < 0.05] = 1e-40 if dtype != mx.float16 else 6e-8
    flat = values.reshape(-1)
    flat[random.integers(0, flat.size, 2)] = np.inf, np.nan
    return mx.array(values).astype(dtype)


def draws(dtype: mx.Dtype) -> Iterator[Callable[[tuple[int, ...]], mx.array]]:
    """Kinds of data, over and over, each time with other numbers."""
    for seed in itertools.count():
        for draw in kinds_of_data(seed):
            yield lambda shape, draw=draw: draw(shape, dtype)
        yield lambda shape, seed=seed: hostile(shape, dtype, seed)


def gemv(full: bool) -> Iterator[Case]:
    """Every way MLX shares columns out, with tails, and every number of rows at which ours changes."""
    shapes = [(4099, 36), (101, 300), (9, 160), (40, 60), (8, 1027), (300, 129), (67, 64), (31, 65)]
    counts = [2, 5, 16, 1, 9, 17, 3, 8]
    rounds = 6 if full else 1
    for dtype in FLOATS:
        data = draws(dtype)
        for (outputs, inputs), count in itertools.islice(zip(itertools.cycle(shapes), _turning(counts)), 8 * rounds):
            rows = 33 if full and outputs == 4099 else count
            draw = next(data)
            weight, given = draw((outputs, inputs)), draw((rows, inputs))
            bias = draw((outputs,)) if rows % 2 else None
            yield Case(str(dtype), *_both(row_exact_gemv, stock.gemv, weight, given, bias, run=stock.LOOSE))


def _turning(values: list[int]) -> Iterator[int]:
    """Values over and over, one further each time around."""
    for start in itertools.count():
        yield from values[start % len(values) :] + values[: start % len(values)]


def _both(
    ours: Callable[..., mx.array], wanted: Callable[..., mx.array], *args: object, run: Run | None = None
) -> tuple:
    strict = run is None or run.strict

    def reference(settings: Run) -> list[mx.array]:
        return [wanted(*args, run=Run(sum_order=settings.sum_order, strict=strict))]

    return lambda: [ours(*args)], reference


PACKINGS = [
    *(Packing("affine", bits, group) for bits in (2, 3, 4, 5, 6, 8) for group in (32, 64, 128)),
    *(Packing("mxfp4", 4, 32), Packing("mxfp8", 8, 32), Packing("nvfp4", 4, 16)),
]


_MANY = {True: 20_000, False: 60_000}
"""Outputs of a case of the whole plan: there are more cases of the affine packings."""


def qmv(full: bool) -> Iterator[Case]:
    """Every packing, in whole blocks of columns, with a tail, and over four lanes; rows of weight past the end."""
    packings = PACKINGS if full else [PACKINGS[place] for place in (1, 5, 6, 10, 12, 17, 18, 19, 20)]
    for place, packing in enumerate(packings):
        for dtype in FLOATS if full else (FLOATS[place % 3],):
            data, weights = draws(dtype), itertools.cycle(kinds_of_data(place))
            for inputs, outputs, count in ((1024, 37, 5), (384, 16, 17), (128, 75, 3)):
                rows = _MANY[packing.mode == "affine"] // outputs + count if full else count
                weight = next(weights)((outputs, inputs), dtype)
                packed = mx.quantize(weight, group_size=packing.group_size, bits=packing.bits, mode=packing.mode)
                yield _packed_case(packing, list(packed), next(data)((rows, inputs)))


def _packed_case(packing: Packing, packed: list[mx.array], rows: mx.array) -> Case:
    weight, scales, *biases = packed
    given = (packing, weight, scales, biases[0] if biases else None, rows)
    family = packing.mode if packing.mode != "affine" else f"affine {packing.bits} bits"
    return Case(
        family,
        lambda: [row_exact_qmv(*given)],
        lambda settings: [stock.qmv(packing, packed, rows, Run(sum_order=settings.sum_order))],
    )


class AttentionKind(NamedTuple):
    """A shape of attention.

    Attributes:
        gpu: last letter of the architecture, which decides about passes and blocks.
        window: keys a query sees; 0 for all.
    """

    batch: int
    heads: int
    key_heads: int
    size: int
    keys: int
    queries: int
    sinks: bool = False
    window: int = 0
    gpu: str = "g"


ATTENTION = (
    AttentionKind(2, 4, 1, 64, 70, 9, sinks=True, window=20),
    AttentionKind(1, 2, 2, 128, 33, 16),
    AttentionKind(1, 8, 1, 64, 4110, 3),
    AttentionKind(1, 2, 1, 96, 129, 5, sinks=True),
    AttentionKind(1, 2, 1, 256, 70, 6, window=40),
    AttentionKind(1, 4, 2, 64, 4099, 2, sinks=True, window=4000),
    AttentionKind(1, 2, 2, 64, 1031, 4, gpu="s"),
)
MORE_ATTENTION = (
    AttentionKind(1, 8, 1, 128, 1030, 5),
    AttentionKind(1, 8, 1, 128, 1023, 5, gpu="s"),
    AttentionKind(1, 8, 1, 128, 1500, 5, gpu="s"),
    AttentionKind(1, 4, 1, 64, 8196, 3, sinks=True, gpu="d"),
    AttentionKind(1, 2, 2, 96, 8196, 3, gpu="d"),
    AttentionKind(1, 16, 2, 64, 8200, 4, sinks=True),
    AttentionKind(3, 4, 4, 96, 1025, 17, window=500),
    AttentionKind(1, 4, 2, 256, 4200, 3),
    AttentionKind(2, 2, 1, 128, 8195, 2),
    AttentionKind(1, 1, 1, 64, 5000, 8),
    AttentionKind(1, 8, 2, 96, 4097, 1, sinks=True),
    AttentionKind(1, 6, 3, 64, 31, 13, sinks=True, window=7),
    AttentionKind(1, 3, 1, 128, 4500, 11, window=300),
)


def attention(full: bool) -> Iterator[Case]:
    """One and two passes, around the numbers of keys where MLX changes, shared heads, windows and sinks."""
    for place, kind in enumerate(ATTENTION + MORE_ATTENTION if full else ATTENTION):
        for dtype in FLOATS if full else (FLOATS[place % 3],):
            yield _attention_case(kind, dtype, place)


def _attention_case(kind: AttentionKind, dtype: mx.Dtype, seed: int) -> Case:
    keys, rows, size, width = mx.random.split(mx.random.key(seed), 4), kind.keys + 37, kind.size, kind.queries
    queries = mx.random.normal((kind.batch, kind.heads, width, size), key=keys[0]).astype(dtype)
    buffers = [mx.random.normal((kind.batch, kind.key_heads, rows, size), key=key).astype(dtype) for key in keys[1:3]]
    # What lies behind the keys in their buffer must not be looked at.
    behind = (mx.arange(rows) < kind.keys)[:, None]
    sides = [mx.where(behind, buffer, mx.nan).astype(dtype)[:, :, : kind.keys] for buffer in buffers]
    sinks = mx.random.normal((kind.heads,), key=keys[3]).astype(dtype) if kind.sinks else None
    ends = [kind.keys - width + 1 + place for place in range(width)]
    seen = tuple((max(0, end - kind.window) if kind.window else 0, end) for end in ends)
    mx.eval(queries, *sides)
    block = BlockAttention(queries, *sides, size**-0.5, sinks, seen)
    with mock.patch.object(block_attention, "gpu_class", return_value=kind.gpu):
        blocks = block.blocks()
    assert blocks is not None

    def ours() -> list[mx.array]:
        with mock.patch.object(block_attention, "gpu_class", return_value=kind.gpu):
            return [block.run()]

    def wanted(settings: Run) -> list[mx.array]:
        rows = []
        for place, (first, end) in enumerate(seen):
            mask = mx.arange(end) >= first if first else None
            cut = [side[:, :, :end] for side in sides]
            alone = stock.OneQuery(queries[:, :, place : place + 1], *cut, size**-0.5, mask, sinks)
            rows.append(alone.run(blocks, Run(sum_order=settings.sum_order)))
        return [mx.concatenate(rows, axis=2)]

    return Case(str(dtype), ours, wanted)


def walk(full: bool) -> Iterator[Case]:
    """Ties, NaN, nothing but -inf, masks; against mx.argmax and the walk in mlx ops."""
    shapes = [(1, 1, 100), (1, 5, 1000), (3, 8, 777), (2, 32, 513), (16, 2, 65)]
    kinds = ("plain", "ties", "nan", "nothing", "masked")
    random = np.random.default_rng(0)
    for dtype, shape, kind, logprobs in itertools.product(FLOATS, shapes, kinds, (False, True)):
        for _ in range(36 if full else 1):
            yield _walk_case(_greedy_block(shape, dtype, kind, logprobs, random))
    if full:
        for dtype, kind in itertools.product(FLOATS, kinds):
            yield _walk_case(_greedy_block((1, 3, 262_144), dtype, kind, True, random))


def _greedy_block(
    shape: tuple[int, int, int], dtype: mx.Dtype, kind: str, logprobs: bool, random: np.random.Generator
) -> GreedyBlock:
    batch, width, vocabulary = shape
    values = random.standard_normal(shape)
    if kind == "ties":
        values = np.round(values * 2)
    if kind == "nan":
        values[random.random(shape) < 1 / vocabulary] = np.nan
    if kind == "nothing":
        values[:] = -np.inf
        values[:, ::2, vocabulary // 2] = -5
    logits = mx.array(values).astype(dtype)
    allowed = None
    if kind == "masked":
        words = random.integers(0, 2**32, (batch, width, -(-vocabulary // 32)), dtype=np.uint32)
        words[random.random((batch, width)) < 0.2] = 0
        allowed = mx.array(words)
    lse = mx.logsumexp(logits, axis=-1) if logprobs else None
    proposed = mx.zeros((batch, width - 1), mx.int32)
    choices = np.array(GreedyBlock(logits, proposed, lse, allowed).choices())
    proposals = choices[:, :-1].copy()
    for row in proposals:
        cut = random.integers(0, width + 1)
        row[cut:] = random.integers(-1, vocabulary + 3, row[cut:].shape)
    return GreedyBlock(logits, mx.array(proposals), lse, allowed)


def _walk_case(block: GreedyBlock) -> Case:
    """The walk from logits, and the same tokens walked as if they had been chosen otherwise."""
    walks: list[GreedyBlock | ChosenBlock] = [block]
    if block.lse is not None and block.allowed is None:
        walks.append(ChosenBlock(block.choices().astype(mx.uint32), block.proposals, block.lse))
    dtype = str(block.logits.dtype)
    return Case(dtype, lambda: [walk.by_kernel() for walk in walks], lambda _: [walk.by_ops() for walk in walks])


TRIALS = {
    "row_exact_gemv": gemv,
    "row_exact_qmv": qmv,
    "greedy_walk": walk,
    "block_attention": attention,
}
