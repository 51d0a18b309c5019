"""The saved form of INT4 weights: beside each name of a linear layer, in place of `weight`.

    int4_codes    [N, K / 2] uint8: k even in the low four bits, k odd in the high four
    int4_scales   [N, groups] bf16 or fp16
    int4_zeros    [N, groups], asymmetric calibrations only
    int4_factors  [K] float32, what inputs are multiplied by first; activation-aware calibration only

Layers are not fused and rows not reordered, so that SGLang's own loaders shard and fuse them.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from sdsie_sglang.int4.calibration import CalibratedWeight
from sdsie_sglang.int4.checkpoint_format import CODES, FACTORS, FORMAT, METHOD, SCALES, ZEROS
from sdsie_sglang.int4.settings import CALIBRATIONS
from sdsie_sglang.kernels.int4_gemm import QuantizedWeight


def fold_codes(q: Tensor) -> Tensor:
    """[N, K] codes 0..15 -> [N, K / 2] bytes. K must be even."""
    return q[:, 0::2] | (q[:, 1::2] << 4)


def unfold_codes(folded: Tensor) -> Tensor:
    """The inverse of `fold_codes`."""
    return torch.stack([folded & 15, folded >> 4], dim=-1).flatten(1)


def saved_tensors(name: str, weight: CalibratedWeight) -> dict[str, Tensor]:
    """What stands in a checkpoint for the layer `name`."""
    codes = weight.codes
    tensors = {CODES: fold_codes(codes.q), SCALES: codes.scales, ZEROS: codes.zeros, FACTORS: weight.input_factors}
    return {f"{name}.{key}": value.clone() for key, value in tensors.items() if value is not None}


def load_effective(folder: Path) -> dict[str, Tensor]:
    """All of a saved model's weights in float32, `{layer}.weight` of INT4 layers as multiplied by in effect."""
    tensors: dict[str, Tensor] = {}
    for shard in sorted(folder.glob("*.safetensors")):
        tensors.update(load_file(shard))
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    group = CALIBRATIONS[config["calibration"]].group
    for name in [key.removesuffix(f".{CODES}") for key in tensors if key.endswith(f".{CODES}")]:
        codes, scales, zeros, factors = (tensors.pop(f"{name}.{key}", None) for key in (CODES, SCALES, ZEROS, FACTORS))
        quantised = QuantizedWeight(q=unfold_codes(codes), scales=scales, zeros=zeros, group=group)
        tensors[f"{name}.weight"] = CalibratedWeight(quantised, factors).effective()
    return {key: value.float() for key, value in tensors.items()}


def quantization_config(calibration: str, exclude: tuple[str, ...], lm_head: bool) -> dict[str, Any]:
    """`quantization_config` of the checkpoint's config.json."""
    return {
        "quant_method": METHOD,
        "format": FORMAT,
        "calibration": calibration,
        "exclude": list(exclude),
        "lm_head": lm_head,
    }
