"""Branches of mlx-lm models that are taken only where Metal is, and differ between one token and several.

Forced here:

* `ssm.py` (mamba2, falcon_h1, granitemoehybrid, nemotron_h, plamo2): one token takes a recurrent step, several take the
  chunked form. The step is the kernel's formula in mlx ops.
* `kimi_k3.py`: one token takes a compiled decode step of its own. The kernel that mixes residual blocks, one for any
  number of rows, takes the place of matmuls that would not have the same bits for each.
* `bitlinear_layers.py`: mlx-lm has nothing that stands in for its kernel, which treats each row alone. Here it has, so
  that bitnet runs.

Left as they are:

* `gated_delta.py`, `rwkv7.py` and the Sinkhorn loop of `deepseek_v41.py`: one kernel serves any number of tokens in the
  order of the positions, as do the ops that stand in for it elsewhere.
* `mlx_lm/kernels/`: norms, rotations, routing and combinations, each of one token alone. Nothing stands in for them,
  so muse_spark does not run without Metal.
* Convolutions that are not depthwise, `mx.einsum` and its relatives: no model of mlx-lm decodes by them.
* `mx.qqmm`, which quantizes activations: how its rows are dispatched is not known.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx_lm.models import bitlinear_layers, kimi_k3, ssm


class _AlwaysAvailable:
    @staticmethod
    def is_available() -> bool:
        return True


class MetalFace:
    """`mlx.core` as a module sees it that believes to be where Metal is."""

    metal = _AlwaysAvailable

    def __getattr__(self, name: str) -> Any:
        return getattr(mx, name)

    @staticmethod
    def default_device() -> Any:
        return mx.gpu


def ssm_step(hidden_states: mx.array, *others: Any) -> tuple[mx.array, mx.array]:
    """One token of a state-space model, as `ssm.ssm_update_kernel` computes it.

    Args:
        hidden_states: [batch, 1, heads, width]
        others: A_log [heads], B and C [batch, 1, groups, state], D [heads], dt [batch, 1, heads], dt_bias [heads],
            state [batch, heads, width, state], least and greatest dt.
    """
    A_log, B, C, D, dt, dt_bias, state, limits = others
    batch, _, heads, _ = hidden_states.shape
    repeats = heads // B.shape[-2]
    dt = ssm.compute_dt(dt, dt_bias, limits).reshape(batch, heads, 1, 1)
    decay = mx.exp(-mx.exp(A_log.astype(mx.float32)).reshape(1, heads, 1, 1) * dt)
    x = hidden_states[:, 0, :, :, None].astype(mx.float32)
    into, out_of = (mx.repeat(each[:, 0], repeats, axis=1)[:, :, None].astype(mx.float32) for each in (B, C))
    next_state = decay * state + x * dt * into
    y = (next_state * out_of).sum(axis=-1) + x[..., 0] * D.reshape(1, heads, 1)
    return y.astype(hidden_states.dtype)[:, None], next_state.astype(state.dtype)


def mixed_residual(
    blocks: Any, partial_sum: mx.array, w_eff: mx.array, eps: float, use_kernel: bool = True
) -> mx.array:
    """`kimi_k3._attn_res_mix` with sums that treat each row alone, as its kernel does."""
    if blocks.raw is None:
        return partial_sum
    raw, own = blocks.raw.astype(mx.float32), partial_sum.astype(mx.float32)
    own_logit = (own * w_eff).sum(axis=-1) * mx.rsqrt((own * own).mean(axis=-1) + eps)
    logits = mx.concatenate([(raw * w_eff).sum(axis=-1) * blocks.inv_rms, own_logit[None]])
    shares = mx.softmax(logits, axis=0, precise=True)[..., None]
    out = shares[-1] * own
    for share, block in zip(shares[:-1], raw, strict=True):
        out = out + share * block
    return out.astype(partial_sum.dtype)


def ternary_product(*, inputs: list[mx.array], template: list[tuple[str, Any]], **launch: Any) -> list[mx.array]:
    """Rows times ternary weights, four of them a byte, as `bitlinear_layers`' kernel computes it.

    Args:
        inputs: rows [M, K], packed weights [N / 4, K], scale [1].
    """
    rows, packed, scale = inputs
    options = dict(template)
    weight = mx.concatenate([(packed >> shift) & 3 for shift in (0, 2, 4, 6)]).astype(mx.float32) - 1
    sums = (rows[:, None].astype(mx.float32) * weight).sum(axis=-1)
    factor = scale.astype(mx.float32)
    return [(sums * (1 / factor if options["invert_weight_scales"] else factor)).astype(options["T"])]


def forced() -> list[tuple[Any, str, Any]]:
    """(owner, attribute, value) of what is replaced."""
    face = MetalFace()
    return [
        (ssm, "mx", face),
        (ssm, "ssm_update_kernel", ssm_step),
        (bitlinear_layers, "_bitlinear_kernel", ternary_product),
        (kimi_k3, "mx", face),
        (kimi_k3, "_attn_res_mix", mixed_residual),
    ]
