"""All state of one request: its ids, budget, stops, caches, drafter, open round and counters. Nothing of it sits on a
model or a drafter."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import mlx.core as mx

from mlx_spec.accept.exact import Exact
from mlx_spec.accept.rule import AcceptanceRule
from mlx_spec.cache.adopt import KVQuantization
from mlx_spec.engine.drafting import Drafting, NoDrafting
from mlx_spec.engine.open_round import OpenRound
from mlx_spec.engine.prompt import Prompt
from mlx_spec.sampling import Sampling
from mlx_spec.schedule.fixed import FixedWidth
from mlx_spec.schedule.policy import Limits, WidthPolicy
from mlx_spec.stats import Statistics
from mlx_spec.verify.routes import Route

Progress = Callable[[int, int], None]
"""(prompt tokens processed, prompt tokens in all)."""


class RoundResult(NamedTuple):
    """What a round came to, one entry for each row that was in it.

    Attributes:
        num_accepted: leading proposals that stand.
        next_tokens: the token after them.
        next_draft_tokens: [B, n] int32, what is proposed to follow it, lazy; None where nothing is.
    """

    num_accepted: list[int]
    next_tokens: list[int]
    next_draft_tokens: mx.array | None


OnRound = Callable[[RoundResult], None]


class Routes(Protocol):
    """Tells how a block of some width may be verified on these caches."""

    def begin(self) -> None:
        """The run starts: what was answered before holds only if the model has not changed since."""

    def route(self, width: int, caches: list[Any]) -> Route:
        """The cheapest one that is known to be equal to one-token decode."""

    def demote(self, width: int, caches: list[Any], error: Exception) -> None:
        """The route for this width failed with this error: answer another one from here on."""


def _no_progress(processed: int, total: int) -> None:
    del processed, total


def _never(token: int) -> bool:
    del token
    return False


@dataclass(kw_only=True)
class Row:
    """What one request works on and where it stands.

    Attributes:
        prompt: at least one position.
        caches: the target's caches, changed in place; the caller's own list when one was given.
        keeps_caches: the caller gave the caches and may continue from them.
        sampling: how logits become tokens.
        rule: which proposals stand.
        policy: how wide its rounds are.
        routes: how its blocks are verified.
        drafting: who proposes.
        budget: tokens that may still be handed out; None for no limit.
        stops: whether a token ends the text (a stop string completed). Called once per token but EOS, in order.
        eos_token_ids: ids that end the run; the id itself is handed out.
        quantization: when caches are converted.
        prefill_step_size: prompt tokens per forward.
        progress: told after every prompt chunk.
        on_round: told after every round what it came to; None where nobody asks.
        history: [n] ids the processors have been shown; None when there are no processors.
        position: prompt tokens read and tokens handed out.
        finish_reason: "stop", "length" or None while running.
        vocab_size: width of the logits; 0 before the first forward.
        open: the round that would have to be settled if the run ended now.
    """

    prompt: Prompt
    caches: list[Any]
    keeps_caches: bool
    sampling: Sampling
    statistics: Statistics
    quantization: KVQuantization
    routes: Routes
    rule: AcceptanceRule = field(default_factory=Exact)
    policy: WidthPolicy = field(default_factory=lambda: FixedWidth(1, "plain decoding"))
    drafting: Drafting = field(default_factory=NoDrafting)
    budget: int | None = None
    stops: Callable[[int], bool] = _never
    eos_token_ids: frozenset[int] = frozenset()
    prefill_step_size: int = 2048
    progress: Progress = _no_progress
    on_round: OnRound | None = None
    history: mx.array | None = field(default=None, init=False)
    position: int = field(default=0, init=False)
    finish_reason: str | None = field(default=None, init=False)
    vocab_size: int = field(default=0, init=False)
    open: OpenRound | None = field(default=None, init=False)

    def show(self, ids: mx.array) -> None:
        """Add ids to what the processors will be shown.

        Args:
            ids: [n] tokens that stay.
        """
        if self.sampling.processors:
            self.history = ids if self.history is None else mx.concatenate([self.history, ids])

    def receive(self, token: int) -> bool:
        """Take one token off the budget. Returns whether the run ends with it."""
        stopped = token in self.eos_token_ids or self.stops(token)
        if self.budget is not None:
            self.budget -= 1
        if stopped:
            self.finish_reason = "stop"
        elif self.budget == 0:
            self.finish_reason = "length"
        return self.finish_reason is not None

    def next_width(self, ahead: int = 0) -> int:
        """Width of the next round, asked of the policy.

        Args:
            ahead: tokens that are under way and not yet taken off the budget.
        """
        if not self.drafting.proposes:
            return 1
        budget = None if self.budget is None else self.budget - ahead
        return self.policy.next(Limits(budget, self.quantization.room(self.caches)))

    def convert_caches(self) -> bool:
        """Quantize every cache that is due, where the one-token loop does. Returns whether any was."""
        return self.quantization.convert(self.caches)

    @property
    def needs_last_append(self) -> bool:
        """Whether anyone can tell if the last token was appended and the sampler called once more.

        The one-token loop always does both. A caller can tell by the cache it gave, by a
        random state that moved, or by what a processor or sampler remembers.
        """
        return self.keeps_caches or self.sampling.draws or not self.sampling.pure
