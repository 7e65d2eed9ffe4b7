"""Which linear maps of a model answer from memory when a part of a block is kept."""

from __future__ import annotations

from mlx import nn

from mlx_spec.verify.recall import RUNS_AGAIN

CALLED_PER_TOKEN = ("x_proj", "dt_proj")
"""Mamba calls these two once per token, on rows without an axis of positions, so they are computed again."""


def inner_maps(model: nn.Module) -> list[nn.Linear]:
    """The linear maps inside mixers that run again."""
    return [part for _, part in _named_maps(model)]


def remembered_maps(model: nn.Module) -> list[nn.Linear]:
    """Those of them whose rows an open round keeps."""
    return [part for name, part in _named_maps(model) if name not in CALLED_PER_TOKEN]


def _named_maps(model: nn.Module) -> list[tuple[str, nn.Linear]]:
    mixers = [module for module in model.modules() if getattr(type(module), RUNS_AGAIN, False)]
    return [each for mixer in mixers for each in mixer.named_modules() if isinstance(each[1], nn.Linear)]
