"""Writes a model's prediction layer into a folder of its own: `python -m mlx_spec.split_mtp SRC OUT [--bits N]`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from mlx_spec.arguments import PATH, require
from mlx_spec.drafters.checkpoint import CONFIG_NAME, read_config
from mlx_spec.drafters.mtp.files import place_alone
from mlx_spec.drafters.mtp.model import MtpDrafter
from mlx_spec.drafters.mtp.weights import file_name
from mlx_spec.drafters.quantization import DEFAULTS, wanted_format
from mlx_spec.environment import expanded
from mlx_spec.errors import InvalidRequest, UnsupportedOption
from mlx_spec.pairing import load_drafter, settings_folder, target_without_weights
from mlx_spec.terminal import Flags, checked, ending_well, leave

_ABOUT_THE_WHOLE = ("quantization", "quantization_config", "architectures", "auto_map", "block_size")
"""Settings that are not the prediction layer's."""


def split(source: str | Path, out: str | Path, quantize: Mapping[str, Any] | str | int | None = None) -> Path:
    """Read the prediction layer of a checkpoint and write a folder that `load_drafter` reads.

    Args:
        source: a folder or a hub id; of a hub repository only the shards with the layer are downloaded.
        out: folder to write; must not exist, or be empty.
        quantize: as `load_drafter` takes it; None keeps the weights as they are, 8-bit floats with scales as bfloat16.

    Raises:
        InvalidRequest: `out` holds something, or an argument is of another kind.
        UnsupportedOption: the source is another kind of drafter, mlx-lm does not know the model, or nothing can be
            quantized so.
        ModelNotFound, CheckpointError, IncompatiblePair: as in `load_drafter`.
    """
    require("out", out, PATH, "the path of a folder to write")
    out, quantize = expanded(out), wanted_format(quantize)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InvalidRequest(f"{out} exists and is not an empty folder. Name another one, or remove it.")
    target = target_without_weights(source)
    drafter = load_drafter(source, target, kind="mtp", quantize=quantize)
    if not isinstance(drafter, MtpDrafter):
        raise UnsupportedOption(f"{source} is a drafter of kind {drafter.kind!r}: it needs no splitting")
    count = len(drafter.networks)
    tensors = {
        place_alone(depth, count) + file_name(name, drafter.layout): array
        for depth, network in enumerate(drafter.networks)
        for name, array in tree_flatten(network.predictor.parameters())
    }
    out.mkdir(parents=True, exist_ok=True)
    mx.save_safetensors(str(out / "model.safetensors"), tensors, {"format": "mlx"})
    config = _config(read_config(settings_folder(source)), drafter, quantize)
    (out / CONFIG_NAME).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    return out


def _config(source: dict[str, Any], drafter: MtpDrafter, quantize: Mapping[str, Any] | None) -> dict[str, Any]:
    text = source.get("text_config", source)
    config: dict[str, Any] = {
        "model_type": drafter.layout.split_type,
        "num_nextn_predict_layers": len(drafter.networks),
        "block_size": drafter.default_width,
        "text_config": {key: value for key, value in text.items() if key not in _ABOUT_THE_WHOLE},
    }
    if quantize is not None:
        config["quantization"] = dict(quantize)
    return config


def parser() -> argparse.ArgumentParser:
    """The command line."""
    command = Flags(prog="python -m mlx_spec.split_mtp", description=__doc__)
    command.add_argument("source", metavar="SRC", help="the model's original checkpoint: a folder or a hub id")
    command.add_argument("out", metavar="OUT", help="folder to write")
    command.add_argument("--bits", type=int, help="quantize to this many bits per weight")
    command.add_argument("--group-size", type=int, help="weights that share a scale")
    command.add_argument("--mode", choices=list(DEFAULTS), help="how to quantize")
    return command


def _quantize(args: argparse.Namespace) -> dict[str, Any] | None:
    if args.bits is None and args.group_size is None and args.mode is None:
        return None
    mode = args.mode or "affine"
    group_size, bits = DEFAULTS[mode]
    return {"group_size": args.group_size or group_size, "bits": args.bits or bits, "mode": mode}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Returns its exit status."""
    args = parser().parse_args(checked(arguments))

    def work() -> int:
        out = split(args.source, args.out, _quantize(args))
        print(f"wrote {out}. Use it with --draft-model {out}")
        return 0

    return ending_well(work)


if __name__ == "__main__":
    leave(main())
