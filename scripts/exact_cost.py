"""What exact verification costs over the plain block forward, per family of models, and what attaching costs.

    .venv/bin/python scripts/exact_cost.py [--tokens N] [--repeats N] [--width W] [--only NAME ...]

Random models of a few layers, one per family. Every proposal is right, so each round verifies a whole block and keeps
all of it. Runs of both kinds take turns in one process; the figure is a ratio of their best times. The last column
compares mlx-lm's own loop with everything of ours attached to the model and with nothing.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
os.environ["MLX_SPEC_CERTIFICATES"] = "off"

import mlx.core as mx  # noqa: E402
import mlx.nn as nn  # noqa: E402
from mlx_lm.generate import generate_step as stock_generate_step  # noqa: E402
from mlx_lm.models.cache import make_prompt_cache  # noqa: E402

from mlx_spec import generate_step  # noqa: E402
from mlx_spec.drafters import CallableDrafter  # noqa: E402
from mlx_spec.ops.base import ROWS  # noqa: E402
from mlx_spec.stats import Statistics  # noqa: E402
from mlx_spec.verify import mixers, routes  # noqa: E402
from mlx_spec.verify.record import detach  # noqa: E402
from mlx_spec.verify.subjects import find_subjects  # noqa: E402
from tests.zoo.menagerie import Specimen  # noqa: E402

PROMPT = tuple(range(1, 41))
DENSE: dict[str, Any] = {
    "vocab_size": 4096,
    "hidden_size": 512,
    "num_hidden_layers": 6,
    "intermediate_size": 1536,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
    "max_position_embeddings": 4096,
}
GATED_DELTA = {
    "full_attention_interval": 3,
    "linear_num_value_heads": 8,
    "linear_num_key_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_conv_kernel_dim": 4,
    "partial_rotary_factor": 0.5,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
}
LATENT = {
    "kv_lora_rank": 128,
    "q_lora_rank": 192,
    "qk_rope_head_dim": 32,
    "qk_nope_head_dim": 64,
    "v_head_dim": 64,
    "first_k_dense_replace": 99,
    "n_routed_experts": None,
    "moe_intermediate_size": 256,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {**DENSE, "model_type": "llama"},
    "llama, 4 bits": {**DENSE, "model_type": "llama", "quantization": {"group_size": 64, "bits": 4}},
    "qwen3": {**DENSE, "model_type": "qwen3", "tie_word_embeddings": True},
    "gemma3, sliding": {
        **DENSE,
        "model_type": "gemma3_text",
        "query_pre_attn_scalar": 64,
        "sliding_window": 32,
        "sliding_window_pattern": 3,
    },
    "qwen3_next, hybrid": {
        **DENSE,
        **GATED_DELTA,
        "model_type": "qwen3_next",
        "num_experts": 0,
        "num_experts_per_tok": 0,
        "shared_expert_intermediate_size": 64,
        "moe_intermediate_size": 64,
    },
    "qwen3_moe": {
        **DENSE,
        "model_type": "qwen3_moe",
        "num_experts": 16,
        "num_experts_per_tok": 4,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "moe_intermediate_size": 384,
        "norm_topk_prob": True,
        "tie_word_embeddings": False,
    },
    "deepseek_v3, latent": {**DENSE, **LATENT, "model_type": "deepseek_v3"},
    "mamba2": {
        "model_type": "mamba2",
        "vocab_size": 4096,
        "hidden_size": 512,
        "num_hidden_layers": 6,
        "num_heads": 16,
        "head_dim": 64,
        "state_size": 64,
        "intermediate_size": 1024,
        "layer_norm_epsilon": 1e-5,
        "conv_kernel": 4,
        "n_groups": 2,
        "use_bias": False,
        "use_conv_bias": True,
        "tie_word_embeddings": True,
        "time_step_limit": [0.0, float("inf")],
        "time_step_rank": "auto",
    },
}


def main() -> int:
    options = arguments().parse_args()
    print(f"| family | exact goes by | exact over fast, W={options.width} | stock after attaching over before |")
    print("|---|---|---|---|")
    for name, config in FAMILIES.items():
        if options.only and name not in options.only:
            continue
        model = Specimen(name, config).build(options.dtype)
        ids = plain_ids(model, options.tokens)
        best: dict[str, float] = {}
        taken = {}
        for _ in range(options.repeats + 1):
            for verify in ("fast", "exact"):
                seconds, taken[verify] = speculate(model, ids, options.width, verify)
                best[verify] = min(best.get(verify, seconds), seconds)
        ratio = best["exact"] / best["fast"]
        print(f"| {name} | {taken['exact']} | {ratio:.2f} | {attaching(model, options):.2f} |", flush=True)
    return 0


def plain_ids(model: nn.Module, tokens: int) -> list[int]:
    return [int(token) for token, _ in stock_generate_step(mx.array(PROMPT), model, max_tokens=tokens)]


def speculate(model: nn.Module, ids: list[int], width: int, verify: Any) -> tuple[float, str]:
    """Seconds of decoding after the first token, and the route taken."""

    def right(seen: list[int], count: int) -> list[int]:
        place = len(seen) - len(PROMPT)
        return [*ids[place : place + count], *[0] * count][:count]

    statistics = Statistics()
    for _ in generate_step(
        mx.array(PROMPT),
        model,
        draft_model=CallableDrafter(right),
        draft_block_size=width,
        max_tokens=len(ids),
        verify=verify,
        statistics=statistics,
    ):
        pass
    return statistics.decode_ms / 1e3, statistics.verify_route


def attaching(model: nn.Module, options: argparse.Namespace) -> float:
    """Stock decoding with all mixers and ops of the model attached, over the same without, taking turns."""
    subjects = find_subjects(model)
    plan = routes.plan_of(subjects, {subject.key: ROWS for subject in subjects.values()}, options.width)
    best: dict[bool, float] = {}
    for _ in range(options.repeats + 1):
        for attached in (False, True):
            (mixers.attach if attached else detach)(model)
            routes.attach(model, plan) if attached else detach(model)
            seconds = stock_seconds(model, options.tokens)
            best[attached] = min(best.get(attached, seconds), seconds)
    return best[True] / best[False]


def stock_seconds(model: nn.Module, tokens: int) -> float:
    steps = stock_generate_step(mx.array(PROMPT), model, max_tokens=tokens, prompt_cache=make_prompt_cache(model))
    next(steps)
    started = time.perf_counter()
    for _ in steps:
        pass
    return time.perf_counter() - started


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, default=96, help="tokens per run")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each kind after the first, which warms up")
    parser.add_argument("--width", type=int, default=4, help="tokens per verify call")
    parser.add_argument("--dtype", default="float32", help="of the weights")
    parser.add_argument("--only", nargs="+", metavar="NAME", help=f"of {list(FAMILIES)}")
    return parser


if __name__ == "__main__":
    sys.exit(main())
