"""LongCat-Flash's prediction layer: one attention and one dense MLP, where the model's own layers have two and experts.

mlx-lm has both parts and no layer of this kind, so it is put together here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.longcat_flash import LongcatFlashMLA, LongcatFlashMLP, ModelArgs


class _Layer(nn.Module):
    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.self_attn = LongcatFlashMLA(args)
        self.mlp = LongcatFlashMLP(args)
        self.input_layernorm = nn.RMSNorm(args.hidden_size, eps=args.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(args.hidden_size, eps=args.rms_norm_eps)

    def __call__(self, x: mx.array, mask: mx.array | None, cache: Any) -> mx.array:
        x = x + self.self_attn(self.input_layernorm(x), mask, cache)
        out: mx.array = x + self.mlp(self.post_attention_layernorm(x))
        return out


class _Trunk(nn.Module):
    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.embed_tokens = nn.Identity()
        self.layers = [_Layer(args)]
        self.norm = nn.RMSNorm(args.hidden_size, eps=args.rms_norm_eps)

    def __call__(self, states: mx.array, cache: Sequence[Any]) -> mx.array:
        states = self.embed_tokens(states)
        mask = create_attention_mask(states, cache[0], return_array=True)
        for layer, own in zip(self.layers, cache, strict=True):
            states = layer(states, mask, own)
        normed: mx.array = self.norm(states)
        return normed


class Model(nn.Module):
    """A model of that layer alone, with the attributes that mlx-lm's models have."""

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.args = args
        self.model = _Trunk(args)

    @property
    def layers(self) -> list[nn.Module]:
        """What `make_prompt_cache` counts."""
        return list(self.model.layers)
