"""Whatever is done to a model between runs, in whatever order: each run is that of the model as it is then."""

from __future__ import annotations

import contextlib
import copy
import pickle
import tempfile
import threading
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test
from mlx_lm.generate import generate_step as stock_generate_step

from mlx_spec import generate_step
from mlx_spec.environment import CERTIFICATES
from mlx_spec.model.target import evaluate_arrays
from mlx_spec.verify.record import detach
from tests.double import PATTERNS, double
from tests.faults import edits
from tests.tiny import PROMPT

pytestmark = pytest.mark.faults

MIXES = ("dense_4bit_weights", "sliding", "hybrid")


class EditedModel(RuleBasedStateMachine):
    """One model, edited and run in turn; a copy takes its place now and then."""

    def __init__(self) -> None:
        super().__init__()
        self.model: Any = None
        self.left = contextlib.ExitStack()

    @initialize(mix=st.sampled_from(MIXES), doubled=st.booleans(), kept=st.booleans())
    def load(self, mix: str, doubled: bool, kept: bool) -> None:
        patch = self.left.enter_context(pytest.MonkeyPatch.context())
        patch.setenv(CERTIFICATES, self.left.enter_context(tempfile.TemporaryDirectory()) if kept else "off")
        if doubled:
            self.left.enter_context(double(PATTERNS["gen15"]))
        self.model = edits.built(mix)
        self.trainable = mix.startswith("dense")

    def teardown(self) -> None:
        self.left.close()

    @property
    def adapted(self) -> bool:
        return bool(edits.adapters(self.model))

    # Edits

    @precondition(lambda self: not self.adapted)
    @rule(dora=st.booleans(), filled=st.booleans())
    def put_an_adapter_on(self, dora: bool, filled: bool) -> None:
        edits.adapt(self.model, dora=dora, filled=filled)

    @precondition(lambda self: self.adapted)
    @rule(change=st.sampled_from(sorted(edits.ADAPTER_EDITS)))
    def change_the_adapter(self, change: str) -> None:
        edits.ADAPTER_EDITS[change](self.model)

    @rule(change=st.sampled_from((edits.scale_values, edits.load_weights, edits.replace_layer, edits.to_half)))
    def change_the_model(self, change: Callable[[Any], None]) -> None:
        change(self.model)

    @rule()
    def quantize(self) -> None:
        edits.quantize(self.model)

    @precondition(lambda self: self.trainable)
    @rule()
    def train(self) -> None:
        edits.training_step(self.model)

    @rule()
    def let_go(self) -> None:
        detach(self.model)

    @rule(way=st.sampled_from((copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model)))))
    def take_a_copy(self, way: Callable[[Any], Any]) -> None:
        self.model = way(self.model)

    # Runs

    @rule(width=st.sampled_from((2, 4)))
    def speculate(self, width: int) -> None:
        edits.assert_exact(self.model, width, emitted=7)

    @rule(width=st.sampled_from((3, 4)))
    def speculate_beside_plain_runs(self, width: int) -> None:
        # What an edit left lazy can be computed in this thread alone, whoever runs the model.
        evaluate_arrays(self.model)
        with plain_runs_beside(self.model) as seen:
            edits.assert_exact(self.model, width, emitted=7)
        wanted = [token for token, _ in edits.stock_run(self.model, 5)[0]]
        assert all(ids == wanted for ids in seen)

    @rule()
    def decode_plainly(self) -> None:
        got = [token for token, _ in generate_step(mx.array(PROMPT), self.model, max_tokens=5)]
        assert got == [token for token, _ in edits.stock_run(self.model, 5)[0]]


@contextlib.contextmanager
def plain_runs_beside(model: Any) -> Any:
    """mlx-lm's loop and ours without a drafter on the same model, in another thread; the ids of every run."""
    seen: list[list[int]] = []

    def decode() -> None:
        try:
            for step in (stock_generate_step, generate_step):
                seen.append([token for token, _ in step(mx.array(PROMPT), model, max_tokens=5)])
        finally:
            mx.synchronize()
            mx.clear_streams()

    thread = threading.Thread(target=decode)
    thread.start()
    try:
        yield seen
    finally:
        thread.join()
    assert len(seen) == 2


@pytest.mark.slow
def test_every_run_is_that_of_the_model_as_it_is() -> None:
    run_state_machine_as_test(EditedModel, settings=settings(settings.default, max_examples=1, stateful_step_count=7))


@pytest.mark.deep
def test_every_run_is_that_of_the_model_as_it_is_after_many_edits() -> None:
    run_state_machine_as_test(
        EditedModel, settings=settings(settings.default, max_examples=120, stateful_step_count=14)
    )
