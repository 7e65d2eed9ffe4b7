"""Everything that proposes tokens: the contract, the kinds without weights, and how checkpoints are recognised."""

from mlx_spec.drafters.base import Drafter, DrafterState
from mlx_spec.drafters.callable import CallableDrafter
from mlx_spec.drafters.families import KNOWN_DRAFTER_KINDS, Family
from mlx_spec.drafters.ngram import NgramDrafter
from mlx_spec.drafters.registry import (
    DRAFTER_KIND_BY_MODEL_TYPE,
    resolve_drafter_kind,
    validate_drafter_compatibility,
)

__all__ = [
    "DRAFTER_KIND_BY_MODEL_TYPE",
    "KNOWN_DRAFTER_KINDS",
    "CallableDrafter",
    "Drafter",
    "DrafterState",
    "Family",
    "NgramDrafter",
    "resolve_drafter_kind",
    "validate_drafter_compatibility",
]
