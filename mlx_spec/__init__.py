"""Speculative decoding for mlx-lm that never changes the output."""

from __future__ import annotations

import difflib
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from mlx_spec.starting import answer_interrupts, is_command

__version__ = "0.1.0"

if is_command(sys.orig_argv):
    # The modules it needs take seconds to read.
    answer_interrupts()

if TYPE_CHECKING:
    from mlx_spec import drafters, errors
    from mlx_spec.cache.transaction import SpeculativeCacheTransaction, settled_cache
    from mlx_spec.config import (
        MAGIC_DRAFT_TOKEN_ID,
        RejectionSamplingStrategy,
        SpeculativeConfig,
        SpeculativeMethod,
        VerifyWidthRange,
    )
    from mlx_spec.engine.row import RoundResult
    from mlx_spec.generate import (
        GenerationResponse,
        generate,
        generate_step,
        speculative_generate_step,
        stream_generate,
    )
    from mlx_spec.pairing import load, load_drafter
    from mlx_spec.progress import Step
    from mlx_spec.stats import Statistics
    from mlx_spec.threads import worker_thread
    from mlx_spec.verify.forward import VerifiedBlock, verify_forward
    from mlx_spec.verify.record import attach, detach

__all__ = [
    "MAGIC_DRAFT_TOKEN_ID",
    "GenerationResponse",
    "RejectionSamplingStrategy",
    "RoundResult",
    "SpeculativeCacheTransaction",
    "SpeculativeConfig",
    "SpeculativeMethod",
    "Statistics",
    "Step",
    "VerifiedBlock",
    "VerifyWidthRange",
    "__version__",
    "attach",
    "detach",
    "drafters",
    "errors",
    "generate",
    "generate_step",
    "load",
    "load_drafter",
    "settled_cache",
    "speculative_generate_step",
    "stream_generate",
    "worker_thread",
    "verify_forward",
]

_HOME = {
    "SpeculativeCacheTransaction": "cache.transaction",
    "settled_cache": "cache.transaction",
    "MAGIC_DRAFT_TOKEN_ID": "config",
    "RejectionSamplingStrategy": "config",
    "SpeculativeConfig": "config",
    "SpeculativeMethod": "config",
    "VerifyWidthRange": "config",
    "RoundResult": "engine.row",
    "GenerationResponse": "generate",
    "generate": "generate",
    "generate_step": "generate",
    "speculative_generate_step": "generate",
    "stream_generate": "generate",
    "load": "pairing",
    "load_drafter": "pairing",
    "Statistics": "stats",
    "Step": "progress",
    "worker_thread": "threads",
    "VerifiedBlock": "verify.forward",
    "verify_forward": "verify.forward",
    "attach": "verify.record",
    "detach": "verify.record",
}
"""Public name -> module. Loaded when first asked for: `python -m mlx_spec.generate` must find its module unloaded."""


_MODULES = ("drafters", "errors")
"""Public modules."""


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"{__name__}.{name}")
    if name not in _HOME:
        near = difflib.get_close_matches(name, __all__, n=1)
        hint = f". Did you mean {near[0]!r}?" if near else ""
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{hint}")
    value = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value
