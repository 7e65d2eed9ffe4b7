"""Any order of rounds and plain use leaves the cache that plain steps alone would leave."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.cache.kinds import KINDS
from tests.cache.lives import Copied, Quantized, Saved, Trimmed
from tests.cache.machine import Refusals, UniformMachine
from tests.cache.machine_runs import run
from tests.cache.subjects import StandIn

STEPS = 5


class KindMachine(Refusals, Copied, Trimmed, Saved, UniformMachine):
    """One cache of any kind."""


class KVMachine(Quantized, KindMachine):
    """One that can become another kind."""


@pytest.mark.parametrize("name", KINDS)
def test_rounds_in_any_order_leave_what_plain_steps_leave(name: str, tell: Callable[[str], None]) -> None:
    machine = KVMachine if name.startswith("kv") else KindMachine
    run(machine, StandIn(KINDS[name]), STEPS, tell)
