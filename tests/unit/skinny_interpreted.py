"""Kernel numerics on the CPU, run by test_skinny_gemm.py in a process of its own with TRITON_INTERPRET=1.

The interpreter executes the kernel's own index arithmetic; only mma and the shared-memory sum are emulated, on the same
fragments.
"""

import pytest
import torch
from torch import Tensor

from sdsie_sglang.kernels.skinny_gemm import skinny_gemm
from sdsie_sglang.kernels.skinny_gemm.reference import tolerance
from sdsie_sglang.kernels.skinny_gemm.tiles import Tile

BF16, FP16 = torch.bfloat16, torch.float16


def _random(rows: int, columns: int, dtype: torch.dtype = BF16, seed: int = 0) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
def test_one_hot_returns_the_weight(dtype: torch.dtype) -> None:
    weight = _random(40, 520, dtype)
    picks = torch.tensor([0, 1, 7, 8, 31, 33, 127, 128, 255, 256, 400, 519])
    x = torch.zeros(len(picks), 520, dtype=dtype)
    x[torch.arange(len(picks)), picks] = 1
    assert torch.equal(skinny_gemm(x, weight, tile=Tile(rows=2, warps=4, vectors=2)), weight[:, picks].T)


@pytest.mark.parametrize(
    ("m", "n", "k", "tile"),
    [
        (1, 16, 512, Tile(rows=1, warps=4)),
        (6, 33, 1000, Tile(rows=2, warps=4, vectors=2, depth=2)),
        (8, 48, 2048, Tile(rows=1, warps=8, vectors=4)),
        (9, 40, 264, Tile(rows=1, warps=4, vectors=8)),
        (16, 64, 1024, Tile(rows=2, warps=4)),
    ],
)
def test_random(m: int, n: int, k: int, tile: Tile) -> None:
    x, weight = _random(m, k), _random(n, k, seed=1)
    difference = (skinny_gemm(x, weight, tile=tile).float() - x.float() @ weight.float().T).abs()
    assert (difference <= tolerance(x, weight)).all()


def test_bias_is_added_before_rounding() -> None:
    weight, x, bias = _random(20, 128), torch.zeros(2, 128, dtype=BF16), _random(1, 20, seed=2)[0]
    assert torch.equal(skinny_gemm(x, weight, bias), bias.expand(2, -1))


def test_rows_do_not_depend_on_the_batch_nor_on_row_tiles_and_depth() -> None:
    weight, x = _random(32, 1024), _random(16, 1024, seed=1)
    full = skinny_gemm(x, weight, tile=Tile(rows=1, warps=4, vectors=2))
    for m, tile in ((1, Tile(1, 4, 2, 2)), (6, Tile(2, 4, 2)), (9, Tile(2, 4, 2, 2))):
        assert torch.equal(skinny_gemm(x[:m], weight, tile=tile), full[:m])


def test_rows_that_are_not_contiguous() -> None:
    x, weight = _random(3, 300), _random(16, 256, seed=1)
    for view in (x[:, :256], x[:, 3:259], x.T[:256].T):
        got = skinny_gemm(view, weight).float()
        assert ((got - view.float() @ weight.float().T).abs() <= tolerance(view, weight)).all()
