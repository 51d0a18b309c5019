"""What the kernel computes, in PyTorch and fp32, one request at a time."""

import torch
from torch import Tensor


def rotate(x: Tensor, cos_sin: Tensor, positions: Tensor) -> Tensor:
    """x (rows, heads, D) rotated as NeoX does it, rounded to its own type. cos_sin: (positions, D) fp32."""
    cos, sin = cos_sin[positions].unsqueeze(1).chunk(2, dim=-1)
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


def attention_reference(
    qkv: Tensor,
    cos_sin: Tensor,
    positions: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    table: Tensor,
    lengths: Tensor,
    scale: float,
) -> Tensor:
    """See `attention.skinny_attention`."""
    heads, size = k_cache.shape[1:]
    rows, requests = qkv.shape[0], lengths.shape[0]
    width = rows // requests
    q, k, v = qkv.view(rows, -1, size).split([qkv.shape[1] // size - 2 * heads, heads, heads], dim=1)
    q, k = rotate(q, cos_sin, positions), rotate(k, cos_sin, positions)
    k_cache[slots], v_cache[slots] = k, v
    out = torch.empty_like(q)
    for request, length in enumerate(lengths.tolist()):
        mine = slice(request * width, (request + 1) * width)
        cached = table[request, : max(length - width, 0)].long()
        keys = torch.cat([k_cache[cached], k[mine]]).repeat_interleave(q.shape[1] // heads, dim=1)
        values = torch.cat([v_cache[cached], v[mine]]).repeat_interleave(q.shape[1] // heads, dim=1)
        scores = torch.einsum("whd,nhd->hwn", q[mine].float(), keys.float()) * scale
        behind = torch.ones(width, keys.shape[0], dtype=torch.bool, device=qkv.device).triu(keys.shape[0] - width + 1)
        weights = scores.masked_fill(behind, float("-inf")).softmax(-1)
        out[mine] = torch.einsum("hwn,nhd->whd", weights, values.float()).to(q.dtype)
    return out.view(rows, -1)
