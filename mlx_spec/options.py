"""Every option of a run: its name, what it may be, what it is when left out. Checked once, before anything else."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal, Self, TypedDict, TypeVar, get_type_hints

import mlx.core as mx
from mlx import nn
from mlx_lm.generate import generation_stream
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, InstanceOf, SkipValidation, ValidationError

from mlx_spec.arguments import refusal, whole
from mlx_spec.config import SpeculativeConfig, SpeculativeMethod
from mlx_spec.drafters.base import Drafter
from mlx_spec.engine.row import OnRound
from mlx_spec.errors import InvalidRequest, UnknownKeyword, UnsupportedOption
from mlx_spec.progress import Progress
from mlx_spec.sampling import LogitsProcessor, Sampler
from mlx_spec.schedule.policy import MAX_WIDTH
from mlx_spec.stats import Statistics
from mlx_spec.verify.certified_routes import Verify

Drafting = Drafter | nn.Module | str | None

KIND_OF: dict[SpeculativeMethod, str] = {"eagle": "eagle3", "mtp": "mtp", "dflash": "dflash", "dflash2": "dflash"}
"""SpeculativeConfig's method -> the drafter kind that serves it."""


class RunKeywords(TypedDict, total=False):
    """The keywords that every function that generates takes; those named as mlx-lm's have mlx-lm's meaning."""

    draft_kind: str | None
    draft_block_size: int | None
    num_draft_tokens: int | None
    verify: Verify
    speculative: SpeculativeConfig | None
    sampler: Sampler | None
    logits_processors: Sequence[LogitsProcessor] | None
    max_kv_size: int | None
    prompt_cache: list[Any] | None
    prefill_step_size: int
    kv_bits: int | None
    kv_group_size: int
    quantized_kv_start: int
    prompt_progress_callback: Callable[[int, int], None] | None
    input_embeddings: mx.array | None
    eos_token_ids: Iterable[int]
    statistics: Statistics | None
    progress: Progress | None
    on_round: OnRound | None


class StepKeywords(RunKeywords, total=False):
    """The keywords of `generate_step`."""

    draft_model: Drafting
    max_tokens: int


class TextKeywords(StepKeywords, total=False):
    """The keywords of `generate`: those of a run, and what ends a text."""

    stream: Any
    stop: str | Iterable[str]


def _several(value: Any) -> Any:
    single = isinstance(value, str | bytes | mx.array) or not isinstance(value, Iterable)
    return value if single else tuple(value)


def _several_ids(value: Any) -> Any:
    several = _several(value)
    return tuple(map(whole, several)) if isinstance(several, tuple) else several


def _several_strings(value: Any) -> Any:
    return (value,) if isinstance(value, str) else _several(value)


_Whole = Annotated[int, BeforeValidator(whole), Field(strict=True)]
_Id = Annotated[int, Field(strict=True, ge=0)]
_Word = Annotated[str, Field(strict=True, min_length=1)]
_Function = Callable[..., Any]
_Stream = InstanceOf[mx.Stream] | InstanceOf[mx.ThreadLocalStream] | InstanceOf[mx.Device] | InstanceOf[mx.DeviceType]


class Options(BaseModel):
    """What one run was asked for. A field's description is what an error says was wanted."""

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True, allow_inf_nan=False)

    stream: _Stream = Field(default=generation_stream, description="a stream of mlx")
    draft_model: SkipValidation[Any] = None
    draft_kind: Annotated[str, Field(strict=True)] | None = Field(default=None, description="the name of a kind")
    draft_block_size: _Whole | None = Field(default=None, description=f"a verify width, 1 (plain) to {MAX_WIDTH}")
    num_draft_tokens: _Whole | None = Field(default=None, description=f"a number of proposals, 0 to {MAX_WIDTH - 1}")
    verify: Literal["exact", "fast"] = Field(default="exact", description='"exact" or "fast"')
    speculative: InstanceOf[SpeculativeConfig] | None = Field(default=None, description="a SpeculativeConfig")
    max_tokens: _Whole = Field(default=256, ge=-1, description="a number of tokens, or -1 for no limit")
    sampler: _Function | None = Field(default=None, description="a function, [1, V] log-probabilities to [1] token")
    logits_processors: Annotated[tuple[_Function, ...], BeforeValidator(_several)] | None = Field(
        default=None, description="a list of functions (ids, [1, V] logits) to [1, V] logits"
    )
    max_kv_size: _Whole | None = Field(default=None, ge=1, description="at least 1 token")
    # Changed in place by the run, so it must stay the caller's own list.
    prompt_cache: SkipValidation[Any] = Field(default=None, description="a list of mlx-lm's caches, one per layer")
    prefill_step_size: _Whole = Field(default=2048, ge=1, description="at least 1 token")
    kv_bits: _Whole | None = Field(default=None, description="one of 2, 3, 4, 5, 6, 8")
    kv_group_size: _Whole = Field(default=64, description="one of 32, 64, 128")
    quantized_kv_start: _Whole = Field(default=5000, ge=0, description="a number of tokens, at least 0")
    prompt_progress_callback: _Function | None = Field(default=None, description="a function (processed, total)")
    input_embeddings: InstanceOf[mx.array] | None = Field(default=None, description="an array [n, H] of floats")
    eos_token_ids: Annotated[tuple[_Id, ...], BeforeValidator(_several_ids)] = Field(
        default=(), description="several token ids, at least 0"
    )
    statistics: InstanceOf[Statistics] | None = Field(default=None, description="a Statistics object")
    progress: _Function | None = Field(default=None, description="a function that is told each Step")
    on_round: _Function | None = Field(default=None, description="a function that is told each RoundResult")
    tokenizer: SkipValidation[Any] = None
    stop: Annotated[tuple[_Word, ...], BeforeValidator(_several_strings)] = Field(
        default=(), description="a string or a list of non-empty strings"
    )

    @classmethod
    def read(cls, keywords: Mapping[str, Any], function: str, known: Iterable[str] = ()) -> Self:
        """Check the keywords of one call.

        Args:
            keywords: as given.
            function: that was called, for the message.
            known: the keywords it takes; all that there are when left out.

        Raises:
            UnknownKeyword: one is none of its keywords; names the nearest.
            InvalidRequest: a value is of another kind, out of range, or contradicts another.
            UnsupportedOption: an option cannot be honoured.
        """
        names = tuple(known) or tuple(cls.model_fields)
        for name in keywords:
            if name not in names:
                raise UnknownKeyword(f"{function}() has no keyword {name!r}. {_nearest(name, names)}")
        try:
            options = cls(**keywords)
        except ValidationError as error:
            name = str(error.errors()[0]["loc"][0])
            raise _refusal(name, keywords[name]) from None
        options._check()
        return options

    def _check(self) -> None:
        if self.kv_bits not in (None, 2, 3, 4, 5, 6, 8):
            raise _refusal("kv_bits", self.kv_bits)
        if self.kv_group_size not in (32, 64, 128):
            raise _refusal("kv_group_size", self.kv_group_size)
        if self.prompt_cache is not None and not isinstance(self.prompt_cache, list | tuple):
            raise _refusal("prompt_cache", self.prompt_cache)
        if self.speculative is not None:
            self._check_config(self.speculative)
        self.asked_width()

    def _check_config(self, config: SpeculativeConfig) -> None:
        unbuilt = config.unbuilt_fields()
        if unbuilt:
            raise UnsupportedOption(
                f"SpeculativeConfig sets {', '.join(unbuilt)}, which this version cannot honour yet. "
                "Leave them at their defaults."
            )
        method = config.speculative_method
        if method is None:
            if self.draft_model is not None or self.draft_kind is not None:
                raise InvalidRequest(
                    "SpeculativeConfig(speculative_method=None) turns speculation off, but a drafter was given. "
                    "Set the method, or leave the drafter out."
                )
            return
        if self.draft_model is None:
            raise InvalidRequest(f"speculative_method={method!r} needs a draft_model.")
        if self.draft_kind not in (None, KIND_OF[method]):
            raise InvalidRequest(
                f"speculative_method={method!r} means draft_kind={KIND_OF[method]!r}, got {self.draft_kind!r}."
            )

    def asked_width(self) -> tuple[int, str] | None:
        """The verify width the caller named, and under which name; None when it was left open."""
        asked = {}
        if self.draft_block_size is not None:
            asked["draft_block_size"] = self.draft_block_size
        if self.num_draft_tokens is not None:
            asked["num_draft_tokens"] = self.num_draft_tokens + 1
        if self.speculative is not None and self.speculative.num_speculative_tokens is not None:
            asked["num_speculative_tokens"] = self.speculative.num_speculative_tokens + 1
        if len(asked) > 1:
            raise InvalidRequest(f"{' and '.join(asked)} both set the verify width. Give one of them.")
        for name, width in asked.items():
            if not 1 <= width <= MAX_WIDTH:
                raise InvalidRequest(
                    f"{name} asks for a verify width of {width} tokens; supported are 1 (plain) to {MAX_WIDTH}."
                )
            return width, name
        return None


OPTION_FLAGS = (
    "max_tokens",
    "max_kv_size",
    "prefill_step_size",
    "kv_bits",
    "kv_group_size",
    "quantized_kv_start",
    "draft_block_size",
    "num_draft_tokens",
    "verify",
    "stop",
)
"""The options that are flags of the command line by the same names."""

_Share = Annotated[float, Field(ge=0, le=1)]


class SamplingFlags(BaseModel):
    """The command line's numbers for mlx-lm's sampler, in the ranges in which that means something by them."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    temp: float = Field(ge=0, description="a temperature, at least 0")
    top_p: _Share = Field(description="a probability, 0 to 1")
    min_p: _Share = Field(description="a probability, 0 to 1")
    min_tokens_to_keep: int = Field(ge=1, description="at least 1 token")
    top_k: int = Field(ge=0, description="a number of tokens, or 0 for all")
    xtc_probability: _Share = Field(description="a probability, 0 to 1")
    xtc_threshold: float = Field(ge=0, le=0.5, description="a probability, 0 to 0.5")
    seed: int | None = Field(ge=0, lt=2**64, description="a whole number, 0 to 2^64 - 1")

    @classmethod
    def read(cls, flags: Mapping[str, Any]) -> Self:
        """Check them.

        Raises:
            InvalidRequest: names the flag, what was wanted and what came.
        """
        try:
            return cls(**{name: flags[name] for name in cls.model_fields})
        except ValidationError as error:
            name = str(error.errors()[0]["loc"][0])
            wanted = cls.model_fields[name].description
            raise InvalidRequest(f"--{name.replace('_', '-')} is {wanted}; got {flags[name]}.") from None


def _refusal(name: str, got: object) -> InvalidRequest:
    return refusal(name, str(Options.model_fields[name].description), got)


def _nearest(name: str, names: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    return f"Did you mean {near[0]!r}?" if near else f"It takes {', '.join(sorted(names))}."


_Public = TypeVar("_Public", bound=Callable[..., Any])


def spelled_out(keywords: type) -> Callable[[_Public], _Public]:
    """Let `help`, completion and `inspect.signature` show every keyword of a function that takes them as a mapping.

    Args:
        keywords: the TypedDict that stands behind its `**keywords`; the defaults are those of Options.
    """

    def spell(function: _Public) -> _Public:
        own = inspect.signature(function)
        kept = [each for each in own.parameters.values() if each.kind is not inspect.Parameter.VAR_KEYWORD]
        told = {each.name for each in kept}
        more = [
            inspect.Parameter(
                name, inspect.Parameter.KEYWORD_ONLY, default=Options.model_fields[name].default, annotation=kind
            )
            for name, kind in get_type_hints(keywords).items()
            if name not in told
        ]
        function.__signature__ = own.replace(parameters=[*kept, *more])  # type: ignore[attr-defined]
        return function

    return spell
