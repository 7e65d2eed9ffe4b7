"""On paper: bytes and the least time of one verify round on Apple GPUs, by route: the tables of docs/metal_cost.md.

    .venv/bin/python scripts/metal_cost.py

Nothing is measured. A round takes at least the time to move its bytes at the chip's full bandwidth, and at least the
time to do its multiplications and additions at the GPU's full rate. Launches, attention scores and everything small
are left out.
"""

from __future__ import annotations

from dataclasses import dataclass

WIDTHS = (1, 3, 5, 9, 16)
CONTEXT = 4096
OPERATIONS_TO_DECODE = 2
"""Floating-point operations to unpack a weight once."""


@dataclass(frozen=True)
class Chip:
    """A chip in its largest configuration.

    Attributes:
        gb_per_s: bandwidth of its memory, the maker's figure.
        cores, ghz: of the GPU; a core has 128 lanes.
    """

    name: str
    gb_per_s: float
    cores: int
    ghz: float

    @property
    def tflops(self) -> float:
        return self.cores * 128 * 2 * self.ghz / 1e3


CHIPS = (
    Chip("M1", 68, 8, 1.278),
    Chip("M2 Pro", 200, 19, 1.398),
    Chip("M3 Max", 400, 40, 1.398),
    Chip("M4 Pro", 273, 20, 1.470),
    Chip("M5 Max", 614, 40, 1.678),
)


@dataclass(frozen=True)
class Model:
    """What one forward reads.

    Attributes:
        dense: weights that every token is multiplied by.
        bits: of a weight, scales included.
        expert: weights of one expert in one layer, 0 without experts.
        experts, chosen, layers: experts of a layer, those of one token, layers that have them.
        key_bytes: keys and values of one token, all layers.
        state_bytes: recurrent states, read and written.
    """

    name: str
    dense: float
    bits: float
    expert: float = 0
    experts: int = 1
    chosen: int = 0
    layers: int = 0
    key_bytes: float = 0
    state_bytes: float = 0

    def expert_weights(self, width: int, shared: bool) -> float:
        """Weights of experts read for a block: each distinct expert once, or each token's own."""
        if shared:
            distinct = self.experts * (1 - (1 - self.chosen / self.experts) ** width)
            return self.layers * self.expert * distinct
        return self.layers * self.expert * self.chosen * width

    def per_token(self) -> float:
        return self.dense + self.expert_weights(1, shared=False)


MODELS = (
    Model("8B dense, 4 bits in groups of 64", 7.50e9, 4.5, key_bytes=32 * 8 * 128 * 2 * 2),
    Model(
        "27B hybrid, 8 bits in groups of 64",
        25.6e9,
        8.5,
        key_bytes=16 * 4 * 256 * 2 * 2,
        state_bytes=2 * 48 * 48 * 128 * 128 * 4,
    ),
    Model(
        "30B-A3B mixture of experts, 4 bits in groups of 64",
        48 * 18.9e6 + 311e6,
        4.5,
        expert=3 * 2048 * 768,
        experts=128,
        chosen=8,
        layers=48,
        key_bytes=48 * 4 * 128 * 2 * 2,
    ),
)


@dataclass(frozen=True)
class Way:
    """A route, as far as it decides what is read.

    Attributes:
        weights_once: the block shares what it reads of the dense weights.
        tile: queries that share a reading of the keys.
        states_once: the block reads and writes recurrent states once.
    """

    name: str
    weights_once: bool
    tile: int
    states_once: bool

    def bytes(self, model: Model, width: int) -> float:
        dense = model.dense * (1 if self.weights_once else width)
        weights = (dense + model.expert_weights(width, self.weights_once)) * model.bits / 8
        keys = model.key_bytes * CONTEXT * -(-width // self.tile)
        return weights + keys + model.state_bytes * (1 if self.states_once else width)

    def operations(self, model: Model, width: int) -> float:
        multiplied = 2 * model.per_token() * width
        read = (model.dense if self.weights_once else model.dense * width) + model.expert_weights(width, shared=False)
        return multiplied + OPERATIONS_TO_DECODE * read

    def least_ms(self, model: Model, width: int, chip: Chip) -> float:
        moving = self.bytes(model, width) / chip.gb_per_s / 1e6
        return max(moving, self.operations(model, width) / chip.tflops / 1e9)


WAYS = (
    Way("row-exact kernels", weights_once=True, tile=8, states_once=True),
    Way("batch axis, attention by position", weights_once=False, tile=1, states_once=True),
    Way("step-through", weights_once=False, tile=1, states_once=False),
)


def main() -> None:
    print("| chip | bandwidth, GB/s | GPU cores | clock, GHz | fp32 TFLOPS |\n|---|---|---|---|---|")
    for chip in CHIPS:
        print(f"| {chip.name} | {chip.gb_per_s:.0f} | {chip.cores} | {chip.ghz} | {chip.tflops:.1f} |")
    for model in MODELS:
        print(f"\n### {model.name}\n")
        print("GB moved by one round at a context of 4096:\n")
        print("| route | " + " | ".join(f"W={width}" for width in WIDTHS) + " |")
        print("|---" * (len(WIDTHS) + 1) + "|")
        for way in WAYS:
            print(f"| {way.name} | " + " | ".join(f"{way.bytes(model, width) / 1e9:.1f}" for width in WIDTHS) + " |")
        print("\nLeast milliseconds of a round, and in brackets the tokens it must hand out to be worth it:\n")
        print("| chip | route | " + " | ".join(f"W={width}" for width in WIDTHS) + " |")
        print("|---" * (len(WIDTHS) + 2) + "|")
        for chip in CHIPS:
            for way in WAYS:
                times = [way.least_ms(model, width, chip) for width in WIDTHS]
                cells = [f"{spent:.1f} ({spent / times[0]:.1f})" for spent in times]
                print(f"| {chip.name} | {way.name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
