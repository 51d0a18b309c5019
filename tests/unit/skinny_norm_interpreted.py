"""Products with a norm in Triton's interpreter, run by test_skinny_norm.py in a process of its own."""

import pytest
import torch
from torch import Tensor

from sdsie_sglang.kernels.skinny_gemm import NormedStream, add_norm_gemm, normed_gemm
from sdsie_sglang.kernels.skinny_gemm.reference import add_norm_reference, normed_reference, tolerance
from sdsie_sglang.kernels.skinny_gemm.tiles import Tile

BF16, EPS = torch.bfloat16, 1e-5
TILES = [Tile(1, 4, 2), Tile(2, 4, 2, 2)]


def _random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(BF16)


def _stream(m: int, hidden: int) -> NormedStream:
    x, weight = _random(m, 256), _random(hidden, 256, seed=1) / 16
    return add_norm_gemm(x, weight, None, _random(m, hidden, seed=2), _random(hidden, seed=3), tile=TILES[0])[1]


@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("with_bias", [False, True], ids=["no bias", "bias"])
def test_addition_and_scaling_are_exact_given_the_product(tile: Tile, with_bias: bool) -> None:
    m, n, k = 5, 48, 256
    x, weight, residual, norm_weight = _random(m, k), _random(n, k, seed=1) / 16, _random(m, n), _random(n, seed=3)
    bias = _random(n, seed=4) if with_bias else None
    y, stream = add_norm_gemm(x, weight, bias, residual, norm_weight, tile=tile)
    expected, *_ = add_norm_reference(x, weight, bias, residual, norm_weight)
    slack = tolerance(x, weight) + (0 if bias is None else torch.finfo(BF16).eps * bias.abs())
    assert ((y.float() - expected.float()).abs() <= 2 * slack).all()
    s = y.float() + residual.float()
    assert torch.equal(stream.residual, s.to(BF16))
    assert torch.equal(stream.scaled, (s * norm_weight.float()).to(BF16))
    torch.testing.assert_close(stream.squares, s.square().unflatten(1, (-1, 16)).sum(-1), rtol=1e-6, atol=0)


@pytest.mark.parametrize("tile", TILES, ids=str)
def test_product_of_the_norm(tile: Tile) -> None:
    stream, weight, bias = _stream(6, 256), _random(40, 256, seed=5) / 16, _random(40, seed=6)
    got = normed_gemm(stream, weight, bias, EPS, tile=tile)
    expected = normed_reference(stream.scaled, stream.squares, weight, bias, EPS, False)
    one_over_rms = torch.rsqrt(stream.squares.sum(1, keepdim=True) / 256 + EPS)
    slack = one_over_rms * tolerance(stream.scaled, weight) + torch.finfo(BF16).eps * (expected.float().abs() + 1e-6)
    assert ((got.float() - expected.float()).abs() <= slack).all()


@pytest.mark.parametrize("tile", TILES, ids=str)
def test_gate_and_up_meet_in_one_lane(tile: Tile) -> None:
    stream, weight = _stream(9, 256), _random(96, 256, seed=5) / 16
    got = normed_gemm(stream, weight, None, EPS, silu=True, tile=tile).float()
    expected = normed_reference(stream.scaled, stream.squares, weight, None, EPS, True).float()
    assert got.shape == (9, 48)
    # fp32 sums in another order may round gate or up to a neighbour, which moves the result by that much
    assert ((got - expected).abs() <= 4 * torch.finfo(BF16).eps * expected.abs() + 1e-3).all()
    assert (got != expected).float().mean() < 0.05


def test_rows_do_not_depend_on_the_batch_nor_on_row_tiles_and_depth() -> None:
    full, weight = _stream(16, 256), _random(64, 256, seed=5) / 16
    whole = [normed_gemm(full, weight, None, EPS, silu=silu, tile=TILES[0]) for silu in (False, True)]
    x, residual, norm_weight = _random(16, 256), _random(16, 64, seed=7), _random(64, seed=8)
    y, stream = add_norm_gemm(x, weight, None, residual, norm_weight, tile=TILES[0])
    for m in (1, 9):
        part = NormedStream(*(tensor[:m].contiguous() for tensor in full))
        for silu, expected in zip((False, True), whole, strict=True):
            assert torch.equal(normed_gemm(part, weight, None, EPS, silu=silu, tile=TILES[1]), expected[:m])
        y_part, some = add_norm_gemm(x[:m], weight, None, residual[:m].contiguous(), norm_weight, tile=TILES[1])
        assert torch.equal(y_part, y[:m])
        assert all(torch.equal(a, b[:m]) for a, b in zip(some, stream, strict=True))
