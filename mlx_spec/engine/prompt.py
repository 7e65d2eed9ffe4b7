"""What a row reads before its first token."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx


@dataclass(frozen=True)
class Prompt:
    """What a request reads before its first token.

    Attributes:
        ids: [n] token ids, in the dtype the caller gave; [0] where there are embeddings alone.
        host_ids: the same on the host.
        embeddings: [n, H] what the model reads in place of the embedded ids; None where it embeds them itself.
    """

    ids: mx.array
    host_ids: list[int]
    embeddings: mx.array | None = None

    @property
    def length(self) -> int:
        """Positions."""
        return self.ids.size if self.embeddings is None else self.embeddings.shape[0]

    @property
    def has_ids(self) -> bool:
        """Whether anybody but the model can know what stands there."""
        return self.ids.size > 0

    def part(self, start: int, end: int) -> tuple[mx.array, mx.array | None]:
        """Ids [n] or [0], and embeddings [n, H] if there are any, of the positions from start to end."""
        return self.ids[start:end], None if self.embeddings is None else self.embeddings[start:end]

    def shown_ids(self, start: int, end: int) -> list[int]:
        """Ids on the host, for a drafter; 0 where nothing is known, so that there is one per position."""
        return self.host_ids[start:end] if self.has_ids else [0] * (end - start)
