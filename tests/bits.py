"""Bitwise comparison of mlx arrays: NaN equals NaN, -0.0 differs from 0.0, dtype and shape count."""

import mlx.core as mx
import numpy as np

_UINT_OF_SIZE = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32, 8: mx.uint64}


def bits(array: mx.array) -> np.ndarray:
    """The raw bits as unsigned integers, in memory of their own. Reads through the buffer protocol, not `item`."""
    return np.array(array.view(_UINT_OF_SIZE[array.dtype.size]))


def independent_array(array: mx.array) -> mx.array:
    """An evaluated array with the same bits and dtype that shares no buffer with `array`."""
    own = mx.array(bits(array)).view(array.dtype)
    mx.eval(own)
    return own


def same_bits(got: mx.array, want: mx.array) -> mx.array:
    """Whether two arrays of one dtype and shape are the same bit for bit; not evaluated."""
    unsigned = _UINT_OF_SIZE[want.dtype.size]
    return mx.array_equal(got.view(unsigned), want.view(unsigned))


def bit_difference(got: mx.array, want: mx.array) -> str | None:
    """None if both are the same bit for bit, else one phrase: what differs first, with both values."""
    if got.dtype != want.dtype:
        return f"dtype {got.dtype}, want {want.dtype}"
    if got.shape != want.shape:
        return f"shape {got.shape}, want {want.shape}"
    if np.array(same_bits(got, want)):
        return None
    got_bits, want_bits = bits(got), bits(want)
    differing = np.argwhere(got_bits != want_bits)
    index = tuple(int(i) for i in differing[0])
    return (
        f"{len(differing)} of {got_bits.size} elements differ, first at index {index}: "
        f"got {_shown(got, got_bits, index)}, want {_shown(want, want_bits, index)}"
    )


def _shown(array: mx.array, raw: np.ndarray, index: tuple[int, ...]) -> str:
    """A value as a person reads it, and its bits, because two different ones may print alike."""
    value = mx.array(raw[index]).view(array.dtype)
    readable = value.astype(mx.float32) if array.dtype == mx.bfloat16 else value
    return f"{np.array(readable)!s} (bits {int(raw[index]):#x})"


def assert_same_bits(got: mx.array, want: mx.array, what: str = "array") -> None:
    """Raise AssertionError naming `what`, the first differing index and both values."""
    difference = bit_difference(got, want)
    assert difference is None, f"{what}: {difference}"
