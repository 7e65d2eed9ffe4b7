"""What a run did: counters with units in their names, and a ledger of every fallback in plain words."""

from __future__ import annotations

import time
from typing import Any

import mlx.core as mx

from mlx_spec.records import STAGES, RoundRecord

_DRAFT_STAGES = ("shift", "propose")
_VERIFY_STAGES = ("merge", "verify", "mask", "accept")


class Statistics:
    """Counters of one request. Live: it keeps counting while the run goes on.

    Attributes:
        drafter, loop, verify_route, width_policy, acceptance_rule: what is in force.
        rounds: verify calls finished, plain steps included.
        proposed_tokens, accepted_tokens: summed over rounds. The bonus of a round is in neither.
        emitted_tokens: tokens handed out.
        accepted_by_depth: accepted_by_depth[i] is the number of rounds whose proposal i+1 was accepted.
        proposed_by_depth: the number of rounds that had a proposal i+1.
        stage_ms: host milliseconds per stage, summed.
        prompt_tokens, prompt_ms: the prompt's positions and the time from their first forward to the first token.
        time_to_first_token_ms: from the call that made the request; loading of a named drafter and finding of verify
            routes are in it.
        peak_memory_bytes: most that mlx had allocated in this process when the latest round was over.
        certify_ms: time spent finding out which verify routes are equal, before and after the first token.
        decode_ms: time from the first token to the latest one.
        decode_certify_ms: part of it spent finding out which verify routes are equal; the next run knows.
        notes: one sentence per fallback or caveat, each once.
        last_round: the latest record, or None.
    """

    def __init__(self) -> None:
        self.drafter = "none"
        self.loop = "plain"
        self.verify_route = "block"
        self.width_policy = "fixed 1"
        self.acceptance_rule = "target's own choice (token-exact)"
        self.rounds = 0
        self.proposed_tokens = 0
        self.accepted_tokens = 0
        self.emitted_tokens = 0
        self.accepted_by_depth: list[int] = []
        self.proposed_by_depth: list[int] = []
        self.stage_ms = dict.fromkeys(STAGES, 0.0)
        self.prompt_tokens = 0
        self.prompt_ms = 0.0
        self.time_to_first_token_ms = 0.0
        self.peak_memory_bytes = 0
        self.certify_ms = 0.0
        self.decode_ms = 0.0
        self.decode_certify_ms = 0.0
        self.notes: list[str] = []
        self.last_round: RoundRecord | None = None
        self._opened = self._started = time.perf_counter()
        self._first_token: float | None = None
        self._routes: dict[str, None] = {}
        self._drafter_failures = 0

    def note(self, sentence: str) -> None:
        """Write a fallback or caveat into the ledger, once."""
        sentence = " ".join(sentence.split())
        if sentence not in self.notes:
            self.notes.append(sentence)

    def drafter_failed(self, error: Exception, consequence: str) -> None:
        """Count a drafter's failure; the first one is told in full."""
        self._drafter_failures += 1
        if self._drafter_failures == 1:
            self.note(f"the drafter failed ({type(error).__name__}: {error}); {consequence}.")

    @property
    def drafter_failures(self) -> int:
        """Rounds in which the drafter raised or returned what it must not."""
        return self._drafter_failures

    def open(self) -> None:
        """The request was made: the clock of the time to the first token begins."""
        self._opened = time.perf_counter()

    def start(self, prompt_tokens: int) -> None:
        """The clock of the run begins."""
        self._started = time.perf_counter()
        self.prompt_tokens = prompt_tokens

    def count_round(self, record: RoundRecord) -> None:
        """Add one finished round, unless it is the latest already. An interrupt finds all of it counted or nothing."""
        if record is self.last_round:
            return
        proposed, accepted = self.proposed_by_depth, self.accepted_by_depth
        if record.proposed:
            proposed = _one_more(proposed, record.proposed, record.proposed)
            accepted = _one_more(accepted, record.accepted, record.proposed)
        stage_ms, peak_memory_bytes = dict(self.stage_ms), mx.get_peak_memory()
        for stage, spent_ms in record.stage_ms.items():
            stage_ms[stage] += spent_ms
        if record.width > 1 and record.route not in self._routes:
            self._routes[record.route] = None
            self.verify_route = " and ".join(self._routes)
        # From here on nothing is called, so that nothing can come between.
        self.rounds += 1
        self.proposed_tokens += record.proposed
        self.accepted_tokens += record.accepted
        self.proposed_by_depth, self.accepted_by_depth = proposed, accepted
        self.stage_ms = stage_ms
        self.peak_memory_bytes = peak_memory_bytes
        self.last_round = record

    def time_token(self) -> None:
        """A token is about to be handed out. Its owner adds it to `emitted_tokens` as it does so."""
        now = time.perf_counter()
        if self._first_token is None:
            self._first_token = now
            self.prompt_ms = (now - self._started) * 1e3
            self.time_to_first_token_ms = (now - self._opened) * 1e3
        self.decode_ms = (now - self._first_token) * 1e3

    def time_certifying(self, spent_ms: float) -> None:
        """So much time went into finding out which verify routes are equal."""
        self.certify_ms += spent_ms
        if self._first_token is not None:
            self.decode_certify_ms += spent_ms

    @property
    def draft_ms(self) -> float:
        """Host time spent building proposals. Their device time is waited for in `verify_ms`."""
        return sum(self.stage_ms[stage] for stage in _DRAFT_STAGES)

    @property
    def verify_ms(self) -> float:
        """Time spent building verify calls and waiting for the round's one host read."""
        return sum(self.stage_ms[stage] for stage in _VERIFY_STAGES)

    @property
    def commit_ms(self) -> float:
        """Host time spent committing."""
        return self.stage_ms["pack"]

    @property
    def tokens_per_round(self) -> float:
        """Tokens handed out per verify call; 1.0 is plain decoding."""
        return self.emitted_tokens / self.rounds if self.rounds else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Decode speed after the first token; 0.0 before the second."""
        return (self.emitted_tokens - 1) / self.decode_ms * 1e3 if self.decode_ms > 0 else 0.0

    @property
    def prompt_tokens_per_second(self) -> float:
        """Prompt speed, the first token's step included; 0.0 before it."""
        return self.prompt_tokens / self.prompt_ms * 1e3 if self.prompt_ms > 0 else 0.0

    def beside_plain(self, plain_seconds: float) -> str:
        """One line: this run's speed and plain decoding's, and what it is once verify routes are known.

        Args:
            plain_seconds: what plain decoding took for the same tokens, from the first to the last.
        """
        steps = self.emitted_tokens - 1
        plain, ours = steps / plain_seconds, self.tokens_per_second
        line = f"speed: {ours:.2f} tokens/s against {plain:.2f} plainly, {ours / plain:.2f} times as fast"
        if self.decode_certify_ms < 1:
            return line
        known = steps / (self.decode_ms - self.decode_certify_ms) * 1e3
        return (
            f"{line}; {known:.2f} tokens/s, {known / plain:.2f} times as fast, without the "
            f"{self.decode_certify_ms:.0f} ms in which verify routes were found, which the next run knows"
        )

    def as_dict(self) -> dict[str, Any]:
        """Everything above as JSON-ready values."""
        names = (
            "drafter loop verify_route width_policy acceptance_rule rounds proposed_tokens accepted_tokens "
            "emitted_tokens tokens_per_round accepted_by_depth proposed_by_depth drafter_failures draft_ms verify_ms "
            "commit_ms stage_ms prompt_tokens prompt_ms prompt_tokens_per_second time_to_first_token_ms certify_ms "
            "decode_ms decode_certify_ms tokens_per_second peak_memory_bytes notes"
        )
        return {name: getattr(self, name) for name in names.split()}

    def __repr__(self) -> str:
        shown = (
            "drafter loop verify_route width_policy rounds proposed_tokens accepted_tokens emitted_tokens "
            "tokens_per_second notes"
        )
        return f"Statistics({', '.join(f'{name}={_rounded(getattr(self, name))!r}' for name in shown.split())})"

    def __str__(self) -> str:
        """The statistics line."""
        line = (
            f"drafter {self.drafter} | loop {self.loop} | verify {self.verify_route} | width {self.width_policy} | "
            f"rounds {self.rounds} | proposed {self.proposed_tokens} | accepted {self.accepted_tokens} | "
            f"{self.tokens_per_round:.2f} tokens/round | draft {self.draft_ms:.0f} ms | "
            f"verify {self.verify_ms:.0f} ms | commit {self.commit_ms:.0f} ms | "
            f"prompt {self.prompt_tokens} tokens at {self.prompt_tokens_per_second:.1f} tokens/s | "
            f"first token after {self.time_to_first_token_ms:.0f} ms | "
            f"{self.tokens_per_second:.2f} tokens/s | peak memory {self.peak_memory_bytes / 1e9:.2f} GB"
        )
        tried = [f"certified in {self.certify_ms:.0f} ms"] if self.certify_ms >= 1 else []
        return " | ".join([line, *tried, *self.notes])


def _one_more(counts: list[int], reached: int, depths: int) -> list[int]:
    """Counts per depth after a round that reached so many, of at most as many depths as were tried."""
    counts = counts + [0] * (depths - len(counts))
    for depth in range(reached):
        counts[depth] += 1
    return counts


def _rounded(value: Any) -> Any:
    return round(value, 2) if isinstance(value, float) else value
