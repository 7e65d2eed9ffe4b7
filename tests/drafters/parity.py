"""Fixtures with a reference's outputs: which there are, and how far ours are from them.

A fixture is a checkpoint as its authors publish it, a `*golden*.safetensors` file of inputs and outputs that a
reference gave, and the target it drafts for. `find` looks for them; what the golden file of one kind of drafter holds,
and how to compare with it, is one `Layout` (`parity_<kind>.py`), listed in `test_fixtures.py`.
"""

from __future__ import annotations

import functools
import json
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import mlx.core as mx
from mlx_lm.utils import load_model

from mlx_spec.drafters.base import Drafter
from mlx_spec.model.target import Target
from mlx_spec.pairing import load_drafter

TOLERANCE = 1e-5
"""Of float32 values up to 1, from other kernels; larger arrays are allowed as much of their largest value."""

GOLDEN = "*golden*.safetensors"
CONFIG = "config.json"
TARGET = "target"

PREDICTION, ANY = re.compile(r"(^|\.)mtp[._]"), re.compile("")
"""Names of tensors: of a prediction layer in the target's own checkpoint, and all of them."""

Tensors = Mapping[str, mx.array]


@dataclass(frozen=True)
class Fixture:
    """A checkpoint and what a reference made of it.

    Attributes:
        name: where it was found, for messages.
        golden: the reference's inputs and outputs.
        checkpoint: the drafter's folder.
        target: folder of the target; the checkpoint itself, when the drafter is a part of it.
    """

    name: str
    golden: Path
    checkpoint: Path
    target: Path

    @functools.cached_property
    def expected(self) -> Tensors:
        """The golden file's tensors."""
        return _load(self.golden)

    @functools.cached_property
    def stored(self) -> Tensors:
        """The checkpoint's tensors under the names of its files."""
        tensors: dict[str, mx.array] = {}
        for path in _weights(self.checkpoint):
            tensors.update(_load(path))
        return tensors

    def pair(self) -> tuple[Drafter, Target]:
        """The drafter, loaded as a user would, and its target."""
        target = load_target(self.target)
        return self.pair_with(target), target

    def pair_with(self, target: Target) -> Drafter:
        """The drafter, loaded as a user would for this target."""
        with warnings.catch_warnings():
            # The golden file lies among the weights, and its tensors are none a drafter has.
            warnings.simplefilter("ignore")
            return load_drafter(self.checkpoint, target)


@dataclass
class Comparison:
    """Collects how far our arrays are from the reference's."""

    counts: dict[str, int] = field(default_factory=dict)
    largest: float = 0.0
    faults: list[str] = field(default_factory=list)

    def arrays(self, name: str, got: mx.array, want: mx.array) -> None:
        """Compare two float arrays. Equal names are counted together."""
        self._count(name)
        if got.shape != want.shape:
            self.faults.append(f"{name} has shape {got.shape}, want {want.shape}")
            return
        want = want.astype(mx.float32)
        difference = float(mx.abs(got.astype(mx.float32) - want).max().item())
        self.largest = max(self.largest, difference)
        allowed = TOLERANCE * max(1.0, float(mx.abs(want).max().item()))
        # Written so that NaN is a fault.
        if not difference <= allowed:
            self.faults.append(f"{name} differs by {difference:.3g}, allowed {allowed:.3g}")

    def ids(self, name: str, got: mx.array, want: mx.array) -> None:
        """Compare two integer arrays."""
        self._count(name)
        if got.tolist() != want.tolist():
            self.faults.append(f"{name} are {got.tolist()}, want {want.tolist()}")

    def summary(self) -> str:
        """Counts and the largest difference, on one line."""
        counted = ", ".join(f"{name} {count}" for name, count in self.counts.items())
        return f"max abs difference {self.largest:.2e} ({counted})"

    def _count(self, name: str) -> None:
        self.counts[name] = self.counts.get(name, 0) + 1


@dataclass(frozen=True)
class Layout:
    """What a golden file of one kind of drafter holds, and how to compare with it.

    Attributes:
        kind: what it is called in messages.
        tensors: names that every such golden file has, and no other kind's.
        compare: runs ours and compares.
    """

    kind: str
    tensors: tuple[str, ...]
    compare: Callable[[Fixture, Comparison], None]

    def fits(self, names: Sequence[str]) -> bool:
        """Whether a golden file with these tensors is of this layout."""
        return all(name in names for name in self.tensors)


def find(folder: Path) -> list[Fixture]:
    """Every fixture below a folder, and every other checkpoint that holds the same weights as one, in path order.

    A golden file belongs to the checkpoint it lies in; otherwise to the folder it is named after
    (`<folder>_golden.safetensors`), or to every checkpoint beside it.
    """
    found = [
        Fixture(checkpoint.relative_to(folder.parent).as_posix(), golden, checkpoint, _target_of(checkpoint))
        for golden in sorted(folder.rglob(GOLDEN))
        for checkpoint in _checkpoints(golden)
    ]
    taken = {fixture.checkpoint for fixture in found}
    twins = []
    for config in sorted(folder.rglob(CONFIG)):
        checkpoint = config.parent
        if checkpoint in taken or checkpoint.name == TARGET or not _weights(checkpoint):
            continue
        for fixture in found:
            if fixture.checkpoint.parent == checkpoint.parent and _same_drafter(checkpoint, fixture):
                name = f"{checkpoint.relative_to(folder.parent).as_posix()}={fixture.checkpoint.name}"
                target = checkpoint if fixture.target == fixture.checkpoint else fixture.target
                twins.append(Fixture(name, fixture.golden, checkpoint, target))
                break
    return found + twins


def _checkpoints(golden: Path) -> list[Path]:
    beside = golden.parent
    if (beside / CONFIG).is_file():
        return [beside]
    named = beside / re.sub(r"_?golden.*", "", golden.stem)
    if named != beside and (named / CONFIG).is_file():
        return [named]
    return sorted(path.parent for path in beside.glob(f"*/{CONFIG}") if path.parent.name != TARGET)


def _target_of(checkpoint: Path) -> Path:
    """The folder `target` nearest above, what a nested config names, or the checkpoint itself."""
    for above in (checkpoint, checkpoint.parent, checkpoint.parent.parent):
        if (above / TARGET / CONFIG).is_file():
            return above / TARGET
    verifier = json.loads((checkpoint / CONFIG).read_text()).get("speculators_config", {}).get("verifier", {})
    named = checkpoint / str(verifier.get("name_or_path"))
    return named.resolve() if (named / CONFIG).is_file() else checkpoint


def _weights(checkpoint: Path) -> list[Path]:
    return [path for path in sorted(checkpoint.glob("*.safetensors")) if not path.match(GOLDEN)]


def _same_drafter(checkpoint: Path, fixture: Fixture) -> bool:
    """Whether two checkpoints hold the same tensors, under whatever names, but for those borrowed from the target.

    Of those that are their own target, the drafter's part.
    """
    if fixture.target == fixture.checkpoint and any(PREDICTION.search(name) for name in fixture.stored):
        return _contents(checkpoint, PREDICTION) == _contents(fixture.checkpoint, PREDICTION)
    ours, theirs = _contents(checkpoint), _contents(fixture.checkpoint)
    if not ours or not ours <= theirs or not theirs - ours <= _contents(fixture.target):
        return False
    configs = (json.loads((folder / CONFIG).read_text()) for folder in (checkpoint, fixture.checkpoint))
    return len({_switches(config) for config in configs}) == 1


def _switches(config: Mapping[str, object]) -> frozenset[str]:
    """Keys that are true, nested ones included, but for those that change nothing."""
    on = {key for key, value in config.items() if value is True} - {"use_cache", "use_aux_hidden_state"}
    return frozenset(on).union(*(_switches(value) for value in config.values() if isinstance(value, dict)))


@functools.cache
def _contents(checkpoint: Path, named: re.Pattern[str] = ANY) -> frozenset[tuple[tuple[int, ...], bytes]]:
    return frozenset(
        (array.shape, bytes(memoryview(array.reshape(-1).view(mx.uint8))))
        for path in _weights(checkpoint)
        for name, array in _load(path).items()
        if named.search(name)
    )


@functools.cache
def load_target(folder: Path) -> Target:
    """A target as mlx-lm loads it."""
    return Target(load_model(folder)[0])


def _load(path: Path) -> dict[str, mx.array]:
    loaded = mx.load(str(path))
    assert isinstance(loaded, dict)
    return loaded
