"""Attention of a block of queries by a kernel that reads a key once for several of them."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from mlx_spec.ops.kernel import SIMD_LANES, Kernel, gpu_class, padded

_INPUTS = ("queries", "keys", "values", "starts", "stops", "sinks", "scale")
_SIDES = "queries, keys, values, starts, stops, sinks"
_STRIDES = "keys_strides, values_strides"
_SIZES = "queries_shape[1], keys_shape[1], queries_shape[2], keys_shape[2]"

_ONE_PASS = Kernel(
    "block_attention",
    "block_attention",
    _INPUTS,
    ("out",),
    "threadgroup float exchange[1024], highest[32], sums[32];"
    f" block_attention<T, D, TILE, SINKS>({_SIDES}, out, {_STRIDES}, {_SIZES}, scale,"
    " threadgroup_position_in_grid, simdgroup_index_in_threadgroup, thread_index_in_simdgroup, exchange, highest,"
    " sums);",
    contiguous=False,
)
_FIRST_PASS = Kernel(
    "block_attention_blocks",
    "block_attention",
    (*_INPUTS, "blocks"),
    ("partial", "sums", "highest"),
    f"block_attention_blocks<T, D, TILE, SINKS>({_SIDES}, partial, sums, highest, {_STRIDES}, {_SIZES}, blocks, scale,"
    " threadgroup_position_in_grid, simdgroup_index_in_threadgroup, thread_index_in_simdgroup);",
    contiguous=False,
)
_SECOND_PASS = Kernel(
    "block_attention_merge",
    "block_attention",
    ("partial", "sums", "highest", "blocks"),
    ("out",),
    "threadgroup float exchange[1024];"
    " block_attention_merge<T, D>(partial, sums, highest, out, blocks, threadgroup_position_in_grid,"
    " simdgroup_index_in_threadgroup, thread_index_in_simdgroup, exchange);",
)

_HEAD_SIZES = (64, 96, 128, 256)
_MOST_SHARED = 32
"""Query heads to a key head for which MLX takes its kernel for one query."""

_TWO_PASSES = 1024
_TWO_PASSES_SHARED = 4096
_CHUNKS = 8192
_CHUNKED = {8: (64, 128), 12: (128,), 16: (128,)}
"""Sharing -> head sizes for which MLX has another kernel for one query from `_CHUNKS` keys on."""

_FLOATS = (mx.float32, mx.float16, mx.bfloat16)


@dataclass(frozen=True)
class BlockAttention:
    """One call.

    Attributes:
        queries: [B, H, W, D].
        keys, values: [B, Hk, N, D], views of larger buffers as well; H a multiple of Hk.
        scale: of the scores.
        sinks: [H] or None.
        seen: for each query the first key it sees, and the one behind the last.
    """

    queries: mx.array
    keys: mx.array
    values: mx.array
    scale: float
    sinks: mx.array | None
    seen: tuple[tuple[int, int], ...]

    def blocks(self) -> int | None:
        """How many blocks MLX deals the keys of each query to when it comes alone; 0 for one pass, None if unknown.

        None as well when the number is not the same for all queries.
        """
        heads, size, shared = self.queries.shape[1], self.queries.shape[3], self._shared
        dtypes = {array.dtype for array in (self.queries, self.keys, self.values)}
        known = size in _HEAD_SIZES and self.values.shape[3] == size and shared <= _MOST_SHARED
        if not known or heads % self.keys.shape[1] or len(dtypes) != 1 or self.queries.dtype not in _FLOATS:
            return None
        numbers = {self._blocks_alone(first, stop) for first, stop in self.seen}
        return numbers.pop() if len(numbers) == 1 else None

    @property
    def _shared(self) -> int:
        return self.queries.shape[1] // self.keys.shape[1]

    def _blocks_alone(self, first: int, keys: int) -> int | None:
        letter, shared = gpu_class(), self._shared
        bare = first == 0 and self.sinks is None
        if bare and keys >= _CHUNKS and self.queries.shape[3] in _CHUNKED.get(shared, ()):
            return None
        if not (letter in "ds" and keys >= _TWO_PASSES) and not (shared > 1 and keys >= _TWO_PASSES_SHARED):
            return 0
        return _key_blocks(letter, shared, keys)

    def run(self) -> mx.array:
        """[B, H, W, D], every query as if it came alone. Lazy.

        Raises:
            ValueError: `blocks()` is None.

        Cost:
            Keys and values once for each 8 queries, for each 4 of heads of 256.
        """
        blocks = self.blocks()
        if blocks is None:
            raise ValueError(f"attention of heads of {self.queries.shape[3]} over {self.seen[-1][1]} keys: no kernel")
        return self._in_two_passes(blocks) if blocks else self._in_one_pass()

    def _in_one_pass(self) -> mx.array:
        batch, heads, width, _ = self.queries.shape
        lanes = SIMD_LANES * SIMD_LANES
        return _ONE_PASS(
            self._inputs(),
            [(self.queries.shape, self.queries.dtype)],
            template=self._template(),
            grid=(batch * heads * lanes, -(-width // self._tile), 1),
            threadgroup=(lanes, 1, 1),
        )[0]

    def _in_two_passes(self, blocks: int) -> mx.array:
        (batch, heads, width, size), dtype = self.queries.shape, self.queries.dtype
        rows = (batch, heads, width, blocks)
        parts = _FIRST_PASS(
            [*self._inputs(), mx.array(blocks, mx.int32)],
            [((*rows, size), dtype), (rows, mx.float32), (rows, mx.float32)],
            template=self._template(),
            grid=(self.keys.shape[1] * SIMD_LANES, batch * self._shared, blocks * -(-width // self._tile)),
            threadgroup=(SIMD_LANES, self._shared, 1),
        )
        lanes = SIMD_LANES * SIMD_LANES
        return _SECOND_PASS(
            [*parts, mx.array(blocks, mx.int32)],
            [(self.queries.shape, dtype)],
            template=[("T", dtype), ("D", size)],
            grid=(batch * heads * width * lanes, 1, 1),
            threadgroup=(lanes, 1, 1),
        )[0]

    @property
    def _tile(self) -> int:
        return 4 if self.queries.shape[3] > 128 else 8

    def _inputs(self) -> list[mx.array]:
        starts, stops = (padded(mx.array(numbers, mx.int32)) for numbers in zip(*self.seen, strict=True))
        sinks = mx.zeros((1,), self.queries.dtype) if self.sinks is None else self.sinks
        scale = mx.array(self.scale, mx.float32)
        return [mx.contiguous(self.queries), self.keys, self.values, starts, stops, mx.contiguous(sinks), scale]

    def _template(self) -> list[tuple[str, object]]:
        return [
            *(("T", self.queries.dtype), ("D", self.queries.shape[3])),
            *(("TILE", self._tile), ("SINKS", self.sinks is not None)),
        ]


def _key_blocks(letter: str, shared: int, keys: int) -> int:
    """MLX's number of blocks for one query whose head shares its keys with `shared` - 1 others."""
    if letter == "s":
        if keys <= 1024 or shared <= 4:
            return 64
        return next((count for bound, count in ((8192, 128), (32768, 256), (65536, 512)) if keys <= bound), 1024)
    if letter == "d":
        if shared <= 2 and keys > 8192:
            return 256
        if shared >= 6 and keys >= 16384:
            return 512 if keys < 65536 else 1024
        return 128
    return 64 if shared >= 4 else 32
