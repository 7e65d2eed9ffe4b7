"""What an open round holds and what a commit moves, in bytes: counted by the round, and measured at the allocator."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import pytest
from mlx import nn
from mlx_lm.models.cache import ArraysCache, RotatingKVCache, make_prompt_cache

from mlx_spec import SpeculativeCacheTransaction
from mlx_spec.cache.adopt import leaves
from mlx_spec.cache.base import Drive
from mlx_spec.cache.contents import cache_arrays
from mlx_spec.verify import mixers, routes
from tests.cache import kinds
from tests.cache.kinds import HEADS, KINDS, RING, WINDOW_STEPS, Kind, arrays_of
from tests.recalled import remembered_maps
from tests.zoo.menagerie import bare_model, give_weights

WIDTH = 4
FLOAT = 4
SLACK = 1024
"""Bytes that differ between two runs of the same work: numbers per row, and what the allocator rounds up."""

CONTEXTS = (40, 300)
"""Both past every window, chunk and growth of the kinds but one growth, which lies between them."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of one row and of one recurrent state; all of them differ."""

    key: int
    value: int
    state: int

    def row(self, kind: Kind) -> int:
        """Bytes of keys and values of one position."""
        return kind.batch * HEADS * (self.key + self.value) * FLOAT

    def recurrent(self, kind: Kind) -> int:
        """Bytes of the state and the convolution window of the stand-in."""
        return kind.batch * (1 + WINDOW_STEPS) * self.state * FLOAT


SIZES = (Sizes(32, 64, 200), Sizes(64, 96, 330))


@pytest.fixture(params=SIZES, ids=["small", "large"])
def sizes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Sizes:
    """Sizes of what the stand-in for a layer writes."""
    for name, size in zip(("KEY_DIM", "VALUE_DIM", "STATE_DIM"), vars(request.param).values(), strict=True):
        monkeypatch.setattr(kinds, name, size)
    return request.param


@pytest.fixture(autouse=True)
def _counted_exactly() -> Iterator[None]:
    """Only counted references free anything, so that what is part of a cycle shows; no buffer is used a second time,
    because one that is larger than asked for would be counted whole."""
    gc.disable()
    limit = mx.set_cache_limit(0)
    yield
    mx.set_cache_limit(limit)
    gc.enable()


def nothing(kind: Kind, sizes: Sizes, context: int) -> int:
    return 0


def overwritten_and_written(kind: Kind, sizes: Sizes, context: int) -> int:
    return 2 * WIDTH * sizes.row(kind)


def a_state_for_each_position(kind: Kind, sizes: Sizes, context: int) -> int:
    return WIDTH * sizes.recurrent(kind)


def padding_too(kind: Kind, sizes: Sizes, context: int) -> int:
    return WIDTH * (sizes.recurrent(kind) + kind.batch * FLOAT)


def whole_cache_for_each_position(kind: Kind, sizes: Sizes, context: int) -> int:
    """Its window, and the pending rows, which the stand-in lets grow."""
    pending = sum(context + position for position in range(WIDTH))
    return kind.batch * FLOAT * (WIDTH * RING * sizes.key + pending * sizes.state)


HELD: dict[str, Callable[[Kind, Sizes, int], int]] = {
    "kv": nothing,
    "kv_of_three_rows": nothing,
    "quantized": nothing,
    "list_by_length": nothing,
    "list_mixed": a_state_for_each_position,
    "nested": overwritten_and_written,
    "ring": overwritten_and_written,
    "ring_without_keep": overwritten_and_written,
    "arrays": a_state_for_each_position,
    "arrays_padded": padding_too,
    "concatenate": nothing,
    "batch_kv": nothing,
    "model_specific": whole_cache_for_each_position,
}
"""Bytes of an open round that holds its whole block, per kind. Those that are missing have a test of their own."""

COUNTED = pytest.mark.parametrize("kind", [KINDS[name] for name in HELD], ids=HELD)
EVERY_KIND = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())
AT_BOTH_CONTEXTS = pytest.mark.parametrize("context", CONTEXTS)


def filled(kind: Kind, context: int) -> Any:
    """A cache that read a prompt at once and its last two tokens one by one, as at the start of decoding."""
    cache = kind.filled_at_once(range(context - 2))
    kind.step(cache, [context - 2, context - 1])
    return cache


def feed(tx: SpeculativeCacheTransaction, kind: Kind) -> None:
    """The round's whole block, one evaluated token after the other."""
    for token in range(WIDTH):
        kind.step(tx.caches[0], [token])
        tx.mark(1)


def taken(action: Callable[[], Any]) -> int:
    """Bytes in use after an action that were not before it."""
    before = mx.get_active_memory()
    action()
    return int(mx.get_active_memory() - before)


def moved(action: Callable[[], Any]) -> int:
    """Bytes that an action took on the way, above what was in use before it. What is written in place takes none."""
    # What was started before, and is still to be let go of, would count as in use.
    mx.synchronize()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    action()
    return max(0, int(mx.get_peak_memory() - before))


# Held

SLICED = ("concatenate", "model_specific", "arrays", "list_mixed")
"""Kinds whose arrays share their buffers with rows that are no longer seen: mlx keeps more for them than they count."""


@COUNTED
@AT_BOTH_CONTEXTS
def test_an_open_round_counts_what_the_table_says(kind: Kind, context: int, sizes: Sizes) -> None:
    cache = filled(kind, context)
    with SpeculativeCacheTransaction([cache], WIDTH) as tx:
        feed(tx, kind)
        assert tx.nbytes == HELD[kind.name](kind, sizes, context)


@AT_BOTH_CONTEXTS
def test_a_ring_of_several_rows_counts_what_one_row_counts(context: int, sizes: Sizes) -> None:
    kind = KINDS["batch_ring"]
    cache = filled(kind, context)
    with SpeculativeCacheTransaction([cache], WIDTH) as tx:
        feed(tx, kind)
        assert 0 <= tx.nbytes - overwritten_and_written(kind, sizes, context) <= SLACK


@AT_BOTH_CONTEXTS
def test_a_chunked_window_counts_at_most_its_old_buffers_and_the_blocks_rows(context: int, sizes: Sizes) -> None:
    kind = KINDS["chunked"]
    cache = filled(kind, context)
    edge = cache.nbytes
    with SpeculativeCacheTransaction([cache], WIDTH) as tx:
        feed(tx, kind)
        assert tx.nbytes <= edge + overwritten_and_written(kind, sizes, context)


@pytest.mark.parametrize("name", ["ring", "ring_without_keep"])
@AT_BOTH_CONTEXTS
def test_the_first_round_after_a_long_prompt_holds_the_uncut_window_too(name: str, context: int, sizes: Sizes) -> None:
    kind = KINDS[name]
    with SpeculativeCacheTransaction([kind.filled_at_once(range(context))], WIDTH) as tx:
        feed(tx, kind)
        assert tx.nbytes == context * sizes.row(kind) + overwritten_and_written(kind, sizes, context)


@pytest.mark.parametrize("name", [name for name in KINDS if name not in SLICED])
@AT_BOTH_CONTEXTS
def test_what_an_open_round_counts_is_what_it_takes(name: str, context: int, sizes: Sizes) -> None:
    """Against the same steps without a round."""
    kind = KINDS[name]
    plain, cache = filled(kind, context), filled(kind, context)
    alone = taken(lambda: kind.step(plain, range(WIDTH)))
    before = mx.get_active_memory()
    tx = SpeculativeCacheTransaction([cache], WIDTH)
    feed(tx, kind)
    assert abs(mx.get_active_memory() - before - alone - tx.nbytes) <= SLACK
    tx.abort()


@EVERY_KIND
@pytest.mark.parametrize("retained", [0, 2, WIDTH, None], ids=["commit(0)", "commit(2)", "commit(all)", "abort"])
def test_a_closed_round_holds_nothing(kind: Kind, retained: int | None, sizes: Sizes) -> None:
    """Its object and its leaf are kept, to show that they keep nothing alive either."""
    plain, cache = filled(kind, CONTEXTS[0]), filled(kind, CONTEXTS[0])
    alone = taken(lambda: kind.step(plain, range(retained or 0)))
    before = mx.get_active_memory()
    tx = SpeculativeCacheTransaction([cache], WIDTH)
    kept = list(tx.caches)
    feed(tx, kind)
    tx.abort() if retained is None else tx.commit(retained)
    mx.eval(arrays_of(cache))
    assert tx.nbytes == 0
    # Arrays without spare capacity are cut as slices: the rows that were not kept go with the next write.
    behind = WIDTH * sizes.row(kind) if kind.name == "concatenate" else 0
    assert mx.get_active_memory() - before - alone <= behind + SLACK
    del kept


# Written in place


@pytest.mark.parametrize(
    "name",
    ["kv", "quantized", "batch_kv", "ring", "batch_ring"],
)
def test_a_write_while_a_round_is_open_copies_no_buffer(
    name: str, sizes: Sizes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kinds, "RING", 400)
    kind = KINDS[name]
    cache = filled(kind, CONTEXTS[1])
    buffers = sum(array.nbytes for array in arrays_of(cache))
    with SpeculativeCacheTransaction([cache], WIDTH) as tx:
        # A window's rows are being copied; until that is done mlx does not write to the buffer they come from.
        mx.synchronize()
        takes = [moved(lambda: kind.step(tx.caches[0], [1])) for _ in range(WIDTH)]
    assert max(takes) < 8 * sizes.row(kind)
    assert max(takes) < buffers // 4


# Moved by a commit


def moved_by_commit(kind: Kind, context: int, retained: int | list[int]) -> int:
    cache = filled(kind, context)
    tx = SpeculativeCacheTransaction([cache], WIDTH)
    feed(tx, kind)

    def commit() -> None:
        tx.commit(retained)
        mx.eval(arrays_of(cache))

    return moved(commit)


@EVERY_KIND
@pytest.mark.parametrize("retained", [0, 2, WIDTH])
def test_a_commit_moves_no_more_after_a_long_context(kind: Kind, retained: int, sizes: Sizes) -> None:
    short, long = (moved_by_commit(kind, context, retained) for context in CONTEXTS)
    assert abs(long - short) <= SLACK
    assert long <= 2 * WIDTH * sizes.row(kind)


@AT_BOTH_CONTEXTS
def test_rows_of_a_batch_kept_apart_move_their_buffers(sizes: Sizes, context: int) -> None:
    """As the table says of ragged counts, and as the measure sees: at least one copy at a time."""
    kind = KINDS["batch_kv"]
    largest = max(array.nbytes for array in arrays_of(filled(kind, context)))
    assert moved_by_commit(kind, context, [1, 3, 2]) >= largest


@AT_BOTH_CONTEXTS
def test_rows_of_a_ring_kept_apart_move_a_few_windows_whatever_the_context(sizes: Sizes, context: int) -> None:
    """How many copies live at once is mlx's choice."""
    window = kinds.RING * sizes.row(KINDS["batch_ring"])
    assert moved_by_commit(KINDS["batch_ring"], context, [1, 3]) <= 8 * window


# Models with their token mixers

_GATED_DELTA = {
    "model_type": "qwen3_5_text",
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "full_attention_interval": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_value_heads": 6,
    "linear_num_key_heads": 3,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 20,
    "linear_conv_kernel_dim": 4,
    "rope_parameters": {"type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25},
}
_MAMBA = {
    "model_type": "mamba",
    "vocab_size": 97,
    "hidden_size": 40,
    "intermediate_size": 72,
    "state_size": 14,
    "num_hidden_layers": 3,
    "conv_kernel": 4,
    "use_bias": False,
    "use_conv_bias": True,
    "time_step_rank": 5,
    "tie_word_embeddings": False,
}
_SHORT_CONVOLUTION = {
    "model_type": "lfm2",
    "vocab_size": 97,
    "hidden_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "norm_eps": 1e-5,
    "conv_bias": True,
    "conv_L_cache": 3,
    "block_dim": 48,
    "block_ff_dim": 74,
    "block_multiple_of": 2,
    "block_ffn_dim_multiplier": 1.0,
    "block_auto_adjust_ff_dim": False,
    "layer_types": ["conv", "conv", "full_attention", "conv"],
}
_SLIDING = {
    "model_type": "gemma3_text",
    "vocab_size": 97,
    "hidden_size": 40,
    "num_hidden_layers": 5,
    "intermediate_size": 72,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "query_pre_attn_scalar": 12,
    "sliding_window": 11,
    "sliding_window_pattern": 3,
}

MODELS: dict[str, dict[str, Any]] = {
    "gated delta": {"model_type": "qwen3_5", "text_config": _GATED_DELTA},
    "gated delta, larger state": {
        "model_type": "qwen3_5",
        "text_config": {**_GATED_DELTA, "linear_value_head_dim": 44, "linear_num_value_heads": 9},
    },
    "mamba": _MAMBA,
    "mamba, larger state": {**_MAMBA, "state_size": 30},
    "short convolution": _SHORT_CONVOLUTION,
    "short convolution, larger state": {**_SHORT_CONVOLUTION, "conv_L_cache": 6},
    "sliding": _SLIDING,
    "sliding, larger rows": {**_SLIDING, "head_dim": 20},
}


@functools.cache
def mixing(name: str) -> nn.Module:
    """A model whose mixers are attached."""
    model = bare_model(MODELS[name])
    give_weights(model, 0, mx.float32)
    mixers.attach(model)
    routes.remember(model)
    return model


def read(model: nn.Module, caches: list[Any], held: list[Any], count: int) -> None:
    """An evaluated forward over `count` tokens. `held` are the caller's caches behind `caches`."""
    ids = mx.array([[(7 * position + 3) % 97 for position in range(count)]])
    mx.eval(model(ids, cache=caches), cache_arrays(held))


def prefilled(model: nn.Module, context: int) -> list[Any]:
    """Caches after a prompt and one single token."""
    caches = make_prompt_cache(model)
    for count in (context - 1, 1):
        read(model, caches, caches, count)
    return caches


def promised(model: nn.Module, caches: list[Any], hidden: int) -> int:
    """Bytes by the table: old state, inputs and projections of recurrent layers, twice the width in rows of windows."""
    total = sum(WIDTH * part.weight.shape[0] * FLOAT for part in remembered_maps(model))
    for cache in leaves(caches):
        if isinstance(cache, ArraysCache):
            total += cache.nbytes + WIDTH * hidden * FLOAT
        elif isinstance(cache, RotatingKVCache):
            total += 2 * WIDTH * cache.nbytes // cache.keys.shape[2]
    return total


AFTER_PROMPTS = pytest.mark.parametrize("context", [20, 280])
EVERY_MODEL = pytest.mark.parametrize("name", MODELS)


@pytest.mark.slow
@EVERY_MODEL
@AFTER_PROMPTS
def test_a_models_open_round_holds_old_states_inputs_and_projections(name: str, context: int) -> None:
    model, config = mixing(name), MODELS[name].get("text_config", MODELS[name])
    plain, caches = prefilled(model, context), prefilled(model, context)
    want = promised(model, caches, config["hidden_size"])
    # A window takes a block in single writes while a round is open, and whole otherwise.
    tokens = 1 if "sliding" in name else WIDTH
    alone = taken(lambda: [read(model, plain, plain, tokens) for _ in range(0, WIDTH, tokens)])
    before = mx.get_active_memory()
    tx = SpeculativeCacheTransaction(caches, WIDTH, drive=Drive.BLOCK)
    read(model, tx.caches, caches, WIDTH)
    tx.mark(WIDTH)
    assert tx.nbytes == want
    takes = mx.get_active_memory() - before - alone
    # A convolution window shares its buffer with the row that fell out of it.
    assert want - SLACK <= takes <= want * 1.2 + SLACK
    tx.abort()
    mx.eval(cache_arrays(caches))
    assert mx.get_active_memory() - before <= SLACK


@EVERY_MODEL
@AFTER_PROMPTS
@pytest.mark.parametrize("retained", [0, 2, WIDTH])
def test_a_models_commit_moves_no_more_after_a_long_context(name: str, context: int, retained: int) -> None:
    """Keeping part runs mixers again over a few tokens; keeping nothing or all of them moves nothing."""
    model = mixing(name)
    caches = prefilled(model, context)
    tx = SpeculativeCacheTransaction(caches, WIDTH, drive=Drive.BLOCK)
    read(model, tx.caches, caches, WIDTH)
    tx.mark(WIDTH)
    held = tx.nbytes

    def commit() -> None:
        tx.commit(retained)
        mx.eval(cache_arrays(caches))

    # What is in use at once while mixers run depends on how mlx's threads interleave.
    assert moved(commit) <= (6 * held if retained == 2 else 0)
