"""Proposals and the target's own choices -> how many were right, and the token that follows them."""

from __future__ import annotations

import mlx.core as mx

from mlx_spec.errors import InvalidRequest


def walk(proposals: mx.array, choices: mx.array) -> tuple[mx.array, mx.array]:
    """Count the leading proposals the target agrees with, and give the token after them.

    That token is always the target's own, so what is emitted never depends on the drafter;
    only how many tokens a round yields does.

    Args:
        proposals: [B, W-1] int32 token ids. An id outside the vocabulary never matches.
        choices: [B, W] token ids. `choices[b, i]` is the target's choice after it has read
            the bonus and the first i proposals of row b.

    Returns:
        accepted: [B] int32, 0 <= accepted <= W-1.
        bonus: [B] int32, `choices[b, accepted[b]]`.

    Raises:
        InvalidRequest: shapes do not fit. Nothing was changed.

    Cost:
        Lazy: no host read here.

    Source:
        Leviathan et al. 2023, arXiv:2211.17192, algorithm 1, with the target's choice taken as given.

    Example:
        >>> import mlx.core as mx
        >>> accepted, bonus = walk(mx.array([[5, 7, 9]]), mx.array([[5, 8, 9, 1]]))
        >>> accepted.tolist(), bonus.tolist()
        ([1], [8])
    """
    rows, count = proposals.shape
    if choices.shape != (rows, count + 1):
        raise InvalidRequest(
            f"choices have shape {choices.shape}, wanted {(rows, count + 1)}: one row per row of proposals "
            f"{proposals.shape} and one slot more for the bonus."
        )
    choices = choices.astype(mx.int32)
    agrees = (proposals == choices[:, :-1]).astype(mx.int32)
    accepted = mx.cumprod(agrees, axis=1).sum(axis=1)
    bonus = mx.take_along_axis(choices, accepted[:, None], axis=1)[:, 0]
    return accepted, bonus
