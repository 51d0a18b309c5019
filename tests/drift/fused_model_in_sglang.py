"""The fused layer inside SGLang's own model, run by test_fused_model.py in a process of its own.

Real layers, stage boundaries, residual stream, parallel groups and published settings; attention is a stand-in, and the
products are their CPU references.
"""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig

from sdsie_sglang.cpu_engine import enable

enable()

from sglang.srt.layers.activation import SiluAndMul  # noqa: E402 (after the CPU engine was chosen)
from sglang.srt.layers.layernorm import RMSNorm  # noqa: E402
from sglang.srt.layers.quantization import unquant  # noqa: E402
from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding  # noqa: E402
from sglang.srt.model_executor.forward_batch_info import ForwardMode  # noqa: E402
from sglang.srt.models import llama  # noqa: E402
from sglang.srt.plugins.hook_registry import HookRegistry  # noqa: E402
from sglang.test.layer_ut_utils import init_single_process_dist  # noqa: E402

from sdsie_sglang import fused_layer  # noqa: E402
from sdsie_sglang.patches import fused_layer as patches  # noqa: E402
from sdsie_sglang.patches.hook import register_hooks  # noqa: E402

LAYERS = 4
CONFIG = LlamaConfig(
    vocab_size=128,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=LAYERS,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
)


class _Attention(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, batch: Any) -> Tensor:
        return q * v.repeat(1, 2)


def _model() -> Any:
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    model = llama.LlamaModel(CONFIG)
    torch.set_default_dtype(torch.float32)
    for name, parameter in model.named_parameters():
        drawn = torch.randn_like(parameter)
        parameter.requires_grad_(False).copy_(1 + drawn / 5 if "norm" in name else drawn / parameter.shape[-1] ** 0.5)
    for layer in model.layers:
        layer.self_attn.attn = _Attention()
    for module in model.modules():
        if isinstance(module, RMSNorm | SiluAndMul | RotaryEmbedding):
            module._forward_method = module.forward_native
    return model


def _run(model: Any) -> Tensor:
    batch = SimpleNamespace(
        forward_mode=ForwardMode.DECODE, residual_stream=None, input_ids=torch.arange(6), attn_cp_metadata=None
    )
    embedded = torch.randn(6, CONFIG.hidden_size, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    with torch.inference_mode():
        result: Tensor = model(torch.arange(6), torch.arange(6), batch, input_embeds=embedded)
    return result


def test_hooked_model_agrees_with_the_plain_one(monkeypatch: Any) -> None:
    monkeypatch.setattr(unquant, "_is_cpu_amx_available", False)
    monkeypatch.setattr(fused_layer, "has_norm_tile", lambda x, weight: True)
    init_single_process_dist(master_port=29747)
    expected = _run(_model())
    register_hooks([patches.LAYER, patches.LINK])
    HookRegistry.apply_hooks()
    left = []
    fused = fused_layer._fused

    def watched(layer: Any, positions: Tensor, hidden: Tensor, batch: Any) -> Any:
        left.append(hasattr(hidden, fused_layer.READY))
        return fused(layer, positions, hidden, batch)

    monkeypatch.setattr(fused_layer, "_fused", watched)
    got = _run(_model())
    assert left == [False] + [True] * (LAYERS - 1), "each layer but the first finds what the one before left"
    assert ((got - expected).float().norm() / expected.float().norm()) < 0.03
    assert not torch.equal(got, expected)
