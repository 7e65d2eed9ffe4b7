"""Prediction layers that a checkpoint keeps quantized."""

from __future__ import annotations

from typing import Any

from mlx import nn
from mlx_lm.utils import infer_quant_config

from mlx_spec.drafters.mtp.files import PredictionTensors
from mlx_spec.drafters.mtp.layouts import Layout
from mlx_spec.drafters.mtp.model import Predictor
from mlx_spec.drafters.mtp.weights import file_name
from mlx_spec.errors import CheckpointError


def quantize_as_stored(predictor: Predictor, layout: Layout, stored: PredictionTensors) -> None:
    """Make those modules quantized ones whose scales the files hold.

    Group size, bits and mode follow from shapes and dtypes, module by module: a config names defaults that need not
    hold for each.

    Raises:
        CheckpointError: scales that fit no mode. Names them.
    """

    def predicate(path: str, module: nn.Module) -> bool | dict[str, Any]:
        if not hasattr(module, "to_quantized"):
            return False
        name = file_name(f"{path}.weight", layout).removesuffix(".weight")
        if f"{name}.scales" not in stored.tensors or f"{name}.weight" not in stored.tensors:
            return False
        return _packing(name, module, stored)

    nn.quantize(predictor, class_predicate=predicate)


def _packing(name: str, module: nn.Module, stored: PredictionTensors) -> dict[str, Any]:
    try:
        packing: dict[str, Any] = infer_quant_config(name, module, stored.tensors)
    except (ValueError, ZeroDivisionError) as error:
        raise CheckpointError(f"{stored.folder}: {stored.full_name(name)}.scales: {error}") from None
    return packing
