"""Kinds of fault in ending a thread: a process that aborts at exit, a block that ends what goes on around it."""

from __future__ import annotations

import subprocess
import sys
import threading

import mlx.core as mx
import pytest

import mlx_spec
from tests.checkpoints import ascii_tokenizer, tiny_model

pytestmark = pytest.mark.faults

PROGRAM = """
import sys, threading
import mlx.core as mx
mx.set_default_device(mx.cpu)
import mlx_spec
from tests.checkpoints import ascii_tokenizer, tiny_model
model, tokenizer = tiny_model(num_hidden_layers=1), ascii_tokenizer()

def work():
    with mlx_spec.worker_thread():
        for _ in mlx_spec.stream_generate(model, tokenizer, "Tell me", max_tokens=6, draft_model="ngram"):
            if sys.argv[1] == "left":
                return
            if sys.argv[1] == "raised":
                raise SystemExit

threads = [threading.Thread(target=work) for _ in range(3)]
for thread in threads: thread.start()
for thread in threads: thread.join()
"""


@pytest.mark.deep
@pytest.mark.parametrize("ending", ["left", "ended", "raised"])
def test_a_process_whose_threads_end_in_the_block_exits_cleanly(ending: str, thorough: bool) -> None:
    for _ in range(6 if thorough else 1):
        ended = subprocess.run([sys.executable, "-c", PROGRAM, ending], capture_output=True, text=True)
        assert (ended.returncode, ended.stderr) == (0, "")


def in_a_thread(work: object) -> list[object]:
    found: list[object] = []
    thread = threading.Thread(target=lambda: found.append(work()))  # type: ignore[operator]
    thread.start()
    thread.join()
    return found


def text() -> str:
    return mlx_spec.generate(tiny_model(num_hidden_layers=1), ascii_tokenizer(), "Tell me", max_tokens=6)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of mlx's calls at the end of a thread, as they are made."""
    made: list[str] = []
    for name in ("synchronize", "clear_streams"):

        def noted(name: str = name, call: object = getattr(mx, name)) -> None:
            made.append(name)
            call()  # type: ignore[operator]

        monkeypatch.setattr(mx, name, noted)
    return made


def test_streams_are_given_back_once_at_the_end_of_the_outermost_block(calls: list[str]) -> None:
    def work() -> str:
        with mlx_spec.worker_thread():
            with mlx_spec.worker_thread():
                first = text()
            assert "clear_streams" not in calls
            return first + text()

    assert in_a_thread(work) == [text() * 2]
    assert calls[-2:] == ["synchronize", "clear_streams"]
    assert calls.count("clear_streams") == 1


def test_streams_are_given_back_when_the_block_raises(calls: list[str]) -> None:
    def work() -> str:
        with pytest.raises(ZeroDivisionError), mlx_spec.worker_thread():
            raise ZeroDivisionError
        return "went on"

    assert in_a_thread(work) == ["went on"]
    assert calls == ["synchronize", "clear_streams"]


def test_streams_are_given_back_also_where_waiting_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []

    def fails() -> None:
        raise RuntimeError("an evaluation failed")

    monkeypatch.setattr(mx, "synchronize", fails)
    monkeypatch.setattr(mx, "clear_streams", lambda: made.append("cleared"))

    def work() -> str:
        with pytest.raises(RuntimeError, match="an evaluation failed"), mlx_spec.worker_thread():
            pass
        return "told"

    assert in_a_thread(work) == ["told"]
    assert made == ["cleared"]


def test_in_the_main_thread_nothing_is_given_back(calls: list[str]) -> None:
    with mlx_spec.worker_thread():
        first = text()
    assert "clear_streams" not in calls
    assert text() == first
