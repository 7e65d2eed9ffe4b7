"""What takes long tells how far it is, and can be given up there: loading, certification, reading the prompt."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Literal, NamedTuple

Stage = Literal["load", "certify", "prompt"]


class Step(NamedTuple):
    """How far something is.

    Attributes:
        stage: "load", "certify" or "prompt".
        what: the same for a person, as "certifying W = 5".
        done, total: steps; of a prompt, tokens. `total` counts what `what` speaks of.
    """

    stage: Stage
    what: str
    done: int
    total: int


Progress = Callable[[Step], None]
"""Called by whoever works, in its thread. What it raises ends the work there and comes out of the call."""

_listener: ContextVar[Progress | None] = ContextVar("mlx_spec_progress", default=None)


class _Stopped(BaseException):
    """Carries what a listener raised past those who try things and take what these raise for an answer."""

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.error = error


@contextmanager
def telling_progress(listener: Progress | None) -> Iterator[None]:
    """Tell a listener of what is done inside, in this context. None leaves whoever listens already."""
    if listener is None:
        yield
        return
    token = _listener.set(listener)
    try:
        yield
    except _Stopped as stopped:
        raise stopped.error from None
    finally:
        _listener.reset(token)


def tell(stage: Stage, what: str, done: int, total: int) -> None:
    """Tell whoever listens."""
    listener = _listener.get()
    if listener is None:
        return
    try:
        listener(Step(stage, what, done, total))
    except BaseException as error:  # noqa: BLE001  it is raised again where the work began
        raise _Stopped(error) from None


def prompt_listener(
    progress: Progress | None, callback: Callable[[int, int], None] | None
) -> Callable[[int, int], None]:
    """One listener for both, or for whoever there is."""

    def told(processed: int, total: int) -> None:
        if progress is not None:
            progress(Step("prompt", "reading the prompt", processed, total))
        if callback is not None:
            callback(processed, total)

    return told
