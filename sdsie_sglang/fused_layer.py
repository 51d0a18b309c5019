"""A Llama layer a few rows wide in four products, rotation and attention: with norms, additions and SiLU inside.

SGLang's layer of a decode cycle launches five more small kernels between its products, each of which waits for the one
before and is waited for, and a product can ask for its weights early only behind another product. Here each product
runs what lies between it and the next one (`kernels/skinny_gemm/norm_gemm.py`).

What passes from layer to layer stays SGLang's: the output of down_proj, to be added to the stream's residual by whoever
comes next. A layer that is followed by another one has already done that addition and leaves the result beside its
output; the next layer takes it if it is fused too. A row's results are the same bits whatever the other rows are.
"""

from collections.abc import Callable
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from sdsie_sglang.config import config_from_env
from sdsie_sglang.fused_attention import attend
from sdsie_sglang.kernels.skinny_gemm import NormedStream, add_norm_gemm, has_norm_tile, normed_gemm

MAX_ROWS = 16
NEXT_NORM = "sdsie_next_norm"  # in a layer's __dict__: the norm that reads what the layer leaves
READY = "sdsie_ready"  # of a layer's output


class _Ready(NamedTuple):
    """What a fused layer leaves beside its output."""

    stream: NormedStream  # output + residual
    residual: Tensor
    norm: nn.Module  # whose weight the stream was scaled by


@cache
def wanted() -> bool:
    """Whether this server wants the layer fused: no setting against it, nothing that asks for other arithmetic."""
    from sglang.kernels.fused_op import get_fused_op_backend
    from sglang.srt.batch_invariant_ops import is_batch_invariant_mode_enabled
    from sglang.srt.runtime_context import get_exec, get_lora, get_parallel

    config = config_from_env()
    return (
        not (config.no_skinny_gemm or config.no_fused_layer)
        and not is_batch_invariant_mode_enabled()
        and get_fused_op_backend() is None
        and get_exec().deterministic.rl_on_policy_target is None
        and not get_lora().enable_lora
        and get_parallel().tp_size == 1
    )


def link_layers(result: None, model: nn.Module, *args: Any, **kwargs: Any) -> None:
    """AFTER `LlamaModel.__init__`: tells each layer which norm reads its output; the last one's is the model's own."""
    from sglang.srt.models.llama import LlamaDecoderLayer

    for layer, following in pairwise(model.layers):
        if type(layer) is LlamaDecoderLayer and type(following) is LlamaDecoderLayer:
            layer.__dict__[NEXT_NORM] = following.input_layernorm  # not a child of this layer
    return result


def forward(
    original: Callable[..., Any],
    layer: Any,
    positions: Tensor,  # [rows]
    hidden_states: Any,  # [rows, hidden], or what a stage owes
    forward_batch: Any,
    capture_output: Any = None,
) -> Any:
    """AROUND `LlamaDecoderLayer.forward`: the layer's output, and its residual in the batch's stream."""
    if capture_output is None and applies(layer, hidden_states, forward_batch):
        return _fused(layer, positions, hidden_states, forward_batch)
    return original(layer, positions, hidden_states, forward_batch, capture_output)


def applies(layer: Any, hidden_states: Any, forward_batch: Any) -> bool:
    """Whether this batch may go through the fused layer. Costs a prefill one comparison."""
    if torch.compiler.is_compiling() or not isinstance(hidden_states, Tensor):
        return False
    if hidden_states.dim() != 2 or hidden_states.shape[0] > MAX_ROWS or hidden_states.dtype != torch.bfloat16:
        return False
    return _is_plain(layer) and wanted() and _has_tiles(layer, hidden_states) and _is_ordinary(layer, forward_batch)


def _is_plain(layer: Any) -> bool:
    """Whether every part is SGLang's own, as it came, with weights as they are."""
    from sglang.srt.layers.activation import SiluAndMul
    from sglang.srt.layers.layernorm import RMSNorm
    from sglang.srt.layers.linear import MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
    from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod
    from sglang.srt.models.llama import LlamaAttention, LlamaDecoderLayer, LlamaMLP

    attention, mlp = layer.self_attn, layer.mlp
    if type(layer) is not LlamaDecoderLayer or type(attention) is not LlamaAttention or type(mlp) is not LlamaMLP:
        return False
    products = (attention.qkv_proj, attention.o_proj, mlp.gate_up_proj, mlp.down_proj)
    types = (QKVParallelLinear, RowParallelLinear, MergedColumnParallelLinear, RowParallelLinear)
    norms = [layer.input_layernorm, layer.post_attention_layernorm, layer.__dict__.get(NEXT_NORM)]
    parts = (attention, mlp, mlp.act_fn, *products, *norms)
    return (
        all(type(product) is expected for product, expected in zip(products, types, strict=True))
        and all(type(product.quant_method) is UnquantizedLinearMethod for product in products)
        and not any(product.skip_bias_add for product in products)
        and mlp.gate_up_proj.bias is None
        and mlp.down_proj.bias is None
        and all(norm is None or (type(norm) is RMSNorm and _is_plain_norm(norm)) for norm in norms)
        and type(mlp.act_fn) is SiluAndMul
        and mlp.dual_gemm.mode is None
        and not mlp.activation_quant.enabled
        and not any(part is not None and (part._forward_hooks or part._forward_pre_hooks) for part in parts)
    )


def _is_plain_norm(norm: Any) -> bool:
    return (
        norm.variance_size_override is None
        and not norm.cast_x_before_out_mul
        and not norm.fp32_residual
        and norm.weight.dtype == torch.bfloat16
    )


def _has_tiles(layer: Any, hidden_states: Tensor) -> bool:
    """Whether all four products have a measured tile at this number of rows, faster than cuBLAS on its own or not: what
    the kernels between them cost is more than what such a product loses."""
    products = (layer.self_attn.qkv_proj, layer.self_attn.o_proj, layer.mlp.gate_up_proj, layer.mlp.down_proj)
    return all(has_norm_tile(hidden_states, product.weight) for product in products)


def _is_ordinary(layer: Any, forward_batch: Any) -> bool:
    """Whether a decode cycle's stream holds a plain tensor for its residual, or nothing yet, and rows stay in place."""
    from sglang.srt.layers.layer_boundary.contracts import BatchVariant

    stream = forward_batch.residual_stream
    if stream is None or stream.transport is not None:
        return False
    if forward_batch.forward_mode.is_extend_or_draft_extend_or_mixed():
        return False  # a short prompt: no graph has had its kernels compiled, and nothing is gained
    pending = stream.pending
    fresh = pending is None and stream.residual is None
    plain = pending is not None and pending.owed is None and pending.update.is_plain_add and stream.residual is not None
    ordinary = layer.attn_boundary.plan.variant_for(forward_batch) is BatchVariant.ORDINARY
    return (fresh or plain) and ordinary


def _fused(layer: Any, positions: Tensor, hidden_states: Tensor, forward_batch: Any) -> Any:
    """The layer's own steps in its own order; what is SGLang's stays SGLang's."""
    attention, mlp = layer.self_attn, layer.mlp
    stream = forward_batch.residual_stream
    ready: _Ready | None = getattr(hidden_states, READY, None)
    norm = layer.input_layernorm
    if ready is not None and ready.norm is norm and ready.residual is stream.residual:
        stream.check(hidden_states)
        stream.write(ready.stream.residual)
        qkv = normed_gemm(ready.stream, attention.qkv_proj.weight, attention.qkv_proj.bias, norm.variance_epsilon)
    else:
        qkv, _ = attention.qkv_proj(layer.attn_boundary.prepare(hidden_states, forward_batch))
    attended = attend(attention, positions, qkv, forward_batch)

    o_proj, norm = attention.o_proj, layer.post_attention_layernorm
    _, normed = add_norm_gemm(attended, o_proj.weight, o_proj.bias, stream.residual, norm.weight)
    stream.write(normed.residual)
    activated = normed_gemm(normed, mlp.gate_up_proj.weight, None, norm.variance_epsilon, silu=True)
    following = layer.__dict__.get(NEXT_NORM)
    if following is None:
        return layer.ffn_boundary.finish(mlp.down_proj(activated)[0], forward_batch)
    output, left = add_norm_gemm(activated, mlp.down_proj.weight, None, normed.residual, following.weight)
    setattr(output, READY, _Ready(left, normed.residual, following))
    return layer.ffn_boundary.finish(output, forward_batch)
