"""INT4 in SGLang's own linear layers: shards, fused layers, both precisions, saved checkpoints, refusals."""

import pytest
import torch

from sdsie_sglang.cpu_engine import enable

enable()

from sglang.srt.layers import linear  # noqa: E402 (after the CPU engine was chosen)

from sdsie_sglang.int4.both import add_int4, check_device  # noqa: E402
from sdsie_sglang.int4.calibration import calibrate_fused  # noqa: E402
from sdsie_sglang.int4.checkpoint import quantization_config, saved_tensors  # noqa: E402
from sdsie_sglang.int4.method import Int4Unsupported  # noqa: E402
from sdsie_sglang.int4.precision import running_int4  # noqa: E402
from sdsie_sglang.int4.quantization import Int4Config  # noqa: E402
from sdsie_sglang.int4.settings import Int4Settings  # noqa: E402
from sdsie_sglang.kernels.int4_gemm import quantize  # noqa: E402

HIDDEN, HEADS, KV_HEADS, HEAD = 256, 4, 2, 32
QKV = (HEADS * HEAD, KV_HEADS * HEAD, KV_HEADS * HEAD)


@pytest.fixture(autouse=True)
def unpatched_product(monkeypatch):
    """The CPU engine's packed product needs a platform; plain F.linear serves here."""
    from sglang.srt.layers.quantization import unquant

    monkeypatch.setattr(unquant, "_is_cpu_amx_available", False)


@pytest.fixture
def ranks(monkeypatch):
    def set_rank(rank, size):
        group = linear._LogicalGroup(rank, size) if size > 1 else None
        monkeypatch.setattr(linear, "_resolve_linear_group", lambda parallel_group: group)

    set_rank(0, 1)
    return set_rank


def weights(*sizes, k=HIDDEN):
    generator = torch.Generator().manual_seed(sum(sizes))
    return [torch.randn(n, k, generator=generator) * 0.05 for n in sizes]


def qkv_layer(config, prefix="layers.0.self_attn.qkv_proj"):
    return linear.QKVParallelLinear(
        HIDDEN, HEAD, HEADS, KV_HEADS, bias=False, params_dtype=torch.float32, quant_config=config, prefix=prefix
    )


def row_layer(config, k=HIDDEN, prefix="layers.0.self_attn.o_proj"):
    return linear.RowParallelLinear(
        k, 64, bias=False, params_dtype=torch.float32, quant_config=config, prefix=prefix, reduce_results=False
    )


def load(layer, name, shards):
    """As a model's load_weights does: one call a part, with its shard id if the layer is fused."""
    parameter = getattr(layer, name)
    for shard_id, values in shards:
        parameter.weight_loader(parameter, values, *([] if shard_id is None else [shard_id]))


def finish(layer):
    layer.quant_method.process_weights_after_loading(layer)
    return layer


def expected(weight, name):
    group = {"g32": 32, "g64": 64, "g128": 128, "channel": 0}[name]
    return quantize(weight, group=group, symmetric=name != "channel").dequantize()


def product(layer, x):
    return layer.quant_method.apply(layer, x)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("name", ["channel", "g64"])
def test_fused_qkv_has_each_part_of_its_shard(ranks, size, name):
    parts = weights(*QKV)
    x = torch.randn(3, HIDDEN)
    for rank in range(size):
        ranks(rank, size)
        layer = qkv_layer(Int4Config(Int4Settings(calibration=name)))
        load(layer, "weight", zip("qkv", parts, strict=True))
        mine = torch.cat([part.chunk(size)[rank] for part in parts])
        torch.testing.assert_close(product(finish(layer), x), x @ expected(mine, name).T)


@pytest.mark.parametrize("size", [1, 2])
def test_row_parallel_shards_split_the_inputs(ranks, size):
    (whole,) = weights(64)
    x = torch.randn(2, HIDDEN)
    total = torch.zeros(2, 64)
    for rank in range(size):
        ranks(rank, size)
        layer = row_layer(Int4Config(Int4Settings(calibration="g64")))
        load(layer, "weight", [(None, whole)])
        total += product(finish(layer), x.chunk(size, -1)[rank])
    torch.testing.assert_close(total, x @ expected(whole, "g64").T)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("name", ["channel", "g32", "awq"])
def test_saved_weights_are_sharded_and_fused_by_sglangs_loaders(ranks, size, name):
    """Every rank's product is that of its part of the whole layer's INT4 weight."""
    x = torch.randn(5, HIDDEN)
    config = quantization_config(name, (), lm_head=False)
    qkv = calibrate_fused(weights(*QKV), name, inputs=torch.randn(64, HIDDEN))
    (out,) = calibrate_fused(weights(64), name, inputs=torch.randn(64, HIDDEN))
    total = torch.zeros(5, 64)
    for rank in range(size):
        ranks(rank, size)
        layer = qkv_layer(Int4Config.from_config(dict(config)))
        for part, shard_id in zip(qkv, "qkv", strict=True):
            for key, values in saved_tensors("", part).items():
                load(layer, key[1:], [(shard_id, values)])
        mine = torch.cat([part.effective().chunk(size)[rank] for part in qkv])
        torch.testing.assert_close(product(finish(layer), x), x @ mine.T, rtol=1e-4, atol=1e-4)

        row = row_layer(Int4Config.from_config(dict(config)))
        for key, values in saved_tensors("", out).items():
            load(row, key[1:], [(None, values)])
        total += product(finish(row), x.chunk(size, -1)[rank])
    torch.testing.assert_close(total, x @ out.effective().T, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["g64", "awq", "channel"])
def test_a_tensor_that_the_checkpoint_lacks_is_named(ranks, name):
    """SGLang loads what is there and says nothing of the rest."""
    qkv = calibrate_fused(weights(*QKV), name, inputs=torch.randn(64, HIDDEN))
    config = quantization_config(name, (), lm_head=False)
    lacking = {key[1:] for key in saved_tensors("", qkv[0])} - ({"int4_codes"} if name == "channel" else set())
    for lost in sorted(lacking):
        layer = qkv_layer(Int4Config.from_config(dict(config)))
        for part, shard_id in zip(qkv, "qkv", strict=True):
            for key, values in saved_tensors("", part).items():
                if key[1:] != lost or (shard_id != "k" and lost != "int4_factors"):
                    load(layer, key[1:], [(shard_id, values)])
        with pytest.raises(Int4Unsupported, match=rf"lacks layers.0.self_attn.qkv_proj.{lost}"):
            finish(layer)


def test_rows_that_sglang_pads_with_are_no_damage(ranks):
    (part,) = calibrate_fused(weights(64), "g64")
    layer = row_layer(Int4Config.from_config(quantization_config("g64", (), lm_head=False)))
    for key, values in saved_tensors("", part).items():
        padded = values.clone()
        padded[60:] = 0
        load(layer, key[1:], [(None, padded)])
    assert (product(finish(layer), torch.randn(2, HIDDEN))[:, 60:] == 0).all()


def test_a_part_of_a_fused_layer_excludes_the_whole(ranks):
    for part in ("q_proj", "k_proj", "qkv_proj"):
        settings = Int4Settings(exclude=part)
        assert settings.excludes("layers.0.self_attn.qkv_proj")
        assert settings.excludes("model.layers.0.self_attn.v_proj")
        assert not settings.excludes("layers.0.self_attn.o_proj")
        assert not settings.excludes("layers.0.mlp.gate_up_proj")
    assert Int4Settings(exclude="up_proj").excludes("layers.0.mlp.gate_proj")
    assert Int4Settings(exclude="layers.0.self_attn.q_proj").excludes("layers.0.self_attn.qkv_proj")
    assert not Int4Settings(exclude="layers.0.self_attn.q_proj").excludes("layers.1.self_attn.qkv_proj")


def test_a_saved_layer_keeps_the_codes_packed_alone(ranks):
    (part,) = calibrate_fused(weights(64), "g64")
    layer = row_layer(Int4Config.from_config(quantization_config("g64", (), lm_head=False)))
    for key, values in saved_tensors("", part).items():
        load(layer, key[1:], [(None, values)])
    finish(layer)
    assert {name: value.numel() for name, value in layer.named_parameters()} == {"weight": 0}


def test_a_shards_edge_through_a_group_is_refused(ranks):
    ranks(0, 4)
    with pytest.raises(Int4Unsupported, match=r"groups of 128 do not divide the 64 inputs .*o_proj \(256 in all\)"):
        row_layer(Int4Config(Int4Settings(calibration="g128")))
    row_layer(Int4Config(Int4Settings(calibration="g64")))
    row_layer(Int4Config(Int4Settings(calibration="channel")))


def test_an_unsharded_layer_may_have_a_ragged_last_group(ranks):
    (whole,) = weights(64, k=192)
    layer = row_layer(Int4Config(Int4Settings(calibration="g128")), k=192)
    load(layer, "weight", [(None, whole)])
    x = torch.randn(2, 192)
    torch.testing.assert_close(product(finish(layer), x), x @ expected(whole, "g128").T)


def test_excluded_layers_stay_as_they_are(ranks):
    config = Int4Config(Int4Settings(exclude="layers.0.,down_proj"))
    assert type(qkv_layer(config).quant_method).__name__ == "UnquantizedLinearMethod"
    assert type(qkv_layer(config, "layers.10.qkv_proj").quant_method).__name__ == "Int4LinearMethod"
    assert type(row_layer(config, prefix="layers.1.mlp.down_proj").quant_method).__name__ == "UnquantizedLinearMethod"


class Model(torch.nn.Module):
    """Two linear layers and a head that is the embedding."""

    def __init__(self, config=None):
        super().__init__()
        self.qkv = qkv_layer(config)
        self.out = row_layer(config)
        self.lm_head = torch.nn.Module()
        self.lm_head.weight = torch.nn.Parameter(torch.randn(40, HIDDEN), requires_grad=False)


@pytest.fixture
def model(ranks):
    model = Model()
    load(model.qkv, "weight", zip("qkv", weights(*QKV), strict=True))
    load(model.out, "weight", [(None, weights(64)[0])])
    finish(model.qkv), finish(model.out)
    return model


def test_both_precisions_in_one_layer(model):
    x = torch.randn(4, HIDDEN)
    plain = product(model.out, x)
    before = model.out.weight.clone()
    added = add_int4(model, Int4Settings(calibration="g64"))
    assert torch.equal(product(model.out, x), plain), "full precision is untouched to the last bit"
    assert torch.equal(model.out.weight, before)
    with running_int4():
        low = product(model.out, x)
    torch.testing.assert_close(low, x @ expected(before, "g64").T)
    assert not torch.allclose(low, plain, rtol=1e-4, atol=1e-4)
    codes = (sum(QKV) + 64) * HIDDEN / 2
    assert codes <= added <= codes * 1.2


def test_new_weights_are_quantised_into_the_same_memory(model):
    add_int4(model, Int4Settings(calibration="g64"))
    words = model.out.sdsie_int4.packed.words
    model.out.weight.data.mul_(-1)
    finish(model.out)
    assert model.out.sdsie_int4.packed.words is words
    x = torch.randn(4, HIDDEN)
    with running_int4():
        torch.testing.assert_close(product(model.out, x), x @ expected(model.out.weight, "g64").T)


def test_the_head_is_int4_only_while_int4_runs(model):
    from sdsie_sglang.int4.head import compute_lm_head

    def original(processor, hidden, head, bias, **kwargs):
        return hidden @ head.weight.T

    add_int4(model, Int4Settings(calibration="g64", lm_head=True))
    x = torch.randn(2, HIDDEN)
    head = model.lm_head
    assert torch.equal(compute_lm_head(original, None, x, head), x @ head.weight.T)
    with running_int4():
        torch.testing.assert_close(compute_lm_head(original, None, x, head), x @ expected(head.weight, "g64").T)


def test_a_tied_head_of_an_int4_model_is_quantised_when_first_used(ranks):
    from sdsie_sglang.int4.head import compute_lm_head, mark_possible_head

    head = torch.nn.Module()
    head.weight = torch.nn.Parameter(torch.randn(40, HIDDEN), requires_grad=False)
    mark_possible_head(head, "g64")
    x = torch.randn(2, HIDDEN)
    torch.testing.assert_close(compute_lm_head(None, None, x, head), x @ expected(head.weight, "g64").T)


def test_a_quantised_target_does_not_draft_for_itself(ranks):
    with pytest.raises(Int4Unsupported, match=r"quantised already .*unquantised target"):
        add_int4(Model(Int4Config(Int4Settings())), Int4Settings())


def test_excluding_everything_is_refused(model):
    with pytest.raises(Int4Unsupported, match="no linear layer is left"):
        add_int4(model, Int4Settings(exclude="qkv,out"))


def test_calibration_by_text_needs_a_saved_checkpoint(model):
    with pytest.raises(Int4Unsupported, match=r"python -m sdsie_sglang\.int4\.quantize"):
        Int4Config(Int4Settings(calibration="awq"))
    with pytest.raises(Int4Unsupported, match="choose another"):
        add_int4(model, Int4Settings(calibration="awq"))


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"quant_method": "awq"}, "quantised already, by awq"),
        ({"quant_method": "sdsie_int4", "format": 99}, "format is 99"),
        ({"quant_method": "sdsie_int4", "format": 1, "calibration": "g7"}, "calibration: "),
    ],
)
def test_checkpoints_of_another_kind(config, says):
    with pytest.raises(Int4Unsupported, match=says) as caught:
        Int4Config.from_config(config)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("capability", "dtype", "says"), [((7, 5), torch.float16, "this GPU has 7.5"), ((9, 0), torch.float32, "not in")]
)
def test_what_the_kernel_does_not_run_on(monkeypatch, capability, dtype, says):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    with pytest.raises(Int4Unsupported, match=says):
        check_device(torch.device("cuda"), dtype)


def test_float32_is_for_the_cpu_engine_alone(monkeypatch):
    from sdsie_sglang.int4 import quantization

    assert torch.float32 in Int4Config(Int4Settings()).get_supported_act_dtypes()
    monkeypatch.setattr(quantization, "cpu_engine_is_enabled", lambda: False)
    assert torch.float32 not in Int4Config(Int4Settings()).get_supported_act_dtypes()
