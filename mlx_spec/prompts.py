"""What a caller gives as prompt, checked against the model that is to read it: ids, embeddings, or both."""

from __future__ import annotations

from typing import Any, cast

import mlx.core as mx

from mlx_spec.errors import InvalidRequest, UnknownAnatomy, UnsupportedOption
from mlx_spec.model.target import Target
from mlx_spec.request import Prompt


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
    _check_vocabulary(host_ids, target)
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


def _check_vocabulary(ids: list[int], target: Target) -> None:
    """Past its table a model reads foreign memory, or ends the process; a negative id counts from the table's end."""
    rows = target.readable_ids
    for place, token in enumerate(ids):
        if token < 0 or (rows is not None and token >= rows):
            known = "0 or more" if rows is None else f"0 to {rows - 1}"
            raise InvalidRequest(
                f"the prompt's token {place} is id {token}, but {target.name} embeds ids {known}. "
                "Encode the prompt with the tokenizer that belongs to this model."
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
