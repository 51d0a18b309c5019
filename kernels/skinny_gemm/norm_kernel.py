"""The product of `kernel.py` with what lies between a decoder layer's products: residual addition, RMS norm, SiLU.

    s = x + residual;   y = W · (s · norm_weight / rms(s)) = (W · (s · norm_weight)) / rms(s)

A row's 1 / rms is one number, so it may come after the product, and then no block has to know the whole row before it
starts. The product that makes x adds the residual to its own sixteen columns, scales them by the norm's weight, and
writes their sum of squares (`add_norm_kernel`). The product that reads the norm loads scaled activations like any
others, adds K / 16 sums of squares a row, and multiplies its own sums by 1 / rms (`normed_kernel`); it asks for them
behind the last weights, because earlier they would take the registers of activations. Nothing is computed twice, and
the main loop is the plain product's.

SiLU and multiply belong to the product that makes gate and up: with PAIR the tensor core's sixteen rows are eight rows
of gate and the same eight of up, which lands both in one lane.

Where SGLang's separate kernels round, this rounds: a product to bf16 before the addition, s to bf16 for the residual
only, gate and up to bf16 before SiLU. One rounding differs: s · norm_weight is rounded before, not after, it is
multiplied by 1 / rms, so the same relative error falls elsewhere. Sums of squares have one order for every M and tile.
"""

import triton
import triton.language as tl

from sdsie_sglang.kernels.int4_gemm.kernel import _opaque, _quarters, _round_to, _sum_warps
from sdsie_sglang.kernels.skinny_gemm.kernel import _load_first_weights, _load_first_x, _multiply_all

SUM_COLUMNS = 16  # columns of s that one sum of squares covers


@triton.jit
def _round_trip(value, dtype: tl.constexpr, INTERPRET: tl.constexpr):
    """What a kernel of its own would have written and the next one read."""
    return _round_to(value, dtype, INTERPRET).to(tl.float32)


@triton.jit
def _one_over_rms(sums, FIRST: tl.constexpr, PARTS: tl.constexpr, SHARE: tl.constexpr, eps,
                  K: tl.constexpr, W: tl.constexpr):  # fmt: skip
    """1 / rms of a row (T,), from sums[FIRST:FIRST + PARTS] (T, 4) of the SHARE neighbouring threads of that row."""
    T: tl.constexpr = W * 32
    total = sums[FIRST]
    for part in tl.static_range(1, PARTS):
        total += sums[FIRST + part]
    a, b, c, d = _quarters(total, T)
    row = tl.sum(tl.reshape((a + b) + (c + d), [T // SHARE, SHARE]), axis=1, keep_dims=True)
    return tl.reshape(tl.rsqrt(tl.broadcast_to(row, [T // SHARE, SHARE]) / K + eps), [T])


@triton.jit(do_not_specialize=["M", "x_stride8"])
def add_norm_kernel(
    x,  # (M, K) as int32 pairs, rows 16-byte aligned
    w,  # (N, K) as int32 pairs, contiguous
    bias,  # (N,) or anything when not HAS_BIAS
    residual,  # (M, N)
    norm_weight,  # (N,) of the norm that comes next
    y,  # (M, N): x · Wᵀ
    residual_out,  # (M, N): s = y + residual; not residual itself, which other products may still be reading
    scaled,  # (M, N): s · norm_weight
    squares,  # (M, N / 16) fp32
    M, N, x_stride8,
    K: tl.constexpr, MASK_N: tl.constexpr,
    R: tl.constexpr, C: tl.constexpr, W: tl.constexpr, V: tl.constexpr, DEPTH: tl.constexpr,
    HAS_BIAS: tl.constexpr, PDL: tl.constexpr, IS_BF16: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """One block: 16 R rows of W, all of K, and their columns of s. Arguments as in `skinny_kernel`."""
    T: tl.constexpr = W * 32
    STRIDE: tl.constexpr = K // 2
    OUT: tl.constexpr = y.dtype.element_ty
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
        tl.extra.cuda.gdc_wait()
    x_next = _load_first_x(x, x_offsets, g, k_lane, M, x_stride8, K, C, V, W)

    Q: tl.constexpr = (4 * R * C + W - 1) // W
    sources = ()
    places = ()
    added = ()
    for slot in tl.static_range(Q):  # places as in skinny_kernel
        order = (_opaque(thread, INTERPRET) + slot * T).to(tl.uint32)
        m = (order // (16 * R)).to(tl.int32)
        col = (order % (16 * R)).to(tl.int32)
        source = ((col // 16 * C + m // 8) * 4 + col // 8 % 2 * 2 + m % 2) * 32 + col % 8 * 4 + m % 8 // 2
        source = tl.where(order < 128 * R * C, source, -1)
        n = col + block * (16 * R)
        inside = (m < M) & (n < N) & (source >= 0)
        sources = sources + (source,)
        places = places + (m, n, inside)
        # asked for here, used after the product: the wait in the loop keeps them ahead
        added = added + (
            tl.load(residual + m * N + n, mask=inside, other=0.0),
            tl.load(norm_weight + n, mask=inside, other=0.0),
        )
        if HAS_BIAS:
            added = added + (tl.load(bias + n, mask=inside, other=0.0),)
        else:
            added = added + (0.0,)
    totals = _multiply_all(held, w_at, w_offsets, row, N, x_next, x, x_offsets, g, k_lane, M, x_stride8,
                           (x,), (x,), 0, K, R, C, V, W, DEPTH, 0, MASK_N, PDL, IS_BF16, INTERPRET)  # fmt: skip
    values = _sum_warps(totals, thread, sources, R * C, Q, W, INTERPRET)
    for slot in tl.static_range(Q):
        m = places[slot * 3]
        n = places[slot * 3 + 1]
        inside = places[slot * 3 + 2]
        value = values[slot]
        if HAS_BIAS:
            value += added[slot * 3 + 2].to(tl.float32)
        at = m * N + n
        tl.store(y + at, _round_to(value, OUT, INTERPRET), mask=inside)
        s = _round_trip(value, OUT, INTERPRET) + added[slot * 3].to(tl.float32)
        tl.store(residual_out + at, _round_to(s, OUT, INTERPRET), mask=inside)
        tl.store(scaled + at, _round_to(s * added[slot * 3 + 1].to(tl.float32), OUT, INTERPRET), mask=inside)
        sixteenths = tl.reshape(tl.where(inside, s * s, 0.0), [T // 16, 16])
        sixteen = tl.reshape(tl.broadcast_to(tl.sum(sixteenths, axis=1, keep_dims=True), [T // 16, 16]), [T])
        tl.store(squares + m * (N // 16) + n // 16, sixteen, mask=inside & (n % 16 == 0))


@triton.jit(do_not_specialize=["M", "x_stride8", "eps"])
def normed_kernel(
    x,  # (M, K) as int32 pairs, scaled by the norm's weight
    squares,  # (M, K / 16) fp32: of s before it was scaled
    w,  # (N, K) as int32 pairs, contiguous; with PAIR (2 N, K), gate and then up
    bias,  # (N,) or anything when not HAS_BIAS
    y,  # (M, N)
    M, N, x_stride8, eps,
    K: tl.constexpr, MASK_N: tl.constexpr,
    PAIR: tl.constexpr,  # N: y = silu(gate) · up; 0: y is the product
    R: tl.constexpr, C: tl.constexpr, W: tl.constexpr, V: tl.constexpr, DEPTH: tl.constexpr,
    HAS_BIAS: tl.constexpr, PDL: tl.constexpr, IS_BF16: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """One block: 16 R rows of W, all of K; 16 R outputs a row, or 8 R with PAIR. Arguments as in `skinny_kernel`."""
    T: tl.constexpr = W * 32
    STRIDE: tl.constexpr = K // 2
    OUT: tl.constexpr = y.dtype.element_ty
    WIDE: tl.constexpr = 8 * R if PAIR else 16 * R  # outputs a row
    block = tl.program_id(0)
    thread = tl.arange(0, T)
    lane = thread % 32
    g = lane // 4
    row = g + block * WIDE
    k_lane = thread // 32 * (32 * V) + lane % 4 * 8
    four = tl.arange(0, 4)[None, :]
    w_at = w + block * (WIDE * STRIDE)
    w_offsets = (g * STRIDE + thread // 32 * (16 * V) + lane % 4 * 4)[:, None] + four
    x_offsets = (g * (x_stride8 * 4) + thread // 32 * (16 * V) + lane % 4 * 4)[:, None] + four

    if PDL and not INTERPRET:
        tl.extra.cuda.gdc_launch_dependents()
    held = _load_first_weights(w_at, w_offsets, row, k_lane, N, K, R, V, W, DEPTH, PAIR, MASK_N)
    if PDL and not INTERPRET:
        tl.extra.cuda.gdc_wait()
    x_next = _load_first_x(x, x_offsets, g, k_lane, M, x_stride8, K, C, V, W)

    Q: tl.constexpr = (WIDE * 8 * C + T - 1) // T
    SUMS: tl.constexpr = K // 16
    SHARE: tl.constexpr = 8 if PAIR else 16  # neighbouring threads with outputs of one row, whatever R is
    PARTS: tl.constexpr = (SUMS + 4 * SHARE - 1) // (4 * SHARE)
    sources = ()
    ups = ()
    places = ()
    late = ()
    late_ok = ()
    for slot in tl.static_range(Q):
        order = (_opaque(thread, INTERPRET) + slot * T).to(tl.uint32)
        m = (order // WIDE).to(tl.int32)
        col = (order % WIDE).to(tl.int32)
        if PAIR:  # row tile col // 8: gate in its upper eight rows, up in its lower
            source = ((col // 8 * C + m // 8) * 4 + m % 2) * 32 + col % 8 * 4 + m % 8 // 2
        else:
            source = ((col // 16 * C + m // 8) * 4 + col // 8 % 2 * 2 + m % 2) * 32 + col % 8 * 4 + m % 8 // 2
        ok = order < WIDE * 8 * C
        n = col + block * WIDE
        sources = sources + (tl.where(ok, source, -1),)
        ups = ups + (tl.where(ok, source + 64, -1),)
        places = places + (m * N + n, n, (m < M) & (n < N) & ok)
        for part in tl.static_range(PARTS):
            column = (thread % SHARE * 4)[:, None] + four + part * (4 * SHARE)
            late = late + (squares + (m * SUMS)[:, None] + column,)
            late_ok = late_ok + ((m < M)[:, None] & (column < SUMS),)
    totals = _multiply_all(held, w_at, w_offsets, row, N, x_next, x, x_offsets, g, k_lane, M, x_stride8,
                           late, late_ok, Q * PARTS, K, R, C, V, W, DEPTH, PAIR, MASK_N, PDL, IS_BF16,
                           INTERPRET)  # fmt: skip
    products = ()
    for i in tl.static_range(4 * R * C):
        products = products + (totals[i],)
    if PAIR:
        values = _sum_warps(products, thread, sources + ups, R * C, 2 * Q, W, INTERPRET)
    else:
        values = _sum_warps(products, thread, sources, R * C, Q, W, INTERPRET)
    for slot in tl.static_range(Q):
        inside = places[slot * 3 + 2]
        one_over_rms = _one_over_rms(totals, 4 * R * C + slot * PARTS, PARTS, SHARE, eps, K, W)
        value = values[slot] * one_over_rms
        if PAIR:
            gate = _round_trip(value, OUT, INTERPRET)
            up = _round_trip(values[Q + slot] * one_over_rms, OUT, INTERPRET)
            value = gate / (1.0 + tl.exp(-gate)) * up
        if HAS_BIAS:
            value += tl.load(bias + places[slot * 3 + 1], mask=inside, other=0.0).to(tl.float32)
        tl.store(y + places[slot * 3], _round_to(value, OUT, INTERPRET), mask=inside)
