"""Decode and extend attention over the paged KV pool."""

import torch
import torch.nn.functional as F
from torch import Tensor

from .registry import op


@op(
    "decode_attention_cpu(Tensor q, Tensor(a!) k_buffer, Tensor(b!) v_buffer, float k_scale, "
    "float v_scale, Tensor(c!) o, Tensor? k, Tensor? v, Tensor loc, Tensor(d!) attn_logits, "
    "Tensor req_to_token, Tensor req_pool_indices, Tensor seq_lens, float scale, float logit_cap, "
    "bool is_cross, int window, Tensor? encoder_lens, Tensor? sinks) -> ()"
)
def decode_attention_cpu(
    q: Tensor,  # (bs, H, D)
    k_buffer: Tensor,  # (slots, Hkv, D)
    v_buffer: Tensor,
    k_scale: float,
    v_scale: float,
    o: Tensor,  # (bs, H, D)
    k: Tensor | None,  # (bs, Hkv * D) to write at `loc` first, None where it has been written
    v: Tensor | None,
    loc: Tensor,  # (bs,)
    attn_logits: Tensor,
    req_to_token: Tensor,  # (rows, positions)
    req_pool_indices: Tensor,  # (bs,)
    seq_lens: Tensor,  # (bs,) this token counted
    scale: float,
    logit_cap: float,
    is_cross: bool,
    window: int,
    encoder_lens: Tensor | None,
    sinks: Tensor | None,
) -> None:
    """One token a request attends to the request's whole sequence, itself included."""
    _refuse(is_cross, encoder_lens, sinks)
    if k is not None and v is not None:
        k_buffer[loc] = k.reshape(-1, *k_buffer.shape[1:])
        v_buffer[loc] = v.reshape(-1, *v_buffer.shape[1:])
    for i, (row, length) in enumerate(zip(req_pool_indices.tolist(), seq_lens.tolist(), strict=True)):
        first = max(0, length - window) if window > 0 else 0
        slots = req_to_token[row, first:length]
        _attend(q[i : i + 1], k_buffer[slots], v_buffer[slots], None, scale, logit_cap, o[i : i + 1])


@op(
    "extend_attention_cpu(Tensor q, Tensor? k, Tensor? v, Tensor(a!) o, Tensor k_buffer, "
    "Tensor v_buffer, float k_scale, float v_scale, Tensor req_to_token, "
    "Tensor req_pool_indices, Tensor seq_lens, Tensor extend_seq_lens, "
    "Tensor extend_start_loc, int max_len_extend, float scale, float logit_cap, bool is_cross, "
    "int window, Tensor? encoder_lens, Tensor? sinks, Tensor? tree_mask, bool is_causal) -> ()"
)
def extend_attention_cpu(
    q: Tensor,  # (tokens, H, D)
    k: Tensor | None,  # already in the pool
    v: Tensor | None,
    o: Tensor,  # (tokens, H, D)
    k_buffer: Tensor,  # (slots, Hkv, D)
    v_buffer: Tensor,
    k_scale: float,
    v_scale: float,
    req_to_token: Tensor,  # (rows, positions)
    req_pool_indices: Tensor,  # (bs,)
    seq_lens: Tensor,  # (bs,) prefix and new tokens
    extend_seq_lens: Tensor,  # (bs,) new tokens
    extend_start_loc: Tensor,  # (bs,) first row in q
    max_len_extend: int,
    scale: float,
    logit_cap: float,
    is_cross: bool,
    window: int,
    encoder_lens: Tensor | None,
    sinks: Tensor | None,
    tree_mask: Tensor | None,  # flat, n * n a request; None: causal
    is_causal: bool,
) -> None:
    """Each request's new tokens attend to its prefix and, causally or by the tree, to one another."""
    _refuse(is_cross, encoder_lens, sinks)
    offset = 0
    rows = zip(
        req_pool_indices.tolist(),
        seq_lens.tolist(),
        extend_seq_lens.tolist(),
        extend_start_loc.tolist(),
        strict=True,
    )
    for row, length, new, start in rows:
        prefix = length - new
        slots = req_to_token[row, :length]
        mask = torch.ones(new, length, dtype=torch.bool)
        if tree_mask is not None:
            mask[:, prefix:] = tree_mask[offset : offset + new * new].view(new, new)
            offset += new * new
        elif is_causal:
            mask.tril_(prefix)
        if window > 0:
            mask &= torch.ones_like(mask).triu_(prefix - window + 1)
        part = slice(start, start + new)
        _attend(q[part], k_buffer[slots], v_buffer[slots], mask, scale, logit_cap, o[part])


def _refuse(is_cross: bool, encoder_lens: Tensor | None, sinks: Tensor | None) -> None:
    if is_cross or encoder_lens is not None:
        raise NotImplementedError("this project's CPU ops have no cross-attention")
    if sinks is not None:
        raise NotImplementedError("this project's CPU ops have no attention sinks")


def _attend(
    q: Tensor,  # (m, H, D)
    k: Tensor,  # (n, Hkv, D)
    v: Tensor,
    mask: Tensor | None,  # (m, n)
    scale: float,
    logit_cap: float,
    out: Tensor,  # (m, H, D)
) -> None:
    """softmax(scale q k^T) v in float32; with logit_cap, the scores are cap * tanh(scores / cap)."""
    group = q.shape[1] // k.shape[1]
    qs, ks, vs = (t.transpose(0, 1).unsqueeze(0).float() for t in (q, k, v))
    if logit_cap > 0:
        ks, vs = ks.repeat_interleave(group, 1), vs.repeat_interleave(group, 1)
        scores = logit_cap * torch.tanh(scale * (qs @ ks.transpose(-1, -2)) / logit_cap)
        if mask is not None:
            scores = scores.masked_fill(~mask, float("-inf"))
        result = scores.softmax(-1) @ vs
    else:
        result = F.scaled_dot_product_attention(qs, ks, vs, attn_mask=mask, scale=scale, enable_gqa=group > 1)
    out.copy_(result.squeeze(0).transpose(0, 1))
