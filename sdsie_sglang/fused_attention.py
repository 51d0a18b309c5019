"""A Llama layer's attention of a few rows a request, from the product before it to the product after it, in one launch.

SGLang rotates, copies queries, writes keys and values, and lets FlashAttention plan, attend and combine: five to seven
launches a layer, at contexts of a few hundred tokens each longer in starting than in working. Here it is one
(`kernels/skinny_attention`). It reads SGLang's own metadata of the batch (which slots, how long) and its KV cache, so
that either may serve any pass. Everything that it does not know is left to SGLang, and so is every GPU on which it was
not measured (`kernels/skinny_attention/tuned`).
"""

from collections.abc import Callable
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from sdsie_sglang.config import config_from_env
from sdsie_sglang.kernels.skinny_attention import skinny_attention
from sdsie_sglang.kernels.skinny_attention.attention import MAX_ROWS, measured, takes

ARRIVED = "sdsie_arrived"  # in a layer's __dict__: what the kernel counts its blocks in


class Rows:
    """Stands where an attention backend would, for passes whose rows are the last of their requests and whose layers
    `serves` has looked at: says where tokens are and plans nothing.

    Args:
        runner: SGLang's ModelRunner. table: [bs, context] int32, KV slots. lengths: [bs] int32, tokens.
    """

    def __init__(self, runner: Any, table: Tensor, lengths: Tensor) -> None:
        self.token_to_kv_pool = runner.token_to_kv_pool
        self.req_to_token_pool = runner.req_to_token_pool
        self.forward_metadata = SimpleNamespace(page_table=table, cache_seqlens_int32=lengths)


def serves(model: Any, pool: Any, page_size: int) -> str | None:
    """Why the kernel cannot be all of this model's attention, or None."""
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
    from sglang.srt.models.llama import LlamaForCausalLM
    from sglang.srt.runtime_context import get_parallel

    if type(model) is not LlamaForCausalLM or not all(_is_plain(layer.self_attn) for layer in model.model.layers):
        return f"{type(model).__name__} has layers that the attention kernel does not know"
    if type(pool) is not MHATokenToKVPool or page_size != 1 or get_parallel().tp_size > 1:
        return "it needs a plain KV cache of one token a page, on one GPU"
    device = next(model.parameters()).device
    if device.type == "cuda" and not (wanted() and measured(device)):
        return "attention is left to SGLang's backend here"
    attention, (k_cache, v_cache) = model.model.layers[0].self_attn, pool.get_kv_buffer(pool.start_layer)
    rows = k_cache.new_empty(1, attention.q_size + 2 * attention.kv_size)
    return None if takes(rows, k_cache, v_cache, 1) else f"the attention kernel takes no {rows.dtype} heads like these"


@cache
def wanted() -> bool:
    """Whether this server wants it: no setting against it, nothing that asks for other arithmetic."""
    from sglang.srt.batch_invariant_ops import is_batch_invariant_mode_enabled
    from sglang.srt.runtime_context import get_exec

    return (
        not config_from_env().no_fused_attention
        and not is_batch_invariant_mode_enabled()
        and get_exec().deterministic.rl_on_policy_target is None
    )


def forward(
    original: Callable[..., Tensor],
    attention: Any,
    positions: Tensor,  # [rows]
    hidden_states: Tensor,  # [rows, hidden], or what a norm quantised
    forward_batch: Any,
) -> Tensor:
    """AROUND `LlamaAttention.forward`: [rows, hidden]."""
    few = isinstance(hidden_states, Tensor) and hidden_states.shape[0] <= MAX_ROWS
    if not (few and applies(attention, positions, forward_batch)):
        return original(attention, positions, hidden_states, forward_batch)
    qkv, _ = attention.qkv_proj(hidden_states)
    output, _ = attention.o_proj(attend(attention, positions, qkv, forward_batch))
    return output


def attend(attention: Any, positions: Tensor, qkv: Tensor, forward_batch: Any) -> Tensor:
    """Attention's output [rows, heads * D] of a layer's queries, keys and values [rows, (heads + 2 KV heads) * D]."""
    if qkv.shape[0] <= MAX_ROWS and applies(attention, positions, forward_batch):
        backend, layer = _backend(), attention.attn
        metadata = backend.forward_metadata
        k_cache, v_cache = backend.token_to_kv_pool.get_kv_buffer(layer.layer_id)
        if takes(qkv, k_cache, v_cache, metadata.cache_seqlens_int32.shape[0]):
            return skinny_attention(
                qkv, attention.rotary_emb.cos_sin_cache, positions, k_cache, v_cache, forward_batch.out_cache_loc,
                metadata.page_table, metadata.cache_seqlens_int32, layer.scaling, _arrived(layer, k_cache),
            )  # fmt: skip
    q, k, v = qkv.split([attention.q_size, attention.kv_size, attention.kv_size], dim=-1)
    q, k = attention.rotary_emb(positions, q, k)
    attended: Tensor = attention.attn(q, k, v, forward_batch)
    return attended


def applies(attention: Any, positions: Tensor, forward_batch: Any) -> bool:
    """Whether this layer and batch are ones that the kernel knows: each request's last rows, all earlier ones seen."""
    if isinstance(_backend(), Rows):
        return True
    mode = forward_batch.forward_mode
    if not (mode.is_decode() or mode.is_target_verify() or mode.is_draft_extend_v2()):
        return False
    if not positions.is_cuda or torch.compiler.is_compiling() or not (wanted() and measured(positions.device)):
        return False
    return _is_plain(attention) and _is_paged(_backend(), positions, forward_batch)


def _is_plain(attention: Any) -> bool:
    """Whether the layer is SGLang's own, with rotary embedding and softmax as the kernel computes them."""
    from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
    from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding
    from sglang.srt.layers.rotary_embedding.rope_variant import Llama3RotaryEmbedding
    from sglang.srt.models.llama import LlamaAttention

    layer, rope = attention.attn, attention.rotary_emb
    return (
        type(attention) is LlamaAttention
        and type(layer) is RadixAttention
        and layer.attn_type == AttentionType.DECODER
        and not (layer.logit_cap or layer.is_cross_attention or layer.use_irope)
        and layer.sliding_window_size == -1
        and layer.xai_temperature_len == -1
        and layer.quant_method is None
        and layer.k_scale is None
        and layer.v_scale is None
        and layer.head_dim == layer.v_head_dim == attention.head_dim
        and type(rope) in (RotaryEmbedding, Llama3RotaryEmbedding)
        and rope.is_neox_style
        and rope.rotary_dim == rope.head_size == attention.head_dim
        and rope.cos_sin_cache.dtype == torch.float32
        and not any(part._forward_hooks or part._forward_pre_hooks for part in (attention, layer, rope))
    )


def _is_paged(backend: Any, positions: Tensor, forward_batch: Any) -> bool:
    """Whether FlashAttention's metadata say of each request where its tokens are, one slot a page, in a plain cache."""
    from sglang.srt.layers.attention.flashattention_backend import FlashAttentionBackend
    from sglang.srt.layers.attention.graph_utils import padded_extend_real_tokens
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    if type(backend) is not FlashAttentionBackend or backend.forward_metadata is None:
        return False
    metadata, spec = backend.forward_metadata, forward_batch.spec_info
    return (
        backend.page_size == 1
        and backend.topk <= 1
        and not backend.kv_index_translator.is_translating
        and not backend.use_mla
        and backend.num_splits != 1  # deterministic: FlashAttention's own order of sums
        and backend.local_attn_builder is None
        and type(backend.token_to_kv_pool) is MHATokenToKVPool
        and metadata.page_table is not None
        and metadata.page_table.shape[0] >= metadata.cache_seqlens_int32.shape[0]
        and metadata.page_table.dtype == metadata.cache_seqlens_int32.dtype == torch.int32
        and forward_batch.out_cache_loc.shape == positions.shape
        and forward_batch.out_cache_loc.dtype == positions.dtype == torch.int64
        and forward_batch.out_cache_loc.is_contiguous()
        and getattr(spec, "ragged_verify_layout", None) is None
        and getattr(forward_batch, "_attn_output", None) is None
        and padded_extend_real_tokens(forward_batch.out_cache_loc, forward_batch) is None
    )


def _backend() -> Any:
    """None outside of a model runner's pass."""
    from sglang.srt.model_executor.forward_context import get_attn_backend, has_forward_context

    return get_attn_backend() if has_forward_context() else None


def _arrived(layer: Any, k_cache: Tensor) -> Tensor:
    """This layer's counters, which no other launch may use at the same time."""
    if (there := layer.__dict__.get(ARRIVED)) is None:
        there = torch.zeros(MAX_ROWS * k_cache.shape[1], dtype=torch.int32, device=k_cache.device)
        layer.__dict__[ARRIVED] = there
    counters: Tensor = there
    return counters
