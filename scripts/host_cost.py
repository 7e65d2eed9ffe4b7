"""What a round costs the host beside mlx-lm's own loops: CPU time and Python calls, on a model of one small layer.

    .venv/bin/python scripts/host_cost.py [--tokens N] [--repeats N] [--only NAME ...]

The model has next to nothing to compute, so what is left is building graphs, dispatching and reading. Runs take turns
in one process. CPU time is that of all threads, and of what a long run takes longer than a short one: what a request
does once is left out, and told as the last column. The ratio is the median of the ratios within one turn, so that a
machine that changes its pace changes both. Calls are counted by cProfile in the same way. A step is a token of a plain
run and a round of a drafted one. Pin the process to one core (taskset -c 1) on a machine that is not idle.
"""

from __future__ import annotations

import argparse
import cProfile
import os
import pstats
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
os.environ["MLX_SPEC_CERTIFICATES"] = "off"

import mlx.core as mx  # noqa: E402
from mlx import nn  # noqa: E402
from mlx_lm.generate import generate_step as stock_step  # noqa: E402
from mlx_lm.generate import speculative_generate_step as stock_speculative  # noqa: E402
from mlx_lm.models import llama  # noqa: E402
from mlx_lm.sample_utils import make_sampler  # noqa: E402

from mlx_spec import generate_step  # noqa: E402
from mlx_spec.drafters import CallableDrafter  # noqa: E402
from tests.tiny import MIXES, PROMPT  # noqa: E402

Run = Callable[[int], None]


def one_layer() -> nn.Module:
    """The model."""
    mx.random.seed(1)
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "intermediate_size": 64, "vocab_size": 97}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-5}
    model = llama.Model(llama.ModelArgs.from_dict({"model_type": "llama", **sizes, **heads}))
    mx.eval(model.parameters())
    return model


class RightModel(nn.Module):
    """A draft model for mlx-lm's loop that is always right and computes nothing: it looks its answer up."""

    def __init__(self, ids: list[int]) -> None:
        super().__init__()
        self._ids = ids
        self._rows = mx.eye(97)
        self.layers = [nn.Identity()]

    def __call__(self, tokens: mx.array, cache: Any) -> mx.array:
        cache[0].offset += tokens.shape[1]
        end = cache[0].offset
        answers = [self._rows[token] for token in self._ids[end - tokens.shape[1] + 1 : end + 1]]
        return mx.stack(answers)[None]


def cases(tokens: int) -> dict[str, tuple[str, int, Run]]:
    """name -> (what it is compared with, tokens of a step, the run)."""
    model, hybrid, sampler = one_layer(), MIXES["hybrid"].model(), make_sampler(0.8, top_p=0.9)

    def right_ids(target: nn.Module) -> list[int]:
        return [*PROMPT] + [token for token, _ in stock_step(mx.array(PROMPT), target, max_tokens=tokens + 40)]

    ids, hybrid_ids = right_ids(model), right_ids(hybrid)
    right = CallableDrafter(lambda known, count: ids[len(known) : len(known) + count])
    hybrid_right = CallableDrafter(lambda known, count: hybrid_ids[len(known) : len(known) + count])

    def run(step: Callable[..., Any], target: nn.Module, *more: Any, **keywords: Any) -> Run:
        return lambda count: _drain(step(mx.array(PROMPT), target, *more, max_tokens=count, **keywords))

    return {
        "mlx-lm plain": ("", 1, run(stock_step, model)),
        "plain": ("mlx-lm plain", 1, run(generate_step, model)),
        "mlx-lm sampled": ("", 1, run(stock_step, model, sampler=sampler)),
        "plain sampled": ("mlx-lm sampled", 1, run(generate_step, model, sampler=sampler)),
        "mlx-lm W=8 right": ("", 8, run(stock_speculative, model, RightModel(ids), num_draft_tokens=7)),
        "W=8 right": ("mlx-lm W=8 right", 8, run(generate_step, model, draft_model=right, draft_block_size=8)),
        "mlx-lm self W=4": ("", 4, run(stock_speculative, model, model, num_draft_tokens=3)),
        "self W=4": ("mlx-lm self W=4", 4, run(generate_step, model, draft_model=model, draft_block_size=4)),
        "sampled W=4": (
            "mlx-lm sampled",
            1,
            run(generate_step, model, sampler=sampler, draft_model=right, draft_block_size=4),
        ),
        "n-gram W=4": ("mlx-lm plain", 1, run(generate_step, model, draft_model="ngram", draft_block_size=4)),
        "mlx-lm hybrid": ("", 1, run(stock_step, hybrid)),
        "hybrid plain": ("mlx-lm hybrid", 1, run(generate_step, hybrid)),
        "hybrid W=4 right": (
            "mlx-lm hybrid",
            1,
            run(generate_step, hybrid, draft_model=hybrid_right, draft_block_size=4),
        ),
    }


def _drain(tokens: Any) -> None:
    for _ in tokens:
        pass


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=320)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--only", nargs="*", default=[])
    asked = parser.parse_args()
    mx.set_default_device(mx.cpu)
    wanted = {
        name: case
        for name, case in cases(asked.tokens).items()
        if not asked.only or any(part in name for part in asked.only)
    }
    long, short = asked.tokens, asked.tokens // 5
    spent_us: dict[str, list[float]] = {name: [] for name in wanted}
    once_us: dict[str, list[float]] = {name: [] for name in wanted}
    for turn in range(asked.repeats + 1):
        for name, (_, per_step, run) in wanted.items():
            whole_us, part_us = (_spent_us(run, tokens) for tokens in (long, short))
            token_us = (whole_us - part_us) / (long - short)
            if turn:
                spent_us[name].append(token_us * per_step)
                once_us[name].append(part_us - short * token_us)
    print("| run | CPU us a step | of mlx-lm's | Python calls a step | CPU us once |\n|---|---|---|---|---|")
    for name, (beside, per_step, run) in wanted.items():
        calls = (_calls(run, long) - _calls(run, short)) / (long - short) * per_step
        turns = zip(spent_us[name], spent_us.get(beside, ()), strict=False)
        ratios = [own / theirs for own, theirs in turns]
        ratio = f"{statistics.median(ratios):.2f}" if ratios else ""
        typical_us, first_us = statistics.median(spent_us[name]), statistics.median(once_us[name])
        print(f"| {name} | {typical_us:.0f} | {ratio} | {calls:.0f} | {first_us:.0f} |")


def _spent_us(run: Run, tokens: int) -> float:
    started = time.process_time()
    run(tokens)
    return (time.process_time() - started) * 1e6


def _calls(run: Run, tokens: int) -> int:
    profile = cProfile.Profile()
    profile.runcall(run, tokens)
    calls: int = pstats.Stats(profile).total_calls  # type: ignore[attr-defined]
    return calls


if __name__ == "__main__":
    main()
