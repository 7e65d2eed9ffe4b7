"""Parts of mlx-lm models whose result for one position depends on how many tokens come with it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from mlx import nn


def _rotated_from_the_end(rope: Any) -> int:
    """Beyond its length, this rope takes the base of the rotation from the end of the block, not from the position."""
    return int(rope.max_position_embeddings)


def _all_keys_kept(attention: Any) -> int | None:
    """With more keys than it may choose, all are scored in a product of the model's own, and a bit decides."""
    return int(attention.index_topk_blocks * attention.index_block_size) if attention.is_sparse_attn else None


_LIMITS: Mapping[str, Callable[[Any], int | None]] = {
    "mlx_lm.models.rope_utils.DynamicNTKScalingRoPE": _rotated_from_the_end,
    "mlx_lm.models.minimax_m3_vl.Attention": _all_keys_kept,
}
"""Class of a module -> tokens up to which a block does with each position what it does with one that comes alone."""


def block_limit(model: nn.Module) -> int | None:
    """Tokens up to which a block computes each position as if it came alone; None when there is no such limit.

    No probe of a short text can see what is beyond.
    """
    limits = [limit for part in model.modules() for limit in _limits_of(part)]
    return min(limits, default=None)


def _limits_of(part: Any) -> list[int]:
    # What is attached to a model derives from the class that is declared.
    names = [f"{base.__module__}.{base.__name__}" for base in type(part).__mro__]
    told = [_LIMITS[name](part) for name in dict.fromkeys(names) if name in _LIMITS]
    return [limit for limit in told if limit is not None]
