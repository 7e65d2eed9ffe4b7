"""One architecture under speculation: every width and acceptance pattern against the stock one-token loop."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import CacheList, make_prompt_cache
from mlx_lm.sample_utils import make_sampler

from mlx_spec import generate_step
from mlx_spec.cache.adopt import adopt, leaves
from mlx_spec.cache.base import Drive
from mlx_spec.cache.transaction import SpeculativeCacheTransaction
from mlx_spec.drafters import CallableDrafter
from mlx_spec.errors import CannotMix, TransactionError
from mlx_spec.model.target import Target
from mlx_spec.stats import Statistics
from mlx_spec.verify import mixers, routes
from mlx_spec.verify.block import step_through, verify
from mlx_spec.verify.certified_routes import Verify
from mlx_spec.verify.routes import STEP_THROUGH
from tests.oracle import OracleRun, assert_same_output, rng_key, run_stock
from tests.same_cache import cache_difference
from tests.zoo.menagerie import Specimen

TOKENS = 64
WIDTHS = (2, 3, 5, 8)
PATTERNS = ("none", "partial", "full", "cycling", "random")
DTYPES = ("float32", "bfloat16")

CLOSED_AFTER = 23
"""Tokens after which the consumer closes a run, somewhere inside a round."""

PROMPTS = (
    (5, 17, 42, 8, 61, 3, 29),
    (11, 3, 87, 40, 22, 9, 71, 54, 16, 2, 95, 33, 8, 60, 27, 49, 13, 78, 6, 90, 31),
)
"""Shorter and longer than every window of the zoo."""

SAMPLERS: tuple[dict[str, Any], ...] = ({}, {"sampler": make_sampler(temp=1.0)})
"""How the text after each prompt is chosen: greedily, which a tiny model soon does in circles, and by drawing."""

SEED = 20

RETAINED_WIDTH = 5
RETAINED_AFTER = 32
"""Bytes of an open round are counted at this width, this many tokens after the first prompt."""

STEPPED = "verified one token at a time, which cannot be faster than plain decoding: "
"""How the statistics begin to tell why blocks are stepped through."""

Accepts = Callable[[int, int], int]
"""(round, proposals) -> proposals that shall be accepted."""


@dataclass
class Outcome:
    """What one architecture did in one dtype.

    Attributes:
        reason: why it does not run here, None if it does: the first line of what the stock loop raised.
        routes: verify width -> route, as the statistics told it.
        differences: what was not as the stock loop has it, each with its width and pattern.
        stepping: why blocks were stepped through, as the statistics told it, each reason once.
    """

    reason: str | None = None
    routes: dict[int, str] = field(default_factory=dict)
    differences: list[str] = field(default_factory=list)
    stepping: list[str] = field(default_factory=list)

    def add_notes(self, notes: Sequence[str]) -> None:
        """Note why one run stepped through, if it did."""
        reasons = [note.removeprefix(STEPPED) for note in notes if note.startswith(STEPPED)]
        self.stepping = list(dict.fromkeys([*self.stepping, *reasons]))

    def add_route(self, width: int, route: str) -> None:
        """Note the route of one run; runs that went different ways are named with "and"."""
        known = self.routes.get(width, route).split(" and ")
        self.routes[width] = " and ".join(dict.fromkeys([*known, *route.split(" and ")]))


@dataclass
class Finding:
    """What one architecture did.

    Attributes:
        module: mlx-lm module; "?" when mlx-lm has none.
        caches: kinds of cache in the prompt cache, in order of appearance, with their nesting.
        strategies: cache class -> how an open round remembers it.
        retained: bytes an open round of `RETAINED_WIDTH` tokens holds; None when it never got that far.
        outcomes: dtype name -> outcome.
    """

    name: str
    module: str = "?"
    caches: tuple[str, ...] = ()
    strategies: dict[str, str] = field(default_factory=dict)
    retained: int | None = None
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def runs(self) -> bool:
        return any(outcome.reason is None for outcome in self.outcomes.values())

    @property
    def differences(self) -> list[str]:
        return [f"{dtype}: {each}" for dtype, outcome in self.outcomes.items() for each in outcome.differences]

    @property
    def exact(self) -> bool:
        return self.runs and not self.differences

    @property
    def stepping(self) -> list[str]:
        """Why it steps through, each reason once."""
        return list(dict.fromkeys(reason for outcome in self.outcomes.values() for reason in outcome.stepping))

    @property
    def steps_through(self) -> bool:
        """Whether some width of some dtype is verified by one-token forwards."""
        return any(
            STEP_THROUGH.name in route for outcome in self.outcomes.values() for route in outcome.routes.values()
        )


@dataclass(frozen=True)
class Plan:
    """How much of an architecture is tried."""

    widths: Sequence[int] = WIDTHS
    patterns: Sequence[str] = PATTERNS
    dtypes: Sequence[str] = DTYPES
    tokens: int = TOKENS

    def trials(self) -> Iterator[tuple[int, str, int, int]]:
        """(width, pattern, prompt, tokens to take). Both prompts meet every width and every pattern."""
        for i, width in enumerate(self.widths):
            for j, pattern in enumerate(self.patterns):
                yield width, pattern, (i + j) % len(PROMPTS), self.tokens
            yield width, "full", i % len(PROMPTS), min(CLOSED_AFTER, self.tokens)


def examine(specimen: Specimen, plan: Plan) -> Finding:
    """Try one architecture. Whatever it raises becomes part of the finding."""
    started = time.perf_counter()
    finding = Finding(specimen.name)
    for dtype in plan.dtypes:
        outcome = finding.outcomes[dtype] = Outcome()
        try:
            finding.module = specimen.module
            subject = Subject(specimen, dtype, plan.tokens)
        except (Exception, SystemExit) as error:  # noqa: BLE001  a config nobody has seen may fail in any way
            outcome.reason = first_line(error)
            continue
        if not finding.caches:
            _describe(finding, subject)
        compare(outcome, subject, plan)
    finding.seconds = time.perf_counter() - started
    return finding


class Subject:
    """A model, and what the stock loop makes of the two prompts.

    Raises:
        Exception: whatever the stock loop raises.
    """

    def __init__(self, specimen: Specimen, dtype: str, tokens: int) -> None:
        self.model = specimen.build(dtype)
        self.tokens = tokens
        self._max_kv_size = specimen.max_kv_size
        self._prefill: dict[str, int] = {}
        self.vocab = self._vocabulary()
        try:
            self.runs = self._stock_runs()
        except ValueError:
            # olmo cannot read two tokens at once, but one after the other it can.
            self._prefill = {"prefill_step_size": 1}
            self.runs = self._stock_runs()

    def new_caches(self) -> list[Any]:
        return list(make_prompt_cache(self.model, max_kv_size=self._max_kv_size))

    def speculate(
        self, prompt: int, width: int, accepts: Accepts, emitted: int, verify: Verify = "exact"
    ) -> tuple[Statistics, str | None]:
        """Run once, take `emitted` tokens, and say what differs from the stock loop."""
        run = self.runs[prompt]
        statistics = Statistics()
        caches = self.new_caches()
        mx.random.seed(SEED)
        steps = generate_step(
            mx.array(run.prompt),
            self.model,
            draft_model=CallableDrafter(scripted(run, self.vocab, accepts)),
            draft_block_size=width,
            verify=verify,
            max_tokens=self.tokens,
            prompt_cache=caches,
            statistics=statistics,
            **self._prefill,
            **SAMPLERS[prompt],
        )
        with closing(steps):
            got = [pair for _, pair in zip(range(emitted), steps, strict=False)]
            if emitted == self.tokens:
                got.extend(steps)
        if statistics.drafter_failures:
            return statistics, f"the drafter failed: {statistics.notes}"
        try:
            assert_same_output(got, run, emitted)
        except AssertionError as error:
            return statistics, str(error)
        if SAMPLERS[prompt] and rng_key() != run.rng[emitted]:
            return statistics, f"random state {rng_key()}, want {run.rng[emitted]}"
        return statistics, cache_difference(caches, run.cache_after(emitted))

    def _vocabulary(self) -> int:
        logits = self.model(mx.array([[1]]), cache=self.new_caches())
        mx.eval(logits)
        return int(logits.shape[-1])

    def _stock_runs(self) -> list[OracleRun]:
        return [
            run_stock(
                self.model,
                [token % self.vocab for token in prompt],
                self.tokens,
                seed=SEED,
                max_kv_size=self._max_kv_size,
                **self._prefill,
                **sampler,
            )
            for prompt, sampler in zip(PROMPTS, SAMPLERS, strict=True)
        ]


def scripted(run: OracleRun, vocab: int, accepts: Accepts) -> Callable[[list[int], int], list[int]]:
    """A draft function of whose proposals exactly `accepts(round, count)` are what the target chooses.

    What follows the wrong one is right again: an acceptance that does not stop at the first miss shows.
    """
    rounds = 0

    def draft(ids: list[int], count: int) -> list[int]:
        nonlocal rounds
        place = len(ids) - len(run.prompt)
        proposals = [*run.ids[place : place + count], *[0] * count][:count]
        accepted = accepts(rounds, count)
        if accepted < count:
            proposals[accepted] = (proposals[accepted] + 1) % vocab
        rounds += 1
        return proposals

    return draft


def pattern_named(name: str, seed: int = 0) -> Accepts:
    """The acceptance pattern of that name; "partial" is about half, and either 0 or 1 of one."""
    rng = np.random.default_rng(seed)
    patterns: dict[str, Accepts] = {
        "none": lambda _, count: 0,
        "partial": lambda turn, count: (count + turn % 2) // 2,
        "full": lambda _, count: count,
        "cycling": lambda turn, count: turn % (count + 1),
        "random": lambda _, count: int(rng.integers(0, count + 1)),
    }
    return patterns[name]


def compare(outcome: Outcome, subject: Subject, plan: Plan) -> None:
    """Put a model through every trial of a plan and note what differs from the stock loop."""
    for width, pattern, prompt, emitted in plan.trials():
        where = f"width {width}, {pattern}, prompt of {len(PROMPTS[prompt])}, {emitted} tokens"
        try:
            accepts = pattern_named(pattern, seed=width)
            statistics, difference = subject.speculate(prompt, width, accepts, emitted)
        except Exception as error:  # noqa: BLE001  the stock loop ran, so what failed here is the finding
            outcome.differences.append(f"{where}: {type(error).__name__}: {first_line(error)}")
            continue
        outcome.add_route(width, statistics.verify_route)
        outcome.add_notes(statistics.notes)
        if difference is not None:
            outcome.differences.append(f"{where}: {difference}")


def _describe(finding: Finding, subject: Subject) -> None:
    """Which caches there are, how an open round remembers each, and what it costs to keep one open."""
    caches = subject.runs[0].cache_after(min(RETAINED_AFTER, subject.tokens))
    finding.caches = tuple(dict.fromkeys(map(kind_of, caches)))
    tree, journals = adopt(caches, list(leaves(caches)), RETAINED_WIDTH, Drive.BLOCK)
    for journal in journals:
        how = type(journal).__name__.removesuffix("Journal").lower()
        finding.strategies[type(journal.leaf).__name__] = how
    del tree
    ids = mx.array([[token % subject.vocab for token in range(1, RETAINED_WIDTH + 1)]])
    mixers.attach(subject.model)
    routes.remember(subject.model)
    with SpeculativeCacheTransaction(caches, RETAINED_WIDTH, drive=Drive.BLOCK) as tx:
        target = Target(subject.model)
        try:
            output = verify(target, ids, tx)
        except (CannotMix, TransactionError, ValueError, TypeError):
            tx.abort()
        else:
            mx.eval(output.logits)
            finding.retained = tx.nbytes
            return
    with SpeculativeCacheTransaction(caches, RETAINED_WIDTH) as tx:
        mx.eval(step_through(target, ids, tx).logits)
        finding.retained = tx.nbytes


def kind_of(cache: Any) -> str:
    """A cache's class, and of a nest what is inside."""
    if not isinstance(cache, CacheList):
        return type(cache).__name__
    return f"{type(cache).__name__}({', '.join(map(kind_of, cache.caches))})"


def why_not_here(model: nn.Module) -> str | None:
    """Why the stock forward of one token fails here; None when it does not."""
    try:
        mx.eval(model(mx.array([[1]]), cache=make_prompt_cache(model)))
    except RuntimeError as error:
        return first_line(error)
    return None


def first_line(error: BaseException) -> str:
    """What an exception says, in one line."""
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
