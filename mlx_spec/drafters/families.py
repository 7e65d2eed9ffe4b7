"""Every family of drafters that this package knows by name, one row each, declared by hand."""

from __future__ import annotations

from dataclasses import dataclass

KNOWN_DRAFTER_KINDS = ("dflash", "mtp", "eagle3", "ngram", "standalone")
"""What drafters are asked for and reported as. "standalone" is an ordinary language model that drafts for another."""

ANY_TARGET = ("any",)


@dataclass(frozen=True, kw_only=True)
class Family:
    """One row of the table.

    Attributes:
        name: what errors and the printed table call it; each once.
        kind: one of KNOWN_DRAFTER_KINDS, or a word of its own. A label: nothing is dispatched on it.
        module: package with `load(folder, target, taps) -> Drafter`, imported when first asked for; None while the
            family is known but not built.
        architectures: what config.json's `architectures[0]` says. The first is the usual one.
        model_types: what `model_type` or `speculators_model_type` says, where no ordinary language model says it.
        natives: `model_type` of target checkpoints that carry the drafter's layers beside their own.
        targets: mlx-lm modules it drafts for, or ANY_TARGET.
        absent_target: the target's model type, when mlx-lm has no module for it. Such a family cannot be loaded.
        layouts: how its files are laid out, in words for the printed table.
    """

    name: str
    kind: str
    module: str | None = None
    architectures: tuple[str, ...] = ()
    model_types: tuple[str, ...] = ()
    natives: tuple[str, ...] = ()
    targets: tuple[str, ...] = ANY_TARGET
    absent_target: str | None = None
    layouts: tuple[str, ...] = ()

    @property
    def architecture(self) -> str | None:
        """The usual one; None where the layers come with the target's checkpoint, or there are none."""
        return self.architectures[0] if self.architectures else None

    @property
    def loadable(self) -> bool:
        """Whether its checkpoints can be loaded now."""
        return self.module is not None and self.absent_target is None

    @property
    def standing(self) -> str:
        """That in words: "yes", or why not."""
        if self.absent_target is not None:
            return f"no: mlx-lm has no {self.absent_target}"
        return "yes" if self.loadable else "not built yet"


_EAGLE3 = (
    Family(
        name="eagle3",
        kind="eagle3",
        module="mlx_spec.drafters.eagle3",
        architectures=(
            "LlamaForCausalLMEagle3",
            "Eagle3LlamaForCausalLM",
            "Eagle3Speculator",
            "Eagle3DraftModel",
            "Qwen3Eagle3Model",
        ),
        model_types=("eagle3",),
        layouts=("flat", "speculators", "DeepSpec"),
    ),
    Family(
        name="eagle3_mla",
        kind="eagle3",
        module="mlx_spec.drafters.eagle3",
        architectures=("Eagle3DeepseekV2ForCausalLM",),
        targets=("deepseek_v3", "kimi_k25"),
        layouts=("flat",),
    ),
    Family(
        name="eagle",
        kind="eagle3",
        architectures=("LlamaForCausalLMEagle", "EagleLlamaForCausalLM"),
        model_types=("eagle",),
        layouts=("flat",),
    ),
)

_DFLASH = (
    Family(
        name="dflash",
        kind="dflash",
        module="mlx_spec.drafters.dflash",
        architectures=("DFlashDraftModel",),
        model_types=("dflash", "qwen3_dflash", "gemma4_dflash"),
        layouts=("flat", "nested"),
    ),
    Family(
        name="dflash2",
        kind="dflash",
        module="mlx_spec.drafters.dflash",
        architectures=("DFlash2DraftModel",),
        model_types=("dflash2",),
        layouts=("nested",),
    ),
    Family(
        name="dspark",
        kind="dflash",
        module="mlx_spec.drafters.dflash",
        architectures=("DSparkDraftModel", "Qwen3DSparkModel"),
        model_types=("dspark", "qwen3_dspark"),
        layouts=("flat", "nested", "speculators"),
    ),
    Family(
        name="gemma4_dspark",
        kind="dflash",
        module="mlx_spec.drafters.dflash",
        architectures=("Gemma4DSparkModel",),
        model_types=("gemma4_dspark",),
        targets=("gemma4", "gemma4_text"),
        layouts=("flat",),
    ),
    Family(
        name="laguna_dflash",
        kind="dflash",
        module="mlx_spec.drafters.dflash",
        architectures=("DFlashLagunaForCausalLM",),
        model_types=("laguna_dflash",),
        targets=("laguna",),
        layouts=("nested",),
    ),
    Family(
        name="muse_glimmer_assistant",
        kind="dflash",
        module="mlx_spec.drafters.dflash",
        architectures=("MuseGlimmerAssistantModel",),
        model_types=("muse_glimmer_assistant",),
        targets=("muse_glimmer",),
        layouts=("flat",),
    ),
    Family(
        name="deepseek_v4_dspark",
        kind="dflash",
        model_types=("deepseek_v4_dspark",),
        targets=("deepseek_v4",),
        absent_target="deepseek_v4",
        layouts=("native",),
    ),
)

_MTP = (
    Family(
        name="qwen3_5_mtp",
        kind="mtp",
        module="mlx_spec.drafters.mtp",
        architectures=("MTPDraftModel",),
        model_types=("qwen3_5_mtp", "qwen3_next_mtp", "mtp"),
        natives=("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_next"),
        targets=("qwen3_5", "qwen3_5_moe", "qwen3_next"),
        layouts=("native", "split"),
    ),
    Family(
        name="deepseek_nextn",
        kind="mtp",
        module="mlx_spec.drafters.mtp",
        model_types=("deepseek_v3_mtp", "deepseek_v32_mtp"),
        natives=("deepseek_v3", "deepseek_v32", "kimi_k2", "kimi_k25", "joyai_llm_flash"),
        targets=("deepseek_v3", "deepseek_v32", "kimi_k25"),
        layouts=("native", "split"),
    ),
    Family(
        name="glm_nextn",
        kind="mtp",
        module="mlx_spec.drafters.mtp",
        model_types=("glm4_moe_mtp", "glm4_moe_lite_mtp", "glm_moe_dsa_mtp"),
        natives=("glm4_moe", "glm4_moe_lite", "glm_moe_dsa"),
        targets=("glm4_moe", "glm4_moe_lite", "glm_moe_dsa"),
        layouts=("native", "split"),
    ),
    Family(
        name="gemma4_assistant",
        kind="mtp",
        module="mlx_spec.drafters.gemma4_assistant",
        architectures=("Gemma4AssistantForCausalLM", "Gemma4UnifiedAssistantForCausalLM"),
        model_types=("gemma4_assistant", "gemma4_unified_assistant"),
        targets=("gemma4", "gemma4_text"),
        layouts=("own folder",),
    ),
    Family(
        name="mimo_mtp",
        kind="mtp",
        module="mlx_spec.drafters.mtp",
        model_types=("mimo_mtp",),
        natives=("mimo",),
        targets=("mimo",),
        layouts=("native", "split"),
    ),
    Family(
        name="mimo_v2_mtp",
        kind="mtp",
        module="mlx_spec.drafters.mtp",
        model_types=("mimo_v2_flash_mtp",),
        natives=("mimo_v2_flash",),
        targets=("mimo_v2_flash",),
        layouts=("native", "split"),
    ),
    Family(
        name="step3p5_mtp",
        kind="mtp",
        module="mlx_spec.drafters.mtp",
        model_types=("step3p5_mtp",),
        natives=("step3p5",),
        targets=("step3p5",),
        layouts=("native", "split"),
    ),
    Family(
        name="nemotron_h_mtp",
        kind="mtp",
        module="mlx_spec.drafters.mtp",
        model_types=("nemotron_h_mtp",),
        natives=("nemotron_h",),
        targets=("nemotron_h",),
        layouts=("native", "split"),
    ),
    Family(
        name="exaone_moe_mtp",
        kind="mtp",
        module="mlx_spec.drafters.mtp",
        model_types=("exaone_moe_mtp",),
        natives=("exaone_moe",),
        targets=("exaone_moe",),
        layouts=("native", "split"),
    ),
    Family(
        name="ernie4_5_mtp",
        kind="mtp",
        module="mlx_spec.drafters.mtp",
        model_types=("ernie4_5_moe_mtp",),
        natives=("ernie4_5_moe",),
        targets=("ernie4_5_moe",),
        layouts=("native", "split"),
    ),
    Family(
        name="longcat_flash_mtp",
        kind="mtp",
        module="mlx_spec.drafters.mtp",
        model_types=("longcat_flash_mtp",),
        natives=("longcat_flash", "longcat_flash_ngram"),
        targets=("longcat_flash", "longcat_flash_ngram"),
        layouts=("native", "split"),
    ),
    Family(
        name="bailing_mtp",
        kind="mtp",
        module="mlx_spec.drafters.mtp",
        model_types=("bailing_hybrid_mtp", "bailing_moe_v3_mtp"),
        natives=("bailing_hybrid", "bailing_moe_v3"),
        targets=("bailing_hybrid", "bailing_moe_v3"),
        layouts=("native", "split"),
    ),
    Family(
        name="deepseek_v41_mtp",
        kind="mtp",
        natives=("deepseek_v41", "deepseek_v41_text"),
        targets=("deepseek_v41",),
        layouts=("native",),
    ),
    Family(
        name="other_native_mtp",
        kind="mtp",
        natives=("kimi_linear", "kimi_k3", "mellum", "youtu_llm", "solar_open"),
        targets=("kimi_linear", "kimi_k3", "mellum", "youtu_llm", "solar_open"),
        layouts=("native",),
    ),
)


def _without_target(name: str, missing: str, *natives: str) -> Family:
    """An MTP family whose target mlx-lm lacks."""
    return Family(
        name=name,
        kind="mtp",
        model_types=(name,),
        natives=(missing, *natives),
        targets=(missing,),
        absent_target=missing,
        layouts=("native", "split"),
    )


_MTP_WITHOUT_TARGET = (
    _without_target("deepseek_v4_mtp", "deepseek_v4"),
    _without_target("glm5_next_mtp", "glm5_next", "glm5_next_text"),
    _without_target("hy_v4_mtp", "hy_v4"),
    _without_target("inkling_mtp", "inkling", "inkling_multimodal"),
    _without_target("qwen4_exp_mtp", "qwen4_exp", "qwen4_exp_text"),
)

_WITHOUT_LAYERS_OF_THE_TARGET = (
    Family(name="ngram", kind="ngram", module="mlx_spec.drafters.ngram", model_types=("ngram",), layouts=("none",)),
    Family(
        name="standalone",
        kind="standalone",
        module="mlx_spec.drafters.standalone",
        layouts=("any mlx-lm model",),
    ),
)

FAMILIES: tuple[Family, ...] = (
    *_EAGLE3,
    *_DFLASH,
    *_MTP,
    *_MTP_WITHOUT_TARGET,
    *_WITHOUT_LAYERS_OF_THE_TARGET,
)
"""In the order they are printed."""
