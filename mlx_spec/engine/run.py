"""One row, pulled from its prompt to its end by whoever wants its tokens."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import NamedTuple, TypeVar

import mlx.core as mx

from mlx_spec.accept.walks import Token
from mlx_spec.engine.open_round import OpenRound
from mlx_spec.engine.round import Engine, Start
from mlx_spec.engine.row import Row

_CLEAR_EVERY_TOKENS = 256
"""How often mlx's buffer cache is cleared, as the one-token loop does."""

Shaped = TypeVar("Shaped")


class Emission(NamedTuple):
    """One token handed out: its id, [V] log-probabilities, and whether the drafter had proposed it."""

    token: int
    logprobs: mx.array
    from_draft: bool


def run(engine: Engine, row: Row, shape: Callable[[Emission], Shaped]) -> Generator[Shaped, None, None]:
    """Hand out the text's tokens.

    However it ends (budget, stop, close, exception, interrupt) the caches then hold the prompt tokens whose forward
    completed and the tokens handed out, the random state stands one draw past the last of these,
    and no transaction is open. What a caller did to its caches while nothing was open on them is left alone.

    Args:
        engine: on the row's target.
        row: nothing of it was read.
        shape: what the caller gets for a token; called before the token becomes part of the text. Generators around
            this one hand it on by `yield from` alone: there no interrupt can come between.
    """
    row.drafting.look_at(row.caches)
    try:
        opened = engine.read_prompt(row)
        opened.tx.certain = 1
        row.position += 1
        row.open = None
        if row.budget == 0:
            row.progress(row.prompt.length, row.prompt.length)
            row.finish_reason = "length"
        else:
            yield from _rounds(engine, row, opened, shape)
    finally:
        try:
            engine.settle(row)
        except BaseException:
            # What interrupted it comes once; what could not be settled was told by the first attempt.
            engine.settle(row)
            raise


def _rounds(
    engine: Engine, row: Row, current: OpenRound, shape: Callable[[Emission], Shaped]
) -> Generator[Shaped, None, None]:
    """Round after round. The next one is dispatched before the last token of one is handed out, so that the device
    works while the consumer does; after a plain step, where the next is one too, even before its token is read."""
    statistics, draws = row.statistics, row.sampling.draws
    ending = False
    while not ending:
        # Asked before the token is read, where that leaves nothing to know but the token.
        width = row.next_width(ahead=1) if current.width == 1 else None
        if width == 1:
            engine.show_drafter(row, current)
            successor = _dispatched(engine, engine.pass_on(row, current))
            token, ending = engine.take(row, current)
        else:
            token, ending = engine.take(row, current)
            while token.accepted:
                current.ids.append(token.id)
                emission, out = shape(_emission(row, token)), current.out + 1
                if draws:
                    current.lend_state(out)
                # A token becomes part of the text by plain assignments; nothing is called from here to the `yield`.
                current.tx.certain = out
                row.position += 1
                statistics.emitted_tokens += 1
                yield emission
                if ending:
                    return
                engine.look_again(row, current)
                token, ending = engine.take(row, current)
            successor = _dispatched(engine, engine.advance(row, current, token, ending, width))
        if current.reads_prompt:
            _tell_prompt_is_read(row, successor)
        engine.count(row, current)
        engine.tell_round(row, current, token, successor)
        if successor is not None:
            engine.keep(row, successor, token.id)
            current = successor
        emission, open_round = shape(_emission(row, token)), row.open
        if successor is not None and draws:
            successor.lend_state(1)
        # Nothing is called from here to the `yield`.
        if successor is not None:
            successor.tx.certain = 1
        row.open = None if successor is None or successor.kept else open_round
        row.position += 1
        statistics.emitted_tokens += 1
        yield emission
        engine.look_again(row, current)


def _dispatched(engine: Engine, start: Start | None) -> OpenRound | None:
    return None if start is None else engine.dispatch([start])[0]


def _tell_prompt_is_read(row: Row, successor: OpenRound | None) -> None:
    """The caller is told when the one-token loop tells it, with the next token under way."""
    length = row.prompt.length
    if successor is None:
        row.progress(length, length)
        return
    successor.lend_state(1)
    row.progress(length, length)
    successor.take_state_back()


def _emission(row: Row, token: Token) -> Emission:
    row.statistics.time_token()
    if (row.statistics.emitted_tokens + 1) % _CLEAR_EVERY_TOKENS == 0:
        mx.clear_cache()
    return Emission(token.id, token.logprobs, token.accepted)
