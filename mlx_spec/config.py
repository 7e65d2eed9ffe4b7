"""SpeculativeConfig: what a caller may ask of speculation, checked once, before anything is loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator

from mlx_spec.arguments import PATH, require
from mlx_spec.environment import expanded
from mlx_spec.errors import InvalidRequest

SpeculativeMethod = Literal["eagle", "mtp", "dflash", "dflash2"]
"""How proposals are made: one token at a time (`eagle`, `mtp`) or a whole block at once (`dflash`, `dflash2`)."""

RejectionSamplingStrategy = Literal["greedy", "residual", "typical-acceptance", "logit-comparison"]
"""Names of acceptance strategies. The choice is stored; no decoding path reads it."""

MAGIC_DRAFT_TOKEN_ID = 42
"""A row whose proposals all have this id carries no real proposals: none of them counts as accepted."""

DEFAULT_SEQUENTIAL_PROPOSALS = 2
"""Proposals per round of the methods that draft one token at a time, where the caller names none."""

CONFIG_SECTIONS = ("speculative", "speculative_config")
"""The keys under which a configuration file may keep these fields."""

# Strict, because YAML's `yes` is a bool and a bool passes for 1 wherever a number is merely convertible.
_Int = Annotated[int, Field(strict=True)]
_Float = Annotated[float, Field(strict=True)]
_Bool = Annotated[bool, Field(strict=True)]

_BUILT_FIELDS = frozenset({"speculative_method", "num_speculative_tokens", "rejection_sampling_strategy"})


class VerifyWidthRange(BaseModel):
    """How many proposals the target checks while the number of decoding rows lies in one range.

    Carries no checks of its own: ranges only make sense together, see `normalize_verify_widths`.

    Attributes:
        batch_start: first batch size of the range, rows.
        batch_end: last batch size of the range, rows, itself included.
        num_tokens: proposals to check; 0 checks none.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    batch_start: _Int
    batch_end: _Int
    num_tokens: _Int

    def as_triple(self) -> tuple[int, int, int]:
        """The range as (start, end, count)."""
        return self.batch_start, self.batch_end, self.num_tokens


def normalize_verify_widths(schedule: Sequence[Sequence[int]]) -> list[tuple[int, int, int]]:
    """Check a verify-width schedule and sort it by batch size.

    Gaps between ranges are legal and stay; counts are not capped, because the number of
    proposals a round makes may not be known yet.

    Args:
        schedule: (start, end, count) triples in any order; both ends inclusive, in rows.

    Returns:
        The same triples, ascending.

    Raises:
        ValueError: no range, a malformed one, an overlap, or a schedule that leaves out batch size 1.

    Example:
        >>> normalize_verify_widths([(17, 64, 1), (1, 16, 3)])
        [(1, 16, 3), (17, 64, 1)]
        >>> normalize_verify_widths([(1, 16, 3), (16, 64, 1)])
        Traceback (most recent call last):
        ...
        ValueError: verify widths: ranges must not overlap, got (1, 16, 3) and (16, 64, 1); start the later one at 17
    """
    if not schedule:
        raise ValueError("verify widths: wanted at least one batch-size range, got none; leave the field out instead")
    triples = sorted((_checked_triple(entry) for entry in schedule), key=lambda triple: triple[0])
    for earlier, later in zip(triples, triples[1:], strict=False):
        if later[0] <= earlier[1]:
            raise ValueError(
                f"verify widths: ranges must not overlap, got {earlier} and {later}; "
                f"start the later one at {earlier[1] + 1}"
            )
    if triples[0][0] != 1:
        raise ValueError(
            f"verify widths: the first range must start at batch size 1, got {triples[0]}; add a range that does"
        )
    return triples


def _checked_triple(entry: Sequence[int]) -> tuple[int, int, int]:
    if len(entry) != 3:
        raise ValueError(f"verify widths: every entry is a (start, end, count) triple, got {entry!r}")
    start, end, count = entry
    if start <= 0 or end <= 0:
        raise ValueError(f"verify widths: batch sizes must be positive, got start {start} and end {end}")
    if start > end:
        raise ValueError(f"verify widths: a range must have start <= end, got start {start} and end {end}")
    if count < 0:
        raise ValueError(f"verify widths: counts must be non-negative, got {count}; 0 checks no proposal")
    return start, end, count


class SpeculativeConfig(BaseModel):
    """What a caller asks of speculation: the method, the number of proposals, and how they are checked.

    An instance is checked when it is made and cannot change afterwards; `model_copy(update=...)`
    makes another one and, as pydantic's does, trusts its argument. The fields after
    `rejection_sampling_strategy` can make the emitted tokens depend on the drafter;
    `unbuilt_fields` names those whose behaviour this version does not have.

    Args:
        speculative_method: None turns speculation off.
        num_speculative_tokens: proposals per round. Unset means 2 for `eagle` and `mtp`; for
            `dflash` and `dflash2` it stays None until the drafter's checkpoint has fixed it.
        num_speculative_tokens_per_batch_size: how many proposals the target checks, by number of
            decoding rows. Kept sorted.
        num_speculative_tokens_mixed_batch: how many it checks while other rows of the batch are
            still reading their prompt. Capped where it is used.
        rejection_sampling_strategy: stored, never read.
        synthetic_acceptance_rate: accept this share of proposals whatever they are; for benchmarks, 0.0 to 1.0.
        use_relaxed_acceptance_for_thinking: inside a thinking section accept any proposal the target finds likely.
        relaxed_topk: how many of the target's candidates count as likely, at least 1.
        relaxed_delta: how far below the best candidate's probability they may lie, 0.0 to 1.0.
        use_greedy_acceptance: compare proposals with the target's argmax instead of its sample.
        draft_proposal: whether the drafter proposes its argmax or draws from its own distribution.

    Raises:
        ValueError: a field is unknown or out of range, or two fields exclude each other (pydantic's ValidationError).

    Example:
        >>> config = SpeculativeConfig(speculative_method="eagle")
        >>> config.num_speculative_tokens, config.is_eagle(), config.unbuilt_fields()
        (2, True, ())
        >>> wider = config.model_copy(update={"num_speculative_tokens": 4})
        >>> wider.draft_width, config.draft_width
        (4, 2)
        >>> SpeculativeConfig(speculative_method="mtp", use_greedy_acceptance=True).unbuilt_fields()
        ('use_greedy_acceptance',)
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    speculative_method: SpeculativeMethod | None = None
    num_speculative_tokens: _Int | None = Field(default=None, validate_default=True)
    num_speculative_tokens_per_batch_size: list[VerifyWidthRange] | None = None
    num_speculative_tokens_mixed_batch: _Int | None = None
    rejection_sampling_strategy: RejectionSamplingStrategy | None = None
    synthetic_acceptance_rate: _Float | None = None
    use_relaxed_acceptance_for_thinking: _Bool = False
    relaxed_topk: _Int = 10
    relaxed_delta: _Float = 0.6
    use_greedy_acceptance: _Bool = False
    draft_proposal: Literal["argmax", "sampled"] = "argmax"

    @field_validator("num_speculative_tokens")
    @classmethod
    def _resolve_proposals(cls, value: int | None, info: ValidationInfo) -> int | None:
        method = info.data.get("speculative_method")
        if value is None:
            return DEFAULT_SEQUENTIAL_PROPOSALS if method in ("eagle", "mtp") else None
        if value < 1:
            raise ValueError(
                f"num_speculative_tokens must be at least 1, got {value}; "
                "leave speculative_method out to decode without proposals"
            )
        return value

    @field_validator("num_speculative_tokens_per_batch_size")
    @classmethod
    def _sort_verify_widths(cls, value: list[VerifyWidthRange] | None) -> list[VerifyWidthRange] | None:
        if value is None:
            return None
        triples = normalize_verify_widths([entry.as_triple() for entry in value])
        return [VerifyWidthRange(batch_start=start, batch_end=end, num_tokens=count) for start, end, count in triples]

    @field_validator("num_speculative_tokens_mixed_batch")
    @classmethod
    def _check_mixed_batch(cls, value: int | None) -> int | None:
        if value is not None and value < 0:
            raise ValueError(
                f"num_speculative_tokens_mixed_batch must be at least 0, got {value}; 0 checks no proposal"
            )
        return value

    @field_validator("synthetic_acceptance_rate", "relaxed_delta")
    @classmethod
    def _check_share(cls, value: float | None, info: ValidationInfo) -> float | None:
        if value is not None and not 0.0 <= value <= 1.0:
            raise ValueError(f"{info.field_name} must lie between 0.0 and 1.0, got {value}")
        return value

    @field_validator("relaxed_topk")
    @classmethod
    def _check_topk(cls, value: int) -> int:
        if value < 1:
            raise ValueError(f"relaxed_topk must be at least 1, got {value}; 1 accepts the target's best token alone")
        return value

    @model_validator(mode="after")
    def _refuse_contradictions(self) -> Self:
        # Each of these decides alone which proposals are accepted.
        rules = {
            "synthetic_acceptance_rate": self.synthetic_acceptance_rate is not None,
            "use_relaxed_acceptance_for_thinking": self.use_relaxed_acceptance_for_thinking,
            "use_greedy_acceptance": self.use_greedy_acceptance,
            "draft_proposal='sampled'": self.draft_proposal == "sampled",
        }
        chosen = [name for name, is_set in rules.items() if is_set]
        # Synthetic acceptance stands above the relaxed rule and silences it, so this pair has one meaning.
        if len(chosen) > 1 and chosen != ["synthetic_acceptance_rate", "use_relaxed_acceptance_for_thinking"]:
            raise ValueError(f"{' and '.join(chosen)} exclude each other: keep one of them")
        return self

    @classmethod
    def from_mapping(cls, document: Mapping[str, Any], source: str = "the mapping") -> Self:
        """Read the section `speculative` (or `speculative_config`) of a configuration that may hold other sections.

        Args:
            document: the whole configuration.
            source: what an error calls it.

        Raises:
            InvalidRequest: there is no such section, there are both, or it is not a mapping.
            ValueError: the section's fields are wrong (pydantic's ValidationError).

        Example:
            >>> SpeculativeConfig.from_mapping({"speculative": {"speculative_method": "mtp"}}).draft_width
            2
        """
        if not isinstance(document, Mapping):
            raise InvalidRequest(
                f"{source} must hold a mapping with the key {CONFIG_SECTIONS[0]!r}, "
                f"got {type(document).__name__}; put the fields below that key"
            )
        found = [name for name in CONFIG_SECTIONS if name in document]
        if len(found) != 1:
            got = "both" if found else f"only {', '.join(map(repr, document)) or 'an empty mapping'}"
            raise InvalidRequest(
                f"{source} must have one of the keys {' and '.join(map(repr, CONFIG_SECTIONS))}, got {got}; "
                f"put the fields of SpeculativeConfig below {CONFIG_SECTIONS[0]!r}"
            )
        section = document[found[0]]
        if not isinstance(section, Mapping):
            raise InvalidRequest(
                f"{found[0]!r} in {source} must be a mapping of fields, got {section!r}; "
                "indent the fields below it, or write {} for the defaults"
            )
        return cls.model_validate(dict(section))

    @classmethod
    def from_yaml(cls, path: str | Path) -> Self:
        """Read the section `speculative` (or `speculative_config`) of a YAML file.

        Raises:
            OSError: the file cannot be read.
            InvalidRequest: it is not YAML, or has no such section, or `path` is no path.
            ValueError: the section's fields are wrong (pydantic's ValidationError).
        """
        require("path", path, PATH, "the path of a YAML file")
        try:
            document = yaml.safe_load(expanded(path).read_text(encoding="utf-8"))
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise InvalidRequest(f"{path} must be YAML in UTF-8, got: {error}. Mend the file there.") from error
        return cls.from_mapping(document, source=str(path))

    def is_eagle(self) -> bool:
        """Whether proposals come from an EAGLE head."""
        return self.speculative_method == "eagle"

    def is_mtp(self) -> bool:
        """Whether proposals come from multi-token-prediction layers."""
        return self.speculative_method == "mtp"

    def is_dflash(self) -> bool:
        """Whether proposals come as a block, in either version of the method."""
        return self.speculative_method in ("dflash", "dflash2")

    def is_dflash2(self) -> bool:
        """Whether proposals come as a block of the second version."""
        return self.speculative_method == "dflash2"

    def uses_greedy_rejection(self) -> bool:
        """Whether the stored strategy is `greedy`. It has no effect on decoding."""
        return self.rejection_sampling_strategy == "greedy"

    def uses_typical_acceptance(self) -> bool:
        """Whether the stored strategy is `typical-acceptance`. It has no effect on decoding."""
        return self.rejection_sampling_strategy == "typical-acceptance"

    def uses_logit_comparison(self) -> bool:
        """Whether the stored strategy is `logit-comparison`. It has no effect on decoding."""
        return self.rejection_sampling_strategy == "logit-comparison"

    @property
    def draft_width(self) -> int:
        """Proposals per round, once they are known: one less than the tokens of a verify call.

        Raises:
            AssertionError: they are not: the number was left to the drafter's checkpoint, which has not been read.
        """
        # Raised by hand, so that `python -O` keeps it.
        if self.num_speculative_tokens is None:
            raise AssertionError(
                f"num_speculative_tokens is not resolved for speculative_method={self.speculative_method!r}: "
                "read the drafter's checkpoint first, or give the number"
            )
        return self.num_speculative_tokens

    def check_trained_width(self, trained: int | None, drafter: str) -> None:
        """Refuse another number of proposals than a block drafter's checkpoint was trained for.

        Args:
            trained: verify width of the checkpoint; None where it has none.
            drafter: its name, for the message.

        Raises:
            InvalidRequest: names both numbers.
        """
        asked = self.num_speculative_tokens if self.is_dflash() else None
        if asked is not None and trained is not None and trained != asked + 1:
            raise InvalidRequest(
                f"num_speculative_tokens={asked}, but the checkpoint of {drafter} fixes it at {trained - 1}. "
                "Give that, or leave it out; draft_block_size asks for narrower rounds."
            )

    @property
    def verify_width_schedule(self) -> list[tuple[int, int, int]] | None:
        """The verify-width schedule as ascending (start, end, count) triples; None when there is none."""
        ranges = self.num_speculative_tokens_per_batch_size
        return None if ranges is None else [entry.as_triple() for entry in ranges]

    def unbuilt_fields(self) -> tuple[str, ...]:
        """Names of the fields that are set but whose behaviour this version does not have, in field order.

        Whoever starts a run refuses it when there are any, so that no setting is ignored in silence.
        """
        return tuple(
            name
            for name, field in type(self).model_fields.items()
            if name not in _BUILT_FIELDS and getattr(self, name) != field.default
        )
