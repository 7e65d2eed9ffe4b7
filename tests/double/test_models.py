"""Whole models under the double: a block forward does not have the bits of one-token forwards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models import bitlinear_layers, kimi_k3, ssm
from mlx_lm.models.cache import make_prompt_cache

from tests.bits import assert_same_bits, bit_difference
from tests.double import PATTERNS, Pattern, double
from tests.double.branches import mixed_residual, ssm_step
from tests.oracle import independent_copy
from tests.zoo.menagerie import Specimen, whole_zoo
from tests.zoo.trial import PROMPTS, first_line

ZOO = {specimen.name: specimen for specimen in whole_zoo()}
BLOCK = (3, 9, 4)

SOON = (
    "gemma",
    "gpt2",
    "gpt_neox",
    "kimi_k3",
    "llama",
    "lfm2",
    "mamba2",
    "olmo2",
    "phi3",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "qwen3_next",
    "rwkv7",
    "starcoder2",
)
"""Architectures whose blocks have the bits of single tokens without the double, or are of a kind of their own."""

EQUAL_WITHOUT = ("gpt2", "llama", "qwen2", "qwen3", "qwen3_moe")


def diverges(specimen: Specimen, pattern: Pattern | None, dtype: str, block: Sequence[int] = BLOCK) -> bool:
    """Whether a stock block forward gives some position other bits than stock one-token forwards do."""
    if pattern is not None:
        with double(pattern):
            return diverges(specimen, None, dtype, block)
    model = specimen.build(dtype)
    caches: list[Any] = make_prompt_cache(model, max_kv_size=specimen.max_kv_size)
    mx.eval(model(mx.array([PROMPTS[0]]), cache=caches))
    stepped = independent_copy(caches)
    together = model(mx.array([block]), cache=caches)
    for position, token in enumerate(block):
        if bit_difference(together[:, position], model(mx.array([[token]]), cache=stepped)[:, 0]) is not None:
            return True
    return False


@pytest.mark.parametrize("pattern", PATTERNS.values(), ids=lambda pattern: pattern.name)
def test_stock_blocks_diverge_under_every_pattern(pattern: Pattern) -> None:
    assert [name for name in SOON if not diverges(ZOO[name], pattern, "float32")] == []


def test_stock_blocks_do_not_diverge_without() -> None:
    assert [name for name in EQUAL_WITHOUT if diverges(ZOO[name], None, "float32")] == []


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
def test_stock_blocks_diverge_in_half_precision_too(name: str) -> None:
    assert not diverges(ZOO[name], None, "bfloat16")
    assert all(diverges(ZOO[name], pattern, "bfloat16") for pattern in PATTERNS.values())


@pytest.mark.deep
@pytest.mark.parametrize("pattern", PATTERNS.values(), ids=lambda pattern: pattern.name)
def test_stock_blocks_of_nearly_every_architecture_diverge(
    pattern: Pattern, capsys: pytest.CaptureFixture[str]
) -> None:
    found, equal, stopped = 0, [], []
    for name, specimen in ZOO.items():
        try:
            if diverges(specimen, pattern, "float32"):
                found += 1
            else:
                equal.append(name)
        except (Exception, SystemExit) as error:  # noqa: BLE001  what does not run here may fail in any way
            stopped.append(f"{name} ({first_line(error)})")
    with capsys.disabled():
        print(f"\n{pattern.name}: {found} of {len(ZOO)} diverge; equal: {equal}; not run: {stopped}")  # noqa: T201
    assert found > len(ZOO) * 3 // 4


LIMITS = (0.001, 100.0)


def ssm_arguments(tokens: int, dtype: mx.Dtype = mx.float32) -> list[mx.array]:
    """hidden states, A_log, B, C, D, dt, dt_bias, state"""
    draw = iter(mx.random.split(mx.random.key(3), 8))
    shapes = ((2, tokens, 6, 5), (6,), (2, tokens, 3, 7), (2, tokens, 3, 7), (6,), (2, tokens, 6), (6,))
    arguments = [mx.random.normal(shape, key=next(draw)).astype(dtype) for shape in shapes]
    return [*arguments, mx.random.normal((2, 6, 5, 7), key=next(draw))]


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=str)
def test_one_token_of_a_state_space_model_takes_the_step_and_computes_the_same(dtype: mx.Dtype) -> None:
    arguments = ssm_arguments(1, dtype)
    chunked = ssm.ssm_update(*arguments)
    with double(PATTERNS["gen13"]):
        stepped = ssm.ssm_update(*arguments)
        mx.eval(stepped)
    assert bit_difference(stepped[0], chunked[0]) is not None
    in_float = ssm.ssm_attn(*(argument.astype(mx.float32) for argument in arguments))
    for got, want, direct in zip(stepped, in_float, ssm_step(*arguments, LIMITS), strict=True):
        assert_same_bits(got, direct)
        # The step computes in float and rounds once.
        once = mx.abs(want) * (2.0**-8 if got.dtype == mx.bfloat16 else 0.0)
        assert mx.all(mx.abs(got.astype(mx.float32) - want) <= once + 2.0**-16).item()


def test_several_tokens_of_a_state_space_model_take_the_chunked_form() -> None:
    arguments = ssm_arguments(3)
    with double(PATTERNS["gen13"]):
        got = ssm.ssm_update(*arguments)
        want = ssm.ssm_attn(*arguments)
        mx.eval(got, want)
    for mine, theirs in zip(got, want, strict=True):
        assert_same_bits(mine, theirs)


def test_kimi_k3_takes_its_decode_step_only_with_the_double_on(monkeypatch: pytest.MonkeyPatch) -> None:
    model = ZOO["kimi_k3"].build("float32")
    mixers = [module for module in model.modules() if isinstance(module, kimi_k3.KimiK3DeltaAttention)]
    stepping: list[int] = []
    compile_stock = mx.compile

    def noted(function: Any, *args: Any, **keywords: Any) -> Any:
        """The step is a method of the mixer, compiled when it is first taken."""
        owner = getattr(function, "__self__", None)
        stepping.extend([id(owner)] if isinstance(owner, kimi_k3.KimiK3DeltaAttention) else [])
        return compile_stock(function, *args, **keywords)

    monkeypatch.setattr(mx, "compile", noted)
    caches = make_prompt_cache(model)
    model(mx.array([[5, 17]]), cache=caches)
    model(mx.array([[5]]), cache=caches)
    assert stepping == []
    with double(PATTERNS["gen13"]):
        model(mx.array([[5]]), cache=caches)
    assert mixers
    assert sorted(stepping) == sorted(id(mixer) for mixer in mixers)


def test_bitnet_runs_and_multiplies_by_ternary_weights() -> None:
    layer = bitlinear_layers.BitLinear(10, 12, bias=False, invert_weight_scales=True)
    digits = mx.random.randint(0, 3, (12, 10), key=mx.random.key(0))
    quarters = digits.reshape(4, 3, 10)
    layer.weight = sum(quarters[place] << 2 * place for place in range(4)).astype(mx.uint8)
    layer.weight_scale = mx.array([4.0])
    x = mx.random.randint(-8, 8, (2, 3, 10), key=mx.random.key(1)).astype(mx.float32)
    with double(PATTERNS["gen13"]):
        got = layer(x)
        mx.eval(got)
    # Small whole numbers and a power of two: nothing is rounded.
    assert_same_bits(got, (x @ (digits - 1).astype(mx.float32).T) / 4)
    assert diverges(ZOO["bitnet"], PATTERNS["gen13"], "float32")


@pytest.mark.slow
def test_mixed_residuals_of_kimi_k3_treat_each_row_alone_and_compute_the_same() -> None:
    blocks = kimi_k3.ResidualBlocks(1e-5)
    draw = mx.random.split(mx.random.key(1), 4)
    for key in draw[:2]:
        blocks.append(mx.random.normal((1, 3, 24), key=key))
    partial, weight = mx.random.normal((1, 3, 24), key=draw[2]), mx.random.normal((24,), key=draw[3])
    got = mixed_residual(blocks, partial, weight, 1e-5)
    assert float(mx.abs(got - kimi_k3._attn_res_mix(blocks, partial, weight, 1e-5)).max()) < 2.0**-18
    for row in range(3):
        one = kimi_k3.ResidualBlocks(1e-5)
        one.raw, one.inv_rms = blocks.raw[:, :, row : row + 1], blocks.inv_rms[:, :, row : row + 1]
        alone = mixed_residual(one, partial[:, row : row + 1], weight, 1e-5)
        assert_same_bits(alone, got[:, row : row + 1], f"row {row}")
