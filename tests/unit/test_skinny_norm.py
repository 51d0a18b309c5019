"""Products with a norm without a GPU: the interpreter, the reference against separate kernels, what they refuse."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from sdsie_sglang.kernels.skinny_gemm import NormedStream, add_norm_gemm, has_norm_tile, normed_gemm

BF16, EPS = torch.bfloat16, 1e-5


def test_kernels_in_the_interpreter() -> None:
    pytest.importorskip("triton")
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, Path(__file__).with_name("skinny_norm_interpreted.py")],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


def _random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(BF16)


def _error(got: Tensor, exact: Tensor) -> float:
    return ((got.double() - exact).norm() / exact.norm()).item()


@pytest.mark.parametrize("silu", [False, True])
def test_errors_are_those_of_separate_kernels(silu: bool) -> None:
    """Against float64, with the roundings of a norm kernel (and an activation kernel) of its own beside it."""
    x, w1, residual = _random(16, 512), _random(512, 512, seed=1) / 22, 4 * _random(16, 512, seed=2)
    norm_weight, w2 = _random(512, seed=3), _random(1024, 512, seed=4) / 22
    y, stream = add_norm_gemm(x, w1, None, residual, norm_weight)
    got = normed_gemm(stream, w2, None, EPS, silu=silu)

    s = y.double() + residual.double()
    exact_norm = s * torch.rsqrt(s.square().mean(1, keepdim=True) + EPS) * norm_weight.double()
    exact = exact_norm @ w2.double().T
    separate = (exact_norm.to(BF16).float() @ w2.float().T).to(BF16)
    if silu:
        gate, up = exact.chunk(2, dim=1)
        exact = gate * torch.sigmoid(gate) * up
        gate, up = separate.float().chunk(2, dim=1)
        separate = (gate / (1 + torch.exp(-gate)) * up).to(BF16)
    assert 0 < _error(got, exact) < 1.1 * _error(separate, exact)


def test_empty_and_not_here() -> None:
    weight = _random(64, 64)
    assert not has_norm_tile(_random(1, 64), weight), "no measured tile without a GPU"


@pytest.mark.parametrize(
    ("x", "residual", "error", "words"),
    [
        (torch.zeros(17, 64, dtype=BF16), torch.zeros(17, 32, dtype=BF16), ValueError, "at most 16 rows"),
        (torch.zeros(2, 64, dtype=torch.half), torch.zeros(2, 32, dtype=torch.half), TypeError, "bf16"),
        (torch.zeros(2, 64, dtype=BF16), torch.zeros(3, 32, dtype=BF16), ValueError, "residual must be"),
        (torch.zeros(2, 64, dtype=BF16), torch.zeros(32, 2, dtype=BF16).T, ValueError, "residual must be contiguous"),
        (torch.zeros(2, 64, dtype=BF16), torch.zeros(2, 32), TypeError, "float32"),
    ],
)
def test_add_norm_refuses(x: Tensor, residual: Tensor, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        add_norm_gemm(x, torch.zeros(32, 64, dtype=x.dtype), None, residual, torch.zeros(32, dtype=x.dtype))


def test_normed_refuses() -> None:
    zeros = torch.zeros(2, 64, dtype=BF16)
    with pytest.raises(ValueError, match="columns a sum"):
        normed_gemm(NormedStream(zeros, zeros, torch.zeros(2, 3)), torch.zeros(32, 64, dtype=BF16), None, EPS)
    stream = NormedStream(zeros, zeros, torch.zeros(2, 4))
    with pytest.raises(ValueError, match="multiple of 16 rows"):
        normed_gemm(stream, torch.zeros(40, 64, dtype=BF16), None, EPS, silu=True)
