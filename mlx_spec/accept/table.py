"""The acceptance rules by name."""

from __future__ import annotations

from mlx_spec.accept.exact import Exact
from mlx_spec.accept.rule import AcceptanceRule
from mlx_spec.errors import UnsupportedOption

RULES: dict[str, AcceptanceRule] = {
    "exact": Exact(),
}


def rule_named(name: str) -> AcceptanceRule:
    """The rule of that name.

    Raises:
        UnsupportedOption: there is none; names those there are.
    """
    if name not in RULES:
        raise UnsupportedOption(f"there is no acceptance rule {name!r}. There are: {', '.join(sorted(RULES))}.")
    return RULES[name]
