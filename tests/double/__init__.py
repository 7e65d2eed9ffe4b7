"""A stand-in for the rounding of Metal."""

from tests.double.patterns import PATTERNS, Pattern
from tests.double.switch import double

__all__ = ["PATTERNS", "Pattern", "double"]
