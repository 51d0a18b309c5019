"""INT4 weights times bf16/fp16 activations: y = x · dequant(W)ᵀ, three ways, one packed layout.

    W[n, k] = (q[n, k] - z[n, group(k)]) * s[n, group(k)],   q in 0..15,   z = 8 when symmetric

``fragment_kernel``  M <= 64. Computes yᵀ = W xᵀ: sixteen weight rows are the A operand of ``mma.m16n8k16``, so M is
                     padded to 8 and not to 64, and a thread's 16-byte load holds exactly the nibbles of its own A
                     registers. Nothing passes through shared memory before the final sum over warps.
``fused_kernel``     M above: ``tl.dot`` with the same fragments as its register operand and x in shared memory.
``stream_kernel``    The same product, all tiles' K in equal shares over as many blocks as the SMs hold (stream-K).
``dequant_kernel``   writes W as bf16 (16-byte stores); cuBLAS does the product. Wins when M is large.

Turning nibbles into floats takes no integer-to-float conversion. 0x4300 | q is the bf16 number 128 + q (0x6400 | q is
1024 + q in fp16), so one three-input logic operation makes two weights, and one packed fma takes the offset and 8 away,
exactly. Group scales are applied to the fp32 group sums, four multiplies for 2,048 products. A zero that isn't 8 is
applied there too: sum((q - 8) x) - (z - 8) sum(x), where sum(x) comes from the tensor cores with an A operand of ones.

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
def _nibbles_to_pairs(word, IS_BF16: tl.constexpr, INTERPRET: tl.constexpr):
    """Eight nibbles to four registers of two floats q - 8: nibbles i and i + 4 become the halves of register i."""
    if INTERPRET:
        return (
            _pair_emulated(word, IS_BF16),
            _pair_emulated(word >> 4, IS_BF16),
            _pair_emulated(word >> 8, IS_BF16),
            _pair_emulated(word >> 12, IS_BF16),
        )
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


@triton.jit
def _pair_emulated(word, IS_BF16: tl.constexpr):
    low = (word & 15).to(tl.float32) - 8.0
    high = ((word >> 16) & 15).to(tl.float32) - 8.0
    if IS_BF16:  # small integers: the lower half of their fp32 is zero
        return ((low.to(tl.int32, bitcast=True) >> 16) & 0xFFFF) | (high.to(tl.int32, bitcast=True) & -65536)
    low_bits = low.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    return low_bits | (high.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) << 16)


@triton.jit
def _mma(
    a0, a1, a2, a3,  # (T,) int32: A fragment of m16n8k16, two floats a register
    b0, b1,  # (T,) int32: B fragment
    c0, c1, c2, c3,  # (T,) fp32
    W: tl.constexpr, IS_BF16: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """c += a b in every warp, the operands where the instruction wants them."""
    if INTERPRET:
        top_even, top_odd = _mma_half_emulated(a0, a2, b0, b1, W, IS_BF16)
        low_even, low_odd = _mma_half_emulated(a1, a3, b0, b1, W, IS_BF16)
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
def _mma_half_emulated(a0, a1, b0, b1, W: tl.constexpr, IS_BF16: tl.constexpr):
    """Eight rows of the 16 x 8 product; registers a0 (k 0..7) and a1 (k 8..15) hold those rows."""
    a0_low, a0_high = _halves(a0, IS_BF16)
    a1_low, a1_high = _halves(a1, IS_BF16)
    b0_low, b0_high = _halves(b0, IS_BF16)
    b1_low, b1_high = _halves(b1, IS_BF16)
    total = _outer_emulated(a0_low, b0_low, W) + _outer_emulated(a0_high, b0_high, W)
    total += _outer_emulated(a1_low, b1_low, W) + _outer_emulated(a1_high, b1_high, W)
    even, odd = tl.split(tl.reshape(total, [W, 8, 4, 2]))
    return tl.reshape(even, [W * 32]), tl.reshape(odd, [W * 32])


@triton.jit
def _outer_emulated(a, b, W: tl.constexpr):
    return tl.sum(tl.reshape(a, [W, 8, 1, 4]) * tl.reshape(b, [W, 1, 8, 4]), axis=3)


@triton.jit
def _quarters(vector, T: tl.constexpr):
    """The four words of each thread's 16-byte vector: (T, 4) to four of (T,)."""
    even, odd = tl.split(tl.reshape(vector, [T, 2, 2]))
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


@triton.jit
def _opaque(value, INTERPRET: tl.constexpr):
    """The same value with nothing known of it, so that a store keeps the layout its value already has."""
    if INTERPRET:
        return value
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [value], dtype=tl.int32, is_pure=True, pack=1)


@triton.constexpr_function
def _sum_warps_asm(E, Q, W):
    """PTX that adds E x 4 x 32 sums of each of W warps through shared memory: one store, one barrier, W loads in order.

    Operands: Q outputs, E x 4 sums, the byte offset to store them at, Q byte offsets to read from (< 0: nothing).
    """
    lines = ["{", f".shared .align 16 .b8 sums[{W * 512 * E}];", ".reg .b32 base, at;", ".reg .f32 total, part;"]
    lines += [".reg .pred p;", "mov.u32 base, sums;", f"add.u32 at, base, ${Q + 4 * E};"]
    lines += [f"st.shared.f32 [at+{128 * i}], ${Q + i};" for i in range(4 * E)]
    lines.append("bar.sync 0;")
    for q in range(Q):
        source = f"${Q + 4 * E + 1 + q}"
        lines += ["mov.f32 total, 0f00000000;", f"setp.ge.s32 p, {source}, 0;", f"add.u32 at, base, {source};"]
        lines.append("@!p mov.u32 at, base;")
        for w in range(W):
            lines += [f"ld.shared.f32 part, [at+{w * 512 * E}];", "add.f32 total, total, part;"]
        lines.append(f"mov.f32 ${q}, total;")
    return "\n".join([*lines, "}"])


@triton.constexpr_function
def _sum_warps_constraints(E, Q):
    return ",".join(["=&f"] * Q + ["f"] * (4 * E) + ["r"] * (1 + Q))


@triton.jit
def _sum_warps(
    sums,  # E x 4 of (T,)
    thread,  # (T,)
    sources,  # Q of (T,): which of the E x 4 x 32 sums this slot wants, or < 0
    E: tl.constexpr, Q: tl.constexpr, W: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """The same sum over warps in the same order on every run and for every M: Q of (T,)."""
    if INTERPRET:
        wanted = ()
        for q in tl.static_range(Q):
            value = tl.zeros([W * 32], tl.float32)
            for i in tl.static_range(4 * E):
                total = tl.sum(tl.reshape(sums[i], [W, 32]), axis=0)
                here = tl.gather(total, tl.maximum(sources[q], 0) % 32, 0)
                value = tl.where(sources[q] // 32 == i, here, value)
            wanted = wanted + (value,)
        return wanted
    operands = sums + ((thread // 32) * (512 * E) + thread % 32 * 4,)
    for q in tl.static_range(Q):
        operands = operands + (sources[q] * 4,)
    asm: tl.constexpr = _sum_warps_asm(E, Q, W)
    constraints: tl.constexpr = _sum_warps_constraints(E, Q)
    if Q == 1:
        return (tl.inline_asm_elementwise(asm, constraints, operands, tl.float32, is_pure=False, pack=1),)
    elif Q == 2:
        return tl.inline_asm_elementwise(asm, constraints, operands, (tl.float32, tl.float32), is_pure=False, pack=1)
    elif Q == 4:
        return tl.inline_asm_elementwise(
            asm, constraints, operands, (tl.float32, tl.float32, tl.float32, tl.float32), is_pure=False, pack=1
        )
    else:
        tl.static_assert(Q == 8)
        return tl.inline_asm_elementwise(
            asm,
            constraints,
            operands,
            (tl.float32, tl.float32, tl.float32, tl.float32, tl.float32, tl.float32, tl.float32, tl.float32),
            is_pure=False,
            pack=1,
        )


# ---------------------------------------------------------------------------------------------------------------------
# M <= 64: fragments straight from memory to the tensor cores
# ---------------------------------------------------------------------------------------------------------------------


@triton.jit
def _load_weights(
    words, w_offsets,  # (T, 4)
    scales, zeros, s_offsets,  # (T,)
    unit, first_tile, UNITS, TILES, groups,  # unit (T,): the 128 k of this warp
    R: tl.constexpr, PER_UNIT: tl.constexpr, SYMMETRIC: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """A warp's next 128 k: two 16-byte loads a row tile (one a 64-k chunk), read once and not kept, and the scales."""
    w = ()
    pairs = ()
    for r in tl.static_range(R):
        w_at = words + (w_offsets + (unit * 256 + (first_tile + r) * (UNITS * 256))[:, None])
        s_at = s_offsets + unit * (PER_UNIT * 8) + (first_tile + r) * (groups * 8)
        if EVEN:
            w = w + (
                tl.load(w_at, eviction_policy="evict_first"),
                tl.load(w_at + 128, eviction_policy="evict_first"),
            )
        else:
            ok = (unit < UNITS) & (first_tile + r < TILES)
            w = w + (
                tl.load(w_at, mask=ok[:, None], other=0, eviction_policy="evict_first"),
                tl.load(w_at + 128, mask=ok[:, None], other=0, eviction_policy="evict_first"),
            )
        for part in tl.static_range(PER_UNIT):
            if EVEN:
                pairs = pairs + (tl.load(scales + s_at + part * 8),)
                if not SYMMETRIC:
                    pairs = pairs + (tl.load(zeros + s_at + part * 8),)
            else:
                pairs = pairs + (tl.load(scales + s_at + part * 8, mask=ok, other=0),)
                if not SYMMETRIC:
                    pairs = pairs + (tl.load(zeros + s_at + part * 8, mask=ok, other=0),)
    return w, pairs


@triton.jit
def _load_x(x, x_offsets, row, M, k, K, x_stride8, C: tl.constexpr):
    """The activations of the same 128 k, in natural order: eight consecutive k a thread, four times a column tile."""
    loaded = ()
    for c in tl.static_range(C):
        x_at = x + (x_offsets + (k // 2 + c * 8 * (x_stride8 * 4))[:, None])
        for part in tl.static_range(4):
            ok = (row + c * 8 < M) & (k + part * 32 < K)
            loaded = loaded + (tl.load(x_at + part * 16, mask=ok[:, None], other=0),)
    return loaded


@triton.jit
def _scaled(
    totals, sums, x_sums, s, z, r: tl.constexpr, C: tl.constexpr, SYMMETRIC: tl.constexpr, IS_BF16: tl.constexpr
):  # fmt: skip
    """Totals of row tile r plus scale * (group sum - zero * sum of x); every step is exact when x is one-hot."""
    s_low, s_high = _halves(s, IS_BF16)
    new = ()
    for c in tl.static_range(C):
        g0 = sums[(r * C + c) * 4]
        g1 = sums[(r * C + c) * 4 + 1]
        g2 = sums[(r * C + c) * 4 + 2]
        g3 = sums[(r * C + c) * 4 + 3]
        if not SYMMETRIC:  # the codes were multiplied as q - 8
            z_low, z_high = _halves(z, IS_BF16)
            xs0 = x_sums[c * 4]
            xs1 = x_sums[c * 4 + 1]
            g0 = (g0 + 8.0 * xs0) - z_low * xs0
            g1 = (g1 + 8.0 * xs1) - z_low * xs1
            g2 = (g2 + 8.0 * xs0) - z_high * xs0
            g3 = (g3 + 8.0 * xs1) - z_high * xs1
        new = new + (totals[(r * C + c) * 4] + s_low * g0, totals[(r * C + c) * 4 + 1] + s_low * g1,
                     totals[(r * C + c) * 4 + 2] + s_high * g2, totals[(r * C + c) * 4 + 3] + s_high * g3)  # fmt: skip
    return new


@triton.jit
def _zeros(COUNT: tl.constexpr, T: tl.constexpr):
    zero = tl.zeros([T], tl.float32)
    many = ()
    for _ in tl.static_range(COUNT):
        many = many + (zero,)
    return many


@triton.jit
def _multiply_unit(
    w, x, pairs,  # what _load_weights and _load_x returned
    totals, sums, x_sums,  # R C x 4, R C x 4 and C x 4 of (T,)
    GROUP: tl.constexpr, PER_UNIT: tl.constexpr, R: tl.constexpr, C: tl.constexpr, W: tl.constexpr,
    SYMMETRIC: tl.constexpr, IS_BF16: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """128 k: eight steps of the tensor core a tile, and the group sums into the totals where a group ends."""
    T: tl.constexpr = W * 32
    KINDS: tl.constexpr = 1 if SYMMETRIC else 2  # scales, zeros
    one: tl.constexpr = 0x3F803F80 if IS_BF16 else 0x3C003C00
    ones = tl.full([T], one, tl.int32)
    for part in tl.static_range(4):  # 32 k each: two steps of the tensor core
        b = ()
        for c in tl.static_range(C):
            b = b + _quarters(x[c * 4 + part], T)
        q = ()
        for r in tl.static_range(R):
            q = q + _quarters(w[r * 2 + part // 2], T)
        for step in tl.static_range(2):
            new = ()
            for r in tl.static_range(R):
                a = _nibbles_to_pairs(q[r * 4 + part % 2 * 2 + step], IS_BF16, INTERPRET)
                for c in tl.static_range(C):
                    new = new + _mma(a[0], a[1], a[2], a[3], b[c * 4 + step * 2], b[c * 4 + step * 2 + 1],
                                     sums[(r * C + c) * 4], sums[(r * C + c) * 4 + 1], sums[(r * C + c) * 4 + 2],
                                     sums[(r * C + c) * 4 + 3], W, IS_BF16, INTERPRET)  # fmt: skip
            sums = new
            if not SYMMETRIC:  # the sums of x, from the same tensor cores
                new = ()
                for c in tl.static_range(C):
                    new = new + _mma(ones, ones, ones, ones, b[c * 4 + step * 2], b[c * 4 + step * 2 + 1],
                                     x_sums[c * 4], x_sums[c * 4 + 1], x_sums[c * 4 + 2], x_sums[c * 4 + 3],
                                     W, IS_BF16, INTERPRET)  # fmt: skip
                x_sums = new
        if GROUP > 0 and (part + 1) * 32 % GROUP == 0:
            new = ()
            for r in tl.static_range(R):
                s = pairs[(r * PER_UNIT + (part + 1) * 32 // GROUP - 1) * KINDS]
                z = pairs[(r * PER_UNIT + (part + 1) * 32 // GROUP) * KINDS - 1]
                new = new + _scaled(totals, sums, x_sums, s, z, r, C, SYMMETRIC, IS_BF16)
            totals = new
            sums = _zeros(R * C * 4, T)
            x_sums = _zeros(C * 4, T)
    return totals, sums, x_sums


@triton.jit
def _store_y(y, bias, at, n, value, inside, N, HAS_BIAS: tl.constexpr, INTERPRET: tl.constexpr):
    if HAS_BIAS:
        value += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)
    tl.store(y + at, _round_to(value, y.dtype.element_ty, INTERPRET), mask=inside)


@triton.jit(do_not_specialize=["M", "K", "x_stride8", "UNITS", "TILES", "splits"])
def fragment_kernel(
    x,  # (M, K) as int32 pairs, rows 16-byte aligned
    words,  # (N/16, K/128, 2, 32, 4) int32, see kernels/README.md
    scales,  # (N/16, groups, 8) int32: bf16/fp16 pairs of rows g and g + 8
    zeros,  # like scales, or anything when SYMMETRIC
    bias,  # (N,) or anything when not HAS_BIAS
    y,  # (M, N)
    partial,  # (splits, M, N) fp32 when SPLIT
    arrived,  # (blocks,) int32 of zeros when SPLIT; left at zero
    M, N, K, x_stride8,  # x_stride8: row stride of x in units of 8 elements
    UNITS, TILES,  # padded K / 128, padded N / 16
    splits,  # blocks that share a tile's K
    GROUP: tl.constexpr,  # 32, 64, 128, or 0 for one scale a row
    EVEN: tl.constexpr,  # UNITS a multiple of W * splits and TILES of R: fewer masks
    ONCE: tl.constexpr,  # UNITS <= W * splits
    R: tl.constexpr,  # row tiles of 16 a warp works on
    C: tl.constexpr,  # column tiles of 8 activations
    W: tl.constexpr,  # warps, 4 or more; each takes every W-th unit of K
    SPLIT: tl.constexpr,
    SYMMETRIC: tl.constexpr, HAS_BIAS: tl.constexpr,
    AHEAD: tl.constexpr, PDL: tl.constexpr,
    IS_BF16: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Every tensor is (T,) or (T, 4), a thread's registers in tuples, so that no version of Triton has a layout to
    choose.

    PDL lets this kernel start before the one in front of it has ended, and the next before this one has: until then
    only weights are touched.
    """
    T: tl.constexpr = W * 32
    PER_UNIT: tl.constexpr = 128 // GROUP if GROUP > 0 else 0
    groups = UNITS * PER_UNIT if GROUP > 0 else 1

    block = tl.program_id(0)
    split = tl.program_id(1)
    lanes = W * splits if SPLIT else W
    thread = tl.arange(0, T)
    lane = thread % 32
    unit = thread // 32 + split * W
    g = lane // 4
    first_tile = block * R
    w_offsets = (lane * 4)[:, None] + tl.arange(0, 4)[None, :]
    x_offsets = (g * x_stride8 * 4)[:, None] + tl.arange(0, 4)[None, :]
    k_lane = (lane % 4) * 8

    totals = _zeros(R * C * 4, T)
    sums = _zeros(R * C * 4, T)
    x_sums = _zeros(C * 4, T)
    if PDL and not INTERPRET:
        tl.extra.cuda.gdc_launch_dependents()
    w, pairs = _load_weights(words, w_offsets, scales, zeros, g, unit, first_tile, UNITS, TILES, groups,
                             R, PER_UNIT, SYMMETRIC, EVEN)  # fmt: skip
    if PDL and not INTERPRET:
        tl.extra.cuda.gdc_wait()  # weights don't depend on the kernel before; everything else does
    if ONCE:
        x_now = _load_x(x, x_offsets, g, M, unit * 128 + k_lane, K, x_stride8, C)
        totals, sums, x_sums = _multiply_unit(w, x_now, pairs, totals, sums, x_sums, GROUP, PER_UNIT,
                                              R, C, W, SYMMETRIC, IS_BF16, INTERPRET)  # fmt: skip
    elif AHEAD:
        x_next = _load_x(x, x_offsets, g, M, unit * 128 + k_lane, K, x_stride8, C)
        for _ in range(tl.cdiv(UNITS, lanes)):
            x_now = x_next
            w_now = w
            pairs_now = pairs
            unit += lanes
            w, pairs = _load_weights(words, w_offsets, scales, zeros, g, unit, first_tile, UNITS, TILES, groups,
                                     R, PER_UNIT, SYMMETRIC, False)  # fmt: skip
            x_next = _load_x(x, x_offsets, g, M, unit * 128 + k_lane, K, x_stride8, C)
            totals, sums, x_sums = _multiply_unit(w_now, x_now, pairs_now, totals, sums, x_sums, GROUP, PER_UNIT,
                                                  R, C, W, SYMMETRIC, IS_BF16, INTERPRET)  # fmt: skip
    else:
        for _ in range(tl.cdiv(UNITS, lanes)):
            x_now = _load_x(x, x_offsets, g, M, unit * 128 + k_lane, K, x_stride8, C)
            totals, sums, x_sums = _multiply_unit(w, x_now, pairs, totals, sums, x_sums, GROUP, PER_UNIT,
                                                  R, C, W, SYMMETRIC, IS_BF16, INTERPRET)  # fmt: skip
            unit += lanes
            w, pairs = _load_weights(words, w_offsets, scales, zeros, g, unit, first_tile, UNITS, TILES, groups,
                                     R, PER_UNIT, SYMMETRIC, False)  # fmt: skip

    if GROUP == 0:
        new = ()
        for r in tl.static_range(R):
            ok = first_tile + r < TILES
            s_at = g + (first_tile + r) * 8
            s = tl.load(scales + s_at, mask=ok, other=0)
            z = s
            if not SYMMETRIC:
                z = tl.load(zeros + s_at, mask=ok, other=0)
            new = new + _scaled(totals, sums, x_sums, s, z, r, C, SYMMETRIC, IS_BF16)
        totals = new

    # thread t takes outputs t, t + T, ... of the block's (8 C, 16 R) tile, n fastest
    Q: tl.constexpr = (4 * R * C + W - 1) // W
    places = ()
    sources = ()
    for slot in tl.static_range(Q):
        order = (_opaque(thread, INTERPRET) + slot * T).to(tl.uint32)  # unsigned: / and % are shifts
        row = order // (16 * R)
        col = order % (16 * R)
        # where the tensor core left it: lane 4 g + t, register 2 half + odd; row 8 half + g, column 2 t + odd
        source = ((col // 16 * C + row // 8) * 4 + col // 8 % 2 * 2 + row % 2) * 32 + col % 8 * 4 + row % 8 // 2
        source = tl.where(order < 128 * R * C, source.to(tl.int32), -1)
        m = row.to(tl.int32)
        n = col.to(tl.int32) + block * (16 * R)
        sources = sources + (source,)
        places = places + (m * N + n, n, (m < M) & (n < N) & (source >= 0))
    values = _sum_warps(totals, thread, sources, R * C, Q, W, INTERPRET)
    if SPLIT:
        for slot in tl.static_range(Q):
            tl.store(partial + split * (M * N) + places[slot * 3], values[slot], mask=places[slot * 3 + 2])
        tl.debug_barrier()
        ticket = tl.atomic_add(arrived + block, 1, sem="acq_rel", scope="gpu")
        if ticket == splits - 1:  # the last block to arrive adds the parts, always in this order
            for slot in tl.static_range(Q):
                value = tl.zeros([T], tl.float32)
                for part in range(splits):
                    theirs = partial + part * (M * N) + places[slot * 3]
                    value += tl.load(theirs, mask=places[slot * 3 + 2], other=0.0, cache_modifier=".cg")
                _store_y(y, bias, places[slot * 3], places[slot * 3 + 1], value, places[slot * 3 + 2], N,
                         HAS_BIAS, INTERPRET)  # fmt: skip
            tl.store(arrived + block, 0)
    else:
        for slot in tl.static_range(Q):
            _store_y(y, bias, places[slot * 3], places[slot * 3 + 1], values[slot], places[slot * 3 + 2], N,
                     HAS_BIAS, INTERPRET)  # fmt: skip


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
    g = lane // 4
    chunk = tl.program_id(1) * P + thread // 32
    tile = tl.program_id(0)
    ok = chunk < UNITS * 2
    offsets = tile * (UNITS * 256) + chunk * 128 + lane * 4
    vector = tl.load(words + offsets[:, None] + tl.arange(0, 4)[None, :], mask=ok[:, None], other=0)
    steps = _quarters(vector, T)
    eight = tl.arange(0, 8)  # 4 (step % 2) + 2 r + h
    for part in tl.static_range(2):
        pair = tl.where((eight < 4)[None, :], steps[part * 2][:, None], steps[part * 2 + 1][:, None])
        k = chunk * 64 + part * 32 + (lane % 4) * 8
        group = k // GROUP if GROUP > 0 else 0
        for half in tl.static_range(2):
            row = tile * 16 + half * 8 + g
            inside = ok & (row < N) & (k < K)
            q = ((pair >> (half * 4 + (eight // 2 % 2 * 8 + eight % 2 * 16)[None, :])) & 15).to(tl.float32)
            entry = (tile * groups + group) * 16 + g * 2 + half
            s = tl.load(scales + entry, mask=inside, other=0.0).to(tl.float32)
            if SYMMETRIC:
                value = (q - 8.0) * s[:, None]
            else:
                z = tl.load(zeros + entry, mask=inside, other=0.0).to(tl.float32)
                value = (q - z[:, None]) * s[:, None]
            at = (row * K.to(tl.int64) + k)[:, None] + eight[None, :]
            ok_store = inside[:, None] & (k[:, None] + eight[None, :] < K)
            tl.store(w + at, _round_to(value, w.dtype.element_ty, INTERPRET), mask=ok_store)


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
    vector,  # (32 R, 4) int32: a row tile's lanes, step
    scale_word,  # (32 R, parts) int32 of row pairs
    zero_word,
    R: tl.constexpr, PARTS: tl.constexpr, dtype: tl.constexpr,
    SYMMETRIC: tl.constexpr, IS_BF16: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """(16 R, 64) weights, rounded to the 16-bit type like the reference; columns in the order of the A fragments."""
    word = tl.reshape(vector, [R, 32, 2, 2])  # part, step % 2
    scale_word = tl.reshape(scale_word, [R, 32, PARTS, 1])
    zero_word = tl.reshape(zero_word, [R, 32, PARTS, 1])
    if SYMMETRIC and not INTERPRET:
        r0, r1, r2, r3 = _nibbles_to_pairs(word, IS_BF16, INTERPRET)
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
    w = tl.join(tl.join(r0, r2), tl.join(r1, r3))  # R, lane, part, step, h, r, half
    w = tl.permute(tl.reshape(w, [R, 8, 4, 2, 2, 2, 2, 2]), (0, 7, 1, 3, 4, 6, 2, 5))  # R half g part step r t h
    return tl.reshape(w, [R * 16, 64])


@triton.jit
def _load_rows(table, entry, chunk, GROUP: tl.constexpr):
    """The scale or zero pairs of one chunk: (32 R, 1), or (32 R, 2) when a chunk has two groups."""
    if GROUP == 32:
        return tl.join(tl.load(table + entry + chunk * 16), tl.load(table + entry + chunk * 16 + 8))
    elif GROUP == 0:
        return tl.load(table + entry)[:, None]
    else:
        return tl.load(table + entry + (chunk * 64 // GROUP) * 8)[:, None]


@triton.jit
def _codes(word, SHIFT: tl.constexpr):
    return tl.join((word >> SHIFT) & 15, (word >> (SHIFT + 16)) & 15).to(tl.float32)


@triton.jit
def _axis(value):
    if isinstance(value, tl.constexpr) or isinstance(value, float):
        return value
    return value[:, :, :, :, None]


@triton.jit(do_not_specialize=["M", "UNITS"])
def permute_kernel(
    x,  # (M, K) as int32 pairs
    out,  # (M, 128 UNITS) as int32 pairs, columns in the order of the A fragments, zero beyond K
    M, K, x_stride2, UNITS,
    BLOCK: tl.constexpr, PDL: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Within every 32 k, pair 4 j + t of the output is pair 4 t + j of the input."""
    if PDL and not INTERPRET:
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    pair = at % 16
    source = at - pair + (pair % 4) * 4 + pair // 4
    value = tl.load(x + row * x_stride2 + source, mask=(source * 2 < K) & (at < UNITS * 64), other=0)
    tl.store(out + row * (UNITS * 64) + at, value, mask=at < UNITS * 64)


@triton.jit
def _place(tile, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SWIZZLE: tl.constexpr):
    """Row and column of a tile of y; neighbours in a band of SWIZZLE rows share their weights through L2."""
    blocks_m = tl.cdiv(M, BLOCK_M)
    blocks_n = tl.cdiv(N, BLOCK_N)
    span = SWIZZLE * blocks_n
    first_m = (tile // span) * SWIZZLE
    band = min(blocks_m - first_m, SWIZZLE)
    return first_m + (tile % span) % band, (tile % span) // band


@triton.jit
def _finished(total):
    """The same sums, once the tensor core has read its operands.

    wgmma reads weights from registers while the block goes on. Triton leaves one in flight into the next chunk, and
    ptxas (12.9, with Triton 3.6 and 3.8) gives its registers to that chunk's arithmetic: wrong products, a few in
    a large one (https://github.com/triton-lang/triton/issues/9433). Using the sums makes Triton wait for all of it.
    """
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=f,f", [total], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def _multiply_chunks(
    x, words, scales, zeros,  # as in fused_kernel or, when TMA, as in stream_kernel
    block_m, block_n, first, last,  # the tile, and the 64-k chunks [first, last)
    M, UNITS, TILES,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    SYMMETRIC: tl.constexpr, TMA: tl.constexpr, IS_BF16: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """(BLOCK_N, BLOCK_M) fp32: sum over chunks of (dequantised chunk) · (x tile)T. A warp's rows are its own row tiles,
    so the dequantised chunk is the register operand of the product: no shared memory for it, no barrier."""
    R: tl.constexpr = BLOCK_N // 16
    PARTS: tl.constexpr = 2 if GROUP == 32 else 1
    groups = UNITS * (128 // GROUP) if GROUP > 0 else 1
    m = block_m * BLOCK_M + tl.arange(0, BLOCK_M)
    line = tl.arange(0, 32 * R)  # a row tile's lanes, one row tile a warp
    lane = line % 32
    tile = tl.minimum(block_n * R + line // 32, TILES - 1)  # beyond the edge: read anything, store nothing
    w_at = words + (lane * 4 + tile * (UNITS * 256))[:, None] + tl.arange(0, 4)[None, :]
    if not TMA:
        x_at = x + tl.minimum(m, M - 1)[:, None] * (UNITS * 128) + tl.arange(0, 64)[None, :]
        x_at += first * 64
    entry = tile * (groups * 8) + lane // 4

    total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    w_at += first * 128
    for chunk in range(first, last):
        if TMA:
            x_tile = x.load([block_m * BLOCK_M, chunk * 64])
        else:
            x_tile = tl.load(x_at)
            x_at += 64
        vector = tl.load(w_at)
        scale_word = _load_rows(scales, entry, chunk, GROUP)
        zero_word = scale_word
        if not SYMMETRIC:
            zero_word = _load_rows(zeros, entry, chunk, GROUP)
        w = _dequantized_chunk(vector, scale_word, zero_word, R, PARTS, x_tile.dtype,
                               SYMMETRIC, IS_BF16, INTERPRET)  # fmt: skip
        if INTERPRET:  # its dot multiplies the bits of bf16
            total = tl.dot(w.to(tl.float32), tl.trans(x_tile).to(tl.float32), total)
        else:
            total = _finished(tl.dot(w, tl.trans(x_tile), total))
        w_at += 128
    return total


@triton.jit
def _store_tile(
    y, bias,
    total,  # (BLOCK_N, rows) fp32
    n, m,  # (BLOCK_N,), (rows,)
    M, N, HAS_BIAS: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    inside = (n < N)[:, None] & (m < M)[None, :]
    if HAS_BIAS:
        total += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
    tl.store(y + m[None, :] * N + n[:, None], _round_to(total, y.dtype.element_ty, INTERPRET), mask=inside)


@triton.jit(do_not_specialize=["M", "UNITS", "TILES", "splits"])
def fused_kernel(
    x,  # (M, 128 UNITS), columns permuted by permute_kernel
    words, scales, zeros,  # as in fragment_kernel
    bias, y,
    partial,  # (blocks, splits, BLOCK_N, BLOCK_M) fp32 when SPLIT
    arrived,  # (blocks,) int32 of zeros when SPLIT; left at zero
    M, N, UNITS, TILES, splits,
    GROUP: tl.constexpr, SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    SWIZZLE: tl.constexpr,
    SYMMETRIC: tl.constexpr, HAS_BIAS: tl.constexpr, IS_BF16: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """A block a tile of y, or one for each of the equal parts of the tile's K."""
    pid = tl.program_id(0)
    split = tl.program_id(1)
    block_m, block_n = _place(pid, M, N, BLOCK_M, BLOCK_N, SWIZZLE)
    share = (tl.cdiv(UNITS, splits) if SPLIT else UNITS) * 2
    first = split * share
    last = tl.minimum(first + share, UNITS * 2)
    total = _multiply_chunks(x, words, scales, zeros, block_m, block_n, first, last, M, UNITS, TILES,
                             GROUP, BLOCK_M, BLOCK_N, SYMMETRIC, False, IS_BF16, INTERPRET)  # fmt: skip
    m = block_m * BLOCK_M + tl.arange(0, BLOCK_M)
    n = block_n * BLOCK_N + tl.arange(0, BLOCK_N)
    if SPLIT:
        at = tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
        at += pid * splits * (BLOCK_N * BLOCK_M)
        tl.store(partial + split * (BLOCK_N * BLOCK_M) + at, total)
        tl.debug_barrier()
        ticket = tl.atomic_add(arrived + pid, 1, sem="acq_rel", scope="gpu")
        if ticket == splits - 1:
            total = tl.load(partial + at, cache_modifier=".cg")
            for s in range(1, splits):
                total += tl.load(partial + s * (BLOCK_N * BLOCK_M) + at, cache_modifier=".cg")
            _store_tile(y, bias, total, n, m, M, N, HAS_BIAS, INTERPRET)
            tl.store(arrived + pid, 0)
    else:
        _store_tile(y, bias, total, n, m, M, N, HAS_BIAS, INTERPRET)


@triton.jit
def _in_order_of_registers(total, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """(BLOCK_N, BLOCK_M) to (BLOCK_M BLOCK_N,) as the tensor core's accumulator lies in registers: four of a thread's
    side by side, then lanes, warps, 16 columns after 16. On sm_90 it is stored without passing through shared memory.

    Lane 4 g + t of warp w holds rows 16 w + 8 half + g, columns 16 i + 8 j + 2 t + odd.
    """
    axes = tl.reshape(total, [BLOCK_N // 16, 2, 8, BLOCK_M // 16, 2, 4, 2])  # w half g i j t odd
    return tl.reshape(tl.permute(axes, (3, 1, 0, 2, 5, 4, 6)), [BLOCK_M * BLOCK_N])  # i half w g t j odd


@triton.jit
def _in_order_of_rows(registers, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """The inverse of _in_order_of_registers."""
    axes = tl.reshape(registers, [BLOCK_M // 16, 2, BLOCK_N // 16, 8, 4, 2, 2])
    return tl.reshape(tl.permute(axes, (2, 1, 3, 0, 5, 4, 6)), [BLOCK_N, BLOCK_M])


@triton.jit
def _slot(worker, part):
    """Where a worker's part of a tile lies in ``partial``: it has at most one that begins the tile and one that goes on
    with another."""
    return 2 * worker + min(part, 1)


@triton.jit(do_not_specialize=["M", "UNITS", "TILES", "share"])
def stream_kernel(
    x,  # as in fused_kernel; when TMA, its descriptor with blocks of (BLOCK_M, 64)
    words, scales, zeros, bias, y,  # as in fused_kernel
    partial,  # (2 workers, BLOCK_M BLOCK_N) fp32
    arrived,  # (workers,) int32 of zeros; left at zero
    M, N, UNITS, TILES,
    share,  # chunks of 64 k a worker
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    SLICE: tl.constexpr,  # rows of x that are summed at a time
    SWIZZLE: tl.constexpr,
    SYMMETRIC: tl.constexpr, HAS_BIAS: tl.constexpr,
    TMA: tl.constexpr, PDL: tl.constexpr,
    IS_BF16: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Stream-K: the chunks of all tiles in one line, cut into equal shares, a block (worker) a share. The last worker
    to arrive at a tile that several have parts of adds them up in the order of k; none waits for another.

    (Osama et al., Stream-K, https://arxiv.org/abs/2301.03598, whose tiles' first workers wait for the others.)
    """
    worker = tl.program_id(0)
    chunks = UNITS * 2
    start = worker * share
    end = tl.minimum(start + share, chunks * tl.cdiv(M, BLOCK_M) * tl.cdiv(N, BLOCK_N))
    if PDL and not INTERPRET:
        tl.extra.cuda.gdc_wait()  # started while x was still being permuted
    for tile in range(start // chunks, tl.cdiv(end, chunks)):
        tile_start = tile * chunks
        first = tl.maximum(start - tile_start, 0)
        last = tl.minimum(end - tile_start, chunks)
        block_m, block_n = _place(tile, M, N, BLOCK_M, BLOCK_N, SWIZZLE)
        total = _multiply_chunks(x, words, scales, zeros, block_m, block_n, first, last, M, UNITS, TILES,
                                 GROUP, BLOCK_M, BLOCK_N, SYMMETRIC, TMA, IS_BF16, INTERPRET)  # fmt: skip
        n = block_n * BLOCK_N + tl.arange(0, BLOCK_N)
        m = block_m * BLOCK_M
        if last - first == chunks:
            _store_tile(y, bias, total, n, m + tl.arange(0, BLOCK_M), M, N, HAS_BIAS, INTERPRET)
        else:
            SIZE: tl.constexpr = BLOCK_M * BLOCK_N
            begun_by = tile_start // share
            parts = (tile_start + chunks - 1) // share - begun_by + 1
            mine = partial + _slot(worker, worker - begun_by) * SIZE
            tl.store(mine + tl.arange(0, SIZE), _in_order_of_registers(total, BLOCK_M, BLOCK_N))
            tl.debug_barrier()
            ticket = tl.atomic_add(arrived + begun_by, 1, sem="acq_rel", scope="gpu")
            if ticket == parts - 1:
                for rows in range(0, BLOCK_M, SLICE):
                    at = partial + rows * BLOCK_N + tl.arange(0, SLICE * BLOCK_N)
                    added = tl.zeros([SLICE * BLOCK_N], tl.float32)
                    for part in range(0, parts, 4):
                        for ahead in tl.static_range(4):  # requested together, added in order
                            there = _slot(begun_by + part + ahead, part + ahead)
                            asked = (part + ahead < parts) & (tl.arange(0, SLICE * BLOCK_N) >= 0)
                            added += tl.load(at + there * SIZE, mask=asked, other=0.0, cache_modifier=".cg")
                    _store_tile(y, bias, _in_order_of_rows(added, SLICE, BLOCK_N), n, m + rows + tl.arange(0, SLICE),
                                M, N, HAS_BIAS, INTERPRET)  # fmt: skip
                tl.store(arrived + begun_by, 0)
