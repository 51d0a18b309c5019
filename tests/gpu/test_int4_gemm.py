"""INT4 GEMM on a real GPU: exactness, tolerance, ragged sizes, repeatability, CUDA graphs."""

import pytest
import torch

from sdsie_sglang.kernels.int4_gemm import dequantize, gemm, int4_gemm, pack, quantize
from sdsie_sglang.kernels.int4_gemm.pack import PackedWeight
from sdsie_sglang.kernels.int4_gemm.reference import tolerance
from sdsie_sglang.kernels.int4_gemm.tiles import DEQUANT, STREAM_TILES, Tile, fits

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    pytest.mark.skipif(gemm.INTERPRET, reason="the interpreter's cases are in tests/unit"),
]
BF16, FP16 = torch.bfloat16, torch.float16
TILES = {
    "fragment": Tile("fragment", rows=2, warps=4),
    "one_row_tile": Tile("fragment", rows=1, warps=16),
    "split": Tile("fragment", rows=2, warps=8, split_k=2),
    "not_ahead": Tile("fragment", rows=2, warps=4, ahead=False),
    "fused": Tile("fused", block_m=64, block_n=64, warps=4),
    "fused_split": Tile("fused", block_m=32, block_n=128, warps=8, split_k=3),
    "stream": Tile("fused", block_m=64, block_n=64, warps=4, per_sm=2),
    "stream_tma": Tile("fused", block_m=32, block_n=128, warps=8, per_sm=1, tma=True),
    "dequant": DEQUANT,
}
FUSED_TILES = [
    Tile("fused", warps=4, block_m=256, block_n=64, stages=3),
    Tile("fused", warps=4, block_m=128, block_n=64, stages=4),
    Tile("fused", warps=8, block_m=128, block_n=128, stages=3),
    *STREAM_TILES,
]


def _weight(n: int, k: int, group: int, symmetric: bool, dtype: torch.dtype = BF16) -> PackedWeight:
    torch.manual_seed(n + k)
    return pack(quantize(torch.randn(n, k, device="cuda") * 0.05, group, symmetric, scale_dtype=dtype))


def _check(y: torch.Tensor, x: torch.Tensor, weight: PackedWeight, rounded: bool) -> None:
    exact = (x.double() @ dequantize(weight).double().T).float()
    allowed = tolerance(x, weight, rounded)
    difference = (y.float() - exact).abs()
    assert (difference <= allowed).all(), f"worst {(difference / allowed).max():.2f} times the tolerance"


# Each case is a kernel to compile. How codes become fp16 is the same in every form of a way.
ONE_HOT = [(name, BF16) for name in TILES] + [(name, FP16) for name in ("fragment", "fused", "stream", "dequant")]


@pytest.mark.parametrize(("name", "dtype"), ONE_HOT, ids=[f"{name}-{str(dtype)[6:]}" for name, dtype in ONE_HOT])
@pytest.mark.parametrize("symmetric", [True, False], ids=["sym", "asym"])
@pytest.mark.parametrize("group", [0, 32, 64, 128])
def test_one_hot_returns_the_dequantized_weights(name: str, group: int, symmetric: bool, dtype: torch.dtype) -> None:
    weight = _weight(200, 1288, group, symmetric, dtype)
    x = torch.eye(1288, device="cuda", dtype=dtype)
    step = 32 if TILES[name].path == "fragment" else 1288
    y = torch.cat([int4_gemm(x[i : i + step], weight, tile=TILES[name]) for i in range(0, 1288, step)])
    assert torch.equal(y, dequantize(weight, dtype).T)


def _rows(tile: Tile) -> list[int]:
    """That it has kernels for, at the edges of their column tiles. The dequantised weight's product is cuBLAS's."""
    if tile.path == "fragment":
        return [m for m in (1, 6, 8, 9, 16, 17, 33, 64) if fits(tile, m)]
    return [1, 300] if tile.path == "dequant" else [1, 16, 17, 64, 100, 300]


RANDOM = [(name, m) for name, tile in TILES.items() for m in _rows(tile)]


@pytest.mark.parametrize(("name", "m"), RANDOM, ids=[f"{name}-{m}" for name, m in RANDOM])
@pytest.mark.parametrize(("n", "k", "group", "symmetric"), [(1000, 1160, 64, False), (768, 4096, 128, True)])
def test_random(name: str, m: int, n: int, k: int, group: int, symmetric: bool) -> None:
    tile = TILES[name]
    weight = _weight(n, k, group, symmetric)
    x = torch.randn(m, k, device="cuda").to(BF16)
    _check(int4_gemm(x, weight, tile=tile), x, weight, tile.path != "fragment")


@pytest.mark.parametrize("tile", STREAM_TILES, ids=str)
@pytest.mark.parametrize(("m", "n", "k"), [(256, 6144, 4096), (250, 4095, 14328)], ids=str)
def test_stream_k_as_the_tuner_runs_it(tile: Tile, m: int, n: int, k: int) -> None:
    """Blocks race for the last part of a tile: the sum is the same bits whoever wins, and the counters end at zero."""
    weight = _weight(n, k, 128, True)
    x = torch.randn(m, k, device="cuda").to(BF16)
    first = int4_gemm(x, weight, tile=tile)
    _check(first, x, weight, True)
    for _ in range(50):
        assert torch.equal(int4_gemm(x, weight, tile=tile), first)
    assert not any(counters.any() for counters in gemm._arrived.values())


@pytest.mark.parametrize("tile", FUSED_TILES, ids=str)
def test_large_products_are_right_every_time(tile: Tile) -> None:
    """More blocks than fit at once, so that the tensor core falls behind: what it still reads must not change."""
    weight = _weight(28672, 4096, 128, True)
    x = torch.randn(256, 4096, device="cuda").to(BF16)
    first = int4_gemm(x, weight, tile=tile)
    _check(first, x, weight, True)
    for _ in range(50):
        assert torch.equal(int4_gemm(x, weight, tile=tile), first)


@pytest.mark.parametrize("m", [1, 16, 40, 256, 1500])
def test_default_choice_with_odd_sizes(m: int) -> None:
    weight = _weight(501, 1131, 32, False, FP16)
    x = torch.randn(m, 1131, device="cuda").to(FP16)
    _check(int4_gemm(x, weight), x, weight, True)


def test_rows_do_not_depend_on_the_batch() -> None:
    weight = _weight(4096, 4096, 128, True)
    x = torch.randn(16, 4096, device="cuda").to(BF16)
    full = int4_gemm(x, weight)
    for m in (1, 2, 6, 8, 9):
        assert torch.equal(int4_gemm(x[:m], weight), full[:m])


@pytest.mark.parametrize("name", ["fragment", "split", "fused", "fused_split", "stream", "stream_tma", "dequant"])
def test_repeats_and_graph_replay_agree(name: str) -> None:
    weight = _weight(2048, 2048, 128, True)
    x = torch.randn(6, 2048, device="cuda").to(BF16)
    first = int4_gemm(x, weight, tile=TILES[name])
    for _ in range(20):
        assert torch.equal(int4_gemm(x, weight, tile=TILES[name]), first)
    static = torch.zeros_like(x)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        int4_gemm(static, weight, tile=TILES[name])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        y = int4_gemm(static, weight, tile=TILES[name])
    for seed in range(3):
        torch.manual_seed(seed)
        static.copy_(torch.randn(6, 2048, device="cuda"))
        before = torch.cuda.memory_allocated()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.cuda.memory_allocated() == before
        assert torch.equal(y, int4_gemm(static.clone(), weight, tile=TILES[name]))


def test_compiled_op_keeps_its_shape() -> None:
    weight = _weight(256, 512, 128, True)
    x = torch.randn(2, 3, 512, device="cuda").to(BF16)
    y = torch.compile(lambda a: int4_gemm(a, weight) * 2, fullgraph=True)(x)
    assert torch.equal(y, int4_gemm(x, weight) * 2)
