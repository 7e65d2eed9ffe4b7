"""Text streams out up to a stop string and not a character further, however tokens cut it into pieces."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from mlx_lm.tokenizer_utils import BPEStreamingDetokenizer, NaiveStreamingDetokenizer, TokenizerWrapper

from mlx_spec.errors import InvalidRequest
from mlx_spec.stops import TextStream
from tests.checkpoints import byte_tokenizer

TOKENIZER = byte_tokenizer()
WRAPPED = {
    "bpe": TokenizerWrapper(TOKENIZER, BPEStreamingDetokenizer),
    "naive": TokenizerWrapper(TOKENIZER, NaiveStreamingDetokenizer),
}

LETTERS = "aabENDé€😀 \n"
TEXT = st.text(LETTERS, max_size=30)
STOPS = st.lists(st.text(LETTERS, min_size=1, max_size=5), max_size=3)
BYTES = st.binary(max_size=24)


def ids_of_text(text: str) -> list[int]:
    return list(TOKENIZER.encode(text, add_special_tokens=False))


def ids_of_bytes(raw: bytes) -> list[int]:
    """One id per byte, valid UTF-8 or not."""
    return [TOKENIZER.convert_tokens_to_ids(_BYTE_LETTERS[byte]) for byte in raw]


def _byte_letters() -> list[str]:
    """The letter that stands for each byte in a byte-level vocabulary."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in shown]
    letters = {byte: chr(byte) for byte in shown} | {byte: chr(256 + i) for i, byte in enumerate(hidden)}
    return [letters[byte] for byte in range(256)]


_BYTE_LETTERS = _byte_letters()


def fresh(kind: str) -> Any:
    return WRAPPED[kind].detokenizer


def streamed(kind: str, ids: Sequence[int], stop: Sequence[str]) -> tuple[str, bool, int]:
    """All segments joined, whether a stop string ended it, and how many tokens were read."""
    stream = TextStream(fresh(kind), stop)
    pieces = []
    for token in ids:
        stopped = stream.feed(token)
        pieces.append(stream.segment)
        assert stopped == stream.stopped
        if stopped:
            break
    count = len(pieces)
    stream.finish()
    pieces.append(stream.segment)
    return "".join(pieces), stream.stopped, count


def expected(kind: str, ids: Sequence[int], stop: Sequence[str]) -> tuple[str, bool, int]:
    """The same by searching the whole decoded text after every token."""
    detokenizer = fresh(kind)
    for count, token in enumerate(ids, start=1):
        detokenizer.add_token(token)
        text = detokenizer.text
        found = [text.index(item) for item in stop if item in text]
        if found:
            return text[: min(found)], True, count
    detokenizer.finalize()
    found = [detokenizer.text.index(item) for item in stop if item in detokenizer.text]
    return detokenizer.text[: min(found, default=None)], bool(found), len(ids)


@pytest.mark.parametrize("kind", WRAPPED)
@given(text=TEXT, stop=STOPS)
@example(text="one EEND", stop=["END"])
@example(text="aé€b", stop=["€"])
@example(text="aé€b", stop=["é€"])
@example(text="a😀b", stop=["😀b"])
@example(text="aENaEND", stop=["ENa", "END"])
def test_the_stream_is_the_text_up_to_the_first_stop_string(kind: str, text: str, stop: list[str]) -> None:
    assert streamed(kind, ids_of_text(text), stop) == expected(kind, ids_of_text(text), stop)


@pytest.mark.parametrize("kind", WRAPPED)
@given(raw=BYTES, stop=STOPS)
@example(raw=b"a\xc3", stop=["\ufffd"])
@example(raw=b"\xe2\x82\xac\xe2\x82", stop=["€"])
def test_bytes_that_are_no_text_stream_as_the_detokenizer_shows_them(kind: str, raw: bytes, stop: list[str]) -> None:
    assert streamed(kind, ids_of_bytes(raw), stop) == expected(kind, ids_of_bytes(raw), stop)


@pytest.mark.parametrize("kind", WRAPPED)
@given(text=TEXT)
def test_without_stop_strings_every_segment_is_the_detokenizers(kind: str, text: str) -> None:
    ids = ids_of_text(text)
    stream, detokenizer = TextStream(fresh(kind)), fresh(kind)
    for token in ids:
        assert not stream.feed(token)
        detokenizer.add_token(token)
        assert stream.segment == detokenizer.last_segment
    stream.finish()
    detokenizer.finalize()
    assert stream.segment == detokenizer.last_segment


@pytest.mark.parametrize("kind", WRAPPED)
@given(text=TEXT, stop=STOPS.filter(bool))
def test_exactly_the_longest_tail_that_may_become_a_stop_string_is_held_back(
    kind: str, text: str, stop: list[str]
) -> None:
    stream, detokenizer = TextStream(fresh(kind), stop), fresh(kind)
    released = ""
    for token in ids_of_text(text):
        detokenizer.add_token(token)
        if stream.feed(token):
            break
        released += stream.segment
        shown = detokenizer.text
        tails = [shown[start:] for start in range(len(shown))]
        held = next((tail for tail in tails if any(item.startswith(tail) for item in stop)), "")
        assert released + held == shown


@pytest.mark.parametrize(
    ("text", "stop", "shown", "tokens"),
    [
        ("the END and more", ["END"], "the ", 3),
        ("hello, END", ["o,"], "hell", 5),
        ("cafe", ["fe"], "ca", 4),
        ("café crème", ["é"], "caf", 4),
        ("12€ and", ["2€"], "1", 4),
        ("😀😀!", ["😀😀"], "", 8),
        ("ENEND", ["END"], "EN", 2),
        ("abc", ["b", "abc"], "a", 2),
        ("xEND", ["ND", "E"], "x", 2),
        ("EN", ["END"], "EN", 1),
    ],
)
def test_a_stop_string_ends_the_text_with_the_token_that_completes_it(
    text: str, stop: list[str], shown: str, tokens: int
) -> None:
    got, stopped, count = streamed("bpe", ids_of_text(text), stop)
    assert (got, count) == (shown, tokens)
    assert stopped == any(item in text for item in stop)


def test_a_tail_that_was_held_back_comes_out_at_the_end_of_the_text() -> None:
    stream = TextStream(fresh("bpe"), ["aNb"])
    segments = []
    for token in ids_of_text("xaN"):
        stream.feed(token)
        segments.append(stream.segment)
    assert segments == ["x", "", ""]
    stream.finish()
    assert (stream.segment, stream.stopped) == ("aN", False)


def test_a_tail_that_turns_out_harmless_comes_out_with_the_token_that_shows_it() -> None:
    stream = TextStream(fresh("bpe"), ["aab"])
    segments = []
    for token in ids_of_text("aaab"):
        stream.feed(token)
        segments.append(stream.segment)
    assert segments == ["", "", "a", ""]
    assert stream.stopped


def test_a_stop_string_that_ends_with_the_last_held_bytes_is_seen_at_the_end() -> None:
    """Bytes that never became a character are shown when the text ends."""
    stream = TextStream(fresh("bpe"), ["\ufffd"])
    assert not stream.feed(ids_of_bytes(b"a")[0])
    assert not stream.feed(ids_of_bytes(b"\xe2")[0])
    assert stream.segment == ""
    stream.finish()
    assert (stream.segment, stream.stopped) == ("", True)


def test_nothing_comes_out_after_a_stop_string() -> None:
    stream = TextStream(fresh("bpe"), ["b"])
    for token in ids_of_text("abaa"):
        stream.feed(token)
    assert (stream.segment, stream.stopped) == ("", True)
    stream.finish()
    assert stream.segment == ""


@pytest.mark.parametrize("stop", ["END", [""], ["a", ""], [7], [None], [b"END"]], ids=repr)
def test_stops_are_a_list_of_strings_with_something_in_them(stop: Any) -> None:
    with pytest.raises(InvalidRequest, match="list of non-empty strings"):
        TextStream(fresh("bpe"), stop)


def test_two_streams_on_one_tokenizer_share_nothing() -> None:
    first, second = TextStream(fresh("bpe"), ["b"]), TextStream(fresh("bpe"), ["b"])
    first.feed(ids_of_text("a")[0])
    second.feed(ids_of_text("x")[0])
    assert (first.segment, second.segment) == ("a", "x")
