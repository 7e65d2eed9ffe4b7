"""Near an end of a budget, or of the room before a cache is converted, no width is tried for a round or two."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache

from mlx_spec import Statistics, generate_step
from mlx_spec.cache.base import Drive
from mlx_spec.certify import Certificate, CertifiedRoutes
from mlx_spec.environment import CERTIFICATES
from mlx_spec.target.model import Target
from tests.double import PATTERNS, double
from tests.oracle import assert_same_output, run_stock
from tests.same_cache import assert_same_cache
from tests.scripted import RightDrafter
from tests.tiny import MIXES, PROMPT, VOCAB, Mix, randomise

WIDTH = 6


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Widths of the blocks that were tried on a model."""
    widths: list[int] = []
    probe = Certificate._probe

    def noted(self: Certificate, width: int, drive: Drive) -> bool:
        widths.append(width)
        return probe(self, width, drive)

    monkeypatch.setattr(Certificate, "_probe", noted)
    return widths


def fresh(mix: Mix) -> Any:
    """A model of which nothing is known."""
    return randomise(mix.build, mix.seed)


def run(mix: Mix, model: Any, tokens: int) -> Statistics:
    """Speculate with a drafter that is always right; all that is handed out and left is stock's."""
    want = run_stock(model, PROMPT, tokens, **mix.kv)
    statistics, caches = Statistics(), make_prompt_cache(model)
    steps = generate_step(
        mx.array(PROMPT),
        model,
        max_tokens=tokens,
        draft_model=RightDrafter([*want.ids, *[0] * WIDTH], VOCAB),
        draft_block_size=WIDTH,
        prompt_cache=caches,
        statistics=statistics,
        **mix.warm_kv,
    )
    assert_same_output(list(steps), want, tokens)
    assert_same_cache(caches, want.cache_after(tokens))
    return statistics


@pytest.mark.parametrize("tokens", [13, 14, 16, 18])
@pytest.mark.parametrize("name", ["dense", "hybrid", "sliding", "mamba2"])
def test_only_the_width_that_was_asked_for_is_tried(name: str, tokens: int, tried: list[int]) -> None:
    mix = MIXES[name]
    assert run(mix, fresh(mix), tokens).verify_route.startswith("block")
    assert set(tried) == {WIDTH}


def test_before_a_cache_is_converted_no_width_is_tried_either(tried: list[int]) -> None:
    mix = MIXES["quantized_from_20"]
    run(mix, fresh(mix), 40)
    assert set(tried) == {WIDTH}


def test_a_narrower_width_that_is_known_is_taken(tried: list[int]) -> None:
    mix = MIXES["dense"]
    model = fresh(mix)
    before = run(mix, model, 17).rounds
    CertifiedRoutes(Target(model), "exact", Statistics()).route(4, mix.new_cache())
    tried.clear()
    # The first token comes with the prompt, two rounds give six each, and the last four were plain steps.
    assert run(mix, model, 17).rounds == before - 3
    assert tried == []


def test_what_an_earlier_process_found_is_known(
    tried: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CERTIFICATES, str(tmp_path))
    mix = MIXES["mamba2"]
    first = fresh(mix)
    assert not CertifiedRoutes(Target(first), "exact", Statistics()).known(3, mix.new_cache())
    CertifiedRoutes(Target(first), "exact", Statistics()).route(3, mix.new_cache())
    tried.clear()
    second = fresh(mix)
    chosen = CertifiedRoutes(Target(second), "exact", Statistics())
    assert [chosen.known(width, mix.new_cache()) for width in (1, 2, 3, 4)] == [True, False, True, False]
    chosen.route(3, mix.new_cache())
    assert tried == []


def test_in_a_long_text_a_width_is_known_once_its_attention_is() -> None:
    mix = MIXES["dense"]
    with double(PATTERNS["gen13"]):
        model, caches = fresh(mix), mix.new_cache()
        mx.eval(model(mx.zeros((1, 600), mx.int32), cache=caches))
        chosen = CertifiedRoutes(Target(model), "exact", Statistics())
        chosen.route(3, mix.new_cache())
        assert not chosen.known(3, caches)
        taken = chosen.route(3, caches)
        assert CertifiedRoutes(Target(model), "exact", Statistics()).known(3, caches)
        assert CertifiedRoutes(Target(model), "exact", Statistics()).route(3, caches) == taken


def test_the_fast_way_knows_every_width() -> None:
    mix = MIXES["dense"]
    assert CertifiedRoutes(Target(mix.model()), "fast", Statistics()).known(4, mix.new_cache())
