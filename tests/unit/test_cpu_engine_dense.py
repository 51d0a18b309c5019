import pytest
import torch
import torch.nn.functional as F
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from sdsie_sglang.cpu_engine.ops import dense

WIDTHS = (1, 2, 3, 5, 6, 8, 17, 33, 64, 100)
SHAPES = [(960, 576), (576, 1536), (2048, 512), (1000, 300), (7, 32)]  # (N, K)

ops = torch.ops.sgl_kernel


@pytest.fixture(autouse=True)
def inference():
    torch.manual_seed(0)
    with torch.inference_mode():
        yield


@pytest.mark.parametrize(("n", "k"), SHAPES)
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_linear(n, k, with_bias, packed):
    w, x = torch.randn(n, k), torch.randn(max(WIDTHS), k)
    bias = torch.randn(n) if with_bias else None
    weight = ops.convert_weight_packed(w) if packed else w
    exact = F.linear(x.double(), w.double(), None if bias is None else bias.double())
    for width in WIDTHS:
        y = ops.weight_packed_linear(x[:width], weight, bias, True)
        assert y.shape == (width, n)
        torch.testing.assert_close(y.double(), exact[:width], rtol=0, atol=float(exact.abs().max()) * 2**-18)


@pytest.mark.parametrize(("n", "k"), SHAPES)
@pytest.mark.parametrize("packed", [False, True])
def test_a_row_of_a_linear_layer_does_not_depend_on_the_others(n, k, packed):
    w, x = torch.randn(n, k), torch.randn(max(WIDTHS), k)
    weight = ops.convert_weight_packed(w) if packed else w
    together = ops.weight_packed_linear(x, weight, None, True)
    for width in WIDTHS:
        assert torch.equal(ops.weight_packed_linear(x[:width], weight, None, True), together[:width])
        alone = ops.weight_packed_linear(x[width - 1 : width], weight, None, True)
        assert torch.equal(alone[0], together[width - 1])


def test_one_hot_rows_read_the_weight_exactly():
    w = torch.randn(96, 64)
    columns = ops.weight_packed_linear(torch.eye(64), ops.convert_weight_packed(w), None, True)
    assert torch.equal(columns, w.T)


def test_linear_bf16():
    w, x, bias = torch.randn(96, 64).bfloat16(), torch.randn(6, 64).bfloat16(), torch.randn(96)
    y = ops.weight_packed_linear(x, ops.convert_weight_packed(w), bias, True)
    exact = F.linear(x.float(), w.float(), bias)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.float(), exact, rtol=2**-7, atol=2**-6)


def test_linear_without_onednn(monkeypatch):
    monkeypatch.setattr(dense, "_pack", lambda w: None)
    w, x = torch.randn(96, 64), torch.randn(6, 64)
    assert ops.convert_weight_packed(w) is not None
    assert torch.equal(ops.weight_packed_linear(x, w, None, True), F.linear(x, w))


def test_linear_of_no_rows():
    w = torch.randn(96, 64)
    assert ops.weight_packed_linear(torch.empty(0, 64), w, None, True).shape == (0, 96)


def test_the_packed_copy_goes_with_its_weight():
    before = len(dense._packed_copies)
    w = torch.randn(96, 64)
    ops.weight_packed_linear(torch.randn(2, 64), w, None, True)
    assert len(dense._packed_copies) == before + 1
    del w
    assert len(dense._packed_copies) == before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [64, 576, 300])
def test_rmsnorm(size, dtype):
    norm = LlamaRMSNorm(size, eps=1e-5).to(dtype)
    norm.weight.copy_(torch.randn(size))
    x, residual = torch.randn(5, size).to(dtype), torch.randn(5, size).to(dtype)
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2**-6, "atol": 2**-6}
    torch.testing.assert_close(ops.rmsnorm_cpu(x, norm.weight, 1e-5), norm(x), **tolerance)
    total = x + residual
    ops.fused_add_rmsnorm_cpu(x, residual, norm.weight, 1e-5)
    assert torch.equal(residual, total)
    torch.testing.assert_close(x, norm(total), **tolerance)


def test_rmsnorm_of_strided_heads():
    heads = torch.randn(5, 6, 64)[:, 1:3]  # q and k norms see slices of the fused projection
    w = torch.randn(64)
    assert torch.equal(ops.rmsnorm_cpu(heads, w, 1e-6), ops.rmsnorm_cpu(heads.contiguous(), w, 1e-6))


@pytest.mark.parametrize(
    ("name", "reference"),
    [
        ("silu_and_mul_cpu", F.silu),
        ("gelu_and_mul_cpu", F.gelu),
        ("gelu_tanh_and_mul_cpu", lambda x: F.gelu(x, approximate="tanh")),
    ],
)
def test_gated_activation(name, reference):
    gate, up = torch.randn(3, 40), torch.randn(3, 40)
    torch.testing.assert_close(getattr(ops, name)(torch.cat((gate, up), dim=-1)), reference(gate) * up)


@pytest.mark.parametrize("width", [1, 6])
def test_rotary_embedding(width):
    size, heads, kv_heads = 64, 9, 3
    inverse = 1.0 / 10000 ** (torch.arange(0, size, 2) / size)
    angles = torch.outer(torch.arange(100.0), inverse)
    cache = torch.cat((angles.cos(), angles.sin()), dim=-1)
    positions = torch.randint(0, 100, (width,))
    q, k = torch.randn(width, heads * size), torch.randn(width, kv_heads * size)
    rotated_q, rotated_k = ops.rotary_embedding_cpu(positions, q, k, size, cache, True)

    cos = angles[positions].cos().repeat(1, 2).unsqueeze(0)
    sin = angles[positions].sin().repeat(1, 2).unsqueeze(0)
    by_head = (t.view(1, width, -1, size).transpose(1, 2) for t in (q, k))
    expected_q, expected_k = apply_rotary_pos_emb(*by_head, cos, sin)
    torch.testing.assert_close(rotated_q.view(width, heads, size), expected_q[0].transpose(0, 1))
    torch.testing.assert_close(rotated_k.view(width, kv_heads, size), expected_k[0].transpose(0, 1))


def test_rotary_embedding_of_neighbours_and_of_a_part():
    size, rotary = 16, 8
    angles = torch.outer(torch.arange(20.0), torch.rand(rotary // 2))
    cache = torch.cat((angles.cos(), angles.sin()), dim=-1)
    positions = torch.tensor([3, 11])
    q = torch.randn(2, 2 * size)
    rotated, _ = ops.rotary_embedding_cpu(positions, q, q[:, :size], size, cache, False)
    turn = torch.polar(torch.ones(2, 1, rotary // 2), angles[positions].unsqueeze(1))
    heads = q.view(2, 2, size)
    pairs = torch.view_as_complex(heads[..., :rotary].reshape(2, 2, rotary // 2, 2))
    expected = torch.cat((torch.view_as_real(pairs * turn).flatten(-2), heads[..., rotary:]), dim=-1)
    torch.testing.assert_close(rotated.view(2, 2, size), expected)


@pytest.mark.parametrize("size", [64, 128, 576, 2048])
def test_a_row_of_the_other_ops_does_not_depend_on_the_others(size):
    x, w = torch.randn(max(WIDTHS), size), torch.randn(size)
    positions = torch.arange(max(WIDTHS))
    cache = torch.randn(max(WIDTHS), 64)
    norm = ops.rmsnorm_cpu(x, w, 1e-5)
    silu = ops.silu_and_mul_cpu(x)
    rope = ops.rotary_embedding_cpu(positions, x, x, 64, cache, True)[0]
    for width in WIDTHS:
        for first in (0, max(WIDTHS) - width):
            part = slice(first, first + width)
            assert torch.equal(ops.rmsnorm_cpu(x[part], w, 1e-5), norm[part])
            assert torch.equal(ops.silu_and_mul_cpu(x[part]), silu[part])
            alone = ops.rotary_embedding_cpu(positions[part], x[part], x[part], 64, cache, True)[0]
            assert torch.equal(alone, rope[part])
