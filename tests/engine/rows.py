"""Rows put together by hand, and a driver of the engine's plain calls for several of them at once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.generate import generation_stream
from mlx_lm.sample_utils import greedy_sampler

from mlx_spec.accept.exact import Exact
from mlx_spec.accept.rule import AcceptanceRule
from mlx_spec.accept.walks import Token
from mlx_spec.cache.adopt import KVQuantization
from mlx_spec.drafters.base import Drafter
from mlx_spec.engine.drafting import open_drafting
from mlx_spec.engine.open_round import OpenRound
from mlx_spec.engine.prompt import Prompt
from mlx_spec.engine.round import Engine
from mlx_spec.engine.row import Row
from mlx_spec.engine.run import run
from mlx_spec.model.target import Target
from mlx_spec.records import RoundRecord
from mlx_spec.sampling import OwnDraws, Sampling
from mlx_spec.schedule.policy import Limits, WidthPolicy
from mlx_spec.stats import Statistics
from mlx_spec.verify.certified_routes import CertifiedRoutes
from tests.tiny import MIXES

EXACT = Exact()


class Widths(WidthPolicy):
    """Goes through a list of widths, over and over, within the limits.

    Attributes:
        asked: the widths it answered.
        told: the rounds it was told of.
    """

    name = "widths"

    def __init__(self, widths: Iterable[int]) -> None:
        self._widths = list(widths)
        self.asked: list[int] = []
        self.told: list[RoundRecord] = []

    def next(self, limits: Limits) -> int:
        self.asked.append(limits.cut(self._widths[len(self.asked) % len(self._widths)]))
        return self.asked[-1]

    def observe(self, record: RoundRecord) -> None:
        self.told.append(record)

    def __str__(self) -> str:
        return f"widths {self._widths}"


def sampling_of(choice: dict[str, Any]) -> Sampling:
    """`Sampling` for keyword arguments of mlx-lm's `generate_step`, all of them pure."""
    sampler, processors = choice.get("sampler", greedy_sampler), tuple(choice.get("logits_processors", ()))
    draws = "sampler" in choice
    return Sampling(sampler, processors, draws=draws, greedy=not draws and not processors)


def make_row(
    mix: str,
    prompt: Sequence[int],
    drafter: Drafter | None,
    policy: WidthPolicy,
    budget: int,
    choice: dict[str, Any] | None = None,
    rule: AcceptanceRule = EXACT,
) -> Row:
    """A row on an empty cache of its own."""
    target, statistics = Target(MIXES[mix].model()), Statistics()
    read = Prompt(mx.array(prompt), list(prompt))
    draws = OwnDraws(read.ids)
    drafting = open_drafting(drafter, target, read, 0, statistics, draws)
    draws.settle()
    return Row(
        prompt=read,
        caches=MIXES[mix].new_cache(),
        keeps_caches=True,
        sampling=sampling_of(choice or {}),
        statistics=statistics,
        quantization=KVQuantization(None, 64, 5000),
        routes=CertifiedRoutes(target, "exact", statistics),
        rule=rule,
        policy=policy,
        drafting=drafting,
        budget=budget,
    )


def engine_of(mix: str) -> Engine:
    return Engine(Target(MIXES[mix].model()), generation_stream)


def pull(mix: str, row: Row, engine: Engine | None = None) -> list[tuple[int, mx.array]]:
    """All of one row's tokens."""
    return [
        (emission.token, emission.logprobs)
        for emission in run(engine or engine_of(mix), row, lambda emission: emission)
    ]


class Together:
    """Drives several rows through common rounds, as a batch or a server would.

    Attributes:
        handed_out: per row, what `pull` would give.
    """

    def __init__(self, engine: Engine, rows: Sequence[Row]) -> None:
        self._engine = engine
        self._rows = rows
        self._current: dict[int, OpenRound] = {}
        self.handed_out: list[list[tuple[int, mx.array]]] = [[] for _ in rows]

    def begin(self) -> None:
        """Read all prompts."""
        for number, row in enumerate(self._rows):
            row.drafting.look_at(row.caches)
            self._current[number] = opened = self._engine.read_prompt(row)
            self._count_out(number, opened)

    @property
    def going(self) -> bool:
        """Whether any row has not ended."""
        return bool(self._current)

    def round(self) -> None:
        """One round of every row that has not ended."""
        starts, bonuses = {}, {}
        for number, opened in list(self._current.items()):
            row = self._rows[number]
            token, ending = self._take_accepted(number, opened)
            if token is None:
                del self._current[number]
                self._engine.settle(row)
                continue
            bonuses[number] = token
            start = self._engine.advance(row, opened, token, ending)
            self._engine.count(row, opened)
            if ending:
                del self._current[number]
            assert start is not None
            starts[number] = start
        for number, opened in zip(starts, self._engine.dispatch(list(starts.values())), strict=True):
            self._engine.keep(self._rows[number], opened, bonuses[number].id)
            self._count_out(number, opened)
            self.handed_out[number].append((bonuses[number].id, bonuses[number].logprobs))
            if number in self._current:
                self._current[number] = opened
            else:
                self._engine.settle(self._rows[number])

    def _take_accepted(self, number: int, opened: OpenRound) -> tuple[Token | None, bool]:
        """Hand out the proposals that stand. Returns the token after them, or None where the run ends before it."""
        row = self._rows[number]
        token, ending = self._engine.take(row, opened)
        while token.accepted:
            opened.ids.append(token.id)
            opened.tx.certain = opened.out + 1
            row.position += 1
            self.handed_out[number].append((token.id, token.logprobs))
            if ending:
                return None, True
            token, ending = self._engine.take(row, opened)
        return token, ending

    def _count_out(self, number: int, opened: OpenRound) -> None:
        row = self._rows[number]
        opened.tx.certain = 1
        row.position += 1
        row.open = None if opened.kept else opened
