"""What a commit costs and what an open round holds, per kind of cache. Run by `scripts/bench.py --commit`."""

from __future__ import annotations

import copy
import statistics as st
import time
from collections.abc import Callable
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx_lm.models import gemma3_text, llama, qwen3_5
from mlx_lm.models.cache import make_prompt_cache

from mlx_spec import SpeculativeCacheTransaction
from mlx_spec.cache.base import Drive
from mlx_spec.verify import mixers, routes

WIDTH = 5
LAYERS = 12
HIDDEN = 512


def dense() -> nn.Module:
    """Twelve layers of full attention."""
    return llama.Model(
        llama.ModelArgs(
            model_type="llama",
            hidden_size=HIDDEN,
            num_hidden_layers=LAYERS,
            intermediate_size=1408,
            num_attention_heads=8,
            num_key_value_heads=4,
            head_dim=64,
            rms_norm_eps=1e-5,
            vocab_size=997,
        )
    )


def sliding() -> nn.Module:
    """Twelve layers, five windows of 256 tokens to one full attention."""
    return gemma3_text.Model(
        gemma3_text.ModelArgs(
            model_type="gemma3_text",
            hidden_size=HIDDEN,
            num_hidden_layers=LAYERS,
            intermediate_size=1408,
            num_attention_heads=8,
            num_key_value_heads=4,
            head_dim=64,
            vocab_size=997,
            sliding_window=256,
        )
    )


def hybrid() -> nn.Module:
    """Twelve layers, three gated-delta ones to one full attention."""
    text = {
        "model_type": "qwen3_5_text",
        "hidden_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "intermediate_size": 1408,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "vocab_size": 997,
        "linear_num_value_heads": 8,
        "linear_num_key_heads": 4,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 96,
        "linear_conv_kernel_dim": 4,
        "full_attention_interval": 4,
    }
    return qwen3_5.Model(qwen3_5.ModelArgs(model_type="qwen3_5", text_config=text))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "full attention": dense,
    "windows of 256": sliding,
    "gated delta": hybrid,
}


def arrays_of(caches: list[Any]) -> list[Any]:
    """The caches' state, for evaluation."""
    return [cache.state for cache in caches]


def state_bytes(caches: list[Any]) -> int:
    """Bytes of everything the caches hold: what one full snapshot of them keeps."""
    return sum(cache.nbytes for cache in caches)


def tokens(start: int, count: int) -> mx.array:
    """[1, count] ids."""
    return mx.array([[(7 * position + 3) % 997 for position in range(start, start + count)]])


def timed_ms(action: Callable[[], Any]) -> float:
    """Wall milliseconds of one call."""
    started = time.perf_counter()
    action()
    return (time.perf_counter() - started) * 1e3


class CommitCost:
    """One model at one context length: round after round, each kept in part."""

    def __init__(self, model: nn.Module, context: int) -> None:
        self.model = model
        self.caches = make_prompt_cache(model)
        mx.eval(model(tokens(0, context), cache=self.caches), arrays_of(self.caches))
        self.context = context
        self.held = 0

    def commit_ms(self, retained: int) -> float:
        """Time of committing and evaluating what the commit left to do."""
        caches = copy.deepcopy(self.caches)
        tx = SpeculativeCacheTransaction(caches, WIDTH, drive=Drive.BLOCK)
        mx.eval(self.model(tokens(self.context, WIDTH), cache=tx.caches), arrays_of(caches))
        tx.mark(WIDTH)
        self.held = tx.nbytes

        def finish() -> None:
            tx.commit(retained)
            mx.eval(arrays_of(caches))

        return timed_ms(finish)

    def forward_ms(self, count: int) -> float:
        """Time of an ordinary forward over `count` tokens."""
        caches = copy.deepcopy(self.caches)
        return timed_ms(lambda: mx.eval(self.model(tokens(self.context, count), cache=caches), arrays_of(caches)))


def report(repeats: int) -> None:
    """Print the table."""
    print(f"W = {WIDTH}, {LAYERS} layers, hidden {HIDDEN}; medians of {repeats}\n")
    print(
        "| model | dtype | context | held by an open round | full states for every position | "
        f"commit(2) ms | commit({WIDTH}) ms | forward over 2 tokens, ms | commit(2) / forward |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for name, build in MODELS.items():
        for dtype in (mx.float32, mx.bfloat16):
            for context in (64, 512):
                _report_row(name, build, dtype, context, repeats)


def _report_row(name: str, build: Callable[[], nn.Module], dtype: mx.Dtype, context: int, repeats: int) -> None:
    model = build()
    model.set_dtype(dtype)
    mx.eval(model.parameters())
    mixers.attach(model)
    routes.remember(model)
    cost = CommitCost(model, context)
    part, whole, forward = [], [], []
    for _ in range(repeats):
        part.append(cost.commit_ms(2))
        whole.append(cost.commit_ms(WIDTH))
        forward.append(cost.forward_ms(2))
    full = state_bytes(cost.caches) * WIDTH
    short = str(dtype).removeprefix("mlx.core.")
    print(
        f"| {name} | {short} | {context} | {cost.held / 1e6:.3f} MB | {full / 1e6:.1f} MB | "
        f"{st.median(part):.2f} | {st.median(whole):.2f} | {st.median(forward):.2f} | "
        f"{st.median(part) / st.median(forward):.2f} |"
    )
