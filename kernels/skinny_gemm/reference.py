"""What the kernel must compute, in PyTorch: the path without a GPU, and the tests' reference."""

import torch
from torch import Tensor


def skinny_gemm_reference(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x (M, K) times weight (N, K) transposed in fp32, plus bias (N,), rounded once to x's dtype."""
    y = x.float() @ weight.float().T
    if bias is not None:
        y += bias.float()
    return y.to(x.dtype)


def add_norm_reference(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor, norm_weight: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """y (M, N), and of s = y + residual: s rounded, s · norm_weight rounded, sums of squares of 16 columns each."""
    y = skinny_gemm_reference(x, weight, bias)
    s = y.float() + residual.float()
    squares = s.square().unflatten(1, (-1, 16)).sum(-1)
    return y, s.to(x.dtype), (s * norm_weight.float()).to(x.dtype), squares


def normed_reference(
    scaled: Tensor, squares: Tensor, weight: Tensor, bias: Tensor | None, eps: float, silu: bool
) -> Tensor:
    """The product of the norm whose parts `add_norm_reference` made; with silu, of gate and up (2 N, K)."""
    one_over_rms = torch.rsqrt(squares.sum(1, keepdim=True) / scaled.shape[1] + eps)
    y = (scaled.float() @ weight.float().T) * one_over_rms
    if silu:
        gate, up = y.to(scaled.dtype).float().chunk(2, dim=1)
        y = gate / (1 + torch.exp(-gate)) * up
    if bias is not None:
        y += bias.float()
    return y.to(scaled.dtype)


def tolerance(x: Tensor, weight: Tensor) -> Tensor:
    """(M, N) largest difference from the exact product that rounding explains: one rounding of the result to x's
    dtype, and fp32 additions that each lose at most 2^-23 of the running sum of magnitudes (tensor cores truncate)."""
    exact = (x.double() @ weight.double().T).abs()
    magnitudes = x.double().abs() @ weight.double().abs().T
    return (1.01 * torch.finfo(x.dtype).eps / 2 * exact + 2.0**-20 * magnitudes + 1e-30).float()
