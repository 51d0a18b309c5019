"""Ops that SGLang binds at import and a dense decoder doesn't call: each says what is missing."""

from .registry import unavailable

NEEDED_FOR = {
    "apply_rotary_pos_emb_cpu": "vision towers",
    "conv3d_embed_cpu": "vision towers",
    "flash_attn_varlen_func": "vision towers",
    "fused_dual_residual_rmsnorm_cpu": "Grok",
    "fused_gdn_gating_cpu": "gated-delta-net models",
    "fused_moe_router_cpu": "Grok",
    "fused_qk_gemma_rmsnorm_cpu": "Qwen3.5",
    "fused_qk_gemma_rmsnorm_with_gate_cpu": "Qwen3.5",
    "fused_qkvzba_split_reshape_cat_contiguous_cpu": "gated-delta-net models",
    "fused_sigmoid_gating_delta_rule_update_cpu": "gated-delta-net models",
    "fused_sigmoid_mul_cpu": "Qwen3.5",
}

for _name, _needed_for in NEEDED_FOR.items():
    unavailable(_name, _needed_for)


def rotate_input_ids_cpu(*args: object) -> None:
    """Imported by name; multi-layer EAGLE only."""
    raise NotImplementedError("sgl_kernel.rotate_input_ids_cpu (multi-layer EAGLE) needs SGLang's compiled CPU build")
