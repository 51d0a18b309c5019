"""Calibrations by name, activation-aware scaling, and the saved form of a weight."""

import pytest
import torch

from sdsie_sglang.int4.calibration import calibrate, calibrate_fused
from sdsie_sglang.int4.checkpoint import fold_codes, saved_tensors, unfold_codes
from sdsie_sglang.int4.checkpoint_format import CODES, FACTORS, SCALES, ZEROS
from sdsie_sglang.int4.precision import is_int4, running_int4
from sdsie_sglang.int4.settings import CALIBRATIONS, Int4Settings


def weight(n=48, k=256, seed=0):
    return torch.randn(n, k, generator=torch.Generator().manual_seed(seed)) * 0.05


def inputs_with_outliers(rows=64, k=256):
    """A few channels are much larger than the others, as in a trained model."""
    x = torch.randn(rows, k, generator=torch.Generator().manual_seed(1))
    x[:, ::17] *= 30
    return x


@pytest.mark.parametrize("name", CALIBRATIONS)
def test_every_calibration_stays_within_its_step(name):
    w = weight()
    found = calibrate(w, name, inputs=inputs_with_outliers())
    effective = found.effective()
    step = found.codes.scales.float().abs().amax()
    if found.input_factors is None and name != "mse":
        assert (effective - w).abs().amax() <= step * 0.51
    assert (effective - w).norm() / w.norm() < 0.2


def test_finer_groups_lose_less():
    w = weight(k=512)
    errors = [float((calibrate(w, name).effective() - w).norm()) for name in ("channel", "g128", "g64", "g32")]
    assert errors[1] > errors[2] > errors[3]
    assert float((calibrate(w, "mse").effective() - w).norm()) < errors[1]


def test_activation_aware_scaling_serves_the_outputs():
    w, x = weight(), inputs_with_outliers()
    wanted = x @ w.T

    def error(name):
        return float((x @ calibrate(w, name, inputs=x).effective().T - wanted).norm())

    assert error("awq") < 0.8 * error("g128")


def test_fused_layers_share_their_factors():
    parts = calibrate_fused([weight(32, seed=2), weight(16, seed=3)], "awq", inputs=inputs_with_outliers())
    assert torch.equal(parts[0].input_factors, parts[1].input_factors)
    assert [part.codes.q.shape[0] for part in parts] == [32, 16]


def test_activation_aware_scaling_without_text_is_refused():
    with pytest.raises(ValueError, match="needs the layer's inputs"):
        calibrate(weight(), "awq")


def test_many_rows_are_the_same_as_few(monkeypatch):
    import sdsie_sglang.int4.calibration as module

    whole = calibrate(weight(), "channel").codes
    monkeypatch.setattr(module, "ROWS_AT_A_TIME", 7)
    parts = calibrate(weight(), "channel").codes
    assert torch.equal(whole.q, parts.q)
    assert torch.equal(whole.scales, parts.scales)
    assert torch.equal(whole.zeros, parts.zeros)


@pytest.mark.parametrize(("name", "extra"), [("g64", set()), ("channel", {ZEROS}), ("awq", {FACTORS})])
def test_saved_tensors(name, extra):
    found = calibrate(weight(), name, inputs=inputs_with_outliers())
    saved = saved_tensors("layer", found)
    assert set(saved) == {f"layer.{key}" for key in {CODES, SCALES, *extra}}
    assert torch.equal(unfold_codes(saved[f"layer.{CODES}"]), found.codes.q)


def test_folding_is_one_byte_for_two_codes():
    q = torch.tensor([[1, 2, 15, 0]], dtype=torch.uint8)
    assert fold_codes(q).tolist() == [[0x21, 0x0F]]


def test_the_switch_is_put_back_even_after_an_error():
    assert not is_int4()
    with running_int4():
        with running_int4():
            assert is_int4()
        assert is_int4()
    assert not is_int4()

    def fails():
        with running_int4():
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fails()
    assert not is_int4()


def test_excluded_layers_are_parts_of_names():
    settings = Int4Settings(exclude="layers.0., down_proj")
    assert settings.exclude == ("layers.0.", "down_proj")
    assert settings.excludes("model.layers.0.self_attn.qkv_proj")
    assert settings.excludes("model.layers.7.mlp.down_proj")
    assert not settings.excludes("model.layers.10.self_attn.qkv_proj")
