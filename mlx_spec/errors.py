"""Every exception a caller may catch. Messages say what was wanted, what came, and the way out."""

LONGEST_MESSAGE = 2000
"""Characters. What a file says of itself may stand in a message, and be of any length."""


class MlxSpecError(Exception):
    """Root of all errors this library raises on purpose."""

    def __init__(self, *args: object) -> None:
        super().__init__(*map(_cut, args))


def _cut(said: object) -> object:
    """The start of a text, which says what is wrong, and its end, which says the way out."""
    if not isinstance(said, str) or len(said) <= LONGEST_MESSAGE:
        return said
    return f"{said[: LONGEST_MESSAGE - 400]} … {said[-400:]}"


class InvalidRequest(MlxSpecError, ValueError):
    """The request itself cannot be served: empty prompt, width 0, conflicting options. Nothing was changed."""


class UnknownKeyword(InvalidRequest, TypeError):
    """A function has no such keyword. Names the nearest one it has."""


class UnsupportedOption(MlxSpecError, ValueError):
    """An option is understood but cannot be honoured here. Raised before the first token; nothing was changed."""


class ModelNotFound(MlxSpecError, FileNotFoundError):
    """A model path or hub id leads to no checkpoint."""


class CheckpointError(MlxSpecError, ValueError):
    """A checkpoint's config or tensors are missing, extra, misshapen or unreadable. Names each of them."""


class UnknownDrafter(MlxSpecError, ValueError):
    """No registered family or kind matches. The message lists what is known."""


class FamilyClash(MlxSpecError, RuntimeError):
    """An installed package brings a family of drafters that cannot be read, or whose names are taken. Says which."""


class IncompatiblePair(MlxSpecError, ValueError):
    """Drafter and target do not fit. The message names both values."""


class UnknownAnatomy(MlxSpecError, ValueError):
    """The target's architecture has no row in the table of embeddings, norms and heads."""


class TransactionError(MlxSpecError, RuntimeError):
    """A cache transaction was used out of order or out of range. It is still open and can be aborted."""


class CacheChanged(TransactionError):
    """Somebody wrote to a cache while a round was open on it. What they did is left as it is."""


class CannotMix(MlxSpecError, RuntimeError):
    """A token mixer refused a single position of a block. The round can be aborted and stepped through instead."""


class NonFiniteLogits(MlxSpecError, ArithmeticError):
    """The target produced NaN logits. The cache holds the prompt and the tokens handed out before it.

    Attributes:
        position: tokens (prompt and generated) before the token that could not be chosen.
    """

    def __init__(self, position: int) -> None:
        self.position = position
        super().__init__(
            f"the target's logits for the token at position {position} contain NaN, so no token can be chosen. "
            "The weights or the activations overflow; try another dtype or checkpoint."
        )
