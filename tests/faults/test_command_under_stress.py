"""Kinds of fault at the terminal: a traceback, half a file, a Ctrl-C without an answer, a closed pipe told of."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mlx_spec import SpeculativeConfig, certify, commandline, split_mtp
from mlx_spec.environment import CERTIFICATES, certificate_folder
from mlx_spec.errors import InvalidRequest
from mlx_spec.terminal import Report, ending_well, require_text
from tests.checkpoints import write_target
from tests.commandlines import run
from tests.faults.commands import Commands, Ended, hang_up, interrupt, interrupt_in_the_middle
from tests.tiny_wheel import tiny_metadata, tiny_tensors, write_wheel

pytestmark = pytest.mark.faults


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("targets") / "target", num_hidden_layers=2)


@pytest.fixture(scope="module")
def commands(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Commands]:
    with Commands(tmp_path_factory.mktemp("commands")) as commands:
        yield commands


def refused(ended: Ended) -> str:
    """The line of a refusal."""
    assert ended.code == 2, ended
    lines = ended.err.splitlines()
    assert len(lines) == 1, ended.err
    assert lines[0].startswith("error: ")
    return lines[0]


# Real runs


@pytest.mark.slow
def test_whatever_is_wrong_with_text_or_streams_is_one_line(commands: Commands, target: Path) -> None:
    model = ("--model", target, "-m", "4")
    assert "argument 2 is not UTF-8 text: 'a\\udcff'" in refused(commands.run("--prompt", b"a\xff", *model))
    assert "argument 1 is not UTF-8" in refused(commands.run(b"--model=\xff\xfe"))
    assert "argument 6 is not UTF-8" in refused(commands.run(*model, "--stop", b"\xed\xa0\x80"))
    assert "stdin cannot be read as text" in refused(commands.run("--prompt", "-", *model, stdin=b"caf\xe9"))
    assert "stdin, which is closed" in refused(commands.run("--prompt", "-", *model, stdin=None))
    assert "No space left" in refused(commands.run("--prompt", "hello", *model, stdout="/dev/full"))


@pytest.mark.slow
def test_ctrl_c_while_text_flows_leaves_the_statistics_so_far(commands: Commands, target: Path, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    ended = commands.run(
        *("--model", target, "--prompt", "hello", "-m", "-1", "--draft-model", "ngram", "--stats-json", report),
        disturb=interrupt,
    )
    assert (ended.code, ended.seconds < 2) == (130, True), ended
    assert "Traceback" not in ended.err
    assert "interrupted" in ended.err.splitlines()[-1]
    assert "tokens/s" in ended.err.splitlines()[-1]
    told = json.loads(report.read_text())
    assert told["emitted_tokens"] > 0
    assert "interrupted" in told["notes"]
    assert list(tmp_path.iterdir()) == [report]


@pytest.mark.slow
def test_ctrl_c_inside_an_evaluation_is_answered_within_two_seconds(
    commands: Commands, target: Path, tmp_path: Path
) -> None:
    report = tmp_path / "report.json"
    ended = commands.run(
        "--model", target, "--prompt", "hello", "--stats-json", report, disturb=interrupt_in_the_middle, long=True
    )
    assert (ended.code, 1 < ended.seconds < 2.5) == (130, True), ended
    assert "interrupted" in ended.err.splitlines()[-1]
    assert json.loads(report.read_text())["emitted_tokens"] == 0


@pytest.mark.slow
def test_a_reader_that_has_read_enough_ends_the_run_without_a_word(
    commands: Commands, target: Path, tmp_path: Path
) -> None:
    report = tmp_path / "report.json"
    ended = commands.run("--model", target, "--prompt", "hello", "-m", "-1", "--stats-json", report, disturb=hang_up)
    assert (ended.code, ended.err) == (141, ""), ended
    assert json.loads(report.read_text())["emitted_tokens"] > 0


# In this process


@pytest.mark.parametrize("content", [b"caf\xe9", b"\xff\xfe\x00", b"ok\xed\xa0\x80"], ids=repr)
@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])
def test_a_prompt_that_is_no_text_is_one_line(
    target: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    content: bytes,
    errors: str,
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content), encoding="utf-8", errors=errors))
    ended = run(capsys, "--model", target, "--prompt", "-", "-m", "2")
    assert (ended.code, ended.out, len(ended.lines)) == (2, "", 1), ended
    assert "stdin" in ended.err
    assert "UTF-8" in ended.err


@pytest.mark.parametrize("word", ["\udcff", "--prompt=\udcc3", "a\ud800"], ids=ascii)
def test_an_argument_that_is_no_text_is_one_line(capsys: pytest.CaptureFixture[str], word: str) -> None:
    ended = run(capsys, "--prompt", "hello", word)
    assert (ended.code, ended.out, len(ended.lines)) == (2, "", 1), ended
    assert "argument 3 is not UTF-8" in ended.err
    require_text(["--prompt", "日本語 😀", ""])


@pytest.mark.parametrize("command", [certify.main, split_mtp.main, commandline.main], ids=lambda call: call.__module__)
def test_every_command_refuses_what_is_no_text_and_answers_an_interrupt(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, command: Callable[[list[str]], int]
) -> None:
    with pytest.raises(SystemExit) as refusal:
        command(["a\udcff"])
    assert refusal.value.code == 2
    assert "argument 1 is not UTF-8" in capsys.readouterr().err

    def interrupted(*args: object, **keywords: object) -> None:
        raise KeyboardInterrupt

    for module, name in ((certify, "load_without_tokenizer"), (split_mtp, "split"), (commandline, "load")):
        monkeypatch.setattr(module, name, interrupted)
    words = ["a", "b"] if command is split_mtp.main else ["--model", "a"]
    assert command(words) == 130
    assert "Traceback" not in capsys.readouterr().err


class Stopping(io.StringIO):
    """Fails at the second piece of text."""

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.error = error
        self.pieces = 0

    def write(self, text: str) -> int:
        self.pieces += bool(text)
        if self.pieces > 2:
            raise self.error
        return super().write(text)


ENDINGS = {
    "interrupt": (KeyboardInterrupt(), 130),
    "pipe": (BrokenPipeError(32, "Broken pipe"), 141),
    "full": (OSError(28, "No space left on device"), 2),
    "encoding": (UnicodeEncodeError("ascii", "é", 0, 1, "ordinal not in range(128)"), 2),
}


@pytest.mark.parametrize("before", ["nothing", "a report", "a link to a report"])
@pytest.mark.parametrize("ending", ENDINGS)
def test_the_report_is_whole_or_as_it_was_however_a_run_ends(
    target: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    ending: str,
    before: str,
) -> None:
    error, code = ENDINGS[ending]
    report, kept = tmp_path / "report.json", tmp_path / "kept.json"
    if before != "nothing":
        kept.write_text("before")
        report.symlink_to(kept) if before.startswith("a link") else kept.rename(report)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", Stopping(error))
        ended = commandline.main(["--model", str(target), "--prompt", "hello", "-m", "20", "--stats-json", str(report)])
    assert ended == code
    told = capsys.readouterr().err
    assert "Traceback" not in told
    if code == 2:
        assert report.read_text() == "before" if before != "nothing" else not report.exists()
        assert len(told.splitlines()) == 1
    else:
        assert json.loads(report.read_text())["emitted_tokens"] > 0
    assert report.is_symlink() is before.startswith("a link")
    assert not list(tmp_path.glob(".*")), "something half written stays"


def unwritable(folder: Path) -> dict[str, Path]:
    (folder / "file").write_text("")
    (folder / "loop").symlink_to(folder / "loop")
    return {
        "below a file": folder / "file" / "report.json",
        "in no folder": folder / "none" / "report.json",
        "a folder": folder,
        "a loop": folder / "loop" / "report.json",
        "a long name": folder / ("x" * 300),
        "of the system": Path("/proc/report.json"),
    }


@pytest.mark.parametrize(
    "place", ["below a file", "in no folder", "a folder", "a loop", "a long name", "of the system"]
)
def test_a_report_that_cannot_be_written_is_told_before_anything_is_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], place: str
) -> None:
    ended = run(capsys, "--model", tmp_path / "no model", "--stats-json", unwritable(tmp_path)[place])
    assert (ended.code, ended.out, len(ended.lines)) == (2, "", 1), ended
    assert "--stats-json" in ended.err


def test_a_report_goes_into_a_pipe_or_device_as_it_is(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    reading = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    report = Report(str(tmp_path / "pipe"), "--stats-json")
    report.publish("whole")
    assert os.read(reading, 100) == b"whole"
    os.close(reading)
    assert (tmp_path / "pipe").is_fifo()


@pytest.mark.parametrize("place", ["a file", "below a file", "no folder for it"])
def test_a_cache_folder_that_cannot_be_written_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    monkeypatch.syspath_prepend(tmp_path / "site")
    write_wheel(tmp_path / "site", tiny_tensors(), tiny_metadata())
    (tmp_path / "file").write_text("")
    homes = {"a file": tmp_path / "file", "below a file": tmp_path / "file" / "home", "no folder for it": "/proc"}
    monkeypatch.setenv("HOME", str(homes[place]))
    ended = run(capsys, "--prompt", "hello", "-m", "2", "--draft-kind", "ngram")
    assert (ended.code, ended.out, len(ended.lines)) == (2, "", 1), ended
    assert "cache folder" in ended.err


@pytest.mark.parametrize("place", ["a file", "below a file", "/proc"])
def test_certificates_that_cannot_be_kept_cost_nothing(
    target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    (tmp_path / "file").write_text("")
    folders = {"a file": tmp_path / "file", "below a file": tmp_path / "file" / "more", "/proc": Path("/proc")}
    monkeypatch.setenv(CERTIFICATES, str(folders[place]))
    command = ("--model", target, "--prompt", "hello", "-m", "4", "--draft-model", "ngram", "--draft-block-size", "3")
    ended = run(capsys, *command)
    assert ended.code == 0, ended
    assert ended.out


def test_an_interrupt_while_something_is_loaded_is_one_line(
    target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*args: object, **keywords: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(commandline, "load", interrupted)
    ended = run(capsys, "--model", target, "--stats-json", tmp_path / "report.json")
    assert (ended.code, ended.out, ended.lines) == (130, "", ["interrupted before the first token"])
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_while_modules_are_read_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "mlx").mkdir()
    (tmp_path / "mlx" / "__init__.py").write_text("raise KeyboardInterrupt")
    (tmp_path / "mlx_spec.certify").write_text("import mlx_spec.certify")
    package = Path(commandline.__file__).parents[1]
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{package}"}
    for words in (["-m", "mlx_spec.generate"], ["-m", "mlx_spec.drafters"], [str(tmp_path / "mlx_spec.certify")]):
        ended = subprocess.run([sys.executable, *words], capture_output=True, text=True, env=environment, check=False)
        assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "interrupted\n")


def test_a_tilde_that_no_shell_has_read_is_the_users_home(
    target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv(CERTIFICATES, "~/certificates")
    assert certificate_folder() == tmp_path / "certificates"
    monkeypatch.setenv(CERTIFICATES, "~nobody-of-that-name/certificates")
    assert certificate_folder() == Path("~nobody-of-that-name/certificates")
    (tmp_path / "target").symlink_to(target)
    words = ("--prompt", "hello", "-m", "2")
    ended = run(capsys, "--model", "~/target", *words, "--stats-json", "~/report.json")
    assert ended.code == 0
    assert json.loads((tmp_path / "report.json").read_text())["emitted_tokens"] == 2
    assert str(tmp_path / "cache.file") in run(capsys, *words, "--prompt-cache-file", "~/cache.file").err
    assert str(tmp_path / "adapter") in run(capsys, "--model", "~/target", *words, "--adapter-path", "~/adapter").err
    (tmp_path / "settings.yaml").write_text("speculative: {speculative_method: mtp}")
    assert SpeculativeConfig.from_yaml("~/settings.yaml").is_mtp()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("")
    with pytest.raises(InvalidRequest, match=str(tmp_path / "full")):
        split_mtp.split(target, "~/full")


def test_what_was_said_at_the_end_is_said_once() -> None:
    said = []

    def work() -> int:
        raise KeyboardInterrupt

    assert ending_well(work, lambda: said.append("so far")) == 130
    assert said == ["so far"]


def test_a_checked_run_tells_both_speeds(target: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ended = run(capsys, "--model", target, "--prompt", "hello", "-m", "12", "--check")
    assert ended.code == 0
    assert "12 ids compared" in ended.lines[-1]
    for word in ("speed: ", "tokens/s against", "plainly", "times as fast"):
        assert word in ended.lines[-2]
