"""The functions of the public surface answer as mlx-lm's of the same names, field by field."""

from __future__ import annotations

import inspect
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import mlx_lm.generate
import pytest
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.tokenizer_utils import BPEStreamingDetokenizer, TokenizerWrapper

import mlx_spec
from mlx_spec import Statistics, generate_step, speculative_generate_step, stream_generate
from mlx_spec.cache.adopt import tokens_held
from mlx_spec.drafters import CallableDrafter, Drafter
from tests.bits import assert_same_bits
from tests.checkpoints import BYTE_VOCAB, EOS_ID, ascii_tokenizer, byte_tokenizer, tiny_model
from tests.drafters import eagle3_files
from tests.oracle import continue_plainly, run_stock
from tests.scripted import AlternatingDrafter, RightDrafter
from tests.tiny import MIXES, PROMPT, VOCAB

STOCK = sys.modules["mlx_lm.generate"]
OURS = sys.modules["mlx_spec.generate"]
"""Modules that share their name with a function of their package."""

ROOT = Path(__file__).resolve().parent.parent
TEXT = "Tell me, the sea"

BYTES = TokenizerWrapper(byte_tokenizer(), BPEStreamingDetokenizer)
BYTE_MODEL = tiny_model(vocab_size=BYTE_VOCAB, num_hidden_layers=2)
"""Nearly all of its tokens are single bytes, so characters are split over tokens, and tokens over blocks."""

ASCII = TokenizerWrapper(ascii_tokenizer(), BPEStreamingDetokenizer)
ASCII_MODEL = tiny_model()

FIELDS = ("text", "token", "prompt_tokens", "generation_tokens", "finish_reason")


def right(max_tokens: int, model: Any = BYTE_MODEL, tokenizer: Any = BYTES) -> Drafter:
    ids = [response.token for response in STOCK.stream_generate(model, tokenizer, TEXT, max_tokens=max_tokens + 8)]
    return RightDrafter(ids, BYTE_VOCAB)


DRAFTERS: dict[str, Callable[[], Drafter | str | None]] = {
    "nobody": lambda: None,
    "ngram": lambda: "ngram",
    "right": lambda: right(40),
    "wrong": lambda: CallableDrafter(lambda ids, count: [0] * count),
}


def compare(got: list[Any], want: list[Any]) -> None:
    """Responses of ours and of mlx-lm's."""
    assert [[getattr(each, name) for name in FIELDS] for each in got] == [
        [getattr(each, name) for name in FIELDS] for each in want
    ]
    for index, (mine, theirs) in enumerate(zip(got, want, strict=True)):
        assert_same_bits(mine.logprobs, theirs.logprobs, f"logprobs of response {index}")
        for name in ("prompt_tps", "generation_tps", "peak_memory"):
            assert isinstance(getattr(mine, name), float)
            assert getattr(mine, name) > 0


# stream_generate and generate


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("max_tokens", [1, 2, 40])
def test_every_response_is_mlx_lms_though_characters_are_split_over_blocks(drafter: str, max_tokens: int) -> None:
    want = list(STOCK.stream_generate(BYTE_MODEL, BYTES, TEXT, max_tokens=max_tokens))
    given = DRAFTERS[drafter]()
    width = {} if given is None else {"draft_block_size": 5}
    got = list(stream_generate(BYTE_MODEL, BYTES, TEXT, max_tokens=max_tokens, draft_model=given, **width))
    compare(got, want)
    assert got[-1].finish_reason == "length"
    assert max_tokens < 40 or any("\ufffd" in each.text or not each.text.isascii() for each in got)


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_a_text_that_ends_by_itself_ends_as_mlx_lms(drafter: str) -> None:
    """Seed 3 of the tiny model stops after a few tokens."""
    model = tiny_model(3)
    prompt = "Hello the END"
    want = list(STOCK.stream_generate(model, ASCII, prompt, max_tokens=60))
    assert (want[-1].finish_reason, want[-1].token) == ("stop", EOS_ID)
    given = CallableDrafter(lambda ids, count: [EOS_ID] * count) if drafter == "right" else DRAFTERS[drafter]()
    for limit in (60, -1):
        compare(list(stream_generate(model, ASCII, prompt, limit, given)), want)


@pytest.mark.parametrize(
    "prompt",
    [TEXT, f"<s>{TEXT}", ASCII.encode(TEXT), mx.array(ASCII.encode(TEXT)), mx.array(ASCII.encode(TEXT), mx.uint32)],
    ids=["text", "text_with_bos", "list", "array", "uint32"],
)
def test_a_prompt_may_be_text_or_ids(prompt: Any) -> None:
    want = list(STOCK.stream_generate(ASCII_MODEL, ASCII, prompt, max_tokens=9))
    compare(list(stream_generate(ASCII_MODEL, ASCII, prompt, max_tokens=9, draft_model="ngram")), want)


def test_a_tokenizer_need_not_be_wrapped() -> None:
    want = list(STOCK.stream_generate(ASCII_MODEL, ascii_tokenizer(), TEXT, max_tokens=9))
    compare(list(stream_generate(ASCII_MODEL, ascii_tokenizer(), TEXT, max_tokens=9)), want)


def test_the_whole_text_is_mlx_lms() -> None:
    want = mlx_lm.generate(BYTE_MODEL, BYTES, TEXT, max_tokens=30)
    assert mlx_spec.generate(BYTE_MODEL, BYTES, TEXT, max_tokens=30) == want
    assert mlx_spec.generate(BYTE_MODEL, BYTES, TEXT, max_tokens=30, draft_model="ngram") == want


def test_verbose_prints_the_text_and_the_statistics(capsys: pytest.CaptureFixture[str]) -> None:
    text = mlx_spec.generate(ASCII_MODEL, ASCII, TEXT, verbose=True, max_tokens=9, draft_model="ngram")
    out = capsys.readouterr().out
    assert out.startswith(f"{text}\n")
    assert "loop ngram" in out


def test_statistics_come_with_every_response_and_may_be_the_callers() -> None:
    statistics = Statistics()
    responses = list(stream_generate(BYTE_MODEL, BYTES, TEXT, 20, right(20), draft_block_size=4, statistics=statistics))
    assert all(each.speculation is statistics for each in responses)
    assert statistics.emitted_tokens == 20
    assert sum(each.from_draft for each in responses) == statistics.accepted_tokens > 10
    fresh = [list(stream_generate(BYTE_MODEL, BYTES, TEXT, 3))[-1].speculation for _ in range(2)]
    assert fresh[0] is not fresh[1]
    assert fresh[0].emitted_tokens == fresh[1].emitted_tokens == 3


def test_a_stop_string_ends_the_stream_with_reason_stop() -> None:
    whole = "".join(each.text for each in stream_generate(ASCII_MODEL, ASCII, TEXT, 40))
    stop = whole[11:14]
    for drafter in (None, "ngram", right(40, ASCII_MODEL, ASCII)):
        responses = list(stream_generate(ASCII_MODEL, ASCII, TEXT, 40, drafter, stop=[stop]))
        assert "".join(each.text for each in responses) == whole[: whole.index(stop)]
        assert [each.finish_reason for each in responses] == [None] * (len(responses) - 1) + ["stop"]


def test_further_ids_may_end_the_text() -> None:
    ids = [each.token for each in stream_generate(ASCII_MODEL, ASCII, TEXT, 20)]
    end = ids[8]
    responses = list(stream_generate(ASCII_MODEL, ASCII, TEXT, 20, "ngram", eos_token_ids=[end]))
    assert [each.token for each in responses] == ids[: ids.index(end) + 1]
    assert responses[-1].finish_reason == "stop"


# generate_step and speculative_generate_step


def test_steps_are_pairs_and_speculative_steps_triples() -> None:
    mix = MIXES["dense"]
    run = mix.oracle()
    pairs = list(generate_step(mx.array(PROMPT), mix.model(), max_tokens=12))
    drafter = AlternatingDrafter(run.ids, VOCAB)
    triples = list(speculative_generate_step(mx.array(PROMPT), mix.model(), drafter, max_tokens=12, num_draft_tokens=3))
    for index in range(12):
        token, logprobs = pairs[index]
        assert triples[index][0] == token == run.ids[index]
        assert type(token) is int
        assert_same_bits(logprobs, run.logprobs[index], "logprobs")
        assert_same_bits(triples[index][1], run.logprobs[index], "logprobs")
    came_from_draft = [each[2] for each in triples]
    assert set(map(type, came_from_draft)) == {bool}
    assert came_from_draft[:6] == [False, True, True, True, False, False]


def test_progress_is_told_as_mlx_lm_tells_it() -> None:
    model = MIXES["dense"].model()
    for length, step in ((1, 4), (2, 4), (9, 4), (12, 64)):
        told: list[list[tuple[int, int]]] = [[], []]
        prompt = mx.arange(length) + 3
        for calls, steps in zip(told, (STOCK.generate_step, generate_step), strict=True):
            keywords = {"max_tokens": 2, "prefill_step_size": step}
            list(
                steps(prompt, model, prompt_progress_callback=lambda *each, calls=calls: calls.append(each), **keywords)
            )
        assert told[1] == told[0]


@pytest.mark.parametrize("name", ["generate_step", "stream_generate", "generate"])
def test_mlx_lms_arguments_are_ours_with_the_same_defaults_in_the_same_places(name: str) -> None:
    theirs, ours = inspect.signature(getattr(STOCK, name)), inspect.signature(getattr(OURS, name))
    positional = [each.name for each in theirs.parameters.values() if each.kind is each.POSITIONAL_OR_KEYWORD]
    assert list(ours.parameters)[: len(positional)] == positional
    for each in theirs.parameters.values():
        if each.kind is not each.VAR_KEYWORD:
            assert ours.parameters[each.name].default == each.default, each.name


def test_arguments_of_mlx_lms_speculative_step_are_understood() -> None:
    theirs = inspect.signature(STOCK.speculative_generate_step).parameters
    ours = inspect.signature(generate_step).parameters
    assert set(theirs) <= set(ours)
    assert list(inspect.signature(speculative_generate_step).parameters)[:4] == list(theirs)[:4]


def test_an_unknown_argument_is_an_error_that_names_it() -> None:
    for call in (
        lambda: generate_step(mx.array(PROMPT), ASCII_MODEL, draft_width=3),
        lambda: stream_generate(ASCII_MODEL, ASCII, TEXT, draft_width=3),
        lambda: speculative_generate_step(mx.array(PROMPT), ASCII_MODEL, "ngram", draft_width=3),
    ):
        with pytest.raises(TypeError, match="draft_width"):
            call()


# A cache that was filled before


def test_a_warm_cache_is_continued_and_a_drafter_that_missed_it_says_so() -> None:
    model = eagle3_files.target().model
    first = run_stock(model, PROMPT, 6)
    warm = first.cache_after(6)
    want = continue_plainly(model, warm, [7, 8, 9], 10)
    held = tokens_held(warm)
    assert held == len(PROMPT) + 6
    statistics = Statistics()
    steps = generate_step(
        mx.array([7, 8, 9]),
        model,
        draft_model=eagle3_files.drafter(),
        max_tokens=10,
        prompt_cache=warm,
        statistics=statistics,
    )
    assert [token for token, _ in steps] == list(want.ids)
    assert f"the drafter has not seen the {held} tokens already in the cache" in statistics.notes


def test_nothing_is_said_of_a_warm_cache_where_nobody_drafts() -> None:
    warm = run_stock(ASCII_MODEL, PROMPT, 6).cache_after(6)
    statistics = Statistics()
    list(generate_step(mx.array([7]), ASCII_MODEL, max_tokens=2, prompt_cache=warm, statistics=statistics))
    assert statistics.notes == []


def test_nothing_is_said_of_a_cache_that_is_empty() -> None:
    model, statistics = eagle3_files.target().model, Statistics()
    keywords = {"draft_model": eagle3_files.drafter(), "prompt_cache": make_prompt_cache(model)}
    list(generate_step(mx.array(PROMPT), model, max_tokens=2, statistics=statistics, **keywords))
    assert not any("already in the cache" in note for note in statistics.notes)


# A limit that mlx-lm drops


def notes_about_the_limit(name: str, **keywords: Any) -> list[str]:
    statistics = Statistics()
    steps = generate_step(mx.array(PROMPT), MIXES[name].model(), max_tokens=2, statistics=statistics, **keywords)
    assert len(list(steps)) == 2
    return [note for note in statistics.notes if "max_kv_size" in note]


@pytest.mark.parametrize("drafter", [None, "ngram"])
def test_a_cache_limit_that_reaches_no_cache_is_told(drafter: str | None) -> None:
    """The model makes its own caches, and so they grow without limit, there as here."""
    for name in ("dense", "sliding", "hybrid"):
        (note,) = notes_about_the_limit(name, max_kv_size=15, draft_model=drafter)
        assert note == "max_kv_size=15 has no effect, as in mlx-lm: this model makes its own caches"
    mix = MIXES["ring_with_keep"]
    (note,) = notes_about_the_limit(mix.name, max_kv_size=14, prompt_cache=mix.new_cache())
    assert note == "max_kv_size=14 has no effect, as in mlx-lm: the prompt cache has its size already"


def test_a_cache_limit_that_is_kept_is_no_news() -> None:
    mix = MIXES["ring_with_keep"]
    assert notes_about_the_limit(mix.name, max_kv_size=15) == []
    assert notes_about_the_limit(mix.name, max_kv_size=15, prompt_cache=mix.new_cache()) == []
    assert notes_about_the_limit("dense") == []


# Names


def test_every_public_name_resolves_and_no_other_does() -> None:
    for name in mlx_spec.__all__:
        assert getattr(mlx_spec, name) is not None
    assert len(set(mlx_spec.__all__)) == len(mlx_spec.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nonesuch'"):
        _ = mlx_spec.nonesuch


ORDERS = (
    "import mlx_spec; first = mlx_spec.generate; import mlx_spec.generate",
    "import mlx_spec.generate; first = mlx_spec.generate",
    "from mlx_spec.generate import stream_generate; import mlx_spec; first = mlx_spec.generate",
    "from mlx_spec import *; first = generate; import mlx_spec",
    "import mlx_spec.commandline; first = mlx_spec.generate",
)
SCRIPT = """
import sys
import mlx.core as mx
mx.set_default_device(mx.cpu)
import mlx_lm
from tests.checkpoints import ascii_tokenizer, tiny_model
model, tokenizer = tiny_model(), ascii_tokenizer()
want = mlx_lm.generate(model, tokenizer, "sea", max_tokens=5)
for order in sys.argv[1:]:
    for name in [name for name in sys.modules if name.split(".")[0] == "mlx_spec"]:
        del sys.modules[name]
    names = {}
    exec(order, names)
    for function in (names["first"], names["mlx_spec"].generate):
        assert function(model, tokenizer, "sea", max_tokens=5) == want, order
    from mlx_spec.generate import generate_step
    assert callable(generate_step)
    print(order)
"""


@pytest.mark.slow
def test_generate_can_be_called_whether_its_module_was_imported_before_or_not() -> None:
    command = [sys.executable, "-W", "error", "-c", SCRIPT, *ORDERS]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines() == list(ORDERS)
