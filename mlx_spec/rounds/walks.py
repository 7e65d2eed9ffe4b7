"""From a block's logits to its tokens: all positions at once, or one by one as they are kept."""

from __future__ import annotations

import abc
from typing import NamedTuple, cast

import mlx.core as mx

from mlx_spec import accept
from mlx_spec.errors import NonFiniteLogits
from mlx_spec.ops.argmax import ACCEPTED, FAULT, TOKENS, GreedyBlock, kernel_holds
from mlx_spec.sampling import Sampling, holds_nan, log_sum_exp, put_random_state, rewind_random_state


class Token(NamedTuple):
    """One token of a round.

    Attributes:
        id: the token.
        array: [1] the same on the device, as the sampler returned it.
        logprobs: [V] the target's log-probabilities it was chosen from.
        accepted: it was proposed, so the round holds a further token.
    """

    id: int
    array: mx.array
    logprobs: mx.array
    accepted: bool


class Block(NamedTuple):
    """One verify call, from the walk's side.

    Attributes:
        width: W.
        logits: [1, W, V] raw logits.
        inputs: [1, W] what was verified, clamped into the vocabulary.
        proposals: [1, W-1] int32 the drafter's ids, not clamped; None when W is 1.
        history: [n] every token before the bonus; None when there is none or nobody asks for it.
        position: tokens up to and including the bonus.
    """

    width: int
    logits: mx.array
    inputs: mx.array
    proposals: mx.array | None
    history: mx.array | None
    position: int

    def choose(self, sampling: Sampling, index: int) -> tuple[mx.array, mx.array]:
        """The target's choice at a position: [1] token, [1, V] log-probabilities."""
        ids = self.inputs[0, : index + 1] if sampling.processors else None
        if ids is not None and self.history is not None:
            ids = mx.concatenate([self.history, ids])
        return sampling.choose(self.logits[:, index, :], ids)


class Walk(abc.ABC):
    """The tokens of one round, in order."""

    @abc.abstractmethod
    def take(self, index: int) -> Token:
        """Token `index` of the round. Call with 0, 1, ... while the last one was accepted.

        Raises:
            NonFiniteLogits: no token can be chosen there.
        """

    @abc.abstractmethod
    def pending(self) -> list[mx.array]:
        """What must be evaluated before `take(0)` can answer."""

    @abc.abstractmethod
    def first(self) -> mx.array:
        """[1] token 0, lazy."""

    @abc.abstractmethod
    def rewind(self, retained: int) -> None:
        """Leave the random state where the one-token loop has it after `retained` of the inputs."""

    def lend_state(self, retained: int) -> bool:
        """Lazily put the random state where the one-token loop has it after `retained` of the inputs.

        Returns whether more was drawn than that, so that what comes after it is of no use once somebody else draws.
        """
        del retained
        return False


class BlockWalk(Walk):
    """Every position is chosen before any is known to be kept; one host read tells all.

    Allowed when the sampler and the processors are functions of (ids, logits, RNG) alone: then what
    they do at a rejected position leaves no trace but the random state, whose keys travel in the same read.
    """

    def __init__(self, sampling: Sampling, block: Block) -> None:
        self._block = block
        self._draws = sampling.draws
        self._choices: list[mx.array] = []
        self._logprobs: list[mx.array] = []
        self._keys: list[mx.array] = []
        for index in range(block.width):
            # Without processors nobody asks for ids.
            token, logprobs = (
                block.choose(sampling, index) if sampling.processors else sampling.choose(block.logits[:, index], None)
            )
            self._choices.append(token)
            self._logprobs.append(logprobs.squeeze(0))
            if self._draws:
                self._keys.append(mx.random.state[0][:])  # type: ignore[index]
        self._packed = self._pack()
        self._read: list[int] = []
        self._accepted = 0

    def _pack(self) -> mx.array:
        block = self._block
        choices = mx.concatenate(self._choices)[None].astype(mx.uint32)
        parts = [choices, holds_nan(block.logits).astype(mx.uint32)]
        if block.proposals is not None:
            accepted, _ = accept.walk(block.proposals, choices)
            parts.append(accepted[:, None].astype(mx.uint32))
            parts.extend(key[None] for key in self._keys)
        return mx.concatenate(parts, axis=1) if len(parts) > 1 else parts[0]

    def take(self, index: int) -> Token:
        width = self._block.width
        read = self._read or self._host_read()
        if read[width + index]:
            raise NonFiniteLogits(self._block.position + index)
        return Token(read[index], self._choices[index], self._logprobs[index], index < self._accepted)

    def pending(self) -> list[mx.array]:
        return [self._packed, *self._logprobs]

    def first(self) -> mx.array:
        return self._choices[0]

    def rewind(self, retained: int) -> None:
        width = self._block.width
        if self._draws and width > 1:
            start = 2 * width + 1 + 2 * (retained - 1)
            rewind_random_state(self._host_read()[start : start + 2])

    def lend_state(self, retained: int) -> bool:
        if not self._draws or self._block.width == 1:
            return False
        put_random_state(self._keys[retained - 1])
        return True

    def _host_read(self) -> list[int]:
        if not self._read:
            read: list[list[int]] = self._packed.tolist()  # type: ignore[assignment]
            width = self._block.width
            self._accepted = read[0][2 * width] if width > 1 else 0
            self._read = read[0]
        return self._read


class GreedyWalk(Walk):
    """Argmax without processors: choices, comparison and count in one small array, made on the device at once."""

    def __init__(self, block: Block) -> None:
        self._block = block
        rows = [block.logits[:, index, :] for index in range(block.width)]
        sums = [log_sum_exp(row) for row in rows]
        self._logprobs = [(row - total).squeeze(0) for row, total in zip(rows, sums, strict=True)]
        proposals = mx.zeros((1, 0), mx.int32) if block.proposals is None else block.proposals
        self._walked = GreedyBlock(block.logits, proposals, mx.concatenate(sums, axis=1)).walk()
        self._read: list[int] | None = None

    def take(self, index: int) -> Token:
        if self._read is None:
            self._read = cast(list[list[int]], self._walked.tolist())[0]
        if self._read[FAULT] == index + 1:
            raise NonFiniteLogits(self._block.position + index)
        chosen = self._read[TOKENS + index]
        return Token(chosen, self._array(index), self._logprobs[index], index < self._read[ACCEPTED])

    def pending(self) -> list[mx.array]:
        return [self._walked, *self._logprobs]

    def first(self) -> mx.array:
        return self._array(0)

    def rewind(self, retained: int) -> None:
        """Nothing is drawn."""

    def _array(self, index: int) -> mx.array:
        return self._walked[0, TOKENS + index : TOKENS + index + 1].astype(mx.uint32)


class SequentialWalk(Walk):
    """A position is chosen only once the one before it is kept, in the one-token loop's order.

    For callables that may hide state: they see the calls the one-token loop makes and no other,
    at the price of one host read per token.
    """

    def __init__(self, sampling: Sampling, block: Block) -> None:
        self._sampling = sampling
        self._block = block
        self._nan = holds_nan(block.logits)
        self._choices: list[tuple[mx.array, mx.array]] = []
        self._choose_next()

    def take(self, index: int) -> Token:
        block = self._block
        token, logprobs = self._choices[index]
        facts = [token.astype(mx.int32), self._nan[0, index : index + 1].astype(mx.int32)]
        if block.proposals is not None:
            facts.append(block.proposals[0, index : index + 1])
        choice, nan, *proposal = cast(list[int], mx.concatenate(facts).tolist())
        if nan:
            raise NonFiniteLogits(block.position + index)
        accepted = [choice] == proposal
        if accepted and len(self._choices) == index + 1:
            self._choose_next()
        return Token(choice, token, logprobs.squeeze(0), accepted)

    def pending(self) -> list[mx.array]:
        return [*self._choices[0], self._nan]

    def first(self) -> mx.array:
        return self._choices[0][0]

    def rewind(self, retained: int) -> None:
        """Nothing was drawn ahead."""

    def _choose_next(self) -> None:
        self._choices.append(self._block.choose(self._sampling, len(self._choices)))


def open_walk(sampling: Sampling, block: Block) -> Walk:
    """The walk a request's callables allow."""
    if sampling.greedy and kernel_holds(block.logits.dtype):
        return GreedyWalk(block)
    return BlockWalk(sampling, block) if sampling.pure else SequentialWalk(sampling, block)
