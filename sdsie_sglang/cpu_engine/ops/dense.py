"""Linear layers, norms, activations and rotary embedding."""

import torch
import torch.nn.functional as F
from torch import Tensor

from .registry import op


@op("convert_weight_packed(Tensor w) -> Tensor")
def convert_weight_packed(w: Tensor) -> Tensor:
    """Weight in the layout that `weight_packed_linear` reads."""
    return w.contiguous().clone()


@op("weight_packed_linear(Tensor x, Tensor w, Tensor? bias, bool is_vnni) -> Tensor")
def weight_packed_linear(
    x: Tensor,  # (M, K)
    w: Tensor,  # (N, K)
    bias: Tensor | None,  # (N,), float32
    is_vnni: bool,
) -> Tensor:  # (M, N)
    """x @ w.T + bias."""
    return F.linear(x, w, None if bias is None else bias.to(x.dtype))


@op("rmsnorm_cpu(Tensor x, Tensor w, float eps) -> Tensor")
def rmsnorm_cpu(x: Tensor, w: Tensor, eps: float) -> Tensor:
    """x / rms(x) * w over the last dimension, in float32."""
    return _rmsnorm(x.float(), w, eps).to(x.dtype)


@op("fused_add_rmsnorm_cpu(Tensor(a!) x, Tensor(b!) residual, Tensor w, float eps) -> ()")
def fused_add_rmsnorm_cpu(x: Tensor, residual: Tensor, w: Tensor, eps: float) -> None:
    """residual += x; x = rmsnorm(residual)."""
    total = x.float() + residual.float()
    residual.copy_(total)
    x.copy_(_rmsnorm(total, w, eps))


def _rmsnorm(x: Tensor, w: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * w.float()


@op("silu_and_mul_cpu(Tensor x) -> Tensor")
def silu_and_mul_cpu(x: Tensor) -> Tensor:
    """silu(first half of the last dimension) * second half."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


@op("gelu_and_mul_cpu(Tensor x) -> Tensor")
def gelu_and_mul_cpu(x: Tensor) -> Tensor:
    """gelu(first half of the last dimension) * second half."""
    gate, up = x.chunk(2, dim=-1)
    return F.gelu(gate) * up


@op("gelu_tanh_and_mul_cpu(Tensor x) -> Tensor")
def gelu_tanh_and_mul_cpu(x: Tensor) -> Tensor:
    """gelu_tanh(first half of the last dimension) * second half."""
    gate, up = x.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh") * up


@op(
    "rotary_embedding_cpu(Tensor positions, Tensor query, Tensor key, int head_size, "
    "Tensor cos_sin_cache, bool is_neox) -> (Tensor, Tensor)"
)
def rotary_embedding_cpu(
    positions: Tensor,  # (M,)
    query: Tensor,  # (M, H * head_size)
    key: Tensor,  # (M, Hkv * head_size)
    head_size: int,
    cos_sin_cache: Tensor,  # (max position, rotary dimensions): cosines, then sines
    is_neox: bool,
) -> tuple[Tensor, Tensor]:
    """Rotate the first rotary dimensions of every head by its token's position."""
    cos_sin = cos_sin_cache.index_select(0, positions.flatten()).float().unsqueeze(1)
    cos, sin = cos_sin.chunk(2, dim=-1)  # (M, 1, rotary dimensions / 2) each
    return (
        _rotate(query, head_size, cos, sin, is_neox),
        _rotate(key, head_size, cos, sin, is_neox),
    )


def _rotate(x: Tensor, head_size: int, cos: Tensor, sin: Tensor, is_neox: bool) -> Tensor:
    heads = x.reshape(cos.shape[0], -1, head_size)
    rotary = 2 * cos.shape[-1]
    rotated, kept = heads[..., :rotary].float(), heads[..., rotary:]
    if is_neox:  # the pairs are (i, i + rotary / 2)
        a, b = rotated.chunk(2, dim=-1)
        rotated = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
    else:  # the pairs are neighbours
        a, b = rotated[..., ::2], rotated[..., 1::2]
        rotated = torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)
    return torch.cat((rotated.to(x.dtype), kept), dim=-1).reshape(x.shape)
