"""An ordinary language model that drafts for a larger one with the same vocabulary.

Source: Leviathan et al. 2023, arXiv:2211.17192. Left out: sampled proposals; this one always proposes its likeliest
token, and what is accepted is the target's own choice.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten
from mlx_lm.utils import load_model
from tokenizers import Tokenizer

from mlx_spec.accept.proposal import Proposal
from mlx_spec.arguments import require
from mlx_spec.cache.adopt import buffers, needs_mixers, new_caches
from mlx_spec.cache.base import Drive
from mlx_spec.cache.transaction import SpeculativeCacheTransaction
from mlx_spec.drafters.base import Drafter, DrafterState, Rows
from mlx_spec.drafters.checkpoint import telling
from mlx_spec.drafters.likelihood import spread
from mlx_spec.drafters.quantization import quantize_on_load
from mlx_spec.errors import CheckpointError, IncompatiblePair, UnknownAnatomy, UnsupportedOption
from mlx_spec.model.target import Target, evaluate_arrays
from mlx_spec.sampling import random_state_kept
from mlx_spec.soundness import check_built, check_target_files

DEFAULT_WIDTH = 3
"""mlx-lm drafts two tokens a round when no number is named."""

PENDING_LIMIT = 64
"""Committed tokens kept unread while nothing is proposed."""

_TOKENIZER_NAME = "tokenizer.json"


def load(
    folder: Path, target: Target, taps: Sequence[int] | None = None, quantize: Mapping[str, Any] | None = None
) -> StandaloneDrafter:
    """Load a language model from its folder, as mlx-lm does, and its tokenizer's vocabulary.

    Args:
        folder: holds config.json, `model*.safetensors` and, to be compared with the target's, tokenizer.json.
        target: what it will draft for.
        taps: refused: it reads tokens, no layer of the target.
        quantize: `group_size`, `bits` and `mode`, to quantize its matrices after they are loaded.

    Raises:
        UnsupportedOption: `taps` was given, or `quantize` cannot be done.
        CheckpointError: mlx-lm cannot load it, a weight is NaN, or tokenizer.json is damaged.

    Warns:
        UserWarning: names the matrices that `quantize` leaves as they are.
    """
    del target
    if taps is not None:
        raise UnsupportedOption(f"taps={tuple(taps)} was given, but a language model reads no layer. Leave it out.")
    check_target_files(folder)
    with telling(folder), random_state_kept():
        model, _ = load_model(folder)
    check_built(model, folder)
    _require_numbers(model, folder)
    left = [] if quantize is None else quantize_on_load(model, quantize)
    if left:
        warnings.warn(f"{folder}: not quantized, their rows are no whole groups: {', '.join(left)}", stacklevel=3)
    return StandaloneDrafter(model, name=folder.name, vocabulary=_vocabulary(folder))


class StandaloneDrafter(Drafter):
    """Proposes what a language model would say.

    Attributes:
        model: the mlx-lm model.
        vocabulary: token string -> id of its tokenizer; None when it is not known.
    """

    kind = "standalone"
    remembers = True
    default_width = DEFAULT_WIDTH

    def __init__(self, model: nn.Module, *, name: str | None = None, vocabulary: Mapping[str, int] | None = None):
        """Let a model draft.

        Args:
            model: any model that mlx-lm loads. Its weights are evaluated, so that every thread can use them.
            name: what the statistics call it; its architecture when left out.
            vocabulary: token string -> id of its tokenizer.

        Raises:
            InvalidRequest: `model` is none.
        """
        require("model", model, nn.Module, "a model", "load gives a model and a tokenizer: give the model.")
        evaluate_arrays(model)
        self.model = model
        self.name = name or Target(model).name
        self.vocabulary = vocabulary
        self._agreeing: weakref.WeakSet[Any] = weakref.WeakSet()

    @property
    def vocab_size(self) -> int:
        """Of the model as it is now: it may have been given other weights since it was loaded."""
        own = Target(self.model)
        return min(_head_size(own), _table_size(own))

    def check(self, target: Target) -> None:
        """Refuse a target with another number of tokens, unless padding explains the difference.

        Raises:
            IncompatiblePair: names both numbers.
        """
        own, theirs = self.vocab_size, _table_size(target)
        small, large = sorted((own, theirs))
        # Tables are padded to a multiple of some power of two, each to its own.
        if large - small > (large & -large):
            raise IncompatiblePair(
                f"drafter {self.name!r} has a vocabulary of {own}, target {target.name!r} one of "
                f"{theirs}. Use a language model with the target's tokenizer."
            )

    def check_tokenizer(self, tokenizer: Any | None) -> str:
        """Refuse a target whose tokenizer gives other meanings to the ids both have; see `Drafter.check_tokenizer`."""
        if self.vocabulary is None or tokenizer is None:
            return f"token strings of {self.name} and the target were not compared: a tokenizer is not known"
        if tokenizer not in self._agreeing:
            self._compare(self.vocabulary, tokenizer)
            self._agreeing.add(tokenizer)
        return ""

    def open(self, target: Target, start: int = 0) -> StandaloneState:
        """Make the state for one request; see `Drafter.open`."""
        del start
        own = self.vocab_size
        return StandaloneState(self.model, own, min(own, _table_size(target)))

    def _compare(self, own: Mapping[str, int], tokenizer: Any) -> None:
        theirs = {index: token for token, index in tokenizer.get_vocab().items()}
        shared = {token: index for token, index in own.items() if index in theirs}
        # What was added to a vocabulary later is named as each model needs it, and is rare in a text.
        added = set(tokenizer.get_added_vocab().values())
        other = [(index, token) for token, index in shared.items() if theirs[index] != token and index not in added]
        if other or not shared:
            index, token = min(other, default=(0, "nothing"))
            raise IncompatiblePair(
                f"drafter {self.name!r} and the target split text into different tokens: id {index} is "
                f"{token!r} for the drafter and {theirs.get(index)!r} for the target; {len(other)} of "
                f"{len(shared)} shared ids differ. Use a language model with the target's tokenizer."
            )


class _Scratch(NamedTuple):
    """What the last proposal ran past the committed tokens.

    Attributes:
        tx: holds the pending tokens, the bonus and all proposals but the last.
        pending: committed tokens in it, before the bonus.
        bonus: [B] the bonus it began with.
        proposals: [B, count] int32.
    """

    tx: SpeculativeCacheTransaction
    pending: int
    bonus: Sequence[int]
    proposals: mx.array

    def agreeing(self, ids: Rows) -> int:
        """How many of these tokens, [B][n], are the ones that were run, in every row."""
        # Nothing is waited for: the host has read what the target made of these proposals.
        proposed: list[list[int]] = memoryview(self.proposals).tolist()  # type: ignore[arg-type, assignment]
        run = [[bonus, *row[:-1]] for bonus, row in zip(self.bonus, proposed, strict=True)]
        count = 0
        for told, own in zip(zip(*ids, strict=True), zip(*run, strict=True), strict=False):
            if told != own:
                break
            count += 1
        return count


class StandaloneState(DrafterState):
    """One request's caches of the drafting model, and the committed tokens not yet in them.

    Between calls the caches hold committed tokens; what a proposal ran past them is in an open transaction. An
    accepted proposal was run on the very tokens that were committed, so it is kept and not run again.

    Args:
        model: the mlx-lm model.
        vocab_size: ids it can read; larger ones are read as its last one.
        proposable: ids it may propose, those that the target has as well.
    """

    def __init__(self, model: nn.Module, vocab_size: int, proposable: int) -> None:
        self._model = model
        self._vocab_size = vocab_size
        self._proposable = proposable
        self._caches = new_caches(model)
        # Where a part of a block can be kept only with the mixers' help, a round is run token by token.
        self._takes_blocks = not needs_mixers(self._caches)
        self._pending: list[list[int]] = []
        self._scratch: _Scratch | None = None

    @property
    def pending(self) -> int:
        """Committed tokens not yet run, at most PENDING_LIMIT."""
        return len(self._pending[0]) if self._pending else 0

    def read_prompt(self, ids: Rows, hidden: mx.array | None) -> None:
        """Run the chunk.

        Args:
            ids: [B][T] token ids.
            hidden: not looked at.

        Cost:
            Lazy: one forward of T tokens, without the head.
        """
        del hidden
        self.abort()
        self._append(ids)
        self._run_pending()

    def propose(self, bonus: Sequence[int], count: int) -> Proposal:
        """Run the pending tokens and the bonus, then feed back each likeliest token.

        Repeating the call gives the same proposals.

        Args:
            bonus: [B] newest emitted token of each row.
            count: proposals wanted, >= 1.

        Returns:
            [B, count] int32 ids, each in the vocabulary of both models, greedy, dispatched and not waited for.

        Cost:
            `count` forwards, the first over the pending tokens as well; one more when tokens are pending and the
            caches take no blocks. After a round that accepted all, one token is pending. No host read.
        """
        self.abort()
        if not self._takes_blocks:
            self._run_pending()
        pending = self._pending or [[] for _ in bonus]
        tx = SpeculativeCacheTransaction(self._caches, self.pending + count, drive=Drive.ALONE)
        try:
            tokens = self._readable([[*row, token] for row, token in zip(pending, bonus, strict=True)])
            chosen, rows = [], []
            for _ in range(count):
                rows.append(self._forward(tokens, tx)[:, -1, :])
                tokens = self._likeliest(rows[-1])
                # In one lazy graph every in-place write of the caches would copy its buffer.
                mx.async_eval(tokens)
                chosen.append(tokens)
        except BaseException:
            tx.abort()
            raise
        proposals = mx.concatenate(chosen, axis=1).astype(mx.int32)
        self._scratch = _Scratch(tx, self.pending, tuple(bonus), proposals)
        return Proposal(proposals, lambda columns: self._log_probabilities(rows, columns))

    def catch_up(self, ids: Rows, hidden: mx.array | None) -> None:
        """Keep what the last proposal ran of these tokens; the rest waits for the next one.

        Args:
            ids: [B][n] the bonus and the accepted proposals.
            hidden: not looked at.

        Cost:
            Nothing is run, unless more than PENDING_LIMIT tokens wait: then one forward over them.
        """
        del hidden
        scratch, self._scratch = self._scratch, None
        kept = 0
        if scratch is not None:
            kept = scratch.agreeing(ids)
            scratch.tx.commit(scratch.pending + kept)
            self._pending = []
        self._append([row[kept:] for row in ids])
        if self.pending > PENDING_LIMIT:
            self._run_pending()

    def abort(self) -> None:
        """Forget what `propose` ran; see `DrafterState.abort`."""
        scratch, self._scratch = self._scratch, None
        if scratch is not None:
            scratch.tx.abort()

    def arrays(self) -> list[mx.array]:
        """The caches' arrays."""
        return buffers(self._caches)

    def cache_tree(self, target_caches: Sequence[Any]) -> dict[str, list[Any]]:
        """The caches of both sides of one request, for whoever counts or keeps them.

        Returns:
            {"target": the caches given, "draft": this state's}. They advance together: the draft's hold the committed
            tokens but for those still pending.
        """
        return {"target": list(target_caches), "draft": list(self._caches)}

    def _append(self, ids: Rows) -> None:
        known = self._pending or [[] for _ in ids]
        self._pending = [[*old, *new] for old, new in zip(known, ids, strict=True)]

    def _run_pending(self) -> None:
        if not self.pending:
            return
        with SpeculativeCacheTransaction(self._caches, self.pending, drive=Drive.WHOLE) as tx:
            self._forward(self._readable(self._pending), tx)
            tx.commit(self.pending)
        self._pending = []

    def _readable(self, ids: Rows) -> mx.array:
        """[B][T] ids -> [B, T] int32 that the model can read."""
        last = self._vocab_size - 1
        return mx.array([[token if token < last else last for token in row] for row in ids], dtype=mx.int32)

    def _forward(self, tokens: mx.array, tx: SpeculativeCacheTransaction) -> mx.array:
        """[B, T] ids that the model can read -> [B, T, V] logits, lazy."""
        logits: mx.array = self._model(tokens, cache=tx.caches)
        tx.mark(tokens.shape[1])
        return logits

    def _log_probabilities(self, rows: list[mx.array], columns: int) -> mx.array:
        return spread(mx.stack(rows, axis=1)[..., : self._proposable], columns)

    def _likeliest(self, logits: mx.array) -> mx.array:
        """[B, V] logits after the last token -> [B, 1] uint32, the choice of mlx-lm's greedy sampler."""
        logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        known = logprobs if self._proposable >= logprobs.shape[-1] else logprobs[:, : self._proposable]
        return mx.argmax(known, axis=-1, keepdims=True)


def _table_size(target: Target) -> int:
    """Ids a model has: rows of its embedding, or of its head where nothing is known about the embedding."""
    try:
        return target.vocab_size
    except UnknownAnatomy:
        return _head_size(target)


def _head_size(target: Target) -> int:
    """Columns of a model's logits; where nothing is known of its head a forward is built, and none of it evaluated."""
    try:
        return target.head_size
    except UnknownAnatomy:
        return int(target.forward(mx.zeros((1, 1), mx.int32), new_caches(target.model)).logits.shape[-1])


def _require_numbers(model: nn.Module, folder: Path) -> None:
    """Refuse NaN, and integers where a module that is not quantized wants floats."""
    parameters = dict(tree_flatten(model.parameters()))
    problems = []
    for name, array in parameters.items():
        owner, _, own = name.rpartition(".")
        if mx.issubdtype(array.dtype, mx.floating):
            if mx.isnan(array).any().item():
                problems.append(f"{name} holds NaN")
        elif own in ("weight", "bias") and f"{owner}.scales" not in parameters:
            problems.append(f"{name} has dtype {str(array.dtype).removeprefix('mlx.core.')}, wanted floats")
    if problems:
        raise CheckpointError(f"{folder}: {'; '.join(problems)}")


def _vocabulary(folder: Path) -> dict[str, int] | None:
    path = folder / _TOKENIZER_NAME
    if not path.is_file():
        return None
    try:
        vocabulary: dict[str, int] = Tokenizer.from_file(str(path)).get_vocab(with_added_tokens=True)
    except Exception as error:  # noqa: BLE001  the class it raises is no other
        raise CheckpointError(f"{path} is no tokenizer: {error}") from None
    return vocabulary
