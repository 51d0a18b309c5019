"""Linear layers, norms, activations and rotary embedding."""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from .registry import op

ROWS_PACKED_FOR = 8  # the layout is chosen for this many rows: a verify of 7 drafts

_packed_copies: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


@op("convert_weight_packed(Tensor w) -> Tensor")
def convert_weight_packed(w: Tensor) -> Tensor:
    """Weight in oneDNN's blocked layout (an opaque tensor of that shape), or `w` where oneDNN has none."""
    packed = _pack(w)
    return w.contiguous() if packed is None else packed


@op("weight_packed_linear(Tensor x, Tensor w, Tensor? bias, bool is_vnni) -> Tensor")
def weight_packed_linear(
    x: Tensor,  # (M, K)
    w: Tensor,  # (N, K), from convert_weight_packed or plain (a language-model head tied to the embedding)
    bias: Tensor | None,  # (N,), any floating type
    is_vnni: bool,
) -> Tensor:  # (M, N)
    """x @ w.T + bias, each row's result independent of the other rows and of their number in float32."""
    bias = None if bias is None else bias.to(x.dtype)
    packed = w if w.is_mkldnn else _packed_copy(w)
    if packed is None or x.shape[0] == 0:
        return F.linear(x, w, bias)
    rows = x.shape[0]
    if rows == 1:  # oneDNN sums a single row in another order
        x = x.expand(2, -1)
    return torch.ops.mkldnn._linear_pointwise(x.contiguous(), packed, bias, "none", [], "")[:rows]


def _pack(w: Tensor) -> Tensor | None:
    if w.is_mkldnn:
        return w
    try:
        return torch.ops.mkldnn._reorder_linear_weight(w.detach().contiguous(), ROWS_PACKED_FOR)
    except (
        RuntimeError,
        AttributeError,
    ):  # a type that this processor's oneDNN lacks, or a build without oneDNN
        return None


def _packed_copy(w: Tensor) -> Tensor | None:
    """Packed copy of a weight that has to stay plain as well; made once, dropped with the weight."""
    if w not in _packed_copies:
        _packed_copies[w] = _pack(w)
    return _packed_copies[w]


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
    both = torch.cat((query.flatten(1), key.flatten(1)), dim=-1)
    rotated = _rotate(both.unflatten(-1, (-1, head_size)), cos, sin, is_neox).flatten(1)
    rotated_query, rotated_key = rotated.split((query[0].numel(), key[0].numel()), dim=-1)
    return rotated_query.reshape(query.shape), rotated_key.reshape(key.shape)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, is_neox: bool) -> Tensor:
    rotary = 2 * cos.shape[-1]
    if is_neox:  # the pairs are (i, i + rotary / 2)
        a, b = x[..., :rotary].float().chunk(2, dim=-1)
        rotated = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
    else:  # the pairs are neighbours
        a, b = x[..., :rotary:2].float(), x[..., 1:rotary:2].float()
        rotated = torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)
    rotated = rotated.to(x.dtype)
    return rotated if rotary == x.shape[-1] else torch.cat((rotated, x[..., rotary:]), dim=-1)
