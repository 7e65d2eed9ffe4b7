"""Runs the command in this process, and mlx-lm's own beside it."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import mlx_lm.cache_prompt
import mlx_lm.generate  # noqa: F401  the package's attribute of that name is a function
import pytest

from mlx_spec.commandline import main


@dataclass(frozen=True)
class Outcome:
    """What a run of the command left behind."""

    code: int
    out: str
    err: str

    @property
    def lines(self) -> list[str]:
        """Of stderr, without those that tell what is being waited for."""
        return [line for line in self.err.splitlines() if not line.startswith("certifying W = ")]


def run(capsys: pytest.CaptureFixture[str], *argv: Any) -> Outcome:
    """`python -m mlx_spec.generate` with these arguments."""
    capsys.readouterr()
    try:
        code = main([str(word) for word in argv])
    except SystemExit as end:
        code = int(str(end.code))
    captured = capsys.readouterr()
    return Outcome(code, captured.out, captured.err)


def mlx_lm_text(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *argv: Any, command: str = "generate"
) -> str:
    """What mlx-lm's command of that name prints when told to print the text alone."""
    quiet = ("--verbose", "False") if command == "generate" else ()
    capsys.readouterr()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "argv", [f"mlx_lm.{command}", *map(str, argv), *quiet])
        sys.modules[f"mlx_lm.{command}"].main()
    return capsys.readouterr().out
