"""Block drafters against their references.

Round `r<i>` of a golden file was run on the cache that the rounds before left. It holds what was new in the context,
`target_hidden` [1, n, K*H_t] (`context_hidden_states` for Muse-Glimmer), the block as `block_ids` [1, R] (or embedded,
`noise_embeds` [1, R, H]), and what came of it: `draft_hidden` [1, R, H], and where the reference has them
`position_ids` of context and block, `draft_tokens` [1, n], `base_logits` or `unary_logits` of each slot by itself,
`draft_logits`, `confidence_logits`. Slots that predict are the last `n` rows. `prompt_ids` are what the target read to
give the first round's states.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from mlx_spec.drafters.dflash.heads import MarkovHead
from mlx_spec.drafters.dflash.model import BlockDrafter
from mlx_spec.drafters.dflash.state import BlockState
from mlx_spec.model.target import Target
from tests.drafters.parity import CONFIG, TARGET, Comparison, Fixture, Layout
from tests.zoo.menagerie import bare_model, give_weights, whole_zoo

OWN = Path(__file__).parent.parent / "fixtures"

CHUNKS = (1, 3, 7, 1000)
"""Rows per appended chunk: however the context came in, what is drafted from it is the same."""


def _compare(fixture: Fixture, comparison: Comparison) -> None:
    drafter, target = _pair(fixture)
    expected = fixture.expected
    if "prompt_ids" in expected:
        target.attach_taps(drafter.taps)
        tapped = target.forward(expected["prompt_ids"], make_prompt_cache(target.model), drafter.taps).hidden
        assert tapped is not None
        comparison.arrays("taps", tapped, expected["r0.target_hidden"])
    for size in CHUNKS:
        state = drafter.open(target)
        for index in itertools.count():
            if f"r{index}.draft_hidden" not in expected:
                break
            hidden = _new_context(fixture, index)
            for start in range(0, hidden.shape[1], size):
                chunk = hidden[:, start : start + size]
                read = state.read_prompt if index == 0 else state.catch_up
                read([[0] * chunk.shape[1]], chunk)
            _compare_round(_Round(fixture, f"r{index}."), state, drafter, target, comparison)


class _Round:
    """One round's expected tensors."""

    def __init__(self, fixture: Fixture, prefix: str) -> None:
        self._expected = fixture.expected
        self._prefix = prefix

    def __getitem__(self, name: str) -> mx.array:
        return self._expected[self._prefix + name]

    def given(self, *names: str) -> Iterator[mx.array]:
        """Those of the tensors that the file has."""
        return (self[name] for name in names if self._prefix + name in self._expected)


def _new_context(fixture: Fixture, index: int) -> mx.array:
    names = (f"r{index}.target_hidden", f"r{index}.context_hidden_states")
    return next(fixture.expected[name] for name in names if name in fixture.expected)


def _compare_round(
    want: _Round, state: BlockState, drafter: BlockDrafter, target: Target, comparison: Comparison
) -> None:
    state.flush()
    rows = want["draft_hidden"].shape[1]
    for positions in want.given("position_ids"):
        comparison.ids("positions", mx.arange(state.position, state.position + rows), positions[0, -rows:])
    for embedded in want.given("noise_embeds"):
        got = drafter.network.run(embedded, state.contexts, state.position)
        comparison.arrays("hidden", got, want["draft_hidden"])
    for ids in want.given("block_ids"):
        bonus = ids[:, 0].astype(mx.int32)
        embedded = drafter.network.block(bonus, rows, target)
        got = drafter.network.run(embedded, state.contexts, state.position)
        comparison.arrays("hidden", got, want["draft_hidden"])
        _compare_heads(want, got[:, rows - drafter.proposals :], bonus, (drafter, target), comparison)
        for tokens in want.given("draft_tokens"):
            comparison.ids("tokens", state.propose(bonus.tolist(), drafter.proposals).ids, tokens)


def _compare_heads(
    want: _Round, states: mx.array, bonus: mx.array, pair: tuple[BlockDrafter, Target], comparison: Comparison
) -> None:
    drafter, target = pair
    heads = drafter.heads
    for logits in want.given("base_logits", "unary_logits"):
        comparison.arrays("slot logits", heads.logits(states, target), logits)
    for logits in want.given("draft_logits"):
        ours = heads.biased(states, bonus, target)[1] if isinstance(heads, MarkovHead) else heads.logits(states, target)
        comparison.arrays("logits", ours, logits)
    for odds in want.given("confidence_logits"):
        chosen = want["draft_tokens"].astype(mx.int32)
        comparison.arrays("confidence", drafter.confidence(states, bonus, chosen), mx.sigmoid(odds))


def _pair(fixture: Fixture) -> tuple[BlockDrafter, Target]:
    if fixture.target == fixture.checkpoint:
        neighbour = _neighbour(fixture)
        if neighbour is not None:
            fixture = dataclasses.replace(fixture, target=neighbour)
    if fixture.target != fixture.checkpoint:
        drafter, target = fixture.pair()
    else:
        stand_in = _stand_in(json.loads((fixture.checkpoint / CONFIG).read_text()))
        drafter, target = fixture.pair_with(stand_in), stand_in
    assert isinstance(drafter, BlockDrafter)
    return drafter, target


def _neighbour(fixture: Fixture) -> Path | None:
    """A target that gives the states the reference read, where the fixture comes without one but shows its prompt."""
    if "prompt_ids" not in fixture.expected:
        return None
    config = json.loads((fixture.checkpoint / CONFIG).read_text())
    around = (fixture.checkpoint.parent.parent, OWN)
    for found in (path.parent for folder in around for path in sorted(folder.glob(f"*/{TARGET}/{CONFIG}"))):
        theirs = json.loads((found / CONFIG).read_text())
        if all(theirs.get(key) == config.get(key) for key in ("hidden_size", "vocab_size")):
            return found
    return None


def _stand_in(config: dict[str, Any]) -> Target:
    """A random target of the right shape, for a drafter that takes no numbers from one."""
    taps = config.get("target_layer_ids") or config["dflash_config"]["target_layer_ids"]
    module = _TARGETS.get(config["model_type"], "qwen3")
    specimen = next(specimen for specimen in whole_zoo() if specimen.module == module)
    vocab_size = config.get("vocab_size", config["mask_token_id"] + 1)
    sizes = {
        "hidden_size": config["hidden_size"],
        "vocab_size": vocab_size,
        "vocab_size_per_layer_input": vocab_size,
        "num_hidden_layers": config.get("num_target_layers") or max(taps) + 2,
        "num_kv_shared_layers": 0,
    }
    kept = {key: value for key, value in specimen.config.items() if key != "layer_types"}
    model = bare_model({**kept, **sizes})
    give_weights(model, 0, mx.float32)
    return Target(model)


_TARGETS = {"muse_glimmer_assistant": "muse_glimmer", "gemma4_text": "gemma4_text"}
"""`model_type` of a drafter -> mlx-lm module of its target, where the type does not say it."""

LAYOUTS = (
    Layout("block", ("r0.target_hidden", "r0.block_ids", "r0.draft_hidden"), _compare),
    Layout("embedded block", ("r0.context_hidden_states", "r0.noise_embeds", "r0.draft_hidden"), _compare),
)
