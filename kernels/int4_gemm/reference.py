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


def tolerance(x: Tensor, weight: PackedWeight, dtype: torch.dtype, weights_rounded: bool = False) -> Tensor:
    """(M, N) largest difference from the reference that rounding explains.

    One rounding of the result, plus fp32 sums: the product uses codes offset by 136 (bf16) or 1032 (fp16), each of K
    additions losing at most 2^-23 of the running sum. ``weights_rounded`` allows for a path that rounds W to ``dtype``.
    """
    w = dequantize(weight)
    eps = torch.finfo(dtype).eps
    exact = (x.float() @ w.T).abs()
    sums = x.float().abs() @ (w.abs() + 0.0).T
    scale = w.abs().amax() / 7 if weight.k else 0.0
    offset = (136.0 if dtype == torch.bfloat16 else 1032.0) * scale * x.float().abs().sum(-1, keepdim=True)
    fp32 = 2.0**-22 * (sums + offset)
    return eps / 2 * exact * 1.01 + fp32 + (eps / 2 * sums if weights_rounded else 0) + 1e-30
