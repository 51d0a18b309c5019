"""A few rows times an unquantised weight: y = x · Wᵀ for M <= 16, the weight read once, straight into registers.

yᵀ = W xᵀ with ``mma.m16n8k16``: sixteen rows of W are the A operand, so M is padded to 8 or 16. Which k a lane holds is
free as long as x agrees, so lane 4 g + t takes eight *consecutive* k of rows g and g + 8: 16-byte loads from the
ordinary row-major W, which are the A registers as they are. K is split over the warps of a block and added in one fixed
order: one kernel, no atomics, and a row's bits depend on the warps and vectors of the tile, not on M.

Weights never depend on the kernel before, so with programmatic dependent launch they are asked for before
``griddepcontrol.wait``. ptxas sinks loads to their first use when it wants few registers; ``maxnreg`` is what keeps
them ahead, so it belongs to the tile.
"""

import triton
import triton.language as tl

from sdsie_sglang.kernels.int4_gemm.kernel import _mma, _opaque, _quarters, _store_y, _sum_warps, _zeros


@triton.jit
def _load_weights(
    w, offsets,  # (T, 4)
    row, k, N,  # (T,): first row and k of this lane
    K: tl.constexpr, R: tl.constexpr, V: tl.constexpr, PAIR: tl.constexpr,
    MASK_N: tl.constexpr, MASK_K: tl.constexpr,
):  # fmt: skip
    """32 V k of 16 R rows a warp: 2 R V 16-byte loads a lane, read once and not kept.

    PAIR: the lower eight rows of each tile of 16 are not the next eight, but those PAIR rows further down.
    """
    TILE: tl.constexpr = 8 if PAIR else 16  # rows from one tile to the next, and to a tile's lower half
    LOWER: tl.constexpr = PAIR if PAIR else 8
    loaded = ()
    for r in tl.static_range(R):
        for lower in tl.static_range(2):
            for v in tl.static_range(V):
                at = w + offsets + ((r * TILE + lower * LOWER) * (K // 2) + v * 16)
                if MASK_N or MASK_K:  # with PAIR, N counts the pairs
                    ok = (row + (r * TILE + lower * (LOWER - PAIR)) < N) & (k + v * 32 < K)
                    loaded = loaded + (tl.load(at, mask=ok[:, None], other=0, eviction_policy="evict_first"),)
                else:
                    loaded = loaded + (tl.load(at, eviction_policy="evict_first"),)
    return loaded


@triton.jit
def _load_x(
    x, offsets, row, k, M, x_stride8,
    K: tl.constexpr, C: tl.constexpr, V: tl.constexpr, MASK_K: tl.constexpr,
):  # fmt: skip
    """The activations of the same k: 16 bytes a lane, V times a column tile."""
    loaded = ()
    for c in tl.static_range(C):
        for v in tl.static_range(V):
            ok = row + c * 8 < M
            if MASK_K:
                ok = ok & (k + v * 32 < K)
            at = x + (offsets + (c * 8 * (x_stride8 * 4) + v * 16))
            loaded = loaded + (tl.load(at, mask=ok[:, None], other=0),)
    return loaded


@triton.jit
def _multiply(
    held, FIRST: tl.constexpr,  # weights of this step start at held[FIRST]
    x, totals,
    R: tl.constexpr, C: tl.constexpr, V: tl.constexpr, W: tl.constexpr,
    IS_BF16: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """32 V k: two steps of the tensor core a vector, row tile and column tile, in the order of k."""
    T: tl.constexpr = W * 32
    for v in tl.static_range(V):
        b = ()
        for c in tl.static_range(C):
            b = b + _quarters(x[c * V + v], T)
        new = ()
        for r in tl.static_range(R):
            top = _quarters(held[FIRST + (2 * r) * V + v], T)
            low = _quarters(held[FIRST + (2 * r + 1) * V + v], T)
            for c in tl.static_range(C):
                sums = _mma(top[0], low[0], top[1], low[1], b[c * 4], b[c * 4 + 1],
                            totals[(r * C + c) * 4], totals[(r * C + c) * 4 + 1], totals[(r * C + c) * 4 + 2],
                            totals[(r * C + c) * 4 + 3], W, IS_BF16, INTERPRET)  # fmt: skip
                new = new + _mma(top[2], low[2], top[3], low[3], b[c * 4 + 2], b[c * 4 + 3],
                                 sums[0], sums[1], sums[2], sums[3], W, IS_BF16, INTERPRET)  # fmt: skip
        totals = new
    return totals


@triton.jit
def _load_first_weights(
    w, offsets, row, k, N,
    K: tl.constexpr, R: tl.constexpr, V: tl.constexpr, W: tl.constexpr, DEPTH: tl.constexpr, PAIR: tl.constexpr,
    MASK_N: tl.constexpr,
):  # fmt: skip
    """The weights of the first DEPTH steps, which depend on no kernel before."""
    STEPS: tl.constexpr = (K + 32 * V * W - 1) // (32 * V * W)
    PART: tl.constexpr = K % (32 * V * W) != 0  # the last step reads less
    held = ()
    for s in tl.static_range(DEPTH):
        if s < STEPS:
            held = held + _load_weights(w + s * (16 * V * W), offsets, row, k + s * (32 * V * W), N,
                                        K, R, V, PAIR, MASK_N, PART and s == STEPS - 1)  # fmt: skip
    return held


@triton.jit
def _load_first_x(
    x, offsets, row, k, M, x_stride8,
    K: tl.constexpr, C: tl.constexpr, V: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """The activations of the first step."""
    return _load_x(x, offsets, row, k, M, x_stride8, K, C, V, K < 32 * V * W)


@triton.jit
def _multiply_all(
    held, w, w_offsets, w_row, N,  # held: from _load_first_weights
    x_next, x, x_offsets, x_row, k, M, x_stride8,  # x_next: from _load_first_x
    late, late_ok, LATE: tl.constexpr,  # LATE pointers and masks (T, 4), loaded while the last weights arrive
    K: tl.constexpr, R: tl.constexpr, C: tl.constexpr, V: tl.constexpr, W: tl.constexpr, DEPTH: tl.constexpr,
    PAIR: tl.constexpr, MASK_N: tl.constexpr, PDL: tl.constexpr, IS_BF16: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """All of K, unrolled: each warp's part of the sums, 4 R C registers a lane, and then what was loaded late."""
    STEPS: tl.constexpr = (K + 32 * V * W - 1) // (32 * V * W)
    PART: tl.constexpr = K % (32 * V * W) != 0  # the last step reads less
    EACH: tl.constexpr = 2 * R * V
    totals = _zeros(R * C * 4, W * 32)
    loaded = ()
    for s in tl.static_range(STEPS):
        x_now = x_next
        if s + 1 < STEPS:
            x_next = _load_x(x + (s + 1) * (16 * V * W), x_offsets, x_row, k + (s + 1) * (32 * V * W), M, x_stride8,
                             K, C, V, PART and s + 1 == STEPS - 1)  # fmt: skip
        if s == STEPS - 1:
            for i in tl.static_range(LATE):
                loaded = loaded + (tl.load(late[i], mask=late_ok[i], other=0.0),)
        if PDL and not INTERPRET:
            tl.extra.cuda.gdc_wait()  # returns at once; ptxas moves no load across it, so those of x stay ahead
        totals = _multiply(held, s * EACH, x_now, totals, R, C, V, W, IS_BF16, INTERPRET)
        if s + DEPTH < STEPS:
            held = held + _load_weights(w + (s + DEPTH) * (16 * V * W), w_offsets, w_row,
                                        k + (s + DEPTH) * (32 * V * W), N,
                                        K, R, V, PAIR, MASK_N, PART and s + DEPTH == STEPS - 1)  # fmt: skip
    return totals + loaded


@triton.jit(do_not_specialize=["M", "x_stride8"])
def skinny_kernel(
    x,  # (M, K) as int32 pairs, rows 16-byte aligned
    w,  # (N, K) as int32 pairs, contiguous
    bias,  # (N,) or anything when not HAS_BIAS
    y,  # (M, N)
    M, N, x_stride8,  # x_stride8: row stride of x in units of 8 elements
    K: tl.constexpr,  # a multiple of 8
    MASK_N: tl.constexpr,  # N isn't a multiple of 16 R
    R: tl.constexpr,  # row tiles of 16 a warp works on
    C: tl.constexpr,  # column tiles of 8 activations
    W: tl.constexpr,  # warps, 4 or more; each takes every W-th 32 V of K
    V: tl.constexpr,  # 16-byte vectors a lane loads of a row in one step
    DEPTH: tl.constexpr,  # steps whose weights are asked for ahead, 1 or more
    HAS_BIAS: tl.constexpr, PDL: tl.constexpr,
    IS_BF16: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """One block: 16 R rows of W, all of K, unrolled."""
    T: tl.constexpr = W * 32
    STRIDE: tl.constexpr = K // 2
    block = tl.program_id(0)
    thread = tl.arange(0, T)
    lane = thread % 32
    g = lane // 4
    row = g + block * (16 * R)
    k_lane = thread // 32 * (32 * V) + lane % 4 * 8
    four = tl.arange(0, 4)[None, :]
    w_at = w + block * (16 * R * STRIDE)
    w_offsets = (g * STRIDE + thread // 32 * (16 * V) + lane % 4 * 4)[:, None] + four
    x_offsets = (g * (x_stride8 * 4) + thread // 32 * (16 * V) + lane % 4 * 4)[:, None] + four

    if PDL and not INTERPRET:
        tl.extra.cuda.gdc_launch_dependents()
    held = _load_first_weights(w_at, w_offsets, row, k_lane, N, K, R, V, W, DEPTH, 0, MASK_N)
    if PDL and not INTERPRET:
        tl.extra.cuda.gdc_wait()  # weights don't depend on the kernel before; everything else does
    x_next = _load_first_x(x, x_offsets, g, k_lane, M, x_stride8, K, C, V, W)
    totals = _multiply_all(held, w_at, w_offsets, row, N, x_next, x, x_offsets, g, k_lane, M, x_stride8,
                           (x,), (x,), 0, K, R, C, V, W, DEPTH, 0, MASK_N, PDL, IS_BF16, INTERPRET)  # fmt: skip

    # thread t takes outputs t, t + T, ... of the block's (8 C, 16 R) tile, n fastest
    Q: tl.constexpr = (4 * R * C + W - 1) // W
    places = ()
    sources = ()
    for slot in tl.static_range(Q):
        order = (_opaque(thread, INTERPRET) + slot * T).to(tl.uint32)  # unsigned: / and % are shifts
        m = (order // (16 * R)).to(tl.int32)
        col = (order % (16 * R)).to(tl.int32)
        # where the tensor core left it: lane 4 g + t, register 2 half + odd; row 8 half + g, column 2 t + odd
        source = ((col // 16 * C + m // 8) * 4 + col // 8 % 2 * 2 + m % 2) * 32 + col % 8 * 4 + m % 8 // 2
        source = tl.where(order < 128 * R * C, source, -1)
        n = col + block * (16 * R)
        sources = sources + (source,)
        places = places + (m * N + n, n, (m < M) & (n < N) & (source >= 0))
    values = _sum_warps(totals, thread, sources, R * C, Q, W, INTERPRET)
    for slot in tl.static_range(Q):
        _store_y(y, bias, places[slot * 3], places[slot * 3 + 1], values[slot], places[slot * 3 + 2], N,
                 HAS_BIAS, INTERPRET)  # fmt: skip
