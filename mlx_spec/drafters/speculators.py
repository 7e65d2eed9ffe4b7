"""Which drafter runs by which method on a target that has several, matched by the method and the draft's architecture.

Matching by the draft alone would run whatever mechanism happens to fit it; by the method alone cannot tell two drafts
apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mlx_spec.errors import CheckpointError, IncompatiblePair

_TARGET_BY_ARCHITECTURE = {
    "DeepseekV3ForCausalLM": "deepseek_v3",
    "KimiK2ForCausalLM": "deepseek_v3",
    "KimiK25ForConditionalGeneration": "kimi_k25",
}
"""Architecture of a target's checkpoint -> mlx-lm's module for it. Both spellings name a target."""

_MEANT = {("eagle", "LlamaForCausalLM"): "LlamaForCausalLMEagle"}
"""(method, architecture that is an ordinary model's) -> the architecture that is meant."""


@dataclass(frozen=True)
class Speculator:
    """One way to draft for a target.

    Attributes:
        name: what errors call it.
        target: mlx-lm module.
        method: a SpeculativeMethod.
        draft_architecture: what the drafter's checkpoint is; None when its layers are in the target's own checkpoint.
    """

    name: str
    target: str
    method: str
    draft_architecture: str | None

    @property
    def pair(self) -> str:
        """The combination in words."""
        draft = "no draft model" if self.draft_architecture is None else f"draft {self.draft_architecture}"
        return f"{self.method} with {draft}"


SPECULATORS: tuple[Speculator, ...] = (
    Speculator("Eagle3DeepseekV3ForCausalLM", "deepseek_v3", "eagle", "Eagle3DeepseekV2ForCausalLM"),
    Speculator("Eagle3MHADeepseekV3ForCausalLM", "deepseek_v3", "eagle", "LlamaForCausalLMEagle3"),
    Speculator("MTPDeepseekV3ForCausalLM", "deepseek_v3", "mtp", None),
    Speculator("Eagle3KimiK25ForConditionalGeneration", "kimi_k25", "eagle", "Eagle3DeepseekV2ForCausalLM"),
    Speculator("Eagle3MHAKimiK25ForConditionalGeneration", "kimi_k25", "eagle", "LlamaForCausalLMEagle3"),
    Speculator("DFlashKimiK25ForConditionalGeneration", "kimi_k25", "dflash", "DFlashDraftModel"),
)
"""In the order they are tried. A target that is not among them takes any drafter that fits it."""


def meant_architecture(method: str, architectures: Sequence[str]) -> str:
    """The architecture a draft's config means under a method. The config stays as it is.

    Args:
        method: a SpeculativeMethod.
        architectures: the list its config.json has.

    Raises:
        CheckpointError: it does not name exactly one.

    Example:
        >>> meant_architecture("eagle", ["LlamaForCausalLM"])
        'LlamaForCausalLMEagle'
    """
    if len(architectures) != 1:
        raise CheckpointError(
            f"a draft's config.json names exactly one architecture, this one names {len(architectures)}: "
            f"{', '.join(architectures)}"
        )
    return _MEANT.get((method, architectures[0]), architectures[0])


def select_speculator(target: str, method: str, draft_architecture: str | None) -> Speculator | None:
    """Find how to draft for a target.

    Args:
        target: mlx-lm module or architecture of the target.
        method: a SpeculativeMethod.
        draft_architecture: of the drafter; None when its layers are in the target's own checkpoint.

    Returns:
        The speculator, or None when nothing is declared for this target.

    Raises:
        IncompatiblePair: others are declared for this target; lists them.
    """
    module = _TARGET_BY_ARCHITECTURE.get(target, target)
    declared = [each for each in SPECULATORS if each.target == module]
    asked = Speculator("", module, method, draft_architecture)
    for each in declared:
        if (each.method, each.draft_architecture) == (method, draft_architecture):
            return each
    if not declared:
        return None
    raise IncompatiblePair(
        f"no speculator for target {target!r} runs {asked.pair}. Declared: {', '.join(each.pair for each in declared)}."
    )
