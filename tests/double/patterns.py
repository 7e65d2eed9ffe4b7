"""How calls of several rows differ from calls of one row on Metal, one pattern per generation of chips, as data.

What a kernel does to the bits is kept apart from which kernel is taken. A kernel stands here for an `Order`, the order
in which it adds up the terms of a sum; which one is taken follows the dispatch rules of MLX 0.32.4. None means the
one-row order, whose bits are the stock ones.
"""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

HALF = (mx.float16, mx.bfloat16)


@dataclass(frozen=True)
class Order:
    """An order of summation: the terms are cut into `parts` runs, each is summed and rounded, then the sums are added.

    Orders with different `parts` give different bits; that is all that is meant by the number. Rounding the partial
    sums to the dtype of the result makes half precision differ in most outputs, where the hardware differs in few:
    a test of a few rows would not see those.
    """

    name: str
    parts: int


WIDE_LOW = Order("gemv_wide, 32 lanes over K", 2)
WIDE_HIGH = Order("gemv_wide, 16 lanes over K", 3)
STEEL = Order("steel GEMM, 16 rows a tile", 4)
STEEL_TALL = Order("steel GEMM, more tiles", 5)
NAX_THIN = Order("gemm_thin_nax", 6)
NAX = Order("NAX GEMM", 7)
COLUMN = Order("gemv along the rows: one output per row", 3)
QMV_WIDE = Order("qmv_wide", 2)
QMM = Order("qmm", 3)
QMM_NAX = Order("qmm_t_nax", 4)
QMM_PLAIN = Order("qmm_n", 2)
GATHERED = Order("gather GEMM over sorted experts", 3)
GATHERED_ROWS = Order("gather GEMM of several rows an expert", 2)

Bands = tuple[tuple[int, Order], ...]
"""(rows, order), ascending: the order from that many rows on."""


def order_at(bands: Bands, rows: int) -> Order | None:
    """The order that this many rows are added up in."""
    return next((order for first, order in reversed(bands) if rows >= first), None)


@dataclass(frozen=True, kw_only=True)
class Dense:
    """`x @ W.T` with and without a bias.

    Attributes:
        half: fp16 and bf16, where K is a multiple of `multiple` and there is one matrix.
        half_narrow: the same with at most `narrow` outputs.
        other: every other call on one matrix: fp32, unaligned.
        batched: several rows against each of several matrices, as scores and values of unfused attention.
        column: several rows, one output: with one row it is a dot product.
    """

    half: Bands
    half_narrow: Bands
    other: Bands
    batched: Bands
    column: Order = COLUMN
    multiple: int = 4
    narrow: int = 64

    def order(self, rows: int, terms: int, outputs: int, dtype: mx.Dtype, single: bool) -> Order | None:
        """The order of a call.

        Args:
            terms: K.
            single: one matrix serves all rows.
        """
        if rows < 2 or terms < 2:
            return None
        if outputs == 1:
            return self.column
        if not single:
            return order_at(self.batched, rows)
        if dtype in HALF and terms % self.multiple == 0:
            return order_at(self.half_narrow if outputs <= self.narrow else self.half, rows)
        return order_at(self.other, rows)


@dataclass(frozen=True, kw_only=True)
class Quantized:
    """`quantized_matmul`.

    Attributes:
        limits: (size, rows): from that many rows on a GEMM is taken, where K and N are at most that size; the last
            one holds for everything larger.
        affine: below the limit, affine weights.
        fp: below the limit, mxfp4, nvfp4 and mxfp8.
        quad_terms: values of K at which every mode keeps the one-row order below the limit, if `quad_bits` fits.
        gemm: from the limit on.
        plain_rows: rows from which weights that are not transposed (the values of a quantized cache) take `plain`.
        split_terms: terms from which fewer rows than that are split by their number, which differs between positions.
    """

    limits: tuple[tuple[int, int], ...]
    affine: Order | None
    fp: Order | None
    gemm: Order = QMM
    quad_terms: tuple[int, ...] = (64, 128)
    quad_bits: tuple[int, ...] = (2, 4, 8)
    plain: Order = QMM_PLAIN
    plain_rows: int = 4
    split_terms: int = 1024
    split: Order = Order("qvm_split_k", 8)

    def order(self, rows: int, terms: int, outputs: int, mode: str, bits: int) -> Order | None:
        """The order of a call with transposed weights."""
        if rows < 2 or terms < 2:
            return None
        if rows >= self.limit(terms, outputs):
            return self.gemm
        if terms in self.quad_terms and bits in self.quad_bits:
            return None
        return self.affine if mode == "affine" else self.fp

    def limit(self, terms: int, outputs: int) -> int:
        """Rows from which a GEMM is taken."""
        size = max(terms, outputs)
        return next((rows for most, rows in self.limits if size <= most), self.limits[-1][1])

    def order_plain(self, rows: int, terms: int) -> Order | None:
        """The order of a call with weights that are not transposed."""
        if rows < 2 or terms < 2:
            return None
        if rows >= self.plain_rows:
            return self.plain
        return self.split if terms >= self.split_terms else None


@dataclass(frozen=True, kw_only=True)
class Experts:
    """`gather_mm` and `gather_qmm`. One row an expert, unsorted, keeps the one-row order.

    Attributes:
        sorted_dense: sorted calls of dense experts.
        sorted_quantized: sorted calls of quantized experts, from `slices` rows that are `per_expert` times the experts.
        rows: several rows an expert.
    """

    sorted_dense: Order | None = GATHERED
    sorted_quantized: Order | None = GATHERED
    slices: int = 16
    per_expert: int = 4
    rows: Order = GATHERED_ROWS


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """One row of the table of 2-pass block counts.

    Attributes:
        queries: (least, most) queries times query heads per key head.
        keys: (least, most) keys.
    """

    blocks: int
    queries: tuple[int, int] = (0, 1 << 30)
    keys: tuple[int, int] = (0, 1 << 30)

    def fits(self, queries: int, keys: int) -> bool:
        return self.queries[0] <= queries <= self.queries[1] and self.keys[0] <= keys <= self.keys[1]


BLOCKS_BASE = (Blocks(blocks=64, queries=(4, 1 << 30)), Blocks(blocks=32))
BLOCKS_MAX = (
    Blocks(blocks=64, keys=(0, 1024)),
    Blocks(blocks=64, queries=(0, 4)),
    Blocks(blocks=128, keys=(0, 8192)),
    Blocks(blocks=256, keys=(0, 32768)),
    Blocks(blocks=512, keys=(0, 65536)),
    Blocks(blocks=1024),
)
BLOCKS_ULTRA = (
    Blocks(blocks=256, queries=(0, 2), keys=(8193, 1 << 30)),
    Blocks(blocks=512, queries=(6, 1 << 30), keys=(16384, 65535)),
    Blocks(blocks=1024, queries=(6, 1 << 30), keys=(65536, 1 << 30)),
    Blocks(blocks=128),
)


@dataclass(frozen=True, kw_only=True)
class Attention:
    """`mx.fast.scaled_dot_product_attention`.

    Attributes:
        head_dims: (of queries, of values) that the vector kernels know.
        most_queries, most_rows: beyond so many queries, or queries times query heads per key head, none of them is.
        array_masks: whether the vector kernels take a mask that is an array. MLX 0.32.4 does; which kernels do has
            changed between releases, so a pattern may say no.
        two_pass_keys: keys from which the 2-pass kernel is taken.
        two_pass_keys_grouped: the same where several query heads share a key head.
        blocks: of the 2-pass kernel; the first row that fits counts.
        chunks: (query heads per key head, head dims) at which one query over `chunk_keys` keys or more takes a kernel
            that several queries cannot take.
        steel_dims: head dims of the kernel for more queries.
    """

    blocks: tuple[Blocks, ...] = BLOCKS_BASE
    two_pass_keys: int = 1 << 30
    two_pass_keys_grouped: int = 4096
    array_masks: bool = True
    head_dims: tuple[tuple[int, int], ...] = ((64, 64), (96, 96), (128, 128), (256, 256), (192, 128), (96, 64))
    steel_dims: tuple[tuple[int, int], ...] = ((64, 64), (72, 72), (80, 80), (96, 96), (128, 128), (96, 64))
    most_queries: int = 8
    most_rows: int = 32
    chunks: tuple[tuple[int, tuple[int, ...]], ...] = ((8, (64, 128)), (12, (128,)), (16, (128,)))
    chunk_keys: int = 8192


@dataclass(frozen=True, kw_only=True)
class Pattern:
    """How several rows differ from one, for one kind of chip."""

    name: str
    dense: Dense
    quantized: Quantized
    experts: Experts = Experts()
    attention: Attention = Attention()


STEEL_BANDS: Bands = ((2, STEEL), (17, STEEL_TALL))
NAX_BANDS: Bands = ((2, NAX_THIN), (65, NAX))

_DENSE_13 = Dense(half=STEEL_BANDS, half_narrow=STEEL_BANDS, other=STEEL_BANDS, batched=STEEL_BANDS)
_DENSE_15 = Dense(
    half=((2, WIDE_LOW), (6, WIDE_HIGH), (16, STEEL), (17, STEEL_TALL)),
    half_narrow=((2, WIDE_LOW), (16, STEEL), (17, STEEL_TALL)),
    other=STEEL_BANDS,
    batched=STEEL_BANDS,
)
_DENSE_17 = Dense(
    half=((2, WIDE_LOW), (6, WIDE_HIGH), (16, NAX_THIN), (65, NAX)),
    half_narrow=((2, WIDE_LOW), (16, NAX_THIN)),
    other=((2, NAX),),
    batched=NAX_BANDS,
)
_QUANTIZED_15 = Quantized(limits=((2048, 13), (4096, 15), (1 << 30, 13)), affine=QMV_WIDE, fp=QMV_WIDE)

GEN13 = Pattern(
    name="gen13",
    dense=_DENSE_13,
    quantized=Quantized(limits=((2048, 14), (4096, 10), (1 << 30, 6)), affine=None, fp=QMV_WIDE),
)
GEN15 = Pattern(name="gen15", dense=_DENSE_15, quantized=_QUANTIZED_15)
GEN17 = Pattern(
    name="gen17",
    dense=_DENSE_17,
    quantized=Quantized(
        limits=((2048, 33), (4096, 25), (1 << 30, 13)), affine=QMV_WIDE, fp=QMV_WIDE, gemm=QMM_NAX, split=QMM_NAX
    ),
    attention=Attention(array_masks=False),
)
MAX = Pattern(
    name="max",
    dense=_DENSE_15,
    quantized=_QUANTIZED_15,
    attention=Attention(blocks=BLOCKS_MAX, two_pass_keys=1024, array_masks=False),
)
ULTRA = Pattern(
    name="ultra",
    dense=_DENSE_13,
    quantized=Quantized(limits=((2048, 32), (4096, 18), (1 << 30, 12)), affine=None, fp=QMV_WIDE),
    attention=Attention(blocks=BLOCKS_ULTRA, two_pass_keys=1024),
)

PATTERNS: dict[str, Pattern] = {pattern.name: pattern for pattern in (GEN13, GEN15, GEN17, MAX, ULTRA)}
"""M1 and M2; M3 and M4; M5 with NAX; an M3 or M4 Max; an M1 or M2 Ultra."""
