"""An ordinary forward leaves every architecture the model it was, though some write attributes of their own in it."""

from __future__ import annotations

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache

from mlx_spec.verify.look import Look
from mlx_spec.verify.record import record_of
from mlx_spec.verify.verdicts import make_of
from tests.zoo.menagerie import Specimen, bare_model, whole_zoo


@pytest.mark.part(30)
@pytest.mark.parametrize("specimen", whole_zoo(), ids=lambda specimen: specimen.name)
def test_a_forward_does_not_make_another_model(specimen: Specimen) -> None:
    model = bare_model(specimen.config)
    model.eval()
    before, make = Look(model), make_of(model)
    assert before.reach.digest is not None, "the code of mlx-lm's models can be read"
    caches = make_prompt_cache(model)
    for ids in ([[5]], [[7]]) if specimen.module == "olmo" else ([[5, 17, 42]], [[7]]):
        try:
            mx.eval(model(mx.array(ids), cache=caches))
        except (RuntimeError, ValueError) as error:
            pytest.skip(f"does not run here: {error}")
    record_of(model).bindings.attach(model)
    assert Look(model).agrees(before)
    assert make_of(model) == make
