"""What a newcomer asks of the package is answered: names, help, version, commands, and figures that can be read."""

from __future__ import annotations

import importlib
import inspect
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any, get_type_hints

import mlx.core as mx
import pytest

import mlx_spec
from mlx_spec.commandline import parser
from mlx_spec.options import Options, StepKeywords, TextKeywords
from tests.checkpoints import ascii_tokenizer, tiny_model
from tests.tiny import MIXES, PROMPT

pytestmark = pytest.mark.faults

STOCK = importlib.import_module("mlx_lm.generate")
"""The package's attribute of that name is a function."""

ROOT = Path(__file__).resolve().parent.parent.parent
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

PLAIN_IMPORT = """
import mlx_spec
assert {"errors", "drafters", "__version__", *mlx_spec.__all__} <= set(dir(mlx_spec)), dir(mlx_spec)
assert issubclass(mlx_spec.errors.InvalidRequest, ValueError)
assert mlx_spec.drafters.NgramDrafter.kind == "ngram"
assert mlx_spec.__version__[0].isdigit()
try:
    mlx_spec.stream_generat
except AttributeError as error:
    assert "stream_generate" in str(error), error
"""

FUNCTIONS = ("generate_step", "speculative_generate_step", "stream_generate", "generate")


def function(name: str) -> Any:
    return getattr(importlib.import_module("mlx_spec.generate"), name)


def test_modules_are_there_without_an_import_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("errors", "drafters"):
        monkeypatch.delitem(vars(mlx_spec), name, raising=False)
        assert name in dir(mlx_spec)
        assert getattr(mlx_spec, name).__name__ == f"mlx_spec.{name}"
    with pytest.raises(AttributeError, match="Did you mean 'stream_generate'"):
        _ = mlx_spec.stream_generat


@pytest.mark.deep
def test_a_plain_import_gives_every_public_name() -> None:
    subprocess.run([sys.executable, "-c", PLAIN_IMPORT], cwd=ROOT, check=True)


def test_every_public_name_is_listed_and_there() -> None:
    for name in mlx_spec.__all__:
        assert getattr(mlx_spec, name) is not None
    assert set(mlx_spec.__all__) <= set(dir(mlx_spec))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_help_shows_every_keyword_with_its_default(name: str) -> None:
    shown = inspect.signature(function(name)).parameters
    wanted = StepKeywords if name.endswith("step") else TextKeywords
    for keyword in get_type_hints(wanted):
        assert keyword in shown
        if keyword != "draft_model" or name != "speculative_generate_step":
            default = Options.model_fields[keyword].default
            assert shown[keyword].default == default or keyword == "stream"
    assert not any(each.kind is inspect.Parameter.VAR_KEYWORD for each in shown.values())
    assert inspect.signature(mlx_spec.generate) == inspect.signature(function("generate"))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_keyword_of_mlx_lms_function_is_taken(name: str) -> None:
    ours = inspect.signature(function(name)).parameters
    theirs = inspect.signature(getattr(STOCK, name)).parameters
    assert {each for each in theirs if each != "kwargs"} <= set(ours)
    order = [each for each, its in theirs.items() if its.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    assert list(ours)[: len(order)] == order


def test_every_flag_of_mlx_lms_command_is_known_and_the_readme_gives_a_reason_where_one_is_refused() -> None:
    theirs = set(re.findall(r"--[a-z-]+", STOCK.setup_arg_parser().format_help()))
    told = parser().format_help()
    assert theirs - set(re.findall(r"--[a-z-]+", told)) == set()
    refused = {
        line.split("|")[1].strip() for line in (ROOT / "README.md").read_text().splitlines() if "refused:" in line
    }
    for action in parser()._actions:
        if action.help == "refused":
            assert f"`{action.option_strings[0]}`" in refused


def test_the_commands_are_there_under_the_names_of_their_modules(capsys: pytest.CaptureFixture[str]) -> None:
    scripts = PROJECT["scripts"]
    assert set(scripts) == {"mlx_spec.generate", "mlx_spec.certify", "mlx_spec.split_mtp", "mlx_spec.drafters"}
    for target in scripts.values():
        module, _, name = target.partition(":")
        with pytest.raises(SystemExit) as left:
            getattr(importlib.import_module(module), name)(["--help"])
        assert left.value.code == 0
        assert "usage" in capsys.readouterr().out


def test_the_version_is_said_in_one_place() -> None:
    assert "version" in PROJECT["dynamic"]
    assert re.fullmatch(r"\d+\.\d+\.\d+\S*", mlx_spec.__version__)
    assert PROJECT["urls"]


def test_statistics_can_be_read_as_they_are_shown() -> None:
    statistics = mlx_spec.Statistics()
    assert "0x" not in repr(statistics)
    mx.reset_peak_memory()
    steps = mlx_spec.generate_step(
        mx.array(PROMPT), MIXES["dense"].model(), draft_model="ngram", max_tokens=5, statistics=statistics
    )
    assert len(list(steps)) == 5
    shown, line = repr(statistics), str(statistics)
    assert shown.startswith("Statistics(")
    assert "drafter='ngram'" in shown
    assert "emitted_tokens=5" in shown
    assert "\n" not in shown + line
    for words in ("prompt 7 tokens at", "first token after", "peak memory"):
        assert words in line


def test_prompt_speed_first_token_and_memory_are_in_the_statistics() -> None:
    last = list(mlx_spec.stream_generate(tiny_model(num_hidden_layers=2), ascii_tokenizer(), "sea", 4))[-1]
    facts = json.loads(json.dumps(last.speculation.as_dict()))
    assert facts["time_to_first_token_ms"] >= facts["prompt_ms"] > 0
    assert facts["prompt_tokens_per_second"] == pytest.approx(facts["prompt_tokens"] / facts["prompt_ms"] * 1e3)
    assert facts["peak_memory_bytes"] > 0
