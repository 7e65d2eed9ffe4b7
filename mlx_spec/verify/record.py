"""All that is attached to one model object and known of it, with one owner."""

from __future__ import annotations

import threading
import weakref
from pathlib import Path
from typing import Any

from mlx import nn

from mlx_spec.environment import certificate_folder
from mlx_spec.model.swap import unswap
from mlx_spec.verify import mixers, routes
from mlx_spec.verify.bindings import Bindings
from mlx_spec.verify.certificate import Certificate
from mlx_spec.verify.known import Known
from mlx_spec.verify.look import Look
from mlx_spec.verify.op_table import OpTable
from mlx_spec.verify.own_caches import OwnCaches
from mlx_spec.verify.trial import Situation
from mlx_spec.verify.verdicts import Verdicts, facts_of

_MOST_MAKES = 8
"""Makes of one model, as it was and as it is, whose findings are kept in memory."""


class ModelRecord:
    """What this process keeps about one model, for as long as the model lives. Safe to share between threads.

    What is attached to the model lies on its modules as swapped classes (`mlx_spec.model.swap`) and in the files of
    mlx-lm as bound names; both are put there when a route first needs them, and taken off by `detach`.

    Args:
        model: an mlx-lm model.
        folder: where findings are read from and kept; None for memory alone.

    Attributes:
        bindings: the names of mlx-lm that are bound for this model.
        own_caches: tells whether caches are this model's.
        tokenizer: what `mlx_spec.load` gave with the model; None where the model came another way.
    """

    def __init__(self, model: nn.Module, folder: Path | None = None) -> None:
        self.bindings = Bindings()
        self.own_caches = OwnCaches(model)
        self.tokenizer: Any = None
        self._model = weakref.ref(model)
        self._folder = folder
        self._look: Look | None = None
        self._known: Known | None = None
        self._verdicts: dict[str, Verdicts] = {}
        self._lock = threading.RLock()
        weakref.finalize(model, self.bindings.release)

    def is_of(self, model: nn.Module) -> bool:
        """Whether this is the record of that very object."""
        return self._model() is model

    def now(self) -> Known:
        """What is known of the model as it is now: after any change but of weights' values, nothing yet.

        Cost:
            A `Look`; after a change as well what reading the findings on disk takes.
        """
        with self._lock:
            model = self._alive()
            look = Look(model)
            if self._known is None or self._look is None or not look.agrees(self._look):
                self._known = Known(model, self._findings(facts_of(model)), self.bindings)
                self._look = look
            return self._known

    def _findings(self, facts: dict[str, str]) -> Verdicts:
        """What was found under these facts: an adapter that comes and goes is not tried anew each time."""
        key = repr(sorted(facts.items()))
        found = self._verdicts.pop(key, None)
        if found is None:
            found = Verdicts(facts, self._folder)
        self._verdicts[key] = found
        while len(self._verdicts) > _MOST_MAKES:
            self._verdicts.pop(next(iter(self._verdicts)))
        return found

    @property
    def ops(self) -> OpTable:
        """The routes found for the model's ops."""
        return self.now().ops

    def certificate(self, situation: Situation) -> Certificate:
        """What the model was found to do with blocks in a situation; nothing is tried before it is asked."""
        return self.now().certificate(situation)

    def attach(self) -> None:
        """Let the model's token mixers keep a part of what an ordinary forward writes inside a transaction.

        What else there is to attach follows when a route needs it. Outside a transaction nothing changes.
        """
        model = self._alive()
        mixers.attach(model)
        routes.remember(model)

    def detach(self) -> None:
        """Give the model back as it was: every module its own class, every name of mlx-lm its own function.

        What was found out about the model stays known. The next request attaches what it needs. Not while a request
        runs: its blocks would no longer take the routes they were opened with.
        """
        unswap(self._alive().modules())
        self.bindings.release()

    def _alive(self) -> Any:
        model = self._model()
        if model is None:
            raise AssertionError("the model of this record is gone")
        return model


_records: dict[int, ModelRecord] = {}
"""id of a model -> its record. An id may be in use again: the record knows its model."""

_records_lock = threading.RLock()
"""Reentrant: a model may be collected, and its record go, while the record of another is looked up."""


def record_of(model: nn.Module) -> ModelRecord:
    """The record of a model in this process, made when it is first asked for; it goes with the model."""
    with _records_lock:
        record = _records.get(id(model))
        if record is None or not record.is_of(model):
            record = _records[id(model)] = ModelRecord(model, certificate_folder())
            weakref.finalize(model, _let_go, id(model), record)
        return record


def attach(model: nn.Module) -> None:
    """Prepare a model for transactions over ordinary forwards.

    Inside a `SpeculativeCacheTransaction` its forwards over several tokens can then be cut anywhere, whatever caches it
    has; outside one nothing changes. `verify_forward` does this by itself. Attaching twice is attaching once.

    The bits of a forward over several tokens are the model's own. Where they must be those of single tokens, which on
    a GPU they mostly are not, use `verify_forward`.

    Args:
        model: as mlx-lm loads it.

    Cost:
        Once, one forward over one token, built and not evaluated. See `detach` for the way back.

    Example:
        >>> import mlx.core as mx
        >>> from mlx_lm.models import cache, mamba2
        >>> from mlx_spec import SpeculativeCacheTransaction, attach, detach
        >>> sizes = dict(num_heads=2, head_dim=4, hidden_size=8, intermediate_size=8, state_size=4, num_hidden_layers=1)
        >>> rest = dict(layer_norm_epsilon=1e-5, conv_kernel=4, n_groups=1, time_step_limit=(0.0, 1.0), vocab_size=11)
        >>> flags = dict(use_bias=False, use_conv_bias=True, tie_word_embeddings=False)
        >>> model = mamba2.Model(mamba2.ModelArgs(model_type="mamba2", time_step_rank=2, **sizes, **rest, **flags))
        >>> attach(model)
        >>> with SpeculativeCacheTransaction(cache.make_prompt_cache(model), width=3) as tx:
        ...     logits = model(mx.array([[1, 2, 3]]), cache=tx.caches)
        ...     tx.mark(3)
        ...     tx.commit(2)
        >>> detach(model)
    """
    record_of(model).attach()


def detach(model: nn.Module) -> None:
    """Give a model back as it was; see `ModelRecord.detach`."""
    record_of(model).detach()


def forget(model: nn.Module) -> None:
    """Detach a model and drop what is known of it; what is on disk stays there."""
    with _records_lock:
        record = _records.pop(id(model), None)
    if record is not None and record.is_of(model):
        record.detach()


def _let_go(model: int, record: ModelRecord) -> None:
    with _records_lock:
        if _records.get(model) is record:
            del _records[model]
