"""What a caller gives as prompt, checked against the model that is to read it: ids, embeddings, or both."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

import mlx.core as mx

from mlx_spec.engine.prompt import Prompt
from mlx_spec.errors import InvalidRequest, UnknownAnatomy, UnsupportedOption
from mlx_spec.model.target import Target
from mlx_spec.stats import Statistics


def read_prompt(prompt: Any, embeddings: mx.array | None, target: Target) -> Prompt:
    """Check a prompt. One host read, if the ids are on the device.

    Args:
        prompt: one sequence of token ids; empty, or None, where there are embeddings alone.
        embeddings: [n, H] what is read in place of embedded ids.
        target: the model that is to read it.

    Raises:
        InvalidRequest: it is no such thing, empty, or has ids that the model has no embedding for.
        UnsupportedOption: embeddings for a model whose forward takes none.
    """
    ids = _ids(() if prompt is None else prompt)
    if embeddings is None:
        if ids.size == 0:
            raise InvalidRequest(
                "the prompt is empty. Give at least one token (a chat template or a BOS token makes one)."
            )
    else:
        _check_embeddings(embeddings, ids.size, target)
    host_ids = cast(list[int], ids.tolist())
    target.require_readable(
        host_ids, "the prompt's", "Encode the prompt with the tokenizer that belongs to this model."
    )
    return Prompt(ids, host_ids, embeddings)


def _ids(prompt: Any) -> mx.array:
    try:
        ids = prompt if isinstance(prompt, mx.array) else mx.array(prompt)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise InvalidRequest(
            f"the prompt is one sequence of token ids, got a {type(prompt).__name__} that is none "
            f"({' '.join(str(error).split())[:120]})."
        ) from None
    if ids.ndim != 1 or (ids.size and not mx.issubdtype(ids.dtype, mx.integer)):
        raise InvalidRequest(f"the prompt is one sequence of token ids, got shape {ids.shape} of {ids.dtype}.")
    return ids if ids.size else mx.array([], mx.uint32)


def check_ends(named: Iterable[int], tokenizers: Iterable[int], target: Target, statistics: Statistics) -> None:
    """Refuse ends of the text that can never come where the caller named them; note those of a tokenizer.

    Args:
        named: ids that the caller gave.
        tokenizers: those that came with a tokenizer, which may know more ids than the model.

    Raises:
        InvalidRequest: names the id and the range.
    """
    named, others = sorted(named), sorted(tokenizers)
    if not named and not others:
        return
    known = target.sayable_ids
    if known is None:
        return
    for token in named:
        if token >= known:
            raise InvalidRequest(
                f"eos_token_ids names id {token}, which can never come: {target.name} has ids 0 to {known - 1}. "
                "Give ids of this model, or leave it out."
            )
    never = [token for token in others if token >= known]
    if never:
        ids = ", ".join(map(str, never))
        statistics.note(
            f"the tokenizer ends a text at id {ids}, which can never come: {target.name} has 0 to {known - 1}"
        )


def _check_embeddings(embeddings: mx.array, ids: int, target: Target) -> None:
    if not target.reads_embeddings:
        raise UnsupportedOption(
            f"input_embeddings was given, but the forward of {target.name} in mlx-lm takes none. "
            "Pass the prompt as token ids."
        )
    if embeddings.ndim != 2 or not embeddings.size or not mx.issubdtype(embeddings.dtype, mx.floating):
        raise InvalidRequest(
            f"input_embeddings is an array [n, H] of floats; got shape {embeddings.shape} of {embeddings.dtype}."
        )
    rows, columns = embeddings.shape
    if ids not in (0, rows):
        raise InvalidRequest(
            f"input_embeddings has {rows} rows, the prompt {ids} ids. Give as many of both, or an empty prompt."
        )
    try:
        wanted = target.hidden_size
    except UnknownAnatomy:
        return
    if columns != wanted:
        raise InvalidRequest(f"input_embeddings has {columns} columns, but {target.name} reads {wanted}.")
