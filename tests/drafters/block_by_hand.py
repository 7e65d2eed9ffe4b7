"""One layer of a block drafter and its recurrent head once more, in float64, row by row and key by key."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import mlx.core as mx
import numpy as np

Array = np.ndarray
Sees = Callable[[int, int], bool]
"""(query's position, key's position) -> whether it is seen."""


class LayerByHand:
    """A Qwen3-like layer over a context and a block.

    Args:
        tensors: the file's, under its names.
        prefix: of the layer, with the dot.
        heads: queries, keys, size.
        theta: base of the rotary frequencies.
        neox: whether entries half a head apart are rotated together, instead of neighbours.
    """

    def __init__(
        self,
        tensors: Mapping[str, mx.array],
        prefix: str,
        heads: tuple[int, int, int],
        theta: float,
        neox: bool = True,
    ) -> None:
        self._tensors = {
            name.removeprefix(prefix): np.array(array, np.float64)
            for name, array in tensors.items()
            if name.startswith(prefix)
        }
        self._queries, self._keys, self._size = heads
        self._theta = theta
        self._neox = neox

    def run(self, fused: Array, first: int, block: Array, sees: Sees) -> Array:
        """[T, H] fused states from position `first` on, [R, H] block rows right after them -> [R, H]."""
        start = first + len(fused)
        normed = self._norm("input_layernorm", block)
        keys = [(first + i, row) for i, row in enumerate(fused)] + [(start + i, row) for i, row in enumerate(normed)]
        attended = np.stack([self._attend(start + i, row, keys, sees) for i, row in enumerate(normed)])
        hidden = block + attended @ self._tensors["self_attn.o_proj.weight"].T
        normed = self._norm("post_attention_layernorm", hidden)
        gate, up = normed @ self._tensors["mlp.gate_proj.weight"].T, normed @ self._tensors["mlp.up_proj.weight"].T
        return hidden + (gate / (1 + np.exp(-gate)) * up) @ self._tensors["mlp.down_proj.weight"].T

    def _attend(self, position: int, row: Array, keys: list[tuple[int, Array]], sees: Sees) -> Array:
        group = self._queries // self._keys
        seen = [(at, other) for at, other in keys if sees(position, at)]
        outputs = []
        for head in range(self._queries):
            query = self._rotated(self._normed_head("q", row, head), position)
            scores = [
                query @ self._rotated(self._normed_head("k", other, head // group), at) / math.sqrt(self._size)
                for at, other in seen
            ]
            sinks = self._tensors.get("self_attn.attention_sink_bias")
            total = sum(math.exp(score) for score in scores) + (math.exp(sinks[head]) if sinks is not None else 0.0)
            values = [self._head("v", other, head // group) for _, other in seen]
            mixed = sum(math.exp(score) / total * value for score, value in zip(scores, values, strict=True))
            gate = self._tensors.get("self_attn.g_proj.weight")
            outputs.append(mixed if gate is None else mixed * math.log1p(math.exp(gate[head] @ row)))
        return np.concatenate(outputs)

    def _head(self, kind: str, row: Array, head: int) -> Array:
        weight = self._tensors[f"self_attn.{kind}_proj.weight"]
        return weight[head * self._size : (head + 1) * self._size] @ row

    def _normed_head(self, kind: str, row: Array, head: int) -> Array:
        return _normed(self._head(kind, row, head)) * self._tensors[f"self_attn.{kind}_norm.weight"]

    def _norm(self, name: str, rows: Array) -> Array:
        return _normed(rows) * self._tensors[f"{name}.weight"]

    def _rotated(self, head: Array, position: int) -> Array:
        half = self._size // 2
        rotated = head.copy()
        for pair in range(half):
            angle = position * self._theta ** (-2 * pair / self._size)
            one, other = (pair, pair + half) if self._neox else (2 * pair, 2 * pair + 1)
            rotated[one] = head[one] * math.cos(angle) - head[other] * math.sin(angle)
            rotated[other] = head[other] * math.cos(angle) + head[one] * math.sin(angle)
        return rotated


def recurrent_head(tensors: Mapping[str, mx.array], base: Array, states: Array, bonus: int) -> tuple[list[int], Array]:
    """[n, V] logits of each slot alone, [n, H] states -> tokens, [n, V] logits, by a memory over the block."""
    read = {name: np.array(array, np.float64) for name, array in tensors.items()}
    before_table, bias_table = read["markov_head.markov_w1.weight"], read["markov_head.markov_w2.weight"]
    rank = before_table.shape[1]
    memory, before, chosen, rows = np.zeros(rank), bonus, [], []
    for state, logits in zip(states, base, strict=True):
        joint = read["markov_head.joint_proj.weight"] @ np.concatenate([memory, before_table[before], state])
        joint = joint + read["markov_head.joint_proj.bias"]
        keep = 1 / (1 + np.exp(-joint[:rank]))
        memory = keep * memory + (1 - keep) * np.tanh(joint[rank : 2 * rank])
        rows.append(logits + bias_table @ np.tanh(joint[2 * rank :]))
        before = int(np.argmax(rows[-1]))
        chosen.append(before)
    return chosen, np.stack(rows)


def _normed(rows: Array, eps: float = 1e-6) -> Array:
    normed: Array = rows / np.sqrt((rows**2).mean(-1, keepdims=True) + eps)
    return normed
