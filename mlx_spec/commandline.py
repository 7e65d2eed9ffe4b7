"""The flags of `python -m mlx_spec.generate`, and what it prints: text to stdout, everything else to stderr."""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn, cast

import mlx.core as mx
from jinja2 import TemplateError
from mlx import nn
from mlx_lm import sample_utils
from mlx_lm.generate import generate_step as plain_generate_step
from mlx_lm.models.cache import load_prompt_cache

from mlx_spec.demo import demo_drafter_path, demo_target_path
from mlx_spec.drafters import KNOWN_DRAFTER_KINDS
from mlx_spec.drafters.checkpoint import one_line
from mlx_spec.drafters.quantization import DEFAULTS, parse_short
from mlx_spec.drafters.registry import check_kind
from mlx_spec.environment import expanded
from mlx_spec.errors import InvalidRequest, MlxSpecError, UnsupportedOption
from mlx_spec.generate import stream_generate
from mlx_spec.options import OPTION_FLAGS, Options, SamplingFlags
from mlx_spec.pairing import load, load_drafter
from mlx_spec.rendering import bounded, require_bounded_operators
from mlx_spec.sampling import random_key, rewind_random_state
from mlx_spec.stats import Statistics
from mlx_spec.terminal import Flags, Report, Shown, checked, ending_well, leave, read_stdin, write_text

_REFUSED = {
    "trust_remote_code": "--trust-remote-code is refused: no code from a checkpoint is ever run here.",
    "image": "--image is refused: this library decodes text.",
    "quantize_activations": "--quantize-activations is refused: it changes the target's arithmetic.",
}


def parser() -> argparse.ArgumentParser:
    """All flags: mlx-lm's under mlx-lm's names, and ours."""
    flags = Flags(
        prog="python -m mlx_spec.generate",
        description="Generate text with several tokens per forward and without changing one of them. "
        "Without --model the embedded demo pair runs.",
    )
    _add_model_flags(flags)
    _add_prompt_flags(flags)
    _add_sampling_flags(flags)
    _add_cache_flags(flags)
    _add_speculation_flags(flags)
    return flags


def _add_model_flags(flags: argparse.ArgumentParser) -> None:
    group = flags.add_argument_group("model")
    group.add_argument("--model", help="path or hub id of the target")
    group.add_argument("--adapter-path", help="path of trained adapter weights")
    group.add_argument("--check-weights", action="store_true", help="read all weights first; refuse NaN and infinity")
    group.add_argument("--trust-remote-code", action="store_true", help="refused")
    group.add_argument("--quantize-activations", "-qa", action="store_true", help="refused")


def _add_prompt_flags(flags: argparse.ArgumentParser) -> None:
    group = flags.add_argument_group("prompt")
    group.add_argument("--prompt", "-p", default="hello", help="the message; '-' reads it from stdin")
    group.add_argument("--system-prompt", help="system message for the chat template")
    group.add_argument("--prefill-response", help="what the answer begins with")
    group.add_argument("--image", nargs="+", default=(), help="refused")
    group.add_argument("--ignore-chat-template", action="store_true", help="use the prompt as it is")
    group.add_argument("--use-default-chat-template", action="store_true", help="use the tokenizer's default template")
    group.add_argument("--chat-template-config", help="JSON object passed to the chat template")
    group.add_argument("--extra-eos-token", nargs="+", default=(), help="further tokens that end the text")
    group.add_argument("--stop", nargs="+", default=(), help="strings that end the text; it ends before them")
    group.add_argument("--max-tokens", "-m", type=int, default=100, help="tokens to generate; -1 for no limit")


def _add_sampling_flags(flags: argparse.ArgumentParser) -> None:
    group = flags.add_argument_group("sampling")
    group.add_argument("--temp", type=float, default=0.0, help="temperature; 0 takes the most likely token")
    group.add_argument("--top-p", type=float, default=1.0)
    group.add_argument("--min-p", type=float, default=0.0)
    group.add_argument("--min-tokens-to-keep", type=int, default=1, help="tokens that min-p never removes")
    group.add_argument("--top-k", type=int, default=0)
    group.add_argument("--xtc-probability", type=float, default=0.0)
    group.add_argument("--xtc-threshold", type=float, default=0.1)
    group.add_argument("--seed", type=int, help="the same seed gives the same text with and without speculation")


def _add_cache_flags(flags: argparse.ArgumentParser) -> None:
    group = flags.add_argument_group("cache")
    group.add_argument("--max-kv-size", type=int, help="size of a rotating cache, where the model leaves it open")
    group.add_argument("--prefill-step-size", type=int, default=2048, help="prompt tokens per forward")
    group.add_argument("--prompt-cache-file", help="a prompt cache saved by mlx-lm to continue from")
    group.add_argument("--kv-bits", type=int, help="quantize the cache to this many bits")
    group.add_argument("--kv-group-size", type=int, default=64)
    group.add_argument("--quantized-kv-start", type=int, default=5000, help="cache length from which to quantize")


def _add_speculation_flags(flags: argparse.ArgumentParser) -> None:
    group = flags.add_argument_group("speculation")
    group.add_argument("--draft-model", help="path or hub id of a drafter or a small language model, or 'ngram'")
    group.add_argument("--draft-kind", help=f"one of {', '.join(KNOWN_DRAFTER_KINDS)}; resolved when left out")
    group.add_argument(
        "--draft-quantize",
        metavar="BITS[,GROUP_SIZE]",
        help=f"quantize the drafter once it is loaded: bits and group size, or one of {', '.join(DEFAULTS)}",
    )
    group.add_argument("--draft-block-size", type=int, help="verify width: the newest token and the proposals after it")
    group.add_argument("--num-draft-tokens", type=int, help="proposals per round: the verify width less one")
    group.add_argument("--verify", default="exact", help="exact, or fast: may differ from plain decoding at near-ties")
    group.add_argument(
        "--check", action="store_true", help="also decode plainly with mlx-lm and compare; 1 if they differ"
    )
    group.add_argument("--stats-json", metavar="FILE", help="write the statistics there")
    group.add_argument("--verbose", type=_truth, default=True, help="False prints the text alone")


def _truth(word: str) -> bool:
    return word.lower() not in ("false", "f")


@dataclass
class _Job:
    """One generation, loaded and checked: what the speculative and the plain run have in common."""

    model: nn.Module
    tokenizer: Any
    prompt_ids: list[int]
    args: argparse.Namespace
    key: list[int]

    def sampling(self) -> dict[str, Any]:
        """The sampler, with the random state where loading left it."""
        args = self.args
        rewind_random_state(self.key)
        sampler = sample_utils.make_sampler(
            args.temp,
            args.top_p,
            args.min_p,
            args.min_tokens_to_keep,
            top_k=args.top_k,
            xtc_probability=args.xtc_probability,
            xtc_threshold=args.xtc_threshold,
            xtc_special_tokens=self.tokenizer.encode("\n") + list(self.tokenizer.eos_token_ids),
        )
        return {"sampler": sampler}

    def cache_keywords(self) -> dict[str, Any]:
        args = self.args
        names = ("max_kv_size", "prefill_step_size", "kv_bits", "kv_group_size", "quantized_kv_start")
        keywords = {name: getattr(args, name) for name in names}
        if args.prompt_cache_file is not None:
            keywords["prompt_cache"] = _read_prompt_cache(args)[0]
        return keywords


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Returns:
        0; 1 when --check found a difference; 2 when the request cannot be served, with one line on stderr; 130 after
        Ctrl-C, with the statistics so far; 141 when nobody reads the text any more.
    """
    args = parser().parse_args(checked(argv))
    course = _Course(args)
    with _warnings_as_lines():
        return ending_well(lambda: _run(args, course), course.interrupted)


def command(argv: Sequence[str] | None = None) -> NoReturn:
    """Run the command and end the process."""
    leave(main(argv))


class _Course:
    """What a run of the command has to leave, however it ends.

    Attributes:
        statistics: of the run, once it has begun.
        shown: how far it is.
        report: the file of --stats-json.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self.statistics: Statistics | None = None
        self.shown = Shown(args.verbose)
        self.report: Report | None = None
        self._verbose = args.verbose

    def interrupted(self) -> None:
        """Leave the statistics so far."""
        self.shown.close()
        if self.statistics is None:
            print("interrupted before the first token", file=sys.stderr)
            if self.report is not None:
                self.report.discard()
            return
        self.statistics.note("interrupted")
        if self.report is not None:
            self.report.publish(_as_json(self.statistics))
        if self._verbose:
            print(f"\n{self.statistics}", file=sys.stderr)


def _run(args: argparse.Namespace, course: _Course) -> int:
    for name, sentence in _REFUSED.items():
        if getattr(args, name):
            raise UnsupportedOption(sentence)
    if args.check and args.temp != 0 and args.seed is None:
        raise InvalidRequest("--check compares two runs, and at a temperature these agree only under one --seed.")
    _check_numbers(args)
    if args.seed is not None:
        # Before loading, as mlx-lm does: making a model draws from the random state.
        mx.random.seed(args.seed)
    course.report = Report(args.stats_json, "--stats-json")
    try:
        job, drafter = _load(args, course.shown)
        with _told_as("this request"):
            ids, statistics = _speculate(job, drafter, course)
        if args.verbose:
            print(statistics, file=sys.stderr)
        course.report.publish(_as_json(statistics))
    except (KeyboardInterrupt, BrokenPipeError):
        raise  # the statistics so far are still to be left
    except BaseException:
        course.report.discard()
        raise
    finally:
        course.shown.close()
    return _check(job, ids, statistics) if args.check else 0


def _as_json(statistics: Statistics) -> str:
    return json.dumps(statistics.as_dict(), indent=2) + "\n"


def _check_numbers(args: argparse.Namespace) -> None:
    """Refuse what no model could honour before one is loaded."""
    flags = vars(args)
    SamplingFlags.read(flags)
    Options.read({name: flags[name] for name in OPTION_FLAGS}, "this command")
    if args.max_tokens == 0:
        raise InvalidRequest("--max-tokens must not be 0: give a number of tokens, or -1 for no limit.")


@contextmanager
def _told_as(what: str) -> Iterator[None]:
    """What mlx, mlx-lm or the system refuse is told in one line, with what was asked for."""
    try:
        yield
    except (MlxSpecError, BrokenPipeError):
        raise
    except (ValueError, TypeError, RuntimeError, LookupError, OSError, TemplateError) as error:
        raise InvalidRequest(f"{what}: {' '.join(str(error).split())}") from error


def _load(args: argparse.Namespace, shown: Shown) -> tuple[_Job, Any]:
    model_path = args.model
    tokenizer_config = None
    if args.prompt_cache_file is not None:
        metadata = _read_prompt_cache(args)[1]
        what = f"the tokenizer_config in --prompt-cache-file {args.prompt_cache_file}"
        tokenizer_config = _json_object(metadata.get("tokenizer_config", "{}"), what, _SAVE_ONE)
        model_path = _same_model(model_path, metadata.get("model"))
    draft_model = _draft_source(args, demo=model_path is None)
    quantize = _draft_quantize(args, draft_model)
    if model_path is None:
        with _told_as("the cache folder for the demo target cannot be used, name a --model instead"):
            model_path = str(demo_target_path(progress=_say))
    model, tokenizer = load(
        model_path,
        adapter_path=args.adapter_path,
        tokenizer_config=tokenizer_config,
        check_weights=args.check_weights,
        progress=shown,
    )
    for word in args.extra_eos_token:
        _add_end(tokenizer, word)
    if args.use_default_chat_template:
        _take_default_template(tokenizer)
    drafter = None
    if draft_model is not None:
        drafter = load_drafter(draft_model, target=model, kind=args.draft_kind, quantize=quantize)
    key = cast(list[int], random_key().tolist())
    return _Job(model, tokenizer, _prompt_ids(args, tokenizer), args, key), drafter


def _add_end(tokenizer: Any, word: str) -> None:
    """As mlx-lm reads the flag: a token, or its id. What is neither is told; mlx-lm lets it stand for what it may."""
    with _told_as("--extra-eos-token"):
        tokenizer.add_eos_token(word)
    ids, number = tokenizer.get_vocab(), word.removeprefix("-").isdigit()
    if (int(word) not in ids.values()) if number else word not in ids:
        effect = "it has no effect" if number else f"as in mlx-lm it stands for {tokenizer.unk_token}"
        _say(f"warning: --extra-eos-token {word!r} is no token of this tokenizer nor the id of one; {effect}")


def _take_default_template(tokenizer: Any) -> None:
    """As mlx-lm's server reads the flag: where a tokenizer brings no template, that of its class is used."""
    if tokenizer.has_chat_template:
        _say("--use-default-chat-template has no effect, as in mlx-lm: the tokenizer has a chat template of its own")
        return
    default = getattr(tokenizer, "default_chat_template", None)
    if not default:
        raise UnsupportedOption(
            "--use-default-chat-template: the tokenizer has no chat template, and its class has no default one. Leave "
            "the flag out: the prompt is then used as it is."
        )
    tokenizer.chat_template = default
    tokenizer.has_chat_template = True


def _draft_source(args: argparse.Namespace, demo: bool) -> str | None:
    """What to load the drafter from, or None for plain decoding."""
    kind = args.draft_kind
    check_kind(kind)
    if args.draft_model is not None:
        return str(args.draft_model)
    if kind == "ngram":
        return "ngram"
    if demo and kind in (None, "eagle3"):
        return str(demo_drafter_path())
    if kind is not None:
        raise InvalidRequest(f"--draft-kind {kind} needs --draft-model, the path or hub id of such a drafter.")
    return None


def _draft_quantize(args: argparse.Namespace, draft_model: str | None) -> dict[str, Any] | None:
    given = args.draft_quantize
    if given is None:
        return None
    if draft_model is None:
        raise InvalidRequest(f"--draft-quantize {given} quantizes a drafter: give one with --draft-model.")
    try:
        return parse_short(given)
    except ValueError as error:
        raise InvalidRequest(f"--draft-quantize: {error}") from None


_UNREADABLE = (OSError, RuntimeError, ValueError, TypeError, LookupError, AttributeError)
"""What mlx-lm ends in when it is given any other file to read a prompt cache from."""

_SAVE_ONE = "Save a prompt cache with mlx-lm: python -m mlx_lm cache_prompt --prompt-cache-file FILE."


def _read_prompt_cache(args: argparse.Namespace) -> tuple[list[Any], dict[str, str]]:
    file = expanded(args.prompt_cache_file)
    if not file.is_file():
        raise InvalidRequest(f"--prompt-cache-file {file}: there is no such file. {_SAVE_ONE}")
    try:
        caches, metadata = load_prompt_cache(str(file), return_metadata=True)
        return caches, dict(metadata)
    except _UNREADABLE as error:
        said = " ".join(f"{type(error).__name__}: {error}".split())
        raise InvalidRequest(
            f"--prompt-cache-file {file} holds no prompt cache that this mlx-lm can read ({said}). {_SAVE_ONE}"
        ) from None


def _same_model(given: str | None, saved: str | None) -> str | None:
    if given is not None and saved is not None and given != saved:
        raise InvalidRequest(f"--model {given} is not the model {saved} that filled --prompt-cache-file.")
    return given or saved


def _prompt_ids(args: argparse.Namespace, tokenizer: Any) -> list[int]:
    text = read_stdin() if args.prompt == "-" else args.prompt.replace("\\n", "\n").replace("\\t", "\t")
    if not text:
        raise InvalidRequest("the prompt is empty. Give --prompt some text.")
    given = args.chat_template_config
    way_out = """Give one such as '{"enable_thinking": false}'."""
    extra = {} if given is None else _json_object(given, "--chat-template-config", way_out)
    templated = not args.ignore_chat_template and tokenizer.has_chat_template
    if templated:
        text = _templated_safely(args, tokenizer, text, extra)
    return list(tokenizer.encode(text, add_special_tokens=not templated))


def _json_object(text: str, what: str, way_out: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise InvalidRequest(f"{what} wants a JSON object: {error}. {way_out}") from None
    if not isinstance(value, dict):
        raise InvalidRequest(f"{what} wants a JSON object, got {text}. {way_out}")
    return value


def _templated_safely(args: argparse.Namespace, tokenizer: Any, text: str, extra: dict[str, Any]) -> str:
    """A template is a program of whoever made the checkpoint: it may fail in any way, or never end."""
    try:
        if isinstance(tokenizer.chat_template, str):
            require_bounded_operators(tokenizer.chat_template)
        with bounded():
            return _templated(args, tokenizer, text, extra)
    except Exception as error:
        raise InvalidRequest(f"the chat template: {one_line(error)}") from error


def _templated(args: argparse.Namespace, tokenizer: Any, text: str, extra: dict[str, Any]) -> str:
    messages = [] if args.system_prompt is None else [{"role": "system", "content": args.system_prompt}]
    messages.append({"role": "user", "content": text})
    prefilled = args.prefill_response is not None
    if prefilled:
        messages.append({"role": "assistant", "content": args.prefill_response})

    def render() -> str:
        return str(
            tokenizer.apply_chat_template(
                messages,
                tokenize=False,
                continue_final_message=prefilled,
                add_generation_prompt=not prefilled,
                **extra,
            )
        )

    prompt = render()
    if args.prompt_cache_file is None:
        return prompt
    # The cache holds the conversation up to this message, so only what follows the query's place is new.
    messages[-1]["content"] = "<query>"
    return prompt[render().index("<query>") :]


def _speculate(job: _Job, drafter: Any, course: _Course) -> tuple[list[int], Statistics]:
    args = job.args
    statistics = course.statistics = Statistics()
    ids = []
    for response in stream_generate(
        job.model,
        job.tokenizer,
        job.prompt_ids,
        max_tokens=args.max_tokens,
        draft_model=drafter,
        draft_block_size=args.draft_block_size,
        num_draft_tokens=args.num_draft_tokens,
        verify=args.verify,
        stop=args.stop,
        progress=course.shown,
        statistics=statistics,
        **job.sampling(),
        **job.cache_keywords(),
    ):
        course.shown.close()
        ids.append(response.token)
        write_text(response.text)
    write_text("\n")
    return ids, statistics


def _check(job: _Job, ids: list[int], statistics: Statistics) -> int:
    """Decode the same request with mlx-lm's one-token loop and compare ids, and speeds."""
    plain = plain_generate_step(
        mx.array(job.prompt_ids), job.model, max_tokens=len(ids), **job.sampling(), **job.cache_keywords()
    )
    first = last = time.perf_counter()
    for position, (got, (want, logprobs)) in enumerate(zip(ids, plain, strict=True)):
        last = time.perf_counter()
        first = last if position == 0 else first
        if got != want:
            second, best = cast(list[float], mx.sort(logprobs.astype(mx.float32))[-2:].tolist())
            print(
                f"check: id {position} is {got}, plain decoding gives {want}; "
                f"its two best log-probabilities there are {best - second:.3g} apart",
                file=sys.stderr,
            )
            return 1
    if last > first and statistics.decode_ms > 0:
        print(statistics.beside_plain(last - first), file=sys.stderr)
    print(f"check: {len(ids)} ids compared with mlx-lm's one-token loop, all equal", file=sys.stderr)
    return 0


def _say(sentence: str) -> None:
    print(sentence, file=sys.stderr)


@contextmanager
def _warnings_as_lines() -> Iterator[None]:
    """Our own warnings are for the person at the keyboard: one line each, without a source line."""

    def show(message: Warning | str, category: type[Warning], *place: Any, **more: Any) -> None:
        del category, place, more
        print(f"warning: {message}", file=sys.stderr)

    with warnings.catch_warnings():
        warnings.showwarning = show
        yield
