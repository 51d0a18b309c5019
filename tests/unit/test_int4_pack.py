"""Calibration without data, the packed layout, and the product's reference path on the CPU."""

import pytest
import torch

from sdsie_sglang.kernels.int4_gemm import PackedWeight, dequantize, int4_gemm, pack, quantize, unpack
from sdsie_sglang.kernels.int4_gemm.pack import GROUPS


def _weight(n: int = 40, k: int = 200) -> torch.Tensor:
    return torch.randn(n, k, generator=torch.Generator().manual_seed(0)) * 0.05


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group", [0, *GROUPS])
@pytest.mark.parametrize(("n", "k"), [(16, 128), (40, 200), (1, 1), (17, 300)])
def test_unpack_undoes_pack(n: int, k: int, group: int, symmetric: bool) -> None:
    before = quantize(_weight(n, k), group, symmetric)
    after = unpack(pack(before))
    assert torch.equal(after.q, before.q)
    assert torch.equal(after.scales, before.scales)
    assert (after.zeros is None) == symmetric
    assert after.zeros is None or torch.equal(after.zeros, before.zeros)


def test_a_word_holds_one_threads_fragment() -> None:
    """Word `step` of lane 4 g + t: rows g and g + 8, k = 32 (step / 2) + 8 t + 4 (step % 2) + {0, 1, 2, 3}."""
    quantized = quantize(_weight(16, 128), 128)
    words = pack(quantized).words
    for chunk, g, t, step in ((0, 0, 0, 0), (1, 3, 2, 1), (0, 7, 3, 2), (1, 5, 1, 3)):
        word = words[0, 0, chunk, 4 * g + t, step].item() & 0xFFFFFFFF
        k = 64 * chunk + 32 * (step // 2) + 8 * t + 4 * (step % 2)
        for r in range(2):
            for half in range(2):
                for h in range(2):
                    nibble = word >> 4 * (4 * h + 2 * r + half) & 15
                    assert nibble == quantized.q[g + 8 * half, k + 2 * r + h]


def test_per_channel_minmax_is_the_original_formula() -> None:
    w = _weight()
    quantized = quantize(w, 0, symmetric=False, scale_dtype=torch.float32)
    low, high = w.amin(1, keepdim=True), w.amax(1, keepdim=True)
    s = (high - low) / 15
    z = -low / s
    assert torch.equal(quantized.scales, s)
    assert torch.equal(quantized.zeros, z)
    assert torch.equal(quantized.q, (w / s + z).round().clamp(0, 15).to(torch.uint8))


def test_codes_are_chosen_with_the_rounded_scale() -> None:
    w = _weight()
    for symmetric in (True, False):
        quantized = quantize(w, 64, symmetric)
        step = quantized.scales.float().repeat_interleave(64, 1)[:, :200]
        error = (quantized.dequantize() - w).abs() / step
        assert error.max() < 0.6  # half a step, and what rounding the range to bf16 clips


@pytest.mark.parametrize("symmetric", [True, False])
def test_finer_groups_and_mse_lower_the_error(symmetric: bool) -> None:
    w = torch.randn(64, 512, generator=torch.Generator().manual_seed(1)) ** 3

    def error(group: int, method: str) -> float:
        return (quantize(w, group, symmetric, method).dequantize() - w).square().mean().item()

    by_group = [error(group, "minmax") for group in (0, 128, 64, 32)]
    assert by_group == sorted(by_group, reverse=True)
    for group in (0, 128, 32):
        assert error(group, "mse") < error(group, "minmax")


@pytest.mark.parametrize("method", ["minmax", "mse"])
@pytest.mark.parametrize("symmetric", [True, False])
def test_constant_and_zero_groups_stay_exact(symmetric: bool, method: str) -> None:
    w = torch.zeros(4, 128)
    w[1] = 0.5
    w[2] = -0.25
    quantized = quantize(w, 64, symmetric, method)
    got = quantized.dequantize()
    assert torch.isfinite(got).all()
    assert torch.allclose(got, w, rtol=2**-7, atol=0)
    assert torch.equal(dequantize(pack(quantized)), got)


def test_ragged_last_group_has_its_own_range() -> None:
    w = torch.ones(1, 96)
    w[:, 64:] = 8.0
    assert torch.equal(quantize(w, 64, symmetric=True).scales[0] * 7, torch.tensor([1.0, 8.0]).to(torch.bfloat16))


def test_bytes_are_27_percent_of_bf16() -> None:
    packed = pack(quantize(_weight(512, 1024), 128))
    assert packed.nbytes / (512 * 1024 * 2) == pytest.approx(0.2578, abs=1e-3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [({"group": 48}, "group size 48"), ({"method": "gptq"}, "method 'gptq'")],
)
def test_unknown_settings_are_named(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        quantize(_weight(), **arguments)


def _packed(dtype: torch.dtype = torch.bfloat16) -> PackedWeight:
    return pack(quantize(_weight(), 64, scale_dtype=dtype))


def test_product_without_a_gpu() -> None:
    weight = _packed()
    x = torch.randn(2, 3, 200, generator=torch.Generator().manual_seed(2)).to(torch.bfloat16)
    y = int4_gemm(x, weight)
    assert y.shape == (2, 3, 40)
    assert torch.equal(y, (x.float() @ dequantize(weight).T).to(torch.bfloat16))
    assert int4_gemm(x[:0], weight).shape == (0, 3, 40)


def test_op_has_a_fake_implementation() -> None:
    weight = _packed()
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) as mode:
        x = mode.from_tensor(torch.zeros(7, 200, dtype=torch.bfloat16))
        y = torch.ops.sdsie.int4_gemm(x, weight.words, weight.scales, None, None, 40, 200, 64)
    assert (y.shape, y.dtype) == ((7, 40), torch.bfloat16)


@pytest.mark.parametrize(
    ("x", "error", "message"),
    [
        (torch.zeros(1, 200), TypeError, "bf16 or fp16"),
        (torch.zeros(1, 200, dtype=torch.float16), TypeError, "scale_dtype"),
        (torch.zeros(1, 199, dtype=torch.bfloat16), ValueError, "199 columns"),
    ],
)
def test_wrong_activations_are_named(x: torch.Tensor, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        int4_gemm(x, _packed())
