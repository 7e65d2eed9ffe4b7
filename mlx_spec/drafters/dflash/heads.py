"""How a block's states become tokens: each slot for itself, or each given the token before it.

Sources: DFlash (arXiv:2602.06036) chooses every slot by its own; its second version reranks each slot's likeliest
tokens by the one before; DSpark (deepseek-ai/DeepSpec) adds a low-rank bias that depends on it. All greedy here.
"""

from __future__ import annotations

import abc

import mlx.core as mx

from mlx_spec.drafters.dflash.config import BlockConfig
from mlx_spec.drafters.dflash.layers import Tensors
from mlx_spec.drafters.likelihood import spread
from mlx_spec.model.target import Target


class ProposalHead(abc.ABC):
    """States of a block -> tokens. Holds weights only.

    Attributes:
        weighs_all_tokens: what it chooses is the likeliest token of a distribution over all it knows.

    Args:
        target_ids: [V_draft] int32, the target's id of each id the output projection knows; None when they are the
            same.
    """

    weighs_all_tokens = True

    def __init__(self, tensors: Tensors, config: BlockConfig, target_ids: mx.array | None) -> None:
        self._tensors = tensors
        self._config = config
        self._target_ids = target_ids

    @abc.abstractmethod
    def choose(self, states: mx.array, bonus: mx.array, target: Target) -> mx.array:
        """Propose one token per slot.

        Args:
            states: [B, n, H] final states of the slots that predict.
            bonus: [B] int32, the token before the first slot's.

        Returns:
            [B, n] int32 ids in the target's vocabulary, lazy.
        """

    def log_probabilities(self, states: mx.array, bonus: mx.array, target: Target, columns: int) -> mx.array:
        """[B, n, columns] what `choose` takes the likeliest of. Only where the head `weighs_all_tokens`."""
        del bonus
        return spread(self.logits(states, target), columns, self._target_ids)

    def logits(self, states: mx.array, target: Target) -> mx.array:
        """[B, n, H] -> [B, n, V_draft], each slot by itself."""
        config = self._config
        if "lm_head.weight" in self._tensors:
            logits = self._tensors.linear("lm_head", states)
        elif config.tie_word_embeddings and "embed_tokens.weight" in self._tensors:
            logits = self._tensors.linear("embed_tokens", states)
        else:
            logits = target.raw_head(states)
        if config.output_multiplier != 1:
            logits = logits * config.output_multiplier
        cap = config.final_logit_softcapping
        return logits if cap is None else mx.tanh(logits / cap) * cap

    def in_target_vocabulary(self, ids: mx.array) -> mx.array:
        """Ids of the output projection -> int32 ids of the target."""
        return ids.astype(mx.int32) if self._target_ids is None else self._target_ids[ids]


class IndependentHead(ProposalHead):
    """Each slot's likeliest token."""

    def choose(self, states: mx.array, bonus: mx.array, target: Target) -> mx.array:
        del bonus
        return self.in_target_vocabulary(mx.argmax(self.logits(states, target), axis=-1))


class MarkovHead(ProposalHead):
    """Each slot's likeliest token once a bias for the token before it is added, left to right."""

    def choose(self, states: mx.array, bonus: mx.array, target: Target) -> mx.array:
        return self.biased(states, bonus, target)[0]

    def log_probabilities(self, states: mx.array, bonus: mx.array, target: Target, columns: int) -> mx.array:
        return spread(self.biased(states, bonus, target)[1], columns, self._target_ids)

    def biased(self, states: mx.array, bonus: mx.array, target: Target) -> tuple[mx.array, mx.array]:
        """[B, n] int32 ids, and the [B, n, V_draft] logits they are the likeliest of."""
        base = self.logits(states, target)
        memory = mx.zeros((states.shape[0], self._config.markov_rank), states.dtype)
        chosen, rows, before = [], [], bonus
        for slot in range(states.shape[1]):
            bias, memory = self._bias(before, states[:, slot], memory)
            rows.append(base[:, slot] + bias)
            before = self.in_target_vocabulary(mx.argmax(rows[-1], axis=-1))
            chosen.append(before)
        return mx.stack(chosen, axis=1), mx.stack(rows, axis=1)

    def _bias(self, before: mx.array, state: mx.array, memory: mx.array) -> tuple[mx.array, mx.array]:
        """[B] token before, [B, H] state, [B, r] memory -> [B, V_draft] bias, [B, r] memory for the next slot."""
        head = self._tensors.below("markov_head")
        embedded = previous_embedding(self._tensors, before)
        kind = self._config.markov_head_type
        if kind == "gated":
            gate = mx.sigmoid(head.linear("gate_proj", mx.concatenate([state, embedded], axis=-1)))
            embedded = gate * embedded
        elif kind == "rnn":
            joint = head.linear("joint_proj", mx.concatenate([memory, embedded, state], axis=-1))
            gate, candidate, output = mx.split(joint, 3, axis=-1)
            gate = mx.sigmoid(gate)
            memory = gate * memory + (1 - gate) * mx.tanh(candidate)
            embedded = mx.tanh(output)
        return head.linear("markov_w2", embedded), memory


class CandidateSelector(ProposalHead):
    """Of each slot's likeliest tokens, the one that goes best with the token before it, left to right."""

    weighs_all_tokens = False

    def choose(self, states: mx.array, bonus: mx.array, target: Target) -> mx.array:
        selector = self._tensors.below("candidate_selector")
        logits = self.logits(states, target)
        count = self._config.selector_top_k
        assert count is not None
        candidates = mx.argpartition(logits, -count, axis=-1)[..., -count:]
        unary = mx.take_along_axis(logits, candidates, axis=-1)
        projected = selector.linear("hidden_projection", states)
        chosen, before = [], bonus
        for slot in range(states.shape[1]):
            wanted = _rows(selector["predecessor_codebook"], before) * projected[:, slot]
            offered = _rows(selector["successor_codebook"], candidates[:, slot])
            scores = unary[:, slot] + (offered @ wanted[..., None])[..., 0]
            best = mx.argmax(scores, axis=-1, keepdims=True)
            before = mx.take_along_axis(candidates[:, slot], best, axis=-1)[:, 0].astype(mx.int32)
            chosen.append(before)
        return mx.stack(chosen, axis=1)


def previous_embedding(tensors: Tensors, before: mx.array) -> mx.array:
    """[...] ids of the tokens before -> [..., r]."""
    return tensors.rows("markov_head.markov_w1", before)


def confidence_logits(tensors: Tensors, config: BlockConfig, states: mx.array, before: mx.array) -> mx.array:
    """[B, n, H] states and [B, n] tokens before each slot's -> [B, n] log-odds that the slot's token is accepted."""
    features = states
    if config.confidence_head_with_markov:
        features = mx.concatenate([states, previous_embedding(tensors, before)], axis=-1)
    return tensors.linear("confidence_head.proj", features).astype(mx.float32)[..., 0]


def _rows(codebook: mx.array, ids: mx.array) -> mx.array:
    """[V, r] codebook and [...] ids -> [..., r]."""
    return codebook[mx.minimum(ids, codebook.shape[0] - 1)]


def build_head(tensors: Tensors, config: BlockConfig, target_ids: mx.array | None) -> ProposalHead:
    """The head a config asks for."""
    if config.selector_top_k:
        return CandidateSelector(tensors, config, target_ids)
    return (MarkovHead if config.markov_rank else IndependentHead)(tensors, config, target_ids)
