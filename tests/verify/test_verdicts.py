"""Findings are kept in a file that is believed only where everything they depend on is the same."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from mlx_spec.verify import verdicts as module
from mlx_spec.verify.verdicts import Verdicts, facts_of, make_of
from tests.tiny import MIXES

FACTS = {"mlx": "1.2.3", "model": "abc"}


def written(folder: Path, facts: dict[str, str] = FACTS) -> Verdicts:
    found = Verdicts(facts, folder)
    found.add_op("an op", 5, "batch axis")
    found.add_cost("an op", 5, 2.5)
    found.add_block("plain caches", 5, "block", True)
    found.add_block("plain caches", 8, "positions", False)
    found.save()
    return found


def test_findings_are_read_back(tmp_path: Path) -> None:
    written(tmp_path / "new" / "folder")
    again = Verdicts(FACTS, tmp_path / "new" / "folder")
    assert again.kept == 3
    assert (again.op("an op", 5), again.op("an op", 6), again.op("another", 5)) == ("batch axis", None, None)
    assert (again.cost("an op", 5), again.cost("an op", 2)) == (2.5, None)
    assert again.block("plain caches", 5, "block") is True
    assert again.block("plain caches", 8, "positions") is False
    assert again.block("plain caches", 8, "block") is None
    assert [path.suffix for path in (tmp_path / "new" / "folder").iterdir()] == [".json"]


@pytest.mark.parametrize("changed", [{"mlx": "1.2.4"}, {"model": "abd"}, {"more": "facts"}], ids=str)
def test_other_facts_are_another_file(tmp_path: Path, changed: dict[str, str]) -> None:
    first = written(tmp_path)
    other = Verdicts({**FACTS, **changed}, tmp_path)
    assert other.path != first.path
    assert other.kept == 0


OURS = b'{"facts": {"mlx": "1.2.3", "model": "abc"}, '
DAMAGE = {
    "empty": b"",
    "no JSON": b"{",
    "bytes that are no text": b"\xff\xfe\x00",
    "a list": b"[]",
    "a field too many": OURS + b'"ops": {}, "blocks": {}, "run": "me"}',
    "a verdict that is none": OURS + b'"blocks": {"plain caches": {"5 block": "yes"}}}',
    "facts of another": b'{"facts": {"mlx": "9", "model": "abc"}, "blocks": {"plain caches": {"5 block": true}}}',
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_file_that_does_not_parse_or_match_counts_as_none_and_is_written_anew(tmp_path: Path, damage: str) -> None:
    first = written(tmp_path)
    assert first.path is not None
    first.path.write_bytes(DAMAGE[damage])
    again = Verdicts(FACTS, tmp_path)
    assert again.kept == 0
    assert again.block("plain caches", 5, "block") is None
    again.add_block("plain caches", 5, "block", False)
    again.save()
    assert Verdicts(FACTS, tmp_path).block("plain caches", 5, "block") is False


def test_a_folder_that_cannot_be_written_costs_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    found = written(tmp_path / "file")
    assert found.op("an op", 5) == "batch axis"


def test_without_a_folder_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = written(None)  # type: ignore[arg-type]
    assert found.path is None
    assert list(tmp_path.iterdir()) == []


def test_threads_that_save_at_once_leave_one_whole_file(tmp_path: Path) -> None:
    found = Verdicts(FACTS, tmp_path)

    def work(start: int) -> None:
        for width in range(start, 60, 4):
            found.add_block("plain caches", width, "block", True)
            found.save()

    threads = [threading.Thread(target=work, args=(start,)) for start in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert Verdicts(FACTS, tmp_path).kept == 60
    assert len(list(tmp_path.iterdir())) == 1


# What findings depend on


def test_facts_name_versions_device_and_system() -> None:
    facts = facts_of(MIXES["dense"].model())
    versions = {"format", "mlx", "mlx-lm", "mlx_spec", "sources"}
    assert set(facts) == versions | {"device", "system", "environment", "kernels", "model"}
    assert all(facts[name] for name in facts if name != "environment")


def test_a_setting_of_mlx_is_a_fact(monkeypatch: pytest.MonkeyPatch) -> None:
    before = facts_of(MIXES["dense"].model())
    monkeypatch.setenv("MLX_SDPA_BLOCKS", "64")
    after = facts_of(MIXES["dense"].model())
    assert before != after
    assert "MLX_SDPA_BLOCKS=64" in after["environment"]


def test_the_make_of_a_model_is_its_classes_settings_shapes_and_dtypes_but_not_its_weights() -> None:
    mix = MIXES["dense"]
    one, same = mix.build(), mix.build()
    same.update({"lm_head": {"weight": same.lm_head.weight + 1}} if hasattr(same, "lm_head") else {})
    assert make_of(one) == make_of(same)
    half = mix.build()
    half.set_dtype(mx.bfloat16)
    packed = MIXES["dense_4bit_weights"].model()
    other = MIXES["sliding"].model()
    assert len({make_of(made) for made in (one, half, packed, other)}) == 4


def test_a_setting_of_one_module_is_part_of_the_make() -> None:
    class Scaled(nn.Module):
        def __init__(self, scale: float) -> None:
            super().__init__()
            self.scale = scale
            self._private = object()

    assert make_of(Scaled(0.5)) == make_of(Scaled(0.5))
    assert make_of(Scaled(0.5)) != make_of(Scaled(0.25))


def test_another_format_of_the_file_is_another_fact(monkeypatch: pytest.MonkeyPatch) -> None:
    before = facts_of(MIXES["dense"].model())
    monkeypatch.setattr(module, "FORMAT", module.FORMAT + 1)
    after: dict[str, Any] = facts_of(MIXES["dense"].model())
    assert before["format"] != after["format"]
