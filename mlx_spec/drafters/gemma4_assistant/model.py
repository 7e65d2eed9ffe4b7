"""Gemma 4's assistant: a few layers without keys of their own, which attend to the target's.

Source: `Gemma4AssistantForCausalLM` in transformers 5.24. Left out: the row of a rejected token, which transformers
hands the assistant after a rejection.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx_lm.models.gemma4_text import DecoderLayer, logit_softcap

from mlx_spec.accept.proposal import Proposal
from mlx_spec.cache.adopt import rows_in_order
from mlx_spec.drafters.base import Drafter, DrafterState, Rows
from mlx_spec.drafters.gemma4_assistant.config import AssistantConfig
from mlx_spec.drafters.likelihood import spread
from mlx_spec.errors import IncompatiblePair
from mlx_spec.model.target import Target, evaluate_arrays

KeysByKind = Mapping[str, tuple[mx.array, mx.array]]
"""Kind of layer -> keys [B, Hk, T, D] and values of the target, oldest first."""


@dataclass(frozen=True)
class Reading:
    """How an assistant sees the text. Implementations disagree, so both can be set.

    Attributes:
        rows_back: rows between the position of its queries and the number of keys; the bonus stands at 0 back.
        rows_beyond_window: rows that sliding layers see in addition to the window, while the target still holds them.
    """

    rows_back: int = 0
    rows_beyond_window: int = 1


class _Layers(nn.Module):
    def __init__(self, config: AssistantConfig) -> None:
        super().__init__()
        args = config.args
        self.embed_tokens = nn.Embedding(args.vocab_size, args.hidden_size)
        self.layers = [DecoderLayer(args, index) for index in range(args.num_hidden_layers)]
        self.norm = nn.RMSNorm(args.hidden_size, eps=args.rms_norm_eps)


class _Clusters(nn.Module):
    def __init__(self, config: AssistantConfig) -> None:
        super().__init__()
        self.centroids = nn.Linear(config.args.hidden_size, config.centroids, bias=False)
        self.token_ordering = mx.zeros((config.args.vocab_size,), mx.int64)


class AssistantNetwork(nn.Module):
    """The equations. Holds weights only, under the names of the file."""

    def __init__(self, config: AssistantConfig) -> None:
        super().__init__()
        size, backbone = config.args.hidden_size, config.backbone_hidden_size
        self.model = _Layers(config)
        self.pre_projection = nn.Linear(2 * backbone, size, bias=False)
        self.post_projection = nn.Linear(size, backbone, bias=False)
        if config.centroids:
            self.masked_embedding = _Clusters(config)
        self._config = config

    def step(self, embedded: mx.array, hidden: mx.array, keys: KeysByKind, position: int) -> mx.array:
        """One drafted position.

        Args:
            embedded: [B, 1, H_t] the token, as the target's first layer reads it.
            hidden: [B, 1, H_t] the target's state after its norm, or `carry` of the step before.
            keys: of the target.
            position: of the queries; the same for a whole round.

        Returns:
            [B, 1, H] normed states.
        """
        states = self.pre_projection(mx.concatenate([embedded, hidden], axis=-1))
        for layer in self.model.layers:
            states, _, _ = layer(states, shared_kv=keys[layer.layer_type], offset=position)
        normed: mx.array = self.model.norm(states)
        return normed

    def carry(self, normed: mx.array) -> mx.array:
        """[B, 1, H] what `step` returned -> [B, 1, H_t], the hidden state of the next step."""
        carried: mx.array = self.post_projection(normed)
        return carried

    def logits(self, normed: mx.array) -> mx.array:
        """[B, 1, H] what `step` returned -> [B, 1, V]. With clusters, tokens outside the best ones share one value."""
        logits: mx.array = self.model.embed_tokens.as_linear(normed)
        if self._config.centroids:
            logits = self._in_best_clusters(normed, logits)
        cap = self._config.args.final_logit_softcapping
        return logits if cap is None else logit_softcap(cap, logits)

    def _in_best_clusters(self, normed: mx.array, logits: mx.array) -> mx.array:
        """Leave the logits of the tokens in the best clusters, one less than their least everywhere else."""
        clusters, best = self.masked_embedding, self._config.chosen_centroids
        scores = clusters.centroids(normed)
        chosen = mx.argpartition(scores, kth=-best, axis=-1)[..., -best:]
        members = clusters.token_ordering.reshape(self._config.centroids, -1)[chosen].flatten(-2)
        scored = mx.take_along_axis(logits, members, axis=-1)
        others = mx.broadcast_to(scored.min(axis=-1, keepdims=True) - 1, logits.shape)
        return mx.put_along_axis(others, members, scored, axis=-1)


class Gemma4Assistant(Drafter):
    """An assistant, ready to draft. Requests share it; each opens a state of its own.

    Attributes:
        reading: may be replaced before a request opens.
    """

    kind = "mtp"
    default_width = 4
    reads_ids = False
    reads_caches = True

    def __init__(self, name: str, config: AssistantConfig, network: AssistantNetwork, target: Target) -> None:
        self.name = name
        self.config = config
        self.network = network
        self.reading = Reading()
        self.taps = (target.layer_count - 1,)
        evaluate_arrays(network)

    def check(self, target: Target) -> None:
        """Compare architecture, hidden size, vocabulary and the shapes of keys with the target.

        Raises:
            IncompatiblePair: names both values.
        """
        if target.name not in ("gemma4", "gemma4_text"):
            raise IncompatiblePair(
                f"drafter {self.name!r} attends to the keys of a Gemma 4 target, and {target.name!r} is none"
            )
        args, own = target.anatomy.text_model(target.model).args, self.config.args
        pairs = {
            "hidden size": (self.config.backbone_hidden_size, target.hidden_size),
            "vocabulary": (own.vocab_size, target.vocab_size),
            "sliding head size": (own.head_dim, args.head_dim),
            "full-attention head size": (own.global_head_dim, args.global_head_dim),
            "sliding window": (own.sliding_window, args.sliding_window),
        }
        wrong = [f"{what} {mine} against {theirs}" for what, (mine, theirs) in pairs.items() if mine != theirs]
        if wrong:
            raise IncompatiblePair(
                f"drafter {self.name!r} does not fit target {target.name!r}: {', '.join(wrong)}. "
                "Use the assistant that was made for this target."
            )

    def open(self, target: Target, start: int = 0) -> AssistantState:
        """Make the state for one request; see `Drafter.open`. The target's caches hold what `start` counts."""
        del start
        return AssistantState(self.network, target, self.config, self.reading)


class AssistantState(DrafterState):
    """One request's last hidden state, and a view on the target's caches."""

    def __init__(self, network: AssistantNetwork, target: Target, config: AssistantConfig, reading: Reading) -> None:
        self._network = network
        self._target = target
        self._config = config
        self._reading = reading
        self._dtype = network.model.norm.weight.dtype
        self._last: mx.array | None = None
        self._caches: Sequence[Any] = ()

    def look_at(self, caches: Sequence[Any]) -> None:
        """See `DrafterState.look_at`."""
        self._caches = caches

    def read_prompt(self, ids: Rows, hidden: mx.array | None) -> None:
        """Keep the last row; see `DrafterState.read_prompt`."""
        if hidden is None or hidden.ndim != 3:
            raise ValueError(f"got hidden states {hidden!r}, expected [B, T, {self._config.backbone_hidden_size}]")
        del ids
        # A slice would keep the whole chunk alive.
        self._last = mx.contiguous(hidden[:, -1:])

    def catch_up(self, ids: Rows, hidden: mx.array | None) -> None:
        """Keep the last row; see `DrafterState.catch_up`."""
        self.read_prompt(ids, hidden)

    def propose(self, bonus: Sequence[int], count: int) -> Proposal:
        """Draft a chain on the target's keys.

        Args:
            bonus: [B] newest emitted token of each row.
            count: proposals wanted, >= 1.

        Returns:
            [B, count] int32, greedy, lazy.

        Raises:
            ValueError: nothing was read before.

        Cost:
            `count` forwards of one token, and one copy of each sliding window.
        """
        if self._last is None:
            raise ValueError("an assistant continues the target's hidden states: read the prompt first")
        keys, length = self._keys()
        hidden = self._target.final_norm(self._last).astype(self._dtype)
        token, chosen = mx.array(list(bonus), mx.int32)[:, None], []
        rows = []
        for _ in range(count):
            embedded = self._target.embed(token).astype(self._dtype)
            normed = self._network.step(embedded, hidden, keys, length - self._reading.rows_back)
            rows.append(self._network.logits(normed))
            token = mx.argmax(rows[-1], axis=-1).astype(mx.int32)
            hidden = self._network.carry(normed)
            chosen.append(token)
        return Proposal(mx.concatenate(chosen, axis=1), lambda columns: spread(mx.concatenate(rows, axis=1), columns))

    def abort(self) -> None:
        """A proposal leaves nothing behind."""

    def arrays(self) -> list[mx.array]:
        """The last hidden state."""
        return [] if self._last is None else [self._last]

    def _keys(self) -> tuple[KeysByKind, int]:
        """The target's keys for each kind of layer, and the number of tokens it has read."""
        caches = {
            layer.layer_type: cache for layer, cache in zip(self._target.model.layers, self._caches, strict=False)
        }
        seen = {"sliding_attention": self._config.args.sliding_window + self._reading.rows_beyond_window}
        keys = {}
        for kind in dict.fromkeys(self._config.args.layer_types):
            rows = rows_in_order(caches[kind])
            limit = seen.get(kind, rows[0].shape[2])
            keys[kind] = rows[0][..., -limit:, :].astype(self._dtype), rows[1][..., -limit:, :].astype(self._dtype)
        return keys, int(next(iter(caches.values())).offset)
