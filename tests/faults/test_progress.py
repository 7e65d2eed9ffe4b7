"""Kinds of fault in waiting: what takes long and says nothing, cannot be given up, or takes giving up for an answer."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

import mlx_spec
from mlx_spec.environment import CERTIFICATES
from mlx_spec.verify.record import forget
from tests.checkpoints import ascii_tokenizer, tiny_model, write_target
from tests.commandlines import run
from tests.rounds.runs import record_stock
from tests.same_cache import assert_same_cache
from tests.tiny import MIXES, PROMPT

pytestmark = pytest.mark.faults

WIDTH = 3


class GivenUp(Exception):
    """What a caller raises."""


def stages(steps: list[mlx_spec.Step]) -> list[str]:
    """Each once, in their order."""
    return list(dict.fromkeys(step.stage for step in steps))


def test_one_callback_is_told_of_certification_and_of_the_prompt() -> None:
    model, steps, plain = tiny_model(num_hidden_layers=2), [], []
    keywords = {"max_tokens": 4, "draft_model": "ngram", "draft_block_size": WIDTH, "prefill_step_size": 4}
    responses = mlx_spec.stream_generate(
        model,
        ascii_tokenizer(),
        "Tell me, the sea",
        progress=steps.append,
        prompt_progress_callback=lambda *counted: plain.append(counted),
        **keywords,
    )
    assert {step.what for step in steps if step.stage == "certify"} == {f"certifying W = {WIDTH}"}
    assert len(list(responses)) == 4
    assert stages(steps) == ["load", "certify", "prompt"]
    assert all(0 <= step.done <= step.total for step in steps)
    read = [(step.done, step.total) for step in steps if step.stage == "prompt"]
    assert read == plain
    assert len(read) > 3, "a prompt of several chunks is told chunk by chunk"
    again: list[mlx_spec.Step] = []
    list(mlx_spec.stream_generate(model, ascii_tokenizer(), "Tell me", progress=again.append, **keywords))
    assert stages(again) == ["load", "prompt"], "what is known is not found out again"


def test_loading_tells_its_steps_and_can_be_given_up(tmp_path: Path) -> None:
    folder, steps = write_target(tmp_path / "target", num_hidden_layers=1), []
    mlx_spec.load(folder, progress=steps.append)
    assert [step.stage for step in steps] == ["load"] * 4
    assert [step.done for step in steps] == [0, 1, 2, 3]
    for stop in range(4):

        def give_up(step: mlx_spec.Step, stop: int = stop) -> None:
            if step.done == stop:
                raise GivenUp

        with pytest.raises(GivenUp):
            mlx_spec.load(folder, progress=give_up)


MEANT = [GivenUp("enough"), ValueError("enough"), TypeError("enough"), RuntimeError("enough"), KeyboardInterrupt()]
"""Some of them a model may raise on a block, which is then stepped through."""


@pytest.mark.part(3)
@pytest.mark.parametrize("error", MEANT, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("at", [0, 1, -1], ids=["first step", "second step", "last step"])
def test_certification_can_be_given_up_at_any_step_and_is_taken_up_again(at: int, error: BaseException) -> None:
    """What the callback raises comes out as it is, and never counts as something the model said."""
    mix = MIXES["dense"]
    model = mix.model()
    forget(model)
    counted: list[mlx_spec.Step] = []
    request = {"draft_model": "ngram", "draft_block_size": WIDTH, "max_tokens": 6}
    mlx_spec.generate_step(mx.array(PROMPT), model, progress=counted.append, **request)
    steps = len([step for step in counted if step.stage == "certify"])
    assert steps > 3
    forget(model)
    seen = []

    def give_up(step: mlx_spec.Step) -> None:
        if step.stage == "certify":
            seen.append(step)
            if len(seen) == (at if at >= 0 else steps + at) + 1:
                raise error

    cache = mix.new_cache()
    with pytest.raises(type(error)) as raised:
        mlx_spec.generate_step(mx.array(PROMPT), model, prompt_cache=cache, progress=give_up, **request)
    assert raised.value is error
    assert_same_cache(cache, mix.new_cache())
    statistics = mlx_spec.Statistics()
    found = mlx_spec.generate_step(
        mx.array(PROMPT), model, prompt_cache=cache, statistics=statistics, progress=lambda step: None, **request
    )
    assert [token for token, _ in found] == list(record_stock(mix, 6, ()).ids)
    assert statistics.notes == []
    assert statistics.verify_route.startswith("block")


def test_what_was_found_before_giving_up_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CERTIFICATES, str(tmp_path))
    model = tiny_model(num_hidden_layers=1)
    seen: list[mlx_spec.Step] = []

    def give_up(step: mlx_spec.Step) -> None:
        seen.append(step)
        if step.stage == "certify" and step.done == 2:
            raise GivenUp

    request: dict[str, Any] = {"draft_model": "ngram", "draft_block_size": WIDTH}
    with pytest.raises(GivenUp):
        mlx_spec.generate_step(mx.array(PROMPT), model, progress=give_up, **request)
    assert len(list(tmp_path.iterdir())) == 1
    forget(model)
    again: list[mlx_spec.Step] = []
    mlx_spec.generate_step(mx.array(PROMPT), model, progress=again.append, **request)
    assert next(step.done for step in again if step.stage == "certify") == 2, "the first two ops are known"


@pytest.mark.parametrize("stop", [0, 4, 7])
def test_reading_the_prompt_can_be_given_up_by_the_same_callback(stop: int) -> None:
    mix = MIXES["dense"]

    def give_up(step: mlx_spec.Step) -> None:
        if step.stage == "prompt" and step.done == stop:
            raise GivenUp

    cache = mix.new_cache()
    steps = mlx_spec.generate_step(
        mx.array(PROMPT), mix.model(), prompt_cache=cache, prefill_step_size=4, progress=give_up
    )
    with pytest.raises(GivenUp):
        list(steps)
    assert cache[0].offset == min(stop, len(PROMPT))


def test_listeners_of_two_threads_hear_of_their_own_work_alone() -> None:
    heard: dict[int, set[str]] = {2: set(), 4: set()}

    def work(width: int) -> None:
        with mlx_spec.worker_thread():
            steps = mlx_spec.generate_step(
                mx.array(PROMPT),
                tiny_model(num_hidden_layers=1, seed=width),
                draft_model="ngram",
                draft_block_size=width,
                max_tokens=2,
                progress=lambda step: heard[width].add(step.what) if step.stage == "certify" else None,
            )
            assert len(list(steps)) == 2

    threads = [threading.Thread(target=work, args=(width,)) for width in heard]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert heard == {width: {f"certifying W = {width}"} for width in heard}


# The command


def test_without_a_terminal_the_command_says_in_a_line_what_is_waited_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = write_target(tmp_path / "target", num_hidden_layers=1)
    flags = ("--prompt", "hello", "-m", "3", "--draft-model", "ngram", "--draft-block-size", "5")
    ended = run(capsys, "--model", target, *flags)
    assert ended.err.splitlines()[0] == "certifying W = 5 ..."
    assert ended.err.count("certifying") == 1
    assert run(capsys, "--model", target, *flags, "--verbose", "False").err == ""
    assert "certifying" not in ended.out


def test_on_a_terminal_the_bar_says_what_is_waited_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    target = write_target(tmp_path / "target", num_hidden_layers=1)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    flags = ("--prompt", "hello", "-m", "3", "--draft-model", "ngram", "--draft-block-size", "5")
    ended = run(capsys, "--model", target, *flags)
    assert ended.code == 0
    places = [ended.err.find(words) for words in ("loading the model", "certifying W = 5", "reading the prompt")]
    assert places == sorted(places)
    assert -1 not in places
