"""A model that was used can be copied and pickled as one that was not; the copy is stock, with nothing attached."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mlx_spec.model.swap import own_class
from mlx_spec.verify.look import Look
from tests.double import PATTERNS, double
from tests.faults.edits import adapt, assert_exact, built, stock_run
from tests.tiny import PROMPT
from tests.tiny_eagle import random_drafter

pytestmark = pytest.mark.faults

COPIES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    **{
        f"pickle, protocol {protocol}": lambda model, protocol=protocol: pickle.loads(pickle.dumps(model, protocol))
        for protocol in (2, pickle.DEFAULT_PROTOCOL, pickle.HIGHEST_PROTOCOL)
    },
}


def used(mix: str) -> Any:
    """A model with routes, mixers and taps attached."""
    with double(PATTERNS["gen15"]):
        model = built(mix)
        assert_exact(model, drafter=random_drafter("dense") if mix == "dense" else None)
    assert any(own_class(type(part)) is not type(part) for part in model.modules())
    return model


def classes(model: Any) -> list[type[Any]]:
    return [type(part) for part in model.modules()]


@pytest.mark.slow
@pytest.mark.part(1)
@pytest.mark.parametrize("mix", ["dense", "hybrid", "mamba2", "cache_list"])
def test_a_copy_of_a_used_model_is_stock_and_runs_exactly(mix: str) -> None:
    model = used(mix)
    attached = classes(model)
    for name, made in COPIES.items():
        copied = made(model)
        assert classes(copied) == [own_class(each) for each in attached], name
        assert classes(model) == attached, name
    assert_exact(copied)
    assert not Look(copied).agrees(Look(model))


def test_single_modules_of_a_used_model_are_copied_as_their_own_class() -> None:
    model = used("dense")
    for part in (model.layers[0], model.layers[0].self_attn, model.layers[0].mlp.up_proj):
        for made in (*COPIES.values(), copy.copy):
            assert type(made(part)) is own_class(type(part))


@pytest.mark.deep
def test_an_adapter_put_on_a_used_model_is_copied_with_it() -> None:
    model = used("dense")
    adapt(model)
    copied = pickle.loads(pickle.dumps(model))
    assert [token for token, _ in stock_run(copied)[0]] == [token for token, _ in stock_run(model)[0]]


READS = """
import pickle, sys
import mlx.core as mx
mx.set_default_device(mx.cpu)
from mlx_lm.generate import generate_step
model = pickle.load(open(sys.argv[1], "rb"))
assert not any(name.startswith("mlx_spec") for name in sys.modules), "the pickle asks for more than the model's classes"
print([token for token, _ in generate_step(mx.array(eval(sys.argv[2])), model, max_tokens=6)])
"""


@pytest.mark.deep
def test_another_process_reads_the_pickle_of_a_used_model_without_this_package(tmp_path: Path) -> None:
    model = used("dense")
    (tmp_path / "model").write_bytes(pickle.dumps(model))
    command = [sys.executable, "-c", READS, str(tmp_path / "model"), repr(PROMPT)]
    told = subprocess.run(command, capture_output=True, text=True, check=False)
    assert told.returncode == 0, told.stderr
    assert told.stdout.strip() == str([token for token, _ in stock_run(model, 6)[0]])
