"""EAGLE-3 in plain numpy, float64, one row at a time: what the modules are compared with where no reference ran.

Source: Li et al. 2025, arXiv:2503.01840; DeepSeek-AI 2024, arXiv:2405.04434 for latent attention, in its unabsorbed
form; Peng et al. 2023, arXiv:2309.00071 for scaled rotary positions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import numpy as np

Array = np.ndarray
Kept = list[list[tuple[Array, Array]]]
"""Keys and values of every layer: [layers][rows](each [heads, size])."""


class ByHand:
    """A drafter with the tensors of a file in the layout `layers.0.*`.

    Args:
        config: flat config.json object.
        tensors: of the file, in floating point.
        table: [V, H] the target's embedding, for a drafter without its own.
    """

    def __init__(self, config: Mapping[str, Any], tensors: Mapping[str, mx.array], table: Array) -> None:
        self.config = config
        self.tensors = {name: np.array(array.astype(mx.float32), np.float64) for name, array in tensors.items()}
        self.table = self.tensors.get("embed_tokens.weight", table)
        self.kept: Kept = [[] for _ in range(config["num_hidden_layers"])]
        self.position = 0

    def fuse(self, tapped: Array) -> Array:
        """[K*H_t] -> [H]."""
        if self.config.get("norm_before_fc"):
            tapped = self.norm("input_norm", tapped)
        if self.config.get("fc_norm"):
            states = np.split(tapped, len(tapped) // self.config["target_hidden_size"])
            tapped = np.concatenate([self.norm(f"fc_norm.{i}", state) for i, state in enumerate(states)])
        return self.linear("fc", tapped)

    def step(self, token: int, hidden: Array) -> Array:
        """Run one pair: [H] -> [H], the last layer's output."""
        for index, kept in enumerate(self.kept):
            name = f"layers.{index}."
            residual = hidden
            if f"{name}hidden_norm.weight" in self.tensors:
                normed = self.norm(f"{name}hidden_norm", hidden)
                residual = normed if self.config.get("norm_before_residual") else hidden
                x = np.concatenate([self.norm(f"{name}input_layernorm", self.table[token]), normed])
            else:
                x = self.norm(f"{name}input_layernorm", hidden)
            latent = "kv_lora_rank" in self.config
            attended = residual + (self.latent if latent else self.heads)(f"{name}self_attn.", x, kept)
            normed = self.norm(f"{name}post_attention_layernorm", attended)
            gate = self.linear(f"{name}mlp.gate_proj", normed)
            inner = gate / (1 + np.exp(-gate)) * self.linear(f"{name}mlp.up_proj", normed)
            hidden = attended + self.linear(f"{name}mlp.down_proj", inner)
        self.position += 1
        return hidden

    def logits(self, state: Array) -> Array:
        """[H] -> [V_draft]."""
        return self.linear("lm_head", self.norm("norm", state))

    def carry(self, state: Array) -> Array:
        """What is fed back."""
        return self.norm("norm", state) if self.config.get("norm_output") else state

    def heads(self, name: str, x: Array, kept: list[tuple[Array, Array]]) -> Array:
        """Grouped heads."""
        size = self.config["head_dim"]
        q, k, v = (self.linear(f"{name}{part}_proj", x).reshape(-1, size) for part in "qkv")
        if f"{name}q_norm.weight" in self.tensors:
            q, k = self.norm(f"{name}q_norm", q), self.norm(f"{name}k_norm", k)
        kept.append((self.rotated(k, size), v))
        q, group = self.rotated(q, size), len(q) // len(k)
        rows = [attend(q[h], [(k[h // group], v[h // group]) for k, v in kept], size**-0.5) for h in range(len(q))]
        return self.linear(f"{name}o_proj", np.concatenate(rows))

    def latent(self, name: str, x: Array, kept: list[tuple[Array, Array]]) -> Array:
        """Latent attention, with keys and values of every head spelled out."""
        c = self.config
        count, nope, rope = c["num_attention_heads"], c["qk_nope_head_dim"], c["qk_rope_head_dim"]
        if c.get("q_lora_rank"):
            low = self.linear(f"{name}q_a_proj", x)
            q = self.linear(f"{name}q_b_proj", self.norm(f"{name}q_a_layernorm", low, 1e-6))
        else:
            q = self.linear(f"{name}q_proj", x)
        q = q.reshape(count, nope + rope)
        compressed = self.linear(f"{name}kv_a_proj_with_mqa", x)
        latent = self.norm(f"{name}kv_a_layernorm", compressed[: c["kv_lora_rank"]], 1e-6)
        both = self.linear(f"{name}kv_b_proj", latent).reshape(count, -1)
        shared = np.tile(self.rotated(compressed[None, c["kv_lora_rank"] :], rope), (count, 1))
        kept.append((np.concatenate([both[:, :nope], shared], axis=-1), both[:, nope:]))
        q = np.concatenate([q[:, :nope], self.rotated(q[:, nope:], rope)], axis=-1)
        scaling = c["rope_scaling"]
        sharper = 0.1 * scaling.get("mscale_all_dim", 0) * math.log(scaling["factor"]) + 1
        scale = (nope + rope) ** -0.5 * sharper**2
        rows = [attend(q[h], [(k[h], v[h]) for k, v in kept], scale) for h in range(count)]
        return self.linear(f"{name}o_proj", np.concatenate(rows))

    def rotated(self, x: Array, size: int) -> Array:
        """[heads, size] at the current position."""
        frequencies, gain = rotary(self.config, size)
        angles = self.position * frequencies
        if "kv_lora_rank" in self.config:  # neighbours are rotated together, otherwise halves
            left, right = x[:, 0::2], x[:, 1::2]
        else:
            left, right = x[:, : size // 2], x[:, size // 2 :]
        turned = left * np.cos(angles) - right * np.sin(angles), left * np.sin(angles) + right * np.cos(angles)
        return gain * np.concatenate(turned, axis=-1)

    def linear(self, name: str, x: Array) -> Array:
        """Weight times x, plus the bias if there is one."""
        return self.tensors[f"{name}.weight"] @ x + self.tensors.get(f"{name}.bias", 0.0)

    def norm(self, name: str, x: Array, eps: float | None = None) -> Array:
        """RMS norm over the last axis."""
        eps = self.config["rms_norm_eps"] if eps is None else eps
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * self.tensors[f"{name}.weight"]


def attend(query: Array, kept: list[tuple[Array, Array]], scale: float) -> Array:
    """Softmax attention of one head."""
    scores = np.array([query @ key for key, _ in kept]) * scale
    weights = np.exp(scores - scores.max())
    return np.asarray(sum(w * value for w, (_, value) in zip(weights / weights.sum(), kept, strict=True)))


def rotary(config: Mapping[str, Any], size: int) -> tuple[Array, float]:
    """Frequencies of half the entries, and the gain of what is rotated."""
    exponents = np.arange(0, size, 2) / size
    base, scaling = config["rope_theta"], config.get("rope_scaling")
    plain = base**-exponents
    if scaling is None:
        return plain, 1.0
    factor, original = scaling["factor"], scaling["original_max_position_embeddings"]

    def dimension(rotations: float) -> float:
        return size * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low = max(math.floor(dimension(scaling.get("beta_fast", 32))), 0)
    high = min(math.ceil(dimension(scaling.get("beta_slow", 1))), size - 1)
    ramp = np.clip((np.arange(size // 2) - low) / max(high - low, 0.001), 0, 1)

    def sharpness(key: str, default: float) -> float:
        return 0.1 * scaling.get(key, default) * math.log(factor) + 1

    return plain / factor * ramp + plain * (1 - ramp), sharpness("mscale", 1) / sharpness("mscale_all_dim", 0)
