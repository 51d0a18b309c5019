"""The fused Llama layer without a GPU: two layers against SGLang's own forward, and everything that sends it back."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import linear

from sdsie_sglang.cpu_engine import enable

enable()

from sglang.srt.layers.activation import SiluAndMul  # noqa: E402 (after the CPU engine was chosen)
from sglang.srt.layers.layer_boundary.contracts import BatchVariant  # noqa: E402
from sglang.srt.layers.layer_boundary.residual.add_norm import NORM_QUANT_READOUT, PLAIN_ADD  # noqa: E402
from sglang.srt.layers.layer_boundary.residual.stream import ResidualStream  # noqa: E402
from sglang.srt.layers.layernorm import RMSNorm  # noqa: E402
from sglang.srt.layers.linear import (  # noqa: E402
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod  # noqa: E402
from sglang.srt.model_executor.forward_batch_info import ForwardMode  # noqa: E402
from sglang.srt.models.llama import LlamaAttention, LlamaDecoderLayer, LlamaMLP  # noqa: E402

from sdsie_sglang import fused_layer  # noqa: E402
from sdsie_sglang.config import parse_config  # noqa: E402

HIDDEN, HEAD, HEADS, KV_HEADS, INTERMEDIATE = 64, 16, 4, 2, 96
BF16 = torch.bfloat16
original = LlamaDecoderLayer.forward


class _Boundary:
    """A stage's boundary on one GPU: what SGLang's does to the stream there."""

    def __init__(self, norm: RMSNorm) -> None:
        self.norm = norm
        self.plan = SimpleNamespace(variant_for=lambda batch: BatchVariant.ORDINARY)

    def prepare(self, hidden: Any, batch: Any, capture: Any = None) -> Any:
        stream = batch.residual_stream
        hidden, residual = stream.input(hidden)
        hidden, residual = NORM_QUANT_READOUT.update_and_read(PLAIN_ADD, hidden, residual, self.norm)
        stream.write(residual)
        return hidden

    def finish(self, hidden: Any, batch: Any) -> Any:
        return batch.residual_stream.record(hidden, PLAIN_ADD)


class _Rotation(nn.Module):
    def forward(self, positions: Any, q: Any, k: Any) -> Any:
        return q + positions[:, None], k


class _Attention(nn.Module):
    def forward(self, q: Any, k: Any, v: Any, batch: Any) -> Any:
        return q * v.repeat(1, HEADS // KV_HEADS)


def _hollow(kind: type, **attributes: Any) -> Any:
    """An instance of SGLang's class with these attributes only: no process groups, no server arguments."""
    module = kind.__new__(kind)
    nn.Module.__init__(module)
    for name, value in attributes.items():
        setattr(module, name, value)
    return module


def _product(kind: type, n: int, k: int, bias: bool = False) -> Any:
    def parameter(*shape: int) -> nn.Parameter:
        return nn.Parameter((torch.randn(*shape) / k**0.5).to(BF16), requires_grad=False)

    layer = _hollow(kind, quant_method=UnquantizedLinearMethod(), skip_bias_add=False, weight=parameter(n, k))
    layer.register_parameter("bias", parameter(n) if bias else None)
    layer.forward = lambda x: (linear(x, layer.weight, layer.bias), None)
    return layer


def _norm() -> RMSNorm:
    norm = RMSNorm(HIDDEN, eps=1e-5, force_native=True)
    norm.weight = nn.Parameter((1 + 0.3 * torch.randn(HIDDEN)).to(BF16), requires_grad=False)
    return norm


def _layer(bias: bool = False) -> Any:
    attention = _hollow(
        LlamaAttention,
        q_size=HEADS * HEAD,
        kv_size=KV_HEADS * HEAD,
        qkv_proj=_product(QKVParallelLinear, (HEADS + 2 * KV_HEADS) * HEAD, HIDDEN, bias),
        o_proj=_product(RowParallelLinear, HIDDEN, HEADS * HEAD, bias),
        rotary_emb=_Rotation(),
        attn=_Attention(),
    )
    activation = _hollow(SiluAndMul)
    activation.forward = SiluAndMul.forward_native.__get__(activation)
    mlp = _hollow(
        LlamaMLP,
        gate_up_proj=_product(MergedColumnParallelLinear, 2 * INTERMEDIATE, HIDDEN),
        down_proj=_product(RowParallelLinear, HIDDEN, INTERMEDIATE),
        act_fn=activation,
        dual_gemm=SimpleNamespace(mode=None, can_run=lambda x, layer: False),
        activation_quant=SimpleNamespace(enabled=False, forward_decode=lambda x, act_fn, down_proj: act_fn(x)),
    )
    layer = _hollow(
        LlamaDecoderLayer, self_attn=attention, mlp=mlp, input_layernorm=_norm(), post_attention_layernorm=_norm()
    )
    layer.attn_boundary = _Boundary(layer.input_layernorm)
    layer.ffn_boundary = _Boundary(layer.post_attention_layernorm)
    return layer


@pytest.fixture
def layers(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Three layers, the way to the kernels' CPU references open."""
    monkeypatch.setattr(fused_layer, "wanted", lambda: True)
    monkeypatch.setattr(fused_layer, "has_norm_tile", lambda x, weight: True)
    torch.manual_seed(0)
    made = [_layer(bias=i == 1) for i in range(3)]
    fused_layer.link_layers(None, SimpleNamespace(layers=made))
    return made


def _batch(mode: ForwardMode = ForwardMode.DECODE) -> Any:
    return SimpleNamespace(residual_stream=ResidualStream(), forward_mode=mode)


def _run(layers: list[Any], hidden: Any, fused: Any) -> tuple[Any, Any]:
    """Output and residual of the last layer; `fused`: which layers go through this project's forward."""
    batch, positions = _batch(), torch.arange(len(hidden)) / 8
    hidden = hidden.clone()
    for i, layer in enumerate(layers):
        if i in fused:
            hidden = fused_layer.forward(original, layer, positions.to(BF16), hidden, batch, capture_output=None)
        else:
            hidden = original(layer, positions.to(BF16), hidden, batch)
    return batch.residual_stream.export(hidden)


@pytest.mark.parametrize("fused", [(0, 1, 2), (0,), (1,), (0, 1), (0, 2), (1, 2)], ids=str)
def test_any_layers_may_be_fused(layers: list[Any], fused: tuple[int, ...]) -> None:
    hidden = torch.randn(6, HIDDEN).to(BF16)
    expected = _run(layers, hidden, ())
    got = _run(layers, hidden, fused)
    for a, b in zip(got, expected, strict=True):
        assert ((a - b).float().norm() / b.float().norm()) < 0.02, "bf16 rounds at 0.004, some forty times on the way"
    if 0 in fused and 1 in fused:
        assert not all(torch.equal(a, b) for a, b in zip(got, expected, strict=True)), "the fused path wasn't taken"


def test_the_stream_is_read_from_where_the_layer_before_left_it(
    layers: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared = []
    for layer in layers:
        before = layer.attn_boundary.prepare
        monkeypatch.setattr(
            layer.attn_boundary, "prepare", lambda *a, before=before, **k: (prepared.append(1), before(*a, **k))[1]
        )
    _run(layers, torch.randn(2, HIDDEN).to(BF16), (0, 1, 2))
    assert len(prepared) == 1, "only the first layer runs a norm of its own"


def _with_hook(layer: Any) -> None:
    layer.mlp.down_proj.register_forward_hook(lambda *a: None)


def _with_lora(layer: Any) -> None:
    layer.self_attn.qkv_proj = nn.Sequential(layer.self_attn.qkv_proj)


CHANGES = {
    "a subclass": lambda layer: setattr(layer, "__class__", type("Other", (LlamaDecoderLayer,), {})),
    "a wrapped product": _with_lora,
    "a quantised product": lambda layer: setattr(layer.mlp.gate_up_proj, "quant_method", object()),
    "a bias left to the caller": lambda layer: setattr(layer.self_attn.o_proj, "skip_bias_add", True),
    "a norm of part of the row": lambda layer: setattr(layer.input_layernorm, "variance_size_override", 32),
    "a norm that rounds first": lambda layer: setattr(layer.post_attention_layernorm, "cast_x_before_out_mul", True),
    "a norm in fp32": lambda layer: setattr(layer.input_layernorm, "weight", nn.Parameter(torch.ones(HIDDEN))),
    "another activation": lambda layer: setattr(layer.mlp, "act_fn", nn.GELU()),
    "Blackwell's dual product": lambda layer: setattr(layer.mlp.dual_gemm, "mode", object()),
    "a quantised activation": lambda layer: setattr(layer.mlp.activation_quant, "enabled", True),
    "a hook on a part": _with_hook,
    "rows elsewhere": lambda layer: setattr(
        layer.attn_boundary.plan, "variant_for", lambda batch: BatchVariant.CONTEXT_PARALLEL
    ),
}


@pytest.mark.parametrize("mode", list(ForwardMode), ids=lambda mode: mode.name)
def test_a_plain_layer_of_a_decode_cycle_is_fused(layers: list[Any], mode: ForwardMode) -> None:
    prompt = mode in (ForwardMode.EXTEND, ForwardMode.MIXED, ForwardMode.SPLIT_PREFILL)
    assert fused_layer.applies(layers[0], torch.zeros(6, HIDDEN, dtype=BF16), _batch(mode)) is not prompt


@pytest.mark.parametrize("name", CHANGES)
def test_anything_else_is_left_to_sglang(layers: list[Any], name: str) -> None:
    CHANGES[name](layers[0])
    assert not fused_layer.applies(layers[0], torch.zeros(6, HIDDEN, dtype=BF16), _batch())


@pytest.mark.parametrize(
    "hidden",
    [torch.zeros(17, HIDDEN, dtype=BF16), torch.zeros(6, HIDDEN), torch.zeros(1, 6, HIDDEN, dtype=BF16), object()],
    ids=["too many rows", "float32", "three dimensions", "owed output"],
)
def test_batches_that_are_left_to_sglang(layers: list[Any], hidden: Any) -> None:
    assert not fused_layer.applies(layers[0], hidden, _batch())


def test_unmeasured_shapes_settings_and_captures_are_left_to_sglang(
    layers: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden, seen = torch.zeros(2, HIDDEN, dtype=BF16), []

    def sglang(*args: Any) -> str:
        seen.append(args)
        return "SGLang's"

    assert fused_layer.forward(sglang, layers[0], None, hidden, _batch(), capture_output=print) == "SGLang's"
    assert seen[-1][-1] is print
    monkeypatch.setattr(fused_layer, "has_norm_tile", lambda x, weight: False)
    assert fused_layer.forward(sglang, layers[0], None, hidden, _batch()) == "SGLang's"
    monkeypatch.setattr(fused_layer, "has_norm_tile", lambda x, weight: True)
    monkeypatch.setattr(fused_layer, "wanted", lambda: False)
    assert fused_layer.forward(sglang, layers[0], None, hidden, _batch()) == "SGLang's"


def test_a_setting_turns_it_off() -> None:
    assert not parse_config({}).no_fused_layer
    assert parse_config({"no_fused_layer": True}).no_fused_layer
