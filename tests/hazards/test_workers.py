"""Kinds of fault with worker threads: a process that aborts when it exits, streams and seeds of the wrong thread."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

import mlx_spec
from mlx_spec.cache.adopt import Likeness
from mlx_spec.cache.base import Drive
from mlx_spec.generate import generate, generate_step
from mlx_spec.verify.mixers import attach
from mlx_spec.verify.record import ModelRecord
from mlx_spec.verify.trial import Situation
from tests.checkpoints import ascii_tokenizer, tiny_model, write_target
from tests.drafters import eagle3_files
from tests.oracle import OracleRun, assert_same_output, rng_key
from tests.rounds.runs import CHOICES, DRAFTERS, SEED, record_stock
from tests.rounds.test_interleaved import in_a_thread
from tests.same_cache import assert_same_cache
from tests.tiny import MIXES, PROMPT, VOCAB

ROOT = Path(__file__).resolve().parent.parent.parent
EMITTED = 16
WIDTH = 4

BEFORE = """
import sys
import mlx.core as mx
mx.set_default_device(mx.cpu)
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.tokenizer_utils import TokenizerWrapper
import mlx_lm
from tests.checkpoints import ascii_tokenizer, tiny_model
"""
AFTER = """
model, tokenizer = tiny_model(num_hidden_layers=2), TokenizerWrapper(ascii_tokenizer())
prompts = ["Tell me, the sea", "Once upon a time", "hello"]
wanted = [mlx_lm.generate(model, tokenizer, prompt, max_tokens=24) for prompt in prompts]
jobs = Queue()
asked = [Job(prompt, make_prompt_cache(model)) for prompt in prompts]
given_up = Job("Once upon a time", make_prompt_cache(model))
given_up.cancelled.set()
workers = [threading.Thread(target=work, args=(model, tokenizer, "ngram", jobs)) for _ in range(2)]
for worker in workers:
    worker.start()
for job in (*asked, given_up, None, None):
    jobs.put(job)
for worker in workers:
    worker.join()
assert all(job.done.is_set() for job in (*asked, given_up))
assert [job.text for job in asked] == wanted
assert given_up.text == "" and given_up.cache[0].offset == 0
mx.eval([layer.state for job in asked for layer in job.cache])
follow_up = Job("and then", asked[0].cache)
serve(model, tokenizer, "ngram", follow_up)
assert follow_up.text
print("served", len(asked))
"""


def example() -> str:
    """The example of the page, as it stands there."""
    page = (ROOT / "docs" / "threads.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python example\n(.*?)```", page, flags=re.DOTALL)
    return str(code)


@pytest.mark.slow
def test_a_process_whose_workers_follow_the_rule_exits_cleanly_every_time(thorough: bool) -> None:
    """Several times, since where the rule is broken it aborts most times only."""
    command = [sys.executable, "-W", "error", "-c", BEFORE + example() + AFTER]
    for _ in range(5 if thorough else 1):
        ended = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=120, check=False)
        assert (ended.returncode, ended.stdout, ended.stderr) == (0, "served 3\n", "")


# Streams and devices of a thread's own


def stock(mix: str, choice: str) -> OracleRun:
    return record_stock(MIXES[mix], EMITTED, {EMITTED}, **CHOICES[choice]())


@pytest.mark.parametrize("choice", ["greedy", "top_p"])
@pytest.mark.parametrize("mix", ["dense", "sliding", "ring_with_keep", "hybrid", "cache_list", "quantized_from_20"])
def test_two_threads_on_streams_of_their_own_get_the_stock_tokens(mix: str, choice: str) -> None:
    made, run = MIXES[mix], stock(mix, choice)
    shared = DRAFTERS["ngram"](mix, (), mx.float32)
    together = threading.Barrier(2)

    def work(_: int) -> tuple[list[Any], list[Any], Any]:
        try:
            stream, cache = mx.new_stream(mx.default_device()), made.new_cache()
            mx.random.seed(SEED)
            together.wait(timeout=60)
            options = {"draft_model": shared, "draft_block_size": WIDTH, "max_tokens": EMITTED, **made.warm_kv}
            steps = generate_step(
                mx.array(PROMPT), made.model(), prompt_cache=cache, stream=stream, **options, **CHOICES[choice]()
            )
            pairs = list(steps)
            mx.eval([logprobs for _, logprobs in pairs])
            return pairs, cache, rng_key()
        finally:
            mx.synchronize()
            mx.clear_streams()

    with ThreadPoolExecutor(2) as pool:
        finished = list(pool.map(work, range(2)))
    for pairs, cache, key in finished:
        assert_same_output(pairs, run, EMITTED)
        assert_same_cache(cache, run.cache_after(EMITTED))
        assert key == run.rng[EMITTED]


@pytest.mark.part(3)
@pytest.mark.slow
@pytest.mark.parametrize("mix", ["dense", "sliding", "mla_moe", "mamba2", "cache_list"])
def test_what_one_thread_found_out_about_blocks_serves_another_after_its_end(mix: str) -> None:
    """Including models whose blocks were found to differ at the first position, so that the rest was not looked at."""
    made = MIXES[mix]
    attach(made.model())
    situation = Situation(Likeness(made.new_cache()))
    certificate = ModelRecord(made.model()).certificate(situation)
    verdicts: dict[tuple[int, Drive], list[bool]] = {}
    for width in (3, 2, 5):
        for drive in (Drive.BLOCK, Drive.POSITIONS):
            asked = lambda width=width, drive=drive: certificate.holds(width, drive)  # noqa: E731
            alone = ModelRecord(made.model()).certificate(situation).holds(width, drive)
            verdicts[width, drive] = [in_a_thread(asked), alone]
    assert all(found == alone for found, alone in verdicts.values()), verdicts
    assert certificate.failure is None


# Loaded in one thread, used in another


SCALED_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
"""Makes mlx-lm keep frequencies that are no parameters, so that loading the weights does not evaluate them."""


def in_float16(tensors: dict[str, mx.array]) -> None:
    for name, array in tensors.items():
        if array.dtype == mx.float32:
            tensors[name] = array.astype(mx.float16)


@pytest.mark.slow
@pytest.mark.parametrize("ended", [False, True], ids=["loaded here", "loaded in a thread that ended"])
def test_model_and_drafter_serve_other_threads_than_the_one_that_loaded_them(tmp_path: Path, ended: bool) -> None:
    """Every array of theirs is evaluated by the thread that loads them, not by the first one to use them."""
    target = write_target(tmp_path / "target", rope_scaling=SCALED_ROPE)
    folder = eagle3_files.write(
        tmp_path / "drafter", lambda config: config.update(rope_scaling=SCALED_ROPE), edit_tensors=in_float16
    )

    def loaded() -> tuple[Any, Any]:
        model, _ = mlx_spec.load(target)
        return model, mlx_spec.load_drafter(folder, target=model)

    def texts(model: Any, drafter: Any) -> tuple[list[int], list[str]]:
        counted = mlx_spec.Statistics()
        steps = generate_step(
            mx.array(PROMPT), model, draft_model=drafter, max_tokens=EMITTED, draft_block_size=WIDTH, statistics=counted
        )
        return [token for token, _ in steps], counted.notes

    model, drafter = in_a_thread(loaded) if ended else loaded()
    want = [token for token, _ in generate_step(mx.array(PROMPT), mlx_spec.load(target)[0], max_tokens=EMITTED)]
    told = [f"{drafter.name} takes the target's embedding: its file has none"]
    assert in_a_thread(lambda: texts(model, drafter)) == (want, told)
    assert texts(model, drafter) == (want, told)


# Defaults of a thread


def test_whole_texts_come_from_a_worker_with_a_default_stream_of_its_own() -> None:
    model, tokenizer = tiny_model(), ascii_tokenizer()
    want = generate(model, tokenizer, "Tell me, the sea", max_tokens=EMITTED)

    def work() -> tuple[str, bool]:
        own = mx.new_stream(mx.cpu)
        mx.set_default_device(mx.cpu)
        mx.set_default_stream(own)
        with mx.stream(mx.new_stream(mx.cpu)):
            text = generate(model, tokenizer, "Tell me, the sea", max_tokens=EMITTED, draft_model="ngram")
        return text, mx.default_stream(mx.cpu) == own

    assert in_a_thread(work) == (want, True), "the worker's default stream must be as it left it"


def test_a_seed_is_the_threads_own() -> None:
    """Seeding where nothing is generated changes nothing, and generating elsewhere moves no state here."""
    made, run = MIXES["dense"], stock("dense", "top_p")
    mx.random.seed(77)
    before = rng_key()

    def work() -> list[int]:
        mx.random.seed(SEED)
        options = {"max_tokens": EMITTED, "draft_block_size": WIDTH, **CHOICES["top_p"]()}
        drafter = DRAFTERS["cycling"]("dense", run.ids, mx.float32)
        return [token for token, _ in generate_step(mx.array(PROMPT), made.model(), draft_model=drafter, **options)]

    assert in_a_thread(work) == list(run.ids)
    assert rng_key() == before
    assert max(run.ids) < VOCAB
