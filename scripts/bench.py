"""Speed of the demo pair, plain against speculative, interleaved in one process; and the host's share of a round.

    .venv/bin/python scripts/bench.py [--prompts N] [--tokens N] [--repeats N] [--json FILE]
    .venv/bin/python scripts/bench.py --commit

Every figure is a median over interleaved repeats. Ratios are against the faster of mlx-lm's pipelined loop
and the same loop evaluated synchronously, on the same prompt in the same repeat.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics as st
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import commit_costs
import mlx.core as mx
from mlx_lm.generate import generate_step as stock_generate_step
from mlx_lm.models import llama
from mlx_lm.models.cache import make_prompt_cache

import mlx_spec
from mlx_spec.demo import demo_drafter_path, demo_target_path
from mlx_spec.drafters import CallableDrafter
from mlx_spec.model.target import Target

CHAT = (
    "List five uses of a paper clip.",
    "Explain why the sky is blue to a child.",
    "Write a short story about a lighthouse keeper who finds a message in a bottle.",
)
COPY = (
    "Repeat the following text word for word.\n\nThe committee met on Tuesday to discuss the budget. The chair opened "
    "the meeting at nine and asked for the minutes of the last meeting. The minutes were read and approved. The "
    "treasurer presented the budget for the coming year. The budget for the coming year was discussed at length. The "
    "chair thanked the treasurer and closed the meeting at noon."
)
WIDTHS = range(2, 7)


@dataclass
class Timing:
    """One way to decode: seconds per token and accepted tokens per round, one entry per run."""

    seconds_per_token: list[float] = field(default_factory=list)
    ratios: list[float] = field(default_factory=list)
    tokens_per_round: list[float] = field(default_factory=list)
    accepted_per_round: list[float] = field(default_factory=list)


def synchronous_step(model: Any, ids: list[int], tokens: int) -> Iterator[float]:
    """mlx-lm's one-token loop without the step dispatched ahead. Yields the time after each token."""
    caches = make_prompt_cache(model)
    fed = mx.array(ids)
    for _ in range(tokens):
        logits = model(fed[None], cache=caches)[:, -1, :]
        fed = mx.argmax(logits - mx.logsumexp(logits, keepdims=True), axis=-1)
        mx.eval(fed, [cache.state for cache in caches])
        yield time.perf_counter()


def clocked(emissions: Iterator[Any]) -> Iterator[float]:
    """The time after each emission."""
    for _ in emissions:
        yield time.perf_counter()


def seconds_per_token(times: Iterator[float]) -> float:
    """Median-free mean over one run, prefill and first token left out."""
    points = list(times)
    return (points[-1] - points[0]) / (len(points) - 1)


class PairBench:
    """Plain and speculative decoding of the demo pair."""

    def __init__(self, prompts: int, tokens: int, repeats: int) -> None:
        self.tokens, self.repeats = tokens, repeats
        self.model, self.tokenizer = mlx_spec.load(str(demo_target_path()))
        self.eagle = mlx_spec.load_drafter(str(demo_drafter_path()), target=self.model)
        chat = [(f"chat {number + 1}", self._ids(text)) for number, text in enumerate(CHAT[:prompts])]
        self.prompts = [*chat, ("copy", self._ids(COPY))]
        self.timings: dict[str, dict[str, Timing]] = {}

    def _ids(self, text: str) -> list[int]:
        return list(self.tokenizer.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True))

    def run(self) -> None:
        """All ways over all prompts, interleaved."""
        for repeat in range(self.repeats):
            for name, ids in self.prompts:
                print(f"repeat {repeat + 1}/{self.repeats}, {name}, {len(ids)} prompt tokens", file=sys.stderr)
                self._one_prompt("copy" if name == "copy" else "chat", ids)

    def _one_prompt(self, group: str, ids: list[int]) -> None:
        plain: dict[str, Callable[[], Iterator[float]]] = {
            "mlx-lm pipelined": lambda: clocked(stock_generate_step(mx.array(ids), self.model, max_tokens=self.tokens)),
            "mlx-lm synchronous": lambda: synchronous_step(self.model, ids, self.tokens),
        }
        spent = {way: seconds_per_token(start()) for way, start in plain.items()}
        fastest = min(spent.values())
        for way, seconds in spent.items():
            self._note(group, way, seconds, fastest)
        ways: dict[str, dict[str, Any]] = {"mlx_spec plain": {}}
        ways |= {f"eagle3 W={width}": {"draft_model": self.eagle, "draft_block_size": width} for width in WIDTHS}
        ways |= {f"ngram W={width}": {"draft_model": "ngram", "draft_block_size": width} for width in (3, 5)}
        for way, keywords in ways.items():
            counters = mlx_spec.Statistics()
            emissions = mlx_spec.generate_step(
                mx.array(ids), self.model, max_tokens=self.tokens, statistics=counters, **keywords
            )
            timing = self._note(group, way, seconds_per_token(clocked(emissions)), fastest)
            timing.tokens_per_round.append(counters.tokens_per_round)
            timing.accepted_per_round.append(counters.accepted_tokens / counters.rounds)

    def _note(self, group: str, way: str, seconds: float, fastest: float) -> Timing:
        timing = self.timings.setdefault(group, {}).setdefault(way, Timing())
        timing.seconds_per_token.append(seconds)
        timing.ratios.append(fastest / seconds)
        return timing

    def rows(self) -> list[dict[str, Any]]:
        """One row per prompt group and way."""
        return [
            {
                "prompts": group,
                "way": way,
                "tokens_per_second": 1 / st.median(timing.seconds_per_token),
                "ratio": st.median(timing.ratios),
                "tokens_per_round": st.median(timing.tokens_per_round or [1.0]),
                "accepted_per_round": st.median(timing.accepted_per_round or [0.0]),
                "runs": len(timing.ratios),
            }
            for group, ways in self.timings.items()
            for way, timing in ways.items()
        ]


class HostClock:
    """Time spent building the target's forward and waiting for the device; the rest of a round is the host's."""

    def __init__(self) -> None:
        self.away = 0.0

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The same function, its time counted as away from the host's own work."""

        def timed(*args: Any, **keywords: Any) -> Any:
            started = time.perf_counter()
            try:
                return function(*args, **keywords)
            finally:
                self.away += time.perf_counter() - started

        return timed

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Count forwards, dispatches and host reads as away."""
        saved = Target.forward, mx.async_eval, mx.array.tolist
        Target.forward = self.around(saved[0])  # type: ignore[method-assign]
        mx.async_eval = self.around(saved[1])
        mx.array.tolist = self.around(saved[2])  # type: ignore[method-assign]
        try:
            yield
        finally:
            Target.forward, mx.async_eval, mx.array.tolist = saved  # type: ignore[method-assign]


def host_ms_per_round(rounds: int, width: int = 5) -> tuple[float, float]:
    """(median host ms outside the forwards, median ms in all) per round, one layer, hidden 32."""
    arguments = llama.ModelArgs(
        model_type="llama",
        hidden_size=32,
        num_hidden_layers=1,
        intermediate_size=48,
        num_attention_heads=2,
        num_key_value_heads=1,
        rms_norm_eps=1e-5,
        vocab_size=97,
    )
    model = llama.Model(arguments)
    mx.eval(model.parameters())
    clock = HostClock()
    drafter = CallableDrafter(lambda ids, count: [(ids[-1] + step) % 97 for step in range(count)])
    counters = mlx_spec.Statistics()
    outside, whole = [], []
    with clock.watching():
        started, away, seen = time.perf_counter(), clock.away, 0
        for _ in mlx_spec.generate_step(
            mx.array([3, 5, 7]),
            model,
            max_tokens=-1,
            draft_model=drafter,
            draft_block_size=width,
            statistics=counters,
        ):
            if counters.rounds == seen:
                continue
            now = time.perf_counter()
            spent = (now - started) / (counters.rounds - seen)
            outside.append(spent - (clock.away - away) / (counters.rounds - seen))
            whole.append(spent)
            started, away, seen = now, clock.away, counters.rounds
            if seen > rounds:
                break
    return st.median(outside[1:]) * 1e3, st.median(whole[1:]) * 1e3


def environment() -> dict[str, str]:
    """What the figures belong to."""
    packages = ("mlx", "mlx-lm", "mlx_spec", "transformers")
    return {
        **{name: version(name) for name in packages},
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "device": str(mx.default_device()),
    }


def print_table(rows: list[dict[str, Any]], host: tuple[float, float], command: str) -> None:
    """Markdown, ready to paste."""
    print(f"`{command}`")
    print(", ".join(f"{name} {value}" for name, value in environment().items()), end="\n\n")
    print("| prompts | decoding | tokens/s | against the faster plain loop | tokens per round | accepted per round |")
    print("|---|---|---|---|---|---|")
    for row in rows:
        print(
            f"| {row['prompts']} | {row['way']} | {row['tokens_per_second']:.2f} | {row['ratio']:.2f} | "
            f"{row['tokens_per_round']:.2f} | {row['accepted_per_round']:.2f} |"
        )
    print(
        f"\nHost time per round outside the forwards (one layer, hidden 32, W = 5): median {host[0]:.3f} ms "
        f"of {host[1]:.3f} ms per round."
    )


def main() -> None:
    """Run both benches and print one table."""
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--prompts", type=int, default=2, help="chat prompts, 1..3")
    flags.add_argument("--tokens", type=int, default=48, help="tokens per run")
    flags.add_argument("--repeats", type=int, default=3)
    flags.add_argument("--rounds", type=int, default=500, help="rounds of the host-time bench")
    flags.add_argument("--commit", action="store_true", help="what a commit costs per kind of cache, and nothing else")
    flags.add_argument("--json", type=Path, metavar="FILE")
    args = flags.parse_args()
    if args.commit:
        commit_costs.report(args.repeats)
        return
    host = host_ms_per_round(args.rounds)
    bench = PairBench(args.prompts, args.tokens, args.repeats)
    longest = max(len(ids) for _, ids in bench.prompts) + args.tokens
    if longest > 512:
        sys.exit(f"the longest run reaches {longest} tokens of context; these figures are meant for at most 512")
    bench.run()
    command = " ".join(["scripts/bench.py", *sys.argv[1:]])
    print_table(bench.rows(), host, command)
    if args.json is not None:
        report = {"command": command, **environment(), "rows": bench.rows(), "host_ms_per_round": host}
        args.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
