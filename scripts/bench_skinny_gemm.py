#!/usr/bin/env python3
"""Skinny bf16 GEMM against cuBLAS: single products and a model's whole stack of linear layers, one table, one record.

    python scripts/bench_skinny_gemm.py                    # Llama-8B and 1B shapes with the shipped tiles
    python scripts/bench_skinny_gemm.py --tune             # measure tiles first and replace the table of this GPU

Every figure is a CUDA-graph replay over weights that together exceed the L2 three times, so each product reads its
weight from memory. ``alone``: products back to back. ``spaced``: a small elementwise kernel before each, as norms and
attention in a model; tiles are chosen by this one. A stack is every linear layer of the model in order, each with its
own weight, each product depending on the one before, and the head.
"""

import argparse
import functools
import json
import math
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from sdsie_sglang.kernels.int4_gemm.gemm import graph_us  # noqa: E402
from sdsie_sglang.kernels.skinny_gemm import gemm, skinny_gemm, skinny_gemm_applies, tiles  # noqa: E402
from sdsie_sglang.kernels.skinny_gemm.tiles import Tile  # noqa: E402

SHAPES = {  # name: (N, K); the head last
    "8b": {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336),
           "head": (128256, 4096)},
    "1b": {"qkv": (3072, 2048), "o": (2048, 2048), "gate_up": (16384, 2048), "down": (2048, 8192),
           "head": (128256, 2048)},
}  # fmt: skip
LAYERS = {"8b": 32, "1b": 16}
MS = (1, 2, 6, 8, 16)
STACK_MS = {"8b": (1, 6), "1b": (1, 2)}
TUNE_AT = {2: 1, 8: 6, 16: 16}  # bucket: the M that is timed
MARGIN = 0.99  # of cuBLAS's time: closer than that is noise
RECORDS = ROOT / "kernels" / "skinny_gemm" / "measured"
Product = Callable[[Tensor, Tensor], Tensor]


def ours(x: Tensor, weight: Tensor) -> Tensor:
    """What a model would call."""
    return skinny_gemm(x, weight) if skinny_gemm_applies(x, weight) else linear(x, weight)


def invariant(x: Tensor, weight: Tensor) -> Tensor:
    """The same with this project's kernel wherever there is a tile, so that a row's bits don't depend on M."""
    return skinny_gemm(x, weight) if skinny_gemm_applies(x, weight, batch_invariant=True) else linear(x, weight)


def copies_of(n: int, k: int) -> list[Tensor]:
    """Random weights that together are three times the L2."""
    l2 = torch.cuda.get_device_properties(0).L2_cache_size
    count = max(2, min(64, -(-3 * l2 // (2 * n * k))))
    return list((torch.randn(count, n, k, device="cuda", dtype=torch.bfloat16) / math.sqrt(k)).unbind())


def product_us(product: Product, m: int, weights: list[Tensor], spaced: bool, repeats: int) -> list[float]:
    """Microseconds a product, with the small kernel before it when spaced."""
    x = torch.randn(m, weights[0].shape[1], device="cuda").to(torch.bfloat16)

    def call(weight: Tensor) -> Tensor:
        return product(x.mul_(1.0) if spaced else x, weight)

    return graph_us([functools.partial(call, w) for w in weights], repeats)


# ---------------------------------------------------------------------------------------------------------------------
# Tuning
# ---------------------------------------------------------------------------------------------------------------------


def compile_one(job: tuple[int, int, int, Tile]) -> None:
    """In a process of the pool."""
    try:
        gemm.compile_tile(*job)
    except Exception as failure:  # the tuner meets it again, in time_tile
        print(f"no kernel for {job}: {type(failure).__name__}: {str(failure)[:200]}", flush=True)


def compile_all(pool: Any, jobs: Iterable[tuple[int, int, int, Tile]]) -> None:
    """Fill Triton's cache; kernels depend on K and on the column tiles, not on N."""
    unique = {(tiles.columns(m), k, tile): (m, n, k, tile) for m, n, k, tile in jobs}
    pool.map(compile_one, unique.values(), chunksize=1)


def time_tile(tile: Tile, m: int, weights: list[Tensor], repeats: int) -> float:
    """Median microseconds, infinity when the tile doesn't compile."""
    try:
        return statistics.median(product_us(lambda x, w: skinny_gemm(x, w, tile=tile), m, weights, True, repeats))
    except Exception as failure:
        print(f"{tile} failed at M={m}: {type(failure).__name__}: {str(failure)[:200]}", flush=True)
        return math.inf


def tune(pool: Any, shapes: list[tuple[int, int]], sms: int, repeats: int) -> tuple[dict[str, Tile], dict[str, Tile]]:
    """Entries of the table. Warps and vectors are one choice for every M of a shape: they decide the order of sums.

    M = 6 is timed with every candidate; M = 1 with the fastest few; 16 with their two orders of sums. Returns the
    buckets that beat cuBLAS by more than the noise, and the others.
    """
    compile_all(pool, [(6, n, k, tile) for n, k in shapes for tile in tiles.candidates(6, n, k, sms)])
    leaders: dict[tuple[int, int], list[tuple[int, int]]] = {}
    timed: dict[tuple[int, int], dict[int, dict[Tile, float]]] = {}
    for n, k in shapes:
        weights = copies_of(n, k)
        us = {tile: time_tile(tile, 6, weights, repeats) for tile in tiles.candidates(6, n, k, sms)}
        fastest = sorted(us, key=us.__getitem__)
        best_of_order: dict[tuple[int, int], Tile] = {}
        for tile in fastest:
            best_of_order.setdefault((tile.warps, tile.vectors), tile)
        leaders[n, k] = list(best_of_order)[:3]
        again = [tile for tile in fastest if (tile.warps, tile.vectors) in leaders[n, k]][:9]
        timed[n, k] = {6: us, 1: {tile: time_tile(tile, 1, weights, repeats) for tile in again}}
        del weights
    wide = {
        (n, k): [t for t in tiles.candidates(16, n, k, sms) if (t.warps, t.vectors) in leaders[n, k][:2]]
        for n, k in shapes
    }
    compile_all(pool, [(16, n, k, tile) for (n, k), found in wide.items() for tile in found])
    chosen: dict[tuple[int, int], dict[int, Tile]] = {}
    for n, k in shapes:
        weights = copies_of(n, k)
        timed[n, k][16] = {tile: time_tile(tile, 16, weights, repeats) for tile in wide[n, k]}
        by_order: dict[tuple[int, int], dict[int, Tile]] = {}
        for order in leaders[n, k]:
            for m, us in timed[n, k].items():
                of_order = [tile for tile in us if (tile.warps, tile.vectors) == order and us[tile] < math.inf]
                if of_order:
                    by_order.setdefault(order, {})[m] = min(of_order, key=us.__getitem__)
        full = {order: found for order, found in by_order.items() if 1 in found and 6 in found}
        chosen[n, k] = min(full.values(), key=lambda found: sum(timed[n, k][m][found[m]] for m in (1, 6)))
        del weights
    faster: dict[str, Tile] = {}
    slower: dict[str, Tile] = {}
    for n, k in shapes:
        weights = copies_of(n, k)
        for m_bucket, m in TUNE_AT.items():
            if m not in chosen[n, k]:
                continue
            tile = chosen[n, k][m]
            before = statistics.median(product_us(linear, m, weights, True, repeats))
            us = time_tile(tile, m, weights, repeats)
            library = min(before, statistics.median(product_us(linear, m, weights, True, repeats)))
            wins = us <= MARGIN * library
            (faster if wins else slower)[tiles.key(n, k, m_bucket)] = tile
            print(f"{n}x{k} M={m}: {us:.2f} us, cuBLAS {library:.2f}, {'' if wins else 'left to cuBLAS, '}{tile} "
                  f"of {len(timed[n, k][m])}", flush=True)  # fmt: skip
        del weights
    return faster, slower


# ---------------------------------------------------------------------------------------------------------------------
# Tables
# ---------------------------------------------------------------------------------------------------------------------


def measure_products(models: list[str], ms: list[int], repeats: int) -> list[dict[str, Any]]:
    """Both providers at every shape and M."""
    rows = []
    for model in models:
        for layer, (n, k) in SHAPES[model].items():
            weights = copies_of(n, k)
            for m in ms:
                x = torch.randn(m, k, device="cuda").to(torch.bfloat16)
                exact = (
                    x.double() @ weights[0].double().T if n < 100_000 else (x.float() @ weights[0].float().T).double()
                )
                row: dict[str, Any] = {"model": model, "layer": layer, "n": n, "k": k, "m": m}
                for name, product in (("cublas", linear), ("skinny", ours)):
                    error = ((product(x, weights[0]).double() - exact).norm() / exact.norm()).item()
                    row[name] = {"relative_error": error}
                    for spaced in (False, True):
                        times = [round(us, 3) for us in product_us(product, m, weights, spaced, repeats)]
                        row[name]["spaced" if spaced else "alone"] = times
                found = tiles.table(torch.cuda.get_device_name()).get((n, k, m))
                row["tile"] = asdict(found) if found else None
                rows.append(row)
                a, b = (statistics.median(row[name]["alone"]) for name in ("cublas", "skinny"))
                c, d = (statistics.median(row[name]["spaced"]) for name in ("cublas", "skinny"))
                terabytes = (2 * n * k + 2 * m * (n + k)) / 1e6
                print(f"{model} {layer:<8}M={m:<3} alone: cuBLAS {a:7.2f} us {terabytes / a:.2f} TB/s, ours {b:7.2f} "
                      f"us {terabytes / b:.2f} TB/s, {a / b:.3f}x   spaced: {c:7.2f} {d:7.2f}, {c / d:.3f}x"
                      f"{'' if found else '  (cuBLAS)'}", flush=True)  # fmt: skip
            del weights
    return rows


def stack_weights(model: str) -> list[Tensor]:
    """Every linear layer's weight in order, and the head's."""
    *layers, head = SHAPES[model].values()
    shapes = [*layers * LAYERS[model], head]
    return [torch.randn(n, k, device="cuda", dtype=torch.bfloat16) / math.sqrt(k) for n, k in shapes]


def run_stack(x: Tensor, weights: list[Tensor], product: Callable[[int, Tensor], Tensor], spaced: bool) -> Tensor:
    """Each product takes the first columns of the one before."""
    for i, weight in enumerate(weights):
        x = x[:, : weight.shape[1]]
        x = product(i, x * 1.0 if spaced else x)
    return x


def measure_stacks(models: list[str], repeats: int) -> list[dict[str, Any]]:
    """The whole model's linear layers, products only and with a small kernel before each."""
    rows = []
    for model in models:
        weights = stack_weights(model)
        total = sum(w.nbytes for w in weights)

        def library(i: int, x: Tensor, weights: list[Tensor] = weights) -> Tensor:
            return linear(x, weights[i])

        def skinny(i: int, x: Tensor, weights: list[Tensor] = weights) -> Tensor:
            return ours(x, weights[i])

        def skinny_invariant(i: int, x: Tensor, weights: list[Tensor] = weights) -> Tensor:
            return invariant(x, weights[i])

        for m in STACK_MS[model]:
            x = torch.randn(m, weights[0].shape[1], device="cuda").to(torch.bfloat16)
            for spaced in (False, True):
                row: dict[str, Any] = {"model": model, "m": m, "spaced": spaced, "bytes": total}
                for name, product in (("cublas", library), ("skinny", skinny), ("skinny_invariant", skinny_invariant)):
                    call = functools.partial(run_stack, x, weights, product, spaced)
                    call()
                    row[name] = [round(us, 1) for us in graph_us([call], repeats)]
                rows.append(row)
                us = {name: statistics.median(row[name]) for name in ("cublas", "skinny", "skinny_invariant")}
                print(f"{model} stack M={m} {'spaced' if spaced else 'alone '}: " + ", ".join(
                    f"{name} {value:.0f} us {total / value / 1e6:.2f} TB/s ({us['cublas'] / value:.3f}x)"
                    for name, value in us.items()), flush=True)  # fmt: skip
        del weights
    return rows


def environment() -> dict[str, Any]:
    """What the figures depend on besides the code."""
    import triton

    properties = torch.cuda.get_device_properties(0)
    return {
        "gpu": properties.name, "sms": properties.multi_processor_count, "l2_bytes": properties.L2_cache_size,
        "torch": torch.__version__, "triton": triton.__version__, "cuda": torch.version.cuda,
        "date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
    }  # fmt: skip


def dumps(record: dict[str, Any]) -> str:
    """JSON with one measured row a line."""
    lines = [f' "environment": {json.dumps(record["environment"])}']
    for name in ("stacks", "products"):
        rows = ",\n  ".join(json.dumps(row) for row in record[name])
        lines.append(f' "{name}": [\n  {rows}\n ]')
    return "{\n" + ",\n".join(lines) + "\n}\n"


def parse() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--m", nargs="+", type=int, default=list(MS))
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--tune", action="store_true", help="measure tiles first and replace this GPU's table")
    parser.add_argument("--compile-only", action="store_true", help="fill Triton's cache for a tuning, nothing else")
    parser.add_argument("--processes", type=int, default=max(1, (os.cpu_count() or 1) - 2), help="that compile")
    parser.add_argument("--no-stacks", action="store_true")
    parser.add_argument("--out", type=Path, help="record (default kernels/skinny_gemm/measured/<gpu>.json)")
    return parser.parse_args()


def main() -> None:
    """Tune, measure, print, record."""
    args = parse()
    if max(args.m) > tiles.MAX_M:
        raise SystemExit(f"bench_skinny_gemm.py: --m takes at most {tiles.MAX_M}")
    pool: Any = None
    if args.tune or args.compile_only:  # before CUDA starts: its context doesn't survive a fork
        pool = multiprocessing.get_context("fork").Pool(args.processes)
    if not torch.cuda.is_available():
        raise SystemExit("bench_skinny_gemm.py measures on an NVIDIA GPU, and there is none here")
    name = torch.cuda.get_device_name()
    shapes = [shape for model in args.shapes for shape in SHAPES[model].values()]
    start = time.monotonic()
    torch.manual_seed(0)
    if args.compile_only:
        sms = torch.cuda.get_device_properties(0).multi_processor_count
        compile_all(pool, [(6, n, k, tile) for n, k in shapes for tile in tiles.candidates(6, n, k, sms)])
        return
    if args.tune:
        sms = torch.cuda.get_device_properties(0).multi_processor_count
        tiles.save(tiles.table_path(name), name, *tune(pool, shapes, sms, 3))
        gemm._table.cache_clear()
        print(f"tuned in {time.monotonic() - start:.1f} s", flush=True)
    record = {"environment": environment(), "stacks": [], "products": []}
    path = args.out or RECORDS / f"{name.removeprefix('NVIDIA ').replace(' ', '_')}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    if not args.no_stacks:
        record["stacks"] = measure_stacks(args.shapes, args.repeats)
        path.write_text(dumps(record))
    record["products"] = measure_products(args.shapes, args.m, args.repeats)
    path.write_text(dumps(record))
    print(f"{path}; {time.monotonic() - start:.1f} s", flush=True)


if __name__ == "__main__":
    main()
