#!/usr/bin/env python3
"""What attention adds to a whole model's fused decoder layers at decode widths, for each way to cut a context.

    python scripts/bench_skinny_attention.py                    # Llama-8B and 1B shapes, M = 1, 2, 6 rows, one request

Every figure is one CUDA graph of all layers, each with its own weights and KV cache, so that keys come from DRAM as in
a server. ``stand-in``: one elementwise kernel instead of rotation, KV write and attention; what a way adds is its time
beyond that. With --tune the best ways are used from now on (`kernels/skinny_attention/tuned`).
"""

import argparse
import functools
import itertools
import json
import multiprocessing
import os
import statistics
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from bench_fused_layer import compile_ahead, run_fused, separate_kernels
from bench_skinny_gemm import LAYERS, SHAPES, environment, stack_weights
from torch import Tensor

from sdsie_sglang.kernels.int4_gemm.gemm import graph_us
from sdsie_sglang.kernels.skinny_attention import Shape, attention, kernel, skinny_attention

RECORDS = Path(__file__).parents[1] / "kernels" / "skinny_attention" / "measured"
HEADS, GROUPS = 8, 4
SIZES = {"8b": 128, "1b": 64}
MS, CONTEXTS = (1, 2, 6), (200, 700, 3000)
CUTS = [
    Shape(block, short, parts, 8)
    for block, short, parts in itertools.product((64, 128), (64, 128, 256), (6, 12, 32))
    if short >= block
]  # fmt: skip


def compile_attention(job: tuple[int, int, Shape]) -> None:
    """In a process of the pool: (width, head size, cut)."""
    width, size, cut = job
    bf16, fp32, i64, i32 = torch.bfloat16, torch.float32, torch.int64, torch.int32
    kernel.attention_kernel.warmup(
        bf16, fp32, i64, bf16, bf16, i64, i32, i32, bf16, fp32, fp32, i32, 16, 16, 1.0, grid=(1,),
        **attention.constants(width, GROUPS, HEADS, size, cut, torch.cuda.get_device_capability()[0] >= 9),
    )  # fmt: skip


class Caches:
    """A KV cache a layer, the keys of one request scattered over it."""

    def __init__(self, layers: int, size: int, width: int, context: int) -> None:
        slots = torch.randperm(context, device="cuda").to(torch.int32)
        self.table = slots[None]
        self.own = slots[context - width :].long()
        self.positions = torch.arange(context - width, context, device="cuda")
        self.lengths = torch.tensor([context], dtype=torch.int32, device="cuda")
        self.kv = [torch.randn(2, context, HEADS, size, device="cuda").bfloat16() for _ in range(layers)]
        angles = torch.outer(
            torch.arange(context, device="cuda").float(), 0.1 ** torch.linspace(0, 4, size // 2).cuda()
        )
        self.cos_sin = torch.cat([angles.cos(), angles.sin()], dim=1)
        self.arrived = torch.zeros(HEADS, dtype=torch.int32, device="cuda")
        self.scale = size**-0.5

    def attend(self, cut: Shape, layer: int, heads: Tensor, columns: int) -> Tensor:
        """The layer's attention; columns: of its output, as everywhere."""
        k, v = self.kv[layer]
        return skinny_attention(
            heads, self.cos_sin, self.positions, k, v, self.own, self.table, self.lengths, self.scale, self.arrived,
            shape=cut,
        )  # fmt: skip


def measure(model: str, ms: list[int], contexts: list[int], repeats: int) -> list[dict[str, Any]]:
    """Every number of rows, context and cut."""
    _, add_norm, _ = separate_kernels()
    layers, hidden, size = LAYERS[model], SHAPES[model]["o"][0], SIZES[model]
    flat = stack_weights(model)[:-1]
    weights = [flat[4 * i : 4 * i + 4] for i in range(layers)]
    norms = [[torch.ones(hidden, device="cuda").bfloat16() for _ in "12"] for _ in range(layers)]
    rows = []
    for m in ms:
        x = torch.randn(m, hidden, device="cuda").bfloat16()
        run = functools.partial(run_fused, x, weights, norms, add_norm)
        without = statistics.median(graph_us([run], repeats))
        for context in contexts:
            caches = Caches(layers, size, m, context)
            row: dict[str, Any] = {"model": model, "m": m, "context": context, "stand_in_us": round(without, 1)}
            added = {}
            for cut in CUTS:
                times = graph_us([functools.partial(run, attend=functools.partial(caches.attend, cut))], repeats)
                added[cut] = (statistics.median(times) - without) / layers
            row["added_us_a_layer"] = {f"{c.block}-{c.short}-{c.parts}": round(us, 3) for c, us in added.items()}
            rows.append(row)
            best = sorted(added, key=added.__getitem__)[:4]
            print(f"{model} M={m} context {context}: {without:.0f} us without; a layer " + ", ".join(
                f"{c.block}-{c.short}-{c.parts}: {added[c]:+.2f} us" for c in best), flush=True)  # fmt: skip
            del caches
    return rows


def best(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each head size and number of padded query rows the cut with the smallest sum over rows and contexts."""
    sums: dict[tuple[int, int], dict[str, float]] = defaultdict(lambda: defaultdict(float))
    named = {f"{c.block}-{c.short}-{c.parts}": c for c in CUTS}
    for row in rows:
        for cut in named:
            sums[SIZES[row["model"]], attention.padded(row["m"] * GROUPS)][cut] += row["added_us_a_layer"][cut]
    return [
        {"size": size, "rows": padded, "shape": list(named[min(cuts, key=cuts.__getitem__)])}
        for (size, padded), cuts in sorted(sums.items())
    ]


def main() -> None:
    """Compile, measure, print, record."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--shapes", nargs="+", choices=list(SIZES), default=list(SIZES))
    parser.add_argument("--m", nargs="+", type=int, default=list(MS))
    parser.add_argument("--contexts", nargs="+", type=int, default=list(CONTEXTS))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--processes", type=int, default=max(1, (os.cpu_count() or 1) - 2), help="that compile")
    parser.add_argument("--tune", action="store_true", help="use what is found from now on: tuned/<gpu>.json")
    parser.add_argument("--out", type=Path, help="record (default kernels/skinny_attention/measured/<gpu>.json)")
    args = parser.parse_args()
    if not 0 < min(args.m) <= max(args.m) <= attention.MAX_ROWS or min(args.contexts) <= max(args.m):
        parser.error(f"--m takes 1 to {attention.MAX_ROWS}, --contexts more than that")
    pool = multiprocessing.get_context("fork").Pool(args.processes)  # CUDA's context doesn't survive a fork
    if not torch.cuda.is_available():
        raise SystemExit("bench_skinny_attention.py measures on an NVIDIA GPU, and there is none here")
    start = time.monotonic()
    torch.manual_seed(0)
    jobs = [(m, SIZES[shape], cut) for shape in args.shapes for m in args.m for cut in CUTS]
    waiting = pool.map_async(compile_attention, jobs, 1)
    compile_ahead(pool, args.shapes, sorted(set(args.m)))
    waiting.get()
    print(f"compiled in {time.monotonic() - start:.1f} s", flush=True)
    rows = [row for model in args.shapes for row in measure(model, args.m, args.contexts, args.repeats)]
    found = best(rows)
    for row in found:
        print(f"heads of {row['size']}, {row['rows']} query rows: {Shape(*row['shape'])}", flush=True)
    if args.tune:
        path = attention.table_path(torch.cuda.get_device_name())
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps({"environment": environment(), "shapes": found}, indent=1) + "\n")
    name = torch.cuda.get_device_name().removeprefix("NVIDIA ").replace(" ", "_")
    path = args.out or RECORDS / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n  ".join(json.dumps(row) for row in rows)
    path.write_text(f'{{\n "environment": {json.dumps(environment())},\n "rows": [\n  {lines}\n ]\n}}\n')
    print(f"{path}; {time.monotonic() - start:.1f} s", flush=True)


if __name__ == "__main__":
    main()
