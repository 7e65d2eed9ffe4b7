"""From a block's logits to its tokens: all positions at once, or one by one as they are kept."""

from __future__ import annotations

import abc
from typing import NamedTuple

import mlx.core as mx

from mlx_spec.accept.normalize import normalized
from mlx_spec.accept.proposal import Proposal
from mlx_spec.accept.rule import AcceptanceRule, Scored
from mlx_spec.errors import NonFiniteLogits
from mlx_spec.sampling import Sampling, holds_nan, log_sum_exp, put_random_state, rewind_random_state


def _nothing() -> Proposal:
    # Made where it is used: what is lazy belongs to a thread.
    return Proposal(mx.zeros((1, 0), mx.int32))


class Token(NamedTuple):
    """One token of a round.

    Attributes:
        id: the token.
        logprobs: [V] the target's log-probabilities at its place.
        accepted: a proposal stands there, so the round holds a further token.
    """

    id: int
    logprobs: mx.array
    accepted: bool


class Block(NamedTuple):
    """One verify call, from the walk's side.

    Attributes:
        width: W.
        logits: [1, W, V] raw logits.
        inputs: [1, W] what was verified, clamped into the vocabulary.
        proposal: what the drafter gave, W-1 ids, not clamped; None when W is 1.
        history: [n] every token before the bonus; None when there is none or nobody asks for it.
        position: tokens up to and including the bonus.
    """

    width: int
    logits: mx.array
    inputs: mx.array
    proposal: Proposal | None
    history: mx.array | None
    position: int

    def choose(self, sampling: Sampling, index: int) -> tuple[mx.array, mx.array]:
        """The target's choice at a position: [1] token, [1, V] log-probabilities."""
        ids = None
        if sampling.processors:
            ids = self.inputs[0, : index + 1]
            if self.history is not None:
                ids = mx.concatenate([self.history, ids])
        return sampling.choose(self.logits[:, index, :], ids)


class Walk(abc.ABC):
    """The tokens of one round, in order.

    Attributes:
        packed: [n] int32 or uint32, what the host must read before `take(0)`, of all rows of a round at once; None
            where the walk reads for itself, token by token.
    """

    packed: mx.array | None = None

    def receive(self, read: list[int]) -> None:
        """What the host read of `packed`. What that leaves to compute is dispatched. Default: nothing is packed."""
        del read

    @abc.abstractmethod
    def take(self, index: int) -> Token:
        """Token `index` of the round. Call with 0, 1, ... while the last one was accepted.

        Raises:
            NonFiniteLogits: no token can be chosen there.
        """

    @abc.abstractmethod
    def pending(self) -> list[mx.array]:
        """What must be evaluated before `receive`, or `take(0)` where nothing is packed."""

    @abc.abstractmethod
    def array(self, index: int) -> mx.array:
        """[1] uint32 token `index` on the device. Token 0 may be asked for before anything is read."""

    def rewind(self, retained: int) -> None:
        """Put the random state right behind the draw of token `retained - 1`. Default: nothing was drawn ahead."""
        del retained

    def lend_state(self, retained: int) -> bool:
        """Put the random state there while the caller has the thread, reading nothing.

        Returns:
            False where that is where it stands, because nothing was drawn ahead.
        """
        del retained
        return False


class StepWalk(Walk):
    """The one position of a plain step, with as few ops as tell whether a token could be chosen."""

    def __init__(self, sampling: Sampling, block: Block) -> None:
        self._position = block.position
        logits = block.logits[:, -1, :]
        if sampling.processors:
            self._choice, logprobs = block.choose(sampling, 0)
            self._sums = holds_nan(block.logits)
            self._sums = mx.where(self._sums, mx.nan, 0.0)
        else:
            self._sums = log_sum_exp(logits)
            logprobs = logits - self._sums
            self._choice = sampling.sampler(logprobs)
        self._logprobs = logprobs.squeeze(0)
        self._greedy = sampling.greedy
        # Of a row of NaN alone, as one NaN makes it, argmax is 0, so other choices need no look.
        self.packed = (
            self._choice
            if sampling.greedy
            else mx.where(mx.isnan(self._sums), -1, self._choice.astype(mx.int32)).reshape(-1)
        )
        self._id = -1

    def receive(self, read: list[int]) -> None:
        self._id = read[0]
        if self._greedy and self._id == 0 and mx.isnan(self._sums).item():
            self._id = -1

    def take(self, index: int) -> Token:
        if self._id < 0:
            raise NonFiniteLogits(self._position + index)
        return Token(self._id, self._logprobs, False)

    def pending(self) -> list[mx.array]:
        assert self.packed is not None
        return [self.packed, self._logprobs]

    def array(self, index: int) -> mx.array:
        del index
        return self._choice


class BlockWalk(Walk):
    """Every position is chosen before any is known to be kept; one host read tells all.

    Allowed when the sampler and the processors are functions of (ids, logits, RNG) alone: then what
    they do at a rejected position leaves no trace but the random state, whose keys travel in the same read.
    """

    def __init__(self, rule: AcceptanceRule, sampling: Sampling, block: Block) -> None:
        self._block = block
        self._keys: list[mx.array] = []
        self._read: list[int] = []
        self._accepted = 0
        self._rows: list[mx.array] = []
        self._sums: mx.array | None = None
        proposal = block.proposal or _nothing()
        if sampling.greedy:
            walked = self._likeliest(rule, proposal)
        else:
            scored = self._chosen(sampling)
            self._rows = _cut(scored.logprobs)
            walked = rule.walk(proposal, scored)
        self._tokens = walked[0]
        # Keys are compared with nothing: their bits travel as they are.
        keys = [key.view(mx.int32) for key in self._keys]
        self.packed = mx.concatenate([self._tokens, *keys]) if keys else self._tokens

    def _likeliest(self, rule: AcceptanceRule, proposal: Proposal) -> mx.array:
        logprobs, sums = normalized(self._block.logits)
        walked = rule.walk_logits(proposal, self._block.logits, sums)
        if walked is not None:
            # Log-probabilities of positions that are not reached are never made.
            self._sums = sums
            return walked
        self._rows = _cut(logprobs)
        return rule.walk(proposal, Scored(mx.argmax(logprobs, axis=-1), logprobs, sums))

    def _chosen(self, sampling: Sampling) -> Scored:
        block, choices = self._block, []
        if sampling.processors:
            rows = []
            for index in range(block.width):
                token, logprobs = block.choose(sampling, index)
                choices.append(token)
                rows.append(logprobs)
                if sampling.draws:
                    self._keys.append(mx.random.state[0][:])  # type: ignore[index]
            every = mx.stack(rows, axis=1)
            faults = mx.where(holds_nan(block.logits), mx.nan, 0.0)
        else:
            every, faults = normalized(block.logits)
            for index in range(block.width):
                choices.append(sampling.sampler(every[:, index]))
                if sampling.draws:
                    self._keys.append(mx.random.state[0][:])  # type: ignore[index]
        return Scored(mx.concatenate(choices)[None], every, faults)

    def receive(self, read: list[int]) -> None:
        """See `Walk.receive`. Log-probabilities that nothing needed so far are made for the positions reached."""
        self._read, self._accepted = read, read[0]
        if self._sums is not None:
            logits, sums = self._block.logits, self._sums
            self._rows = [logits[0, index] - sums[0, index] for index in range(read[0] + 1)]
            mx.async_eval(*self._rows)

    def take(self, index: int) -> Token:
        width, read = self._block.width, self._read
        if read[1 + index]:
            raise NonFiniteLogits(self._block.position + index)
        return Token(read[1 + width + index], self._rows[index], index < self._accepted)

    def pending(self) -> list[mx.array]:
        assert self.packed is not None
        return [self.packed, *self._rows] if self._sums is None else [self.packed, self._sums]

    def array(self, index: int) -> mx.array:
        at = 1 + self._block.width + index
        return self._tokens[at : at + 1].astype(mx.uint32)

    def rewind(self, retained: int) -> None:
        if not self._keys or self._block.width == 1:
            return
        assert self.packed is not None
        read: list[int] = self._read or self.packed.tolist()  # type: ignore[assignment]
        start = 1 + 2 * self._block.width + 2 * (retained - 1)
        rewind_random_state([word & 0xFFFFFFFF for word in read[start : start + 2]])

    def lend_state(self, retained: int) -> bool:
        if not self._keys or self._block.width == 1:
            return False
        put_random_state(self._keys[retained - 1])
        return True


class SequentialWalk(Walk):
    """A position is chosen only once the one before it is kept, in the one-token loop's order.

    For callables that may hide state: they see the calls the one-token loop makes and no other,
    at the price of one host read per token.
    """

    def __init__(self, rule: AcceptanceRule, sampling: Sampling, block: Block) -> None:
        self._rule = rule
        self._sampling = sampling
        self._block = block
        self._faults = mx.where(holds_nan(block.logits), mx.nan, 0.0)
        self._choices: list[tuple[mx.array, mx.array]] = []
        self._choose_next()

    def take(self, index: int) -> Token:
        block = self._block
        token, logprobs = self._choices[index]
        proposal, places = _nothing(), 1
        if block.proposal is not None and index < block.width - 1:
            proposal, places = Proposal(block.proposal.ids[:, index : index + 1]), 2
        choices = mx.broadcast_to(token[None], (1, places)).astype(mx.uint32)
        faults = mx.broadcast_to(self._faults[:, index : index + 1], (1, places))
        scored = Scored(choices, mx.broadcast_to(logprobs, (1, places, logprobs.shape[-1])), faults)
        walked: list[list[int]] = self._rule.walk(proposal, scored).tolist()  # type: ignore[assignment]
        accepted, fault, *_ = walked[0]
        if fault:
            raise NonFiniteLogits(block.position + index)
        if accepted and len(self._choices) == index + 1:
            self._choose_next()
        return Token(walked[0][1 + places], logprobs, bool(accepted))

    def pending(self) -> list[mx.array]:
        return [*self._choices[0], self._faults]

    def array(self, index: int) -> mx.array:
        return self._choices[index][0]

    def _choose_next(self) -> None:
        token, logprobs = self._block.choose(self._sampling, len(self._choices))
        self._choices.append((token, logprobs.squeeze(0)))
        if len(self._choices) > 1:
            mx.async_eval(*self._choices[-1])


def _cut(block: mx.array) -> list[mx.array]:
    """[1, W, V] -> W times [V], each with a buffer of its own: whoever keeps one does not keep the block."""
    width = block.shape[1]
    return list(map(mx.contiguous, mx.split(block.reshape(-1), width))) if width > 1 else [block.reshape(-1)]


def open_walk(rule: AcceptanceRule, sampling: Sampling, block: Block) -> Walk:
    """The walk a request's callables allow."""
    if not sampling.pure:
        return SequentialWalk(rule, sampling, block)
    return StepWalk(sampling, block) if block.width == 1 and rule.token_exact else BlockWalk(rule, sampling, block)
