"""One layer's INT4 weight on its device, and the product by it."""

import torch
from torch import Tensor

from sdsie_sglang.int4.calibration import CalibratedWeight
from sdsie_sglang.kernels.int4_gemm import PackedWeight, dequantize, int4_gemm, pack

KERNEL_DTYPES = (torch.bfloat16, torch.float16)
MIN_CAPABILITY = 80


class Int4Weight:
    """Multiplies by the packed weight on a GPU. Elsewhere by the dequantised one, through the layer's own
    full-precision method, so that SGLang's CPU engine treats it as any other weight.

    Args:
        method: SGLang's unquantised linear method.
        dtype: of the activations.
    """

    def __init__(self, weight: CalibratedWeight, dtype: torch.dtype, method: object) -> None:
        self.packed: PackedWeight = pack(weight.codes)
        self.input_factors = None if weight.input_factors is None else weight.input_factors.to(dtype)
        self._method = method
        self._reference: torch.nn.Module | None = None
        if not self.packed.words.is_cuda:
            self._reference = torch.nn.Module()
            self._reference.weight = torch.nn.Parameter(dequantize(self.packed, dtype), requires_grad=False)
            method.process_weights_after_loading(self._reference)  # type: ignore[attr-defined]

    @property
    def nbytes(self) -> int:
        """Of what the kernel reads: packed codes, scales, zeros and input factors."""
        factors = self.input_factors
        return self.packed.nbytes + (0 if factors is None else factors.numel() * factors.element_size())

    def multiply(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """y [..., N] = x [..., K] · Wᵀ + bias."""
        if self.input_factors is not None:
            x = x * self.input_factors
        if self._reference is not None:
            return self._method.apply(self._reference, x, bias)  # type: ignore[attr-defined]
        return int4_gemm(x, self.packed, bias)

    def take(self, other: "Int4Weight") -> None:
        """Puts another weight of the same shape into this one's memory, which captured graphs read."""
        for mine, new in (
            (self.packed.words, other.packed.words),
            (self.packed.scales, other.packed.scales),
            (self.packed.zeros, other.packed.zeros),
            (self.input_factors, other.input_factors),
        ):
            if mine is not None and new is not None:
                mine.copy_(new)
        self._reference = other._reference
