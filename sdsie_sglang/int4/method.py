"""SGLang linear methods: INT4 alone, or both precisions in one layer."""

from typing import Any

import torch
from sglang.srt.layers.quantization.base_config import LinearMethodBase
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod
from sglang.srt.utils import set_weight_attrs
from torch import Tensor
from torch.nn import Parameter

from sdsie_sglang.int4.calibration import CalibratedWeight, calibrate, scale_dtype
from sdsie_sglang.int4.checkpoint import unfold_codes
from sdsie_sglang.int4.checkpoint_format import CODES, FACTORS, SCALES, ZEROS
from sdsie_sglang.int4.precision import count_int4_product, is_int4
from sdsie_sglang.int4.settings import CALIBRATIONS
from sdsie_sglang.int4.weight import Int4Weight
from sdsie_sglang.kernels.int4_gemm import QuantizedWeight

ATTRIBUTE = "sdsie_int4"


class Int4Unsupported(ValueError):
    """A layer that cannot be INT4 as asked. One line, which names the layer and what to do."""


def check_groups(name: str, local_k: int, whole_k: int, group: int) -> None:
    """Raises Int4Unsupported where a tensor-parallel shard's edge would cut a group."""
    if group and local_k != whole_k and local_k % group:
        raise Int4Unsupported(
            f"INT4 groups of {group} do not divide the {local_k} inputs that a rank has of {name} ({whole_k} in all): "
            f"use a smaller group or --tp-size, or exclude the layer"
        )


def quantised(weight: Tensor, calibration: str) -> Int4Weight:
    """A layer's loaded weight [N, K] in INT4; the CPU engine's packed form is unpacked first."""
    plain = weight.to_dense() if weight.is_mkldnn else weight
    return Int4Weight(calibrate(plain, calibration, dtype=plain.dtype), plain.dtype, UnquantizedLinearMethod())


class Int4LinearMethod(LinearMethodBase):
    """INT4 alone, quantised from full precision after SGLang has loaded, sharded and fused it."""

    def __init__(self, name: str, calibration: str) -> None:
        self._name = name
        self._calibration = calibration
        self._plain = UnquantizedLinearMethod()

    def create_weights(
        self,
        layer: torch.nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        check_groups(self._name, input_size_per_partition, input_size, CALIBRATIONS[self._calibration].group)
        self._plain.create_weights(
            layer,
            input_size_per_partition,
            output_partition_sizes,
            input_size,
            output_size,
            params_dtype,
            **extra_weight_attrs,
        )

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        setattr(layer, ATTRIBUTE, quantised(layer.weight.data, self._calibration))
        # An empty tensor and not None: SGLang asks heads and layers whether they have a weight at all.
        layer.weight = Parameter(layer.weight.data.new_empty(0), requires_grad=False)

    def apply(self, layer: torch.nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return getattr(layer, ATTRIBUTE).multiply(x, bias)


class SavedInt4LinearMethod(LinearMethodBase):
    """INT4 alone, from a checkpoint that `sdsie_sglang.int4.quantize` wrote."""

    def __init__(self, name: str, calibration: str) -> None:
        self._name = name
        self._how = CALIBRATIONS[calibration]

    def create_weights(
        self,
        layer: torch.nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        how, n, k = self._how, sum(output_partition_sizes), input_size_per_partition
        check_groups(self._name, k, input_size, how.group)
        if k % 2:
            raise Int4Unsupported(f"{self._name} has an odd number of inputs on a rank ({k}): exclude the layer")
        groups = -(-k // how.group) if how.group else 1
        table = {"output_dim": 0, **({"input_dim": 1} if how.group else {})}
        scales = scale_dtype(params_dtype)
        # SGLang says nothing of a tensor that a checkpoint lacks: what no file fills stays no number.
        self._add(layer, CODES, torch.zeros(n, k // 2, dtype=torch.uint8), {"output_dim": 0, "input_dim": 1})
        self._add(layer, SCALES, torch.full((n, groups), torch.nan, dtype=scales), table)
        if not how.symmetric:
            self._add(layer, ZEROS, torch.full((n, groups), torch.nan, dtype=scales), table)
        if how.needs_text:
            self._add(layer, FACTORS, torch.full((k,), torch.nan, dtype=torch.float32), {"input_dim": 0})
        for name in self._names():
            set_weight_attrs(getattr(layer, name), extra_weight_attrs)
        layer.params_dtype = params_dtype

    def _names(self) -> list[str]:
        return [CODES, SCALES, *([] if self._how.symmetric else [ZEROS]), *([FACTORS] if self._how.needs_text else [])]

    @staticmethod
    def _add(layer: torch.nn.Module, name: str, values: Tensor, attributes: dict[str, int]) -> None:
        parameter = Parameter(values, requires_grad=False)
        set_weight_attrs(parameter, attributes)
        layer.register_parameter(name, parameter)

    def _check_filled(self, layer: torch.nn.Module) -> None:
        """Raises Int4Unsupported where the checkpoint lacked a tensor or a part of a fused one."""
        unfilled = [name for name in self._names() if name != CODES and not getattr(layer, name).isfinite().all()]
        # Code 0 is -8, which no symmetric calibration gives a whole row; rows that SGLang pads with have no scale.
        no_codes = (getattr(layer, CODES).data == 0).all(1) & (getattr(layer, SCALES).data != 0).any(1)
        if self._how.symmetric and no_codes.any():
            unfilled.append(CODES)
        if unfilled:
            raise Int4Unsupported(f"the checkpoint lacks {self._name}.{unfilled[0]}, or a part of it: write it again")

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        how = self._how
        self._check_filled(layer)
        codes = QuantizedWeight(
            q=unfold_codes(getattr(layer, CODES).data),
            scales=getattr(layer, SCALES).data,
            zeros=None if how.symmetric else getattr(layer, ZEROS).data,
            group=how.group,
        )
        factors = getattr(layer, FACTORS).data if how.needs_text else None
        weight = Int4Weight(CalibratedWeight(codes, factors), layer.params_dtype, UnquantizedLinearMethod())
        setattr(layer, ATTRIBUTE, weight)
        for name in self._names():
            delattr(layer, name)
        layer.weight = Parameter(weight.packed.scales.new_empty(0), requires_grad=False)

    def apply(self, layer: torch.nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return getattr(layer, ATTRIBUTE).multiply(x, bias)


class DualLinearMethod(LinearMethodBase):
    """Both weights in one layer: full precision by SGLang's own method, INT4 while `running_int4()`.

    Args:
        plain: the method that the layer was loaded with.
    """

    def __init__(self, plain: Any, calibration: str) -> None:
        self._plain = plain
        self._calibration = calibration

    def quantise(self, layer: torch.nn.Module) -> None:
        """Makes the INT4 weight from the loaded one, in the memory of an earlier one if there is one."""
        new = quantised(layer.weight.data, self._calibration)
        old = getattr(layer, ATTRIBUTE, None)
        setattr(layer, ATTRIBUTE, new) if old is None else old.take(new)

    def create_weights(self, layer: torch.nn.Module, *weight_args: Any, **extra_weight_attrs: Any) -> None:
        self._plain.create_weights(layer, *weight_args, **extra_weight_attrs)

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Called again when SGLang updates the weights of a running server."""
        self._plain.process_weights_after_loading(layer)
        self.quantise(layer)

    def apply(self, layer: torch.nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        if is_int4():
            count_int4_product()
            return getattr(layer, ATTRIBUTE).multiply(x, bias)
        return self._plain.apply(layer, x, bias)
