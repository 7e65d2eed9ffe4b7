"""The target's own choice at every position of a block, made as the one-token loop would make it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import mlx.core as mx

Sampler = Callable[[mx.array], mx.array]
LogitsProcessor = Callable[[mx.array, mx.array], mx.array]
Result = TypeVar("Result")


@dataclass(frozen=True)
class Sampling:
    """How a request turns logits into tokens.

    Attributes:
        sampler: [1, V] log-probabilities -> [1] token.
        processors: (ids seen so far, [1, V] logits) -> [1, V] logits, in order.
        pure: every callable is a function of (ids, logits, RNG) alone, so positions that turn out
            to be rejected may be chosen too. Otherwise a callable sees the one-token loop's calls only.
        draws: the sampler may advance the random state.
        greedy: the sampler is mlx-lm's argmax, and nothing processes logits before it.
    """

    sampler: Sampler
    processors: tuple[LogitsProcessor, ...] = ()
    pure: bool = True
    draws: bool = False
    greedy: bool = False

    def choose(self, logits: mx.array, ids: mx.array | None) -> tuple[mx.array, mx.array]:
        """Choose one token.

        Args:
            logits: [1, V] raw logits of one position. The array object may be re-pointed by a processor.
            ids: [n] every token up to this position; needed when there are processors.

        Returns:
            token: [1] the choice. logprobs: [1, V], in the logits' dtype.

        Cost:
            Lazy, as far as the callables are.
        """
        for processor in self.processors:
            logits = processor(ids, logits)  # type: ignore[arg-type]
        logprobs = logits - log_sum_exp(logits)
        return self.sampler(logprobs), logprobs


def log_sum_exp(logits: mx.array) -> mx.array:
    """[1, V] logits of one position -> [1, 1].

    The reduction over all axes is the one-token loop's; one over the last axis may round differently.
    """
    return mx.logsumexp(logits, keepdims=True)


def random_key() -> mx.array:
    """[2] uint32, the key the thread's random state stands at. Nothing is read.

    A handle of its own: what is written into the state later leaves it alone.
    """
    key: mx.array = mx.random.state[0][:]  # type: ignore[index]
    return key


def put_random_state(key: mx.array) -> None:
    """Make the thread's random state stand at a [2] uint32 key. Nothing is read."""
    mx.random.state[0][:] = key  # type: ignore[index]


def random_state() -> mx.array:
    """The thread's random state itself: whoever draws or seeds puts another array there."""
    state: mx.array = mx.random.state[0]  # type: ignore[index]
    return state


def rewind_random_state(key: Sequence[int]) -> None:
    """Make the thread's random state stand at a key whose two words are known on the host."""
    mx.random.seed((key[0] << 32) | key[1])


@contextmanager
def random_state_kept() -> Iterator[None]:
    """Leave the thread's random state as it is: modules of mlx draw their first weights from it. Reads nothing."""
    key = random_key()
    try:
        yield
    finally:
        put_random_state(key)


class OwnDraws:
    """A random state of a request's own, for calls into code that may draw from the thread's.

    It begins at a key that follows from the thread's at the start of the request and from the prompt, and is kept from
    call to call: the same seed repeats, two requests differ, and the thread's state is never moved.

    Cost:
        Two lazy writes of two words per call. Nothing is read.
    """

    _DOMAIN = (0x64726166, 0x74657273)
    """Parts these draws from those of the request itself, which begin at the same key."""

    def __init__(self, prompt: mx.array) -> None:
        """
        Args:
            prompt: [n] token ids.
        """
        words = prompt.astype(mx.uint32)
        place = mx.arange(1, words.size + 1, dtype=mx.uint32)
        digest = mx.stack([words.sum(), (words * place).sum()]).astype(mx.uint32)
        self._key = mx.random.split(random_key() ^ mx.array(self._DOMAIN, mx.uint32) ^ digest)[1]

    @property
    def key(self) -> mx.array:
        """[2] uint32, where the next call begins; for evaluation: what stays lazy belongs to a thread."""
        return self._key

    def settle(self) -> None:
        """Compute where it stands, so that the run may begin in another thread."""
        mx.async_eval(self._key)

    def lend(self, function: Callable[..., Result], *args: Any) -> Result:
        """Call the function with this state in the place of the thread's, which is put back however it ends."""
        kept = mx.random.state[0][:]  # type: ignore[index]
        try:
            mx.random.state[0][:] = self._key  # type: ignore[index]
            return function(*args)
        finally:
            # Without a call of Python's, at which an interrupt could come between.
            self._key = mx.random.state[0][:]  # type: ignore[index]
            mx.random.state[0][:] = kept  # type: ignore[index]


def holds_nan(logits: mx.array) -> mx.array:
    """[B, W, V] raw logits -> [B, W] bool: which positions no token can be chosen at."""
    return mx.isnan(logits).any(axis=-1)
