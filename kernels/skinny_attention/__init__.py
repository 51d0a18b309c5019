"""Attention of a decode cycle, a few rows a request, in one launch: rotary embedding, KV write, attention."""

from sdsie_sglang.kernels.skinny_attention.attention import Shape, skinny_attention

__all__ = ["Shape", "skinny_attention"]
