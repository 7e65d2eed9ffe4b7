"""What is done to rows, as plain calls: read a prompt, begin a round, verify it, take its tokens, settle."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import mlx.core as mx

from mlx_spec.accept.proposal import Proposal
from mlx_spec.accept.walks import Block, Token, open_walk
from mlx_spec.cache.adopt import state_arrays, steps_alone
from mlx_spec.cache.base import Drive
from mlx_spec.cache.contents import cache_arrays
from mlx_spec.cache.one_token import OneToken
from mlx_spec.cache.transaction import SpeculativeCacheTransaction
from mlx_spec.engine.drafting import NoDrafting
from mlx_spec.engine.open_round import First, HostRead, OpenRound
from mlx_spec.engine.row import RoundResult, Row
from mlx_spec.errors import CacheChanged, CannotMix
from mlx_spec.model.target import DRAWS, Target, TargetOutput
from mlx_spec.records import STAGES, RoundRecord
from mlx_spec.sampling import random_key, rewind_random_state
from mlx_spec.verify.block import verify
from mlx_spec.verify.routes import BLOCK, Route

_NO_TIME = dict.fromkeys(STAGES, 0.0)


class Start(NamedTuple):
    """What a round of a row begins with.

    Attributes:
        bonus: [1] the newest token, not yet handed out.
        proposal: what is to be verified after it; None for a plain step.
        first: the prompt's last position, where it has an embedding of its own.
    """

    row: Row
    bonus: mx.array
    proposal: Proposal | None = None
    first: First | None = None


class Engine:
    """Takes rows through rounds. Holds the target and the stream it works on; all else is a row's.

    Whoever drives it hands tokens out. Invariant whenever one is: the row's open round has that token or an earlier one
    as its bonus, and every token handed out since is among the round's verify inputs. So at any moment the caches can
    be brought to hold exactly the prompt and the tokens handed out, by committing a prefix of the open round. A round
    of one token is committed before that token is handed out: nothing is open on the caches then.

    An interrupt may come wherever something is called. So a round is held in its row before its transaction opens, and
    `settle` finishes or undoes what it finds there, from wherever it was left.
    """

    def __init__(self, target: Target, stream: Any) -> None:
        self.stream = stream
        self._target = target

    # Prompt

    def read_prompt(self, row: Row) -> OpenRound:
        """Read the prompt, and dispatch its last position, which gives the first token.

        Chunk by chunk; each chunk's hidden states are shown to the drafter and dropped.
        """
        with mx.stream(self.stream):
            row.routes.begin()
            self._target.attach_taps(row.drafting.taps)
            last = self._prefill(row)
            (opened,) = self.dispatch([self._start_of(row)])
            opened.reads_prompt = True
            self.keep(row, opened, last)
        return opened

    def _prefill(self, row: Row) -> int:
        """Read all of the prompt but its last token, whose id is returned."""
        total, drafting = row.prompt.length, row.drafting
        row.statistics.start(total)
        row.progress(0, total)
        while row.position < total - 1:
            start = row.position
            count = min(row.prefill_step_size, total - 1 - start)
            chunk, embeddings = row.prompt.part(start, start + count)
            with SpeculativeCacheTransaction(row.caches, count, drive=Drive.WHOLE, opened=False) as tx:
                output = self._target.forward(chunk[None], tx.caches, drafting.taps, _batched(embeddings))
                tx.mark(count)
                tx.commit(count)
            row.convert_caches()
            drafting.read_prompt(row.prompt.shown_ids(start, start + count), output.hidden)
            mx.eval(cache_arrays(row.caches), *drafting.arrays())
            row.show(chunk)
            row.position += count
            row.progress(row.position, total)
            mx.clear_cache()
        return row.prompt.shown_ids(total - 1, total)[0]

    @staticmethod
    def _start_of(row: Row) -> Start:
        prompt = row.prompt
        tokens, embeddings = prompt.part(prompt.length - 1, prompt.length)
        if embeddings is None:
            return Start(row, tokens)
        sampling = row.sampling
        if not prompt.has_ids:
            # As in the one-token loop, processors are called from the first token on whose id is known.
            sampling = replace(sampling, processors=())
            return Start(row, mx.zeros((1,), mx.uint32), None, First(tokens, embeddings, sampling))
        return Start(row, tokens, None, First(tokens, embeddings, sampling))

    # A round

    def dispatch(self, starts: Sequence[Start]) -> list[OpenRound]:
        """Begin a round of every row, and verify all."""
        with mx.stream(self.stream):
            opened = [self.begin(start) for start in starts]
            self.verify(starts, opened)
        return opened

    def begin(self, start: Start) -> OpenRound:
        """Merge bonus and proposals, hold a round in its row, and then open it. On the engine's stream."""
        row, proposal, inputs = start.row, start.proposal, start.bonus[None]
        stage_ms, began = _NO_TIME.copy(), time.perf_counter()
        if proposal is not None:
            inputs = _merged(inputs, proposal.ids, row.vocab_size)
        width = 1 if proposal is None else 1 + proposal.count
        tx, route = _transaction(row, width)
        opened = row.open = OpenRound(
            tx=tx,
            inputs=inputs,
            width=width,
            proposal=proposal,
            key=random_key() if row.sampling.draws else None,
            caches=list(row.caches),
            stage_ms=stage_ms,
            route=route,
            first=start.first,
        )
        tx.open()
        stage_ms["merge"] = (time.perf_counter() - began) * 1e3
        return opened

    def verify(self, starts: Sequence[Start], opened: Sequence[OpenRound]) -> None:
        """The target's forward over every row, and what it chooses, lazily; then the device is started on all.

        One host read will tell the counts, tokens and keys of all rows: the first `take` of any of them makes it.
        """
        read, pending = HostRead(), []
        for (row, *_), each in zip(starts, opened, strict=True):
            began = time.perf_counter()
            output = self._forward(row, each)
            built = time.perf_counter()
            sampling = row.sampling if each.first is None else each.first.sampling
            block = Block(each.width, output.logits, each.inputs, each.proposal, row.history, row.position + 1)
            each.walk, each.read = open_walk(row.rule, sampling, block), read
            read.add(each.walk)
            chosen = time.perf_counter()
            each.stage_ms["verify"] += (built - began) * 1e3
            each.stage_ms["mask"] += (chosen - built) * 1e3
            row.vocab_size = output.logits.shape[-1]
            # The states too, though these logits may not need them: what stays lazy belongs to this thread.
            pending += [*each.walk.pending(), *state_arrays(row.caches), *row.drafting.arrays()]
            if output.hidden is not None:
                pending.append(output.hidden)
        began = time.perf_counter()
        mx.async_eval(*pending)
        for each in opened[:1]:
            each.stage_ms["verify"] += (time.perf_counter() - began) * 1e3

    def _forward(self, row: Row, opened: OpenRound) -> TargetOutput:
        """Run the target on one row's block, by the route that is in force."""
        first, taps = opened.first, row.drafting.taps
        try:
            if first is None:
                opened.output = verify(self._target, opened.inputs, opened.tx, opened.route, taps)
            else:
                embeddings = _batched(first.embeddings)
                opened.output = self._target.forward(first.tokens[None], opened.tx.caches, taps, embeddings)
                opened.tx.mark(1)
        except CannotMix as error:
            opened.tx.abort()
            row.routes.demote(opened.width, row.caches, error)
            opened.tx, opened.route = _transaction(row, opened.width)
            opened.tx.open()
            return self._forward(row, opened)
        return opened.output

    def take(self, row: Row, current: OpenRound) -> tuple[Token, bool]:
        """The next token of a row's round, and whether its run ends with it. The first waits for the device."""
        walk, index = current.choices, len(current.ids) - 1
        if index and walk.packed is not None:
            token = walk.take(index)
        else:
            began = time.perf_counter()
            with mx.stream(self.stream):
                if current.read is not None:
                    current.read.make()
                token = walk.take(index)
            current.stage_ms["accept"] += (time.perf_counter() - began) * 1e3
        if current.cut:
            token = token._replace(accepted=False)
        return token, row.receive(token.id)

    # From one round to the next

    def pass_on(self, row: Row, current: OpenRound) -> Start | None:
        """What begins the next plain step, before the token of this one is read; None where no step follows."""
        with mx.stream(self.stream):
            self._finish(row, current)
            if row.budget == 1 and not self._needs_last_append(row):
                return None
            return Start(row, current.choices.array(0))

    def advance(
        self, row: Row, current: OpenRound, token: Token, ending: bool, width: int | None = None
    ) -> Start | None:
        """Commit a fully walked round; what begins the next one on its bonus, or None where none follows.

        Args:
            row: whose round it is.
            current: the round.
            token: its bonus, the last token of the walk.
            ending: the run ends with that token.
            width: of the next round; None where the policy was not asked yet.
        """
        stage_ms, began = current.stage_ms, time.perf_counter()
        with mx.stream(self.stream):
            self._finish(row, current)
            packed = time.perf_counter()
            stage_ms["pack"] += (packed - began) * 1e3
            bonus = current.choices.array(len(current.ids) - 1)
            if ending:
                return Start(row, bonus) if self._needs_last_append(row) else None
            self.show_drafter(row, current)
            shifted = time.perf_counter()
            stage_ms["shift"] += (shifted - packed) * 1e3
            proposal = self._propose(row, token.id, width)
            stage_ms["propose"] += (time.perf_counter() - shifted) * 1e3
        return Start(row, bonus, proposal)

    def _propose(self, row: Row, bonus: int, width: int | None) -> Proposal | None:
        if width is None:
            width = row.next_width()
        if self._target.draws and width > 1:
            # It was changed after the request was put together.
            row.statistics.note(f"decoded plainly: {DRAWS}")
            return None
        proposal = row.drafting.propose(bonus, width - 1) if width > 1 else None
        if not row.drafting.proposes:
            row.drafting = NoDrafting()
        return proposal

    def show_drafter(self, row: Row, current: OpenRound) -> None:
        """What was kept of a round, with its hidden states."""
        if isinstance(row.drafting, NoDrafting):
            return
        if row.drafting.proposes:
            with mx.stream(self.stream):
                self._show_drafter(row, current)
        if not row.drafting.proposes:
            # What it tapped is not recorded any more.
            row.drafting = NoDrafting()

    @staticmethod
    def _show_drafter(row: Row, current: OpenRound) -> None:
        hidden = None if current.output is None else current.output.hidden
        kept = None if hidden is None else hidden[:, : current.out]
        if current.reads_prompt:
            row.drafting.read_prompt(current.ids, kept)
        else:
            row.drafting.show(current.ids, kept)

    def _needs_last_append(self, row: Row) -> bool:
        return row.needs_last_append or self._target.draws

    def keep(self, row: Row, current: OpenRound, bonus_id: int) -> None:
        """The round's bonus is about to become part of the text. Nothing else is in a round of one token: commit it."""
        current.ids.append(bonus_id)
        if current.width == 1:
            with mx.stream(self.stream):
                current.keep()
                if row.convert_caches():
                    mx.async_eval(cache_arrays(row.caches))

    def _finish(self, row: Row, current: OpenRound) -> None:
        """Keep what is out of a round that is going to be followed by another, and show it to the processors."""
        if current.kept:
            current.tx.release()
        else:
            _close(row, current)
        if row.sampling.processors and (row.prompt.has_ids or not current.reads_prompt):
            with mx.stream(self.stream):
                row.show(current.inputs[0, : current.out])

    @staticmethod
    def look_again(row: Row, current: OpenRound) -> None:
        """The caller had the caches and the random state. In the middle of a block the caches are not its to change."""
        if row.finish_reason is not None:
            # That was the last token, and its block may have had the caches quantized.
            return
        if current.lent is not None:
            current.take_state_back()
        # Caches are equal to themselves alone, so this tells whether another one was put in a place.
        if current.tx.changed or (not current.kept and current.caches != list(row.caches)):
            raise CacheChanged(
                f"the prompt cache was changed while a block of {current.width} tokens was open on it, so this run "
                "cannot go on. Take `mlx_spec.settled_cache(prompt_cache)` to look at, save or fork it while a run "
                "with a drafter streams; close the run before changing it."
            )

    @staticmethod
    def count(row: Row, current: OpenRound) -> None:
        """The round is over: tell the statistics and the policy."""
        if current.record is None:
            width = current.width
            current.record = RoundRecord(width, width - 1, current.out - 1, current.route.name, current.stage_ms)
            row.statistics.count_round(current.record)
            row.policy.observe(current.record)
        else:
            row.statistics.count_round(current.record)

    @staticmethod
    def tell_round(row: Row, current: OpenRound, token: Token, successor: OpenRound | None) -> None:
        """Tell the caller what a round came to, if it asked. The random state is its own meanwhile."""
        if row.on_round is None:
            return
        if successor is not None:
            successor.lend_state(1)
        proposal = None if successor is None else successor.proposal
        row.on_round(RoundResult([current.out - 1], [token.id], None if proposal is None else proposal.ids))
        if successor is not None:
            successor.take_state_back()

    # The end

    def settle(self, row: Row) -> None:
        """Bring a row's caches to exactly the prompt and the tokens handed out. Called again, it does what is left."""
        current = row.open
        with mx.stream(self.stream):
            if current is not None:
                self._settle_round(row, current)
                if current.out > 1:
                    self.count(row, current)
                row.open = None
            elif row.position >= row.prompt.length:
                # Nothing is open: the caches are stock's, or what the caller made of them since.
                return
            if row.keeps_caches:
                mx.async_eval(cache_arrays(row.caches))

    def _settle_round(self, row: Row, current: OpenRound) -> None:
        if not current.out:
            _undo(row, current)
            return
        try:
            _close(row, current)
        except CacheChanged:
            current.rewind()
            row.open = None
            if not current.tx.give_way():
                raise
        except Exception:  # noqa: BLE001  whatever keeps a commit from being made, the tokens are out
            self._read_again(row, current)

    def _read_again(self, row: Row, current: OpenRound) -> None:
        """A round that cannot be committed: undo it, and read those of its tokens that are out one by one."""
        current.tx.abort()
        for token in current.ids[current.read_again : current.out]:
            with SpeculativeCacheTransaction(row.caches, 1, drive=Drive.WHOLE, opened=False) as tx:
                self._target.forward(mx.array([[token]]), tx.caches)
                tx.mark(1)
                tx.commit(1)
            current.read_again += 1
            row.convert_caches()
            mx.eval(cache_arrays(row.caches))
        current.rewind()


def _batched(embeddings: mx.array | None) -> mx.array | None:
    """[W, H] -> [1, W, H]."""
    return None if embeddings is None else embeddings[None]


def _merged(bonus: mx.array, proposals: mx.array, vocab_size: int) -> mx.array:
    """[1, W] the verify inputs. Ids outside the vocabulary are clamped: the model must be able to embed them."""
    # What is below 0 is above every id as a number without a sign.
    clamped = mx.minimum(proposals.astype(mx.uint32), vocab_size - 1)
    return mx.concatenate([bonus.astype(mx.uint32), clamped], axis=1)


def _transaction(row: Row, width: int) -> tuple[SpeculativeCacheTransaction, Route]:
    if width == 1 and steps_alone(row.caches):
        return OneToken(row.caches), BLOCK
    route = BLOCK if width == 1 else row.routes.route(width, row.caches)
    # A certified route's forward is one that has been seen to keep to its block.
    drive = Drive.ALONE if route.drive is Drive.BLOCK else route.drive
    return SpeculativeCacheTransaction(row.caches, width, drive=drive, opened=False), route


def _close(row: Row, current: OpenRound) -> None:
    """Keep the part of the open round that is out. Called again, it does what is left."""
    if not current.tx.committed:
        current.tx.commit(current.out)
    current.rewind()
    row.convert_caches()


def _undo(row: Row, current: OpenRound) -> None:
    """Nothing of a round is out: put back the caches and the random state."""
    current.tx.revoke()
    if isinstance(row.caches, list):
        row.caches[:] = current.caches
    if current.key is not None and not current.is_foreign:
        read: list[int] = current.key.tolist()  # type: ignore[assignment]
        rewind_random_state(read)
