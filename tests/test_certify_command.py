"""`python -m mlx_spec.certify` prints what was found, keeps it, and fails where only step-through is left."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mlx_spec import certify
from mlx_spec.certify import main
from mlx_spec.environment import CERTIFICATES
from mlx_spec.ops.attention import BY_POSITION, AttentionCall
from mlx_spec.ops.base import STOCK
from mlx_spec.verify import op_table
from mlx_spec.verify.certificate import Certificate
from mlx_spec.verify.trial import Trial
from tests.checkpoints import write_target


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return str(write_target(tmp_path / "target"))


@pytest.fixture(autouse=True)
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(CERTIFICATES, str(tmp_path / "certificates"))
    return tmp_path / "certificates"


@pytest.mark.slow
def test_every_op_and_every_width_is_printed(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model", folder, "--widths", "2", "5"]) == 0
    out = capsys.readouterr().out
    rows = [line for line in out.splitlines() if line.startswith("| ")]
    assert rows[0] == "| op | input | uses | W=2 | W=5 |"
    assert len(rows) > 3
    assert all("stock" in row for row in rows[1:])
    attention = [row for row in rows if row.startswith("| attention: ")]
    assert [row.split(" | ")[1] for row in attention] == [f"{keys} keys and more" for keys in (512, 1024, 2048, 4096)]
    assert "W=2: block" in out
    assert "W=5: block" in out
    assert "0 findings were known before" in out


@pytest.mark.slow
def test_a_second_run_answers_from_the_file(
    folder: str, kept: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    main(["--model", folder, "--widths", "3"])
    first = capsys.readouterr().out.splitlines()
    assert len(list(kept.iterdir())) == 1

    def tried(*args: Any) -> Any:
        raise AssertionError("tried again")

    monkeypatch.setattr(op_table, "choose", tried)
    monkeypatch.setattr(certify, "relative_cost", tried)
    monkeypatch.setattr(Trial, "equal", tried)
    assert main(["--model", folder, "--widths", "3"]) == 0
    second = capsys.readouterr().out.splitlines()
    assert second[:-1] == first[:-1]
    assert not second[-1].startswith("0 findings")


def test_attention_that_differs_over_many_keys_is_printed_as_such(
    folder: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        AttentionCall,
        "route_over",
        lambda self, stretch: STOCK if stretch.edge < 2048 or self.width == 2 else BY_POSITION,
    )
    assert main(["--model", folder, "--widths", "2", "3"]) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| attention: ")]
    assert [row.split(" | ")[3:] for row in rows] == [["stock", "stock |"]] * 2 + [["stock", "by position |"]] * 2


def test_a_certificate_that_is_off_is_not_kept(
    folder: str, kept: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CERTIFICATES, "off")
    assert main(["--model", folder, "--widths", "2"]) == 0
    assert "all are not kept" in capsys.readouterr().out
    assert not kept.exists()


def test_where_only_step_through_is_left_the_status_says_so(
    folder: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Certificate, "holds", lambda self, width, drive: False)
    assert main(["--model", folder, "--widths", "2", "3"]) == 1
    out = capsys.readouterr().out
    assert "W=2: step-through" in out
    assert "a block rounds differently from one-token decode" in out


@pytest.mark.slow
def test_some_certified_width_is_enough(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Certificate, "holds", lambda self, width, drive: width == 2)
    assert main(["--model", folder, "--widths", "2", "3"]) == 0


def test_a_model_that_cannot_be_loaded_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith("certify: ")


@pytest.mark.parametrize("widths", [["1"], ["0"], ["-3", "4"], ["two"]], ids=str)
def test_a_width_that_is_no_block_is_refused(folder: str, widths: list[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--model", folder, "--widths", *widths])
