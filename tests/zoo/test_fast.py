"""The plain block forward: where it cannot be cut, tokens go one by one, and the statistics say so."""

from __future__ import annotations

import pytest

from mlx_spec.verify.routes import BLOCK, STEP_THROUGH
from tests.zoo.menagerie import whole_zoo
from tests.zoo.trial import Subject, pattern_named

ZOO = {specimen.name: specimen for specimen in whole_zoo()}


@pytest.mark.part(1)
@pytest.mark.slow
@pytest.mark.parametrize("name", ["deepseek_v41", "iquestloopcoder", "olmo"])
def test_a_model_whose_blocks_cannot_be_cut_is_stepped_through(name: str) -> None:
    subject = Subject(ZOO[name], "float32", 16)
    statistics, difference = subject.speculate(0, 3, pattern_named("cycling"), 16, verify="fast")
    assert difference is None
    assert statistics.verify_route == STEP_THROUGH.name
    assert statistics.notes[0].startswith("verified one token at a time")


@pytest.mark.parametrize("name", ["llama", "gemma4_text", "mamba2", "llama4, dense"])
def test_others_take_the_block_and_say_what_that_may_cost(name: str) -> None:
    subject = Subject(ZOO[name], "float32", 16)
    statistics, _ = subject.speculate(0, 3, pattern_named("cycling"), 16, verify="fast")
    assert statistics.verify_route == BLOCK.name
    assert "may differ from plain decoding" in statistics.notes[0]
