"""Products with a norm on a real GPU: alone, and a stack of Llama-like layers fused against unfused."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear, silu

from sdsie_sglang.kernels.skinny_gemm import NormedStream, add_norm_gemm, gemm, normed_gemm, skinny_gemm, tiles
from sdsie_sglang.kernels.skinny_gemm.reference import add_norm_reference, normed_reference, tolerance
from sdsie_sglang.kernels.skinny_gemm.tiles import Tile

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    pytest.mark.skipif(gemm.INTERPRET, reason="the interpreter's cases are in tests/unit"),
]
BF16, EPS = torch.bfloat16, 1e-5
ROWS = (1, 2, 6, 8, 9, 16)
TILES = {
    "plain": Tile(rows=1, warps=8, vectors=2, registers=80),
    "deep": Tile(rows=1, warps=8, vectors=2, depth=2, registers=80),
    "two_row_tiles": Tile(rows=2, warps=8, vectors=2, registers=128),
    "sixteen_warps": Tile(rows=1, warps=16, vectors=2, registers=64),
}


def _random(*shape: int, seed: int = 0) -> Tensor:
    torch.manual_seed(seed + sum(shape))
    return torch.randn(*shape, device="cuda").to(BF16)


def _stream(m: int, hidden: int) -> NormedStream:
    x, weight = _random(m, 512), _random(hidden, 512) / 22
    return add_norm_gemm(x, weight, None, 4 * _random(m, hidden, seed=1), _random(hidden), tile=TILES["plain"])[1]


@pytest.mark.parametrize("name", TILES)
@pytest.mark.parametrize(("n", "k"), [(2048, 2048), (4096, 4096), (2048, 8192), (1040, 1160)])
def test_addition_and_scaling_are_exact_given_the_product(name: str, n: int, k: int) -> None:
    weight, norm_weight, bias = _random(n, k) / k**0.5, _random(n), _random(1, n)[0]
    for m in ROWS:
        x, residual = _random(m, k), 4 * _random(m, n, seed=1)
        for b in (None, bias):
            before = residual.clone()
            y, stream = add_norm_gemm(x, weight, b, residual, norm_weight, tile=TILES[name])
            assert torch.equal(residual, before)
            exact = x.double() @ weight.double().T + (0 if b is None else b.double())
            slack = tolerance(x, weight) + (0 if b is None else torch.finfo(BF16).eps * b.abs())
            assert ((y.double() - exact).abs() <= slack).all()
            s = y.float() + residual.float()
            assert torch.equal(stream.residual, s.to(BF16))
            assert torch.equal(stream.scaled, (s * norm_weight.float()).to(BF16))
            torch.testing.assert_close(stream.squares, s.square().unflatten(1, (-1, 16)).sum(-1), rtol=1e-5, atol=0)


@pytest.mark.parametrize("name", TILES)
@pytest.mark.parametrize(("n", "k"), [(3072, 2048), (6144, 4096), (1000, 2048)])
def test_product_of_the_norm(name: str, n: int, k: int) -> None:
    weight, bias = _random(n, k) / k**0.5, _random(1, n)[0]
    for m in ROWS:
        stream = _stream(m, k)
        for b in (None, bias):
            got = normed_gemm(stream, weight, b, EPS, tile=TILES[name]).double()
            one_over_rms = torch.rsqrt(stream.squares.double().sum(1, keepdim=True) / k + EPS)
            exact = (stream.scaled.double() @ weight.double().T) * one_over_rms + (0 if b is None else b.double())
            slack = one_over_rms * tolerance(stream.scaled, weight) + 0.51 * torch.finfo(BF16).eps * exact.abs() + 1e-5
            assert ((got - exact).abs() <= slack).all()


@pytest.mark.parametrize("name", TILES)
@pytest.mark.parametrize(("n", "k"), [(16384, 2048), (28672, 4096)])
def test_gate_and_up(name: str, n: int, k: int) -> None:
    weight = _random(n, k) / k**0.5
    for m in ROWS:
        stream = _stream(m, k)
        got = normed_gemm(stream, weight, None, EPS, silu=True, tile=TILES[name]).float()
        expected = normed_reference(*stream[1:], weight, None, EPS, True).float()
        # sums in another order may round gate or up to a neighbour, which moves the result by that much
        assert ((got - expected).abs() <= 4 * torch.finfo(BF16).eps * expected.abs() + 1e-3).all()
        assert (got != expected).float().mean() < 0.05


def test_measured_shapes_do_not_depend_on_the_batch() -> None:
    shapes = {(n, k) for n, k, _ in tiles.table(torch.cuda.get_device_name(), True) if n < 100_000}
    if not shapes:
        pytest.skip("nobody has measured tiles on this GPU")
    for n, k in shapes:
        weight = _random(n, k) / k**0.5
        full = _stream(16, k)
        x, residual, norm_weight = _random(16, k), _random(16, n, seed=1), _random(n)
        calls = {
            "normed": lambda s, x, r: (normed_gemm(s, weight, None, EPS),),  # noqa: B023
            "silu": lambda s, x, r: (normed_gemm(s, weight, None, EPS, silu=True),),  # noqa: B023
            "add": lambda s, x, r: add_norm_gemm(x, weight, None, r, norm_weight)[1],  # noqa: B023
        }
        for what, call in calls.items():
            whole = call(full, x, residual)
            for m in (1, 2, 6, 8, 9):
                part = call(NormedStream(*(t[:m].contiguous() for t in full)), x[:m], residual[:m].contiguous())
                assert all(torch.equal(a, b[:m]) for a, b in zip(part, whole, strict=True)), (what, n, k, m)


class Layer(nn.Module):
    """The linear layers and norms of a Llama layer of 1B shape; attention is replaced by taking columns."""

    def __init__(self, number: int) -> None:
        super().__init__()
        shapes = {"qkv": (3072, 2048), "o": (2048, 2048), "gate_up": (16384, 2048), "down": (2048, 8192)}
        for i, (name, (n, k)) in enumerate(shapes.items()):
            self.register_buffer(name, _random(n, k, seed=10 * number + i) / k**0.5)
        self.register_buffer("first_norm", 1 + 0.2 * _random(2048, seed=1))
        self.register_buffer("second_norm", 1 + 0.2 * _random(2048, seed=2))


def _norm(s: Tensor, weight: Tensor) -> Tensor:
    """SGLang's: of s in fp32, one rounding."""
    return (s.float() * torch.rsqrt(s.float().square().mean(1, keepdim=True) + EPS) * weight.float()).to(BF16)


def _unfused(layers: list[Layer], x: Tensor, exact: bool = False) -> tuple[Tensor, Tensor]:
    """Output of the last layer and its residual; exact: in float64 throughout."""
    as_is = (lambda t: t.double()) if exact else (lambda t: t)
    rounded = as_is if exact else (lambda t: t.to(BF16))

    def norm(s: Tensor, weight: Tensor) -> Tensor:
        if not exact:
            return _norm(s, weight)
        return s * torch.rsqrt(s.square().mean(1, keepdim=True) + EPS) * weight.double()

    output, residual = None, as_is(x)
    for layer in layers:
        s = residual if output is None else (output + residual if exact else output.float() + residual.float())
        residual = rounded(s)
        qkv = linear(norm(s, layer.first_norm), as_is(layer.qkv))
        o = linear(qkv[:, :2048], as_is(layer.o))
        s = o + residual if exact else o.float() + residual.float()
        residual = rounded(s)
        gate, up = linear(norm(s, layer.second_norm), as_is(layer.gate_up)).chunk(2, dim=1)
        activated = silu(gate) * up if exact else (silu(gate.float()) * up.float()).to(BF16)
        output = linear(activated, as_is(layer.down))
    return output, residual


def _fused(layers: list[Layer], x: Tensor) -> tuple[Tensor, Tensor]:
    stream, output, residual = None, x, x
    for i, layer in enumerate(layers):
        if stream is None:
            qkv = skinny_gemm(_norm(x, layer.first_norm), layer.qkv)
        else:
            residual = stream.residual
            qkv = normed_gemm(stream, layer.qkv, None, EPS)
        _, middle = add_norm_gemm(qkv[:, :2048], layer.o, None, residual, layer.second_norm)
        residual = middle.residual
        activated = normed_gemm(middle, layer.gate_up, None, EPS, silu=True)
        following = layers[(i + 1) % len(layers)].first_norm
        output, stream = add_norm_gemm(activated, layer.down, None, residual, following)
    return output, residual


@pytest.mark.parametrize("m", [1, 2, 6, 16])
def test_a_stack_of_layers_is_as_near_to_the_exact_result_as_separate_kernels(m: int) -> None:
    layers, x = [Layer(number) for number in range(4)], _random(m, 2048)
    exact = _unfused(layers, x, exact=True)

    def errors(got: tuple[Tensor, Tensor]) -> list[float]:
        return [((a.double() - b).norm() / b.norm()).item() for a, b in zip(got, exact, strict=True)]

    fused, separate = errors(_fused(layers, x)), errors(_unfused(layers, x))
    assert all(0 < a <= 1.3 * b + 1e-4 for a, b in zip(fused, separate, strict=True)), (fused, separate)


def test_a_stack_in_a_graph_of_overlapping_launches_agrees_with_one_at_a_time() -> None:
    layers = [Layer(number) for number in range(4)]
    static = torch.zeros(6, 2048, device="cuda", dtype=BF16)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        _fused(layers, static)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        got = _fused(layers, static)
    for seed in range(10):
        torch.manual_seed(seed)
        static.copy_(torch.randn(6, 2048, device="cuda"))
        before = torch.cuda.memory_allocated()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.cuda.memory_allocated() == before
        replayed = [tensor.clone() for tensor in got]
        with _OneAtATime():
            alone = _fused(layers, static.clone())
        assert all(torch.equal(a, b) for a, b in zip(replayed, alone, strict=True))


class _OneAtATime:
    """Every launch waits until the one before has ended."""

    def __enter__(self) -> None:
        self.patch = pytest.MonkeyPatch()
        for name in ("add_norm_gemm", "normed_gemm", "skinny_gemm"):
            original = globals()[name]

            def waits(*args: object, original: object = original, **kwargs: object) -> object:
                result = original(*args, **kwargs)  # type: ignore[operator]
                torch.cuda.synchronize()
                return result

            self.patch.setitem(globals(), name, waits)

    def __exit__(self, *_: object) -> None:
        self.patch.undo()


def test_add_norm_reference_is_what_the_kernel_is_compared_with() -> None:
    x, weight, residual, norm_weight = _random(6, 2048), _random(2048, 2048) / 45, _random(6, 2048), _random(2048)
    y, *stream = add_norm_reference(x, weight, None, residual, norm_weight)
    got, some = add_norm_gemm(x, weight, None, residual, norm_weight)
    for a, b in ((got, y), (some.residual, stream[0]), (some.scaled, stream[1])):
        assert (a != b).float().mean() < 0.02, "only where a sum's order moved a rounding"
