"""Parts of mlx-lm models whose result for one position depends on how many tokens come with it."""

from __future__ import annotations

from typing import Any

from mlx_lm.models.rope_utils import DynamicNTKScalingRoPE


def block_limit(model: Any) -> int | None:
    """Tokens up to which a block rotates each position as if it came alone; None when there is no such limit.

    Beyond its length, this rope takes the base of the rotation from the end of the block, not from the position.
    No probe of a short text can see that.
    """
    ropes = [part for part in model.modules() if isinstance(part, DynamicNTKScalingRoPE)]
    return min((rope.max_position_embeddings for rope in ropes), default=None)
