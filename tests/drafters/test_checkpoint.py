"""Folders that mean harm, of every kind of drafter: refused with a sentence, and nothing in them is executed."""

from __future__ import annotations

import json
import os
import pickle
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlx_spec.drafters.checkpoint import JSON_LIMIT_BYTES, read_config, read_tensors
from mlx_spec.errors import CheckpointError, MlxSpecError, ModelNotFound
from mlx_spec.pairing import load_drafter
from tests.checkpoints import tiny_model

KINDS = {
    "dflash": {"architectures": ["DFlashDraftModel"], "model_type": "qwen3", "block_size": 4},
    "mtp": {"model_type": "qwen3_5_mtp", "block_size": 3},
    "native": {
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "num_hidden_layers": 2,
        "mtp_num_hidden_layers": 1,
    },
    "eagle3": {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama"},
    "standalone": {"architectures": ["LlamaForCausalLM"], "model_type": "llama"},
    "said by nothing": {},
}
"""A config.json of each kind, by name."""

TARGET = tiny_model(num_hidden_layers=1)

NORM = '{"norm.weight":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'


def made(folder: Path, kind: str, edit: Callable[[Path], object]) -> Path:
    """A folder of some kind with one sound file of weights, and what `edit` makes of it."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(KINDS[kind]))
    mx.save_safetensors(str(folder / "model.safetensors"), {"norm.weight": mx.ones((2,))})
    edit(folder)
    return folder


def refusal(folder: Path) -> str:
    with pytest.raises(MlxSpecError) as refused:
        load_drafter(folder, target=TARGET)
    assert isinstance(refused.value, CheckpointError | ModelNotFound)
    assert "\n" not in str(refused.value)
    return str(refused.value)


# Pickles


class Trap:
    """Makes a file when it is unpickled."""

    def __init__(self, sprung: Path) -> None:
        self.sprung = sprung

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, (str(self.sprung),))


def test_the_trap_springs_when_it_is_unpickled(tmp_path: Path) -> None:
    pickle.loads(pickle.dumps(Trap(tmp_path / "sprung")))
    assert (tmp_path / "sprung").exists()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin", "model.pt", "model.npz", "config.json"])
def test_a_pickle_is_not_opened_under_any_name(tmp_path: Path, kind: str, name: str) -> None:
    sprung = tmp_path / "sprung"

    def trapped(folder: Path) -> None:
        (folder / "model.safetensors").unlink()
        (folder / name).write_bytes(pickle.dumps(Trap(sprung)))

    told = refusal(made(tmp_path / "folder", kind, trapped))
    assert name in told or "Only safetensors are read" in told
    assert not sprung.exists()


@pytest.mark.parametrize("kind", KINDS)
def test_an_index_that_names_a_pickle_is_refused(tmp_path: Path, kind: str) -> None:
    sprung = tmp_path / "sprung"

    def trapped(folder: Path) -> None:
        (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Trap(sprung)))
        _index(folder, "pytorch_model.bin")

    assert "'pytorch_model.bin': only safetensors files" in refusal(made(tmp_path / "folder", kind, trapped))
    assert not sprung.exists()


# Paths


def _index(folder: Path, name: str) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"norm.weight": name}}))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "name",
    [
        "../outside.safetensors",
        "a/../../outside.safetensors",
        "a\\..\\..\\outside.safetensors",
        "/outside.safetensors",
        "C:outside.safetensors",
        "\\\\host\\share\\outside.safetensors",
        "out\0side.safetensors",
    ],
)
def test_an_index_leads_nowhere_outside_its_folder(tmp_path: Path, kind: str, name: str) -> None:
    mx.save_safetensors(str(tmp_path / "outside.safetensors"), {"norm.weight": mx.ones((2,))})
    folder = made(tmp_path / "folder", kind, lambda folder: _index(folder, name))
    assert "only safetensors files inside the folder are read" in refusal(folder)


def test_a_link_is_followed_because_downloads_are_kept_so(tmp_path: Path) -> None:
    folder = made(tmp_path / "folder", "eagle3", lambda folder: None)
    blob = tmp_path / "blob"
    (folder / "model.safetensors").rename(blob)
    (folder / "model.safetensors").symlink_to(blob)
    assert list(read_tensors(folder)) == ["norm.weight"]
    blob.unlink()
    with pytest.raises(CheckpointError, match="is no regular file"):
        read_tensors(folder)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "model.safetensors.index.json"])
@pytest.mark.parametrize("kind", ["eagle3", "standalone"])
def test_what_is_no_regular_file_is_not_read(tmp_path: Path, kind: str, name: str) -> None:
    def replaced(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)

    # A pipe nobody writes to: to open it would wait for ever.
    assert str(tmp_path) in refusal(made(tmp_path / "pipe", kind, replaced))
    if Path("/dev/zero").exists():

        def endless(folder: Path) -> None:
            (folder / name).unlink(missing_ok=True)
            (folder / name).symlink_to("/dev/zero")

        assert str(tmp_path) in refusal(made(tmp_path / "device", kind, endless))


# Headers


def header(text: str | bytes, data: bytes = b"", length: int | None = None) -> bytes:
    text = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(text) if length is None else length) + text + data


HOSTILE = {
    "empty": b"",
    "cut in its length": b"\x10\0\0",
    "length beyond the file": header(NORM, bytes(8), length=2**40),
    "largest length": header(NORM, bytes(8), length=2**64 - 1),
    "length that wraps around": header(NORM, bytes(8), length=2**64 - 8),
    "no JSON": header("norm.weight"),
    "deep JSON": header("[" * 200_000),
    "invalid UTF-8": header(b'{"\xff":1}'),
    "list": header("[]"),
    "no entry": header('{"norm.weight":3}'),
    "data missing": header(NORM),
    "data cut": header(NORM, bytes(7)),
    "data left over": header(NORM, bytes(9)),
    "offsets backwards": header(NORM.replace("[0,8]", "[8,0]"), bytes(8)),
    "offsets negative": header(NORM.replace("[0,8]", "[-8,0]"), bytes(8)),
    "offsets huge": header(NORM.replace("[0,8]", "[0,18446744073709551615]"), bytes(8)),
    "hole": header(NORM.replace("[0,8]", "[8,16]"), bytes(16)),
    "shape too large": header(NORM.replace("[2]", "[3]"), bytes(8)),
    "shape that wraps around": header(NORM.replace("[2]", "[4294967296,4294967298]"), bytes(8)),
    "shape negative": header(NORM.replace("[2]", "[-2]"), bytes(8)),
    "unknown dtype": header(NORM.replace("F32", "F33"), bytes(8)),
    "object dtype": header(NORM.replace("F32", "O"), bytes(8)),
    "overlap": header(NORM[:-1] + "," + NORM[1:].replace("norm", "other"), bytes(8)),
    "metadata that is no text": header('{"__metadata__":{"a":{"b":1}},' + NORM[1:], bytes(8)),
}
"""What `model.safetensors` may hold instead of tensors, by name."""


def test_the_header_that_hostile_ones_are_made_of_is_sound(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(header(NORM, bytes(8)))
    assert {name: array.tolist() for name, array in read_tensors(tmp_path).items()} == {"norm.weight": [0.0, 0.0]}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("hostile", HOSTILE)
def test_a_hostile_file_is_refused_by_name(tmp_path: Path, kind: str, hostile: str) -> None:
    folder = made(tmp_path, kind, lambda folder: (folder / "model.safetensors").write_bytes(HOSTILE[hostile]))
    assert "model.safetensors is not a complete safetensors file" in refusal(folder)


def test_a_header_as_long_as_the_file_says_is_not_read_into_memory(tmp_path: Path) -> None:
    def sparse(folder: Path) -> None:
        with (folder / "model.safetensors").open("wb") as file:
            file.write(struct.pack("<Q", 2**36))
            # Takes no room on disk.
            file.truncate(2**36 + 8)

    assert "is not a complete safetensors file" in refusal(made(tmp_path, "eagle3", sparse))


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json"])
def test_json_without_an_end_is_not_read_into_memory(tmp_path: Path, name: str) -> None:
    def sparse(folder: Path) -> None:
        with (folder / name).open("wb") as file:
            file.truncate(JSON_LIMIT_BYTES + 1)

    told = refusal(made(tmp_path, "eagle3", sparse))
    assert name in told
    assert f"at most {JSON_LIMIT_BYTES} are read" in told


@pytest.mark.parametrize("content", [b"\xff\xfe", b"[]", b"3", b'{"a":', b"[" * 100_000, b'{"architectures": 7}'])
def test_a_config_that_is_none_is_refused(tmp_path: Path, content: bytes) -> None:
    folder = made(tmp_path, "eagle3", lambda folder: (folder / "config.json").write_bytes(content))
    assert "config.json" in refusal(folder)


def test_a_sound_folder_is_read(tmp_path: Path) -> None:
    folder = made(tmp_path, "dflash", lambda folder: None)
    assert read_config(folder) == KINDS["dflash"]
    assert list(read_tensors(folder)) == ["norm.weight"]
