"""Tensors of block drafters: whatever is wrong with one is an error that names it."""

from __future__ import annotations

import warnings
from pathlib import Path

import mlx.core as mx
import pytest

from mlx_spec.errors import CheckpointError
from tests.drafters.block_files import (
    FOLDERS,
    HIDDEN,
    Config,
    Tensors,
    cold,
    drafter,
    edited,
    load,
    target,
    tensors,
    text,
    write,
)
from tests.drafters.test_blocks import laguna, laguna_tensors, merge
from tests.drafters.test_blocks_config import speculators

COUNTS = {
    "dflash": 25,
    "dflash_sliding": 25,
    "dflash2": 36,
    "dspark": 31,
    "dspark_gated": 33,
    "gemma4_dspark": 35,
    "muse_glimmer_assistant": 25,
}


def refusal(folder: Path) -> str:
    with pytest.raises(CheckpointError) as refused:
        load(folder)
    assert str(folder) in str(refused.value)
    assert "\n" not in str(refused.value)
    return str(refused.value)


@pytest.mark.part(3)
@pytest.mark.parametrize("name", FOLDERS)
def test_every_tensor_that_is_missing_is_named_with_its_shape(tmp_path: Path, name: str) -> None:
    assert len(tensors(name)) == COUNTS[name]
    for tensor, array in tensors(name).items():
        message = refusal(write(tmp_path, name, edit_tensors=lambda content, gone=tensor: content.pop(gone)))
        assert f"{tensor} is missing, wanted {list(array.shape)}" in message


@pytest.mark.part(3)
@pytest.mark.parametrize("name", FOLDERS)
def test_every_tensor_under_another_name_is_named_under_both(tmp_path: Path, name: str) -> None:
    for tensor in tensors(name):

        def rename(content: Tensors, old: str = tensor) -> None:
            content[f"x_{old}"] = content.pop(old)

        message = refusal(write(tmp_path, name, edit_tensors=rename))
        assert f"{tensor} is missing" in message
        assert f"x_{tensor}" in message.replace(f"{tensor} is missing", "")


@pytest.mark.part(3)
@pytest.mark.slow
@pytest.mark.parametrize("name", FOLDERS)
def test_every_tensor_of_another_shape_is_named_with_both(tmp_path: Path, name: str) -> None:
    for tensor, array in tensors(name).items():
        shape = list(array.shape)
        wrong = [mx.concatenate([array, array[:1]])]
        if array.ndim == 2 and array.shape[0] != array.shape[1]:
            wrong.append(array.T)
        for other in wrong:
            folder = write(tmp_path, name, edit_tensors=lambda content, key=tensor, to=other: content.update({key: to}))
            assert f"{tensor} has shape {list(other.shape)}, wanted {shape}" in refusal(folder)


@pytest.mark.part(3)
@pytest.mark.parametrize("name", FOLDERS)
def test_every_number_that_is_not_finite_is_named(tmp_path: Path, name: str) -> None:
    for index, (tensor, array) in enumerate(tensors(name).items()):
        bad = float("nan") if index % 2 else float("inf")
        poisoned = mx.where(mx.arange(array.size).reshape(array.shape) == array.size - 1, bad, array)
        folder = write(tmp_path, name, edit_tensors=lambda content, key=tensor, to=poisoned: content.update({key: to}))
        assert f"{tensor} holds NaN or infinity" in refusal(folder)


@pytest.mark.part(3)
@pytest.mark.parametrize("name", FOLDERS)
def test_every_tensor_of_integers_is_named(tmp_path: Path, name: str) -> None:
    for tensor, array in tensors(name).items():
        whole = array.astype(mx.int32)
        folder = write(tmp_path, name, edit_tensors=lambda content, key=tensor, to=whole: content.update({key: to}))
        assert f"{tensor} has dtype int32, wanted bfloat16 or float16 or float32" in refusal(folder)


def test_everything_that_is_wrong_is_named_at_once(tmp_path: Path) -> None:
    def damaged(content: Tensors) -> None:
        del content["norm.weight"]
        content["fc.weight"] = content["fc.weight"][:, :32]
        content["surprise"] = mx.zeros((2,))

    message = refusal(write(tmp_path, "dflash", edit_tensors=damaged))
    for words in ("norm.weight is missing", "fc.weight has shape [32, 32]", "surprise", "number of tapped layers"):
        assert words in message


@pytest.mark.parametrize(
    "tensor",
    [
        "layers.2.mlp.up_proj.weight",
        "layers.0.self_attn.q_proj.bias",
        "layers.0.input_layernorm.scales",
        "layers.0.layer_scalar",
        "layers.0.attention_conv.base_kernel",
        "layers.1.self_attn.attention_sink_bias",
        "markov_head.markov_w1.weight",
        "candidate_selector.predecessor_codebook",
        "aux_hidden_norms.0.weight",
    ],
)
def test_a_tensor_of_another_variant_is_refused_by_name(tmp_path: Path, tensor: str) -> None:
    folder = write(tmp_path, "dflash", edit_tensors=lambda content: content.update({tensor: mx.zeros((8,))}))
    assert f"{tensor} belongs to a variant that the config does not ask for" in refusal(folder)


def test_tensors_that_are_not_used_are_named_in_one_warning(tmp_path: Path) -> None:
    folder = write(tmp_path, "dflash", edit_tensors=lambda content: content.update(surprise=mx.zeros((2,))))
    with pytest.warns(UserWarning, match="ignored: surprise") as warned:
        load(folder)
    assert len(warned) == 1


def test_training_leftovers_are_ignored_silently(tmp_path: Path) -> None:
    def add(content: Tensors) -> None:
        content["layers.0.self_attn.rotary_emb.inv_freq"] = mx.zeros((4,))
        content["verifier_norm.weight"] = mx.zeros((HIDDEN,))
        content["t2d"] = mx.zeros((64,), mx.bool_)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load(write(tmp_path, "dflash", edit_tensors=add))


def test_a_prefix_that_conversions_add_is_dropped() -> None:
    def prefixed(content: Tensors) -> None:
        for name in list(content):
            content[f"model.{name}"] = content.pop(name)

    arrays = edited("dflash", edit_tensors=prefixed).network.tensors.arrays
    assert arrays.keys() == tensors("dflash").keys()


def test_one_tensor_under_two_names_is_refused(tmp_path: Path) -> None:
    def twice(content: Tensors) -> None:
        content["model.norm.weight"] = content["norm.weight"]

    message = refusal(write(tmp_path, "dflash", edit_tensors=twice))
    assert "model.norm.weight" in message
    assert "under two names" in message


def test_a_codebook_is_read_under_the_name_that_a_conversion_gives_it() -> None:
    def suffixed(content: Tensors) -> None:
        for each in ("predecessor", "successor"):
            name = f"candidate_selector.{each}_codebook"
            content[f"{name}.weight"] = content.pop(name)

    assert "candidate_selector.successor_codebook" in edited("dflash2", edit_tensors=suffixed).network.tensors


@pytest.mark.parametrize("missing", ["embed_tokens.weight", "lm_head.weight"])
def test_tables_that_a_layout_always_ships_are_not_borrowed(tmp_path: Path, missing: str) -> None:
    folder = write(tmp_path, "dspark", edit_tensors=lambda content: content.pop(missing))
    assert f"{missing} is missing" in refusal(folder)


def test_absent_tables_are_the_targets_own_arrays() -> None:
    assert "embed_tokens.weight" not in drafter("dflash").network.tensors
    assert "lm_head.weight" not in drafter("dflash").network.tensors


def test_half_precision_keeps_the_projection_of_tapped_states_wide() -> None:
    def halved(content: Tensors) -> None:
        content.update({name: array.astype(mx.float16) for name, array in content.items()})

    source = edited("dflash", edit_tensors=halved)
    # Three such entries are more than the largest float16.
    fused = source.network.fuse(mx.full((1, 2, 2 * HIDDEN), 30000.0))
    assert fused.dtype == mx.float16
    assert mx.isfinite(fused).all().item()


# A smaller vocabulary of its own


def reduced(content: Config) -> None:
    merge(content, {"draft_vocab_size": 10})


def with_map(content: Tensors) -> None:
    content["lm_head.weight"] = mx.random.normal((10, HIDDEN))
    content["d2t"] = mx.arange(10) * 5 + 3


def test_ids_of_a_smaller_vocabulary_are_mapped_to_the_targets() -> None:
    source = edited("dflash", reduced, with_map)
    states = mx.random.normal((1, 40, HIDDEN))
    own = mx.argmax(source.heads.logits(states, target()), axis=-1)
    assert source.heads.choose(states, mx.array([1]), target()).tolist() == (own * 6 + 3).tolist()


def halved(content: Config) -> None:
    laid_out = speculators("dspark")
    laid_out.update(block_size=4, markov_rank=6)
    content.clear()
    content.update(laid_out)


def even_ids(content: Tensors) -> None:
    for name in ("lm_head.weight", "markov_head.markov_w2.weight"):
        content[name] = content[name][::2]
    content["d2t"] = mx.arange(32)
    content["t2d"] = mx.arange(64) % 2 == 0


def test_a_markov_head_of_a_smaller_vocabulary_reads_the_token_before_in_the_targets() -> None:
    source, whole = edited("dspark", halved, even_ids), drafter("dspark")
    assert source.taps == whole.taps == (1, 3)
    ids, hidden = text(9, source)
    got, state = cold(source, ids, hidden).propose([7], 4).ids.tolist()[0], cold(whole, ids, hidden)
    states = whole.run([7], 4, state.contexts, state.position, target())
    arrays, before, want = whole.network.tensors, mx.array([7]), []
    for slot in range(4):
        bias = arrays["markov_head.markov_w1.weight"][before] @ arrays["markov_head.markov_w2.weight"].T
        logits = whole.heads.logits(states, target())[:, slot] + bias
        before = 2 * mx.argmax(logits[:, ::2], axis=-1)
        want.append(before.item())
    assert got == want


def test_a_smaller_vocabulary_needs_its_head_and_its_map(tmp_path: Path) -> None:
    message = refusal(write(tmp_path, "dflash", reduced))
    assert "lm_head.weight is missing, wanted [10, 32]" in message
    assert "d2t is missing, wanted [10]" in message


@pytest.mark.parametrize("entry", [-1000, 64, 2**62])
def test_an_offset_that_leaves_the_vocabulary_is_named(tmp_path: Path, entry: int) -> None:
    def shifted(content: Tensors) -> None:
        with_map(content)
        content["d2t"] = mx.where(mx.arange(10) == 7, mx.array(entry, mx.int64), content["d2t"].astype(mx.int64))

    assert "d2t[7] maps draft id 7 to" in refusal(write(tmp_path, "dflash", reduced, shifted))


# Laguna's fused projections


def test_fused_projections_of_another_size_are_refused_by_name(tmp_path: Path) -> None:
    def cut(content: Tensors) -> None:
        laguna_tensors(content)
        name = "layers.1.self_attn.qkv_proj.weight"
        content[name] = content[name][:-1]

    message = refusal(write(tmp_path, "dflash", laguna, cut))
    assert "layers.1.self_attn.q_proj.weight is missing" in message
    assert "layers.1.self_attn.qkv_proj.weight" in message


def test_fused_and_split_projections_together_are_refused(tmp_path: Path) -> None:
    def both(content: Tensors) -> None:
        split = content["layers.0.self_attn.k_proj.weight"]
        laguna_tensors(content)
        content["layers.0.self_attn.k_proj.weight"] = split

    message = refusal(write(tmp_path, "dflash", laguna, both))
    assert "layers.0.self_attn.k_proj.weight" in message
    assert "under two names" in message


# Files


@pytest.mark.parametrize("content", [b"", b"\x80\x04\x95" + b"pickled" * 30, b"\xff" * 64])
def test_a_damaged_or_hostile_file_is_named(tmp_path: Path, content: bytes) -> None:
    folder = write(tmp_path, "dflash")
    (folder / "model.safetensors").write_bytes(content)
    assert "model.safetensors is not a complete safetensors file" in refusal(folder)
