"""The same with several rows, each of which keeps a count of its own.

In a file of its own, since files are what a parallel run deals out and these machines are the slowest.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.cache.lives import Copied, Trimmed
from tests.cache.machine import Refusals
from tests.cache.machine_runs import run
from tests.cache.models import MODELS, STEPS
from tests.cache.ragged import Batch, RaggedMachine

BATCHES = {
    name: Batch(MODELS[name], rows_agree=name != "sliding", pads_right=name != "sliding")
    for name in ("dense_qk_norm", "sliding", "gated_delta", "mamba2", "short_convolution", "cache_list")
}


class ModelBatchMachine(Refusals, Copied, Trimmed, RaggedMachine):
    """All caches of one model, batched."""


@pytest.mark.slow
@pytest.mark.parametrize("name", BATCHES)
def test_rows_of_a_model_that_keep_different_counts_stay_as_they_are_alone(
    name: str, tell: Callable[[str], None]
) -> None:
    batch = BATCHES[name]
    run(type("ModelBatchMachine", (ModelBatchMachine,), {"batch": batch}), batch.alone, STEPS, tell)
