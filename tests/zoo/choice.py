"""Architectures that stand for all of them where there is no time for all of them."""

from __future__ import annotations

ONE_CACHE_OF_EACH_KIND = (
    "gear",
    "baichuan_m1",
    "minimax_m3_vl",
    "deepseek_v41",
    "llama4, dense",
    "llama, sliding layers",
    "qwen3_5",
    "mamba2",
)
"""For `make test`: every kind of cache, and the recurrent mixers that are most in use."""

ONE_OF_EACH_KIND = (
    *ONE_CACHE_OF_EACH_KIND,
    "afm7",
    "bailing_hybrid",
    "bailing_moe_v3",
    "deepseek_v3, dense",
    "deepseek_v32, dense",
    "falcon_h1",
    "gemma3n",
    "gemma4_text",
    "gpt_oss",
    "iquestloopcoder",
    "kimi_linear",
    "lfm2",
    "llama",
    "longcat_flash_ngram",
    "mamba",
    "ministral3, sliding layers",
    "mistral4",
    "nanbeige, two loops",
    "olmo",
    "plamo2",
    "qwen3, ring that keeps its first tokens",
    "qwen3_moe",
    "recurrent_gemma",
    "rwkv7",
)
"""For `make families`: also each way of remembering a cache, kind of token mixer, sharing of caches between layers."""
