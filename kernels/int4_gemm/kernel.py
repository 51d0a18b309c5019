"""INT4 weights times bf16/fp16 activations: y = x · dequant(W)ᵀ, three ways, one packed layout.

    W[n, k] = (q[n, k] - z[n, group(k)]) * s[n, group(k)],   q in 0..15,   z = 8 when symmetric

``fragment_kernel``  M <= 64. Computes yᵀ = W xᵀ: sixteen weight rows are the A operand of ``mma.m16n8k16``, so M is padded
                     to 8 and not to 64, and a thread's 16-byte load holds exactly the nibbles of its own A registers.
                     Nothing passes through shared memory before the final sum over warps.
``fused_kernel``     M above: the packed tile is turned into bf16 in registers and fed to ``tl.dot`` from shared memory.
``dequant_kernel``   writes W as bf16 (16-byte stores); cuBLAS does the product. Wins when M is large.

Turning nibbles into floats takes no integer-to-float conversion. 0x4300 | q is the bf16 number 128 + q (0x6400 | q is
1024 + q in fp16), so one three-input logic operation makes two weights. The fragment kernel then removes 128 + z after
the product instead of before it: sum((128 + q) x) - (128 + z) sum(x), where sum(x) comes from the same tensor cores
with an A operand of ones. Group scales are applied to the fp32 group sums, four multiplies for 2,048 products.

The packed layout is drawn in kernels/README.md. Every kernel runs under TRITON_INTERPRET=1: inline PTX is then replaced
by an emulation of the same instruction on the same fragments, so the layout itself is what the CPU tests check.
"""

import triton
import triton.language as tl

UNIT_K = 128  # k covered by one scale flush of a warp; the packed K is a multiple of it
ROWS = 16  # weight rows of one fragment


# ---------------------------------------------------------------------------------------------------------------------
# Instructions, each with an emulation for the interpreter
# ---------------------------------------------------------------------------------------------------------------------


@triton.jit
def _halves(word, IS_BF16: tl.constexpr):
    """The two 16-bit floats of a 32-bit word, as fp32."""
    if IS_BF16:
        low = (word << 16).to(tl.float32, bitcast=True)
        high = (word & -65536).to(tl.float32, bitcast=True)
    else:
        low = (word & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        high = ((word >> 16) & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return low, high


@triton.jit
def _nibbles_to_pairs(word, IS_BF16: tl.constexpr, CENTRE: tl.constexpr, INTERPRET: tl.constexpr):
    """Eight nibbles to four registers of two floats: nibble i and i + 4 become the halves of register i.

    Values are 128 + q (bf16) or 1024 + q (fp16); with CENTRE they are q - 8.
    """
    if INTERPRET:
        magic: tl.constexpr = 0x43004300 if IS_BF16 else 0x64006400
        r0 = (word & 0x000F000F) | magic
        r1 = ((word >> 4) & 0x000F000F) | magic
        r2 = ((word >> 8) & 0x000F000F) | magic
        r3 = ((word >> 12) & 0x000F000F) | magic
        if CENTRE:
            r0 = _centre_emulated(r0, IS_BF16)
            r1 = _centre_emulated(r1, IS_BF16)
            r2 = _centre_emulated(r2, IS_BF16)
            r3 = _centre_emulated(r3, IS_BF16)
        return r0, r1, r2, r3
    if CENTRE:
        if IS_BF16:
            return tl.inline_asm_elementwise(
                """
                {
                .reg .b32 w0, w1, w2, w3, one, offset;
                mov.b32 one, 0x3f803f80;
                mov.b32 offset, 0xc308c308;
                mov.b32 w0, $4;
                shr.u32 w1, w0, 4;
                shr.u32 w2, w0, 8;
                shr.u32 w3, w0, 12;
                lop3.b32 w0, w0, 0x000f000f, 0x43004300, 0xea;
                lop3.b32 w1, w1, 0x000f000f, 0x43004300, 0xea;
                lop3.b32 w2, w2, 0x000f000f, 0x43004300, 0xea;
                lop3.b32 w3, w3, 0x000f000f, 0x43004300, 0xea;
                fma.rn.bf16x2 $0, w0, one, offset;
                fma.rn.bf16x2 $1, w1, one, offset;
                fma.rn.bf16x2 $2, w2, one, offset;
                fma.rn.bf16x2 $3, w3, one, offset;
                }
                """,
                "=r,=r,=r,=r,r",
                [word],
                dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
                is_pure=True,
                pack=1,
            )
        return tl.inline_asm_elementwise(
            """
            {
            .reg .b32 w0, w1, w2, w3, offset;
            mov.b32 offset, 0xe408e408;
            mov.b32 w0, $4;
            shr.u32 w1, w0, 4;
            shr.u32 w2, w0, 8;
            shr.u32 w3, w0, 12;
            lop3.b32 w0, w0, 0x000f000f, 0x64006400, 0xea;
            lop3.b32 w1, w1, 0x000f000f, 0x64006400, 0xea;
            lop3.b32 w2, w2, 0x000f000f, 0x64006400, 0xea;
            lop3.b32 w3, w3, 0x000f000f, 0x64006400, 0xea;
            add.rn.f16x2 $0, w0, offset;
            add.rn.f16x2 $1, w1, offset;
            add.rn.f16x2 $2, w2, offset;
            add.rn.f16x2 $3, w3, offset;
            }
            """,
            "=r,=r,=r,=r,r",
            [word],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
            is_pure=True,
            pack=1,
        )
    if IS_BF16:
        return tl.inline_asm_elementwise(
            """
            {
            .reg .b32 w0, w1, w2, w3;
            mov.b32 w0, $4;
            shr.u32 w1, w0, 4;
            shr.u32 w2, w0, 8;
            shr.u32 w3, w0, 12;
            lop3.b32 $0, w0, 0x000f000f, 0x43004300, 0xea;
            lop3.b32 $1, w1, 0x000f000f, 0x43004300, 0xea;
            lop3.b32 $2, w2, 0x000f000f, 0x43004300, 0xea;
            lop3.b32 $3, w3, 0x000f000f, 0x43004300, 0xea;
            }
            """,
            "=r,=r,=r,=r,r",
            [word],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
            is_pure=True,
            pack=1,
        )
    return tl.inline_asm_elementwise(
        """
        {
        .reg .b32 w0, w1, w2, w3;
        mov.b32 w0, $4;
        shr.u32 w1, w0, 4;
        shr.u32 w2, w0, 8;
        shr.u32 w3, w0, 12;
        lop3.b32 $0, w0, 0x000f000f, 0x64006400, 0xea;
        lop3.b32 $1, w1, 0x000f000f, 0x64006400, 0xea;
        lop3.b32 $2, w2, 0x000f000f, 0x64006400, 0xea;
        lop3.b32 $3, w3, 0x000f000f, 0x64006400, 0xea;
        }
        """,
        "=r,=r,=r,=r,r",
        [word],
        dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
        is_pure=True,
        pack=1,
    )


@triton.jit
def _centre_emulated(word, IS_BF16: tl.constexpr):
    low, high = _halves(word, IS_BF16)
    if IS_BF16:
        low_bits = ((low - 136.0).to(tl.int32, bitcast=True) >> 16) & 0xFFFF
        high_bits = (high - 136.0).to(tl.int32, bitcast=True) & -65536
    else:
        low_bits = (low - 1032.0).to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        high_bits = (high - 1032.0).to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) << 16
    return low_bits | high_bits


@triton.jit
def _mma_half_emulated(
    a0, a1, b0, b1, R: tl.constexpr, C: tl.constexpr, W: tl.constexpr, IS_BF16: tl.constexpr
):
    """Eight rows of the 16 x 8 product; registers a0 (k 0..7) and a1 (k 8..15) hold those rows."""
    total = tl.zeros([R, C, W, 8, 8], tl.float32)
    a_low, a_high = _halves(tl.broadcast_to(a0, [R, C, W * 32]), IS_BF16)
    b_low, b_high = _halves(tl.broadcast_to(b0, [R, C, W * 32]), IS_BF16)
    total += _outer_emulated(a_low, b_low, R, C, W) + _outer_emulated(a_high, b_high, R, C, W)
    a_low, a_high = _halves(tl.broadcast_to(a1, [R, C, W * 32]), IS_BF16)
    b_low, b_high = _halves(tl.broadcast_to(b1, [R, C, W * 32]), IS_BF16)
    total += _outer_emulated(a_low, b_low, R, C, W) + _outer_emulated(a_high, b_high, R, C, W)
    even, odd = tl.split(tl.reshape(total, [R, C, W, 8, 4, 2]))
    return tl.reshape(even, [R, C, W * 32]), tl.reshape(odd, [R, C, W * 32])


@triton.jit
def _outer_emulated(a, b, R: tl.constexpr, C: tl.constexpr, W: tl.constexpr):
    rows = tl.reshape(a, [R, C, W, 8, 1, 4])
    columns = tl.reshape(b, [R, C, W, 1, 8, 4])
    return tl.sum(rows * columns, axis=5)


@triton.jit
def _mma(
    a0, a1, a2, a3,  # (R, 1, T) int32: A fragment of m16n8k16, two floats a register
    b0, b1,  # (1, C, T) int32: B fragment
    c0, c1, c2, c3,  # (R, C, T) fp32
    R: tl.constexpr, C: tl.constexpr, W: tl.constexpr,
    IS_BF16: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    if INTERPRET:
        top_even, top_odd = _mma_half_emulated(a0, a2, b0, b1, R, C, W, IS_BF16)
        low_even, low_odd = _mma_half_emulated(a1, a3, b0, b1, R, C, W, IS_BF16)
        return c0 + top_even, c1 + top_odd, c2 + low_even, c3 + low_odd
    if IS_BF16:
        return tl.inline_asm_elementwise(
            "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
            "{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};",
            "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f",
            [a0, a1, a2, a3, b0, b1, c0, c1, c2, c3],
            dtype=(tl.float32, tl.float32, tl.float32, tl.float32),
            is_pure=True,
            pack=1,
        )
    return tl.inline_asm_elementwise(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};",
        "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f",
        [a0, a1, a2, a3, b0, b1, c0, c1, c2, c3],
        dtype=(tl.float32, tl.float32, tl.float32, tl.float32),
        is_pure=True,
        pack=1,
    )


@triton.jit
def _quarters(vector, R: tl.constexpr, T: tl.constexpr):
    """The four words of each thread's 16-byte vector: (T, R, 4) to four of (R, T)."""
    even, odd = tl.split(tl.reshape(tl.permute(vector, (1, 0, 2)), [R, T, 2, 2]))
    word0, word2 = tl.split(even)
    word1, word3 = tl.split(odd)
    return word0, word1, word2, word3


@triton.jit
def _round_to(value, dtype: tl.constexpr, INTERPRET: tl.constexpr):
    """fp32 to the 16-bit type, to nearest even; the interpreter's own bf16 cast truncates."""
    if INTERPRET and dtype == tl.bfloat16:
        bits = value.to(tl.int32, bitcast=True)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return value.to(dtype)


# ---------------------------------------------------------------------------------------------------------------------
# M <= 64: fragments straight from memory to the tensor cores
# ---------------------------------------------------------------------------------------------------------------------


@triton.jit
def _load_weights(words, offsets, unit, ok, EVEN: tl.constexpr):
    """Both 64-k chunks of this warp's unit: (T, R, 4) int32 each, 16 bytes a thread, read once and not kept."""
    pointers = words + (offsets + (unit * 256)[:, None, None])
    if EVEN:
        first = tl.load(pointers, eviction_policy="evict_first")
        second = tl.load(pointers + 128, eviction_policy="evict_first")
    else:
        first = tl.load(pointers, mask=ok[:, :, None], other=0, eviction_policy="evict_first")
        second = tl.load(pointers + 128, mask=ok[:, :, None], other=0, eviction_policy="evict_first")
    return first, second


@triton.jit
def _load_x(x, offsets, row_ok, k, K, PART: tl.constexpr):
    """Eight consecutive k of each thread's row: (T, C, 4) int32, four tensor-core B registers."""
    ok = row_ok & (k + PART * 32 < K)[:, None]
    return tl.load(x + (offsets + ((k // 8) * 4)[:, None, None] + PART * 16), mask=ok[:, :, None], other=0)


@triton.jit
def _load_pairs(table, offsets, unit, ok, PER_UNIT: tl.constexpr, PART: tl.constexpr, EVEN: tl.constexpr):
    """Scales (or zeros) of rows g and g + 8, one 32-bit word: (T, R) int32."""
    pointers = table + (offsets + (unit * PER_UNIT + PART)[:, None] * 8)
    if EVEN:
        return tl.load(pointers)
    return tl.load(pointers, mask=ok, other=0)


@triton.jit
def _flush(
    t0, t1, t2, t3, g0, g1, g2, g3, xs0, xs1, scale_word, zero_word,
    SYMMETRIC: tl.constexpr, CENTRE: tl.constexpr, IS_BF16: tl.constexpr,
):  # fmt: skip
    """total += scale * (group sum - zero * sum of x); every step is exact when x is one-hot."""
    s_low, s_high = _halves(tl.trans(scale_word)[:, None, :], IS_BF16)
    if SYMMETRIC:
        if not CENTRE:
            bias: tl.constexpr = 136.0 if IS_BF16 else 1032.0
            g0 -= bias * xs0
            g1 -= bias * xs1
            g2 -= bias * xs0
            g3 -= bias * xs1
    else:
        offset: tl.constexpr = -8.0 if CENTRE else (128.0 if IS_BF16 else 1024.0)
        z_low, z_high = _halves(tl.trans(zero_word)[:, None, :], IS_BF16)
        g0 = (g0 - offset * xs0) - z_low * xs0
        g1 = (g1 - offset * xs1) - z_low * xs1
        g2 = (g2 - offset * xs0) - z_high * xs0
        g3 = (g3 - offset * xs1) - z_high * xs1
    return t0 + s_low * g0, t1 + s_low * g1, t2 + s_high * g2, t3 + s_high * g3


@triton.jit
def _store_y(y, bias, at, n, tile_y, inside, N, HAS_BIAS: tl.constexpr, INTERPRET: tl.constexpr):
    if HAS_BIAS:
        tile_y += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)
    tl.store(y + at, _round_to(tile_y, y.dtype.element_ty, INTERPRET), mask=inside)


@triton.jit(do_not_specialize=["M", "K", "x_stride8", "UNITS", "TILES"])
def fragment_kernel(
    x,  # (M, K) as int32 pairs, rows 16-byte aligned
    words,  # (N/16, K/128, 2, 32, 4) int32, see kernels/README.md
    scales,  # (N/16, groups, 8) int32: bf16/fp16 pairs of rows g and g + 8
    zeros,  # like scales, or anything when SYMMETRIC
    bias,  # (N,) or anything when not HAS_BIAS
    y,  # (M, N)
    partial,  # (SPLIT_K, M, N) fp32 when SPLIT_K > 1
    arrived,  # (tiles,) int32 of zeros when SPLIT_K > 1; left at zero
    M, N, K, x_stride8,  # x_stride8: row stride of x in units of 8 elements
    UNITS, TILES,  # padded K / 128, padded N / 16
    GROUP: tl.constexpr,  # 32, 64, 128, or 0 for one scale a row
    EVEN: tl.constexpr,  # UNITS a multiple of W * SPLIT_K and TILES of R: no masks on the weights
    ONCE: tl.constexpr,  # UNITS <= W * SPLIT_K
    R: tl.constexpr,  # row tiles of 16 a warp works on
    C: tl.constexpr,  # column tiles of 8 activations
    W: tl.constexpr,  # warps; each takes every W-th unit of K
    SPLIT_K: tl.constexpr,
    SYMMETRIC: tl.constexpr, CENTRE: tl.constexpr, HAS_BIAS: tl.constexpr,
    IS_BF16: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    T: tl.constexpr = W * 32
    PER_UNIT: tl.constexpr = 128 // GROUP if GROUP > 0 else 0
    groups = UNITS * PER_UNIT if GROUP > 0 else 1
    NEED_SUM: tl.constexpr = not (SYMMETRIC and CENTRE)

    block = tl.program_id(0)
    split = tl.program_id(1)
    thread = tl.arange(0, T)
    lane = thread % 32
    unit = thread // 32 + split * W
    g = lane // 4
    tile = block * R + tl.arange(0, R)
    tile_ok = (tile < TILES)[None, :]
    column = tl.arange(0, C) * 8

    w_offsets = (
        (tile * (UNITS * 256))[None, :, None] + (lane * 4)[:, None, None] + tl.arange(0, 4)[None, None, :]
    )
    s_offsets = (tile * (groups * 8))[None, :] + g[:, None]
    x_row = column[None, :] + g[:, None]
    x_ok = x_row < M
    x_offsets = (x_row * x_stride8 * 4)[:, :, None] + tl.arange(0, 4)[None, None, :]
    k_lane = (lane % 4) * 8

    t0 = tl.zeros([R, C, T], tl.float32)
    t1, t2, t3 = t0, t0, t0
    g0, g1, g2, g3 = t0, t0, t0, t0
    xs0 = tl.zeros([1, C, T], tl.float32)
    xs1, xs2, xs3 = xs0, xs0, xs0
    one: tl.constexpr = 0x3F803F80 if IS_BF16 else 0x3C003C00
    ones = tl.full([1, 1, T], one, tl.int32)
    zero_word = tl.zeros([T, R], tl.int32)

    ok = tile_ok & (unit < UNITS)[:, None]
    next_w = _load_weights(words, w_offsets, unit, ok, EVEN)
    k = unit * 128 + k_lane
    next_x = (_load_x(x, x_offsets, x_ok, k, K, 0), _load_x(x, x_offsets, x_ok, k, K, 1),
              _load_x(x, x_offsets, x_ok, k, K, 2), _load_x(x, x_offsets, x_ok, k, K, 3))  # fmt: skip
    for _ in range(tl.cdiv(UNITS, W * SPLIT_K)):
        now_w = next_w
        now_x = next_x
        now_unit = unit
        now_ok = ok
        if not ONCE:
            unit += W * SPLIT_K
            ok = tile_ok & (unit < UNITS)[:, None]
            next_w = _load_weights(words, w_offsets, unit, ok, False)
            k = unit * 128 + k_lane
            next_x = (_load_x(x, x_offsets, x_ok, k, K, 0), _load_x(x, x_offsets, x_ok, k, K, 1),
                      _load_x(x, x_offsets, x_ok, k, K, 2), _load_x(x, x_offsets, x_ok, k, K, 3))  # fmt: skip
        for part in tl.static_range(4):  # 32 k each: two steps of the tensor core
            q0, q1, q2, q3 = _quarters(now_w[part // 2], R, T)
            b0, b1, b2, b3 = _quarters(now_x[part], C, T)
            for step in tl.static_range(2):
                if part % 2 == 0:
                    word = q0 if step == 0 else q1
                else:
                    word = q2 if step == 0 else q3
                low = b0 if step == 0 else b2
                high = b1 if step == 0 else b3
                a0, a1, a2, a3 = _nibbles_to_pairs(word[:, None, :], IS_BF16, CENTRE, INTERPRET)
                g0, g1, g2, g3 = _mma(a0, a1, a2, a3, low[None, :, :], high[None, :, :], g0, g1, g2, g3,
                                      R, C, W, IS_BF16, INTERPRET)  # fmt: skip
                if NEED_SUM:
                    xs0, xs1, xs2, xs3 = _mma(ones, ones, ones, ones, low[None, :, :], high[None, :, :],
                                              xs0, xs1, xs2, xs3, 1, C, W, IS_BF16, INTERPRET)  # fmt: skip
            if GROUP > 0 and (part + 1) * 32 % GROUP == 0:
                scale_word = _load_pairs(scales, s_offsets, now_unit, now_ok, PER_UNIT,
                                         (part + 1) * 32 // GROUP - 1, EVEN)  # fmt: skip
                if not SYMMETRIC:
                    zero_word = _load_pairs(zeros, s_offsets, now_unit, now_ok, PER_UNIT,
                                            (part + 1) * 32 // GROUP - 1, EVEN)  # fmt: skip
                t0, t1, t2, t3 = _flush(t0, t1, t2, t3, g0, g1, g2, g3, xs0, xs1, scale_word, zero_word,
                                        SYMMETRIC, CENTRE, IS_BF16)  # fmt: skip
                g0 = tl.zeros([R, C, T], tl.float32)
                g1, g2, g3 = g0, g0, g0
                xs0 = tl.zeros([1, C, T], tl.float32)
                xs1, xs2, xs3 = xs0, xs0, xs0
    if GROUP == 0:
        scale_word = tl.load(scales + s_offsets, mask=tile_ok, other=0)
        if not SYMMETRIC:
            zero_word = tl.load(zeros + s_offsets, mask=tile_ok, other=0)
        t0, t1, t2, t3 = _flush(t0, t1, t2, t3, g0, g1, g2, g3, xs0, xs1, scale_word, zero_word,
                                SYMMETRIC, CENTRE, IS_BF16)  # fmt: skip

    tile_y = tl.join(tl.join(t0, t1), tl.join(t2, t3))  # R, C, T, odd, half
    if W > 1:  # one fixed tree over the warps: the same sum on every run and for every M
        tile_y = tl.sum(tl.reshape(tile_y, [R, C, W, 32, 2, 2]), axis=2)
    # to one (8C, 16R) tile: lane = 4 g + t, row = 8 half + g, column = 2 t + odd
    tile_y = tl.permute(tl.reshape(tile_y, [R, C, 8, 4, 2, 2]), (1, 3, 4, 0, 5, 2))  # C, t, odd, R, half, g
    tile_y = tl.reshape(tile_y, [C * 8, R * 16])
    m = tl.arange(0, C * 8)[:, None]
    n = (block * (R * 16) + tl.arange(0, R * 16))[None, :]
    at = m * N + n
    inside = (m < M) & (n < N)
    if SPLIT_K > 1:
        tl.store(partial + split * (M * N) + at, tile_y, mask=inside)
        tl.debug_barrier()
        ticket = tl.atomic_add(arrived + block, 1, sem="acq_rel", scope="gpu")
        if ticket == SPLIT_K - 1:  # the last block to arrive adds the parts, always in this order
            tile_y = tl.zeros([C * 8, R * 16], tl.float32)
            for s in tl.static_range(SPLIT_K):
                tile_y += tl.load(partial + s * (M * N) + at, mask=inside, other=0.0, cache_modifier=".cg")
            _store_y(y, bias, at, n, tile_y, inside, N, HAS_BIAS, INTERPRET)
            tl.store(arrived + block, 0)
    else:
        _store_y(y, bias, at, n, tile_y, inside, N, HAS_BIAS, INTERPRET)


# ---------------------------------------------------------------------------------------------------------------------
# Large M
# ---------------------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["UNITS"])
def dequant_kernel(
    words, scales, zeros,  # as in fragment_kernel, scales and zeros as bf16/fp16
    w,  # (N, K) bf16 or fp16
    N, K,
    UNITS,
    GROUP: tl.constexpr, P: tl.constexpr,  # P warps, one 64-k chunk of 16 rows each
    SYMMETRIC: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """A thread's 16 bytes are eight consecutive k of two rows, twice: four 16-byte stores."""
    T: tl.constexpr = P * 32
    groups = UNITS * (128 // GROUP) if GROUP > 0 else 1
    thread = tl.arange(0, T)
    lane = thread % 32
    chunk = tl.program_id(1) * P + thread // 32
    tile = tl.program_id(0)
    ok = chunk < UNITS * 2
    offsets = tile * (UNITS * 256) + chunk * 128 + lane * 4
    vector = tl.load(words + offsets[:, None] + tl.arange(0, 4)[None, :], mask=ok[:, None], other=0)
    vector = tl.reshape(vector, [T, 1, 2, 2, 1, 1])  # thread, half, part, step, r, h
    half = tl.reshape(tl.arange(0, 2), [1, 2, 1, 1, 1, 1])
    r = tl.reshape(tl.arange(0, 2), [1, 1, 1, 1, 2, 1])
    h = tl.reshape(tl.arange(0, 2), [1, 1, 1, 1, 1, 2])
    q = tl.reshape((vector >> (half * 4 + r * 8 + h * 16)) & 15, [T, 2, 2, 8]).to(tl.float32)

    row = tl.arange(0, 2)[None, :, None] * 8 + (lane // 4)[:, None, None]
    k = (chunk * 64 + (lane % 4) * 8)[:, None, None] + (tl.arange(0, 2) * 32)[None, None, :]
    if GROUP > 0:
        entry = (
            (tile * groups + k // GROUP) * 16
            + (lane // 4)[:, None, None] * 2
            + tl.arange(0, 2)[None, :, None]
        )
    else:
        entry = tile * 16 + (lane // 4)[:, None, None] * 2 + tl.arange(0, 2)[None, :, None] + tl.zeros_like(k)
    inside = ok[:, None, None] & (tile * 16 + row < N) & (k < K)
    s = tl.load(scales + entry, mask=inside, other=0.0).to(tl.float32)
    if SYMMETRIC:
        value = (q - 8.0) * s[:, :, :, None]
    else:
        z = tl.load(zeros + entry, mask=inside, other=0.0).to(tl.float32)
        value = (q - z[:, :, :, None]) * s[:, :, :, None]
    at = (tile * 16 + row) * K.to(tl.int64) + k
    columns = k[:, :, :, None] + tl.arange(0, 8)[None, None, None, :]
    tl.store(
        w + at[:, :, :, None] + tl.arange(0, 8)[None, None, None, :],
        _round_to(value, w.dtype.element_ty, INTERPRET),
        mask=inside[:, :, :, None] & (columns < K),
    )


@triton.jit
def _both(half_word, HIGH: tl.constexpr):
    """One 16-bit half of a word, twice."""
    if HIGH:
        return (half_word & -65536) | ((half_word >> 16) & 0xFFFF)
    return (half_word & 0xFFFF) | (half_word << 16)


@triton.jit
def _multiply_pairs(word, scale, IS_BF16: tl.constexpr):
    """Two products of 16-bit floats, each rounded once."""
    if IS_BF16:  # fma with -0.0: bf16 has no mul before sm_90
        return tl.inline_asm_elementwise(
            "{ .reg .b32 minus0; mov.b32 minus0, 0x80008000; fma.rn.bf16x2 $0, $1, $2, minus0; }",
            "=r,r,r", [word, scale], dtype=tl.int32, is_pure=True, pack=1)  # fmt: skip
    return tl.inline_asm_elementwise(
        "mul.rn.f16x2 $0, $1, $2;", "=r,r,r", [word, scale], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def _as_pair(word, dtype: tl.constexpr):
    """A word of two 16-bit floats as a trailing axis of two."""
    low = (word & 0xFFFF).to(tl.int16).to(dtype, bitcast=True)
    high = ((word >> 16) & 0xFFFF).to(tl.int16).to(dtype, bitcast=True)
    return tl.join(low, high)


@triton.jit
def _dequantized_chunk(
    vector,  # (32, R, 4) int32: lane, row tile, step
    scale_word,  # (32, R, parts) int32 of row pairs
    zero_word,
    R: tl.constexpr, PARTS: tl.constexpr, dtype: tl.constexpr,
    SYMMETRIC: tl.constexpr, IS_BF16: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """(16 R, 64) weights, rounded to the 16-bit type like the reference."""
    word = tl.reshape(vector, [32, R, 2, 2])  # part, step % 2
    scale_word = tl.reshape(scale_word, [32, R, PARTS, 1])
    zero_word = tl.reshape(zero_word, [32, R, PARTS, 1])
    if SYMMETRIC and not INTERPRET:
        r0, r1, r2, r3 = _nibbles_to_pairs(word, IS_BF16, True, INTERPRET)
        low, high = _both(scale_word, False), _both(scale_word, True)
        r0 = _as_pair(_multiply_pairs(r0, low, IS_BF16), dtype)
        r1 = _as_pair(_multiply_pairs(r1, high, IS_BF16), dtype)
        r2 = _as_pair(_multiply_pairs(r2, low, IS_BF16), dtype)
        r3 = _as_pair(_multiply_pairs(r3, high, IS_BF16), dtype)
    else:
        s_low, s_high = _halves(scale_word, IS_BF16)
        z_low, z_high = _halves(zero_word, IS_BF16)
        if SYMMETRIC:
            z_low, z_high = 8.0, 8.0
        r0 = _round_to((_codes(word, 0) - _axis(z_low)) * _axis(s_low), dtype, INTERPRET)
        r1 = _round_to((_codes(word, 4) - _axis(z_high)) * _axis(s_high), dtype, INTERPRET)
        r2 = _round_to((_codes(word, 8) - _axis(z_low)) * _axis(s_low), dtype, INTERPRET)
        r3 = _round_to((_codes(word, 12) - _axis(z_high)) * _axis(s_high), dtype, INTERPRET)
    w = tl.join(tl.join(r0, r2), tl.join(r1, r3))  # lane, R, part, step, h, r, half
    w = tl.permute(
        tl.reshape(w, [8, 4, R, 2, 2, 2, 2, 2]), (2, 7, 0, 3, 1, 4, 6, 5)
    )  # R half g part t step r h
    return tl.reshape(w, [R * 16, 64])


@triton.jit
def _codes(word, SHIFT: tl.constexpr):
    return tl.join((word >> SHIFT) & 15, (word >> (SHIFT + 16)) & 15).to(tl.float32)


@triton.jit
def _axis(value):
    if isinstance(value, tl.constexpr) or isinstance(value, float):
        return value
    return value[:, :, :, :, None]


@triton.jit(do_not_specialize=["M", "UNITS", "TILES"])
def fused_kernel(
    x,  # (M, K)
    words, scales, zeros,  # as in fragment_kernel
    bias, y, M, N, K, x_stride, UNITS, TILES,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,  # BLOCK_K is one chunk of 64
    SWIZZLE: tl.constexpr,
    SYMMETRIC: tl.constexpr, HAS_BIAS: tl.constexpr, IS_BF16: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """y tile = sum over 64-k chunks of x tile · (dequantised chunk)ᵀ; the chunk goes through shared memory as bf16."""
    R: tl.constexpr = BLOCK_N // 16
    PARTS: tl.constexpr = 2 if GROUP == 32 else 1
    groups = UNITS * (128 // GROUP) if GROUP > 0 else 1
    pid = tl.program_id(0)
    blocks_m = tl.cdiv(M, BLOCK_M)
    blocks_n = tl.cdiv(N, BLOCK_N)
    span = SWIZZLE * blocks_n  # neighbours in a band share their weights through L2
    first_m = (pid // span) * SWIZZLE
    band = min(blocks_m - first_m, SWIZZLE)
    block_m = first_m + (pid % span) % band
    block_n = (pid % span) // band

    m = block_m * BLOCK_M + tl.arange(0, BLOCK_M)
    tile = block_n * R + tl.arange(0, R)
    lane = tl.arange(0, 32)
    w_at = (
        words
        + (lane * 4)[:, None, None]
        + (tile * (UNITS * 256))[None, :, None]
        + tl.arange(0, 4)[None, None, :]
    )
    w_ok = (tile < TILES)[None, :, None]
    x_at = x + m[:, None] * x_stride + tl.arange(0, 64)[None, :]
    part = tl.arange(0, PARTS)[None, None, :]
    entry = (tile * (groups * 8))[None, :, None] + (lane // 4)[:, None, None]
    entry_ok = (tile < TILES)[None, :, None]

    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for chunk in range(UNITS * 2):
        x_tile = tl.load(
            x_at, mask=(m < M)[:, None] & (chunk * 64 + tl.arange(0, 64) < K)[None, :], other=0.0
        )
        vector = tl.load(w_at + chunk * 128, mask=w_ok, other=0)
        if GROUP > 0:
            where = entry + ((chunk * 64 + part * 32) // GROUP) * 8
        else:
            where = entry + part * 0
        scale_word = tl.load(scales + where, mask=entry_ok, other=0)
        zero_word = scale_word
        if not SYMMETRIC:
            zero_word = tl.load(zeros + where, mask=entry_ok, other=0)
        w = _dequantized_chunk(vector, scale_word, zero_word, R, PARTS, x.dtype.element_ty,
                               SYMMETRIC, IS_BF16, INTERPRET)  # fmt: skip
        if INTERPRET:  # its dot multiplies the bits of bf16
            total = tl.dot(x_tile.to(tl.float32), tl.trans(w).to(tl.float32), total)
        else:
            total = tl.dot(x_tile, tl.trans(w), total)
        x_at += 64
    n = block_n * BLOCK_N + tl.arange(0, BLOCK_N)
    if HAS_BIAS:
        total += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    inside = (m < M)[:, None] & (n < N)[None, :]
    tl.store(y + m[:, None] * N + n[None, :], _round_to(total, y.dtype.element_ty, INTERPRET), mask=inside)
