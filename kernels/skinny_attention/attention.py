"""The call: shapes it takes, checks, launch."""

import json
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from sdsie_sglang.kernels.skinny_attention.reference import attention_reference

try:
    import triton

    from sdsie_sglang.kernels.skinny_attention import kernel

    INTERPRET = bool(triton.knobs.runtime.interpret)
except ImportError:  # no triton on this platform: the reference serves
    INTERPRET = False

MAX_ROWS = 16  # of the batch
MAX_GROUP_ROWS = 64  # query rows that share a KV head
TUNED = Path(__file__).with_name("tuned")
MARGIN = 16  # more tokens than one CUDA graph ever writes (`gears.limits.MAX_K`)


class Shape(NamedTuple):
    """How a context is cut. Depends on neither batch nor length, so that a row's bits don't either."""

    block: int = 64  # keys of a step
    short: int = 256  # keys that one block of threads attends to alone
    parts: int = 32  # blocks of threads that a long context is spread over, for each KV head
    warps: int = 4


def takes(qkv: Tensor, k_cache: Tensor, v_cache: Tensor, requests: int) -> bool:
    """Whether the kernel serves these rows (rows, (G + 2) heads D) on this cache (slots, heads, D)."""
    if qkv.dim() != 2 or k_cache.dim() != 3 or not requests or qkv.shape[0] % requests:
        return False
    heads, size = k_cache.shape[1:]
    groups = qkv.shape[1] // (heads * size) - 2
    return (
        0 < qkv.shape[0] <= MAX_ROWS
        and qkv.shape[0] // requests * groups <= MAX_GROUP_ROWS
        and groups >= 1
        and (groups + 2) * heads * size == qkv.shape[1]
        and size in (32, 64, 128)
        and (qkv.dtype == torch.bfloat16 or not (qkv.is_cuda or INTERPRET))  # the reference takes any
        and k_cache.dtype == v_cache.dtype == qkv.dtype
        and v_cache.shape == k_cache.shape
        and k_cache.is_contiguous()
        and v_cache.is_contiguous()
        and qkv.stride(1) == 1
    )


def skinny_attention(
    qkv: Tensor,  # (rows, (G + 2) heads D) bf16: queries, keys and values of W rows a request, not yet rotated
    cos_sin: Tensor,  # (positions, D) fp32
    positions: Tensor,  # (rows,) int64
    k_cache: Tensor,  # (slots, heads, D): receives the rows' keys
    v_cache: Tensor,
    slots: Tensor,  # (rows,) int64
    table: Tensor,  # (requests, columns) int32: the slot of each position
    lengths: Tensor,  # (requests,) int32: tokens of each request; its last W are the rows
    scale: float,  # of the scores
    arrived: Tensor,  # (≥ requests * heads,) int32 of zeros, of this layer alone; left at zero
    *,
    shape: Shape | None = None,
) -> Tensor:
    """Attention (rows, G heads D) of rows that are the last of their requests; writes their keys and values.

    Cached keys at least `MARGIN` tokens back must have been written before the CUDA graph that this is part of.

    Raises ValueError for shapes, types and layouts that the kernel does not take.
    """
    requests = lengths.shape[0]
    if not takes(qkv, k_cache, v_cache, requests):
        raise ValueError(f"skinny_attention takes no {tuple(qkv.shape)} {qkv.dtype} on {tuple(k_cache.shape)}")
    rows, (heads, size) = qkv.shape[0], k_cache.shape[1:]
    if cos_sin.dtype != torch.float32 or cos_sin.dim() != 2 or cos_sin.shape[1] != size or not cos_sin.is_contiguous():
        raise ValueError(f"skinny_attention needs fp32 (positions, {size}), got {cos_sin.dtype} {tuple(cos_sin.shape)}")
    expected = {
        "positions": (positions, (rows,), torch.int64),
        "slots": (slots, (rows,), torch.int64),
        "lengths": (lengths, (requests,), torch.int32),
    }
    for name, (tensor, wanted, dtype) in expected.items():
        if tensor.shape != wanted or tensor.dtype != dtype or not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous {wanted} {dtype}, got {tuple(tensor.shape)} {tensor.dtype}")
    if table.dim() != 2 or table.shape[0] < requests or table.dtype != torch.int32 or table.stride(1) != 1:
        raise ValueError(f"table must be ({requests}, columns) int32, got {tuple(table.shape)} {table.dtype}")
    if arrived.numel() < requests * heads or arrived.dtype != torch.int32:
        raise ValueError(f"arrived must hold {requests * heads} int32, got {arrived.numel()} {arrived.dtype}")
    if not (qkv.is_cuda or INTERPRET):
        return attention_reference(qkv, cos_sin, positions, k_cache, v_cache, slots, table, lengths, scale)
    width = rows // requests
    groups = qkv.shape[1] // (heads * size) - 2
    shape = shape or best_shape(width * groups, size, _gpu(qkv.device))
    out = qkv.new_empty(rows, groups * heads * size)
    partial = qkv.new_empty(requests, heads, shape.parts, width * groups, size, dtype=torch.float32)
    marks = qkv.new_empty(requests, heads, shape.parts, 2, width * groups, dtype=torch.float32)
    kernel.attention_kernel[(heads, requests, shape.parts)](
        qkv, cos_sin, positions, k_cache, v_cache, slots, table, lengths, out, partial, marks, arrived,
        qkv.stride(0), table.stride(0), scale * 1.4426950408889634,
        **constants(width, groups, heads, size, shape, _has_pdl(qkv.device)),
    )  # fmt: skip
    return out


def best_shape(group_rows: int, size: int, gpu: str = "") -> Shape:
    """How to cut for this many query rows a KV head and this head size: as measured on this GPU, or a guess."""
    guess = Shape(warps=4 if group_rows <= 16 else 8)
    return _tuned(gpu).get((size, padded(group_rows)), guess)


def measured(device: torch.device) -> bool:
    """Whether the kernel was run and its cuts measured on this GPU: elsewhere nobody has seen it be right, or fast."""
    return bool(_tuned(_gpu(device)))


def padded(rows: int) -> int:
    """Rows as the tensor core takes them."""
    return max(16, 1 << (rows - 1).bit_length())


def table_path(gpu: str) -> Path:
    """Where `scripts/bench_skinny_attention.py --tune` writes what it found on this GPU."""
    return TUNED / f"{gpu.removeprefix('NVIDIA ').replace(' ', '_')}.json"


@cache
def _tuned(gpu: str) -> dict[tuple[int, int], Shape]:
    """By head size and padded query rows."""
    path = table_path(gpu)
    if not gpu or not path.is_file():
        return {}
    return {(row["size"], row["rows"]): Shape(*row["shape"]) for row in json.loads(path.read_text())["shapes"]}


@cache
def _gpu(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else ""


def constants(width: int, groups: int, heads: int, size: int, shape: Shape, pdl: bool) -> dict[str, object]:
    """What the kernel is compiled for, and how it is launched."""
    return {
        "W": width,
        "G": groups,
        "HEADS": heads,
        "D": size,
        "M": padded(width * groups),
        "NEW": padded(width),
        "BLOCK": shape.block,
        "SHORT": shape.short,
        "PARTS": shape.parts,
        "MARGIN": MARGIN,
        "PDL": pdl,
        "INTERPRET": INTERPRET,
        "num_warps": shape.warps,
        **({"launch_pdl": True} if pdl else {}),
    }


@cache
def _has_pdl(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9
