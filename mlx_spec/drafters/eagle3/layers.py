"""The layers of an EAGLE-3 drafter, as modules whose parameters are called as the tensors of its file."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx import nn
from mlx_lm.models.base import create_causal_mask
from mlx_lm.models.deepseek_v3 import DeepseekV3Attention, ModelArgs

from mlx_spec.drafters.eagle3.config import Eagle3Config


class HeadsAttention(nn.Module):
    """Causal attention with grouped heads, as in Llama and, with normalised queries and keys, Qwen3.

    Args:
        inputs: entries per row it reads.
    """

    def __init__(self, config: Eagle3Config, inputs: int) -> None:
        super().__init__()
        size, heads, kv_heads = config.head_dim, config.num_attention_heads, config.num_key_value_heads
        self.q_proj = nn.Linear(inputs, heads * size, bias=config.attention_bias)
        self.k_proj = nn.Linear(inputs, kv_heads * size, bias=config.attention_bias)
        self.v_proj = nn.Linear(inputs, kv_heads * size, bias=config.attention_bias)
        self.o_proj = nn.Linear(heads * size, config.hidden_size, bias=config.attention_bias)
        if config.qk_norm:
            self.q_norm = nn.RMSNorm(size, eps=config.rms_norm_eps)
            self.k_norm = nn.RMSNorm(size, eps=config.rms_norm_eps)
        self._normed = config.qk_norm
        self._size = size
        self._rope = config.rope.build(size)

    def __call__(self, x: mx.array, cache: Any, start: int) -> mx.array:
        """[B, T, inputs] rows from position start + cache.offset on -> [B, T, H]; appends T rows to the cache."""
        rows, length, _ = x.shape
        position = start + cache.offset
        queries, keys, values = (
            projection(x).reshape(rows, length, -1, self._size)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        if self._normed:
            queries, keys = self.q_norm(queries), self.k_norm(keys)
        queries = self._rope(queries.transpose(0, 2, 1, 3), offset=position)
        keys = self._rope(keys.transpose(0, 2, 1, 3), offset=position)
        keys, values = cache.update_and_fetch(keys, values.transpose(0, 2, 1, 3))
        attended = mx.fast.scaled_dot_product_attention(
            queries, keys, values, scale=self._size**-0.5, mask="causal" if length > 1 else None
        )
        return self.o_proj(attended.transpose(0, 2, 1, 3).reshape(rows, length, -1))


class LatentAttention(DeepseekV3Attention):
    """DeepSeek-V3's attention as mlx-lm computes it, from 2H entries per row to H.

    Its cache keeps one latent and one rotated part per row.
    """

    def __init__(self, config: Eagle3Config) -> None:
        assert config.latent is not None
        super().__init__(
            ModelArgs(
                hidden_size=2 * config.hidden_size,
                num_attention_heads=config.num_attention_heads,
                attention_bias=config.attention_bias,
                rope_theta=config.rope.theta,
                rope_scaling=dict(config.rope.scaling or {}),
                **config.latent.model_dump(),
            )
        )
        outputs = config.num_attention_heads * config.latent.v_head_dim
        self.o_proj = nn.Linear(outputs, config.hidden_size, bias=config.attention_bias)

    def __call__(self, x: mx.array, cache: Any, start: int) -> mx.array:
        """See `HeadsAttention.__call__`; x is [B, T, 2H]."""
        length = x.shape[1]
        mask = create_causal_mask(length, cache.offset) if length > 1 else None
        attended: mx.array = super().__call__(x, mask, _Shifted(cache, start))
        return attended


class _Shifted:
    """A cache whose rows are that much further on: the attention takes positions from the cache alone."""

    def __init__(self, cache: Any, start: int) -> None:
        self.offset = start + cache.offset
        self.update_and_fetch = cache.update_and_fetch


class FeedForward(nn.Module):
    """Gated feed-forward with SiLU."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(hidden, inner, bias=config.mlp_bias)
        self.up_proj = nn.Linear(hidden, inner, bias=config.mlp_bias)
        self.down_proj = nn.Linear(inner, hidden, bias=config.mlp_bias)

    def __call__(self, x: mx.array) -> mx.array:
        """[B, T, H] -> [B, T, H]."""
        return self.down_proj(nn.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """An ordinary decoder layer: it reads what the layer before it gave."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = self.attention(config)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = FeedForward(config)

    def attention(self, config: Eagle3Config) -> nn.Module:
        """The attention that fits what the layer reads."""
        return HeadsAttention(config, config.hidden_size)

    def __call__(self, embedded: mx.array, hidden: mx.array, cache: Any, start: int) -> mx.array:
        """Run the layer.

        Args:
            embedded: [B, T, H] the tokens' embeddings.
            hidden: [B, T, H] what the layer before it gave, or the pairs' hidden states.
            cache: its own; T rows are appended.
            start: absolute position of the cache's first row.

        Returns:
            [B, T, H], not normalised.
        """
        residual, x = self.read(embedded, hidden)
        attended = residual + self.self_attn(x, cache, start)
        return attended + self.mlp(self.post_attention_layernorm(attended))

    def read(self, embedded: mx.array, hidden: mx.array) -> tuple[mx.array, mx.array]:
        """What the attention's output is added to, and what the attention reads."""
        del embedded
        return hidden, self.input_layernorm(hidden)


class PairLayer(Layer):
    """A decoder layer that reads the token's embedding beside the hidden state."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__(config)
        self.hidden_norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self._adds_to_normed = config.norm_before_residual

    def attention(self, config: Eagle3Config) -> nn.Module:
        if config.latent is not None:
            return LatentAttention(config)
        return HeadsAttention(config, 2 * config.hidden_size)

    def read(self, embedded: mx.array, hidden: mx.array) -> tuple[mx.array, mx.array]:
        normed = self.hidden_norm(hidden)
        residual = normed if self._adds_to_normed else hidden
        return residual, mx.concatenate([self.input_layernorm(embedded), normed], axis=-1)


class Eagle3Modules(nn.Module):
    """Everything with weights.

    Args:
        config: the drafter's.
        has_embedding: whether it has a table of its own.
        has_head: whether it has an output projection of its own.
        has_fc_bias: whether fc adds a bias.
    """

    def __init__(self, config: Eagle3Config, *, has_embedding: bool, has_head: bool, has_fc_bias: bool) -> None:
        super().__init__()
        hidden, states = config.hidden_size, len(config.taps)
        if config.norm_before_fc:
            self.input_norm = nn.RMSNorm(states * config.target_hidden_size, eps=config.rms_norm_eps)
        if config.fc_norm:
            self.fc_norm = [nn.RMSNorm(config.target_hidden_size, eps=config.rms_norm_eps) for _ in range(states)]
        self.fc = nn.Linear(states * config.target_hidden_size, hidden, bias=has_fc_bias)
        self.layers = [
            PairLayer(config) if index == 0 or config.embeds_every_layer else Layer(config)
            for index in range(config.num_hidden_layers)
        ]
        self.norm = nn.RMSNorm(hidden, eps=config.rms_norm_eps)
        if has_embedding:
            self.embed_tokens = nn.Embedding(config.vocab_size, hidden)
        if has_head:
            self.lm_head = nn.Linear(hidden, config.draft_vocab_size, bias=False)
