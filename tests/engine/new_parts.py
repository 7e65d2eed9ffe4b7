"""Uses what docs/one_file_and_one_row.md adds, in a copy of the package, and prints what came of it as JSON.

python -m tests.engine.new_parts
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import mlx.core as mx

import mlx_spec
from mlx_spec.accept.table import rule_named
from mlx_spec.drafters.base import Drafter
from mlx_spec.model.target import Target
from mlx_spec.pairing import load_drafter
from mlx_spec.schedule.table import make_policy
from tests.engine.rows import make_row, pull
from tests.rounds.runs import stock
from tests.scripted import CyclingDrafter, RecordingDrafter, WrongDrafter
from tests.tiny import MIXES, PROMPT, VOCAB
from tests.tiny_eagle import random_files


def sulking() -> dict[str, Any]:
    """A drafter of which every other round is wrong, under the new policy."""
    policy = make_policy("sulking", 4, "test")
    row = make_row("dense", PROMPT, CyclingDrafter(stock("dense", "greedy").ids, VOCAB, (2, 0)), policy, 20)
    ids = [token for token, _ in pull("dense", row)]
    return {"named": str(policy), "ids": ids, "rounds": row.statistics.rounds}


def trusting() -> dict[str, Any]:
    """A drafter that is always wrong, under the new rule."""
    rule, policy = rule_named("trusting"), make_policy("fixed", 4, "test")
    row = make_row("dense", PROMPT, WrongDrafter(stock("dense", "greedy").ids, VOCAB), policy, 12, rule=rule)
    ids = [token for token, _ in pull("dense", row)]
    counted = row.statistics
    return {"named": str(rule), "ids": ids, "accepted": counted.accepted_tokens, "proposed": counted.proposed_tokens}


def relabelled() -> dict[str, Any]:
    """A checkpoint under other names beside itself under its own."""
    target = Target(MIXES["dense"].model())
    config, tensors = random_files(target)
    others = {"hidden_size": "dim", "num_attention_heads": "heads", "num_key_value_heads": "kv_heads"}
    respelled = {others.get(key, key): value for key, value in config.items()}
    respelled["attention"] = {name: respelled.pop(name) for name in ("heads", "kv_heads")}
    respelled["architectures"] = ["RelabelledEagle3"]
    begins = {"layers.0.": "block.", "lm_head.": "out.", "fc.": "mix."}
    renamed = {}
    for name, array in tensors.items():
        start = next((begin for begin in begins if name.startswith(begin)), "")
        renamed[begins.get(start, "") + name.removeprefix(start)] = array
    assert not set(renamed) & {name for name in tensors if name.startswith(tuple(begins))}
    drafts = []
    for made in ((config, tensors), (respelled, renamed)):
        heard = RecordingDrafter(loaded(*made, target))
        ids = [token for token, _ in pull("dense", make_row("dense", PROMPT, heard, make_policy("fixed", 3, ""), 12))]
        drafts.append({"kind": heard.kind, "ids": ids, "proposed": heard.log.proposed})
    return {"own": drafts[0], "other": drafts[1]}


def loaded(config: dict[str, Any], tensors: dict[str, mx.array], target: Target) -> Drafter:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        mx.save_safetensors(f"{folder}/model.safetensors", tensors)
        return load_drafter(folder, target=target)


if __name__ == "__main__":
    used = {"policy": sulking(), "rule": trusting(), "family": relabelled()}
    sys.stdout.write(json.dumps({"file": mlx_spec.__file__, **used}))
