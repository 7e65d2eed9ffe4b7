"""The command prints mlx-lm's text to stdout and nothing else there, and says on stderr what it did."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlx_spec import commandline
from tests.checkpoints import ASCII, WIDE, write_target
from tests.commandlines import Outcome, mlx_lm_text, run
from tests.drafters.eagle3_files import FLAT, write

# The fixture is so small that no format fits all of its matrices.
pytestmark = pytest.mark.filterwarnings("ignore:.*not quantized, their rows are no whole groups")

ROOT = Path(__file__).resolve().parent.parent
PROMPT = "Tell me about the sea, the sea and the sea."


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("targets") / "narrow")


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("targets") / "wide", **WIDE)


def same_text(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, common: tuple[Any, ...], ours: tuple[Any, ...]
) -> Outcome:
    """Run both commands; mlx-lm's gets the common arguments alone."""
    want = mlx_lm_text(capsys, monkeypatch, *common)
    outcome = run(capsys, *common, *ours)
    assert outcome.code == 0, outcome.err
    assert outcome.out == want
    return outcome


# The text

PLAIN_FLAGS: dict[str, tuple[Any, ...]] = {
    "nothing": (),
    "prompt_as_it_is": ("--ignore-chat-template",),
    "system_prompt": ("--system-prompt", "You are a fish."),
    "prefilled": ("--prefill-response", "The sea"),
    "template_config": ("--chat-template-config", '{"extra": "be brief"}'),
    "default_template": ("--use-default-chat-template",),
    "escapes": ("--prompt", r"one\ntwo\tthree"),
    "chunks": ("--prefill-step-size", "7"),
}


@pytest.mark.part(3)
@pytest.mark.slow
@pytest.mark.parametrize("flags", PLAIN_FLAGS.values(), ids=PLAIN_FLAGS.keys())
def test_the_text_is_mlx_lms(
    target: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, flags: tuple[Any, ...]
) -> None:
    common = ("--model", target, "--prompt", PROMPT, "-m", "24", *flags)
    same_text(capsys, monkeypatch, common, ("--draft-model", "ngram", "--draft-block-size", "4"))


@pytest.mark.parametrize(
    "flags",
    [
        ("--max-kv-size", "24"),
        ("--kv-bits", "8", "--kv-group-size", "32", "--quantized-kv-start", "0"),
        ("--kv-bits", "4", "--kv-group-size", "32", "--quantized-kv-start", "66"),
    ],
    ids=["ring", "quantized", "quantized_later"],
)
@pytest.mark.parametrize("draft", [(), ("--draft-model", "ngram", "--draft-block-size", "4")], ids=["plain", "ngram"])
def test_the_text_is_mlx_lms_whatever_the_cache(
    wide: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    flags: tuple[Any, ...],
    draft: tuple[Any, ...],
) -> None:
    same_text(capsys, monkeypatch, ("--model", wide, "--prompt", PROMPT, "-m", "24", *flags), draft)


DRAFT_FLAGS: dict[str, tuple[Any, ...]] = {
    "plain": (),
    "eagle3": ("--draft-model", FLAT),
    "eagle3_named": ("--draft-model", FLAT, "--draft-kind", "eagle3", "--num-draft-tokens", "4"),
    "eagle3_quantized": ("--draft-model", FLAT, "--draft-quantize", "4,32"),
    "ngram_by_kind": ("--draft-kind", "ngram"),
    "fast": ("--draft-model", "ngram", "--verify", "fast"),
}


@pytest.mark.part(3)
@pytest.mark.slow
@pytest.mark.parametrize("draft", DRAFT_FLAGS.values(), ids=DRAFT_FLAGS.keys())
def test_no_drafter_changes_the_text(
    target: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, draft: tuple[Any, ...]
) -> None:
    outcome = same_text(capsys, monkeypatch, ("--model", target, "--prompt", PROMPT, "-m", "24"), draft)
    assert ("loop plain" in outcome.err) == (draft == ())


@pytest.mark.slow
@pytest.mark.parametrize("draft", [DRAFT_FLAGS["plain"], DRAFT_FLAGS["eagle3"]], ids=["plain", "eagle3"])
def test_a_seed_gives_mlx_lms_text(
    target: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, draft: tuple[Any, ...]
) -> None:
    sampling = ("--temp", "0.8", "--top-p", "0.9", "--seed", "7")
    same_text(capsys, monkeypatch, ("--model", target, "--prompt", PROMPT, "-m", "16", *sampling), draft)


@pytest.mark.slow
def test_a_seed_gives_the_same_text_with_and_without_speculation(
    target: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sampling = ("--temp", "0.9", "--top-k", "20", "--min-p", "0.01", "--xtc-probability", "0.2", "--seed", "11")
    common = ("--model", target, "--prompt", PROMPT, "-m", "16", *sampling)
    texts = {run(capsys, *common, *draft).out for draft in DRAFT_FLAGS.values()}
    assert len(texts) == 1
    assert run(capsys, *common[:-1], "12").out not in texts


@pytest.mark.slow
@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ("4", {"group_size": 64, "bits": 4, "mode": "affine"}),
        ("8,32", {"group_size": 32, "bits": 8, "mode": "affine"}),
        ("mxfp4", {"group_size": 32, "bits": 4, "mode": "mxfp4"}),
    ],
)
def test_the_drafter_is_loaded_in_the_format_asked_for(
    target: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, given: str, wanted: object
) -> None:
    seen = []

    def load_drafter(*args: Any, **keywords: Any) -> Any:
        seen.append(keywords.pop("quantize"))
        return original(*args, **keywords)

    original = commandline.load_drafter
    monkeypatch.setattr(commandline, "load_drafter", load_drafter)
    flags = ("--model", target, "--prompt", PROMPT, "-m", "4", "--draft-model", FLAT)
    assert run(capsys, *flags, "--draft-quantize", given).code == 0
    assert run(capsys, *flags).code == 0
    assert seen == [wanted, None]


@pytest.mark.slow
def test_further_end_tokens_end_the_text_as_they_do_in_mlx_lm(
    target: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    common = ("--model", target, "--prompt", PROMPT, "-m", "24")
    whole = run(capsys, *common).out
    end = whole[9]
    assert not end.isdigit(), "a number is taken for an id"
    for flags in (("never", end), (str(3 + ASCII.index(end)),)):
        outcome = same_text(capsys, monkeypatch, (*common, "--extra-eos-token", *flags), ("--draft-model", "ngram"))
        assert outcome.out == whole[: whole.index(end)] + "\n"
        assert ("'never' is no token of this tokenizer" in outcome.err) == ("never" in flags)


def test_the_prompt_can_come_from_stdin(
    target: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    want = run(capsys, "--model", target, "--prompt", PROMPT, "-m", "9").out
    monkeypatch.setattr(sys, "stdin", io.StringIO(PROMPT))
    assert run(capsys, "--model", target, "--prompt", "-", "-m", "9").out == want


@pytest.mark.slow
def test_a_stop_string_ends_the_text_before_it(target: Path, capsys: pytest.CaptureFixture[str]) -> None:
    common = ("--model", target, "--prompt", PROMPT, "-m", "24", "--draft-model", "ngram")
    whole = run(capsys, *common).out
    stop = whole[7:10]
    outcome = run(capsys, *common, "--stop", "never to be seen", stop)
    assert outcome.out == whole[: whole.index(stop)] + "\n"


# What is said


@pytest.mark.slow
def test_one_statistics_line_goes_to_stderr(target: Path, capsys: pytest.CaptureFixture[str]) -> None:
    outcome = run(capsys, "--model", target, "--prompt", PROMPT, "-m", "12", "--draft-model", FLAT)
    (line,) = outcome.lines
    parts = line.split(" | ")
    assert parts[:3] == [f"drafter {FLAT.name}", "loop eagle3", "verify block"]
    assert parts[3] == "width fixed 3 (the drafter's default)"
    for part in ("rounds ", "proposed ", "accepted ", "draft ", "verify ", "commit "):
        assert any(each.startswith(part) for each in parts), part
    assert any(part.endswith(" tokens/round") for part in parts)
    assert any(part.endswith(" tokens/s") for part in parts)
    assert "drafter" not in outcome.out


@pytest.mark.parametrize("word", ["False", "false", "F", "f"])
def test_without_verbose_the_text_is_all(target: Path, capsys: pytest.CaptureFixture[str], word: str) -> None:
    common = ("--model", target, "--prompt", PROMPT, "-m", "12")
    loud, quiet = run(capsys, *common), run(capsys, *common, "--verbose", word)
    assert (quiet.code, quiet.out, quiet.err) == (0, loud.out, "")


def test_a_fallback_is_told_in_a_sentence(wide: Path, capsys: pytest.CaptureFixture[str]) -> None:
    common = ("--model", wide, "--prompt", PROMPT, "-m", "12", "--draft-model", "ngram")
    narrow = run(capsys, *common, "--draft-block-size", "1")
    assert "loop plain" in narrow.err
    assert "leaves no room for proposals, so ngram is idle" in narrow.err
    fast = run(capsys, *common, "--verify", "fast")
    assert "may differ from plain decoding" in fast.err


@pytest.mark.slow
def test_statistics_as_json_agree_with_the_line_and_the_text(
    target: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "stats.json"
    common = ("--model", target, "--prompt", PROMPT, "-m", "17", "--draft-model", "ngram", "--stats-json", file)
    outcome = run(capsys, *common)
    facts = json.loads(file.read_text())
    assert facts["emitted_tokens"] == 17
    assert facts["rounds"] + facts["accepted_tokens"] == 17
    assert facts["proposed_tokens"] >= facts["accepted_tokens"] == sum(facts["accepted_by_depth"])
    for part in (
        f"drafter {facts['drafter']}",
        f"loop {facts['loop']}",
        f"verify {facts['verify_route']}",
        f"width {facts['width_policy']}",
        f"rounds {facts['rounds']}",
        f"proposed {facts['proposed_tokens']}",
        f"accepted {facts['accepted_tokens']}",
        f"{facts['tokens_per_round']:.2f} tokens/round",
        f"{facts['tokens_per_second']:.2f} tokens/s",
    ):
        assert f"{part} |" in f"{outcome.lines[0]} |", part
    quiet = run(capsys, *common, "--verbose", "False")
    assert (quiet.out, quiet.err) == (outcome.out, "")
    assert json.loads(file.read_text())["rounds"] == facts["rounds"]


@pytest.mark.filterwarnings("always")
def test_a_warning_is_one_line_and_the_run_goes_on(
    target: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folder = write(tmp_path / "odd", edit_config=lambda config: config.update(favourite_colour="blue"))
    outcome = run(capsys, "--model", target, "--prompt", PROMPT, "-m", "5", "--draft-model", folder)
    warning, line = outcome.lines
    assert outcome.code == 0
    assert warning.startswith("warning: ")
    assert "favourite_colour" in warning
    assert line.startswith("drafter odd")


@pytest.mark.filterwarnings("always")
def test_a_kind_that_contradicts_the_checkpoint_is_overridden_with_a_warning(
    target: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    outcome = run(
        capsys, "--model", target, "--prompt", PROMPT, "-m", "5", "--draft-model", FLAT, "--draft-kind", "ngram"
    )
    assert outcome.lines[0].startswith("warning: drafter kind 'ngram' was asked for, but the checkpoint is 'eagle3'")
    assert "loop eagle3" in outcome.lines[1]


@pytest.mark.slow
def test_reading_a_long_prompt_shows_progress_on_a_terminal_and_not_on_stdout(
    target: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    common = ("--model", target, "--prompt", PROMPT * 3, "-m", "5", "--prefill-step-size", "5")
    plain = run(capsys, *common)
    assert "reading the prompt" not in plain.err
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    shown = run(capsys, *common)
    assert "reading the prompt" in shown.err
    assert shown.out == plain.out
    assert run(capsys, *common, "--verbose", "False").err == ""


@pytest.mark.slow
def test_without_a_model_the_demo_pair_runs(
    target: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commandline, "demo_target_path", lambda progress: target)
    monkeypatch.setattr(commandline, "demo_drafter_path", lambda: FLAT)
    want = run(capsys, "--model", target, "--prompt", PROMPT, "-m", "6").out
    for flags, loop in (((), "eagle3"), (("--draft-kind", "ngram"), "ngram"), (("--draft-model", "ngram"), "ngram")):
        outcome = run(capsys, "--prompt", PROMPT, "-m", "6", *flags)
        assert outcome.out == want
        assert f"loop {loop}" in outcome.err


# --check


@pytest.mark.part(3)
@pytest.mark.slow
@pytest.mark.parametrize("draft", DRAFT_FLAGS.values(), ids=DRAFT_FLAGS.keys())
@pytest.mark.parametrize("sampling", [(), ("--temp", "0.7", "--seed", "5")], ids=["greedy", "sampled"])
def test_check_says_how_many_ids_are_equal(
    target: Path, capsys: pytest.CaptureFixture[str], draft: tuple[Any, ...], sampling: tuple[Any, ...]
) -> None:
    outcome = run(capsys, "--model", target, "--prompt", PROMPT, "-m", "14", "--check", *sampling, *draft)
    assert outcome.code == 0
    assert outcome.lines[-1] == "check: 14 ids compared with mlx-lm's one-token loop, all equal"
    assert outcome.lines[-2].startswith("speed: ")


@pytest.mark.slow
@pytest.mark.parametrize("flags", [("--max-kv-size", "20"), ("--kv-bits", "8", "--kv-group-size", "32")], ids=str)
def test_check_decodes_with_the_same_cache(
    wide: Path, capsys: pytest.CaptureFixture[str], flags: tuple[Any, ...]
) -> None:
    outcome = run(capsys, "--model", wide, "--prompt", PROMPT, "-m", "14", "--check", "--draft-model", "ngram", *flags)
    assert (outcome.code, outcome.lines[-1][:16]) == (0, "check: 14 ids co")


@pytest.mark.slow
def test_check_counts_the_token_that_ends_the_text(target: Path, capsys: pytest.CaptureFixture[str]) -> None:
    common = ("--model", target, "--prompt", PROMPT, "-m", "24")
    end = run(capsys, *common).out[9]
    assert not end.isdigit()
    outcome = run(capsys, *common, "--extra-eos-token", end, "--check")
    assert outcome.lines[-1].startswith(f"check: {outcome.out.index(chr(10)) + 1} ids")


@pytest.mark.parametrize("position", [0, 3, 8])
def test_check_fails_where_the_ids_differ_and_says_where(
    target: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, position: int
) -> None:
    stock = commandline.plain_generate_step
    told: list[tuple[int, int]] = []

    def differing(*args: Any, **keywords: Any) -> Iterator[tuple[int, mx.array]]:
        for index, (token, logprobs) in enumerate(stock(*args, **keywords)):
            other = (token + 1) % 96
            if index == position:
                told.append((token, other))
            yield (other if index == position else token), logprobs

    monkeypatch.setattr(commandline, "plain_generate_step", differing)
    outcome = run(capsys, "--model", target, "--prompt", PROMPT, "-m", "9", "--check", "--draft-model", "ngram")
    got, want = told[0]
    assert outcome.code == 1
    assert outcome.lines[-1].startswith(f"check: id {position} is {got}, plain decoding gives {want}; ")
    assert outcome.lines[-1].endswith(" apart")


# --prompt-cache-file


@pytest.mark.part(2)
@pytest.mark.slow
@pytest.mark.parametrize("draft", [(), ("--draft-model", "ngram"), ("--draft-model", FLAT)], ids=["", "ngram", "eagle"])
def test_a_saved_prompt_is_continued_as_mlx_lm_does(
    target: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    draft: tuple[Any, ...],
) -> None:
    file = tmp_path / "prompt.safetensors"
    mlx_lm_text(
        capsys,
        monkeypatch,
        *("--model", target, "--prompt", "Once upon a time", "--prompt-cache-file", file),
        command="cache_prompt",
    )
    outcome = same_text(
        capsys, monkeypatch, ("--prompt", " there was the sea", "-m", "14", "--prompt-cache-file", file), draft
    )
    assert ("has not seen" in outcome.err) == bool(draft)
    checked = run(capsys, "--prompt", " there", "-m", "9", "--prompt-cache-file", file, "--check", *draft)
    assert (checked.code, checked.lines[-1][:15]) == (0, "check: 9 ids co")


def test_a_cache_limit_that_reaches_no_cache_is_in_the_line_of_statistics(
    target: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    outcome = run(capsys, "--model", target, "--prompt", PROMPT, "-m", "4", "--max-kv-size", "8")
    assert outcome.code == 0
    assert "max_kv_size=8 has no effect, as in mlx-lm: this model makes its own caches" in outcome.lines[-1]


# In a process of its own


def in_a_process(*argv: Any, text: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mlx_spec.generate", *map(str, argv)]
    return subprocess.run(command, input=text, capture_output=True, text=True, cwd=ROOT, timeout=120, check=False)


@pytest.mark.slow
def test_the_command_itself_prints_the_text_and_exits_0(
    target: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    flags = ("--model", target, "-m", "9", "--draft-model", FLAT)
    want = run(capsys, *flags, "--prompt", PROMPT)
    file = tmp_path / "stats.json"
    ended = in_a_process(*flags, "--prompt", "-", "--check", "--stats-json", file, text=PROMPT)
    assert (ended.returncode, ended.stdout) == (0, want.out), ended.stderr
    assert ended.stderr.splitlines()[-1].startswith("check: 9 ids compared")
    assert json.loads(file.read_text())["loop"] == "eagle3"


@pytest.mark.slow
def test_the_command_itself_refuses_in_one_line_and_exits_2() -> None:
    ended = in_a_process("--model", "/no/such/folder", "--prompt", "hello")
    assert (ended.returncode, ended.stdout) == (2, "")
    (line,) = ended.stderr.splitlines()
    assert line.startswith("error: ")
    assert "/no/such/folder" in line
