"""Time of the entropy kernel on a GPU: 1 and 16 rows of a 128k vocabulary, bf16, chosen by index as the worker does.

    python scripts/bench_entropy.py OUT.json [--headline]

CUDA-graph replays over logits that rotate past the L2; each reading is the mean of one replay, the figure is
the median over replays. One call by itself, launch included, is timed beside it with CUDA events.
"""

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

import torch

from sdsie_sglang.eval import headline, machine
from sdsie_sglang.kernels.entropy import entropy_bits

VOCAB = 128256
DRAFTED = 6  # rows a request in the verified logits
L2_BYTES = 60 << 20
REPLAYS = 40
REQUIRED_US = {1: 20.0, 16: 60.0}


def time_us(batch: int) -> dict[str, Any]:
    """Readings in microseconds a call for `batch` accepted rows."""
    copies = max(2, 4 * L2_BYTES // (batch * DRAFTED * VOCAB * 2) + 1)
    logits = [torch.randn(batch * DRAFTED, VOCAB, device="cuda", dtype=torch.bfloat16) for _ in range(min(copies, 200))]
    rows = torch.arange(batch, device="cuda") * DRAFTED + 2
    for each in logits[:3]:
        entropy_bits(each, rows)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for each in logits:
            entropy_bits(each, rows)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    replayed, single = [], []
    for _ in range(REPLAYS):
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        replayed.append(start.elapsed_time(end) * 1e3 / len(logits))
    for i in range(REPLAYS):
        torch.cuda.synchronize()
        start.record()
        entropy_bits(logits[i % len(logits)], rows)
        end.record()
        end.synchronize()
        single.append(start.elapsed_time(end) * 1e3)
    return {"copies": len(logits), "replayed_us": replayed, "single_us": single}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--headline", action="store_true", help="record the figures as quoted ones")
    args = parser.parse_args()
    if args.out.exists():
        record = json.loads(args.out.read_text())
    else:
        record = {
            "machine": machine.describe(),
            "command": headline.this_command(),
            "date": headline.today(),
            "rows": {str(batch): time_us(batch) for batch in REQUIRED_US},
        }
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(record, indent=1) + "\n")
    figures = []
    for batch, row in record["rows"].items():
        times = sorted(row["replayed_us"])
        value, required = statistics.median(times), REQUIRED_US[int(batch)]
        single = statistics.median(row["single_us"])
        spread = f"({times[0]:.1f} to {times[-1]:.1f})"
        print(f"{batch:>2s} rows: {value:.1f} us {spread}, one call with its launches {single:.1f} us")
        verdict = "reached" if value <= required else f"misses by {value - required:.1f}"
        figures.append(
            headline.Figure(
                name=f"entropy_kernel_us_bs{batch}", value=value, low=times[0], high=times[-1], unit="us",
                where=machine.where(record["machine"]), record=str(args.out), command=record["command"],
                date=record["date"], note=f"required at most {required:.0f}: {verdict}",
            )
        )  # fmt: skip
    if args.headline:
        headline.update(figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
