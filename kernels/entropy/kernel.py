"""Entropy of chosen rows of logits in Triton: one pass over the vocabulary, a row split over blocks.

A row of 128k bf16 logits is 256 KB, which one SM reads in about 2.5 us at best; at batch 1 the row
is therefore cut into `SPLITS` parts, each of which leaves (m, s, t) relative to its own maximum, and
a second small kernel combines them. Two launches, no atomics, a fixed order: the result repeats bit
for bit.
"""

import torch
import triton
import triton.language as tl

BLOCK = 4096
SPLITS = 32


@triton.jit
def _partial_kernel(
    logits,  # [num_rows, vocab]
    rows,  # [n] int64, unused unless HAS_ROWS
    part,  # [n, splits, 3] float32: max, sum of e^d, sum of d e^d, with d = x - max
    vocab,
    row_stride,
    per_split,
    HAS_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i = tl.program_id(0)
    split = tl.program_id(1)
    row = tl.load(rows + i) if HAS_ROWS else i.to(tl.int64)
    base = logits + row * row_stride
    start = split * per_split
    end = tl.minimum(start + per_split, vocab)
    m = tl.full([BLOCK], -float("inf"), tl.float32)
    s = tl.zeros([BLOCK], tl.float32)
    t = tl.zeros([BLOCK], tl.float32)
    for offset in range(start, end, BLOCK):
        col = offset + tl.arange(0, BLOCK)
        x = tl.load(base + col, mask=col < end, other=-float("inf")).to(tl.float32)
        # Running maximum a lane. While it is -inf nothing was seen, and every factor must be 0;
        # a NaN must survive, so it is let through rather than compared away.
        m_new = tl.where(x != x, x, tl.maximum(m, x))
        m_new = tl.where(m != m, m, m_new)
        seen = m != -float("inf")
        shift = tl.where(seen, m - m_new, 0.0)  # old maximum relative to the new one
        scale = tl.where(seen, tl.exp(shift), 0.0)
        d = tl.where(x == -float("inf"), -float("inf"), x - m_new)
        e = tl.where(d == -float("inf"), 0.0, tl.exp(d))
        t = scale * (t + shift * s) + tl.where(d == -float("inf"), 0.0, d * e)
        s = scale * s + e
        m = m_new
    bad = tl.max((m != m).to(tl.int32), axis=0) > 0
    top = tl.max(m, axis=0)
    shift = tl.where(m == -float("inf"), 0.0, m - top)
    scale = tl.where(m == -float("inf"), 0.0, tl.exp(shift))
    total_s = tl.sum(scale * s, axis=0)
    total_t = tl.sum(scale * (t + shift * s), axis=0)
    out = part + (i * tl.num_programs(1) + split) * 3
    tl.store(out, tl.where(bad, float("nan"), top))
    tl.store(out + 1, total_s)
    tl.store(out + 2, total_t)


@triton.jit
def _combine_kernel(
    part,  # [n, splits, 3] float32
    out,  # [n] float32: bits, or the probability of the likeliest token
    splits,
    SPLITS_POW2: tl.constexpr,
    TOP: tl.constexpr,
):
    i = tl.program_id(0)
    j = tl.arange(0, SPLITS_POW2)
    base = part + (i * splits + j) * 3
    inside = j < splits
    m = tl.load(base, mask=inside, other=-float("inf"))
    s = tl.load(base + 1, mask=inside, other=0.0)
    t = tl.load(base + 2, mask=inside, other=0.0)
    bad = tl.max((m != m).to(tl.int32), axis=0) > 0
    top = tl.max(m, axis=0)
    empty = m == -float("inf")
    shift = tl.where(empty, 0.0, m - top)
    scale = tl.where(empty, 0.0, tl.exp(shift))
    total_s = tl.sum(scale * s, axis=0)
    total_t = tl.sum(scale * (t + shift * s), axis=0)
    bits = (tl.log(total_s) - total_t / total_s) * 1.4426950408889634
    value = 1.0 / total_s if TOP else tl.maximum(bits, 0.0)
    # No usable token at all, a NaN or +inf among them: not a distribution.
    bad = bad | (top == -float("inf")) | (top == float("inf"))
    tl.store(out + i, tl.where(bad, float("nan"), value))


def entropy_bits_triton(
    logits: torch.Tensor, rows: torch.Tensor | None = None, out: torch.Tensor | None = None
) -> torch.Tensor:
    """See `sdsie_sglang.kernels.entropy.entropy_bits`. Launches without synchronising.

    Raises:
        ValueError: the last dimension of `logits` is not contiguous.
    """
    return _reduce(logits, rows, out, top=False)


def top_probability_triton(logits: torch.Tensor) -> torch.Tensor:
    """See `sdsie_sglang.kernels.entropy.top_probability`; raises as the entropy does."""
    return _reduce(logits, None, None, top=True)


def _reduce(logits: torch.Tensor, rows: torch.Tensor | None, out: torch.Tensor | None, *, top: bool) -> torch.Tensor:
    if logits.dim() != 2 or logits.stride(1) != 1:
        raise ValueError("logits must be [rows, vocab] with a contiguous vocabulary")
    n = logits.shape[0] if rows is None else rows.shape[0]
    vocab = logits.shape[1]
    if out is None:
        out = torch.empty(n, dtype=torch.float32, device=logits.device)
    if n == 0:
        return out
    per_split = triton.cdiv(triton.cdiv(vocab, SPLITS), BLOCK) * BLOCK
    splits = triton.cdiv(vocab, per_split)
    part = torch.empty((n, splits, 3), dtype=torch.float32, device=logits.device)
    _partial_kernel[(n, splits)](
        logits, rows, part, vocab, logits.stride(0), per_split,
        HAS_ROWS=rows is not None, BLOCK=BLOCK, num_warps=8,
    )  # fmt: skip
    _combine_kernel[(n,)](part, out, splits, SPLITS_POW2=triton.next_power_of_2(splits), TOP=top, num_warps=1)
    return out
