"""Kernel numerics on the CPU, run by test_int4_kernels.py in a process of its own with TRITON_INTERPRET=1.

The interpreter executes the kernels' own index arithmetic; only mma and lop3 are emulated, on the same fragments.
"""

import pytest
import torch

from sdsie_sglang.kernels.int4_gemm import dequantize, gemm, int4_gemm, pack, quantize
from sdsie_sglang.kernels.int4_gemm.reference import tolerance
from sdsie_sglang.kernels.int4_gemm.tiles import DEQUANT, Tile

BF16, FP16 = torch.bfloat16, torch.float16
FRAGMENT = Tile("fragment", rows=2, warps=4)
SPLIT = Tile("fragment", rows=1, warps=4, split_k=2)
NOT_CENTRED = Tile("fragment", rows=1, warps=4, centre=False, ahead=False)
FUSED = Tile("fused", block_m=64, block_n=32, warps=4)


def _weight(n: int, k: int, group: int, symmetric: bool, dtype: torch.dtype = BF16, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    return pack(quantize(torch.randn(n, k, generator=generator) * 0.05, group, symmetric, scale_dtype=dtype))


def _close(y: torch.Tensor, x: torch.Tensor, weight, rounded: bool = False, bias: torch.Tensor | None = None) -> None:
    exact = x.float() @ dequantize(weight).T + (0 if bias is None else bias.float())
    allowed = tolerance(x, weight, x.dtype, rounded)
    if bias is not None:
        allowed += torch.finfo(x.dtype).eps / 2 * bias.float().abs()
    difference = (y.float() - exact).abs()
    assert (difference <= allowed).all(), f"worst {(difference / allowed).max():.2f} times the tolerance"


@pytest.mark.parametrize(
    "tile", [FRAGMENT, SPLIT, NOT_CENTRED, FUSED], ids=["fragment", "split", "not centred", "fused"]
)
@pytest.mark.parametrize(
    ("group", "symmetric", "dtype"),
    [
        (128, True, BF16),
        (64, False, BF16),
        (32, True, BF16),
        (0, False, BF16),
        (128, False, FP16),
        (32, False, FP16),
    ],
)
def test_one_hot_returns_the_dequantized_weights(tile: Tile, group: int, symmetric: bool, dtype: torch.dtype) -> None:
    weight = _weight(24, 264, group, symmetric, dtype)
    picks = torch.tensor([0, 1, 9, 31, 32, 63, 64, 127, 128, 200, 255, 256, 263])
    x = torch.zeros(len(picks), 264, dtype=dtype)
    x[torch.arange(len(picks)), picks] = 1
    assert torch.equal(int4_gemm(x, weight, tile=tile), dequantize(weight, dtype)[:, picks].T)


@pytest.mark.parametrize(
    ("m", "n", "k", "tile"),
    [
        (1, 16, 128, Tile("fragment", rows=1, warps=4)),
        (6, 48, 512, FRAGMENT),
        (6, 48, 512, SPLIT),
        (8, 33, 384, NOT_CENTRED),
        (13, 40, 520, SPLIT),
        (16, 17, 136, FRAGMENT),
        (17, 40, 264, FRAGMENT),
        (70, 50, 200, FUSED),
        (20, 50, 700, Tile("fused", block_m=32, block_n=64, warps=4, split_k=2)),
        (5, 40, 264, DEQUANT),
    ],
)
def test_ragged_sizes(m: int, n: int, k: int, tile: Tile) -> None:
    weight = _weight(n, k, 64, symmetric=False)
    x = torch.randn(m, k, generator=torch.Generator().manual_seed(1)).to(BF16)
    bias = torch.randn(n, generator=torch.Generator().manual_seed(2)).to(BF16)
    _close(int4_gemm(x, weight, tile=tile), x, weight, tile.path != "fragment")
    _close(int4_gemm(x, weight, bias, tile=tile), x, weight, tile.path != "fragment", bias)


@pytest.mark.parametrize("k", [131, 250])
def test_odd_k(k: int) -> None:
    weight = _weight(20, k, 32, symmetric=True)
    x = torch.randn(3, k, generator=torch.Generator().manual_seed(3)).to(BF16)
    _close(int4_gemm(x, weight), x, weight)


def test_rows_do_not_depend_on_the_batch() -> None:
    weight = _weight(32, 512, 128, symmetric=True)
    x = torch.randn(16, 512, generator=torch.Generator().manual_seed(4)).to(BF16)
    full = int4_gemm(x, weight, tile=SPLIT)
    for m in (1, 6, 9):
        assert torch.equal(int4_gemm(x[:m], weight, tile=SPLIT), full[:m])


def test_counters_are_left_at_zero_and_a_second_call_agrees() -> None:
    weight = _weight(32, 512, 128, symmetric=True)
    x = torch.randn(4, 512, generator=torch.Generator().manual_seed(5)).to(BF16)
    first = int4_gemm(x, weight, tile=SPLIT)
    assert torch.equal(int4_gemm(x, weight, tile=SPLIT), first)
    assert all(not counters.any() for counters in gemm._arrived.values())


def test_dequantize_kernel_matches_the_reference() -> None:
    for group, symmetric, dtype in ((128, True, BF16), (32, False, FP16), (0, True, BF16)):
        weight = _weight(40, 200, group, symmetric, dtype)
        assert torch.equal(gemm.dequantize_on_gpu(weight, dtype), dequantize(weight, dtype))
