#!/usr/bin/env python3
"""INT4 GEMM against cuBLAS bf16, GemLite, torchao's tinygemm and Marlin: one table, one record, one plot.

    python scripts/bench_int4_gemm.py --headline                       # Llama-8B and 1B shapes, every M
    python scripts/bench_int4_gemm.py --shapes 8b --m 1 8 --providers cublas int4
    python scripts/bench_int4_gemm.py --dram                           # DRAM bytes by ncu, needs its permissions
    python scripts/bench_int4_gemm.py --tune                           # tiles for these M first, kept on disk

GemLite and what it is allowed to search: gemlite_rival.py.
A rival that does not import or compile, or whose seconds are used up (--rival-seconds: preparation, autotuning and
timing over the whole run), is left out from then on and named, with the reason, in the record and beside the figure;
the cells that it has by then count.

Every figure is a CUDA-graph replay over copies of the weight that together exceed the L2 three times, so each product
reads its weight from memory. Each repeat is one timed batch of replays; medians and the spread over repeats are kept.
"""

import argparse
import csv
import io
import json
import math
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import gemlite_rival  # noqa: E402

from sdsie_sglang.eval.machine import this_command  # noqa: E402
from sdsie_sglang.kernels.int4_gemm import gemm, int4_gemm, pack, quantize, tune_shape  # noqa: E402
from sdsie_sglang.kernels.int4_gemm import tiles as tile_tables  # noqa: E402
from sdsie_sglang.kernels.int4_gemm.pack import QuantizedWeight  # noqa: E402

SHAPES = {  # name: (N, K)
    "8b": {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)},
    "1b": {"qkv": (3072, 2048), "o": (2048, 2048), "gate_up": (16384, 2048), "down": (2048, 8192)},
}
MS = (1, 2, 4, 6, 8, 16, 64, 256, 2048)
GROUP = 128
RECORDS = ROOT / "eval" / "results" / "int4_gemm"
Call = Callable[[Tensor], Tensor]


BEST_RIVAL_REQUIRED = 1.0
MOST_ERROR = 0.05
"""Relative, of a whole product: weights are the same for all, so with more than that it is a wrong one."""


class Unavailable(Exception):
    """Why a provider can't run here."""


class OutOfTime(BaseException):
    """No Exception, which an autotuner may take for a configuration that fails."""


class Budget:
    """Seconds that each rival may take in a run; others may take what they need."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.used = dict.fromkeys(RIVALS, 0.0)

    @contextmanager
    def of(self, provider: str) -> Iterator[None]:
        """Raises OutOfTime within, at the next step of Python, once the provider's seconds are used up."""
        if provider not in self.used:
            yield
            return

        def stop(number: int, frame: object) -> None:
            raise OutOfTime

        earlier, started = signal.signal(signal.SIGALRM, stop), time.monotonic()
        try:
            signal.setitimer(signal.ITIMER_REAL, max(1e-3, self.seconds - self.used[provider]))
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, earlier)
            self.used[provider] += time.monotonic() - started


# ---------------------------------------------------------------------------------------------------------------------
# Providers: from the quantised weight, `copies` callables of x that share no memory
# ---------------------------------------------------------------------------------------------------------------------


def bind(product: Callable[..., Tensor], *tensors: Tensor) -> Call:
    """A call that owns copies of its tensors."""
    own = [tensor.clone() for tensor in tensors]
    return lambda x: product(x, *own)


def int4_calls(weight: QuantizedWeight, copies: int, dtype: torch.dtype) -> list[Call]:
    """This project's kernel, tiles as tuned."""
    packed = [pack(weight)]
    packed += [type(packed[0])(**{**vars(packed[0]), **_clones(packed[0])}) for _ in range(copies - 1)]
    return [lambda x, w=w: int4_gemm(x, w) for w in packed]


def _clones(packed: Any) -> dict[str, Any]:
    return {name: value.clone() for name, value in vars(packed).items() if isinstance(value, Tensor)}


def cublas_calls(weight: QuantizedWeight, copies: int, dtype: torch.dtype) -> list[Call]:
    """torch.nn.functional.linear on the unquantised type."""
    w = weight.dequantize().to(dtype)
    return [bind(torch.nn.functional.linear, w) for _ in range(copies)]


def tinygemm_calls(weight: QuantizedWeight, copies: int, dtype: torch.dtype) -> list[Call]:
    """aten::_weight_int4pack_mm, the kernel behind torchao's int4 weight-only TensorCoreTiled layout."""
    if dtype != torch.bfloat16:
        raise Unavailable("bf16 only")
    q = weight.q.to(torch.int32)
    codes = (q[:, ::2] << 4 | q[:, 1::2]).to(torch.uint8)
    packed = torch.ops.aten._convert_weight_to_int4pack(codes, 8)
    scales = weight.scales.T.contiguous()  # its zero is the value of code 8: 0 when symmetric
    table = torch.stack([scales, torch.zeros_like(scales)], -1).contiguous()

    def product(x: Tensor, w: Tensor, t: Tensor) -> Tensor:
        return torch.ops.aten._weight_int4pack_mm(x, w, weight.group, t)

    return [bind(product, packed, table) for _ in range(copies)]


def gemlite_calls(weight: QuantizedWeight, copies: int, dtype: torch.dtype) -> list[Call]:
    """GemLite's A16W4 with its own autotuning."""
    try:
        gemlite_rival.load()
        from gemlite.helper import A16Wn
    except Exception as error:  # not installed, or not for this Triton
        raise Unavailable(f"gemlite does not import ({type(error).__name__}: {error})") from error
    zeros = torch.full_like(weight.scales, 8.0)
    layers = [
        A16Wn(device="cuda:0", dtype=dtype).from_weights(
            weight.q.clone(), weight.scales.reshape(-1, 1).clone(), zeros.reshape(-1, 1).clone(), 4, weight.group
        )
        for _ in range(copies)
    ]
    return [lambda x, layer=layer: layer(x) for layer in layers]


def gptq_words(q: Tensor) -> Tensor:
    """Codes [N, K] as GPTQ stores them: int32 words [K / 8, N], the lowest k in the lowest four bits."""
    n, k = q.shape
    by_eight = q.T.to(torch.int32).reshape(k // 8, 8, n)
    return sum(by_eight[:, i] << (4 * i) for i in range(8)).to(torch.int32).contiguous()


def marlin_calls(weight: QuantizedWeight, copies: int, dtype: torch.dtype) -> list[Call]:
    """SGLang's Marlin (uint4b8, compiled by SGLang at first use)."""
    try:
        from sgl_kernel.scalar_type import scalar_types
        from sglang.kernels.ops.gemm.gptq_marlin import gptq_marlin_gemm
        from sglang.kernels.ops.quantization.gptq_marlin_repack import gptq_marlin_repack
        from sglang.srt.layers.quantization.marlin_utils import marlin_make_workspace, marlin_permute_scales
    except Exception as error:  # whatever keeps SGLang from importing here
        raise Unavailable(f"SGLang's Marlin does not import ({type(error).__name__}: {error})") from error
    n, k = weight.q.shape
    words = gptq_words(weight.q)
    empty = torch.empty(0, dtype=torch.int32, device="cuda")
    packed = gptq_marlin_repack(words, empty, k, n, 4)
    scales = marlin_permute_scales(weight.scales.T.contiguous(), k, n, weight.group)
    workspace = marlin_make_workspace(torch.device("cuda"))

    def product(x: Tensor, w: Tensor, s: Tensor) -> Tensor:
        return gptq_marlin_gemm(
            x, None, w, s, None, None, None, None, workspace, scalar_types.uint4b8, len(x), n, k, use_fp32_reduce=True
        )  # fmt: skip

    return [bind(product, packed, scales) for _ in range(copies)]


PROVIDERS: dict[str, Callable[[QuantizedWeight, int, torch.dtype], list[Call]]] = {
    "cublas": cublas_calls,
    "int4": int4_calls,
    "gemlite": gemlite_calls,
    "tinygemm": tinygemm_calls,
    "marlin": marlin_calls,
}
RIVALS = ("gemlite", "tinygemm", "marlin")


# ---------------------------------------------------------------------------------------------------------------------
# Measuring
# ---------------------------------------------------------------------------------------------------------------------


def bytes_moved(provider: str, n: int, k: int, m: int, group: int) -> int:
    """Fewest bytes: weight once, scales once, x and y once."""
    weight = 2 * n * k if provider == "cublas" else n * k // 2 + 2 * n * k // group
    return weight + 2 * m * (n + k)


def leave_out(
    provider: str, reason: BaseException, skipped: dict[str, str], budget: Budget, cell: str | None = None
) -> None:
    """Notes why a rival is not measured from here on, or in one cell. Anything else that fails ends the run."""
    if provider not in RIVALS:
        raise reason
    name = provider if cell is None or isinstance(reason, OutOfTime) else f"{provider} at {cell}"
    if isinstance(reason, OutOfTime):
        said = f"its {budget.seconds:.0f} s were used up"
    else:
        said = " ".join(
            (str(reason) if isinstance(reason, Unavailable) else f"{type(reason).__name__}: {reason}").split()
        )
    skipped[name] = said[:300]
    print(f"leaving out {name}: {skipped[name]}", flush=True)


def measure_shape(
    model: str, layer: str, args: argparse.Namespace, skipped: dict[str, str], budget: Budget
) -> list[dict[str, Any]]:
    """All providers of one weight at every M, M by M, so that providers share the GPU's temperature and clocks."""
    n, k = SHAPES[model][layer]
    dtype = getattr(torch, args.dtype)
    torch.manual_seed(0)
    weight = quantize(torch.randn(n, k, device="cuda") / math.sqrt(k), args.group, scale_dtype=dtype)
    l2 = torch.cuda.get_device_properties(0).L2_cache_size
    xs = {m: torch.randn(m, k, device="cuda").to(dtype) for m in args.m}
    calls: dict[str, list[Call]] = {}
    for provider in args.providers:
        if provider in skipped:
            continue
        copies = max(2, min(64, -(-3 * l2 // bytes_moved(provider, n, k, 0, args.group))))
        try:
            with budget.of(provider):
                calls[provider] = PROVIDERS[provider](weight, copies, dtype)
                if provider == "gemlite":
                    gemlite_rival.compile_ahead(
                        calls[provider][0], [x for m, x in xs.items() if m <= args.rivals_up_to]
                    )
        except (Exception, OutOfTime) as reason:
            leave_out(provider, reason, skipped, budget)
    reference = weight.dequantize()
    rows = []
    for m, x in xs.items():
        exact = x.float() @ reference.T
        for provider, functions in calls.items():
            if provider in skipped or (provider in RIVALS and m > args.rivals_up_to):
                continue
            try:
                with budget.of(provider):
                    error = ((functions[0](x).float() - exact).norm() / exact.norm()).item()
                    if not error < MOST_ERROR:
                        raise Unavailable(f"its product is {error:.2g} off")
                    times = gemm.graph_us([partial(f, x) for f in functions], args.repeats, args.replays)
            except (Exception, OutOfTime) as reason:
                leave_out(provider, reason, skipped, budget, f"{n}x{k}, M={m}")
                continue
            times = [round(us, 3) for us in times]
            median = statistics.median(times)
            row = {
                "model": model, "layer": layer, "n": n, "k": k, "m": m, "group": args.group, "dtype": args.dtype,
                "provider": provider, "copies": len(functions), "us": median, "us_all": times,
                "tb_per_s": bytes_moved(provider, n, k, m, args.group) / median / 1e6, "relative_error": error,
            }  # fmt: skip
            if provider == "int4":
                row["tile"] = asdict(tile_tables.choose(m, n, k, args.group, *gemm._device(x.device)))
            rows.append(row)
        print_row([row for row in rows if row["m"] == m])
    return rows


def print_row(rows: list[dict[str, Any]]) -> None:
    """One line of the table."""
    us = {row["provider"]: row["us"] for row in rows}
    first = rows[0]
    cells = "  ".join(f"{name} {value:7.2f}" for name, value in us.items())
    ratio = f"{us['cublas'] / us['int4']:.2f}x" if {"cublas", "int4"} <= us.keys() else ""
    print(f"{first['model']:>3} {first['layer']:<8} M={first['m']:<5} {cells}  {ratio}", flush=True)


def geometric_mean(values: list[float]) -> float:
    """exp of the mean of logs."""
    return math.exp(sum(map(math.log, values)) / len(values))


def layer_ratios(rows: list[dict[str, Any]], m: int, model: str = "8b") -> dict[str, float]:
    """cuBLAS time over ours, by layer."""
    us = {(row["layer"], row["provider"]): row["us"] for row in rows if row["m"] == m and row["model"] == model}
    return {layer: us[layer, "cublas"] / us[layer, "int4"] for layer in SHAPES[model]}


def ratios(rows: list[dict[str, Any]], m: int, model: str = "8b") -> tuple[float, float, float] | None:
    """cuBLAS time over ours, geometric mean over the model's shapes: of medians, and the extremes over repeats."""
    cell = {(row["layer"], row["provider"]): row for row in rows if row["m"] == m and row["model"] == model}
    layers = SHAPES[model]
    if any((layer, provider) not in cell for layer in layers for provider in ("cublas", "int4")):
        return None
    pairs = [(cell[layer, "cublas"], cell[layer, "int4"]) for layer in layers]
    by_repeat = [
        geometric_mean([a["us_all"][i] / b["us_all"][i] for a, b in pairs]) for i in range(len(pairs[0][0]["us_all"]))
    ]
    return geometric_mean([a["us"] / b["us"] for a, b in pairs]), min(by_repeat), max(by_repeat)


def rival_ratio(rows: list[dict[str, Any]]) -> tuple[float, float, float, dict[str, int], int] | None:
    """Time of the fastest rival over ours at M <= 16, geometric mean, lowest and highest cell; each rival's cells, and
    how many there are of ours. A cell without any rival is left out."""
    cells: dict[tuple[str, str, int], dict[str, float]] = {}
    for row in rows:
        if row["m"] <= 16 and row["model"] == "8b":
            cells.setdefault((row["model"], row["layer"], row["m"]), {})[row["provider"]] = row["us"]
    found, seen = [], dict.fromkeys(RIVALS, 0)
    ours = [us for us in cells.values() if "int4" in us]
    for us in ours:
        rivals = {name: us[name] for name in RIVALS if name in us}
        for name in rivals:
            seen[name] += 1
        if rivals:
            found.append(min(rivals.values()) / us["int4"])
    return (geometric_mean(found), min(found), max(found), seen, len(ours)) if found else None


def rivals_said(record: dict[str, Any]) -> str:
    """Which rivals a record's figure is against, and which are missing or incomplete, with the reason."""
    found = rival_ratio(record["rows"])
    if found is None:
        return ""
    _, _, _, seen, cells = found
    said = [name for name, count in seen.items() if count == cells]
    reasons = record.get("skipped", {})
    for name, count in seen.items():
        if count < cells:
            why = next((said for at, said in reasons.items() if at.split(" at ")[0] == name), "not asked for")
            said.append(f"{name} in {count} of {cells} cells ({why})" if count else f"without {name} ({why})")
    return ", ".join(said)


# ---------------------------------------------------------------------------------------------------------------------
# DRAM bytes
# ---------------------------------------------------------------------------------------------------------------------


def dram_bytes(provider: str, layer: str, m: int) -> int:
    """Bytes read from DRAM by one product, by ncu in a process of its own (caches flushed before each kernel)."""
    command = [
        "ncu", "--clock-control", "none", "--metrics", "dram__bytes_read.sum", "--csv", "--print-units", "base",
        "--profile-from-start", "off", sys.executable, __file__, "--profile-one", provider, layer, str(m),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith('"')]
    if not lines:
        raise RuntimeError(f"ncu gave nothing: {done.stdout[-400:]} {done.stderr[-400:]}")
    table = csv.DictReader(io.StringIO("\n".join(lines)))
    return sum(int(float(row["Metric Value"].replace(",", ""))) for row in table if row["Metric Value"])


def profile_one(provider: str, layer: str, m: int) -> None:
    """The process that ncu looks at: one product between cudaProfilerStart and Stop."""
    n, k = SHAPES["8b"][layer]
    weight = quantize(torch.randn(n, k, device="cuda") / math.sqrt(k), GROUP)
    call = PROVIDERS[provider](weight, 1, torch.bfloat16)[0]
    x = torch.randn(m, k, device="cuda").to(torch.bfloat16)
    call(x)
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaProfilerStart()
    call(x)
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaProfilerStop()


# ---------------------------------------------------------------------------------------------------------------------
# Records
# ---------------------------------------------------------------------------------------------------------------------


def environment() -> dict[str, Any]:
    """What the figures depend on besides the code."""
    import triton

    properties = torch.cuda.get_device_properties(0)
    return {
        "gpu": properties.name, "sms": properties.multi_processor_count, "l2_bytes": properties.L2_cache_size,
        "torch": torch.__version__, "triton": triton.__version__, "cuda": torch.version.cuda,
        "date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
    }  # fmt: skip


def write_headlines(record: dict[str, Any], path: Path) -> None:
    """The figures that the INT4 issue names, from a record."""
    from sdsie_sglang.eval import headline  # needs pydantic; measuring does not

    where = f"one {record['environment']['gpu'].removeprefix('NVIDIA ')}"
    common = {
        "where": where,
        "record": str(path.relative_to(ROOT) if path.is_relative_to(ROOT) else path),
        "command": record.get("command", "python scripts/bench_int4_gemm.py --headline --dram"),
        "date": record["environment"]["date"][:10],
    }
    required = {1: 2.5, 6: 2.2, 8: 2.2, 16: 1.8, 256: 0.75, 2048: 0.75}
    entries = []
    for m, least in required.items():
        found = ratios(record["rows"], m)
        if found:
            value, low, high = (round(v, 3) for v in found)
            note = f"cuBLAS bf16 time over ours, geometric mean of Llama-8B's four linear shapes, group {GROUP}"
            if value < least:
                note += f"; below the required {least}: " + ", ".join(
                    f"{layer} {ratio:.2f}" for layer, ratio in layer_ratios(record["rows"], m).items()
                )
            entries.append({"name": f"int4_over_bf16_m{m}", "value": value, "low": low, "high": high, "unit": "1",
                            "note": note, **common})  # fmt: skip
    rival = rival_ratio(record["rows"])
    if rival:
        value, low, high = (round(v, 3) for v in rival[:3])
        note = (
            f"fastest of {rivals_said(record)}; its time over ours, geometric mean over M <= 16 and Llama-8B's shapes"
        )
        if value < BEST_RIVAL_REQUIRED:
            note += f"; below the required {BEST_RIVAL_REQUIRED}"
        entries.append({"name": "int4_over_best_rival_m_le_16", "value": value, "low": low, "high": high, "unit": "1",
                        "note": note + "; low and high are single cells", **common})  # fmt: skip
    if record.get("dram"):
        changes = [cell["int4"] / cell["cublas"] - 1 for cell in record["dram"]]
        entries.append({"name": "int4_dram_read_change", "value": round(statistics.mean(changes), 4),
                        "low": round(min(changes), 4), "high": round(max(changes), 4), "unit": "1",
                        "note": "dram__bytes_read.sum by ncu against cuBLAS bf16: "
                        + ", ".join(f"{cell['layer']} at M={cell['m']}" for cell in record["dram"]),
                        **common})  # fmt: skip
    if record.get("note"):
        entries = [entry | {"note": entry["note"] + "; see the record's note"} for entry in entries]
    headline.update([headline.Figure(**entry) for entry in entries])


def dumps(record: dict[str, Any]) -> str:
    """JSON with one measured row a line."""
    tables = {name: record[name] for name in ("tuning", "rows") if name in record}
    text = json.dumps({key: value for key, value in record.items() if key not in tables}, indent=1)
    for name, table in tables.items():
        rows = ",\n  ".join(json.dumps(row) for row in table)
        text = f'{text[:-2]},\n "{name}": [\n  {rows}\n ]\n}}'
    return text + "\n"


def plot(record: dict[str, Any], path: Path) -> None:
    """Speed-up over cuBLAS bf16 by M, one panel a shape of the 8B model."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    layers = [layer for layer in SHAPES["8b"] if any(row["layer"] == layer for row in record["rows"])]
    figure, axes = plt.subplots(1, len(layers), figsize=(4 * len(layers), 3.4), sharey=True, squeeze=False)
    for axis, layer in zip(axes[0], layers, strict=True):
        cells = {(row["provider"], row["m"]): row["us"] for row in record["rows"]
                 if row["layer"] == layer and row["model"] == "8b"}  # fmt: skip
        for provider in [name for name in PROVIDERS if name != "cublas"]:
            points = [(m, cells["cublas", m] / us) for (name, m), us in sorted(cells.items(), key=lambda c: c[0][1])
                      if name == provider and ("cublas", m) in cells]  # fmt: skip
            if points:
                axis.plot(*zip(*points, strict=True), marker="o", label=provider)
        axis.axhline(1, color="grey", linewidth=1)
        axis.set_xscale("log", base=2)
        axis.set_title("{} ({} x {})".format(layer, *SHAPES["8b"][layer]))
        axis.set_xlabel("M")
    axes[0][0].set_ylabel("times cuBLAS bf16")
    axes[0][0].legend()
    figure.suptitle(f"INT4 group {GROUP} GEMM, {record['environment']['gpu']}, weights from DRAM, CUDA-graph replays")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--m", nargs="+", type=int, default=list(MS))
    parser.add_argument("--group", type=int, default=GROUP, choices=(32, 64, 128))
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16"))
    parser.add_argument("--providers", nargs="+", choices=list(PROVIDERS), default=list(PROVIDERS))
    parser.add_argument("--rivals-up-to", type=int, default=2048, help="largest M at which rivals are timed")
    parser.add_argument("--rival-seconds", type=float, default=150.0, help="that each rival may take in all")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--replays", type=int, default=3)
    parser.add_argument("--tune", action="store_true", help="measure tiles for the M first and keep them on disk")
    parser.add_argument("--overlap", action="store_true", help="programmatic dependent launch (not the default)")
    parser.add_argument("--dram", action="store_true", help="also read DRAM bytes with ncu")
    parser.add_argument("--headline", action="store_true", help="update eval/results/headline.json")
    parser.add_argument("--out", type=Path, help="record (default eval/results/int4_gemm/<gpu>.json)")
    parser.add_argument("--plot", type=Path, help="also draw this file")
    parser.add_argument("--from-record", type=Path, help="no measuring: headline and plot from this record")
    parser.add_argument("--profile-one", nargs=3, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def main() -> None:
    """Measure, print, record."""
    args = parse()
    if args.profile_one:
        provider, layer, m = args.profile_one
        profile_one(provider, layer, int(m))
        return
    if args.from_record:
        path = args.from_record.resolve()
        record = json.loads(path.read_text())
    else:
        if not torch.cuda.is_available():
            raise SystemExit("bench_int4_gemm.py measures on an NVIDIA GPU, and there is none here")
        record, path = measure(args)
    for m in sorted({row["m"] for row in record["rows"]}):
        for model in SHAPES:
            found = ratios(record["rows"], m, model)
            if found:
                print(f"{model} M={m}: {found[0]:.2f} times cuBLAS bf16 ({found[1]:.2f} to {found[2]:.2f})")
    rival = rival_ratio(record["rows"])
    if rival:
        print(f"fastest of {rivals_said(record)}; M <= 16: {rival[0]:.2f} ({rival[1]:.2f} to {rival[2]:.2f})")
    if args.headline:
        write_headlines(record, path)
    if args.plot:
        plot(record, args.plot)


def tune(n: int, k: int, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Tile for every bucket of --m, kept on disk; median microseconds of every candidate, None where it doesn't run."""
    measured: list[tuple[int, tile_tables.Tile, float]] = []
    buckets = tile_tables.buckets_to_tune(*args.m)
    started = time.monotonic()
    chosen = tune_shape(n, k, args.group, getattr(torch, args.dtype), buckets, measured=measured)
    print(f"{n} x {k}: {len(measured)} tiles in {time.monotonic() - started:.0f} s")
    for key, tile in chosen.items():
        print(f"  {key}: {tile}", flush=True)
    return [
        {"n": n, "k": k, "m": m, **asdict(tile), "us": round(us, 3) if math.isfinite(us) else None}
        for m, tile, us in measured
    ]


def measure(args: argparse.Namespace) -> tuple[dict[str, Any], Path]:
    """Run everything asked for and write the record."""
    env = environment()
    gemm.prepare(torch.device("cuda", 0))
    gemm.overlap_launches = args.overlap
    tuning: list[dict[str, Any]] = []
    if args.tune:
        for model in args.shapes:
            for n, k in SHAPES[model].values():
                tuning += tune(n, k, args)
    skipped: dict[str, str] = {}
    budget = Budget(args.rival_seconds)
    rows = []
    for model in args.shapes:
        for layer in SHAPES[model]:
            rows += measure_shape(model, layer, args, skipped, budget)
    record: dict[str, Any] = {
        "environment": env,
        "arguments": {key: value for key, value in vars(args).items() if not isinstance(value, Path)},
        "command": this_command(),
        "skipped": skipped,
        "rival_seconds_used": {name: round(seconds, 1) for name, seconds in budget.used.items()},
        "gemlite": gemlite_rival.chosen(),
        "rows": rows,
    }
    if args.tune:
        record["tuning"] = tuning
    if args.dram:
        record["dram"] = []
        for layer, m in (("down", 1), ("gate_up", 6)):
            cell = {"layer": layer, "m": m} | {p: dram_bytes(p, layer, m) for p in ("cublas", "int4")}
            print(f"DRAM bytes read, {layer}, M={m}: {cell['cublas']:,} -> {cell['int4']:,}"
                  f" ({cell['int4'] / cell['cublas'] - 1:+.1%})", flush=True)  # fmt: skip
            record["dram"].append(cell)
    path = args.out or RECORDS / f"{env['gpu'].removeprefix('NVIDIA ').replace(' ', '_')}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(dumps(record))
    print(f"record: {path}")
    return record, path.resolve()


if __name__ == "__main__":
    main()
