"""Gemma 4's assistants against their reference.

The golden file holds `prompt_ids` [1, T], the `bonus` after them, the target's `kv.<kind of layer>.keys` and `.values`
[1, Hk, T, D], its `target_hidden_last` [1, 1, H_t] after the norm, `position_ids` [1, 1], and per step `s<i>`
`token_in` [1, 1], `inputs_embeds` [1, 1, 2 H_t], `logits` [1, 1, V] and `projected` [1, 1, H_t].
"""

from __future__ import annotations

import functools
import itertools
import json
from pathlib import Path
from typing import Any
from unittest import mock

import mlx.core as mx
from mlx_lm.models.cache import KVCache, RotatingKVCache
from mlx_lm.utils import load_model

from mlx_spec.drafters.gemma4_assistant.model import AssistantNetwork, AssistantState, Gemma4Assistant, KeysByKind
from mlx_spec.model.target import Target
from mlx_spec.pairing import load_drafter
from tests.drafters.parity import CONFIG, Comparison, Fixture, Layout, Tensors


def _compare(fixture: Fixture, comparison: Comparison) -> None:
    target = _target(fixture.target)
    drafter = load_drafter(fixture.checkpoint, target)
    assert isinstance(drafter, Gemma4Assistant)
    expected = fixture.expected
    state = drafter.open(target)
    state.look_at(_caches(drafter, target, expected))
    state.read_prompt(expected["prompt_ids"].tolist(), expected["target_hidden_last"])
    keys, length = handed(state)
    comparison.ids("position", mx.array([[length]]), expected["position_ids"])
    hidden, chosen = expected["target_hidden_last"], []
    for step in itertools.count():
        if f"s{step}.logits" not in expected:
            break
        token = expected[f"s{step}.token_in"].astype(mx.int32)
        embedded = target.embed(token)
        inputs = mx.concatenate([embedded, hidden], axis=-1)
        comparison.arrays("inputs", inputs, expected[f"s{step}.inputs_embeds"])
        normed = drafter.network.step(embedded, hidden, keys, length)
        logits, hidden = drafter.network.logits(normed), drafter.network.carry(normed)
        comparison.arrays("logits", logits, expected[f"s{step}.logits"])
        comparison.arrays("projected", hidden, expected[f"s{step}.projected"])
        wanted = mx.argmax(expected[f"s{step}.logits"], axis=-1)
        comparison.ids("ids", mx.argmax(logits, axis=-1), wanted)
        chosen.append(wanted)
        # The chain was fed its own tokens.
        if f"s{step + 1}.token_in" in expected:
            comparison.ids("fed", wanted, expected[f"s{step + 1}.token_in"])


def handed(state: AssistantState) -> tuple[KeysByKind, int]:
    """The target's keys that a proposal is made on, and the position of its queries."""
    step = mock.create_autospec(AssistantNetwork.step, side_effect=AssistantNetwork.step)
    with mock.patch.object(AssistantNetwork, "step", step):
        state.propose([0], 1)
    (call,) = step.call_args_list
    _, _, _, keys, position = call.args
    return keys, position


def _caches(drafter: Gemma4Assistant, target: Target, expected: Tensors) -> list[Any]:
    """The target's caches, holding the reference's rows."""
    caches = []
    for layer in target.model.layers:
        keys, values = (expected[f"kv.{layer.layer_type}.{side}"] for side in ("keys", "values"))
        sliding = layer.layer_type == "sliding_attention"
        cache: Any = RotatingKVCache(max_size=drafter.config.args.sliding_window) if sliding else KVCache()
        cache.update_and_fetch(keys, values)
        caches.append(cache)
    return caches


@functools.cache
def _target(folder: Path) -> Target:
    """A target as mlx-lm loads it once it is told what newer configs say layer by layer."""
    config = json.loads((folder / CONFIG).read_text())
    per_layer = config.get("text_config", config).get("per_layer_config", {})
    full = next(iter(per_layer.values()), None)
    told = (
        {"global_head_dim": full["head_dim"], "num_global_key_value_heads": full["num_key_value_heads"]} if full else {}
    )
    return Target(load_model(folder, model_config=told)[0])


LAYOUT = Layout(
    "gemma4_assistant",
    ("bonus", "kv.full_attention.keys", "target_hidden_last", "s0.inputs_embeds", "s0.projected"),
    _compare,
)
