"""Generation with mlx-lm's own function names and keyword arguments, and the command `python -m mlx_spec.generate`."""

from __future__ import annotations

import inspect
import sys
import time
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass, field
from types import FunctionType, ModuleType
from typing import Any, Unpack

import mlx.core as mx
import mlx.nn as nn
from mlx_lm import sample_utils
from mlx_lm.generate import GenerationResponse as _GenerationResponse
from mlx_lm.generate import generation_stream, wired_limit
from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlx_spec.cache.adopt import KVQuantization, is_limited, is_shared_class, leaves, new_caches
from mlx_spec.cache.contents import rows_held, tokens_read
from mlx_spec.config import SpeculativeConfig
from mlx_spec.drafters.base import Drafter
from mlx_spec.drafters.ngram import NgramDrafter
from mlx_spec.drafters.speculators import select_speculator
from mlx_spec.drafters.standalone import StandaloneDrafter
from mlx_spec.engine.drafting import open_drafting
from mlx_spec.engine.round import Engine
from mlx_spec.engine.row import Row
from mlx_spec.engine.run import Emission, Shaped, run
from mlx_spec.errors import InvalidRequest, UnsupportedOption
from mlx_spec.model.target import DRAWS, Target
from mlx_spec.options import KIND_OF, Drafting, Options, RunKeywords, StepKeywords, TextKeywords, spelled_out
from mlx_spec.pairing import load_drafter
from mlx_spec.progress import prompt_listener, telling_progress
from mlx_spec.prompts import check_ends, read_prompt
from mlx_spec.sampling import OwnDraws, Sampling
from mlx_spec.schedule.fixed import FixedWidth
from mlx_spec.stats import Statistics
from mlx_spec.stops import TextStream
from mlx_spec.verify.certified_routes import CertifiedRoutes
from mlx_spec.verify.record import record_of
from mlx_spec.verify.routes import STEP_THROUGH


@dataclass
class GenerationResponse(_GenerationResponse):
    """mlx-lm's response, and what the speculation did so far.

    Attributes:
        speculation: live counters of the run, and every fallback in words; final once the run has ended.
    """

    speculation: Statistics = field(default_factory=Statistics)


def _sampling(options: Options, statistics: Statistics) -> Sampling:
    """The request's callables, and what may be done with them."""
    sampler = options.sampler or sample_utils.greedy_sampler
    processors = tuple(options.logits_processors or ())
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
    row: Row
    statistics: Statistics

    def tokens(self, shape: Callable[[Emission], Shaped]) -> Generator[Shaped, None, None]:
        """See `engine.run.run`."""
        return run(self.engine, self.row, shape)


def _open_run(
    prompt: Any,
    model: nn.Module,
    options: Options,
    stops: Callable[[int], bool] | None = None,
    tokenizers_ends: Iterable[int] = (),
) -> _Run:
    """Check everything, pair drafter and target, and put the engine together. Nothing has run yet."""
    statistics = options.statistics or Statistics()
    if statistics.rounds:
        raise InvalidRequest("these statistics belong to a run already. Give each run its own.")
    statistics.open()
    target = Target(model)
    read = read_prompt(prompt, options.input_embeddings, target)
    check_ends(options.eos_token_ids, tokenizers_ends, target, statistics)
    draws = OwnDraws(read.ids)
    with telling_progress(options.progress):
        drafter = _resolve_drafter(options, target)
    if drafter is not None:
        _check_pair(options, drafter, target, statistics, draws)
    caches = _resolve_caches(options, model, statistics)
    routes = CertifiedRoutes(target, options.verify, statistics, options.progress)
    row = Row(
        prompt=read,
        caches=caches,
        keeps_caches=options.prompt_cache is not None,
        sampling=_sampling(options, statistics),
        statistics=statistics,
        quantization=KVQuantization(options.kv_bits, options.kv_group_size, options.quantized_kv_start),
        budget=None if options.max_tokens == -1 else options.max_tokens,
        eos_token_ids=frozenset(options.eos_token_ids).union(tokenizers_ends),
        prefill_step_size=options.prefill_step_size,
        routes=routes,
        on_round=options.on_round,
    )
    if stops is not None:
        row.stops = stops
    row.progress = prompt_listener(options.progress, options.prompt_progress_callback)
    row.quantization.check(caches)
    row.quantization.check_sizes(caches, lambda: target.used_caches(new_caches(model, options.max_kv_size)))
    fixed = FixedWidth(1, "plain decoding")
    if drafter is not None:
        with mx.stream(options.stream):
            fixed = draws.lend(_resolve_width, options.asked_width(), drafter, routes, caches, statistics)
    drafter = None if fixed.width == 1 else drafter
    row.policy = fixed
    row.drafting = open_drafting(drafter, target, read, tokens_read(caches), statistics, draws)
    _tell(options, drafter, statistics)
    statistics.loop = row.drafting.name
    statistics.width_policy = str(row.policy)
    draws.settle()
    return _Run(Engine(target, options.stream), row, statistics)


def _tell(options: Options, drafter: Drafter | None, statistics: Statistics) -> None:
    """What is in force, and what was asked for and has no effect."""
    if options.speculative is not None and options.speculative.rejection_sampling_strategy is not None:
        statistics.note(
            f"rejection_sampling_strategy={options.speculative.rejection_sampling_strategy!r} has no effect: "
            "proposals are compared with the target's own choice"
        )
    if drafter is None:
        return
    statistics.drafter = drafter.name
    for sentence in drafter.remarks:
        statistics.note(sentence)
    if options.verify == "fast":
        statistics.acceptance_rule = "target's own choice in a plain block (verify=fast, not token-exact)"


def _resolve_drafter(options: Options, target: Target) -> Drafter | None:
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


def _check_pair(options: Options, drafter: Drafter, target: Target, statistics: Statistics, draws: OwnDraws) -> None:
    """Refuse a pair that cannot work, also where the drafter will be idle: a wrong one is told either way."""
    config = options.speculative
    method = None if config is None else config.speculative_method
    if method is not None and drafter.architecture is not None:
        select_speculator(target.name, method, drafter.architecture)
    if method is not None and drafter.kind != KIND_OF[method]:
        raise InvalidRequest(
            f"speculative_method={method!r} runs drafters of kind {KIND_OF[method]!r}, "
            f"but {drafter.name} is of kind {drafter.kind!r}."
        )
    if method is not None and method not in (drafter.methods or (method,)):
        raise InvalidRequest(
            f"speculative_method={method!r}, but the checkpoint of {drafter.name} is one for "
            f"{' or '.join(map(repr, drafter.methods))}. Name that method."
        )
    (config or SpeculativeConfig()).check_trained_width(drafter.trained_width, drafter.name)
    draws.lend(drafter.check, target)
    told = draws.lend(drafter.check_tokenizer, options.tokenizer)
    if told:
        statistics.note(told)


def _resolve_caches(options: Options, model: nn.Module, statistics: Statistics) -> list[Any]:
    fresh = new_caches(model, options.max_kv_size)
    caches = fresh if options.prompt_cache is None else options.prompt_cache
    if caches is not fresh:
        record_of(model).own_caches.require(caches, fresh, "prompt_cache")
        rows = rows_held([cache for cache in leaves(caches) if is_shared_class(cache)])
        if rows not in (None, 1):
            raise InvalidRequest(
                f"prompt_cache holds {rows} rows, a run reads one. Take one row out: [cache.extract(0) for each cache]."
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
    if routes.model_draws(caches):
        statistics.note(f"decoded plainly, {drafter.name} is idle: {DRAWS}")
        return FixedWidth(1, "the model draws random numbers")
    route = routes.route(width, caches)
    statistics.verify_route = route.name
    if route == STEP_THROUGH and asked is None:
        statistics.note(f"decoded plainly, {drafter.name} is idle; name a width to speculate all the same")
        return FixedWidth(1, "speculation would not pay")
    return FixedWidth(width, origin)


_Step = Generator[tuple[int, mx.array], None, None]
_DraftedStep = Generator[tuple[int, mx.array, bool], None, None]


@spelled_out(StepKeywords)
def generate_step(
    prompt: Any,
    model: nn.Module,
    stream: Any = generation_stream,
    *,
    draft_model: Drafting = None,
    max_tokens: int = 256,
    **keywords: Unpack[RunKeywords],
) -> _Step:
    """Hand out the tokens mlx-lm's `generate_step` would, with fewer forwards where the drafter is right.

    Keywords not listed have mlx-lm's meaning.

    Args:
        prompt: [n] token ids of the model's vocabulary, n >= 1; may be empty where `input_embeddings` are given.
        model: any model loaded by mlx-lm.
        draft_model: who proposes: a Drafter, a small model loaded by mlx-lm, the path or hub id of either, or
            "ngram". None decodes plainly.
        draft_kind: round loop; resolved from the checkpoint when left out.
        draft_block_size: verify width W, 1..32 tokens: the newest token and W-1 proposals. 1 decodes plainly.
        num_draft_tokens: W-1, mlx-lm's name for it. Give one of the two.
        verify: "exact", or "fast", which may differ from plain decoding at near-ties and says so.
        speculative: a SpeculativeConfig, in place of the width arguments.
        max_tokens: tokens to hand out; -1 for no limit; 0 only reads the prompt.
        prompt_cache: the model's caches to start from and to leave the text in, changed in place.
        input_embeddings: [n, H] floats that the model reads in place of the prompt's embedded ids. Drafters that read
            ids are not shown what has none; the statistics say so.
        eos_token_ids: ids after which to stop; the id itself is handed out. mlx-lm leaves this to the caller. One that
            the model does not have is refused.
        statistics: filled in as the run goes on.
        progress: told each Step of loading and certifying, inside this call, and of the prompt; may raise to end them.
        on_round: told the RoundResult of every round before its last token is handed out, but of none inside of which
            the text ends; may raise to end the run.

    Yields:
        (token id, [V] log-probabilities it was chosen from), bit for bit those of the one-token loop.

    Raises:
        MlxSpecError: before the first token, when a request cannot be served as asked. Nothing was changed.
        NonFiniteLogits: the model produced NaN. The tokens handed out so far are in the cache.
    """
    asked: dict[str, Any] = {**keywords, "stream": stream, "draft_model": draft_model, "max_tokens": max_tokens}
    options = Options.read(asked, "generate_step", _STEP_NAMES)
    return _open_run(prompt, model, options).tokens(_pair)


_STEP_NAMES = ("stream", *StepKeywords.__annotations__)
_TEXT_NAMES = tuple(TextKeywords.__annotations__)


def _pair(emission: Emission) -> tuple[int, mx.array]:
    return emission.token, emission.logprobs


@spelled_out(StepKeywords)
def speculative_generate_step(
    prompt: Any,
    model: nn.Module,
    draft_model: Drafting,
    stream: Any = generation_stream,
    *,
    max_tokens: int = 256,
    **keywords: Unpack[RunKeywords],
) -> _DraftedStep:
    """As `generate_step`, with a drafter in mlx-lm's place and whether each token had been proposed.

    Yields:
        (token id, [V] log-probabilities, from_draft).
    """
    asked: dict[str, Any] = {**keywords, "stream": stream, "draft_model": draft_model, "max_tokens": max_tokens}
    options = Options.read(asked, "speculative_generate_step", _STEP_NAMES)
    return _open_run(prompt, model, options).tokens(_triple)


def _triple(emission: Emission) -> tuple[int, mx.array, bool]:
    return emission


@spelled_out(TextKeywords)
def stream_generate(
    model: nn.Module,
    tokenizer: Any,
    prompt: str | mx.array | list[int],
    max_tokens: int = 256,
    draft_model: Drafting = None,
    stream: Any = generation_stream,
    *,
    stop: str | Iterable[str] = (),
    **keywords: Unpack[RunKeywords],
) -> Generator[GenerationResponse, None, None]:
    """Stream text as mlx-lm's `stream_generate` does.

    Args:
        model, tokenizer: as loaded by `load` or by mlx-lm.
        prompt: text, or token ids.
        max_tokens: tokens to generate; -1 for no limit.
        draft_model: see `generate_step`.
        stream: the mlx stream to work on.
        stop: a string that ends the text, or several; it ends before them.
        keywords: the remaining keywords of `generate_step`. `eos_token_ids` end the text besides the tokenizer's own.

    Yields:
        One response per token, mlx-lm's fields and `speculation`.

    Raises:
        MlxSpecError: see `generate_step`.
    """
    named = {"max_tokens": max_tokens, "draft_model": draft_model, "stream": stream, "stop": stop}
    return _stream(model, tokenizer, prompt, {**keywords, **named}, "stream_generate")


def _stream(
    model: nn.Module, tokenizer: Any, prompt: Any, keywords: dict[str, Any], function: str
) -> Generator[GenerationResponse, None, None]:
    options = Options.read(keywords, function, _TEXT_NAMES)
    if options.max_tokens == 0:
        raise InvalidRequest("max_tokens must not be 0 here: give a number of tokens, or -1 for no limit.")
    if not isinstance(tokenizer, TokenizerWrapper):
        tokenizer = TokenizerWrapper(tokenizer)
    text = TextStream(tokenizer.detokenizer, options.stop)
    options = options.model_copy(update={"tokenizer": tokenizer})
    opened = _open_run(_encode(tokenizer, prompt), model, options, text.feed, frozenset(tokenizer.eos_token_ids))
    return _responses(opened, model, text, options.stream)


def _encode(tokenizer: TokenizerWrapper, prompt: Any) -> Any:
    if not isinstance(prompt, str):
        return prompt
    has_bos = tokenizer.bos_token is not None and prompt.startswith(tokenizer.bos_token)
    return tokenizer.encode(prompt, add_special_tokens=not has_bos)


def _responses(
    opened: _Run, model: nn.Module, text: TextStream, stream: Any
) -> Generator[GenerationResponse, None, None]:
    row, started, count, prompt_tps = opened.row, time.perf_counter(), 0, 0.0

    def response(emission: Emission) -> GenerationResponse:
        nonlocal started, count, prompt_tps
        count += 1
        if count == 1:
            prompt_tps = row.prompt.length / (time.perf_counter() - started)
            started = time.perf_counter()
        segment = text.segment if row.finish_reason is None else _finish(row, text, emission)
        return GenerationResponse(
            text=segment,
            token=emission.token,
            logprobs=emission.logprobs,
            from_draft=emission.from_draft,
            prompt_tokens=row.prompt.length,
            prompt_tps=prompt_tps,
            generation_tokens=count,
            generation_tps=count / (time.perf_counter() - started),
            peak_memory=mx.get_peak_memory() / 1e9,
            finish_reason=row.finish_reason,
            speculation=opened.statistics,
        )

    with wired_limit(model, [stream]):
        # Nothing may come between the engine's `yield` and the caller's.
        yield from opened.tokens(response)


def _finish(row: Row, text: TextStream, last: Emission) -> str:
    """The end of the text, once all of it is certain. The run settles after its last token was handed out."""
    # A stop string's last token shows the text before it; an end token shows nothing.
    segment = "" if last.token in row.eos_token_ids else text.segment
    text.finish()
    if text.stopped:
        row.finish_reason = "stop"
    return segment + text.segment


@spelled_out(TextKeywords)
def generate(
    model: nn.Module,
    tokenizer: Any,
    prompt: str | mx.array | list[int],
    verbose: bool = False,
    **keywords: Unpack[TextKeywords],
) -> str:
    """The whole text as one string. Keywords as in `stream_generate`; verbose prints as it goes."""
    pieces = []
    response = None
    for response in _stream(model, tokenizer, prompt, {**keywords}, "generate"):
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


__signature__ = inspect.signature(generate)
"""What calling the module takes."""

if __name__ == "__main__":
    from mlx_spec.commandline import command

    command()

sys.modules[__name__].__class__ = _CallableModule
