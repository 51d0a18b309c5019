"""What the kernels must compute, in fp32 PyTorch: the path on machines without a GPU, and the tests' reference."""

import torch
from torch import Tensor

from sdsie_sglang.kernels.int4_gemm.pack import PackedWeight, unpack


def dequantize(weight: PackedWeight, dtype: torch.dtype | None = None) -> Tensor:
    """(N, K) in fp32, or rounded once to ``dtype``."""
    w = unpack(weight).dequantize()
    return w if dtype is None else w.to(dtype)


def int4_gemm_reference(x: Tensor, weight: PackedWeight, bias: Tensor | None = None) -> Tensor:
    """x (M, K) times the fp32 weight, rounded once to x's dtype."""
    y = x.float() @ dequantize(weight).T
    if bias is not None:
        y += bias.float()
    return y.to(x.dtype)


def tolerance(x: Tensor, weight: PackedWeight, weights_rounded: bool = False) -> Tensor:
    """(M, N) largest difference from the exact product that rounding explains.

    One rounding of the result to x's dtype, plus fp32 sums: products of x with codes at most 15 wide, scaled, each
    addition losing at most 2^-23 of the running sum of magnitudes. ``weights_rounded``: W was rounded as well.
    """
    w = dequantize(weight).abs()
    unit = torch.finfo(x.dtype).eps / 2
    exact = (x.float() @ dequantize(weight).T).abs()
    magnitudes = x.float().abs() @ w.T
    widest = x.float().abs().sum(-1, keepdim=True) * (15 * weight.scales.float().abs().amax())
    return 1.01 * unit * exact + 2.0**-22 * (magnitudes + widest) + weights_rounded * unit * magnitudes + 1e-30
