"""Prediction layers against their references.

The golden file holds `token_ids` [1, L], the target's `target_hidden_post_norm` [1, L, H] and `target_logits`
[1, L, V], what the layer gives for the first T true pairs as `s0.hidden` [1, T, H] and, in some, `s0.logits`
[1, T, V], and a chain: after the true pairs 0 .. `chain_t`, `chain<k>.hidden` and `.logits` [1, 1, ...] of step k, each
fed the output before it and the next true token.
"""

from __future__ import annotations

import itertools

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from mlx_spec.drafters.mtp.model import MtpDrafter
from mlx_spec.model.target import Target
from mlx_spec.pairing import load_drafter
from tests.drafters.native import native_target
from tests.drafters.parity import Comparison, Fixture, Layout


def _compare(fixture: Fixture, comparison: Comparison) -> None:
    target = native_target(fixture.target)
    drafter = load_drafter(fixture.checkpoint, target)
    assert isinstance(drafter, MtpDrafter)
    tapped = _compare_target(fixture, drafter, target, comparison)
    _compare_true_pairs(fixture, drafter, target, comparison)
    _compare_chain(fixture, drafter, target, comparison)
    _compare_proposals(fixture, drafter, target, (tapped, comparison))


def _compare_target(fixture: Fixture, drafter: MtpDrafter, target: Target, comparison: Comparison) -> mx.array:
    """The state we tap and norm is the one the reference read. Returns the tapped states."""
    expected = fixture.expected
    target.attach_taps(drafter.taps)
    output = target.forward(expected["token_ids"], make_prompt_cache(target.model), drafter.taps)
    assert output.hidden is not None
    comparison.arrays("target logits", output.logits, expected["target_logits"])
    comparison.arrays("fuse", drafter.network.fuse(output.hidden, target), expected["target_hidden_post_norm"])
    return output.hidden


def _compare_true_pairs(fixture: Fixture, drafter: MtpDrafter, target: Target, comparison: Comparison) -> None:
    """In one forward, and again a few pairs at a time."""
    expected, network = fixture.expected, drafter.network
    length = expected["s0.hidden"].shape[1]
    tokens = expected["token_ids"][:, 1 : length + 1].astype(mx.int32)
    hidden = expected["target_hidden_post_norm"][:, :length]
    states = network.run(tokens, hidden, network.new_caches(), 0, target)
    comparison.arrays("s0 hidden", states, expected["s0.hidden"])
    if "s0.logits" in expected:
        comparison.arrays("s0 logits", network.logits(states, target), expected["s0.logits"])
    caches, parts = network.new_caches(), []
    for start, end in itertools.pairwise((0, 3, 4, 5, length)):
        parts.append(network.run(tokens[:, start:end], hidden[:, start:end], caches, 0, target))
    comparison.arrays("s0 in parts", mx.concatenate(parts, axis=1), expected["s0.hidden"])


def _compare_chain(fixture: Fixture, drafter: MtpDrafter, target: Target, comparison: Comparison) -> None:
    expected, network = fixture.expected, drafter.network
    tokens, last = expected["token_ids"].astype(mx.int32), int(expected["chain_t"].item())
    caches, hidden = network.new_caches(), expected["target_hidden_post_norm"][:, : last + 1]
    states = network.run(tokens[:, 1 : last + 2], hidden, caches, 0, target)[:, -1:]
    for step in itertools.count():
        if f"chain{step}.hidden" not in expected:
            return
        if step:
            fed = last + 1 + step
            states = network.run(tokens[:, fed : fed + 1], network.carry(states), caches, 0, target)
        comparison.arrays("chain hidden", states, expected[f"chain{step}.hidden"])
        comparison.arrays("chain logits", network.logits(states, target), expected[f"chain{step}.logits"])


def _compare_proposals(
    fixture: Fixture, drafter: MtpDrafter, target: Target, where: tuple[mx.array, Comparison]
) -> None:
    """A request's own state proposes the reference's first token after every prefix the reference has logits for."""
    tapped, comparison = where
    expected = fixture.expected
    logits = target.head(expected["s0.hidden"])
    tokens, state = expected["token_ids"][0].tolist(), drafter.open(target)
    for position in range(logits.shape[1]):
        read = state.read_prompt if position == 0 else state.catch_up
        read([tokens[position : position + 1]], tapped[:, position : position + 1])
        proposed = state.propose([tokens[position + 1]], 3).ids
        comparison.ids("proposals", proposed[:, :1], mx.argmax(logits[:, position : position + 1], axis=-1))


LAYOUT = Layout(
    "mtp", ("token_ids", "target_hidden_post_norm", "target_logits", "s0.hidden", "chain_t", "chain0.hidden"), _compare
)
