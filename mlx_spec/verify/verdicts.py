"""What was found out about one model on one machine, and the file it is kept in."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import platform
import threading
from hashlib import blake2b
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten
from pydantic import BaseModel, ConfigDict, ValidationError

from mlx_spec.environment import mlx_settings
from mlx_spec.files import read_regular, replace_file, sole_writer
from mlx_spec.model.swap import own_class
from mlx_spec.ops.kernel import kernels_digest, kernels_run_here
from mlx_spec.verify.sources import OF_THIS_PROCESS, own_edition, sources_of

Found = TypeVar("Found")

FORMAT = 3
"""Of the file. Another one where routes were added: what was found before them may be slower than need be."""

LIMIT_BYTES = 8 * 2**20
"""The largest file that is read: some hundred thousand findings. A model has a few hundred at each width."""


_PERSON = b"mlx_spec finding"


class Findings(BaseModel):
    """The content of a file.

    Attributes:
        seal: a digest of the rest. It stops rot and edits by hand, and nobody who means harm: it has no secret.
        facts: what the findings depend on; a file with other facts is not read.
        ops: key of an op -> width -> the route that is equal.
        costs: key of an op -> width -> time of its route in one-row calls, where that was measured.
        blocks: situation -> "width drive" -> whether blocks equal single tokens.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    seal: str = ""
    facts: dict[str, str]
    ops: dict[str, dict[str, str]] = {}
    costs: dict[str, dict[str, float]] = {}
    blocks: dict[str, dict[str, bool]] = {}

    def sealed(self) -> Findings:
        """The same, with the seal that belongs to it."""
        content = json.dumps(self.model_dump(exclude={"seal"}), sort_keys=True)
        return self.model_copy(update={"seal": blake2b(content.encode(), digest_size=16, person=_PERSON).hexdigest()})


class Verdicts:
    """Findings about one model, in memory, and on disk where a folder is given. Safe to share between threads.

    A file that cannot be read, is no regular one, is too large, does not parse, speaks of other facts or was edited
    counts as none; it is written anew with the next finding. A folder that cannot be written costs nothing but the
    keeping.

    Attributes:
        path: the file; None where nothing is kept.
        kept: findings that came from the file.
    """

    def __init__(self, facts: dict[str, str], folder: Path | None) -> None:
        digest = hashlib.sha256(repr(sorted(facts.items())).encode()).hexdigest()[:24]
        alone = any(fact.startswith(OF_THIS_PROCESS) for fact in facts.values())
        self.path = None if folder is None or alone else folder / f"{digest}.json"
        self._complaint: str | None = None
        self._findings = self._read(facts, complains=True)
        self.kept = sum(map(len, self._findings.ops.values())) + sum(map(len, self._findings.blocks.values()))
        self._lock = threading.Lock()

    def take_complaint(self) -> str | None:
        """Why a file that is there was not believed, in a sentence; told once."""
        told, self._complaint = self._complaint, None
        return told

    def op(self, key: str, width: int) -> str | None:
        """The route found for an op at a width; None when it was not tried."""
        return self._findings.ops.get(_short(key), {}).get(str(width))

    def add_op(self, key: str, width: int, route: str) -> None:
        with self._lock:
            self._findings.ops.setdefault(_short(key), {})[str(width)] = route

    def cost(self, key: str, width: int) -> float | None:
        """Time of an op's route at a width, in one-row calls; None when it was not measured."""
        return self._findings.costs.get(_short(key), {}).get(str(width))

    def add_cost(self, key: str, width: int, cost: float) -> None:
        with self._lock:
            self._findings.costs.setdefault(_short(key), {})[str(width)] = cost

    def block(self, situation: str, width: int, drive: str) -> bool | None:
        """Whether blocks of a width, driven in a way, are equal; None when that was not tried."""
        return self._findings.blocks.get(situation, {}).get(f"{width} {drive}")

    def add_block(self, situation: str, width: int, drive: str, holds: bool) -> None:
        with self._lock:
            self._findings.blocks.setdefault(situation, {})[f"{width} {drive}"] = holds

    def save(self) -> None:
        """Write everything found so far, beside what others have written of the same model meanwhile.

        Whoever reads meanwhile sees the old file or the new one. Of two findings about the same thing ours is kept.
        """
        if self.path is None:
            return
        with self._lock, contextlib.suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with sole_writer(self.path.parent):
                everything = _merged(self._read(self._findings.facts), self._findings).sealed()
                replace_file(self.path, everything.model_dump_json().encode())

    def _read(self, facts: dict[str, str], complains: bool = False) -> Findings:
        if self.path is not None:
            with contextlib.suppress(OSError):
                content = read_regular(self.path, LIMIT_BYTES)
                with contextlib.suppress(ValidationError):
                    found = Findings.model_validate_json(content)
                    if found.facts == facts and found == found.sealed():
                        return found
                if complains:
                    self._complaint = f"findings in {self.path} are not as they were written: all is tried anew"
        return Findings(facts=facts)


def _merged(theirs: Findings, ours: Findings) -> Findings:
    """Both, ours where they speak of the same."""
    return Findings(
        facts=ours.facts,
        ops=_both(theirs.ops, ours.ops),
        costs=_both(theirs.costs, ours.costs),
        blocks=_both(theirs.blocks, ours.blocks),
    )


def _both(theirs: dict[str, dict[str, Found]], ours: dict[str, dict[str, Found]]) -> dict[str, dict[str, Found]]:
    return {key: {**theirs.get(key, {}), **ours.get(key, {})} for key in theirs | ours}


def _short(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()[:24]


def facts_of(model: nn.Module) -> dict[str, str]:
    """Everything that decides which routes are equal: versions, code, device, system, and the make of the model."""
    device = mx.device_info()
    return {
        "format": str(FORMAT),
        "mlx": version("mlx"),
        "mlx-lm": version("mlx-lm"),
        "mlx_spec": own_edition(),
        "sources": sources_of(model),
        "device": f"{mx.default_device()} {device.get('architecture', '')} {device.get('device_name', '')}",
        "system": f"{platform.platform()} {platform.python_version()}",
        "environment": mlx_settings(),
        "kernels": kernels_digest() if kernels_run_here() else "none run here",
        "model": make_of(model),
    }


def make_of(model: nn.Module) -> str:
    """A digest of classes, settings, shapes and dtypes, of everything but the values of the weights."""
    digest = hashlib.sha256()
    for name, module in model.named_modules():
        settings = {key: value for key, value in vars(module).items() if _is_setting(key, value)}
        own = own_class(type(module))
        digest.update(repr((name, own.__module__, own.__qualname__, sorted(settings.items()))).encode())
    for name, array in sorted(tree_flatten(model.parameters())):
        digest.update(repr((name, tuple(array.shape), str(array.dtype))).encode())
    return digest.hexdigest()[:32]


def _is_setting(name: str, value: Any) -> bool:
    if name.startswith("_"):
        return isinstance(value, bool | int | float | str)
    return isinstance(value, bool | int | float | str | None) or dataclasses.is_dataclass(value)
