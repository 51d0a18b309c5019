"""The call: checks, choice of kernel, launch. Also ``torch.ops.sdsie.int4_gemm`` for torch.compile and SGLang."""

import logging
import statistics
from functools import cache

import torch
from torch import Tensor

from sdsie_sglang.kernels.int4_gemm import tiles
from sdsie_sglang.kernels.int4_gemm.pack import PackedWeight, check_group
from sdsie_sglang.kernels.int4_gemm.reference import int4_gemm_reference
from sdsie_sglang.kernels.int4_gemm.tiles import Tile

try:
    import triton
    from triton.tools.tensor_descriptor import TensorDescriptor

    from sdsie_sglang.kernels.int4_gemm import kernel

    INTERPRET = bool(triton.knobs.runtime.interpret)
except ImportError:  # no triton on this platform: the reference serves
    triton = None
    INTERPRET = False

logger = logging.getLogger(__name__)
# Programmatic dependent launch (sm_90 and newer): this kernel asks for its weights while the one before it ends. Off by
# default: a weight must not be rewritten by the kernel right before its use.
overlap_launches = False
# On a GPU without shipped tiles, the first product of a shape measures its candidates (seconds; kept on disk).
# Elsewhere, and inside a graph capture, a shape without an entry runs with a guessed tile.
tune_at_first_use = True
DTYPES = (torch.bfloat16, torch.float16)


def int4_gemm(x: Tensor, weight: PackedWeight, bias: Tensor | None = None, tile: Tile | None = None) -> Tensor:
    """y (…, N) = x (…, K) · dequant(weight)ᵀ + bias, fp32 sums, one rounding to x's dtype.

    For M <= 16 a row's result is the same bits whatever the other rows are and however many there are.
    """
    if tile is not None:
        return _run(x, weight, bias, tile)
    return torch.ops.sdsie.int4_gemm(
        x, weight.words, weight.scales, weight.zeros, bias, weight.n, weight.k, weight.group
    )


@torch.library.custom_op("sdsie::int4_gemm", mutates_args=())
def _op(
    x: Tensor,
    words: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    bias: Tensor | None,
    n: int,
    k: int,
    group: int,
) -> Tensor:
    return _run(x, PackedWeight(words, scales, zeros, n, k, group), bias, None)


@_op.register_fake
def _(
    x: Tensor,
    words: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    bias: Tensor | None,
    n: int,
    k: int,
    group: int,
) -> Tensor:
    return x.new_empty((*x.shape[:-1], n))


def _check(x: Tensor, weight: PackedWeight) -> None:
    if x.dtype not in DTYPES:
        raise TypeError(f"int4_gemm takes bf16 or fp16 activations, got {x.dtype}")
    if x.shape[-1] != weight.k:
        raise ValueError(f"x has {x.shape[-1]} columns, the weight {weight.k}")
    if weight.scales.dtype != x.dtype:
        raise TypeError(f"scales are {weight.scales.dtype}, activations {x.dtype}: quantise with scale_dtype={x.dtype}")
    if x.device != weight.words.device:
        raise ValueError(f"x is on {x.device}, the weight on {weight.words.device}")
    check_group(weight.group)


def _run(x: Tensor, weight: PackedWeight, bias: Tensor | None, tile: Tile | None) -> Tensor:
    _check(x, weight)
    rows = x.reshape(-1, weight.k)
    if rows.shape[0] == 0:
        return x.new_empty((*x.shape[:-1], weight.n))
    if not (x.is_cuda or INTERPRET):
        return int4_gemm_reference(rows, weight, bias).reshape(*x.shape[:-1], weight.n)
    if weight.k % 8 or rows.stride(0) % 8 or rows.stride(1) != 1 or rows.data_ptr() % 16:
        rows = torch.nn.functional.pad(rows, (0, -weight.k % 8)).contiguous()  # 16-byte rows; rare
    if tile is None:
        tile = _choose(rows.shape[0], weight, x)
    if tile.path == "fragment":
        y = _fragment(rows, weight, bias, tile)
    elif tile.path == "fused":
        y = _fused(rows, weight, bias, tile)
    else:
        w = dequantize_on_gpu(weight, x.dtype)
        y = torch.nn.functional.linear(rows[:, : weight.k], w, bias)
    return y.reshape(*x.shape[:-1], weight.n)


def _choose(m: int, weight: PackedWeight, x: Tensor) -> Tile:
    name, sms = _device(x.device)
    shape = (weight.n, weight.k, weight.group)
    if (
        tune_at_first_use
        and x.is_cuda
        and not tiles.shipped_path(name).is_file()
        and not tiles.is_tuned(m, *shape, name)
        and not torch.cuda.is_current_stream_capturing()
    ):
        tune_shape(*shape, x.dtype, tiles.buckets_to_tune(m))
    return tiles.choose(m, *shape, name, sms)


@cache
def _device(device: torch.device) -> tuple[str, int]:
    """Name and number of SMs."""
    if device.type != "cuda":
        return "interpreter", 4
    properties = torch.cuda.get_device_properties(device)
    if properties.major < 8:
        raise RuntimeError(f"int4_gemm needs compute capability 8.0 or newer, {properties.name} has {properties.major}")
    return properties.name, properties.multi_processor_count


@cache
def _capability(device: torch.device) -> int:
    """Major compute capability; 0 in the interpreter."""
    return torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else 0


_arrived: dict[tuple[torch.device, int], Tensor] = {}
_MAX_TILES = 16384


def _counters(device: torch.device) -> Tensor:
    """Zeroed arrival counters of this CUDA stream; the kernel leaves them at zero, so they are made once."""
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    if (device, stream) not in _arrived:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            # a memset recorded in one graph would not run before another graph's replay
            raise RuntimeError("int4_gemm: call prepare() or the product itself once before capturing a CUDA graph")
        _arrived[device, stream] = torch.zeros(_MAX_TILES, dtype=torch.int32, device=device)
    return _arrived[device, stream]


def prepare(device: torch.device) -> None:
    """Make the counters of the current CUDA stream, so that the first call may be inside a graph capture."""
    _counters(device)


def _fragment(x: Tensor, weight: PackedWeight, bias: Tensor | None, tile: Tile) -> Tensor:
    m = x.shape[0]
    if m > tiles.FRAGMENT_MAX_M:
        raise ValueError(f"the fragment kernel takes at most {tiles.FRAGMENT_MAX_M} rows, got {m}")
    if not tiles.fits(tile, m):
        raise ValueError(f"no such fragment kernel: {tile} for {m} rows")
    row_tiles, units = weight.words.shape[:2]
    y = x.new_empty(m, weight.n)
    blocks = -(-row_tiles // tile.rows)
    partial, arrived = y, weight.words  # unused unless K is split over blocks
    if tile.split_k > 1:
        partial = torch.empty(tile.split_k, m, weight.n, dtype=torch.float32, device=x.device)
        arrived = _counters(x.device)
    zeros = weight.scales if weight.zeros is None else weight.zeros
    pdl = overlap_launches and _capability(x.device) >= 9
    lanes = tile.warps * tile.split_k
    once = units <= lanes
    kernel.fragment_kernel[(blocks, tile.split_k)](
        x.view(torch.int32),
        weight.words,
        weight.scales.view(torch.int32),
        zeros.view(torch.int32),
        y if bias is None else bias,
        y,
        partial,
        arrived,
        m,
        weight.n,
        weight.k,
        x.stride(0) // 8,
        units,
        row_tiles,
        tile.split_k,
        GROUP=weight.group,
        EVEN=units % lanes == 0 and row_tiles % tile.rows == 0,
        ONCE=once,
        R=tile.rows,
        C=tiles.columns(m),
        W=tile.warps,
        SPLIT=tile.split_k > 1,
        SYMMETRIC=weight.zeros is None,
        HAS_BIAS=bias is not None,
        AHEAD=tile.ahead,
        PDL=pdl,
        IS_BF16=x.dtype == torch.bfloat16,
        INTERPRET=INTERPRET,
        num_warps=tile.warps,
        **({"launch_pdl": True} if pdl else {}),
    )
    return y


def _fused(x: Tensor, weight: PackedWeight, bias: Tensor | None, tile: Tile) -> Tensor:
    m = x.shape[0]
    row_tiles, units = weight.words.shape[:2]
    y = x.new_empty(m, weight.n)
    zeros = weight.scales if weight.zeros is None else weight.zeros
    blocks = -(-m // tile.block_m) * -(-weight.n // tile.block_n)
    streams = tile.per_sm > 0
    pdl = streams and _capability(x.device) >= 9  # from x permuted to its product: no weight is rewritten in between
    ordered = x.new_empty(m, units * 128)
    kernel.permute_kernel[(m, -(-units // 16))](
        x.view(torch.int32),
        ordered.view(torch.int32),
        m,
        weight.k,
        x.stride(0) // 2,
        units,
        BLOCK=1024,
        PDL=pdl,
        INTERPRET=INTERPRET,
        num_warps=4,
    )
    operands = (
        weight.words,
        weight.scales.view(torch.int32),
        zeros.view(torch.int32),
        y if bias is None else bias,
        y,
    )
    constants = {
        "GROUP": weight.group,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "SWIZZLE": 8,
        "SYMMETRIC": weight.zeros is None,
        "HAS_BIAS": bias is not None,
        "IS_BF16": x.dtype == torch.bfloat16,
        "INTERPRET": INTERPRET,
        "num_warps": tile.warps,
        "num_stages": tile.stages,
    }
    if streams:
        chunks = blocks * units * 2
        share = -(-chunks // (tile.per_sm * _device(x.device)[1]))
        workers = -(-chunks // share)
        partial = torch.empty(2 * workers, tile.block_m * tile.block_n, dtype=torch.float32, device=x.device)
        kernel.stream_kernel[(workers,)](
            TensorDescriptor.from_tensor(ordered, [tile.block_m, 64]) if tile.tma else ordered,
            *operands,
            partial,
            _counters(x.device),
            m,
            weight.n,
            units,
            row_tiles,
            share,
            SLICE=tile.slice_m,
            TMA=tile.tma,
            PDL=pdl,
            **constants,
            **({"launch_pdl": True} if pdl else {}),
        )
        return y
    partial, arrived = y, weight.words
    if tile.split_k > 1:
        partial = torch.empty(blocks, tile.split_k, tile.block_n, tile.block_m, dtype=torch.float32, device=x.device)
        arrived = _counters(x.device)
    kernel.fused_kernel[(blocks, tile.split_k)](
        ordered,
        *operands,
        partial,
        arrived,
        m,
        weight.n,
        units,
        row_tiles,
        tile.split_k,
        SPLIT=tile.split_k > 1,
        **constants,
    )
    return y


def dequantize_on_gpu(weight: PackedWeight, dtype: torch.dtype) -> Tensor:
    """(N, K) in ``dtype``, each weight rounded once."""
    row_tiles, units = weight.words.shape[:2]
    w = torch.empty(weight.n, weight.k, dtype=dtype, device=weight.words.device)
    kernel.dequant_kernel[(row_tiles, -(-units * 2 // 4))](
        weight.words,
        weight.scales,
        weight.scales if weight.zeros is None else weight.zeros,
        w,
        weight.n,
        weight.k,
        units,
        GROUP=weight.group,
        P=4,
        SYMMETRIC=weight.zeros is None,
        INTERPRET=INTERPRET,
        num_warps=4,
    )
    return w


# ---------------------------------------------------------------------------------------------------------------------
# Measuring
# ---------------------------------------------------------------------------------------------------------------------


def rotated(weight: PackedWeight, l2_bytes: int) -> list[PackedWeight]:
    """Copies of a weight that together are three times the L2, so that each use reads memory."""
    copies = max(2, min(64, -(-3 * l2_bytes // weight.nbytes)))
    return [weight] + [
        PackedWeight(
            weight.words.clone(),
            weight.scales.clone(),
            None if weight.zeros is None else weight.zeros.clone(),
            weight.n,
            weight.k,
            weight.group,
        )
        for _ in range(copies - 1)
    ]


def graph_us(calls: list, repeats: int = 7, replays: int = 3) -> list[float]:
    """Microseconds a call, one figure a repeat: every call captured in order in one CUDA graph, replayed."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        calls[0]()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for call in calls:
                call()
        graph.replay()
        times = []
        for _ in range(repeats):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record(stream)
            for _ in range(replays):
                graph.replay()
            end.record(stream)
            end.synchronize()
            times.append(start.elapsed_time(end) * 1000 / (len(calls) * replays))
    del graph
    return times


def tune_shape(
    n: int,
    k: int,
    group: int = 128,
    dtype: torch.dtype = torch.bfloat16,
    buckets: tuple[int, ...] = tiles.BUCKETS,
    keep: bool = True,
    measured: list[tuple[int, Tile, float]] | None = None,
) -> dict[str, Tile]:
    """Measure every candidate tile for one weight shape on this GPU; keep the winners on disk.

    ``measured`` gets bucket of M, tile and microseconds of every candidate.
    """
    device = torch.device("cuda", torch.cuda.current_device())
    name, sms = _device(device)
    row_tiles, units = -(-n // 16), -(-k // 128)
    weight = PackedWeight(
        words=torch.randint(-(2**31), 2**31 - 1, (row_tiles, units, 2, 32, 4), dtype=torch.int32, device=device),
        scales=torch.rand(row_tiles, units * (128 // group) if group else 1, 8, 2, device=device).to(dtype),
        zeros=None,
        n=n,
        k=k,
        group=group,
    )
    copies = rotated(weight, torch.cuda.get_device_properties(device).L2_cache_size)
    prepare(device)

    def time_us(tile: Tile, m: int) -> float:
        x = torch.randn(m, k, device=device).to(dtype)
        try:
            us = statistics.median(graph_us([lambda w=w: int4_gemm(x, w, tile=tile) for w in copies]))
        except (RuntimeError, triton.TritonError):  # doesn't fit this GPU
            us = float("inf")
        if measured is not None:
            measured.append((m, tile, us))
        return us

    logger.warning(
        "int4_gemm: measuring tiles for %d x %d, group %d, M up to %s on %s, once; kept in %s",
        n, k, group, max(buckets), name, tiles.cache_path(name),
    )  # fmt: skip
    entries = tiles.tune(n, k, group, sms, time_us, buckets)
    if keep:
        tiles.save(name, entries)
    return entries
