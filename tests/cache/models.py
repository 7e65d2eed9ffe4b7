"""Tiny models with caches of every kind, for machines that drive them."""

from __future__ import annotations

import functools
from collections.abc import Callable

import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from tests.cache.subjects import TinyModel
from tests.tiny import CHUNK, MIXES, WINDOW, falcon_h1, from_mlx_lm, gemma3, llama4, mamba2, qwen3_next, randomise

STEPS = 4
SHORT = 5
"""Where a cache has no edge of its own: long enough that a convolution window is full."""

KEEPING_WINDOW = 15


def _short_convolution() -> nn.Module:
    """A state that is nothing but the convolution window."""
    return from_mlx_lm(
        "lfm2",
        hidden_size=48,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=512,
        norm_eps=1e-5,
        conv_bias=True,
        conv_L_cache=4,
        block_dim=48,
        block_ff_dim=74,
        block_multiple_of=2,
        block_ffn_dim_multiplier=1.0,
        block_auto_adjust_ff_dim=False,
        layer_types=["conv", "full_attention"],
    )


def _mix(name: str, edge: int) -> TinyModel:
    mix = MIXES[name]
    return TinyModel(name, mix.model, mix.new_cache, edge, exact_blocks=True)


def _small(name: str, build: Callable[[], nn.Module], edge: int, exact_blocks: bool = True) -> TinyModel:
    """One layer of each kind is enough here: what passes from layer to layer is tried elsewhere."""
    model = functools.cache(lambda: randomise(build, seed=3))
    return TinyModel(name, model, lambda: make_prompt_cache(model()), edge, exact_blocks)


MODELS = {
    model.name: model
    for model in (
        _mix("dense_qk_norm", SHORT),
        _mix("ring_with_keep", KEEPING_WINDOW),
        _mix("quantized_from_20", SHORT),
        _small("sliding", lambda: gemma3(layers=2, pattern=2), WINDOW),
        _small("gated_delta", lambda: qwen3_next(layers=2), SHORT),
        _small("mamba2", lambda: mamba2(layers=2), SHORT, exact_blocks=False),
        _small("short_convolution", _short_convolution, SHORT),
        _small("chunked", llama4, CHUNK),
        _small("cache_list", lambda: falcon_h1(layers=2), SHORT, exact_blocks=False),
    )
}
