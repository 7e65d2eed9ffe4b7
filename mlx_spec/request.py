"""All state of one request: its ids, budget, stops, caches and counters. Nothing of it sits on a model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from mlx_spec.cache.adopt import KVQuantization
from mlx_spec.sampling import Sampling
from mlx_spec.stats import Statistics

Progress = Callable[[int, int], None]
"""(prompt tokens processed, prompt tokens in all)."""


@dataclass(frozen=True)
class Prompt:
    """What a request reads before its first token.

    Attributes:
        ids: [n] token ids, in the dtype the caller gave; [0] where there are embeddings alone.
        host_ids: the same on the host.
        embeddings: [n, H] what the model reads in place of the embedded ids; None where it embeds them itself.
    """

    ids: mx.array
    host_ids: list[int]
    embeddings: mx.array | None = None

    @property
    def length(self) -> int:
        """Positions."""
        return self.ids.size if self.embeddings is None else self.embeddings.shape[0]

    @property
    def has_ids(self) -> bool:
        """Whether anybody but the model can know what stands there."""
        return self.ids.size > 0

    def part(self, start: int, end: int) -> tuple[mx.array, mx.array | None]:
        """Ids [n] or [0], and embeddings [n, H] if there are any, of the positions from start to end."""
        return self.ids[start:end], None if self.embeddings is None else self.embeddings[start:end]

    def shown_ids(self, start: int, end: int) -> list[int]:
        """Ids on the host, for a drafter; 0 where nothing is known, so that there is one per position."""
        return self.host_ids[start:end] if self.has_ids else [0] * (end - start)


def _no_progress(processed: int, total: int) -> None:
    del processed, total


def _never(token: int) -> bool:
    del token
    return False


@dataclass(kw_only=True)
class Request:
    """What one run works on and where it stands.

    Attributes:
        prompt: at least one position.
        caches: the target's caches, changed in place; the caller's own list when one was given.
        keeps_caches: the caller gave the caches and may continue from them.
        sampling: how logits become tokens.
        budget: tokens that may still be handed out; None for no limit.
        stops: whether a token ends the text (a stop string completed). Called once per token but EOS, in order.
        eos_token_ids: ids that end the run; the id itself is handed out.
        quantization: when caches are converted.
        prefill_step_size: prompt tokens per forward.
        progress: told after every prompt chunk.
        history: [n] ids the processors have been shown; None when there are no processors.
        position: prompt tokens read and tokens handed out.
        finish_reason: "stop", "length" or None while running.
        vocab_size: width of the logits; 0 before the first forward.
    """

    prompt: Prompt
    caches: list[Any]
    keeps_caches: bool
    sampling: Sampling
    statistics: Statistics
    quantization: KVQuantization
    budget: int | None = None
    stops: Callable[[int], bool] = _never
    eos_token_ids: frozenset[int] = frozenset()
    prefill_step_size: int = 2048
    progress: Progress = _no_progress
    history: mx.array | None = field(default=None, init=False)
    position: int = field(default=0, init=False)
    finish_reason: str | None = field(default=None, init=False)
    vocab_size: int = field(default=0, init=False)

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
