"""Kinds of fault in what is kept on disk: lost among writers, files edited or endless, a user without a home."""

from __future__ import annotations

import fcntl
import json
import os
import pwd
import subprocess
import sys
import time
from pathlib import Path

import pytest
from mlx_lm.models import llama

import mlx_spec.files
from mlx_spec.demo import demo_target_path
from mlx_spec.environment import CERTIFICATES, cache_folder, certificate_folder
from mlx_spec.errors import MlxSpecError
from mlx_spec.files import Replacement, replace_file
from mlx_spec.verify.verdicts import LIMIT_BYTES, Verdicts
from tests.faults.edits import assert_exact, tiny
from tests.tiny_wheel import tiny_metadata, tiny_tensors, write_wheel

pytestmark = pytest.mark.faults

FACTS = {"model": "abc"}
WIDTHS = 40

WRITER = """
import sys
from pathlib import Path
from mlx_spec.verify.verdicts import Verdicts
found = Verdicts({"model": "abc"}, Path(sys.argv[1]))
for width in range(int(sys.argv[3])):
    found.add_block(f"situation {sys.argv[2]}", width, "block", True)
    found.save()
"""


def found_in(folder: Path) -> int:
    return Verdicts(FACTS, folder).kept


@pytest.mark.deep
def test_no_finding_of_several_processes_is_lost(tmp_path: Path, thorough: bool) -> None:
    writers = 8 if thorough else 2
    command = [sys.executable, "-c", WRITER, str(tmp_path)]
    running = [subprocess.Popen([*command, str(number), str(WIDTHS)]) for number in range(writers)]
    assert [process.wait() for process in running] == [0] * writers
    assert found_in(tmp_path) == writers * WIDTHS
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 1, 0)], ids=str)
def test_no_finding_of_several_writers_in_turn_is_lost(tmp_path: Path, order: tuple[int, ...]) -> None:
    """All have read the file before any of them writes: the last one must not write what it read."""
    writers = [Verdicts(FACTS, tmp_path) for _ in range(3)]
    for turn, number in enumerate(order):
        writers[number].add_block("a situation", turn, "block", True)
        writers[number].add_op("an op", turn, "stock")
        writers[number].add_cost("an op", turn, 1.5)
        writers[number].save()
    again = Verdicts(FACTS, tmp_path)
    for turn in range(3):
        known = again.block("a situation", turn, "block"), again.op("an op", turn), again.cost("an op", turn)
        assert known == (True, "stock", 1.5)


def test_of_two_findings_about_the_same_the_later_one_is_kept(tmp_path: Path) -> None:
    first, second = Verdicts(FACTS, tmp_path), Verdicts(FACTS, tmp_path)
    first.add_block("a situation", 5, "block", True)
    first.save()
    second.add_block("a situation", 5, "block", False)
    second.save()
    assert Verdicts(FACTS, tmp_path).block("a situation", 5, "block") is False


def test_a_writer_that_keeps_its_lock_costs_others_no_more_than_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mlx_spec.files, "LOCK_PATIENCE_SECONDS", 0.05)
    handle = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    found = Verdicts(FACTS, tmp_path)
    found.add_block("a situation", 5, "block", True)
    found.save()
    os.close(handle)
    assert found_in(tmp_path) == 1


# What lies in the place of a file


def hole(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(LIMIT_BYTES + 1)


IN_THE_WAY = {
    "pipe": os.mkfifo,
    "link to a pipe": lambda path: (os.mkfifo(path.with_name("elsewhere")), path.symlink_to("elsewhere")),
    "folder": os.mkdir,
    "a link to itself": lambda path: path.symlink_to(path),
    "unreadable": lambda path: (path.write_text("{}"), path.chmod(0)),
    "no end": hole,
    "deep": lambda path: path.write_text("[" * 100_000),
}


@pytest.mark.every_case
@pytest.mark.parametrize("what", IN_THE_WAY)
def test_what_is_no_file_of_findings_counts_as_none_and_is_not_waited_for(tmp_path: Path, what: str) -> None:
    place = Verdicts(FACTS, tmp_path).path
    assert place is not None
    IN_THE_WAY[what](place)
    started = time.monotonic()
    found = Verdicts(FACTS, tmp_path)
    assert found.kept == 0
    found.add_block("a situation", 5, "block", True)
    found.save()
    assert time.monotonic() - started < 1
    if what != "folder":
        assert found_in(tmp_path) == 1
    if what == "link to a pipe":
        assert (tmp_path / "elsewhere").is_fifo(), "what a link leads to is never replaced"
        (tmp_path / "elsewhere").unlink()
    assert len(list(tmp_path.iterdir())) == 1


# A disk that is full


@pytest.mark.parametrize("call", ["write_bytes", "replace"])
def test_nothing_half_written_stays_on_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    found = Verdicts(FACTS, tmp_path)
    found.add_block("a situation", 5, "block", True)
    found.save()
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}

    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, call, full)
        found.add_block("a situation", 6, "block", True)
        found.save()
        with pytest.raises(OSError, match="No space"):
            replace_file(tmp_path / "another", b"content")
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before
    found.save()
    assert found_in(tmp_path) == 2


def test_what_a_killed_writer_left_is_removed_by_the_next_one(tmp_path: Path) -> None:
    Replacement(tmp_path / "of one that was killed")
    assert len(list(tmp_path.iterdir())) == 1
    found = Verdicts(FACTS, tmp_path)
    found.add_block("a situation", 5, "block", True)
    found.save()
    assert [path.suffix for path in tmp_path.iterdir()] == [".json"]


# A user without a home


@pytest.fixture
def homeless(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.delenv(CERTIFICATES, raising=False)

    def nobody(number: int) -> None:
        raise KeyError(f"getpwuid(): uid not found: {number}")

    monkeypatch.setattr(pwd, "getpwuid", nobody)


@pytest.mark.usefixtures("homeless")
def test_a_user_without_a_home_keeps_nothing_and_is_served() -> None:
    assert cache_folder() is None
    assert certificate_folder() is None
    found = Verdicts(FACTS, certificate_folder())
    found.add_block("a situation", 5, "block", True)
    found.save()
    assert found.block("a situation", 5, "block") is True


@pytest.mark.usefixtures("homeless")
def test_a_user_without_a_home_may_name_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CERTIFICATES, str(tmp_path))
    assert certificate_folder() == tmp_path


@pytest.mark.usefixtures("homeless")
def test_a_user_without_a_home_is_told_that_the_demo_needs_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    write_wheel(tmp_path, tiny_tensors(), tiny_metadata())
    with pytest.raises(MlxSpecError, match="no home folder"):
        demo_target_path()


# A file that was changed by somebody else


def edited(path: Path, **changed: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changed}))


EDITS_OF_A_FILE = {
    "verdicts turned": {"blocks": {"a situation": {"5 block": True}}},
    "a route": {"ops": {"an op": {"5": "stock"}}},
    "no seal": {"seal": ""},
    "another seal": {"seal": "0" * 32},
}


@pytest.mark.every_case
@pytest.mark.parametrize("edit", EDITS_OF_A_FILE)
def test_a_file_that_was_edited_is_not_believed_and_is_written_anew(tmp_path: Path, edit: str) -> None:
    found = Verdicts(FACTS, tmp_path)
    found.add_block("a situation", 5, "block", False)
    found.save()
    assert found.path is not None
    edited(found.path, **EDITS_OF_A_FILE[edit])
    again = Verdicts(FACTS, tmp_path)
    assert (again.kept, again.block("a situation", 5, "block")) == (0, None)
    told = again.take_complaint()
    assert told is not None
    assert str(found.path) in told
    assert again.take_complaint() is None
    again.add_block("a situation", 6, "block", True)
    again.save()
    anew = Verdicts(FACTS, tmp_path)
    assert (anew.kept, anew.block("a situation", 6, "block"), anew.take_complaint()) == (1, True, None)


def test_a_run_on_findings_that_were_turned_by_hand_is_exact_and_says_so_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CERTIFICATES, str(tmp_path))
    stock = llama.MLP.__call__
    monkeypatch.setattr(llama.MLP, "__call__", lambda self, x: stock(self, x) * (1 + 1e-3 * (x.shape[1] > 1)))
    assert assert_exact(tiny()).verify_route == "step-through"
    (path,) = tmp_path.glob("*.json")
    blocks = json.loads(path.read_text())["blocks"]
    edited(path, blocks={situation: dict.fromkeys(found, True) for situation, found in blocks.items()})
    model = tiny()
    statistics = assert_exact(model)
    assert statistics.verify_route == "step-through"
    assert len([note for note in statistics.notes if str(path) in note]) == 1
    assert not [note for note in assert_exact(model).notes if str(path) in note]
