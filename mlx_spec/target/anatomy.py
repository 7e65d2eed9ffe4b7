"""Where an mlx-lm architecture keeps its embedding, final norm and head, and how it scales them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from typing import Any

import mlx.core as mx

from mlx_spec.errors import UnknownAnatomy

Transform = Callable[[Any, mx.array], mx.array]
"""(text model, array) -> array of the same shape and dtype."""


def _unscaled(text_model: Any, array: mx.array) -> mx.array:
    del text_model
    return array


def _times_sqrt_hidden(text_model: Any, embedded: mx.array) -> mx.array:
    # gemma rounds the factor to bfloat16 first, whatever the weights' dtype.
    factor = mx.array(text_model.args.hidden_size**0.5, mx.bfloat16)
    return embedded * factor.astype(embedded.dtype)


@dataclass(frozen=True, kw_only=True)
class Anatomy:
    """Attribute paths from the model object, and the two scales a drafter sharing them must know.

    Attributes:
        text: path of the module whose `args` describe the text model; "" is the model itself.
        embedding: path of the token embedding, from `text`.
        norm: path of the final norm, from `text`.
        head: path of the output projection, from `text`; used when the module exists.
        scale_embedding: what the model does to an embedding row before layer 0.
        scale_logits: what the model does to the head's output.
    """

    text: str = ""
    embedding: str = "model.embed_tokens"
    norm: str = "model.norm"
    head: str = "lm_head"
    scale_embedding: Transform = _unscaled
    scale_logits: Transform = _unscaled

    def part(self, model: Any, path: str) -> Any:
        """The module at `path`, counted from the text model."""
        steps = [step for step in f"{self.text}.{path}".split(".") if step]
        return reduce(getattr, steps, model)

    def text_model(self, model: Any) -> Any:
        """The module whose `args` describe the text model."""
        return self.part(model, "")

    def head_module(self, model: Any) -> Any | None:
        """The output projection, or None when the embedding serves as head."""
        owner = self.text_model(model)
        return owner.get(self.head)


ANATOMY_BY_MODULE: dict[str, Anatomy] = {
    "llama": Anatomy(),
    "qwen3": Anatomy(),
    "gemma3_text": Anatomy(scale_embedding=_times_sqrt_hidden),
    "qwen3_5": Anatomy(text="language_model"),
    "deepseek_v3": Anatomy(),
}
"""mlx-lm module name -> anatomy. Declared by hand; an absent row is an error, not a guess."""


def architecture(model: Any) -> str:
    """The mlx-lm module that defines the model's class, e.g. "llama"."""
    for base in type(model).__mro__:
        package, _, name = base.__module__.rpartition(".")
        if package == "mlx_lm.models":
            return name
    return type(model).__name__


def anatomy_of(model: Any) -> Anatomy:
    """The table's row for a model.

    Raises:
        UnknownAnatomy: the architecture has none. Lists those that do.
    """
    name = architecture(model)
    if name not in ANATOMY_BY_MODULE:
        raise UnknownAnatomy(
            f"a drafter that reads the target's hidden states needs to know where {name!r} keeps its embedding and "
            f"head; known architectures: {', '.join(sorted(ANATOMY_BY_MODULE))}. "
            "Plain decoding and the n-gram drafter work with every architecture."
        )
    return ANATOMY_BY_MODULE[name]
