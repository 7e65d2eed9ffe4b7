"""The layers of a block drafter: block rows attend to what the target read and to each other.

Every layer takes the context's keys from the same fused states, un-normalised, and the block's from its own input.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx import nn

from mlx_spec.drafters.dflash.config import BlockConfig, Flavour
from mlx_spec.drafters.dflash.state import Context, Sight
from mlx_spec.drafters.quantization import Format


@dataclass(frozen=True)
class Tensors:
    """Named arrays, and the three things that are done with them.

    Attributes:
        arrays: name -> array.
        eps: of the norms.
        formats: path of a module -> how its weight is quantized, for those that are.
        prefix: put before every name.
    """

    arrays: Mapping[str, mx.array]
    eps: float
    formats: Mapping[str, Format]
    prefix: str = ""

    def below(self, prefix: str) -> Tensors:
        """The same arrays, seen from a module inside."""
        return Tensors(self.arrays, self.eps, self.formats, f"{self.prefix}{prefix}.")

    def __getitem__(self, name: str) -> mx.array:
        return self.arrays[self.prefix + name]

    def __contains__(self, name: str) -> bool:
        return self.prefix + name in self.arrays

    def get(self, name: str) -> mx.array | None:
        """The array, or None."""
        return self.arrays.get(self.prefix + name)

    def linear(self, name: str, x: mx.array) -> mx.array:
        """[..., K] -> [..., N] with `name.weight` [N, K] and, if there is one, `name.bias`."""
        form, weight, bias = self.formats.get(self.prefix + name), self[f"{name}.weight"], self.get(f"{name}.bias")
        if form is None:
            product = x @ weight.T
        else:
            scales, offsets = self[f"{name}.scales"], self.get(f"{name}.biases")
            product = mx.quantized_matmul(x, weight, scales, offsets, transpose=True, **form.model_dump())
        return product if bias is None else product + bias

    def rows(self, name: str, ids: mx.array) -> mx.array:
        """[...] ids -> [..., K] rows of `name.weight` [N, K]."""
        form, weight = self.formats.get(self.prefix + name), self[f"{name}.weight"]
        # The target's vocabulary may have more rows, padding that no real token has.
        ids = mx.minimum(ids, weight.shape[0] - 1)
        if form is None:
            return weight[ids]
        scales, offsets = self[f"{name}.scales"], self.get(f"{name}.biases")
        offsets = None if offsets is None else offsets[ids]
        # Some formats have scales that are no floats, which leaves the dtype open.
        dtype = self.arrays["norm.weight"].dtype
        return mx.dequantize(weight[ids], scales[ids], offsets, **form.model_dump(), dtype=dtype)

    def norm(self, name: str, x: mx.array) -> mx.array:
        """RMS norm over the last axis."""
        return mx.fast.rms_norm(x, self[f"{name}.weight"], self.eps)


class DraftLayer(abc.ABC):
    """One layer. Holds weights only.

    Attributes:
        sight: which keys its block rows see.
    """

    def __init__(self, tensors: Tensors, config: BlockConfig, sight: Sight, rotate: Any) -> None:
        self.sight = sight
        self._tensors = tensors
        self._attention = tensors.below("self_attn")
        self._config = config
        self._rotate = rotate

    @abc.abstractmethod
    def __call__(self, hidden: mx.array, context: Context | None, start: int) -> mx.array:
        """[B, R, H] block rows at positions start, start + 1, ... -> [B, R, H]."""

    def context(self, states: mx.array, start: int) -> Context:
        """[B, T, H] fused states at positions start, start + 1, ... -> what the layer keeps of them."""
        keys, values = self._keys_and_values(states, start)
        return Context(keys, values, mx.arange(start, start + states.shape[1], dtype=mx.int32))

    def _attend(self, x: mx.array, context: Context | None, start: int) -> mx.array:
        """[B, R, H] the layer's normed input -> [B, R, H]."""
        config = self._config
        queries = self._heads("q_proj", x, config.num_attention_heads)
        queries = self._rotate(self._attention.norm("q_norm", queries), offset=start)
        keys, values = self._keys_and_values(x, start)
        own = mx.arange(start, start + x.shape[1], dtype=mx.int32)
        positions = own
        if context is not None:
            keys = mx.concatenate([context.keys, keys], axis=2)
            values = mx.concatenate([context.values, values], axis=2)
            positions = mx.concatenate([context.positions, own])
        attended = mx.fast.scaled_dot_product_attention(
            queries,
            keys,
            values,
            scale=self._scale,
            mask=self.sight.mask(own, positions),
            sinks=self._attention.get("attention_sink_bias"),
        )
        return self._project(attended.transpose(0, 2, 1, 3), x)

    def _project(self, attended: mx.array, x: mx.array) -> mx.array:
        """[B, R, heads, D] and the layer's normed input -> [B, R, H]."""
        if self._config.gated:
            gate = nn.softplus(self._attention.linear("g_proj", x).astype(mx.float32))
            attended = attended * gate.astype(x.dtype)[..., None]
        return self._attention.linear("o_proj", attended.reshape(*x.shape[:2], -1))

    def _keys_and_values(self, x: mx.array, start: int) -> tuple[mx.array, mx.array]:
        heads = self._config.num_key_value_heads
        keys = self._attention.norm("k_norm", self._heads("k_proj", x, heads))
        return self._rotate(keys, offset=start), self._heads("v_proj", x, heads)

    @property
    def _scale(self) -> float:
        return float(self._config.head_dim**-0.5)

    def _heads(self, name: str, x: mx.array, count: int) -> mx.array:
        rows, length, _ = x.shape
        projected = self._attention.linear(name, x)
        return projected.reshape(rows, length, count, self._config.head_dim).transpose(0, 2, 1, 3)

    def _mlp(self, x: mx.array, activation: Callable[[mx.array], mx.array] = nn.silu) -> mx.array:
        mlp = self._tensors.below("mlp")
        return mlp.linear("down_proj", activation(mlp.linear("gate_proj", x)) * mlp.linear("up_proj", x))


class PlainLayer(DraftLayer):
    """Norm before each branch, as in Qwen3. In Laguna a gate then scales each head's output."""

    def __call__(self, hidden: mx.array, context: Context | None, start: int) -> mx.array:
        hidden = hidden + self._attend(self._tensors.norm("input_layernorm", hidden), context, start)
        return hidden + self._mlp(self._tensors.norm("post_attention_layernorm", hidden))


class ConvolvedLayer(DraftLayer):
    """Each branch between two convolutions along the block, whose kernels depend on the branch's input."""

    def __call__(self, hidden: mx.array, context: Context | None, start: int) -> mx.array:
        entering, leaving = self._kernels("attention_conv", self._tensors.norm("input_layernorm", hidden))
        hidden = hidden + leaving(self._attend(entering, context, start))
        entering, leaving = self._kernels("mlp_conv", self._tensors.norm("post_attention_layernorm", hidden))
        return hidden + leaving(self._mlp(entering))

    def _kernels(self, name: str, x: mx.array) -> tuple[mx.array, Callable[[mx.array], mx.array]]:
        """The convolved input, and the convolution of the branch's output. Both kernels come from x."""
        size, taps = self._config.conv_group_size, self._config.conv_kernel_size
        assert size is not None
        module = self._tensors.below(name)
        dynamic = module.linear("kernel_projection", x).reshape(*x.shape[:-1], 2, taps, -1)
        base = module["base_kernel"]
        return (
            _convolve(x, base[0], dynamic[..., 0, :, :], size),
            lambda branch: _convolve(branch, base[1], dynamic[..., 1, :, :], size),
        )


class GemmaLayer(DraftLayer):
    """Norms before and after each branch, normed values, unscaled attention and a factor on the output, as in Gemma 4.

    Where keys and values share a projection, values are its output before the keys' norm and rotation.
    """

    def __call__(self, hidden: mx.array, context: Context | None, start: int) -> mx.array:
        tensors = self._tensors
        attended = self._attend(tensors.norm("input_layernorm", hidden), context, start)
        hidden = hidden + tensors.norm("post_attention_layernorm", attended)
        fed = self._mlp(tensors.norm("pre_feedforward_layernorm", hidden), nn.gelu_approx)
        return (hidden + tensors.norm("post_feedforward_layernorm", fed)) * tensors["layer_scalar"]

    def _keys_and_values(self, x: mx.array, start: int) -> tuple[mx.array, mx.array]:
        heads = self._config.num_key_value_heads
        projected = self._heads("k_proj", x, heads)
        values = projected if self._config.attention_k_eq_v else self._heads("v_proj", x, heads)
        keys = self._rotate(self._attention.norm("k_norm", projected), offset=start)
        return keys, mx.fast.rms_norm(values, None, self._config.rms_norm_eps)

    @property
    def _scale(self) -> float:
        return 1.0


_LAYERS: Mapping[Flavour, type[DraftLayer]] = {
    Flavour.PLAIN: PlainLayer,
    Flavour.CONVOLVED: ConvolvedLayer,
    Flavour.GEMMA: GemmaLayer,
}


def build_layers(tensors: Tensors, config: BlockConfig) -> list[DraftLayer]:
    """The layers of a drafter, in order."""
    rotate = config.rope.build(config.head_dim)
    return [
        _LAYERS[config.flavour](tensors.below(f"layers.{index}"), config, sight, rotate)
        for index, sight in enumerate(config.sights)
    ]


def _convolve(x: mx.array, base: mx.array, dynamic: mx.array, group_size: int) -> mx.array:
    """Causal convolution along the block: row t sees rows t, t-1, ... of this block and zeros before its first.

    Args:
        x: [B, R, H].
        base: [taps, H].
        dynamic: [B, R, taps, H / group_size], added to `base` for every channel of the group.
    """
    rows, length, hidden = x.shape
    total = mx.zeros_like(x)
    for offset in range(min(base.shape[0], length)):
        shifted = mx.pad(x, [(0, 0), (offset, 0), (0, 0)])[:, :length]
        per_channel = mx.repeat(dynamic[:, :, offset], group_size, axis=-1)
        total = total + (base[offset] + per_channel) * shifted
    return total.reshape(rows, length, hidden)
