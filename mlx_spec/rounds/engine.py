"""The one round: draft, verify, accept, hand out, commit. Every kind of drafter and plain decoding run through it."""

from __future__ import annotations

import threading
import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol, cast

import mlx.core as mx

from mlx_spec.cache.adopt import cache_arrays, state_arrays
from mlx_spec.cache.base import Drive
from mlx_spec.cache.transaction import SpeculativeCacheTransaction
from mlx_spec.errors import CannotMix
from mlx_spec.model.target import Target, TargetOutput
from mlx_spec.records import RoundRecord
from mlx_spec.request import Request
from mlx_spec.rounds.base import RoundLoop
from mlx_spec.rounds.plain import PlainLoop
from mlx_spec.rounds.walks import Block, Token, Walk, open_walk
from mlx_spec.sampling import Sampling, random_key, rewind_random_state
from mlx_spec.schedule import FixedWidth
from mlx_spec.verify.block import verify
from mlx_spec.verify.routes import Route

_CLEAR_EVERY_TOKENS = 256
"""How often mlx's buffer cache is cleared, as the one-token loop does."""


class Emission(NamedTuple):
    """One token handed out: its id, [V] log-probabilities, and whether the drafter had proposed it."""

    token: int
    logprobs: mx.array
    from_draft: bool


class Routes(Protocol):
    """Tells how a block of some width may be verified on these caches."""

    def route(self, width: int, caches: list[Any]) -> Route:
        """The cheapest one that is known to be equal to one-token decode."""

    def demote(self, width: int, caches: list[Any], error: Exception) -> None:
        """The route for this width failed with this error: answer another one from here on."""


class First(NamedTuple):
    """The last position of a prompt of embeddings: [1] its id or [0] none, [1, H] what is read, how it is chosen."""

    tokens: mx.array
    embeddings: mx.array | None
    sampling: Sampling


def _row(embeddings: mx.array | None) -> mx.array | None:
    """[W, H] -> [1, W, H]."""
    return None if embeddings is None else embeddings[None]


@dataclass(kw_only=True)
class OpenRound:
    """A round that has been dispatched and not yet closed.

    Attributes:
        out: the verify inputs that are part of the text for good: the bonus once it was handed out
            (or belongs to the prompt), then every accepted proposal handed out. They stay in the cache
            however the run ends.
        key: [2] the random state before the round; None when the sampler draws nothing.
        reads_prompt: its bonus is the prompt's last token.
        stage_ms: host milliseconds per stage.
        thread: the thread that dispatched it, whose random state its keys belong to.
    """

    tx: SpeculativeCacheTransaction
    block: Block
    output: TargetOutput
    walk: Walk
    route: Route
    stage_ms: dict[str, float]
    key: mx.array | None
    out: list[int] = field(default_factory=list)
    reads_prompt: bool = False
    thread: int = field(default_factory=threading.get_ident)

    @property
    def is_foreign(self) -> bool:
        """Whether this thread is another one. Its random state is then nobody's to move."""
        return self.thread != threading.get_ident()


class _Clock:
    """Splits the time of one call into stages."""

    def __init__(self, stage_ms: dict[str, float]) -> None:
        self._stage_ms = stage_ms
        self._last = time.perf_counter()

    def lap(self, stage: str) -> None:
        now = time.perf_counter()
        self._stage_ms[stage] = self._stage_ms.get(stage, 0.0) + (now - self._last) * 1e3
        self._last = now


class Engine:
    """Runs one request to its end.

    Invariant whenever a token is handed out: the open round's bonus is that token or an earlier one,
    and every token handed out since is among the round's verify inputs. So at any moment the caches can be
    brought to hold exactly the prompt and the tokens handed out, by committing a prefix of the open round.

    The next round is dispatched before the last token of a round is handed out, so that the device
    works while the consumer does.
    """

    def __init__(
        self,
        target: Target,
        request: Request,
        loop: RoundLoop,
        schedule: FixedWidth,
        routes: Routes,
        stream: Any,
    ) -> None:
        self._target = target
        self._request = request
        self._loop = loop
        self._schedule = schedule
        self._routes = routes
        self._stream = stream
        self._open: OpenRound | None = None
        loop.look_at(request.caches)

    def run(self) -> Generator[Emission, None, None]:
        """Hand out the text's tokens.

        However it ends (budget, stop, close, exception) the caches then hold the prompt tokens whose forward
        completed and the tokens handed out, the random state stands one draw past the last of these,
        and no transaction is open.
        """
        request = self._request
        try:
            with mx.stream(self._stream):
                last = self._prefill()
                opened = self._dispatch_prompt()
            self._count_out(opened, last)
            if request.budget == 0:
                request.progress(request.prompt.length, request.prompt.length)
                request.finish_reason = "length"
            else:
                yield from self._rounds(opened)
        finally:
            self._settle()

    def _rounds(self, current: OpenRound) -> Iterator[Emission]:
        ending = False
        while not ending:
            if self._loop.pipelined and current.block.width == 1:
                successor = self._pass_on(current)
                token, ending = self._take(current)
            else:
                token, ending = self._take(current)
                while token.accepted:
                    self._count_out(current, token.id)
                    yield self._hand_out(token)
                    if ending:
                        return
                    token, ending = self._take(current)
                successor = self._advance(current, token, ending)
            self._count(current)
            if successor is None:
                self._request.position += 1
            else:
                self._count_out(successor, token.id)
                current = successor
            yield self._hand_out(token)

    # Prompt

    def _prefill(self) -> int:
        """Read all of the prompt but its last token, whose id is returned.

        Chunk by chunk; each chunk's hidden states are shown to the drafter and dropped.
        """
        request = self._request
        total = request.prompt.length
        request.statistics.start(total)
        request.progress(0, total)
        while request.position < total - 1:
            start = request.position
            count = min(request.prefill_step_size, total - 1 - start)
            chunk, embeddings = request.prompt.part(start, start + count)
            with SpeculativeCacheTransaction(request.caches, count, drive=Drive.WHOLE) as tx:
                output = self._target.forward(chunk[None], tx.caches, self._loop.taps, _row(embeddings))
                tx.mark(count)
                tx.commit(count)
            request.convert_caches()
            self._loop.read_prompt([request.prompt.shown_ids(start, start + count)], output.hidden)
            mx.eval(cache_arrays(request.caches), *self._loop.arrays())
            request.show(chunk)
            request.position += count
            request.progress(request.position, total)
            mx.clear_cache()
        return request.prompt.shown_ids(total - 1, total)[0]

    def _dispatch_prompt(self) -> OpenRound:
        """Dispatch the prompt's last position, which gives the first token."""
        prompt = self._request.prompt
        tokens, embeddings = prompt.part(prompt.length - 1, prompt.length)
        first = None if embeddings is None else First(tokens, embeddings, self._request.sampling)
        if first is not None and not prompt.has_ids:
            # As in the one-token loop, processors are called from the first token on whose id is known.
            first = First(tokens, embeddings, replace(first.sampling, processors=()))
            tokens = mx.zeros((1,), mx.uint32)
        opened = self._dispatch(tokens, None, 1, first)
        opened.reads_prompt = True
        return opened

    # One round

    def _dispatch(self, bonus: mx.array, bonus_id: int | None, width: int, first: First | None = None) -> OpenRound:
        """Draft, verify and choose, all lazily, and start the device on it.

        Args:
            bonus: [1] the newest token, not yet handed out.
            bonus_id: the same on the host; None when it is not known there, which leaves no room for proposals.
            width: tokens to verify at most.
            first: the prompt's last position, where it has an embedding of its own.
        """
        request = self._request
        sampling = request.sampling if first is None else first.sampling
        stage_ms: dict[str, float] = {}
        clock = _Clock(stage_ms)
        key = random_key() if request.sampling.draws else None
        proposals = self._loop.propose(bonus_id, width - 1) if bonus_id is not None and width > 1 else None
        clock.lap("propose")
        inputs = self._merge(bonus, proposals)
        clock.lap("merge")
        tx, output, route = self._verify(inputs, first)
        clock.lap("verify")
        try:
            block = Block(output.logits, inputs, proposals, request.history, request.position + 1)
            walk = open_walk(sampling, block)
            clock.lap("mask")
            hidden = [] if output.hidden is None else [output.hidden]
            # The states too, though these logits may not need them: what stays lazy belongs to this thread.
            mx.async_eval(*walk.pending(), *hidden, *state_arrays(request.caches), *self._loop.arrays())
            clock.lap("verify")
        except BaseException:
            self._undo(tx, key)
            raise
        request.vocab_size = output.logits.shape[-1]
        self._open = OpenRound(tx=tx, block=block, output=output, walk=walk, route=route, stage_ms=stage_ms, key=key)
        return self._open

    def _verify(
        self, inputs: mx.array, first: First | None = None
    ) -> tuple[SpeculativeCacheTransaction, TargetOutput, Route]:
        """Run the target on a block, by the route that is in force. The transaction is left open."""
        request, width = self._request, inputs.shape[1]
        route = self._routes.route(width, request.caches)
        tx = SpeculativeCacheTransaction(request.caches, width, drive=route.drive)
        try:
            if first is None:
                return tx, verify(self._target, inputs, tx, route, self._loop.taps), route
            output = self._target.forward(first.tokens[None], tx.caches, self._loop.taps, _row(first.embeddings))
            tx.mark(1)
            return tx, output, route
        except CannotMix as error:
            tx.abort()
            self._routes.demote(width, request.caches, error)
            return self._verify(inputs)
        except BaseException:
            tx.abort()
            raise

    @staticmethod
    def _undo(tx: SpeculativeCacheTransaction, key: mx.array | None) -> None:
        """Nothing of a round is out: put back the caches and the random state."""
        tx.abort()
        if key is not None:
            rewind_random_state(cast(list[int], key.tolist()))

    def _merge(self, bonus: mx.array, proposals: mx.array | None) -> mx.array:
        """[1, W] the verify inputs. Ids outside the vocabulary are clamped: the model must be able to embed them."""
        if proposals is None:
            return bonus[None]
        clamped = mx.clip(proposals, 0, self._request.vocab_size - 1)
        return mx.concatenate([bonus[None].astype(mx.uint32), clamped.astype(mx.uint32)], axis=1)

    def _take(self, current: OpenRound) -> tuple[Token, bool]:
        """The round's next token, and whether the run ends with it."""
        clock = _Clock(current.stage_ms)
        with mx.stream(self._stream):
            token = current.walk.take(len(current.out) - 1)
        clock.lap("accept")
        request = self._request
        if current.reads_prompt:
            request.progress(request.prompt.length, request.prompt.length)
        return token, request.receive(token.id)

    def _pass_on(self, current: OpenRound) -> OpenRound | None:
        """Dispatch the next plain step on this one's token before that token is read."""
        request = self._request
        with mx.stream(self._stream):
            self._close(current)
            if request.budget == 1 and not request.needs_last_append:
                return None
            return self._dispatch(current.walk.first(), None, width=1)

    def _advance(self, current: OpenRound, token: Token, ending: bool) -> OpenRound | None:
        """Commit a fully walked round and dispatch the next one on its bonus."""
        request = self._request
        clock = _Clock(current.stage_ms)
        with mx.stream(self._stream):
            self._close(current)
            clock.lap("pack")
            if ending:
                return self._dispatch(token.array, None, width=1) if request.needs_last_append else None
            self._show_drafter(current)
            clock.lap("shift")
            width = self._schedule.next(request.budget, request.quantization.room(request.caches))
            return self._dispatch(token.array, token.id, width)

    def _show_drafter(self, current: OpenRound) -> None:
        """What was kept of a round, with its hidden states."""
        hidden = current.output.hidden
        kept = None if hidden is None else hidden[:, : len(current.out)]
        if current.reads_prompt:
            self._loop.read_prompt([current.out], kept)
        elif not self._loop.catch_up([current.out], kept):
            self._loop = PlainLoop()

    def _close(self, current: OpenRound) -> None:
        """Keep the part of the open round that is out. No round is open afterwards."""
        self._open = None
        retained = len(current.out)
        try:
            current.tx.commit(retained)
        except BaseException:
            current.tx.abort()
            raise
        if not current.is_foreign:
            current.walk.rewind(retained)
        if self._request.prompt.has_ids or not current.reads_prompt:
            self._request.show(current.block.inputs[0, :retained])
        self._request.convert_caches()

    # Handing out

    def _count_out(self, current: OpenRound, token_id: int) -> None:
        """From here on this verify input belongs to the text."""
        current.out.append(token_id)
        self._request.position += 1

    def _hand_out(self, token: Token) -> Emission:
        statistics = self._request.statistics
        statistics.count_token()
        if statistics.emitted_tokens % _CLEAR_EVERY_TOKENS == 0:
            mx.clear_cache()
        return Emission(token.id, token.logprobs, token.accepted)

    def _count(self, current: OpenRound) -> None:
        width = current.block.width
        record = RoundRecord(width, width - 1, len(current.out) - 1, current.route.name, current.stage_ms)
        self._request.statistics.count_round(record)

    def _settle(self) -> None:
        """Bring the caches to exactly the prompt and the tokens handed out."""
        current = self._open
        if current is not None:
            with mx.stream(self._stream):
                if current.out:
                    self._close(current)
                else:
                    self._open = None
                    self._undo(current.tx, None if current.is_foreign else current.key)
            if len(current.out) > 1:
                self._count(current)
        if self._request.keeps_caches:
            with mx.stream(self._stream):
                mx.async_eval(cache_arrays(self._request.caches))
