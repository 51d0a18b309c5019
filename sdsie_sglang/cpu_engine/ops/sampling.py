"""The hash behind seeded sampling."""

import torch
from torch import Tensor

from .registry import op

_MASK = 0xFFFFFFFF


@op("murmur_hash32_cpu(Tensor seed, Tensor positions, Tensor col_indices) -> Tensor")
def murmur_hash32_cpu(
    seed: Tensor,  # (n,) uint64
    positions: Tensor,  # (n,)
    col_indices: Tensor,  # (m,)
) -> Tensor:  # (n, m) uint32
    """MurmurHash3 (32 bits) of the 16 bytes seed, position, column; the formula of SGLang's Triton kernel."""
    low = seed.view(torch.int64) if seed.dtype == torch.uint64 else seed.long()
    blocks = (
        (low & _MASK).view(-1, 1),
        ((low >> 32) & _MASK).view(-1, 1),
        (positions.long() & _MASK).view(-1, 1),
        (col_indices.long() & _MASK).view(1, -1),
    )
    h = torch.zeros((), dtype=torch.int64)
    for block in blocks:
        h = _mix(h, block)
    return _finish(h ^ 16).to(torch.uint32)


def _multiply(x: Tensor, constant: int) -> Tensor:
    """x * constant mod 2^32 for 0 <= x < 2^32; int64 wraps around, which keeps the low bits."""
    return (x * constant) & _MASK


def _rotate_left(x: Tensor, bits: int) -> Tensor:
    return ((x << bits) | (x >> (32 - bits))) & _MASK


def _mix(h: Tensor, block: Tensor) -> Tensor:
    k = _multiply(_rotate_left(_multiply(block, 0xCC9E2D51), 15), 0x1B873593)
    return (_multiply(_rotate_left(h ^ k, 13), 5) + 0xE6546B64) & _MASK


def _finish(h: Tensor) -> Tensor:
    h = _multiply(h ^ (h >> 16), 0x85EBCA6B)
    h = _multiply(h ^ (h >> 13), 0xC2B2AE35)
    return h ^ (h >> 16)
