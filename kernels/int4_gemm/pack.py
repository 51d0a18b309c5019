"""Quantise a weight to four bits without data, and pack it in the order the tensor cores read it."""

from dataclasses import dataclass

import torch
from torch import Tensor

UNIT_K = 128  # the packed K is a multiple of this
ROWS = 16  # the packed N is a multiple of this
GROUPS = (32, 64, 128)  # 0 means one scale a row
METHODS = ("minmax", "mse")


@dataclass(frozen=True)
class QuantizedWeight:
    """W[n, k] = (q - zeros) * scales, one scale for ``group`` consecutive k of a row (all of them when group is 0)."""

    q: Tensor  # (N, K) uint8, 0..15
    scales: Tensor  # (N, groups) bf16 or fp16
    zeros: Tensor | None  # like scales; None means 8
    group: int

    def dequantize(self) -> Tensor:
        """fp32 (N, K), by the formula above: what every kernel must reproduce."""
        _n, k = self.q.shape
        column = torch.arange(k, device=self.q.device) // (self.group or max(k, 1))
        scales = self.scales.float()[:, column]
        zeros = 8.0 if self.zeros is None else self.zeros.float()[:, column]
        return (self.q.float() - zeros) * scales


@dataclass(frozen=True)
class PackedWeight:
    """The four tensors a checkpoint keeps, plus the sizes they stand for. The layout is drawn in kernels/README.md."""

    words: Tensor  # (N/16, K/128, 2, 32, 4) int32, both sizes rounded up
    scales: Tensor  # (N/16, groups, 8, 2) bf16 or fp16: rows g and g + 8 side by side
    zeros: Tensor | None  # like scales
    n: int
    k: int
    group: int

    @property
    def nbytes(self) -> int:
        """Bytes of weights, scales and zeros."""
        return sum(t.numel() * t.element_size() for t in (self.words, self.scales, self.zeros) if t is not None)


def check_group(group: int) -> None:
    """Raise ValueError for a group size that the kernels don't have."""
    if group not in (0, *GROUPS):
        raise ValueError(f"group size {group} is not one of {GROUPS} (0 means one scale per output channel)")


# ---------------------------------------------------------------------------------------------------------------------
# Calibration without data
# ---------------------------------------------------------------------------------------------------------------------


def quantize(
    weight: Tensor,  # (N, K)
    group: int = 128,
    symmetric: bool = True,
    method: str = "minmax",
    scale_dtype: torch.dtype = torch.bfloat16,
) -> QuantizedWeight:
    """Four-bit codes, scales and zeros from the weight alone.

    ``minmax`` asymmetric: s = (max - min) / 15, z = -min / s (a float, not rounded to a code),
    q = clamp(round(w/s + z)); with group 0 this is the original project's per-channel calibration. ``minmax``
    symmetric: s = max|w| / 7 with z = 8, so codes run from 1 to 15. ``mse`` shrinks the range in 30 steps down to
    0.42 of it (a symmetric range may also use code 0, s = max|w| / 8) and keeps, per group, the one with the least
    squared error. Scales and zeros are rounded to ``scale_dtype`` first and the codes chosen with the rounded values.
    Constant and all-zero groups stay finite.
    """
    check_group(group)
    if method not in METHODS:
        raise ValueError(f"method {method!r} is not one of {METHODS}")
    if weight.dim() != 2:
        raise ValueError(f"expected a matrix, got shape {tuple(weight.shape)}")
    n, k = weight.shape
    size = group or k
    groups = -(-k // size)
    w = weight.float()
    if groups * size != k:  # a ragged last group repeats its last column: the range doesn't change
        w = torch.cat([w, w[:, -1:].expand(n, groups * size - k)], 1)
    w = w.reshape(n, groups, size)
    low, high = w.amin(-1, keepdim=True), w.amax(-1, keepdim=True)
    shrinks = [1.0] if method == "minmax" else [1.0 - 0.02 * step for step in range(30)]
    best = None
    for shrink in shrinks:
        if symmetric:
            reach = torch.maximum(-low, high)
            s, z = _symmetric_scale(reach * shrink, 7.0, scale_dtype)
            candidates = [(s, z)]
            if method == "mse":
                candidates.append(_symmetric_scale(reach * shrink, 8.0, scale_dtype))
        else:
            candidates = [_asymmetric_scale(low * shrink, high * shrink, scale_dtype)]
        for s, z in candidates:
            q = (w / s + z).round().clamp(0, 15)
            if method == "minmax":
                best = (q, s, z)
                continue
            error = (((q - z) * s - w) ** 2).sum(-1, keepdim=True)
            if best is None:
                best, best_error = (q, s, z), error
                continue
            better = error < best_error
            best = tuple(torch.where(better, new, old) for new, old in zip((q, s, z), best, strict=True))
            best_error = torch.minimum(error, best_error)
    assert best is not None
    q, s, z = best
    return QuantizedWeight(
        q=q.to(torch.uint8).reshape(n, -1)[:, :k].contiguous(),
        scales=s.squeeze(-1).to(scale_dtype),
        zeros=None if symmetric else z.squeeze(-1).to(scale_dtype),
        group=group,
    )


def _symmetric_scale(reach: Tensor, levels: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    s = (reach / levels).to(dtype).float()
    s = torch.where(s > 0, s, torch.ones_like(s))
    return s, torch.full_like(s, 8.0)


def _asymmetric_scale(low: Tensor, high: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    s = ((high - low) / 15.0).to(dtype).float()
    flat = s <= 0  # a constant group: code 1 with scale = the constant (or zero)
    s = torch.where(flat, low.to(dtype).float(), s)
    zero = torch.where(flat, torch.zeros_like(s), -low / torch.where(s == 0, torch.ones_like(s), s))
    s = torch.where(s == 0, torch.ones_like(s), s)
    return s, zero.to(dtype).float()


# ---------------------------------------------------------------------------------------------------------------------
# Layout
# ---------------------------------------------------------------------------------------------------------------------


def pack(weight: QuantizedWeight) -> PackedWeight:
    """Reorder the codes so that a thread's 16 bytes are its own A fragments of four m16n8k16 products."""
    n, k = weight.q.shape
    tiles, units = -(-n // ROWS), -(-k // UNIT_K)
    padded = torch.zeros(tiles * ROWS, units * UNIT_K, dtype=torch.uint8, device=weight.q.device)
    padded[:n, :k] = weight.q
    # row = 16 tile + 8 half + g      k = 128 unit + 64 chunk + 32 (step / 2) + 8 t + 4 (step % 2) + 2 r + h
    axes = padded.view(tiles, 2, 8, units, 2, 2, 4, 2, 2, 2)  # tile half g unit chunk s1 t s0 r h
    nibbles = axes.permute(0, 3, 4, 2, 6, 5, 7, 9, 8, 1).contiguous()  # tile unit chunk g t s1 s0 h r half
    nibbles = nibbles.view(tiles, units, 2, 32, 4, 8).int()  # nibble 4 h + 2 r + half of word `step`
    words = torch.zeros(nibbles.shape[:-1], dtype=torch.int32, device=padded.device)
    for i in range(8):
        words |= nibbles[..., i] << (4 * i)
    return PackedWeight(
        words=words,
        scales=_pack_table(weight.scales, weight.group, tiles, units),
        zeros=None if weight.zeros is None else _pack_table(weight.zeros, weight.group, tiles, units),
        n=n,
        k=k,
        group=weight.group,
    )


def unpack(weight: PackedWeight) -> QuantizedWeight:
    """The inverse of ``pack``."""
    tiles, units = weight.words.shape[:2]
    shifts = torch.arange(0, 32, 4, device=weight.words.device)
    nibbles = ((weight.words[..., None] >> shifts) & 15).to(torch.uint8)
    axes = nibbles.view(tiles, units, 2, 8, 4, 2, 2, 2, 2, 2)  # tile unit chunk g t s1 s0 h r half
    q = axes.permute(0, 9, 3, 1, 2, 5, 4, 6, 8, 7).reshape(tiles * ROWS, units * UNIT_K)
    groups = 1 if weight.group == 0 else -(-weight.k // weight.group)
    return QuantizedWeight(
        q=q[: weight.n, : weight.k].contiguous(),
        scales=_unpack_table(weight.scales, weight.n, groups),
        zeros=None if weight.zeros is None else _unpack_table(weight.zeros, weight.n, groups),
        group=weight.group,
    )


def _pack_table(table: Tensor, group: int, tiles: int, units: int) -> Tensor:
    groups = 1 if group == 0 else units * (UNIT_K // group)
    padded = table.new_zeros(tiles * ROWS, groups)
    padded[: table.shape[0], : table.shape[1]] = table
    return padded.view(tiles, 2, 8, groups).permute(0, 3, 2, 1).contiguous()


def _unpack_table(table: Tensor, n: int, groups: int) -> Tensor:
    tiles, padded_groups = table.shape[:2]
    return table.permute(0, 3, 2, 1).reshape(tiles * ROWS, padded_groups)[:n, :groups].contiguous()
