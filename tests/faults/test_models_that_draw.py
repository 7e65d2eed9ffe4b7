"""A model that draws random numbers in its forward gives stock's text: no block can stand for its single tokens."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.generate import generate_step as stock_step
from mlx_lm.tuner.utils import linear_to_lora_layers

from mlx_spec import Statistics, generate_step, verify_forward
from mlx_spec.drafters import CallableDrafter
from mlx_spec.errors import InvalidRequest
from tests.oracle import rng_key
from tests.rounds.runs import CHOICES
from tests.tiny import MIXES, PROMPT

pytestmark = pytest.mark.faults

EMITTED = 7


def adapted(mix: str, dropout: float = 0.3) -> Any:
    """A model with adapters, as it is left by a step of training."""
    model = MIXES[mix].build()
    keys = ["self_attn.q_proj", "mlp.down_proj"] if mix != "mamba2" else ["mixer.in_proj"]
    linear_to_lora_layers(model, 9, {"rank": 3, "scale": 2.0, "dropout": dropout, "keys": keys})
    for _, module in model.named_modules():
        if "lora_b" in module:
            module.lora_b = 0.1 * mx.random.normal(module.lora_b.shape)
    mx.eval(model.parameters())
    return model.train()


def drafter() -> dict[str, Any]:
    """One whose proposals are wrong: whatever they cost the model in draws is seen in the text."""
    return {"draft_model": CallableDrafter(lambda ids, count: [0] * count), "draft_block_size": 4}


def text(step: Any, model: Any, choice: str, taken: int, **options: Any) -> tuple[list[int], Any]:
    """Ids, and where the random state stands once the run is closed."""
    mx.random.seed(5)
    steps = step(mx.array(PROMPT), model, max_tokens=EMITTED, **CHOICES[choice](), **options)
    ids = [next(steps)[0] for _ in range(taken)]
    steps.close()
    return ids, rng_key()


@pytest.mark.parametrize("mix", ["dense", "hybrid", "mamba2"])
@pytest.mark.parametrize("choice", ["greedy", "top_p"])
@pytest.mark.parametrize("drafted", [False, True])
@pytest.mark.parametrize("verify", ["exact", "fast"])
def test_a_model_left_in_training_is_decoded_plainly_and_says_so(
    mix: str, choice: str, drafted: bool, verify: Any
) -> None:
    model, statistics = adapted(mix), Statistics()
    options: dict[str, Any] = {**drafter(), "verify": verify} if drafted else {}
    want = text(stock_step, model, choice, EMITTED)
    assert text(generate_step, model, choice, EMITTED, statistics=statistics, **options) == want
    assert any("call model.eval()" in note for note in statistics.notes) == drafted
    assert text(generate_step, model, choice, 4, **options) == text(stock_step, model, choice, 4)


def test_dropout_of_nothing_and_a_model_that_is_done_with_training_are_speculated_on() -> None:
    for model in (adapted("dense", dropout=0.0), adapted("dense").eval()):
        statistics = Statistics()
        want = text(stock_step, model, "greedy", EMITTED)
        assert text(generate_step, model, "greedy", EMITTED, statistics=statistics, **drafter()) == want
        assert (statistics.verify_route, statistics.notes) == ("block", [])


def test_to_look_whether_a_model_draws_moves_no_random_state() -> None:
    model = adapted("dense")
    mx.random.seed(3)
    before = rng_key()
    generate_step(mx.array(PROMPT), model, **drafter())
    assert rng_key() == before
    with pytest.raises(InvalidRequest, match=r"model\.eval\(\)"):
        verify_forward(model, mx.array([[1, 2]]), MIXES["dense"].new_cache())
    assert rng_key() == before


def test_a_layer_that_draws_by_itself_is_seen_too() -> None:
    class Noisy(nn.Linear):
        def __call__(self, x: mx.array) -> mx.array:
            return super().__call__(x) + 0.1 * mx.random.normal(x.shape[:-1] + (1,))

    model = MIXES["dense"].build()
    mlp = model.model.layers[1].mlp
    noisy = Noisy(*reversed(mlp.down_proj.weight.shape), bias=False)
    noisy.weight = mlp.down_proj.weight
    mlp.down_proj = noisy
    want = text(stock_step, model, "greedy", EMITTED)
    assert text(generate_step, model, "greedy", EMITTED, **drafter()) == want


def test_a_model_put_to_training_between_the_call_and_the_first_token_is_decoded_plainly() -> None:
    model, statistics = adapted("dense").eval(), Statistics()
    mx.random.seed(5)
    steps = generate_step(mx.array(PROMPT), model, max_tokens=EMITTED, statistics=statistics, **drafter())
    model.train()
    assert [token for token, _ in steps] == text(stock_step, model, "greedy", EMITTED)[0]
    assert any("call model.eval()" in note for note in statistics.notes)


def test_to_look_at_a_warm_cache_moves_no_random_state() -> None:
    model, cache = adapted("dense"), MIXES["dense"].new_cache()
    mx.eval(model(mx.array([[1, 2]]), cache=cache))
    mx.random.seed(3)
    before = rng_key()
    generate_step(mx.array(PROMPT), model, prompt_cache=cache)
    assert rng_key() == before
