"""The call: when it applies, checks, launch. Also ``torch.ops.sdsie.skinny_gemm``."""

from functools import cache
from typing import Any

import torch
from torch import Tensor

from sdsie_sglang.kernels.skinny_gemm import tiles
from sdsie_sglang.kernels.skinny_gemm.reference import skinny_gemm_reference
from sdsie_sglang.kernels.skinny_gemm.tiles import Tile

try:
    import triton

    from sdsie_sglang.kernels.skinny_gemm import kernel

    INTERPRET = bool(triton.knobs.runtime.interpret)
except ImportError:  # no triton on this platform: the reference serves
    triton = None
    INTERPRET = False

DTYPES = (torch.bfloat16, torch.float16)
GUESS = Tile()


def skinny_gemm(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, tile: Tile | None = None) -> Tensor:
    """y (…, N) = x (…, K) · weight (N, K)ᵀ + bias for at most 16 rows: fp32 sums, one rounding to x's dtype.

    A row's result is the same bits whatever the other rows are and however many there are.
    """
    if tile is not None:
        return _run(x, weight, bias, tile)
    y: Tensor = torch.ops.sdsie.skinny_gemm(x, weight, bias)
    return y


def skinny_gemm_applies(x: Tensor, weight: Tensor, batch_invariant: bool = False) -> bool:
    """Whether a measured tile says that this product is faster here than with cuBLAS. A few dictionary look-ups.

    ``batch_invariant``: also where it is slower, so that every M <= 16 of a measured shape runs this kernel and a row's
    bits don't depend on M.
    """
    k = x.shape[-1]
    m = x.numel() // k if k else 0
    return (
        0 < m <= tiles.MAX_M
        and x.is_cuda
        and x.dtype in DTYPES
        and weight.dtype == x.dtype
        and weight.shape[-1] == k
        and weight.is_contiguous()
        and (weight.shape[0], k, m) in _table(x.device, batch_invariant)
    )


@torch.library.custom_op("sdsie::skinny_gemm", mutates_args=())
def _op(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return _run(x, weight, bias, None)


@_op.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


@cache
def _table(device: torch.device, batch_invariant: bool) -> dict[tuple[int, int, int], Tile]:
    return tiles.table(torch.cuda.get_device_name(device), batch_invariant)


@cache
def _capability(device: torch.device) -> int:
    """Major compute capability; 0 in the interpreter."""
    return torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else 0


def _check(x: Tensor, weight: Tensor) -> None:
    n, k = weight.shape
    if x.dtype not in DTYPES or weight.dtype != x.dtype:
        raise TypeError(f"skinny_gemm takes bf16 or fp16, both alike, got {x.dtype} and {weight.dtype}")
    if x.shape[-1] != k:
        raise ValueError(f"x has {x.shape[-1]} columns, the weight {k}")
    if x.device != weight.device:
        raise ValueError(f"x is on {x.device}, the weight on {weight.device}")
    if x.numel() > tiles.MAX_M * k:
        raise ValueError(f"skinny_gemm takes at most {tiles.MAX_M} rows, got {x.numel() // k}")
    if k % 8 or not weight.is_contiguous() or weight.data_ptr() % 16 or n * k >= 2**32:
        raise ValueError(f"skinny_gemm needs a contiguous weight with rows of a multiple of 8, got {n} x {k}")


def aligned_rows(rows: Tensor) -> Tensor:
    """The same (M, K) with 16-byte rows; rarely a copy."""
    if rows.stride(1) != 1 or rows.stride(0) % 8 or rows.data_ptr() % 16:
        return rows.clone(memory_format=torch.contiguous_format)
    return rows


def tile_for(x: Tensor, n: int, k: int, m: int, tile: Tile | None) -> Tile:
    """The tile asked for, or the measured one, or a guess. Raises ValueError for one that no kernel has."""
    if tile is None:
        tile = (_table(x.device, True).get((n, k, m)) if x.is_cuda else None) or GUESS
    if not tiles.fits(tile, m, k):
        raise ValueError(f"no such kernel: {tile} for {m} rows of {k}")
    return tile


def _run(x: Tensor, weight: Tensor, bias: Tensor | None, tile: Tile | None) -> Tensor:
    _check(x, weight)
    n, k = weight.shape
    rows = x.reshape(-1, k)
    m = rows.shape[0]
    y = x.new_empty((*x.shape[:-1], n))
    if m == 0:
        return y
    if not (x.is_cuda or INTERPRET):
        return skinny_gemm_reference(rows, weight, bias).reshape(y.shape)
    rows = aligned_rows(rows)
    tile = tile_for(x, n, k, m, tile)
    capability = _capability(x.device)
    blocks = -(-n // (16 * tile.rows))
    kernel.skinny_kernel[(blocks,)](
        rows.view(torch.int32),
        weight.view(torch.int32),
        y if bias is None else bias,
        y,
        m,
        n,
        rows.stride(0) // 8,
        **_constants(m, n, k, tile, x.dtype, bias is not None, capability >= 9),
    )
    return y


def _constants(m: int, n: int, k: int, tile: Tile, dtype: torch.dtype, has_bias: bool, pdl: bool) -> dict[str, Any]:
    """Compile-time arguments and options."""
    chosen: dict[str, Any] = {
        "K": k,
        "MASK_N": n % (16 * tile.rows) != 0,
        "R": tile.rows,
        "C": tiles.columns(m),
        "W": tile.warps,
        "V": tile.vectors,
        "DEPTH": tile.depth,
        "HAS_BIAS": has_bias,
        "PDL": pdl,
        "IS_BF16": dtype == torch.bfloat16,
        "INTERPRET": INTERPRET,
        "num_warps": tile.warps,
    }
    if pdl:
        chosen["launch_pdl"] = True
    if not INTERPRET:
        chosen["maxnreg"] = tile.registers
    return chosen


def compile_tile(m: int, n: int, k: int, tile: Tile, dtype: torch.dtype = torch.bfloat16) -> None:
    """Compile into Triton's cache without running, so that processes can share the work before a tuning."""
    pdl = torch.cuda.get_device_capability()[0] >= 9
    kernel.skinny_kernel.warmup(
        torch.int32, torch.int32, dtype, dtype, m, n, k // 8, grid=(1,), **_constants(m, n, k, tile, dtype, False, pdl)
    )
