"""skinny_gemm on a real GPU: exactness, tolerance, ragged sizes, rows on their own, dependent launches, graphs."""

import pytest
import torch
from torch import Tensor

from sdsie_sglang.kernels.skinny_gemm import gemm, skinny_gemm, skinny_gemm_applies, tiles
from sdsie_sglang.kernels.skinny_gemm.reference import tolerance
from sdsie_sglang.kernels.skinny_gemm.tiles import Tile

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    pytest.mark.skipif(gemm.INTERPRET, reason="the interpreter's cases are in tests/unit"),
]
BF16, FP16 = torch.bfloat16, torch.float16
TILES = {
    "plain": Tile(rows=1, warps=8, vectors=4),
    "deep": Tile(rows=1, warps=4, vectors=4, depth=2, registers=168),
    "two_row_tiles": Tile(rows=2, warps=8, vectors=2),
    "narrow": Tile(rows=1, warps=8, vectors=2, registers=80),
}


def _random(rows: int, columns: int, dtype: torch.dtype = BF16) -> Tensor:
    torch.manual_seed(rows + columns)
    return torch.randn(rows, columns, device="cuda").to(dtype)


def _check(y: Tensor, x: Tensor, weight: Tensor) -> None:
    difference = (y.double() - x.double() @ weight.double().T).abs()
    allowed = tolerance(x, weight)
    assert (difference <= allowed).all(), f"worst {(difference / allowed).max():.2f} times the tolerance"


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("name", TILES)
def test_one_hot_returns_the_weight(name: str, dtype: torch.dtype) -> None:
    weight = _random(200, 1288, dtype)
    x = torch.eye(1288, device="cuda", dtype=dtype)
    y = torch.cat([skinny_gemm(x[i : i + 16], weight, tile=TILES[name]) for i in range(0, 1288, 16)])
    assert torch.equal(y, weight.T)


@pytest.mark.parametrize("name", TILES)
@pytest.mark.parametrize(("n", "k"), [(1000, 1160), (768, 4096), (4096, 2048)])
def test_random(name: str, n: int, k: int) -> None:
    weight, bias = _random(n, k), _random(1, n)[0]
    for m in (1, 2, 6, 8, 9, 16):
        x = _random(m, k)
        _check(skinny_gemm(x, weight, tile=TILES[name]), x, weight)
        with_bias = skinny_gemm(x, weight, bias, tile=TILES[name]).double()
        difference = (with_bias - (x.double() @ weight.double().T + bias.double())).abs()
        assert (difference <= tolerance(x, weight) + torch.finfo(BF16).eps * bias.abs()).all()


@pytest.mark.parametrize("name", TILES)
def test_rows_do_not_depend_on_the_batch(name: str) -> None:
    weight, x = _random(4096, 4096), _random(16, 4096)
    full = skinny_gemm(x, weight, tile=TILES[name])
    for m in (1, 2, 6, 8, 9):
        assert torch.equal(skinny_gemm(x[:m], weight, tile=TILES[name]), full[:m])


def test_measured_shapes_do_not_depend_on_the_batch() -> None:
    shapes = {(n, k) for n, k, _ in tiles.table(torch.cuda.get_device_name(), True)}
    if not shapes:
        pytest.skip("nobody has measured tiles on this GPU")
    for n, k in shapes:
        weight, x = _random(n, k), _random(16, k)
        full = skinny_gemm(x, weight)
        for m in (1, 2, 6, 8, 9):
            assert skinny_gemm_applies(x[:m], weight, batch_invariant=True)
            assert torch.equal(skinny_gemm(x[:m], weight), full[:m]), (n, k, m)


@pytest.mark.parametrize("name", TILES)
def test_a_chain_of_overlapping_launches_in_a_graph_agrees_with_one_at_a_time(name: str) -> None:
    weights = [_random(2048, 2048) / 45 for _ in range(12)]
    static = torch.zeros(6, 2048, device="cuda", dtype=BF16)

    def chain(x: Tensor, alone: bool) -> Tensor:
        for i, weight in enumerate(weights):
            x = skinny_gemm(x, weight, tile=TILES[name])
            if alone:
                torch.cuda.synchronize()
            elif i % 3 == 0:
                x = x + 0
        return x

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        chain(static, False)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        y = chain(static, False)
    for seed in range(20):
        torch.manual_seed(seed)
        static.copy_(torch.randn(6, 2048, device="cuda"))
        before = torch.cuda.memory_allocated()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.cuda.memory_allocated() == before
        assert torch.equal(y, chain(static.clone(), True))


def test_compiled_op_keeps_its_shape() -> None:
    weight, x = _random(256, 512), _random(6, 512).reshape(2, 3, 512)
    y = torch.compile(lambda a: skinny_gemm(a, weight) * 2, fullgraph=True)(x)
    assert torch.equal(y, skinny_gemm(x, weight) * 2)
