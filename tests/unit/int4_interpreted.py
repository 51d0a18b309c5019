"""Kernel numerics on the CPU, run by test_int4_kernels.py in a process of its own with TRITON_INTERPRET=1.

The interpreter executes the kernels' own index arithmetic; only mma, lop3 and the shared-memory sum are emulated, on
the same fragments.
"""

from dataclasses import replace

import pytest
import torch
from triton.runtime import interpreter

from sdsie_sglang.kernels.int4_gemm import dequantize, gemm, int4_gemm, pack, quantize
from sdsie_sglang.kernels.int4_gemm.pack import PackedWeight
from sdsie_sglang.kernels.int4_gemm.reference import tolerance
from sdsie_sglang.kernels.int4_gemm.tiles import DEQUANT, Tile

BF16, FP16 = torch.bfloat16, torch.float16
FRAGMENT = Tile("fragment", rows=2, warps=4)
SPLIT = Tile("fragment", rows=1, warps=4, split_k=2)
FUSED = Tile("fused", block_m=16, block_n=32, warps=4)
STREAM = Tile("fused", block_m=16, block_n=32, warps=4, per_sm=1)  # four blocks: the interpreter says it has four SMs


def _weight(n: int, k: int, group: int, symmetric: bool, dtype: torch.dtype = BF16) -> PackedWeight:
    generator = torch.Generator().manual_seed(0)
    return pack(quantize(torch.randn(n, k, generator=generator) * 0.05, group, symmetric, scale_dtype=dtype))


def _x(m: int, k: int) -> torch.Tensor:
    return torch.randn(m, k, generator=torch.Generator().manual_seed(1)).to(BF16)


def _close(y: torch.Tensor, x: torch.Tensor, weight: PackedWeight, rounded: bool) -> None:
    difference = (y.float() - x.float() @ dequantize(weight).T).abs()
    allowed = tolerance(x, weight, rounded)
    assert (difference <= allowed).all(), f"worst {(difference / allowed).max():.2f} times the tolerance"


@pytest.mark.parametrize("tile", [FRAGMENT, FUSED, STREAM], ids=["fragment", "fused", "stream"])
@pytest.mark.parametrize(
    ("group", "symmetric", "dtype"),
    [(128, True, BF16), (64, False, BF16), (32, True, FP16), (0, False, BF16), (32, False, FP16)],
)
def test_one_hot_returns_the_dequantized_weights(tile: Tile, group: int, symmetric: bool, dtype: torch.dtype) -> None:
    weight = _weight(24, 264, group, symmetric, dtype)
    picks = torch.tensor([0, 1, 31, 62, 127, 200, 256, 263])
    x = torch.zeros(len(picks), 264, dtype=dtype)
    x[torch.arange(len(picks)), picks] = 1
    assert torch.equal(int4_gemm(x, weight, tile=tile), dequantize(weight, dtype)[:, picks].T)


@pytest.mark.parametrize(
    ("m", "n", "k", "tile"),
    [
        (1, 16, 128, FRAGMENT),
        (6, 33, 1000, SPLIT),
        (9, 40, 520, Tile("fragment", rows=1, warps=4, ahead=False)),
        (17, 24, 200, FRAGMENT),
        (20, 50, 200, FUSED),
        (20, 50, 700, Tile("fused", block_m=32, block_n=64, warps=4, split_k=2)),
        (20, 50, 700, STREAM),  # four tiles of twelve chunks, a worker each
        (20, 70, 700, STREAM),  # six tiles, four workers: parts and a whole tile in one worker
        (20, 50, 200, Tile("fused", block_m=64, block_n=64, warps=4, per_sm=1)),  # one tile, a chunk a worker
        (5, 40, 1160, Tile("fused", block_m=16, block_n=64, warps=4, per_sm=3)),  # more parts than are read at a time
        (20, 50, 700, replace(STREAM, tma=True)),
        (5, 40, 264, DEQUANT),
    ],
)
def test_ragged_sizes(m: int, n: int, k: int, tile: Tile) -> None:
    weight, x = _weight(n, k, 64, symmetric=False), _x(m, k)
    _close(int4_gemm(x, weight, tile=tile), x, weight, tile.path != "fragment")


@pytest.mark.parametrize("tile", [FRAGMENT, FUSED, STREAM], ids=["fragment", "fused", "stream"])
def test_bias_is_added_before_rounding(tile: Tile) -> None:
    weight, x = _weight(20, 128, 128, symmetric=True), torch.zeros(2, 128, dtype=BF16)
    bias = torch.randn(20, generator=torch.Generator().manual_seed(2)).to(BF16)
    assert torch.equal(int4_gemm(x, weight, bias, tile=tile), bias.expand(2, -1))


def test_odd_k_through_the_op() -> None:
    weight, x = _weight(20, 131, 32, symmetric=True), _x(3, 131)
    _close(int4_gemm(x, weight), x, weight, False)


def test_rows_do_not_depend_on_the_batch() -> None:
    weight, x = _weight(16, 512, 128, symmetric=True), _x(16, 512)
    full = int4_gemm(x, weight, tile=FRAGMENT)
    for m in (1, 9):
        assert torch.equal(int4_gemm(x[:m], weight, tile=FRAGMENT), full[:m])


@pytest.mark.parametrize("tile", [SPLIT, STREAM], ids=["split", "stream"])
def test_counters_are_left_at_zero_and_a_second_call_agrees(tile: Tile) -> None:
    weight, x = _weight(80, 1024, 128, symmetric=True), _x(4, 1024)
    first = int4_gemm(x, weight, tile=tile)
    assert torch.equal(int4_gemm(x, weight, tile=tile), first)
    assert gemm._arrived
    assert all(not counters.any() for counters in gemm._arrived.values())


@pytest.mark.parametrize("backwards", [False, True], ids=["last part last", "first part last"])
@pytest.mark.parametrize("tile", [STREAM, replace(FUSED, split_k=4)], ids=["stream", "split"])
def test_parts_are_added_in_the_order_of_k(tile: Tile, backwards: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever arrives last: four parts, 2^24, 1, -2^24 and 0, are 0 in this order and 1 in the opposite one."""
    weight = _weight(16, 512, 128, symmetric=True)
    weight.words.fill_(-0x66666667)  # every code 9: with scales of one, weights of one
    weight.scales.fill_(1.0)
    x = torch.zeros(1, 512, dtype=BF16)
    x[0, 0], x[0, 128], x[0, 256] = 2.0**24, 1.0, -(2.0**24)
    builder = interpreter.interpreter_builder
    forwards, visited = builder.set_grid_idx, []

    def visit(column: int, row: int, plane: int) -> None:
        if backwards:
            column, row = builder.grid_dim[0] - 1 - column, builder.grid_dim[1] - 1 - row
        visited.append(max(column, row))
        forwards(column, row, plane)

    monkeypatch.setattr(builder, "set_grid_idx", visit)
    assert not int4_gemm(x, weight, tile=tile).any()
    assert visited[-4:] == ([3, 2, 1, 0] if backwards else [0, 1, 2, 3])


def test_dequantize_kernel_matches_the_reference() -> None:
    for group, symmetric, dtype in ((128, True, BF16), (32, False, FP16), (0, True, BF16)):
        weight = _weight(40, 200, group, symmetric, dtype)
        assert torch.equal(gemm.dequantize_on_gpu(weight, dtype), dequantize(weight, dtype))
