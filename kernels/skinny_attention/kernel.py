"""Rotary embedding, KV write and attention of a few rows a request over a paged KV cache, in one launch.

A block serves one request, one KV head and one part of the request's cached keys. A part is at least `SHORT` keys
long, so that a short context is one part and needs no second step; a long one is at most `PARTS` parts, whose blocks
leave (maximum, sum, weighted values), and the last of them to arrive adds them up in the order of the parts. How keys
are cut depends on the request's own length alone, so a row's result is the same bits whatever the other requests are.

The rows' own keys and values come from the product before, not from the cache: the first part's block rotates them,
attends to them under the causal mask, and writes them to the cache for later.

With PDL a block starts while the product before it still runs. Until then it may read what was written before this
CUDA graph: lengths, slots, and cached keys at least `MARGIN` tokens back, more than one graph ever writes.
"""

import triton
import triton.language as tl

from sdsie_sglang.kernels.int4_gemm.kernel import _round_to


@triton.jit
def _operand(value, INTERPRET: tl.constexpr):
    """A factor of a product: the interpreter multiplies bf16 as bit patterns."""
    return value.to(tl.float32) if INTERPRET else value


@triton.jit
def _rotated(first, second, cos, sin, dtype: tl.constexpr, INTERPRET: tl.constexpr):
    """Both halves of rotated rows, rounded as SGLang's own kernel rounds them. All (rows, D / 2)."""
    a = first.to(tl.float32)
    b = second.to(tl.float32)
    return _round_to(a * cos - b * sin, dtype, INTERPRET), _round_to(b * cos + a * sin, dtype, INTERPRET)


@triton.jit
def _attend(
    q1, q2, k1, k2, v, seen,  # (M, D/2) twice, (keys, D/2) twice, (keys, D), (M, keys)
    top, total, mixed,  # (M,), (M,), (M, D): running maximum, sum and weighted values
    scale_log2, dtype: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """One step of online softmax, in powers of two."""
    scores = tl.dot(_operand(q1, INTERPRET), tl.trans(_operand(k1, INTERPRET)))
    scores += tl.dot(_operand(q2, INTERPRET), tl.trans(_operand(k2, INTERPRET)))
    scores = tl.where(seen, scores * scale_log2, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, axis=1))
    base = tl.where(new_top == float("-inf"), 0.0, new_top)  # nothing seen yet: every factor is 0
    fade = tl.exp2(top - base)
    weights = tl.exp2(scores - base[:, None])
    total = total * fade + tl.sum(weights, axis=1)
    mixed = mixed * fade[:, None]
    mixed += tl.dot(_operand(_round_to(weights, dtype, INTERPRET), INTERPRET), _operand(v, INTERPRET))
    return new_top, total, mixed


@triton.jit(do_not_specialize=["qkv_stride", "table_stride"])
def attention_kernel(
    qkv,  # (rows, (G + 2) HEADS D): queries, keys, values of a row
    cos_sin,  # (positions, D) fp32: cosines and then sines of D / 2 frequencies
    positions,  # (rows,) int64
    k_cache,  # (slots, HEADS, D), contiguous
    v_cache,
    slots,  # (rows,) int64: where the rows' keys and values go
    table,  # (requests, ≥ longest) int32: slot of each position
    lengths,  # (requests,) int32: tokens, the rows' own included
    out,  # (rows, G HEADS D)
    partial,  # (requests, HEADS, PARTS, ROWS, D) fp32, ROWS = W G
    marks,  # (requests, HEADS, PARTS, 2, ROWS) fp32: maximum and sum
    arrived,  # (requests, HEADS) int32 of zeros; left at zero
    qkv_stride, table_stride, scale_log2,
    W: tl.constexpr,  # rows a request, its last W tokens
    G: tl.constexpr,  # query heads of a KV head
    HEADS: tl.constexpr,  # KV heads
    D: tl.constexpr,
    M: tl.constexpr,  # power of two ≥ 16, ≥ W G
    NEW: tl.constexpr,  # power of two ≥ 16, ≥ W
    BLOCK: tl.constexpr,  # keys of a step
    SHORT: tl.constexpr,  # keys of the shortest part, a multiple of BLOCK
    PARTS: tl.constexpr,
    MARGIN: tl.constexpr,
    PDL: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    HALF: tl.constexpr = D // 2
    ROWS: tl.constexpr = W * G
    DTYPE: tl.constexpr = out.dtype.element_ty
    head = tl.program_id(0)
    request = tl.program_id(1)
    part = tl.program_id(2)
    if PDL and not INTERPRET:
        tl.extra.cuda.gdc_launch_dependents()

    cached = tl.maximum(tl.load(lengths + request) - W, 0)
    per_part = tl.maximum(tl.cdiv(tl.cdiv(cached, PARTS), BLOCK) * BLOCK, SHORT)
    parts = tl.maximum(tl.cdiv(cached, per_part), 1)
    if part >= parts:
        return
    start = part * per_part
    end = tl.minimum(start + per_part, cached)

    half = tl.arange(0, HALF)[None, :]
    whole = tl.arange(0, D)[None, :]
    key = tl.arange(0, BLOCK)
    # The first step's keys, asked for before the product is waited for
    there = start + key < end
    early = (start + key < cached - MARGIN) & there
    slot = tl.load(table + request.to(tl.int64) * table_stride + start + key, mask=early, other=0).to(tl.int64)
    at = (slot * (HEADS * D) + head * D)[:, None]
    k1 = tl.load(k_cache + at + half, mask=early[:, None], other=0.0)
    k2 = tl.load(k_cache + at + HALF + half, mask=early[:, None], other=0.0)
    v = tl.load(v_cache + at + whole, mask=early[:, None], other=0.0)
    if PDL and not INTERPRET:
        tl.extra.cuda.gdc_wait()
    late = there & (start + key >= cached - MARGIN)
    slot = tl.load(table + request.to(tl.int64) * table_stride + start + key, mask=late, other=0).to(tl.int64)
    at = (slot * (HEADS * D) + head * D)[:, None]
    k1 = tl.where(late[:, None], tl.load(k_cache + at + half, mask=late[:, None], other=0.0), k1)
    k2 = tl.where(late[:, None], tl.load(k_cache + at + HALF + half, mask=late[:, None], other=0.0), k2)
    v = tl.where(late[:, None], tl.load(v_cache + at + whole, mask=late[:, None], other=0.0), v)

    row = tl.arange(0, M)
    is_row = row < ROWS
    token = request * W + row // G  # of the batch
    query = (token.to(tl.int64) * qkv_stride + (head * G + row % G) * D)[:, None]
    position = tl.load(positions + token, mask=is_row, other=0)
    q1 = tl.load(qkv + query + half, mask=is_row[:, None], other=0.0)
    q2 = tl.load(qkv + query + HALF + half, mask=is_row[:, None], other=0.0)
    cos = tl.load(cos_sin + position[:, None] * D + half)
    sin = tl.load(cos_sin + position[:, None] * D + HALF + half)
    q1, q2 = _rotated(q1, q2, cos, sin, DTYPE, INTERPRET)

    top = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    mixed = tl.zeros([M, D], tl.float32)
    if part == 0:
        new = tl.arange(0, NEW)
        is_new = new < W
        new_token = request * W + new
        own = (new_token.to(tl.int64) * qkv_stride + (G * HEADS + head) * D)[:, None]
        new_position = tl.load(positions + new_token, mask=is_new, other=0)
        new_k1 = tl.load(qkv + own + half, mask=is_new[:, None], other=0.0)
        new_k2 = tl.load(qkv + own + HALF + half, mask=is_new[:, None], other=0.0)
        new_v = tl.load(qkv + own + HEADS * D + whole, mask=is_new[:, None], other=0.0)
        new_cos = tl.load(cos_sin + new_position[:, None] * D + half)
        new_sin = tl.load(cos_sin + new_position[:, None] * D + HALF + half)
        new_k1, new_k2 = _rotated(new_k1, new_k2, new_cos, new_sin, DTYPE, INTERPRET)
        to = (tl.load(slots + new_token, mask=is_new, other=0) * (HEADS * D) + head * D)[:, None]
        tl.store(k_cache + to + half, new_k1, mask=is_new[:, None])
        tl.store(k_cache + to + HALF + half, new_k2, mask=is_new[:, None])
        tl.store(v_cache + to + whole, new_v, mask=is_new[:, None])
        seen = is_new[None, :] & (new[None, :] <= (row // G)[:, None])
        top, total, mixed = _attend(
            q1, q2, new_k1, new_k2, new_v, seen, top, total, mixed, scale_log2, DTYPE, INTERPRET
        )  # fmt: skip
    top, total, mixed = _attend(
        q1, q2, k1, k2, v, there[None, :], top, total, mixed, scale_log2, DTYPE, INTERPRET
    )  # fmt: skip
    for first in range(start + BLOCK, end, BLOCK):
        there = first + key < end
        slot = tl.load(table + request.to(tl.int64) * table_stride + first + key, mask=there, other=0).to(tl.int64)
        at = (slot * (HEADS * D) + head * D)[:, None]
        k1 = tl.load(k_cache + at + half, mask=there[:, None], other=0.0)
        k2 = tl.load(k_cache + at + HALF + half, mask=there[:, None], other=0.0)
        v = tl.load(v_cache + at + whole, mask=there[:, None], other=0.0)
        top, total, mixed = _attend(
            q1, q2, k1, k2, v, there[None, :], top, total, mixed, scale_log2, DTYPE, INTERPRET
        )  # fmt: skip

    to_out = (token.to(tl.int64) * (G * HEADS * D) + (head * G + row % G) * D)[:, None] + whole
    if parts == 1:
        tl.store(out + to_out, _round_to(mixed / total[:, None], DTYPE, INTERPRET), mask=is_row[:, None])
        return
    each = request.to(tl.int64) * HEADS + head
    mine = (each * PARTS + part) * ROWS
    tl.store(partial + (mine + row)[:, None] * D + whole, mixed, mask=is_row[:, None])
    tl.store(marks + mine * 2 + row, top, mask=is_row)
    tl.store(marks + mine * 2 + ROWS + row, total, mask=is_row)
    tl.debug_barrier()  # every thread's stores come before the one thread's arrival
    before = tl.atomic_add(arrived + each, 1, sem="acq_rel", scope="gpu")
    if before != parts - 1:
        return
    tl.atomic_xchg(arrived + each, 0)
    top = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    mixed = tl.zeros([M, D], tl.float32)
    for other in range(0, parts):
        theirs = (each * PARTS + other) * ROWS
        # past the L1, where another block's stores do not show
        their_top = tl.load(marks + theirs * 2 + row, mask=is_row, other=0.0, cache_modifier=".cg")
        their_total = tl.load(marks + theirs * 2 + ROWS + row, mask=is_row, other=1.0, cache_modifier=".cg")
        their_mixed = tl.load(
            partial + (theirs + row)[:, None] * D + whole, mask=is_row[:, None], other=0.0, cache_modifier=".cg"
        )  # fmt: skip
        new_top = tl.maximum(top, their_top)
        fade = tl.exp2(top - new_top)
        theirs_fade = tl.exp2(their_top - new_top)
        total = total * fade + their_total * theirs_fade
        mixed = mixed * fade[:, None] + their_mixed * theirs_fade[:, None]
        top = new_top
    tl.store(out + to_out, _round_to(mixed / total[:, None], DTYPE, INTERPRET), mask=is_row[:, None])
