"""The same through the token mixers of tiny models: blocks go through undo logs and tapes and are cut anywhere."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.cache.lives import Copied, Quantized, Saved, Trimmed
from tests.cache.machine import Refusals, UniformMachine
from tests.cache.machine_runs import run
from tests.cache.models import MODELS, STEPS


class ModelMachine(Refusals, Copied, Trimmed, Saved, UniformMachine):
    """All caches of one model."""


class QuantizedModelMachine(Quantized, ModelMachine):
    """Its float caches become quantized ones on the way."""


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_blocks_through_token_mixers_leave_what_plain_steps_leave(name: str, tell: Callable[[str], None]) -> None:
    run(QuantizedModelMachine if name.startswith("quantized") else ModelMachine, MODELS[name], STEPS, tell)
