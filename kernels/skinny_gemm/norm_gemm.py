"""Products of a decoder layer with the residual addition, RMS norm and SiLU between them: checks and launches.

    y, stream = add_norm_gemm(x, weight, bias, residual, norm_weight)    # x · Wᵀ, the new residual, ready to be read
    z = normed_gemm(stream, weight, bias, eps)                           # W · rmsnorm(y + residual)
    a = normed_gemm(stream, gate_up_weight, None, eps, silu=True)        # silu(gate) · up of the same

bf16 only: activations scaled by the norm's weight but not yet by 1 / rms could leave fp16's range. For at most 16 rows;
a row's results are the same bits whatever the other rows are and however many there are. Without a GPU: the reference.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from sdsie_sglang.kernels.skinny_gemm import gemm, tiles
from sdsie_sglang.kernels.skinny_gemm.reference import add_norm_reference, normed_reference
from sdsie_sglang.kernels.skinny_gemm.tiles import Tile

try:
    import triton  # noqa: F401

    from sdsie_sglang.kernels.skinny_gemm import norm_kernel
except ImportError:  # no triton on this platform: the reference serves
    pass

SUM_COLUMNS = 16  # columns that one sum of squares covers


class NormedStream(NamedTuple):
    """A residual stream s after an addition, as the product that reads its RMS norm wants it."""

    residual: Tensor  # (M, H) bf16: s
    scaled: Tensor  # (M, H) bf16: s times the norm's weight, not divided by its rms
    squares: Tensor  # (M, H / 16) fp32: sums of squares of s before it was rounded


def has_norm_tile(x: Tensor, weight: Tensor) -> bool:
    """Whether a tile was measured here for this weight (N, K) and x's number of rows, so that these products serve."""
    n, k = weight.shape
    return (
        0 < x.shape[0] <= tiles.MAX_M
        and x.is_cuda
        and x.dtype == torch.bfloat16
        and weight.dtype == x.dtype
        and weight.is_contiguous()
        and (n, k, x.shape[0]) in gemm._table(x.device, True)
    )


def add_norm_gemm(
    x: Tensor,  # (M, K)
    weight: Tensor,  # (N, K)
    bias: Tensor | None,  # (N,)
    residual: Tensor,  # (M, N)
    norm_weight: Tensor,  # (N,) of the norm that comes next
    *,
    tile: Tile | None = None,
) -> tuple[Tensor, NormedStream]:
    """y (M, N) = x · Wᵀ + bias, and the stream y + residual; `residual` itself is left as it is.

    Raises ValueError or TypeError for shapes, types and layouts that the kernel does not take.
    """
    gemm._check(x, weight)
    n, k = weight.shape
    m = _rows_of(x)
    for name, tensor, shape in (("residual", residual, (m, n)), ("norm_weight", norm_weight, (n,))):
        _check_dense(name, tensor, shape, x)
    if n % SUM_COLUMNS:
        raise ValueError(f"add_norm_gemm needs a multiple of {SUM_COLUMNS} columns, got {n}")
    if not (x.is_cuda or gemm.INTERPRET):
        y, *stream = add_norm_reference(x, weight, bias, residual, norm_weight)
        return y, NormedStream(*stream)
    y, new_residual, scaled = (x.new_empty(m, n) for _ in range(3))
    squares = x.new_empty(m, n // SUM_COLUMNS, dtype=torch.float32)
    if m == 0:
        return y, NormedStream(new_residual, scaled, squares)
    rows = gemm.aligned_rows(x)
    tile = gemm.tile_for(x, n, k, m, tile)
    norm_kernel.add_norm_kernel[(-(-n // (16 * tile.rows)),)](
        rows.view(torch.int32),
        weight.view(torch.int32),
        y if bias is None else bias,
        residual,
        norm_weight,
        y,
        new_residual,
        scaled,
        squares,
        m,
        n,
        rows.stride(0) // 8,
        **gemm._constants(m, n, k, tile, x.dtype, bias is not None, gemm._capability(x.device) >= 9),
    )
    return y, NormedStream(new_residual, scaled, squares)


def normed_gemm(
    stream: NormedStream,  # of M rows of K
    weight: Tensor,  # (N, K); with silu (2 N, K), gate's rows and then up's
    bias: Tensor | None,  # (N,); none with silu
    eps: float,
    *,
    silu: bool = False,
    tile: Tile | None = None,
) -> Tensor:
    """(M, N) = W · rmsnorm(s) + bias, or silu(gate) · up of that product.

    Raises ValueError or TypeError for shapes, types and layouts that the kernel does not take.
    """
    x = stream.scaled
    gemm._check(x, weight)
    rows_of_weight, k = weight.shape
    m = _rows_of(x)
    n = rows_of_weight // 2 if silu else rows_of_weight
    _check_dense("scaled", x, (m, k), x)
    if stream.squares.shape != (m, k // SUM_COLUMNS) or stream.squares.dtype != torch.float32 or k % 64:
        raise ValueError(f"normed_gemm needs {SUM_COLUMNS} columns a sum and rows of a multiple of 64, got {k}")
    if silu and (bias is not None or rows_of_weight % 32):
        raise ValueError("normed_gemm with silu takes no bias, and gate and up of a multiple of 16 rows")
    if not (x.is_cuda or gemm.INTERPRET):
        return normed_reference(x, stream.squares, weight, bias, eps, silu)
    y = x.new_empty(m, n)
    if m == 0:
        return y
    tile = gemm.tile_for(x, rows_of_weight, k, m, tile)
    constants = gemm._constants(m, n, k, tile, x.dtype, bias is not None, gemm._capability(x.device) >= 9)
    constants["MASK_N"] = constants["MASK_N"] and not silu
    wide = (8 if silu else 16) * tile.rows
    if silu and n % wide:
        raise ValueError(f"no such kernel: {tile} for {n} rows of gate")
    norm_kernel.normed_kernel[(-(-n // wide),)](
        x.view(torch.int32),
        stream.squares,
        weight.view(torch.int32),
        y if bias is None else bias,
        y,
        m,
        n,
        k // 8,
        eps,
        PAIR=n if silu else 0,
        **constants,
    )
    return y


def _rows_of(x: Tensor) -> int:
    if x.dim() != 2 or x.dtype != torch.bfloat16:
        raise TypeError(f"products with a norm take two-dimensional bf16, got {tuple(x.shape)} {x.dtype}")
    return x.shape[0]


def _check_dense(name: str, tensor: Tensor, shape: tuple[int, ...], like: Tensor) -> None:
    if tensor.shape != shape or not tensor.is_contiguous():
        raise ValueError(f"{name} must be contiguous {shape}, got {tuple(tensor.shape)}")
    if tensor.dtype != like.dtype or tensor.device != like.device:
        raise TypeError(f"{name} is {tensor.dtype} on {tensor.device}, the activations {like.dtype} on {like.device}")


def compile_norm_tile(m: int, n: int, k: int, tile: Tile, kind: str) -> None:
    """Compile "add_norm", "normed" or "silu" into Triton's cache without running. n: rows of the weight."""
    dtype, pdl = torch.bfloat16, torch.cuda.get_device_capability()[0] >= 9
    if kind == "add_norm":
        norm_kernel.add_norm_kernel.warmup(
            torch.int32, torch.int32, *[dtype] * 6, torch.float32, m, n, k // 8, grid=(1,),
            **gemm._constants(m, n, k, tile, dtype, False, pdl),
        )  # fmt: skip
        return
    n = n // 2 if kind == "silu" else n
    constants = gemm._constants(m, n, k, tile, dtype, False, pdl)
    constants["MASK_N"] = constants["MASK_N"] and kind != "silu"
    norm_kernel.normed_kernel.warmup(
        torch.int32, torch.float32, torch.int32, dtype, dtype, m, n, k // 8, 1e-5, grid=(1,),
        PAIR=n if kind == "silu" else 0, **constants,
    )  # fmt: skip
