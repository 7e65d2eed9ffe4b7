"""Where an mlx-lm architecture keeps its embedding, final norm and head, and how it scales them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial, reduce
from typing import Any

import mlx.core as mx
from mlx import nn

from mlx_spec.errors import UnknownAnatomy

Transform = Callable[[nn.Module, mx.array], mx.array]
"""(text model, array) -> array. The text model is the module that owns the head."""


def _unscaled(text_model: nn.Module, array: mx.array) -> mx.array:
    del text_model
    return array


@dataclass(frozen=True, kw_only=True)
class Anatomy:
    """Attribute paths from the model object, and the scales a drafter sharing these parts must know.

    Where mlx-lm computes a step in its forward and keeps no module for it, a function stands in the path's place.

    Attributes:
        text: path of the text model, which owns the head; "" is the model itself.
        embedding: path of the token embedding, from `text`.
        norm: path of the final norm, from `text`.
        head: path of the output projection, from `text`. Where nothing is there, the embedding serves as head.
        positions: path, from `text`, of a learned position table that is added to what layer 0 reads.
        scale_embedding: what the model does to an embedding row before layer 0, positions apart.
        scale_logits: what the model does to the head's output.
    """

    text: str = ""
    embedding: str = "model.embed_tokens"
    norm: str | Transform = "model.norm"
    head: str | Transform = "lm_head"
    positions: str | None = None
    scale_embedding: Transform = _unscaled
    scale_logits: Transform = _unscaled

    def part(self, model: nn.Module, path: str | Transform) -> Any:
        """What is at `path`, counted from the text model; a function comes bound to the text model."""
        text_model = _at(model, self.text)
        return _at(text_model, path) if isinstance(path, str) else partial(path, text_model)

    def text_model(self, model: nn.Module) -> nn.Module:
        """The module that owns the head."""
        return self.part(model, "")

    def head_module(self, model: nn.Module) -> nn.Module | None:
        """The output projection, or None when the embedding serves as head."""
        if not isinstance(self.head, str):
            return self.part(model, self.head)
        owner, _, name = self.head.rpartition(".")
        return self.part(model, owner).get(name)


def _at(root: Any, path: str) -> Any:
    return reduce(getattr, path.split(".") if path else [], root)


# Scales. A path leads from the text model to the number.


def _times(path: str) -> Transform:
    return lambda text_model, array: array * _at(text_model, path)


def _divided_by(path: str) -> Transform:
    return lambda text_model, array: array / _at(text_model, path)


def _softcap(path: str) -> Transform:
    def transform(text_model: nn.Module, logits: mx.array) -> mx.array:
        cap = _at(text_model, path)
        return mx.tanh(logits / cap) * cap if cap else logits

    return transform


def _times_sqrt_hidden(text_model: nn.Module, embedded: mx.array) -> mx.array:
    del text_model
    return embedded * embedded.shape[-1] ** 0.5


def _times_rounded_sqrt_hidden(text_model: nn.Module, embedded: mx.array) -> mx.array:
    # gemma3 rounds the factor to bfloat16 first, whatever the weights' dtype.
    del text_model
    factor = mx.array(embedded.shape[-1] ** 0.5, mx.bfloat16)
    return embedded * factor.astype(embedded.dtype)


def _afmoe_embedding(text_model: nn.Module, embedded: mx.array) -> mx.array:
    return _times_sqrt_hidden(text_model, embedded) if text_model.model.mup_enabled else embedded


def _recurrent_gemma_embedding(text_model: nn.Module, embedded: mx.array) -> mx.array:
    return _times_sqrt_hidden(text_model, embedded) if text_model.model.scale_by_sqrt_dim else embedded


def _falcon_h1_logits(text_model: nn.Module, logits: mx.array) -> mx.array:
    # An untied head has the factor folded into its weights.
    args = text_model.args
    return logits * (args.lm_head_multiplier / args.embedding_multiplier) if args.tie_word_embeddings else logits


def _phi3small_embedding(text_model: nn.Module, embedded: mx.array) -> mx.array:
    factor = text_model.model.mup_embedding_multiplier
    return factor * embedded if factor else embedded


def _phi3small_logits(text_model: nn.Module, logits: mx.array) -> mx.array:
    width = text_model.mup_width_multiplier
    masked = logits / width if width else logits + 0
    masked[..., text_model._dummy_tokenizer_ids] = -float("inf")
    return masked


def _muse_glimmer_logits(text_model: nn.Module, logits: mx.array) -> mx.array:
    return _softcap("args.final_logit_softcapping")(text_model, logits * text_model.args.output_multiplier)


def _nanochat_logits(text_model: nn.Module, logits: mx.array) -> mx.array:
    del text_model
    return 15.0 * mx.tanh(logits / 15.0)


# Norms without weights, and heads that are more than a projection.


def _weightless_norm(eps: float | str) -> Transform:
    """eps: the number, or the path from the text model to it."""
    return lambda text_model, array: mx.fast.rms_norm(
        array, None, _at(text_model, eps) if isinstance(eps, str) else eps
    )


def _minicpm_head(text_model: nn.Module, normed: mx.array) -> mx.array:
    args = text_model.args
    if args.tie_word_embeddings:
        tied: mx.array = text_model.model.embed_tokens.as_linear(normed)
        return tied
    logits: mx.array = text_model.lm_head(normed / (args.hidden_size / args.dim_model_base))
    return logits


def _talkie_head(text_model: nn.Module, normed: mx.array) -> mx.array:
    logits: mx.array = text_model.lm_head_gain(normed @ text_model.lm_head.T)
    return logits


def _muse_spark_norm(text_model: nn.Module, hidden: mx.array) -> mx.array:
    normed: mx.array = text_model.model.language_model.norm(hidden).astype(mx.bfloat16)
    return normed


def _muse_spark_head(text_model: nn.Module, normed: mx.array) -> mx.array:
    head = text_model.lm_head
    logits = head(normed.astype(head.weight.dtype)).astype(mx.float32) * text_model.args.text.output_multiplier
    return _softcap("args.text.final_logit_softcapping")(text_model, logits)


_USUAL = Anatomy()
_WRAPPED = Anatomy(text="language_model")
_GEMMA3 = Anatomy(scale_embedding=_times_rounded_sqrt_hidden)
_GEMMA4 = Anatomy(scale_embedding=_times("model.embed_scale"), scale_logits=_softcap("final_logit_softcapping"))
_LFM2 = Anatomy(norm="model.embedding_norm")
_BAILING = Anatomy(embedding="model.word_embeddings")
_COHERE = Anatomy(scale_logits=_times("args.logit_scale"))
_GRANITE = Anatomy(
    scale_embedding=_times("model.embedding_multiplier"),
    scale_logits=_divided_by("logits_scaling"),
)
_MAMBA = Anatomy(embedding="backbone.embeddings", norm="backbone.norm_f")
_MINICPM = Anatomy(head=_minicpm_head, scale_embedding=_times("args.scale_emb"))

ANATOMY_BY_MODULE: dict[str, Anatomy] = {
    "Klear": _USUAL,
    "afm7": Anatomy(embedding="model.embedding", norm="model.output_norm"),
    "afmoe": Anatomy(scale_embedding=_afmoe_embedding),
    "apertus": _USUAL,
    "baichuan_m1": _USUAL,
    "bailing_hybrid": _BAILING,
    "bailing_moe": _BAILING,
    "bailing_moe_linear": _BAILING,
    "bailing_moe_v3": _BAILING,
    "bitnet": _USUAL,
    "cohere": _COHERE,
    "cohere2": _COHERE,
    "dbrx": Anatomy(embedding="transformer.wte", norm="transformer.norm_f"),
    "deepseek": _USUAL,
    "deepseek_v2": _USUAL,
    "deepseek_v3": _USUAL,
    "deepseek_v32": _USUAL,
    "dots1": _USUAL,
    "ernie4_5": _USUAL,
    "ernie4_5_moe": _USUAL,
    "exaone": Anatomy(embedding="transformer.wte", norm="transformer.ln_f"),
    "exaone4": _USUAL,
    "exaone_moe": _USUAL,
    "falcon_h1": Anatomy(norm="model.final_layernorm", scale_logits=_falcon_h1_logits),
    "gear": Anatomy(
        scale_embedding=_times("model.embed_scale"),
        scale_logits=_softcap("args.final_logit_softcapping"),
    ),
    "gemma": Anatomy(scale_embedding=_times_sqrt_hidden),
    "gemma2": Anatomy(scale_embedding=_times_sqrt_hidden, scale_logits=_softcap("final_logit_softcapping")),
    "gemma3": replace(_GEMMA3, text="language_model"),
    "gemma3_text": _GEMMA3,
    "gemma4": replace(_GEMMA4, text="language_model"),
    "gemma4_text": _GEMMA4,
    "glm": _USUAL,
    "glm4": _USUAL,
    "glm4_moe": _USUAL,
    "glm4_moe_lite": _USUAL,
    "glm_moe_dsa": _USUAL,
    "gpt2": Anatomy(embedding="model.wte", norm="model.ln_f", positions="model.wpe"),
    "gpt_bigcode": Anatomy(embedding="transformer.wte", norm="transformer.ln_f", positions="transformer.wpe"),
    "gpt_neox": Anatomy(embedding="model.embed_in", norm="model.final_layer_norm", head="model.embed_out"),
    "gpt_oss": _USUAL,
    "gptj": Anatomy(embedding="model.wte", norm="model.ln_f"),
    "granite": _GRANITE,
    "granitemoe": _GRANITE,
    "granitemoehybrid": _GRANITE,
    "helium": _USUAL,
    "hunyuan": _USUAL,
    "hunyuan_v1_dense": _USUAL,
    "internlm2": Anatomy(embedding="model.tok_embeddings", head="output"),
    "internlm3": _USUAL,
    "jamba": Anatomy(norm="model.final_layernorm"),
    "kimi_k25": _WRAPPED,
    "kimi_linear": _USUAL,
    "kimi_vl": _WRAPPED,
    "laguna": _USUAL,
    "lfm2": _LFM2,
    "lfm2-vl": replace(_LFM2, text="language_model"),
    "lfm2_moe": _LFM2,
    "lille-130m": Anatomy(embedding="transformer.tok_embeddings", norm="transformer.norm"),
    "llama": _USUAL,
    "llama4": _WRAPPED,
    "llama4_text": Anatomy(head="output"),
    "longcat_flash": _USUAL,
    "mamba": _MAMBA,
    "mamba2": _MAMBA,
    "mellum": _USUAL,
    "mimo": _USUAL,
    "mimo_v2_flash": _USUAL,
    "minicpm": _MINICPM,
    "minicpm3": _MINICPM,
    "minimax": _USUAL,
    "minimax_m3_vl": _WRAPPED,
    "ministral3": _USUAL,
    "mistral3": _WRAPPED,
    "mistral4": _USUAL,
    "mixtral": _USUAL,
    "muse_glimmer": Anatomy(scale_embedding=_weightless_norm("model.embed_eps"), scale_logits=_muse_glimmer_logits),
    "muse_spark": Anatomy(
        embedding="model.language_model.embed_tokens",
        norm=_muse_spark_norm,
        head=_muse_spark_head,
        scale_embedding=_weightless_norm("args.text.rms_norm_eps"),
    ),
    "nanbeige": _USUAL,  # of a model that loops over its layers, a tap sees the last loop
    "nanochat": Anatomy(
        embedding="transformer.wte",
        norm=_weightless_norm(1e-5),
        scale_embedding=_weightless_norm(1e-5),
        scale_logits=_nanochat_logits,
    ),
    "nemotron": _USUAL,
    "nemotron-nas": _USUAL,
    "nemotron_h": _MAMBA,
    "olmo": Anatomy(
        embedding="model.transformer.wte",
        norm="model.transformer.norm",
        head="model.transformer.ff_out",
    ),
    "olmo2": _USUAL,
    "olmo3": _USUAL,
    "olmo_hybrid": _USUAL,
    "olmoe": _USUAL,
    "openelm": Anatomy(embedding="transformer.token_embeddings", norm="transformer.norm"),
    "phi": Anatomy(norm="model.final_layernorm"),
    "phi3": _USUAL,
    "phi3small": Anatomy(
        norm="model.final_layernorm",
        scale_embedding=_phi3small_embedding,
        scale_logits=_phi3small_logits,
    ),
    "phimoe": _USUAL,
    "phixtral": Anatomy(embedding="transformer.embd.wte", norm="lm_head.ln", head="lm_head.linear"),
    "pixtral": _WRAPPED,
    "plamo": _USUAL,
    "plamo2": _USUAL,
    "plamo3": _USUAL,
    "prism_hadamard_qwen35": _WRAPPED,
    "qwen": Anatomy(embedding="transformer.wte", norm="transformer.ln_f"),
    "qwen2": _USUAL,
    "qwen2_moe": _USUAL,
    "qwen2_vl": _WRAPPED,
    "qwen3": _USUAL,
    "qwen3_5": _WRAPPED,
    "qwen3_5_moe": _WRAPPED,
    "qwen3_moe": _USUAL,
    "qwen3_next": _USUAL,
    "qwen3_vl": _WRAPPED,
    "qwen3_vl_moe": _WRAPPED,
    "recurrent_gemma": Anatomy(
        norm="model.final_norm",
        scale_embedding=_recurrent_gemma_embedding,
        scale_logits=_softcap("args.logits_soft_cap"),
    ),
    "rwkv7": Anatomy(embedding="model.embeddings"),
    "seed_oss": _USUAL,
    "smollm3": _USUAL,
    "solar_open": _USUAL,
    "spark2_5": Anatomy(embedding="model.embedding"),
    "stablelm": _USUAL,
    "starcoder2": _USUAL,
    "step3p5": _USUAL,
    "talkie": Anatomy(
        embedding="model.embed",
        norm=_weightless_norm("model.eps"),
        head=_talkie_head,
        scale_embedding=_weightless_norm("model.eps"),
    ),
    "telechat3": _USUAL,
    "youtu_llm": _USUAL,
}
"""mlx-lm module name -> anatomy. Declared by hand; an absent row is an error, not a guess."""

WITHOUT_ANATOMY: dict[str, str] = {
    "deepseek_v41": "its layers hand on several streams per token, and these are mixed before the final norm",
    "gemma3n": "its layers hand on several predictions per token, and these are mixed before the final norm",
    "iquestloopcoder": "it computes with the parts of its layers and never calls a layer, so no output can be recorded",
    "kimi_k3": "its final norm reads a mix of the outputs of several layers",
    "longcat_flash_ngram": "what it embeds is not a token but the last few, so there is no table to share",
}
"""Modules that cannot have a row, and why."""


_TABLE_NAMES = ("embed_tokens", "word_embeddings")


def embedding_without_anatomy(model: nn.Module) -> nn.Module:
    """The module that embeds tokens, of a model without a row; the whole model where none is called so."""
    named = (module for name, module in model.named_modules() if name.rpartition(".")[2] in _TABLE_NAMES)
    return next(named, model)


def architecture(model: nn.Module) -> str:
    """The mlx-lm module that defines the model's class, e.g. "llama"."""
    for base in type(model).__mro__:
        package, _, name = base.__module__.rpartition(".")
        if package == "mlx_lm.models":
            return name
    return type(model).__name__


def anatomy_of(model: nn.Module) -> Anatomy:
    """The table's row for a model.

    Raises:
        UnknownAnatomy: the architecture has none. Says why, or lists those that do.
    """
    name = architecture(model)
    if name in ANATOMY_BY_MODULE:
        return ANATOMY_BY_MODULE[name]
    other = "Plain decoding and the n-gram drafter work with every architecture."
    if name in WITHOUT_ANATOMY:
        raise UnknownAnatomy(
            f"a drafter that reads hidden states cannot serve {name!r}: {WITHOUT_ANATOMY[name]}. {other}"
        )
    raise UnknownAnatomy(
        f"a drafter that reads the target's hidden states needs to know where {name!r} keeps its embedding and "
        f"head; known architectures: {', '.join(sorted(ANATOMY_BY_MODULE))}. {other}"
    )
