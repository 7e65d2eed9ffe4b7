"""What people do to a loaded model, by name, and the comparison of a run after it with mlx-lm's own loop."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx import optimizers
from mlx.utils import tree_flatten, tree_map, tree_unflatten
from mlx_lm.generate import generate_step as stock_generate_step
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.tuner.utils import linear_to_lora_layers

from mlx_spec import Statistics, generate_step
from tests.bits import assert_same_bits
from tests.same_cache import assert_same_cache
from tests.scripted import AlternatingDrafter
from tests.tiny import MIXES, PROMPT, VOCAB, from_mlx_lm, randomise

EMITTED = 9
WIDTH = 4
RANK = 3


def built(mix: str, seed: int = 0, dtype: mx.Dtype = mx.float32) -> Any:
    """A model of the test's own, unquantized."""
    return randomise(MIXES[mix].build, seed, dtype)


def tiny() -> Any:
    """A llama of one layer."""
    sizes = {"hidden_size": 20, "intermediate_size": 28, "num_attention_heads": 2, "num_key_value_heads": 1}
    return randomise(lambda: from_mlx_lm("llama", num_hidden_layers=1, rms_norm_eps=1e-5, **sizes), 0)


def stock_run(model: Any, emitted: int = EMITTED, **kv: Any) -> tuple[list[tuple[int, mx.array]], list[Any]]:
    """(tokens with their log-probabilities, the cache afterwards)."""
    cache = make_prompt_cache(model, **kv)
    return list(stock_generate_step(mx.array(PROMPT), model, max_tokens=emitted, prompt_cache=cache)), cache


def assert_exact(model: Any, width: int = WIDTH, drafter: Any = None, emitted: int = EMITTED, **kv: Any) -> Statistics:
    """Run ours on the model as it is now; ids, log-probabilities and cache are those of mlx-lm's loop, bit by bit."""
    wanted, wanted_cache = stock_run(model, emitted, **kv)
    drafter = drafter or AlternatingDrafter([token for token, _ in wanted], VOCAB)
    cache, statistics = make_prompt_cache(model, **kv), Statistics()
    got = list(
        generate_step(
            mx.array(PROMPT),
            model,
            max_tokens=emitted,
            draft_model=drafter,
            draft_block_size=width,
            prompt_cache=cache,
            statistics=statistics,
        )
    )
    assert [token for token, _ in got] == [token for token, _ in wanted]
    for place, ((_, row), (_, want)) in enumerate(zip(got, wanted, strict=True)):
        assert_same_bits(row, want, f"log-probabilities of token {place}, {statistics.verify_route}")
    assert_same_cache(cache, wanted_cache)
    return statistics


def assert_blocks(statistics: Statistics) -> None:
    """Blocks were verified in one forward."""
    assert statistics.verify_route.startswith("block"), (statistics.verify_route, statistics.notes)


# Edits


def scale_values(model: Any) -> None:
    model.update(tree_map(lambda array: array * 1.01 if is_float(array) else array, model.parameters()))


def is_float(array: mx.array) -> bool:
    return mx.issubdtype(array.dtype, mx.floating)


def load_weights(model: Any) -> None:
    given = [(name, array * 0.97) for name, array in tree_flatten(model.parameters()) if is_float(array)]
    model.load_weights(given, strict=False)


def training_step(model: Any) -> None:
    def loss(model: Any) -> mx.array:
        return mx.square(model(mx.array([PROMPT]))).mean()

    _, gradients = nn.value_and_grad(model, loss)(model)
    optimizers.SGD(0.05).update(model, gradients)
    mx.eval(model.parameters())


def adapt(model: Any, *, dora: bool = False, filled: bool = True, keys: set[str] | None = None) -> None:
    """Put an adapter on; mlx-lm starts its second matrix from zero."""
    config = {"rank": RANK, "scale": 4.0, "dropout": 0.0, "keys": keys or {"self_attn.q_proj", "mlp.up_proj"}}
    linear_to_lora_layers(model, 2, config, use_dora=dora)
    model.eval()
    if filled:
        fill_adapters(model)
    mx.eval(model.parameters())


def fill_adapters(model: Any) -> None:
    for module in model.modules():
        if "lora_b" in module:
            module.lora_b = (mx.random.normal(module.lora_b.shape, key=mx.random.key(5)) * 0.1).astype(
                module.lora_b.dtype
            )


def adapters(model: Any) -> list[tuple[str, Any]]:
    return [(name, module) for name, module in model.named_modules() if "lora_b" in module]


def scale_adapters(model: Any) -> None:
    for _, module in adapters(model):
        module.scale *= 1.7


def take_adapters_off(model: Any) -> None:
    inner = [(name, module.get("linear") or module.embedding) for name, module in adapters(model)]
    model.update_modules(tree_unflatten(inner))


def fuse_adapters(model: Any) -> None:
    model.update_modules(tree_unflatten([(name, module.fuse()) for name, module in adapters(model)]))
    mx.eval(model.parameters())


def quantize(model: Any) -> None:
    def takes(path: str, module: Any) -> bool:
        return isinstance(module, nn.Linear) and module.weight.shape[-1] % 32 == 0

    nn.quantize(model, group_size=32, bits=4, class_predicate=takes)
    mx.eval(model.parameters())


def to_half(model: Any) -> None:
    model.set_dtype(mx.bfloat16)
    mx.eval(model.parameters())


def replace_layer(model: Any) -> None:
    """Layer 1 becomes another object of the same class with other weights."""
    layer = copy.deepcopy(model.layers[1])
    layer.update(tree_map(lambda array: array * 0.9 if is_float(array) else array, layer.parameters()))
    model.layers[1] = layer


EDITS: Mapping[str, Callable[[Any], None]] = {
    "values scaled": scale_values,
    "weights loaded": load_weights,
    "training step": training_step,
    "LoRA on": adapt,
    "DoRA on": lambda model: adapt(model, dora=True),
    "LoRA on, from zero": lambda model: adapt(model, filled=False),
    "quantized": quantize,
    "half precision": to_half,
    "layer replaced": replace_layer,
}
"""For a model without adapters."""

ADAPTER_EDITS: Mapping[str, Callable[[Any], None]] = {
    "adapters filled": fill_adapters,
    "adapters scaled": scale_adapters,
    "adapters off": take_adapters_off,
    "adapters fused": fuse_adapters,
}
"""For one that has them."""
