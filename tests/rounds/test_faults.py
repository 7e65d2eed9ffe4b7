"""A fault at any call reaches the caller as raised; the cache is right, nothing is left open, the next run is exact."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm import sample_utils
from mlx_lm.sample_utils import make_logits_processors
from mlx_lm.tokenizer_utils import NaiveStreamingDetokenizer, TokenizerWrapper

from mlx_spec.accept.proposal import Proposal
from mlx_spec.cache.adopt import KVQuantization, Likeness
from mlx_spec.cache.contents import cache_arrays
from mlx_spec.cache.transaction import SpeculativeCacheTransaction
from mlx_spec.drafters.base import Drafter
from mlx_spec.generate import generate_step, is_pure, stream_generate
from mlx_spec.stats import Statistics
from mlx_spec.verify.record import ModelRecord, forget, record_of
from mlx_spec.verify.trial import Situation
from tests.forwards import Forwards
from tests.oracle import OracleRun, assert_same_output, rng_key, run_stock
from tests.rounds.letters import tokenizer
from tests.rounds.runs import CHOICES, DRAFTERS, SEED, SPARE, assert_counts_add_up, assert_equals_stock, speculate
from tests.same_cache import assert_same_cache
from tests.scripted import AlternatingDrafter, RaisingDrafter, ScriptedState
from tests.tiny import MIXES, PROMPT, REQUIRED, VOCAB

EMITTED = 10
WIDTH = 5
STEP = 4
"""Chunk of the prompt: its six tokens before the last are read as 4 + 2."""

DENSE = Situation(Likeness(MIXES["dense"].new_cache()))
"""What the certificate of a short text on the dense mix is about."""

EVERY_MIX = pytest.mark.parametrize("mix", REQUIRED)


class Fault(Exception):
    """What these tests raise; no other code does."""


@functools.cache
def stock(mix: str) -> OracleRun:
    """The greedy stock run with its cache after every token."""
    made = MIXES[mix]
    return run_stock(made.model(), PROMPT, EMITTED + SPARE + 6, seed=SEED, prefill_step_size=STEP, **made.kv)


def cache_of_prompt(mix: str, tokens: int, step: int = STEP) -> list[Any]:
    """The cache as the stock loop has it once the prompt's first `tokens` tokens are read, in chunks of `step`."""
    made = MIXES[mix]
    cache, kv = made.new_cache(), made.kv
    quantization = KVQuantization(kv.get("kv_bits"), kv.get("kv_group_size", 64), kv.get("quantized_kv_start", 0))
    last = len(PROMPT) - 1
    bounds = [*range(0, last, step), last, len(PROMPT)]
    for start, end in itertools.pairwise(bounds):
        if end <= tokens:
            made.model()(mx.array([PROMPT[start:end]]), cache=cache)
            quantization.convert(cache)
            mx.eval(cache_arrays(cache))
    return cache


@dataclass
class Broken:
    """A run that was stopped by a fault.

    Attributes:
        error: what the caller got; None if the run came to its end.
        tokens: (id, log-probabilities) handed out before.
    """

    error: BaseException | None
    tokens: list[tuple[int, mx.array]]
    cache: list[Any]
    statistics: Statistics = field(default_factory=Statistics)


def run_into(mix: str, drafter: Drafter | None, **options: Any) -> Broken:
    """Run until a fault or the budget of `EMITTED` tokens ends it."""
    broken = Broken(None, [], MIXES[mix].new_cache())
    width = {} if drafter is None else {"draft_block_size": WIDTH}
    try:
        for pair in generate_step(
            mx.array(PROMPT),
            MIXES[mix].model(),
            draft_model=drafter,
            prompt_cache=broken.cache,
            statistics=broken.statistics,
            **{"max_tokens": EMITTED, "prefill_step_size": STEP, **width, **MIXES[mix].warm_kv, **options},
        ):
            broken.tokens.append(pair)
    except BaseException as error:  # noqa: BLE001  whatever came is what is looked at
        broken.error = error
    return broken


def assert_left_right(mix: str, broken: Broken) -> None:
    """The cache holds what it should, no transaction is open, and a run that goes on from there is exact."""
    run = stock(mix)
    handed_out = len(broken.tokens)
    assert_same_output(broken.tokens, run, handed_out)
    if handed_out:
        assert_same_cache(broken.cache, run.cache_after(handed_out))
        rest, following = [run.ids[handed_out]], run.ids[handed_out + 1 :]
    else:
        read = prompt_tokens_read(mix, broken.cache)
        rest, following = list(PROMPT[read:]) or [run.ids[0]], run.ids[read == len(PROMPT) :]
    SpeculativeCacheTransaction(broken.cache, 1).abort()
    again = speculate(
        MIXES[mix],
        AlternatingDrafter(following, VOCAB),
        prompt=rest,
        max_tokens=6,
        draft_block_size=WIDTH,
        prefill_step_size=STEP,
        prompt_cache=broken.cache,
    )
    assert tuple(again.ids) == following[:6], f"after {handed_out} tokens and a fault: {again.ids}"
    assert again.drafted > 0
    assert_same_cache(again.cache, run.cache_after(len(run.ids) - len(following) + 6))


def prompt_tokens_read(mix: str, cache: list[Any]) -> int:
    """How much of the prompt a cache holds: nothing, whole chunks, all but the last token, or all."""
    wanted = (0, STEP, len(PROMPT) - 1, len(PROMPT))
    differences = []
    for tokens in wanted:
        try:
            assert_same_cache(cache, cache_of_prompt(mix, tokens))
        except AssertionError as error:
            differences.append(f"{tokens}: {error}")
        else:
            return tokens
    raise AssertionError("the cache holds no whole number of prompt chunks; " + "; ".join(differences))


def assert_every_call_can_fail(mix: str, run_with_fault: Callable[[int, Fault], Broken], least: int) -> None:
    """Let call 0, 1, 2, ... fail, until a run has fewer calls than that."""
    for call in itertools.count():
        fault = Fault(f"call {call}")
        broken = run_with_fault(call, fault)
        try:
            if broken.error is not None:
                assert broken.error is fault
            else:
                assert len(broken.tokens) == EMITTED
            assert_left_right(mix, broken)
        except AssertionError as error:
            error.add_note(f"the fault was in call {call}, {len(broken.tokens)} tokens were out")
            raise
        if broken.error is None:
            break
    assert call >= least, f"only {call} calls could fail, want at least {least}"


class FailsAt:
    """Wraps a callable; call number `call` raises instead. A plain function of mlx-lm's it is not: it is opaque."""

    def __init__(self, inner: Callable[..., Any], call: int, fault: BaseException) -> None:
        self.inner = inner
        self.left = call
        self.fault = fault

    def __call__(self, *args: Any) -> Any:
        self.left -= 1
        if self.left == -1:
            raise self.fault
        return self.inner(*args)


def pure(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that passes for one of mlx-lm's own, so that it is called for a whole block ahead."""

    def called(*args: Any) -> Any:
        return function(*args)

    called.__code__ = called.__code__.replace(co_filename=sample_utils.__file__)
    assert is_pure(called), "the tests of calls made ahead would show nothing"
    return called


def likeliest(logprobs: mx.array) -> mx.array:
    return mx.argmax(logprobs, axis=-1)


def unchanged(ids: mx.array, logits: mx.array) -> mx.array:
    return logits


def drafter_for(name: str, mix: str) -> Drafter | None:
    return None if name == "none" else DRAFTERS[name](mix, stock(mix).ids, mx.float32)


# The caller's callables


CALLABLES: dict[str, Callable[[int, Fault], dict[str, Any]]] = {
    "opaque sampler": lambda call, fault: {"sampler": FailsAt(likeliest, call, fault)},
    "opaque processor": lambda call, fault: {"logits_processors": [unchanged, FailsAt(unchanged, call, fault)]},
    "wrapped processor": lambda call, fault: {
        "logits_processors": [FailsAt(make_logits_processors(logit_bias={1: 0.0})[0], call, fault)]
    },
    "sampler called ahead": lambda call, fault: {"sampler": pure(FailsAt(likeliest, call, fault))},
    "processor called ahead": lambda call, fault: {"logits_processors": [pure(FailsAt(unchanged, call, fault))]},
}


@pytest.mark.part(3)
@pytest.mark.parametrize(
    ("callable_", "drafter"),
    [("opaque sampler", "none"), ("processor called ahead", "none"), *((name, "alternating") for name in CALLABLES)],
)
@EVERY_MIX
def test_fault_in_a_sampler_or_processor_at_any_call(mix: str, callable_: str, drafter: str) -> None:
    def run_with_fault(call: int, fault: Fault) -> Broken:
        return run_into(mix, drafter_for(drafter, mix), **CALLABLES[callable_](call, fault))

    assert_every_call_can_fail(mix, run_with_fault, least=EMITTED)


@pytest.mark.parametrize("drafter", ["none", "right", "alternating"])
@pytest.mark.parametrize("mix", ["dense", "sliding"])
def test_fault_in_a_sampler_leaves_the_random_state_at_the_last_token_out(mix: str, drafter: str) -> None:
    made, sampler = MIXES[mix], CHOICES["top_p"]()["sampler"]
    run = run_stock(made.model(), PROMPT, EMITTED + SPARE, seed=SEED, prefill_step_size=STEP, sampler=sampler)
    for call in range(EMITTED):
        fault = Fault(f"call {call}")
        mx.random.seed(SEED)
        made_drafter = None if drafter == "none" else DRAFTERS[drafter](mix, run.ids, mx.float32)
        broken = run_into(mix, made_drafter, sampler=pure(FailsAt(sampler, call, fault)))
        assert broken.error is fault
        handed_out = len(broken.tokens)
        assert_same_output(broken.tokens, run, handed_out)
        if handed_out:
            where = {key: emitted for emitted, key in run.rng.items()}.get(rng_key())
            assert where == handed_out, f"{handed_out} tokens are out, the random state stands after {where}"


@pytest.mark.part(3)
@pytest.mark.parametrize("drafter", ["none", "alternating"])
@EVERY_MIX
def test_fault_in_the_progress_callback_at_any_call(mix: str, drafter: str) -> None:
    def run_with_fault(call: int, fault: Fault) -> Broken:
        progress = FailsAt(lambda processed, total: None, call, fault)
        return run_into(mix, drafter_for(drafter, mix), prompt_progress_callback=progress)

    # 0 of 7, 4 of 7, 6 of 7, 7 of 7.
    assert_every_call_can_fail(mix, run_with_fault, least=4)


@pytest.mark.parametrize("drafter", ["none", "alternating"])
@pytest.mark.parametrize("mix", ["dense", "hybrid"])
def test_fault_in_the_detokenizer_at_any_token(mix: str, drafter: str) -> None:
    def run_with_fault(call: int, fault: Fault) -> Broken:
        broken = Broken(None, [], MIXES[mix].new_cache())
        detokenizer = NaiveStreamingDetokenizer
        failing = type("Failing", (detokenizer,), {"add_token": FailsAt(lambda token: None, call, fault)})
        options = {"max_tokens": EMITTED, "prefill_step_size": STEP, "prompt_cache": broken.cache}
        if drafter != "none":
            options["draft_block_size"] = WIDTH
        responses = stream_generate(
            MIXES[mix].model(),
            TokenizerWrapper(tokenizer(), failing),
            list(PROMPT),
            draft_model=drafter_for(drafter, mix),
            **options,
        )
        try:
            broken.tokens.extend((response.token, response.logprobs) for response in responses)
        except Fault as error:
            broken.error = error
        return broken

    assert_every_call_can_fail(mix, run_with_fault, least=EMITTED)


# The target


def unhindered(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """For `Forwards.wrap`: mlx-lm's own forward."""
    return forward(*args, **kwargs)


def failing_forward(call: int, fault: BaseException, late: bool) -> Callable[..., Any]:
    """For `Forwards.wrap`: one call raises, before anything is computed or after the cache was written to."""
    fails = FailsAt(lambda: None, call, fault)

    def around(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not late:
            fails()
        output = forward(*args, **kwargs)
        if late:
            fails()
        return output

    return around


@pytest.mark.part(3)
@pytest.mark.parametrize(
    ("mix", "drafter", "late"),
    [
        *((mix, "none", False) for mix in REQUIRED),
        *((mix, "alternating", True) for mix in REQUIRED),
        ("dense", "eagle3", False),
        ("sliding", "eagle3", True),
    ],
)
def test_fault_in_any_forward_of_the_target(mix: str, drafter: str, late: bool, forwards: Forwards) -> None:
    made, model = drafter_for(drafter, mix), MIXES[mix].model()
    forwards.wrap(model, unhindered)
    run_into(mix, made)  # certifies the widths, which costs forwards of its own

    def run_with_fault(call: int, fault: Fault) -> Broken:
        forwards.wrap(model, failing_forward(call, fault, late))
        broken = run_into(mix, made)
        forwards.clear()
        return broken

    assert_every_call_can_fail(mix, run_with_fault, least=2 + 5)


@pytest.mark.part(4)
@pytest.mark.parametrize("call", range(7))
@pytest.mark.parametrize("late", [False, True], ids=["before the forward", "after the forward"])
def test_fault_while_a_width_is_certified_costs_nothing_later(call: int, late: bool, forwards: Forwards) -> None:
    run, model = stock("dense"), MIXES["dense"].model()
    fault = Fault("while certifying")
    forwards.wrap(model, failing_forward(call, fault, late))
    forget(model)
    certificate = record_of(model).certificate(DENSE)
    broken = run_into("dense", drafter_for("right", "dense"))
    assert broken.error is fault
    assert_left_right("dense", broken)
    got = speculate(MIXES["dense"], drafter_for("right", "dense"), max_tokens=EMITTED, draft_block_size=WIDTH)
    assert_equals_stock(got, run, EMITTED)
    fresh = ModelRecord(model).certificate(DENSE).holds(WIDTH)
    assert certificate.holds(WIDTH) == fresh, "a fault while certifying left a wrong verdict"


# The drafter


@pytest.mark.parametrize("stage", ["read_prompt", "propose", "catch_up"])
@EVERY_MIX
def test_fault_in_the_drafter_at_any_call_costs_no_token(mix: str, stage: Any) -> None:
    run = stock(mix)
    for call in itertools.count():
        drafter = RaisingDrafter(run.ids, VOCAB, stage, call)
        got = speculate(MIXES[mix], drafter, max_tokens=EMITTED, draft_block_size=WIDTH, prefill_step_size=STEP)
        assert tuple(got.ids) == run.ids[:EMITTED]
        assert_same_cache(got.cache, run.cache_after(EMITTED))
        assert_counts_add_up(got)
        if got.statistics.drafter_failures == 0:
            break
        assert any(f"told to fail in {stage}, call {call}" in note for note in got.statistics.notes)
    # The prompt is read as 4 + 2 + 1; a right drafter then needs two rounds for the other nine tokens.
    assert call >= {"read_prompt": 3, "propose": 2, "catch_up": 1}[stage]


class FragileState(ScriptedState):
    """Fails in what the contract asks for beside proposing: dropping a draft, or naming its arrays."""

    def abort(self) -> None:
        if self.drafter.name == "abort":
            raise Fault("told to fail in abort")

    def arrays(self) -> list[mx.array]:
        if self.drafter.name == "arrays" and self.calls.get("propose", 0) == 2:
            raise Fault("told to fail in arrays")
        return []


class FragileDrafter(RaisingDrafter):
    def open(self, target: Any, start: int = 0) -> Any:
        return FragileState(self)


@pytest.mark.parametrize("method", ["abort", "arrays"])
def test_fault_in_the_drafters_bookkeeping_costs_no_token(method: str) -> None:
    run = stock("dense")
    drafter = FragileDrafter(run.ids, VOCAB, "propose", at=1 if method == "abort" else 99)
    drafter.name = method
    got = speculate(MIXES["dense"], drafter, max_tokens=EMITTED, draft_block_size=WIDTH, prefill_step_size=STEP)
    assert_equals_stock(got, run, EMITTED)
    assert got.statistics.drafter_failures


class InterruptedState(ScriptedState):
    """Stands for the user's Ctrl-C, which must reach the caller though a drafter's own faults do not."""

    def propose(self, bonus: Any, count: int) -> Proposal:
        if self.calls.get("propose", 0) == 2:
            raise KeyboardInterrupt
        return super().propose(bonus, count)


class InterruptedDrafter(AlternatingDrafter):
    def open(self, target: Any, start: int = 0) -> Any:
        return InterruptedState(self)


@EVERY_MIX
def test_interrupt_inside_the_drafter_reaches_the_caller(mix: str) -> None:
    broken = run_into(mix, InterruptedDrafter(stock(mix).ids, VOCAB))
    assert isinstance(broken.error, KeyboardInterrupt)
    assert broken.tokens
    assert_left_right(mix, broken)


# The consumer


def throws(mix: str, drafter: str, after: int) -> Iterator[Broken]:
    """One run into which the consumer throws after so many tokens; it is finished before this yields."""
    broken, fault = Broken(None, [], MIXES[mix].new_cache()), Fault("thrown")
    steps = generate_step(
        mx.array(PROMPT),
        MIXES[mix].model(),
        draft_model=drafter_for(drafter, mix),
        prompt_cache=broken.cache,
        **({} if drafter == "none" else {"draft_block_size": WIDTH}),
        prefill_step_size=STEP,
        **MIXES[mix].warm_kv,
    )
    broken.tokens = list(itertools.islice(steps, after))
    with pytest.raises(Fault) as caught:
        steps.throw(fault)
    assert caught.value is fault
    yield broken


@pytest.mark.part(3)
@pytest.mark.parametrize("drafter", ["none", "right", "alternating"])
@EVERY_MIX
def test_fault_thrown_by_the_consumer_after_any_token(mix: str, drafter: str) -> None:
    for after in range(EMITTED + 1):
        for broken in throws(mix, drafter, after):
            assert_left_right(mix, broken)
