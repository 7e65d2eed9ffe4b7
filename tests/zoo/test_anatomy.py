"""The table of embeddings, norms and heads, checked on every architecture that runs here."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache

from mlx_spec.errors import UnknownAnatomy
from mlx_spec.model.anatomy import ANATOMY_BY_MODULE, WITHOUT_ANATOMY
from mlx_spec.model.target import Target
from tests.bits import assert_same_bits
from tests.zoo.menagerie import Specimen, architectures, whole_zoo
from tests.zoo.trial import DTYPES, why_not_here

ZOO = whole_zoo()
IDS = mx.array([[5, 17, 42, 8, 61, 3, 29]])


@contextmanager
def first_argument_recorded(layer: Any) -> Iterator[list[mx.array]]:
    """The first argument of every call of a layer."""
    base, seen = type(layer), []

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append([*args, *kwargs.values()][0] + 0)
        return base.__call__(self, *args, **kwargs)

    layer.__class__ = type(base.__name__, (base,), {"__call__": call})
    try:
        yield seen
    finally:
        layer.__class__ = base


def test_every_architecture_has_a_row_or_a_reason() -> None:
    assert not set(ANATOMY_BY_MODULE) & set(WITHOUT_ANATOMY)
    assert sorted({*ANATOMY_BY_MODULE, *WITHOUT_ANATOMY}) == sorted(architectures())


@pytest.mark.part(40)
@pytest.mark.slow
@pytest.mark.parametrize("specimen", ZOO, ids=lambda specimen: specimen.name)
def test_the_parts_of_the_table_reproduce_the_model(specimen: Specimen) -> None:
    if specimen.module in WITHOUT_ANATOMY:
        with pytest.raises(UnknownAnatomy, match=WITHOUT_ANATOMY[specimen.module]):
            _ = Target(specimen.build("float32")).anatomy
        return
    reasons = []
    for dtype in DTYPES:
        target = Target(specimen.build(dtype))
        reason = why_not_here(target.model)
        if reason is not None:
            reasons.append(reason)
            continue
        last = target.layer_count - 1
        target.attach_taps((last,))
        ids = IDS[:, :1] if specimen.module == "olmo" else IDS
        with first_argument_recorded(target.model.layers[0]) as seen:
            output = target.forward(ids, make_prompt_cache(target.model), taps=(last,))
        assert output.hidden is not None
        rebuilt = target.head(target.final_norm(output.hidden))
        assert_same_bits(rebuilt, output.logits, f"{dtype} logits from the last layer's output")
        assert_same_bits(embedded(target, ids), seen[0], f"{dtype} what layer 0 reads")
    if len(reasons) == len(DTYPES):
        assert "Metal" in reasons[0]
        pytest.skip(reasons[0])


def embedded(target: Target, ids: mx.array) -> mx.array:
    """What layer 0 reads at the start of a text."""
    anatomy = target.anatomy
    rows = target.embed(ids)
    if anatomy.positions is None:
        return rows
    return rows + anatomy.part(target.model, anatomy.positions)(mx.arange(ids.shape[1]))
