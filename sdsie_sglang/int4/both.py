"""Gives a loaded model a second, INT4 weight in each linear layer."""

import logging
from collections.abc import Collection
from typing import Any

import torch
from sglang.srt.layers.linear import LinearBase
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod

from sdsie_sglang.int4.method import ATTRIBUTE, DualLinearMethod, Int4Unsupported, check_groups, quantised
from sdsie_sglang.int4.settings import CALIBRATIONS, Int4Settings
from sdsie_sglang.int4.weight import KERNEL_DTYPES, MIN_CAPABILITY

logger = logging.getLogger(__name__)


def check_device(device: torch.device, dtype: torch.dtype) -> None:
    """Raises Int4Unsupported where the kernel does not run: float32 or an old GPU."""
    if device.type != "cuda":
        return
    major, minor = torch.cuda.get_device_capability(device)
    if major * 10 + minor < MIN_CAPABILITY:
        raise Int4Unsupported(f"INT4 needs compute capability 8.0 or newer, this GPU has {major}.{minor}")
    if dtype not in KERNEL_DTYPES:
        raise Int4Unsupported(f"INT4 runs in bf16 or fp16 on a GPU, not in {dtype}: give --dtype bfloat16")


def add_int4(model: torch.nn.Module, settings: Int4Settings, only: Collection[str] | None = None) -> int:
    """Full precision stays as SGLang loaded it; INT4 runs while `running_int4()`. Returns the bytes added.

    Args:
        only: names of the layers that get an INT4 weight; None: all but those that the settings exclude.

    Raises:
        Int4Unsupported: a layer is quantised already, or a shard's edge would cut a group.
    """
    if CALIBRATIONS[settings.calibration].needs_text:
        raise Int4Unsupported(
            f"calibration {settings.calibration} needs a little text and so cannot be done while loading: "
            "choose another --sdsie-int4-calibration"
        )
    group = CALIBRATIONS[settings.calibration].group
    added, plain_bytes, layers = 0, 0, 0
    for name, layer in model.named_modules():
        if not isinstance(layer, LinearBase) or settings.excludes(name) or (only is not None and name not in only):
            continue
        if not isinstance(layer.quant_method, UnquantizedLinearMethod):
            raise Int4Unsupported(
                f"{name} is quantised already ({type(layer.quant_method).__name__}): both precisions in one layer need "
                "an unquantised target"
            )
        check_device(layer.weight.device, layer.weight.dtype)
        check_groups(name, layer.weight.shape[1], layer.input_size, group)
        method: Any = DualLinearMethod(layer.quant_method, settings.calibration)
        method.quantise(layer)
        layer.quant_method = method
        added += getattr(layer, ATTRIBUTE).nbytes
        plain_bytes += layer.weight.numel() * layer.weight.element_size()
        layers += 1
    if not layers:
        raise Int4Unsupported("no linear layer is left to quantise: see --sdsie-int4-exclude")
    if settings.lm_head:
        head = model.lm_head
        setattr(head, ATTRIBUTE, quantised(head.weight.data, settings.calibration))
        added += getattr(head, ATTRIBUTE).nbytes
    logger.info(
        "sdsie: INT4 (%s) beside %d linear layers%s: %.2f GB more, %.0f %% of the layers' own %.2f GB",
        settings.calibration, layers, " and the output head" if settings.lm_head else "",
        added / 1e9, 100 * added / plain_bytes, plain_bytes / 1e9,
    )  # fmt: skip
    return added
