"""On a Mac: what a verify call's products cost by stock one row, stock block and our kernels, for each shape class.

    .venv/bin/python scripts/metal_times.py [--repeats N]

Times are medians of interleaved runs, in microseconds of one call; each run evaluates 20 calls in one graph.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from mlx_spec.ops.block_attention import BlockAttention
from mlx_spec.ops.kernel import kernels_run_here
from mlx_spec.ops.linear import row_exact_gemv
from mlx_spec.ops.packed import Packing, row_exact_qmv

WIDTHS = (1, 2, 3, 5, 9, 16)
SHAPES = ((1024, 2048), (4096, 4096), (14336, 4096), (4096, 14336), (128256, 4096))
PACKINGS = (Packing("affine", 4, 64), Packing("affine", 8, 64), Packing("mxfp4", 4, 32), Packing("nvfp4", 4, 16))
CALLS = 20

Call = Callable[[], mx.array]


def medians(ways: dict[str, Call], repeats: int) -> dict[str, float]:
    """Microseconds of one call of each way."""
    spent: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(repeats + 1):
        for name, call in ways.items():
            started = time.perf_counter()
            mx.eval([call() for _ in range(CALLS)])
            spent[name].append((time.perf_counter() - started) / CALLS * 1e6)
    return {name: statistics.median(times[1:]) for name, times in spent.items()}


def row(label: str, width: int, ways: dict[str, Call], repeats: int) -> None:
    found = medians(ways, repeats)
    cells = [f"{microseconds:.1f}" for microseconds in found.values()]
    print(f"| {label} | {width} | {' | '.join(cells)} | {found['ours'] / found['one row']:.2f} |", flush=True)


def products(repeats: int) -> None:
    for outputs, inputs in SHAPES:
        dense = (mx.random.normal((outputs, inputs)) / inputs**0.5).astype(mx.bfloat16)
        for packing in (None, *PACKINGS):
            label = f"{outputs} x {inputs} {'bf16' if packing is None else f'{packing.mode} {packing.bits}'}"
            for width in WIDTHS:
                rows = mx.random.normal((width, inputs)).astype(mx.bfloat16)
                mx.eval(dense, rows)
                row(label, width, _dense(dense, rows) if packing is None else _packed(dense, packing, rows), repeats)


def _dense(weight: mx.array, rows: mx.array) -> dict[str, Call]:
    return {
        "one row": lambda: rows[:1] @ weight.T,
        "block": lambda: rows @ weight.T,
        "ours": lambda: row_exact_gemv(weight, rows),
    }


def _packed(dense: mx.array, packing: Packing, rows: mx.array) -> dict[str, Call]:
    settings = packing._asdict()
    weight, scales, *biases = sides = list(mx.quantize(dense, **settings))
    mx.eval(sides)
    return {
        "one row": lambda: mx.quantized_matmul(rows[:1], *sides, transpose=True, **settings),
        "block": lambda: mx.quantized_matmul(rows, *sides, transpose=True, **settings),
        "ours": lambda: row_exact_qmv(packing, weight, scales, biases[0] if biases else None, rows),
    }


def attention(repeats: int) -> None:
    for heads, key_heads, size, keys in ((32, 8, 128, 900), (32, 8, 128, 4500), (16, 2, 256, 4500), (64, 8, 128, 900)):
        sides = [mx.random.normal((1, key_heads, keys, size)).astype(mx.bfloat16) for _ in range(2)]
        for width in WIDTHS:
            queries = mx.random.normal((1, heads, width, size)).astype(mx.bfloat16)
            seen = tuple((0, keys - width + 1 + place) for place in range(width))
            block = BlockAttention(queries, sides[0], sides[1], size**-0.5, None, seen)
            label = f"attention {heads}/{key_heads} of {size}, {keys} keys"
            if block.blocks() is None:
                print(f"| {label} | {width} | no kernel of ours | | | |")
            else:
                mx.eval(sides, queries)
                row(label, width, _attention(block), repeats)


def _attention(block: BlockAttention) -> dict[str, Call]:
    def stock(width: int) -> mx.array:
        given, mask = block.queries[:, :, :width], "causal" if width > 1 else None
        return mx.fast.scaled_dot_product_attention(given, block.keys, block.values, scale=block.scale, mask=mask)

    return {"one row": lambda: stock(1), "block": lambda: stock(len(block.seen)), "ours": block.run}


def main() -> int:
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--repeats", type=int, default=7)
    options = flags.parse_args()
    if not kernels_run_here():
        print("metal_times: needs Metal", file=sys.stderr)
        return 2
    print("| op | W | stock one row, us | stock block, us | ours, us | ours / stock one row |")
    print("|---|---|---|---|---|---|")
    products(options.repeats)
    attention(options.repeats)
    return 0


if __name__ == "__main__":
    sys.exit(main())
