"""A stand-in for the rounding of Metal."""

import pytest

from tests.double.patterns import PATTERNS, Pattern
from tests.double.switch import double

__all__ = ["PATTERNS", "Pattern", "double", "each_chip"]

each_chip = pytest.mark.parametrize(
    "chip", [chip if chip == "gen15" else pytest.param(chip, marks=pytest.mark.double) for chip in PATTERNS]
)
"""A test tried under one pattern, and by `make double` under the others."""
