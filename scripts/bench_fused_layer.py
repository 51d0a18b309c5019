#!/usr/bin/env python3
"""A whole model's decoder layers at decode widths: separate kernels against products with norms and SiLU inside.

    python scripts/bench_fused_layer.py                    # Llama-8B and 1B shapes, M = 1, 2, 6

Every figure is one CUDA graph of all layers, each with its own weights, each kernel depending on the one before:
``cublas`` and ``skinny`` with the norm and activation kernels SGLang calls (its sgl_kernel, or where that can't be
imported two Triton kernels like them, dependent launches too), ``fused`` with `norm_gemm.py`. One elementwise kernel
stands for rotation and attention. No head.
"""

import argparse
import functools
import json
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from bench_skinny_gemm import LAYERS, RECORDS, SHAPES, compile_one, environment, ours, stack_weights
from torch import Tensor
from torch.nn.functional import linear

from sdsie_sglang.kernels.int4_gemm.gemm import graph_us
from sdsie_sglang.kernels.skinny_gemm import add_norm_gemm, norm_gemm, normed_gemm, skinny_gemm_applies, tiles

EPS = 1e-5
MS = (1, 2, 6)
KINDS = {"qkv": "normed", "o": "add_norm", "gate_up": "silu", "down": "add_norm"}
Product = Callable[[Tensor, Tensor], Tensor]


@triton.jit
def _add_norm_kernel(  # noqa: ANN202
    x, residual, weight, eps,  # noqa: ANN001
    K: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:  # where FlashInfer's, which sgl_kernel has, waits and lets the next one start
        tl.extra.cuda.gdc_wait()
    at = tl.arange(0, BLOCK)
    row = tl.program_id(0) * K
    s = tl.load(x + row + at, mask=at < K, other=0).to(tl.float32)
    s += tl.load(residual + row + at, mask=at < K, other=0).to(tl.float32)
    tl.store(residual + row + at, s, mask=at < K)
    y = s * tl.rsqrt(tl.sum(s * s) / K + eps) * tl.load(weight + at, mask=at < K, other=0).to(tl.float32)
    tl.store(x + row + at, y, mask=at < K)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def _silu_kernel(x, y, K: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):  # noqa: ANN001, ANN202
    if PDL:
        tl.extra.cuda.gdc_wait()
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row, column = at // K, at % K
    gate = tl.load(x + row * 2 * K + column).to(tl.float32)
    up = tl.load(x + row * 2 * K + K + column).to(tl.float32)
    tl.store(y + at, gate / (1 + tl.exp(-gate)) * up)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


@functools.cache
def _dependent() -> dict[str, bool]:
    pdl = torch.cuda.get_device_capability()[0] >= 9
    return {"PDL": pdl} | ({"launch_pdl": True} if pdl else {})


def _triton_add_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> None:
    k = x.shape[1]
    block = triton.next_power_of_2(k)
    _add_norm_kernel[(x.shape[0],)](x, residual, weight, eps, k, block, **_dependent(), num_warps=8)


def _triton_silu(x: Tensor, y: Tensor) -> None:
    _silu_kernel[(y.numel() // 1024,)](x, y, y.shape[1], 1024, **_dependent())


def separate_kernels() -> tuple[str, Callable[..., Any], Callable[..., Any]]:
    """Where they come from; x, residual, weight, eps -> both in place; gate and up, out."""
    try:
        from sgl_kernel import fused_add_rmsnorm, silu_and_mul

        return "sgl_kernel", fused_add_rmsnorm, silu_and_mul
    except (ImportError, OSError, RuntimeError):
        return "triton", _triton_add_norm, _triton_silu


def run_separate(
    x: Tensor, weights: list[list[Tensor]], norms: list[list[Tensor]], product: Product, add_norm: Any, silu: Any
) -> Tensor:
    """x (M, hidden) through every layer, seven kernels each."""
    residual = torch.zeros_like(x)
    x = x.clone()
    for (qkv, o, gate_up, down), (first, second) in zip(weights, norms, strict=True):
        add_norm(x, residual, first, EPS)
        x = product(product(x, qkv)[:, : o.shape[1]] * 1.0, o)
        add_norm(x, residual, second, EPS)
        both = product(x, gate_up)
        activated = both.new_empty(both.shape[0], both.shape[1] // 2)
        silu(both, activated)
        x = product(activated, down)
    return x


def stand_in(layer: int, heads: Tensor, columns: int) -> Tensor:
    """One elementwise kernel in place of rotation and attention."""
    return heads[:, :columns] * 1.0


def run_fused(
    x: Tensor,
    weights: list[list[Tensor]],
    norms: list[list[Tensor]],
    add_norm: Any,
    attend: Callable[[int, Tensor, int], Tensor] = stand_in,
) -> Tensor:
    """The same, five kernels each; the first layer's norm is a kernel of its own."""
    residual = torch.zeros_like(x)
    x, stream = x.clone(), None
    for i, ((qkv, o, gate_up, down), (first, second)) in enumerate(zip(weights, norms, strict=True)):
        if stream is None:
            add_norm(x, residual, first, EPS)
            heads = ours(x, qkv)
        else:
            residual = stream.residual
            heads = normed_gemm(stream, qkv, None, EPS)
        _, stream = add_norm_gemm(attend(i, heads, o.shape[1]), o, None, residual, second)
        activated = normed_gemm(stream, gate_up, None, EPS, silu=True)
        following = norms[(i + 1) % len(norms)][0]
        x, stream = add_norm_gemm(activated, down, None, stream.residual, following)
    return x


def compile_norm_one(job: tuple[Any, ...]) -> None:
    """In a process of the pool."""
    try:
        norm_gemm.compile_norm_tile(*job)
    except Exception as failure:  # met again, with its traceback, by the measurement
        print(f"no kernel for {job}: {type(failure).__name__}: {str(failure)[:200]}", flush=True)


def compile_ahead(pool: Any, models: list[str], ms: list[int]) -> None:
    """Fill Triton's cache with every kernel of every model."""
    found = tiles.table(torch.cuda.get_device_name(), True)
    plain, normed = set(), set()
    for model in models:
        for name, kind in KINDS.items():
            n, k = SHAPES[model][name]
            for m in ms:
                if tile := found.get((n, k, m)):
                    stands = next(b for b in ms if tiles.bucket(b) == tiles.bucket(m))
                    plain.add((stands, n, k, tile))
                    normed.add((stands, n, k, tile, kind))
    waiting = [pool.map_async(compile_norm_one, list(normed), 1), pool.map_async(compile_one, list(plain), 1)]
    for result in waiting:
        result.get()


def measure(models: list[str], ms: list[int], repeats: int) -> list[dict[str, Any]]:
    """Every model, M and way."""
    source, add_norm, silu = separate_kernels()
    rows = []
    for model in models:
        layers, hidden = LAYERS[model], SHAPES[model]["o"][0]
        flat = stack_weights(model)[:-1]
        weights = [flat[4 * i : 4 * i + 4] for i in range(layers)]
        total = sum(w.nbytes for w in flat)
        scales = 1 + 0.1 * torch.randn(layers, 2, hidden, device="cuda")
        norms = [list(pair.to(torch.bfloat16).unbind()) for pair in scales]
        for m in ms:
            x = torch.randn(m, hidden, device="cuda").to(torch.bfloat16)
            if not all(skinny_gemm_applies(w.new_empty(m, w.shape[1]), w, True) for w in weights[0]):
                raise SystemExit(f"bench_fused_layer.py: no measured tiles for {model} at M = {m} on this GPU")
            ways = {
                "cublas": functools.partial(run_separate, x, weights, norms, linear, add_norm, silu),
                "skinny": functools.partial(run_separate, x, weights, norms, ours, add_norm, silu),
                "fused": functools.partial(run_fused, x, weights, norms, add_norm),
            }
            row: dict[str, Any] = {"model": model, "m": m, "layers": layers, "bytes": total, "separate": source}
            outputs = {name: call().double() for name, call in ways.items()}
            for name, call in ways.items():
                row[name] = [round(us, 1) for us in graph_us([call], repeats)]
            row["difference"] = {
                name: ((outputs[name] - outputs["cublas"]).norm() / outputs["cublas"].norm()).item()
                for name in ("skinny", "fused")
            }
            rows.append(row)
            us = {name: statistics.median(row[name]) for name in ways}
            print(f"{model} {layers} layers M={m}: " + ", ".join(
                f"{name} {value:.0f} us ({value / layers:.1f} a layer, {total / value / 1e6:.2f} TB/s, "
                f"{us['cublas'] / value:.3f}x)" for name, value in us.items())
                + f"; from cuBLAS: skinny {row['difference']['skinny']:.4f}, fused {row['difference']['fused']:.4f}"
                f"; norms by {source}", flush=True)  # fmt: skip
        del weights, flat
    return rows


def parse() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--m", nargs="+", type=int, default=list(MS))
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--processes", type=int, default=max(1, (os.cpu_count() or 1) - 2), help="that compile")
    parser.add_argument("--out", type=Path, help="record (default kernels/skinny_gemm/measured/<gpu>.layers.json)")
    return parser.parse_args()


def main() -> None:
    """Compile, measure, print, record."""
    args = parse()
    if not 0 < min(args.m) <= max(args.m) <= tiles.MAX_M:
        print(f"bench_fused_layer.py: --m takes 1 to {tiles.MAX_M}", file=sys.stderr)
        raise SystemExit(2)
    pool = multiprocessing.get_context("fork").Pool(args.processes)  # CUDA's context doesn't survive a fork
    if not torch.cuda.is_available():
        raise SystemExit("bench_fused_layer.py measures on an NVIDIA GPU, and there is none here")
    start = time.monotonic()
    torch.manual_seed(0)
    compile_ahead(pool, args.shapes, sorted(set(args.m)))
    print(f"compiled in {time.monotonic() - start:.1f} s", flush=True)
    rows = measure(args.shapes, args.m, args.repeats)
    name = torch.cuda.get_device_name().removeprefix("NVIDIA ").replace(" ", "_")
    path = args.out or RECORDS / f"{name}.layers.json"
    lines = ",\n  ".join(json.dumps(row) for row in rows)
    path.write_text(f'{{\n "environment": {json.dumps(environment())},\n "layers": [\n  {lines}\n ]\n}}\n')
    print(f"{path}; {time.monotonic() - start:.1f} s", flush=True)


if __name__ == "__main__":
    main()
