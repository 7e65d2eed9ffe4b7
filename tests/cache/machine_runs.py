"""Running a state machine: how many examples, from which seed, told afterwards."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from hypothesis import core, seed, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

from tests.cache.subjects import Subject

EXAMPLES = {"deep": 2000}
"""By profile; one that is not here runs as many as it runs of every property."""

_seeds = random.SystemRandom()


def run(machine: type[RuleBasedStateMachine], subject: Subject, steps: int, tell: Callable[[str], None]) -> None:
    """Run a machine class on a subject.

    Args:
        steps: rules per example.
        tell: is given one line with the seed and the number of examples, also when the machine fails.
    """
    profile = settings.get_current_profile_name()
    examples = 0

    def teardown(self: Any) -> None:
        nonlocal examples
        examples += 1
        machine.teardown(self)

    built = type(f"{machine.__name__}_{subject.name}", (machine,), {"subject": subject, "teardown": teardown})
    start = core.global_force_seed
    if start is None and not settings.default.derandomize:
        start = _seeds.randrange(2**32)
    if start is not None:
        built = seed(start)(built)

    chosen = settings(max_examples=EXAMPLES.get(profile, settings.default.max_examples), stateful_step_count=steps)
    try:
        run_state_machine_as_test(built, settings=chosen)
    finally:
        how = "derandomized" if start is None else f"seed {start}"
        tell(f"{built.__name__}: {examples} examples of {steps} steps, {how}")
