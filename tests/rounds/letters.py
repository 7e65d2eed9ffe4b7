"""A tokenizer for the tiny targets."""

from __future__ import annotations

import functools

from tokenizers import Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import PreTrainedTokenizerFast

from tests.tiny import VOCAB


@functools.cache
def tokenizer() -> PreTrainedTokenizerFast:
    """One letter per id, nothing between them, no end token."""
    letters = Tokenizer(WordLevel({letter(token): token for token in range(VOCAB)}, unk_token=letter(0)))
    letters.pre_tokenizer = Split("", "isolated")
    letters.decoder = Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=letters, clean_up_tokenization_spaces=False)


def letter(token: int) -> str:
    return chr(ord("\u0100") + token)
