"""Tiny EAGLE-3 checkpoints for the tiny targets: files on disk in the flat layout, read back as any other.

A random one is nearly always wrong. A planted one is right about a quarter of the time: its layer adds to the
target's last hidden state a linear function of that state and of the next token's embedding, fitted by least squares
to what the target does with random text.
"""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from mlx_spec.drafters.base import Drafter
from mlx_spec.model.target import Target
from mlx_spec.pairing import load_drafter
from tests.tiny import MIXES, VOCAB

Tensors = dict[str, mx.array]

DRAFTED = 71
"""Ids the heads can propose, of the target's VOCAB."""

EPS = 1e-6

_ROWS, _LENGTH = 64, 24
"""Size of the random text a planted drafter is fitted on."""

FOCUS = 3.0
"""Gain of queries and keys: makes the attention weight of the position itself all but 1."""


@functools.cache
def random_drafter(mix: str, dtype: mx.Dtype = mx.float32) -> Drafter:
    """A drafter with random weights, an embedding of its own, and another hidden size than the target's."""
    return _loaded(Target(MIXES[mix].model(dtype)), random_files)


@functools.cache
def planted_drafter(mix: str, dtype: mx.Dtype = mx.float32) -> Drafter:
    """A drafter that is often right, with the target's embedding."""
    return _loaded(Target(MIXES[mix].model(dtype)), _planted)


def _loaded(target: Target, make: Any) -> Drafter:
    config, tensors = make(target)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        mx.save_safetensors(f"{folder}/model.safetensors", tensors)
        return load_drafter(folder, target=target)


def _config(target: Target, hidden: int, heads: tuple[int, int, int], inner: int) -> dict[str, Any]:
    """A config.json for a drafter that taps the target's first and last layer. `heads`: queries, keys, size."""
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": hidden,
        "target_hidden_size": target.hidden_size,
        "intermediate_size": inner,
        "num_hidden_layers": 1,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "head_dim": heads[2],
        "rms_norm_eps": EPS,
        "vocab_size": VOCAB,
        "draft_vocab_size": DRAFTED,
        "tie_word_embeddings": False,
        "rope_theta": 1e4,
        "target_layer_ids": [0, target.layer_count - 1],
    }


def _target_ids(rng: np.random.Generator) -> tuple[np.ndarray, mx.array]:
    """Ids the head can propose, ascending, and the offsets a checkpoint keeps for them."""
    ids = np.sort(rng.permutation(VOCAB)[:DRAFTED])
    return ids, mx.array(ids - np.arange(DRAFTED), mx.int64)


def random_files(target: Target) -> tuple[dict[str, Any], Tensors]:
    """config.json and tensors of the random drafter."""
    rng = np.random.default_rng(3)
    hidden, inner, heads, keys, size = 36, 52, 6, 2, 8

    def matrix(rows: int, columns: int) -> mx.array:
        return mx.array(rng.standard_normal((rows, columns), dtype=np.float32) / columns**0.5)

    def vector() -> mx.array:
        return mx.array(1 + 0.1 * rng.standard_normal(hidden, dtype=np.float32))

    tensors = {
        "fc.weight": matrix(hidden, 2 * target.hidden_size),
        "embed_tokens.weight": matrix(VOCAB, hidden) * hidden**0.5,
        "layers.0.input_layernorm.weight": vector(),
        "layers.0.hidden_norm.weight": vector(),
        "layers.0.post_attention_layernorm.weight": vector(),
        "layers.0.self_attn.q_proj.weight": matrix(heads * size, 2 * hidden),
        "layers.0.self_attn.k_proj.weight": matrix(keys * size, 2 * hidden),
        "layers.0.self_attn.v_proj.weight": matrix(keys * size, 2 * hidden),
        "layers.0.self_attn.o_proj.weight": matrix(hidden, heads * size),
        "layers.0.mlp.gate_proj.weight": matrix(inner, hidden),
        "layers.0.mlp.up_proj.weight": matrix(inner, hidden),
        "layers.0.mlp.down_proj.weight": matrix(hidden, inner),
        "norm.weight": vector(),
        "lm_head.weight": matrix(DRAFTED, hidden),
        "d2t": _target_ids(rng)[1],
    }
    return _config(target, hidden, (heads, keys, size), inner), tensors


def _planted(target: Target) -> tuple[dict[str, Any], Tensors]:
    rng = np.random.default_rng(5)
    hidden, inner = target.hidden_size, 4
    drafted, d2t = _target_ids(rng)
    self_only = mx.concatenate([FOCUS * mx.eye(hidden), mx.zeros((hidden, hidden))], axis=1)
    ones, nothing = mx.ones(hidden), mx.zeros((inner, hidden))
    tensors = {
        # Of the two tapped states the last layer's is taken as it is.
        "fc.weight": mx.concatenate([mx.zeros((hidden, hidden)), mx.eye(hidden)], axis=1),
        "midlayer.input_layernorm.weight": ones,
        "midlayer.hidden_norm.weight": ones,
        "midlayer.post_attention_layernorm.weight": ones,
        "midlayer.self_attn.q_proj.weight": self_only,
        "midlayer.self_attn.k_proj.weight": self_only,
        "midlayer.self_attn.v_proj.weight": _fitted(target, rng),
        "midlayer.self_attn.o_proj.weight": mx.eye(hidden),
        "midlayer.mlp.gate_proj.weight": nothing,
        "midlayer.mlp.up_proj.weight": nothing,
        "midlayer.mlp.down_proj.weight": nothing.T,
        # A norm's effective weight is what it makes of ones, and a head's columns are what it makes of unit vectors.
        "norm.weight": target.final_norm(ones[None, None].astype(target.dtype))[0, 0].astype(mx.float32),
        "lm_head.weight": target.head(mx.eye(hidden)[None].astype(target.dtype))[0].T[mx.array(drafted)],
        "d2t": d2t,
    }
    tensors = {name: array if name == "d2t" else array.astype(mx.float32) for name, array in tensors.items()}
    return _config(target, hidden, (1, 1, hidden), inner), tensors


def _fitted(target: Target, rng: np.random.Generator) -> mx.array:
    """[H, 2H] M such that h[t+1] is near h[t] + M @ [norm(embedding of token t+1), norm(h[t])]."""
    states, embedded = target_states(target, rng, (target.layer_count - 1,))
    before, after = states[:, :-1], states[:, 1:]
    seen = np.concatenate([normed(embedded[:, 1:]), normed(before)], axis=-1)
    width = states.shape[-1]
    seen, moved = seen.reshape(-1, 2 * width), (after - before).reshape(-1, width)
    return mx.array(np.linalg.solve(seen.T @ seen + EPS * np.eye(2 * width), seen.T @ moved).T.astype(np.float32))


def target_states(target: Target, rng: np.random.Generator, taps: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """[rows, length, K*H] tapped states of random text, and [rows, length, H] embeddings of its tokens."""
    target.attach_taps(taps)
    ids = mx.array(rng.integers(0, VOCAB, (_ROWS, _LENGTH)))
    tapped = target.forward(ids, make_prompt_cache(target.model), taps).hidden
    assert tapped is not None
    return np.array(tapped.astype(mx.float32)), np.array(target.raw_embed(ids).astype(mx.float32))


def normed(rows: np.ndarray) -> np.ndarray:
    """RMS norm over the last axis."""
    return rows / np.sqrt((rows**2).mean(-1, keepdims=True) + EPS)
