"""What is found out about a model is believed as long as the model is what it was found on, and no longer."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models import llama

from mlx_spec import generate_step
from mlx_spec.drafters.standalone import StandaloneDrafter
from mlx_spec.environment import CERTIFICATES
from mlx_spec.errors import IncompatiblePair
from mlx_spec.verify.exemplar import filled_copy
from mlx_spec.verify.look import Look
from mlx_spec.verify.record import detach, record_of
from mlx_spec.verify.verdicts import Findings
from tests.double import PATTERNS, double
from tests.faults.edits import (
    ADAPTER_EDITS,
    EDITS,
    EMITTED,
    adapt,
    assert_blocks,
    assert_exact,
    built,
    replace_layer,
    scale_values,
    stock_run,
    to_half,
)
from tests.tiny import MIXES, PROMPT, VOCAB, randomise
from tests.tiny_eagle import random_drafter

pytestmark = pytest.mark.faults

ALIGNED = "dense_4bit_weights"
"""A dense mix whose matrices can be quantized."""


OF_VALUES = ("values scaled", "weights loaded", "training step")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(CERTIFICATES, str(tmp_path))
    return tmp_path


def findings_in(folder: Path) -> list[Findings]:
    return [Findings.model_validate_json(path.read_text()) for path in sorted(folder.glob("*.json"))]


# Values


@pytest.mark.part(1)
@pytest.mark.parametrize("edit", OF_VALUES)
def test_new_weights_are_not_compared_with_what_old_ones_gave(edit: str, folder: Path) -> None:
    model = built("dense")
    assert_exact(model, width=4)
    EDITS[edit](model)
    statistics = assert_exact(model, width=6)
    assert (statistics.verify_route, statistics.notes) == ("block", [])
    (kept,) = findings_in(folder)
    (found,) = kept.blocks.values()
    assert {"4 block", "6 block"} <= set(found)
    assert set(found.values()) == {True}


@pytest.mark.deep
def test_another_process_is_told_the_truth_after_weights_changed(folder: Path) -> None:
    model = built("dense")
    assert_exact(model, width=4)
    scale_values(model)
    assert_exact(model, width=5)
    again = assert_exact(built("dense"), width=5)
    assert (again.verify_route, again.notes) == ("block", [])


@pytest.mark.slow
@pytest.mark.part(1)
@pytest.mark.parametrize("edit", EDITS)
def test_no_route_outlives_an_edit_where_rows_round_differently(edit: str) -> None:
    with double(PATTERNS["gen15"]):
        model = built(ALIGNED)
        assert_blocks(assert_exact(model))
        EDITS[edit](model)
        assert_blocks(assert_exact(model))


@pytest.mark.slow
@pytest.mark.part(1)
@pytest.mark.parametrize("edit", ADAPTER_EDITS)
@pytest.mark.parametrize("dora", [False, True], ids=["LoRA", "DoRA"])
def test_no_route_outlives_an_edit_of_an_adapter(edit: str, dora: bool) -> None:
    with double(PATTERNS["gen15"]):
        model = built(ALIGNED)
        adapt(model, dora=dora, filled=edit != "adapters filled")
        assert_blocks(assert_exact(model))
        ADAPTER_EDITS[edit](model)
        assert_blocks(assert_exact(model))


def test_a_route_found_on_zeros_is_not_believed_of_what_comes_in_their_place(folder: Path) -> None:
    with double(PATTERNS["gen15"]):
        model = built("dense")
        for layer in model.layers:
            # As blocks of a network that is to be trained often start.
            layer.self_attn.o_proj.weight = mx.zeros_like(layer.self_attn.o_proj.weight)
        assert_exact(model)
        for layer in model.layers:
            layer.self_attn.o_proj.weight = mx.random.normal((44, 60)) / 60**0.5
        assert_blocks(assert_exact(model))
        assert_blocks(assert_exact(built("dense")))


# Objects


@pytest.mark.slow
@pytest.mark.part(1)
@pytest.mark.parametrize(
    ("mix", "kv"),
    [("mamba2", {}), ("sliding", {}), ("ring_with_keep", {"max_kv_size": 15}), ("hybrid", {})],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_mixers_of_a_replaced_layer_keep_a_part_of_a_block(mix: str, kv: dict[str, int]) -> None:
    model = built(mix)
    assert_exact(model, emitted=14, **kv)
    model.layers[1] = built(mix, seed=6).layers[1]
    assert_exact(model, emitted=14, **kv)


@pytest.mark.slow
@pytest.mark.part(1)
@pytest.mark.parametrize("mix", ["mamba2", "sliding", "hybrid"])
def test_what_was_detached_is_attached_again(mix: str) -> None:
    model = built(mix)
    assert_exact(model)
    detach(model)
    assert_exact(model)


def test_another_object_at_the_same_address_is_another_object() -> None:
    with double(PATTERNS["gen15"]):
        model = built("dense")
        assert_exact(model)
        mlp, addresses = model.layers[1].mlp, set()
        for _ in range(200):
            weight = mlp.up_proj.weight
            addresses.add(id(mlp.pop("up_proj")))
            mlp.up_proj = nn.Linear(44, 76, bias=False)
            mlp.up_proj.weight = weight
            if id(mlp.up_proj) in addresses:
                break
        assert id(mlp.up_proj) in addresses
        assert_blocks(assert_exact(model))


def test_a_method_replaced_while_the_program_runs_is_a_change(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    model = built("dense")
    assert_blocks(assert_exact(model))
    stock: Callable[..., Any] = llama.MLP.__call__

    def other(self: Any, x: mx.array) -> mx.array:
        return stock(self, x) * (1.0 + 1e-3 * (x.shape[1] > 1))

    monkeypatch.setattr(llama.MLP, "__call__", other)
    assert assert_exact(model).verify_route == "step-through"
    assert assert_exact(built("dense")).verify_route == "step-through"
    assert len(findings_in(folder)) == 2


@pytest.mark.deep
def test_taps_of_a_replaced_layer_are_put_on_the_new_one() -> None:
    model = built("dense", seed=1)
    drafter = random_drafter("dense")
    assert_exact(model, drafter=drafter)
    model.layers[0] = built("dense", seed=2).layers[0]
    assert_exact(model, drafter=drafter)


def test_an_edit_between_the_call_and_the_first_token_is_seen() -> None:
    with double(PATTERNS["gen15"]):
        model = built("dense")
        assert_exact(model)
        run = generate_step(mx.array(PROMPT), model, max_tokens=EMITTED, draft_model="ngram", draft_block_size=3)
        adapt(model)
        wanted, _ = stock_run(model)
        assert [token for token, _ in run] == [token for token, _ in wanted]


def test_a_language_model_that_drafts_proposes_what_it_is_able_to_now() -> None:
    model, small = built("dense"), built("dense", seed=4)
    drafter = StandaloneDrafter(small)
    assert_exact(model, drafter=drafter)
    small.lm_head, small.model.embed_tokens = nn.Linear(44, VOCAB - 1, bias=False), nn.Embedding(VOCAB - 1, 44)
    statistics = assert_exact(model, drafter=drafter)
    assert not any("failed" in note for note in statistics.notes)
    small.lm_head, small.model.embed_tokens = nn.Linear(44, 61, bias=False), nn.Embedding(61, 44)
    with pytest.raises(IncompatiblePair, match="vocabulary of 61"):
        assert_exact(model, drafter=drafter)


# The look itself


def test_a_look_agrees_with_the_next_while_nothing_changes_whatever_is_attached() -> None:
    model = built("dense")
    first = Look(model)
    assert_exact(model)
    assert Look(model).agrees(first)
    detach(model)
    assert Look(model).agrees(first)
    scale_values(model)
    assert Look(model).agrees(first)


@pytest.mark.parametrize("edit", [edit for edit in EDITS if edit not in OF_VALUES])
def test_a_look_tells_an_edit_though_values_are_not_looked_at(edit: str) -> None:
    model = built(ALIGNED)
    first = Look(model)
    EDITS[edit](model)
    assert not Look(model).agrees(first)


def test_a_model_that_is_kept_as_it_is_is_judged_once() -> None:
    model = built("dense")
    assert record_of(model).now() is record_of(model).now()
    to_half(model)
    known = record_of(model).now()
    assert known is record_of(model).now()


@pytest.mark.slow
def test_a_look_keeps_nothing_alive() -> None:
    model = built("dense")
    assert_exact(model)
    gone = weakref.ref(model.layers[1])
    replace_layer(model)
    gc.collect()
    assert gone() is None


@pytest.mark.deep
def test_two_requests_at_once_on_a_model_just_edited_are_both_exact() -> None:
    failures: list[BaseException] = []
    with double(PATTERNS["gen15"]):
        model = built("dense")
        assert_exact(model)
        adapt(model)

        def run() -> None:
            try:
                assert_blocks(assert_exact(model))
            except BaseException as error:  # noqa: BLE001
                failures.append(error)
            finally:
                mx.synchronize()
                mx.clear_streams()

        threads = [threading.Thread(target=run) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert failures == []


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_scales_of_many_bits_are_not_taken_for_weights_that_vanish(bits: int) -> None:
    """A copy with other scales computes something else, whose blocks may be equal where the model's are not."""
    mix = next(mix for mix in MIXES.values() if mix.weight_bits)
    model = randomise(mix.build, mix.seed)
    nn.quantize(model, group_size=32, bits=bits, class_predicate=lambda _, part: fits(part))
    mx.eval(model.parameters())
    assert any("scales" in module for module in model.modules())
    assert filled_copy(model) is None


def fits(part: nn.Module) -> bool:
    return hasattr(part, "to_quantized") and part.weight.shape[-1] % 32 == 0
