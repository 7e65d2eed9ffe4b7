"""Generation with mlx-lm's own function names and keyword arguments, and the command `python -m mlx_spec.generate`."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from types import FunctionType, ModuleType
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm import sample_utils
from mlx_lm.generate import GenerationResponse as _GenerationResponse
from mlx_lm.generate import generation_stream, wired_limit
from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlx_spec.cache.adopt import KVQuantization, is_limited, new_caches, tokens_read
from mlx_spec.config import SpeculativeConfig, SpeculativeMethod
from mlx_spec.drafters.base import Drafter
from mlx_spec.drafters.ngram import NgramDrafter
from mlx_spec.drafters.speculators import select_speculator
from mlx_spec.drafters.standalone import StandaloneDrafter
from mlx_spec.errors import InvalidRequest, UnsupportedOption
from mlx_spec.model.target import Target
from mlx_spec.pairing import load_drafter
from mlx_spec.progress import Progress, prompt_listener, telling_progress
from mlx_spec.request import Request
from mlx_spec.rounds.drafted import open_loop
from mlx_spec.rounds.engine import Emission, Engine
from mlx_spec.sampling import LogitsProcessor, OwnDraws, Sampler, Sampling
from mlx_spec.schedule import MAX_WIDTH, FixedWidth
from mlx_spec.stats import Statistics
from mlx_spec.stops import TextStream
from mlx_spec.verify.certified_routes import CertifiedRoutes, Verify
from mlx_spec.verify.routes import STEP_THROUGH

Drafting = Drafter | nn.Module | str | None

_KIND_OF: dict[SpeculativeMethod, str] = {"eagle": "eagle3", "mtp": "mtp", "dflash": "dflash", "dflash2": "dflash"}
"""SpeculativeConfig's method -> the drafter kind that serves it."""


@dataclass
class GenerationResponse(_GenerationResponse):
    """mlx-lm's response, and what the speculation did so far.

    Attributes:
        speculation: live counters of the run, and every fallback in words.
    """

    speculation: Statistics = field(default_factory=Statistics)


@dataclass(kw_only=True)
class _Options:
    """Every keyword a run takes, under the names and with the defaults of `generate_step`."""

    stream: Any = generation_stream
    draft_model: Drafting = None
    draft_kind: str | None = None
    draft_block_size: int | None = None
    num_draft_tokens: int | None = None
    verify: Verify = "exact"
    speculative: SpeculativeConfig | None = None
    max_tokens: int = 256
    sampler: Sampler | None = None
    logits_processors: Sequence[LogitsProcessor] | None = None
    max_kv_size: int | None = None
    prompt_cache: list[Any] | None = None
    prefill_step_size: int = 2048
    kv_bits: int | None = None
    kv_group_size: int = 64
    quantized_kv_start: int = 5000
    prompt_progress_callback: Callable[[int, int], None] | None = None
    input_embeddings: mx.array | None = None
    eos_token_ids: Sequence[int] = ()
    statistics: Statistics | None = None
    progress: Progress | None = None
    tokenizer: Any = None

    def check(self) -> None:
        """Refuse what cannot be honoured, before anything is loaded or run."""
        if self.input_embeddings is not None:
            raise UnsupportedOption("input_embeddings is not supported: pass the prompt as token ids.")
        if self.max_tokens < -1:
            raise InvalidRequest(f"max_tokens is a number of tokens, or -1 for no limit; got {self.max_tokens}.")
        if self.prefill_step_size < 1:
            raise InvalidRequest(f"prefill_step_size is at least 1 token, got {self.prefill_step_size}.")
        if self.max_kv_size is not None and self.max_kv_size < 1:
            raise InvalidRequest(f"max_kv_size is at least 1 token, got {self.max_kv_size}.")
        if self.verify not in ("exact", "fast"):
            raise InvalidRequest(f'verify is "exact" or "fast", got {self.verify!r}.')
        if self.kv_bits is not None and self.kv_bits not in (2, 3, 4, 5, 6, 8):
            raise InvalidRequest(f"kv_bits is one of 2, 3, 4, 5, 6, 8, got {self.kv_bits}.")
        if self.kv_group_size not in (32, 64, 128):
            raise InvalidRequest(f"kv_group_size is one of 32, 64, 128, got {self.kv_group_size}.")
        if self.speculative is not None:
            self._check_config(self.speculative)

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
        if self.draft_kind not in (None, _KIND_OF[method]):
            raise InvalidRequest(
                f"speculative_method={method!r} means draft_kind={_KIND_OF[method]!r}, got {self.draft_kind!r}."
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

    def sampling(self, statistics: Statistics) -> Sampling:
        """The request's callables, and what may be done with them."""
        sampler = self.sampler or sample_utils.greedy_sampler
        processors = tuple(self.logits_processors or ())
        foreign = [name_of(each) for each in (sampler, *processors) if not is_pure(each)]
        if foreign:
            statistics.note(f"{', '.join(foreign)} may hide state, so it is called once per token, in order")
        draws = sampler is not sample_utils.greedy_sampler
        greedy = not draws and not processors
        return Sampling(sampler, processors, pure=not foreign, draws=draws, greedy=greedy)


def is_pure(function: Callable[..., Any]) -> bool:
    """Whether a sampler or processor is known to depend on nothing but ids, logits and the random state.

    True for what mlx-lm's `make_sampler` and `make_logits_processors` make.
    """
    # The code object tells where a function was written; a wrapper can carry over everything else.
    return isinstance(function, FunctionType) and function.__code__.co_filename == sample_utils.__file__


def name_of(function: Callable[..., Any]) -> str:
    """What to call a callable in a sentence."""
    return getattr(function, "__name__", type(function).__name__)


@dataclass
class _Run:
    """One request, ready to hand out tokens."""

    engine: Engine
    request: Request
    statistics: Statistics


def _open_run(prompt: Any, model: nn.Module, stops: Callable[[int], bool] | None = None, **keywords: Any) -> _Run:
    """Check everything, pair drafter and target, and put the engine together. Nothing has run yet."""
    options = _Options(**keywords)
    options.check()
    statistics = options.statistics or Statistics()
    if statistics.rounds:
        raise InvalidRequest("these statistics belong to a run already. Give each run its own.")
    asked = options.asked_width()
    target = Target(model)
    ids = _prompt_ids(prompt)
    draws = OwnDraws(ids)
    with telling_progress(options.progress):
        drafter = _resolve_drafter(options, target)
    if drafter is not None:
        _check_method(options.speculative, drafter, target)
        # Also where the drafter will be idle: a wrong pair is told either way.
        draws.lend(drafter.check, target)
        if told := draws.lend(drafter.check_tokenizer, options.tokenizer):
            statistics.note(told)
    caches = _resolve_caches(options, model, statistics)
    request = Request(
        prompt=ids,
        caches=caches,
        keeps_caches=options.prompt_cache is not None,
        sampling=options.sampling(statistics),
        statistics=statistics,
        quantization=KVQuantization(options.kv_bits, options.kv_group_size, options.quantized_kv_start),
        budget=None if options.max_tokens == -1 else options.max_tokens,
        eos_token_ids=frozenset(options.eos_token_ids),
        prefill_step_size=options.prefill_step_size,
    )
    if stops is not None:
        request.stops = stops
    request.progress = prompt_listener(options.progress, options.prompt_progress_callback)
    request.quantization.check(caches)
    routes = CertifiedRoutes(target, options.verify, statistics, options.progress)
    schedule = FixedWidth(1, "plain decoding")
    if drafter is not None:
        with mx.stream(options.stream):
            schedule = draws.lend(_resolve_width, asked, drafter, routes, caches, statistics)
    drafter = None if schedule.width == 1 else drafter
    loop = open_loop(drafter, target, tokens_read(caches), statistics, draws)
    statistics.drafter = "none" if drafter is None else drafter.name
    statistics.loop = loop.name
    statistics.width_policy = str(schedule)
    draws.settle()
    return _Run(Engine(target, request, loop, schedule, routes, options.stream), request, statistics)


def _prompt_ids(prompt: Any) -> mx.array:
    ids = prompt if isinstance(prompt, mx.array) else mx.array(prompt)
    if ids.ndim != 1 or (ids.size and not mx.issubdtype(ids.dtype, mx.integer)):
        raise InvalidRequest(f"the prompt is one sequence of token ids, got shape {ids.shape} of {ids.dtype}.")
    if ids.size == 0:
        raise InvalidRequest("the prompt is empty. Give at least one token (a chat template or a BOS token makes one).")
    return ids


def _resolve_drafter(options: _Options, target: Target) -> Drafter | None:
    given, kind = options.draft_model, options.draft_kind
    if given is None and kind is None:
        asked = options.asked_width()
        if asked is not None and asked[0] > 1:
            raise InvalidRequest("a verify width was given but no drafter. Give draft_model, or leave the width out.")
        return None
    if given is None:
        if kind != "ngram":
            raise InvalidRequest(f"draft_kind={kind!r} needs a draft_model.")
        return NgramDrafter()
    if isinstance(given, nn.Module):
        given = StandaloneDrafter(given)
    if isinstance(given, Drafter):
        if kind not in (None, given.kind):
            raise InvalidRequest(f"draft_kind={kind!r} contradicts the drafter, which is of kind {given.kind!r}.")
        return given
    if isinstance(given, str):
        return load_drafter(given, target=target, kind=kind)
    raise UnsupportedOption(
        f"draft_model is a {type(given).__name__}, expected a drafter from load_drafter, a model loaded by mlx-lm, "
        'the path or hub id of either, or "ngram".'
    )


def _check_method(config: SpeculativeConfig | None, drafter: Drafter, target: Target) -> None:
    method = None if config is None else config.speculative_method
    if method is not None and drafter.architecture is not None:
        select_speculator(target.name, method, drafter.architecture)
    if method is not None and drafter.kind != _KIND_OF[method]:
        raise InvalidRequest(
            f"speculative_method={method!r} runs drafters of kind {_KIND_OF[method]!r}, "
            f"but {drafter.name} is of kind {drafter.kind!r}."
        )
    (config or SpeculativeConfig()).check_trained_width(drafter.trained_width, drafter.name)


def _resolve_caches(options: _Options, model: nn.Module, statistics: Statistics) -> list[Any]:
    fresh = new_caches(model, options.max_kv_size)
    caches = fresh if options.prompt_cache is None else options.prompt_cache
    if len(caches) != len(fresh):
        raise InvalidRequest(
            f"prompt_cache holds {len(caches)} caches, this model has {len(fresh)}. "
            "Give the target's caches alone; a drafter keeps its own."
        )
    if options.max_kv_size is not None and not is_limited(caches, options.max_kv_size):
        why = "this model makes its own caches" if caches is fresh else "the prompt cache has its size already"
        statistics.note(f"max_kv_size={options.max_kv_size} has no effect, as in mlx-lm: {why}")
    return caches


def _resolve_width(
    asked: tuple[int, str] | None, drafter: Drafter, routes: CertifiedRoutes, caches: list[Any], statistics: Statistics
) -> FixedWidth:
    width, origin = asked or (drafter.default_width, "the drafter's default")
    drafter.check_width(width)
    if width == 1:
        statistics.note(f"{origin} leaves no room for proposals, so {drafter.name} is idle")
        return FixedWidth(1, origin)
    if routes.route(width, caches) == STEP_THROUGH and asked is None:
        statistics.note(f"decoded plainly, {drafter.name} is idle; name a width to speculate all the same")
        return FixedWidth(1, "speculation would not pay")
    return FixedWidth(width, origin)


def generate_step(
    prompt: mx.array,
    model: nn.Module,
    stream: Any = generation_stream,
    *,
    draft_model: Drafting = None,
    draft_kind: str | None = None,
    draft_block_size: int | None = None,
    num_draft_tokens: int | None = None,
    verify: Verify = "exact",
    speculative: SpeculativeConfig | None = None,
    max_tokens: int = 256,
    sampler: Sampler | None = None,
    logits_processors: Sequence[LogitsProcessor] | None = None,
    max_kv_size: int | None = None,
    prompt_cache: list[Any] | None = None,
    prefill_step_size: int = 2048,
    kv_bits: int | None = None,
    kv_group_size: int = 64,
    quantized_kv_start: int = 5000,
    prompt_progress_callback: Callable[[int, int], None] | None = None,
    input_embeddings: mx.array | None = None,
    eos_token_ids: Sequence[int] = (),
    statistics: Statistics | None = None,
    progress: Progress | None = None,
) -> Generator[tuple[int, mx.array], None, None]:
    """Hand out the tokens mlx-lm's `generate_step` would, with fewer forwards where the drafter is right.

    Keywords not listed have mlx-lm's meaning.

    Args:
        prompt: [n] token ids, n >= 1.
        model: any model loaded by mlx-lm.
        draft_model: who proposes: a Drafter, a small model loaded by mlx-lm, the path or hub id of either, or
            "ngram". None decodes plainly.
        draft_kind: round loop; resolved from the checkpoint when left out.
        draft_block_size: verify width W, 1..32 tokens: the newest token and W-1 proposals. 1 decodes plainly.
        num_draft_tokens: W-1, mlx-lm's name for it. Give one of the two.
        verify: "exact", or "fast", which may differ from plain decoding at near-ties and says so.
        speculative: a SpeculativeConfig, in place of the width arguments.
        max_tokens: tokens to hand out; -1 for no limit; 0 only reads the prompt.
        prompt_cache: the caches to start from and to leave the text in, changed in place.
        input_embeddings: refused.
        eos_token_ids: ids after which to stop; the id itself is handed out. mlx-lm leaves this to the caller.
        statistics: filled in as the run goes on.
        progress: told each Step of loading and certifying, inside this call, and of the prompt; may raise to end them.

    Yields:
        (token id, [V] log-probabilities it was chosen from), bit for bit those of the one-token loop.

    Raises:
        MlxSpecError: before the first token, when a request cannot be served as asked. Nothing was changed.
        NonFiniteLogits: the model produced NaN. The tokens handed out so far are in the cache.
    """
    keywords = dict(locals())  # exactly the parameters: nothing else is bound yet
    return _open_run(**keywords).engine.run(_pair)


def _pair(emission: Emission) -> tuple[int, mx.array]:
    return emission.token, emission.logprobs


def speculative_generate_step(
    prompt: mx.array, model: nn.Module, draft_model: Drafting, stream: Any = generation_stream, **keywords: Any
) -> Generator[tuple[int, mx.array, bool], None, None]:
    """As `generate_step`, with a drafter in mlx-lm's place and whether each token had been proposed.

    Yields:
        (token id, [V] log-probabilities, from_draft).
    """
    return _open_run(prompt, model, stream=stream, draft_model=draft_model, **keywords).engine.run(_triple)


def _triple(emission: Emission) -> tuple[int, mx.array, bool]:
    return emission


def stream_generate(
    model: nn.Module,
    tokenizer: Any,
    prompt: str | mx.array | list[int],
    max_tokens: int = 256,
    draft_model: Drafting = None,
    stream: Any = generation_stream,
    *,
    stop: Sequence[str] = (),
    eos_token_ids: Sequence[int] = (),
    **keywords: Any,
) -> Generator[GenerationResponse, None, None]:
    """Stream text as mlx-lm's `stream_generate` does.

    Args:
        model, tokenizer: as loaded by `load` or by mlx-lm.
        prompt: text, or token ids.
        max_tokens: tokens to generate; -1 for no limit.
        draft_model: see `generate_step`.
        stream: the mlx stream to work on.
        stop: strings that end the text; it ends before them.
        eos_token_ids: ids that end the text besides the tokenizer's own.
        keywords: the remaining keywords of `generate_step`.

    Yields:
        One response per token, mlx-lm's fields and `speculation`.

    Raises:
        MlxSpecError: see `generate_step`.
    """
    if max_tokens == 0:
        raise InvalidRequest("max_tokens must not be 0 here: give a number of tokens, or -1 for no limit.")
    if not isinstance(tokenizer, TokenizerWrapper):
        tokenizer = TokenizerWrapper(tokenizer)
    text = TextStream(tokenizer.detokenizer, stop)
    run = _open_run(
        _encode(tokenizer, prompt),
        model,
        stops=text.feed,
        max_tokens=max_tokens,
        draft_model=draft_model,
        stream=stream,
        eos_token_ids=frozenset(tokenizer.eos_token_ids) | frozenset(eos_token_ids),
        tokenizer=tokenizer,
        **keywords,
    )
    return _responses(run, model, text, stream)


def _encode(tokenizer: TokenizerWrapper, prompt: str | mx.array | list[int]) -> mx.array:
    if isinstance(prompt, str):
        has_bos = tokenizer.bos_token is not None and prompt.startswith(tokenizer.bos_token)
        prompt = tokenizer.encode(prompt, add_special_tokens=not has_bos)
    return _prompt_ids(prompt)


def _responses(run: _Run, model: nn.Module, text: TextStream, stream: Any) -> Generator[GenerationResponse, None, None]:
    request, started, count, prompt_tps = run.request, time.perf_counter(), 0, 0.0

    def response(emission: Emission) -> GenerationResponse:
        nonlocal started, count, prompt_tps
        count += 1
        if count == 1:
            prompt_tps = request.prompt.size / (time.perf_counter() - started)
            started = time.perf_counter()
        segment = text.segment
        if request.finish_reason is not None:
            # A stop string's last token shows the text before it; an end token shows nothing.
            segment = "" if emission.token in request.eos_token_ids else segment
            text.finish()
            segment += text.segment
        return GenerationResponse(
            text=segment,
            token=emission.token,
            logprobs=emission.logprobs,
            from_draft=emission.from_draft,
            prompt_tokens=request.prompt.size,
            prompt_tps=prompt_tps,
            generation_tokens=count,
            generation_tps=count / (time.perf_counter() - started),
            peak_memory=mx.get_peak_memory() / 1e9,
            finish_reason=request.finish_reason,
            speculation=run.statistics,
        )

    with wired_limit(model, [stream]):
        # Nothing may come between the engine's `yield` and the caller's.
        yield from run.engine.run(response)


def generate(
    model: nn.Module, tokenizer: Any, prompt: str | mx.array | list[int], verbose: bool = False, **keywords: Any
) -> str:
    """The whole text as one string. Keywords as in `stream_generate`; verbose prints as it goes."""
    pieces = []
    response = None
    for response in stream_generate(model, tokenizer, prompt, **keywords):
        pieces.append(response.text)
        if verbose:
            print(response.text, end="", flush=True)
    if verbose and response is not None:
        print(f"\n{response.speculation}")
    return "".join(pieces)


class _CallableModule(ModuleType):
    """`mlx_spec.generate` names this module and, as in mlx-lm, the function: so the module can be called."""

    def __call__(self, *args: Any, **keywords: Any) -> str:
        return generate(*args, **keywords)


if __name__ == "__main__":
    from mlx_spec.commandline import command

    command()

sys.modules[__name__].__class__ = _CallableModule
