"""A family whose files say what another family's say, under other names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Spelling:
    """Names in the files -> names of the family that reads them. What is not listed is called the same.

    Attributes:
        keys: of config.json, those of nested objects with dots.
        tensors: beginnings of tensors' names, the longest that fits is taken.

    Example:
        >>> spelling = Spelling({"dim": "hidden_size", "attn.heads": "num_attention_heads"}, {"head.": "lm_head."})
        >>> spelling.config({"dim": 64, "attn": {"heads": 4}, "vocab_size": 97})
        {'hidden_size': 64, 'vocab_size': 97, 'num_attention_heads': 4}
        >>> spelling.tensor("head.weight")
        'lm_head.weight'
    """

    keys: Mapping[str, str] = field(default_factory=dict)
    tensors: Mapping[str, str] = field(default_factory=dict)

    def config(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """The config under the other names. An object of which every key was renamed is left out."""
        return self._renamed(config, "", {})

    def tensor(self, name: str) -> str:
        """The name of a tensor, or of a module, in the other family."""
        begins = max((start for start in self.tensors if name.startswith(start)), key=len, default=None)
        return name if begins is None else self.tensors[begins] + name.removeprefix(begins)

    def _renamed(self, given: Mapping[str, Any], inside: str, found: dict[str, Any]) -> dict[str, Any]:
        kept: dict[str, Any] = {}
        for key, value in given.items():
            path = inside + key
            if path in self.keys:
                (found if inside else kept)[self.keys[path]] = value
            elif isinstance(value, Mapping) and value:
                left = self._renamed(value, f"{path}.", found)
                kept.update({key: left} if left else {})
            else:
                kept[key] = value
        return kept if inside else {**kept, **found}


AS_IT_IS = Spelling()
