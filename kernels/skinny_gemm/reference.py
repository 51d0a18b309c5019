"""What the kernel must compute, in PyTorch: the path without a GPU, and the tests' reference."""

import torch
from torch import Tensor


def skinny_gemm_reference(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x (M, K) times weight (N, K) transposed in fp32, plus bias (N,), rounded once to x's dtype."""
    y = x.float() @ weight.float().T
    if bias is not None:
        y += bias.float()
    return y.to(x.dtype)


def tolerance(x: Tensor, weight: Tensor) -> Tensor:
    """(M, N) largest difference from the exact product that rounding explains: one rounding of the result to x's
    dtype, and fp32 additions that each lose at most 2^-23 of the running sum of magnitudes (tensor cores truncate)."""
    exact = (x.double() @ weight.double().T).abs()
    magnitudes = x.double().abs() @ weight.double().abs().T
    return (1.01 * torch.finfo(x.dtype).eps / 2 * exact + 2.0**-20 * magnitudes + 1e-30).float()
