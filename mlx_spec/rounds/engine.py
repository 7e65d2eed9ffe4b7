"""The one round: draft, verify, accept, hand out, commit. Every kind of drafter and plain decoding run through it."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from dataclasses import replace
from typing import Any, NamedTuple, Protocol, TypeVar, cast

import mlx.core as mx

from mlx_spec.cache.adopt import cache_arrays, state_arrays
from mlx_spec.cache.base import Drive
from mlx_spec.cache.transaction import SpeculativeCacheTransaction
from mlx_spec.errors import CacheChanged, CannotMix
from mlx_spec.model.target import DRAWS, Target, TargetOutput
from mlx_spec.records import RoundRecord
from mlx_spec.request import Request
from mlx_spec.rounds.base import RoundLoop
from mlx_spec.rounds.open_round import First, OpenRound
from mlx_spec.rounds.plain import PlainLoop
from mlx_spec.rounds.walks import Block, Token, open_walk
from mlx_spec.sampling import random_key, rewind_random_state
from mlx_spec.schedule import FixedWidth
from mlx_spec.verify.block import verify
from mlx_spec.verify.routes import Route

_CLEAR_EVERY_TOKENS = 256
"""How often mlx's buffer cache is cleared, as the one-token loop does."""


Shaped = TypeVar("Shaped")


class Emission(NamedTuple):
    """One token handed out: its id, [V] log-probabilities, and whether the drafter had proposed it."""

    token: int
    logprobs: mx.array
    from_draft: bool


class Routes(Protocol):
    """Tells how a block of some width may be verified on these caches."""

    def begin(self) -> None:
        """The run starts: what was answered before holds only if the model has not changed since."""

    def route(self, width: int, caches: list[Any]) -> Route:
        """The cheapest one that is known to be equal to one-token decode."""

    def demote(self, width: int, caches: list[Any], error: Exception) -> None:
        """The route for this width failed with this error: answer another one from here on."""


def _row(embeddings: mx.array | None) -> mx.array | None:
    """[W, H] -> [1, W, H]."""
    return None if embeddings is None else embeddings[None]


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
    A round of one token is committed before that token is handed out: nothing is open on the caches then.

    The next round is dispatched before the last token of a round is handed out, so that the device
    works while the consumer does.

    An interrupt may come wherever something is called. So a token becomes part of the text by plain assignments right
    before its `yield`; a round is held in `_open` before its transaction opens; and `_settle` finishes or undoes what
    it finds there, from wherever it was left.
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

    def run(self, shape: Callable[[Emission], Shaped]) -> Generator[Shaped, None, None]:
        """Hand out the text's tokens.

        However it ends (budget, stop, close, exception, interrupt) the caches then hold the prompt tokens whose forward
        completed and the tokens handed out, the random state stands one draw past the last of these,
        and no transaction is open. What a caller did to its caches while nothing was open on them is left alone.

        Args:
            shape: what the caller gets for a token; called before the token becomes part of the text. Generators around
                this one hand it on by `yield from` alone: there no interrupt can come between.
        """
        request = self._request
        try:
            with mx.stream(self._stream):
                self._routes.begin()
                self._target.attach_taps(self._loop.taps)
                last = self._prefill()
                opened = self._dispatch_prompt()
                self._keep(opened, last)
            opened.tx.certain = 1
            request.position += 1
            self._open = None
            if request.budget == 0:
                request.progress(request.prompt.length, request.prompt.length)
                request.finish_reason = "length"
            else:
                yield from self._rounds(opened, shape)
        finally:
            try:
                self._settle()
            except BaseException:
                # What interrupted it comes once; what could not be settled was told by the first attempt.
                self._settle()
                raise

    def _rounds(self, current: OpenRound, shape: Callable[[Emission], Shaped]) -> Generator[Shaped, None, None]:
        request, statistics = self._request, self._request.statistics
        ending = False
        while not ending:
            if self._loop.pipelined and current.width == 1:
                successor = self._pass_on(current)
                token, ending = self._take(current)
            else:
                token, ending = self._take(current)
                while token.accepted:
                    current.ids.append(token.id)
                    emission, out = shape(self._emission(token)), current.out + 1
                    if request.sampling.draws:
                        current.lend_state(out)
                    # Nothing is called from here to the `yield`.
                    current.tx.certain = out
                    request.position += 1
                    statistics.emitted_tokens += 1
                    yield emission
                    if ending:
                        return
                    self._look_again(current)
                    token, ending = self._take(current)
                successor = self._advance(current, token, ending)
            if current.reads_prompt:
                self._tell_prompt_is_read(successor)
            self._count(current)
            if successor is not None:
                self._keep(successor, token.id)
                current = successor
            emission, open_round = shape(self._emission(token)), self._open
            if successor is not None and request.sampling.draws:
                successor.lend_state(1)
            # Nothing is called from here to the `yield`.
            if successor is not None:
                successor.tx.certain = 1
            self._open = None if successor is None or successor.kept else open_round
            request.position += 1
            statistics.emitted_tokens += 1
            yield emission
            self._look_again(current)

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
            with SpeculativeCacheTransaction(request.caches, count, drive=Drive.WHOLE, opened=False) as tx:
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
        proposals, inputs = None, bonus[None]
        if bonus_id is not None and width > 1:
            proposals = self._loop.propose(bonus_id, width - 1)
            clock.lap("propose")
        if proposals is not None:
            inputs = self._merge(inputs, proposals)
            clock.lap("merge")
        opened = self._begin(inputs, stage_ms, first)
        output = self._verify(opened)
        clock.lap("verify")
        block = Block(opened.width, output.logits, inputs, proposals, request.history, request.position + 1)
        opened.walk = open_walk(sampling, block)
        clock.lap("mask")
        hidden = [] if output.hidden is None else [output.hidden]
        # The states too, though these logits may not need them: what stays lazy belongs to this thread.
        mx.async_eval(*opened.walk.pending(), *hidden, *state_arrays(request.caches), *self._loop.arrays())
        clock.lap("verify")
        request.vocab_size = output.logits.shape[-1]
        return opened

    def _begin(self, inputs: mx.array, stage_ms: dict[str, float], first: First | None) -> OpenRound:
        """Hold a round, and then open it."""
        request = self._request
        tx, route = self._transaction(inputs.shape[1])
        key = random_key() if request.sampling.draws else None
        caches = list(request.caches)
        self._open = OpenRound(
            tx=tx, inputs=inputs, width=tx.width, key=key, caches=caches, stage_ms=stage_ms, route=route, first=first
        )
        tx.open()
        return self._open

    def _transaction(self, width: int) -> tuple[SpeculativeCacheTransaction, Route]:
        caches = self._request.caches
        route = self._routes.route(width, caches)
        return SpeculativeCacheTransaction(caches, width, drive=route.drive, opened=False), route

    def _verify(self, opened: OpenRound) -> TargetOutput:
        """Run the target on a block, by the route that is in force."""
        first, taps = opened.first, self._loop.taps
        try:
            if first is None:
                opened.output = verify(self._target, opened.inputs, opened.tx, opened.route, taps)
            else:
                opened.output = self._target.forward(first.tokens[None], opened.tx.caches, taps, _row(first.embeddings))
                opened.tx.mark(1)
        except CannotMix as error:
            opened.tx.abort()
            self._routes.demote(opened.width, self._request.caches, error)
            opened.tx, opened.route = self._transaction(opened.width)
            opened.tx.open()
            return self._verify(opened)
        return opened.output

    def _merge(self, bonus: mx.array, proposals: mx.array) -> mx.array:
        """[1, W] the verify inputs. Ids outside the vocabulary are clamped: the model must be able to embed them."""
        clamped = mx.clip(proposals, 0, self._request.vocab_size - 1)
        return mx.concatenate([bonus.astype(mx.uint32), clamped.astype(mx.uint32)], axis=1)

    def _take(self, current: OpenRound) -> tuple[Token, bool]:
        """The round's next token, and whether the run ends with it."""
        walk, began = current.choices, time.perf_counter()
        with mx.stream(self._stream):
            token = walk.take(len(current.ids) - 1)
        current.accept_ms += (time.perf_counter() - began) * 1e3
        if current.cut:
            token = token._replace(accepted=False)
        return token, self._request.receive(token.id)

    def _tell_prompt_is_read(self, successor: OpenRound | None) -> None:
        """The caller is told when the one-token loop tells it, with the next token under way."""
        length = self._request.prompt.length
        if successor is None:
            self._request.progress(length, length)
            return
        successor.lend_state(1)
        self._request.progress(length, length)
        successor.take_state_back()

    def _pass_on(self, current: OpenRound) -> OpenRound | None:
        """Dispatch the next plain step on this one's token before that token is read."""
        request = self._request
        with mx.stream(self._stream):
            self._finish(current)
            if request.budget == 1 and not self._needs_last_append:
                return None
            return self._dispatch(current.choices.first(), None, width=1)

    def _advance(self, current: OpenRound, token: Token, ending: bool) -> OpenRound | None:
        """Commit a fully walked round and dispatch the next one on its bonus."""
        request = self._request
        clock = _Clock(current.stage_ms)
        with mx.stream(self._stream):
            self._finish(current)
            clock.lap("pack")
            if ending:
                return self._dispatch(token.array, None, width=1) if self._needs_last_append else None
            self._show_drafter(current)
            clock.lap("shift")
            width = self._schedule.next(request.budget, request.quantization.room(request.caches))
            if self._target.draws and width > 1:
                # It was changed after the request was put together.
                request.statistics.note(f"decoded plainly: {DRAWS}")
                width = 1
            return self._dispatch(token.array, token.id, width)

    @property
    def _needs_last_append(self) -> bool:
        return self._request.needs_last_append or self._target.draws

    def _show_drafter(self, current: OpenRound) -> None:
        """What was kept of a round, with its hidden states."""
        hidden = None if current.output is None else current.output.hidden
        kept = None if hidden is None else hidden[:, : current.out]
        if current.reads_prompt:
            self._loop.read_prompt([current.ids], kept)
        elif not self._loop.catch_up([current.ids], kept):
            self._loop = PlainLoop()

    # Ending a round

    def _keep(self, current: OpenRound, bonus_id: int) -> None:
        """The round's bonus is about to become part of the text. Nothing else is in a round of one token: commit it.

        Until it is part of the text the commit can be revoked.
        """
        current.ids.append(bonus_id)
        if current.width == 1:
            with mx.stream(self._stream):
                current.tx.commit(1, revocable=True)
                if self._request.convert_caches():
                    mx.async_eval(cache_arrays(self._request.caches))
            current.kept = True

    def _finish(self, current: OpenRound) -> None:
        """Keep what is out of a round that is going to be followed by another, and show it to the processors."""
        if current.kept:
            current.tx.release()
        else:
            self._close(current)
        if self._request.prompt.has_ids or not current.reads_prompt:
            self._request.show(current.inputs[0, : current.out])

    def _close(self, current: OpenRound) -> None:
        """Keep the part of the open round that is out. Called again, it does what is left."""
        if not current.tx.committed:
            current.tx.commit(current.out)
        self._rewind(current)
        self._request.convert_caches()

    @staticmethod
    def _rewind(current: OpenRound) -> None:
        if current.walk is not None and not current.is_foreign:
            current.walk.rewind(current.out)

    def _undo(self, current: OpenRound) -> None:
        """Nothing of a round is out: put back the caches and the random state."""
        current.tx.revoke()
        self._request.caches[:] = current.caches
        if current.key is not None and not current.is_foreign:
            rewind_random_state(cast(list[int], current.key.tolist()))

    def _look_again(self, current: OpenRound) -> None:
        """The caller had the caches and the random state. In the middle of a block the caches are not its to change."""
        if current.lent is not None:
            current.take_state_back()
        # Caches are equal to themselves alone, so this tells whether another one was put in a place.
        if current.tx.changed or (not current.kept and current.caches != self._request.caches):
            raise CacheChanged(
                f"the prompt cache was changed while a block of {current.width} tokens was open on it, so this run "
                "cannot go on. Take `mlx_spec.settled_cache(prompt_cache)` to look at, save or fork it while a run "
                "with a drafter streams; close the run before changing it."
            )

    # Handing out

    def _emission(self, token: Token) -> Emission:
        statistics = self._request.statistics
        statistics.time_token()
        if (statistics.emitted_tokens + 1) % _CLEAR_EVERY_TOKENS == 0:
            mx.clear_cache()
        return Emission(token.id, token.logprobs, token.accepted)

    def _count(self, current: OpenRound) -> None:
        if current.record is None:
            width = current.width
            current.stage_ms["accept"] = current.accept_ms
            current.record = RoundRecord(width, width - 1, current.out - 1, current.route.name, current.stage_ms)
        self._request.statistics.count_round(current.record)

    # The end

    def _settle(self) -> None:
        """Bring the caches to exactly the prompt and the tokens handed out. Called again, it does what is left."""
        current, request = self._open, self._request
        with mx.stream(self._stream):
            if current is not None:
                self._settle_round(current)
                if current.out > 1:
                    self._count(current)
                self._open = None
            elif request.position >= request.prompt.length:
                # Nothing is open: the caches are stock's, or what the caller made of them since.
                return
            if request.keeps_caches:
                mx.async_eval(cache_arrays(request.caches))

    def _settle_round(self, current: OpenRound) -> None:
        if not current.out:
            self._undo(current)
            return
        try:
            self._close(current)
        except CacheChanged:
            self._rewind(current)
            self._open = None
            if not current.tx.give_way():
                raise
        except Exception:  # noqa: BLE001  whatever keeps a commit from being made, the tokens are out
            self._read_again(current)

    def _read_again(self, current: OpenRound) -> None:
        """A round that cannot be committed: undo it, and read those of its tokens that are out one by one."""
        current.tx.abort()
        caches = self._request.caches
        for token in current.ids[current.read_again : current.out]:
            with SpeculativeCacheTransaction(caches, 1, drive=Drive.WHOLE, opened=False) as tx:
                self._target.forward(mx.array([[token]]), tx.caches)
                tx.mark(1)
                tx.commit(1)
            current.read_again += 1
            self._request.convert_caches()
            mx.eval(cache_arrays(caches))
        self._rewind(current)
