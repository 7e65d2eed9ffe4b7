"""EAGLE-3 against its references.

The golden file holds `token_ids` [1, T+1], `aux_hidden` [1, T, K*H_t], `fc_out` [1, T, H], and per step `s<i>`
`layer_out` [1, T, H], `logits` [1, T, V_draft], `draft_ids` [1, T]. The reference rolls all positions out at once, as
in training: row t of step s saw true pairs up to t, and then s pairs of an output fed back with the true next token.
Its last s rows lack such a token and are left out.
"""

from __future__ import annotations

import itertools

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from mlx_spec.drafters.chain import ChainNetwork
from mlx_spec.drafters.eagle3.model import Eagle3Drafter
from mlx_spec.model.target import Target
from tests.drafters.parity import TOLERANCE, Comparison, Fixture, Layout, Tensors


def _compare(fixture: Fixture, comparison: Comparison) -> None:
    drafter, target = fixture.pair()
    assert isinstance(drafter, Eagle3Drafter)
    expected = fixture.expected
    tokens = expected["token_ids"].astype(mx.int32)
    _compare_taps(drafter, target, expected, comparison)
    hidden = drafter.network.fuse(expected["aux_hidden"], target)
    comparison.arrays("fc", hidden, expected["fc_out"])
    states = drafter.network.run(tokens[:, 1:], hidden, drafter.network.new_caches(), 0, target)
    _compare_step(drafter.network, target, states, (expected, 0, slice(None)), comparison)
    for position in range(tokens.shape[1] - 2):
        _compare_chain(drafter.network, target, (expected, position), comparison)
    _compare_proposals(fixture, drafter, target, comparison)


def _compare_taps(drafter: Eagle3Drafter, target: Target, expected: Tensors, comparison: Comparison) -> None:
    """The layers we tap are those the reference read; left out where its states are of none of the target's layers."""
    layers = tuple(range(target.layer_count))
    target.attach_taps(layers)
    tokens = expected["token_ids"].astype(mx.int32)[:, : expected["aux_hidden"].shape[1]]
    outputs = target.forward(tokens, make_prompt_cache(target.model), layers).hidden
    assert outputs is not None
    ours = mx.split(outputs, len(layers), axis=-1)
    theirs = mx.split(expected["aux_hidden"], len(drafter.taps), axis=-1)
    for tap, state in zip(drafter.taps, theirs, strict=True):
        if any(mx.allclose(output, state, atol=TOLERANCE).item() for output in ours):
            comparison.arrays("taps", ours[tap], state)


def _compare_step(
    network: ChainNetwork,
    target: Target,
    states: mx.array,
    where: tuple[Tensors, int, slice],
    comparison: Comparison,
) -> None:
    """What the layers, the head and the argmax give at some rows of one step."""
    expected, step, rows = where
    logits = network.logits(states, target)
    comparison.arrays(f"s{step} layer", states, expected[f"s{step}.layer_out"][:, rows])
    comparison.arrays(f"s{step} logits", logits, expected[f"s{step}.logits"][:, rows])
    comparison.ids(f"s{step} ids", mx.argmax(logits, axis=-1), expected[f"s{step}.draft_ids"][:, rows])


def _compare_chain(network: ChainNetwork, target: Target, where: tuple[Tensors, int], comparison: Comparison) -> None:
    """Read the true pairs up to a position, then feed each output back."""
    expected, position = where
    tokens, caches = expected["token_ids"].astype(mx.int32), network.new_caches()
    hidden = network.fuse(expected["aux_hidden"][:, : position + 1], target)
    states = network.run(tokens[:, 1 : position + 2], hidden, caches, 0, target)[:, -1:]
    for step in itertools.count(1):
        fed = position + 1 + step
        if f"s{step}.logits" not in expected or fed >= tokens.shape[1]:
            return
        states = network.run(tokens[:, fed : fed + 1], network.carry(states), caches, 0, target)
        _compare_step(network, target, states, (expected, step, slice(position, position + 1)), comparison)


def _compare_proposals(fixture: Fixture, drafter: Eagle3Drafter, target: Target, comparison: Comparison) -> None:
    """A request's own state proposes the reference's first token after every prefix, in the target's vocabulary."""
    expected = fixture.expected
    tokens = expected["token_ids"][0].tolist()
    chosen = expected["s0.draft_ids"]
    if "d2t" in fixture.stored:
        chosen = chosen + fixture.stored["d2t"][chosen]
    state = drafter.open(target)
    for position in range(len(tokens) - 1):
        read = state.read_prompt if position == 0 else state.catch_up
        read([tokens[position : position + 1]], expected["aux_hidden"][:, position : position + 1])
        proposed = state.propose([tokens[position + 1]], 2).ids
        comparison.ids("proposals", proposed[:, :1], chosen[:, position : position + 1])


LAYOUT = Layout("eagle3", ("aux_hidden", "fc_out", "token_ids", "s0.layer_out", "s0.logits", "s0.draft_ids"), _compare)
