"""A process that dies of an architecture is a finding, and the next one gets a new process."""

from __future__ import annotations

import multiprocessing
import os
from typing import Any

import pytest

from tests.zoo.keeper import Keeper, findings
from tests.zoo.menagerie import Specimen, whole_zoo
from tests.zoo.trial import Plan

TINY = Plan(widths=(2,), patterns=("cycling",), dtypes=("float32",), tokens=6)


class Deadly(Specimen):
    """Takes its process down when it is built."""

    def build(self, dtype: str) -> Any:
        os._exit(3)


def test_no_process_is_started_before_there_is_something_to_try() -> None:
    keeper = Keeper()
    keeper.dismiss()
    assert list(findings([], TINY, jobs=3)) == []
    assert multiprocessing.active_children() == []


@pytest.mark.slow
def test_a_process_that_dies_is_a_difference_and_the_next_specimen_is_still_tried() -> None:
    llama = next(specimen for specimen in whole_zoo() if specimen.name == "llama")
    killed, fine = findings([Deadly("deadly", llama.config), llama], TINY)
    assert killed.differences == ["any: the process ended with status 3"]
    assert not killed.exact
    assert fine.exact
