"""Where a decode cycle's time goes on a GPU: kernels by stage and kind, launches, and the time in which nothing runs.

    python scripts/profile_cycle.py RECORD.json     prints, as Markdown, what bench_gears.py --profile traced

Traced by SGLang's own torch profiler, GPU activity only, so that the host is hardly slowed. A cycle lasts from one
start of a graph to its next.
"""

import argparse
import gzip
import json
import re
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from sdsie_sglang.eval import machine
from sdsie_sglang.eval.server import Server

CYCLES = 12
KINDS = {
    "attention": r"flash::|fmha|attn|attention|mha",  # before cutlass, which FlashAttention 3 is made of
    "gemm": r"nvjet|gemm|gemv|cutlass|splitk|int4|fragment|skinny|add_norm_kernel|normed_kernel",
    "norm": r"norm",
    "rope and KV write": r"rope|rotary|set_kv|store_cache|kv_cache|copy_kv",
    "activation": r"silu|act_and_mul",
    "argmax, sampling, entropy": r"argmax|topk|softmax|sample|entropy|arg_max|verify_tree|reduce",
    "copies": r"memcpy|memset|copy|fill",
}
MOST_GAPS = 12
GRAPH_KERNELS = 40  # a launch with more kernels than this is a model's graph


@dataclass
class Launch:
    """One call of the host and the kernels that it started. Times in microseconds of the trace's clock."""

    start: float = float("inf")
    end: float = 0.0
    busy_us: float = 0.0
    kernels: list[tuple[str, float]] = field(default_factory=list)

    def add(self, name: str, start: float, duration_us: float) -> None:
        self.start, self.end = min(self.start, start), max(self.end, start + duration_us)
        self.busy_us += duration_us
        self.kernels.append((name, duration_us))


def kind_of(kernel: str) -> str:
    return next((kind for kind, pattern in KINDS.items() if re.search(pattern, kernel, re.IGNORECASE)), "other")


def launches_of(events: Sequence[dict[str, Any]]) -> list[Launch]:
    """GPU events grouped by the host call that caused them, in order of their start."""
    groups: dict[int, Launch] = defaultdict(Launch)
    for event in events:
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            groups[event["args"]["correlation"]].add(event["name"], event["ts"], event["dur"])
    return sorted(groups.values(), key=lambda launch: launch.start)


def covered_us(spans: Sequence[tuple[float, float]]) -> float:
    """Length of the union of spans."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def summarise(events: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Means over whole cycles.

    Returns:
        period_us, idle_us (no kernel runs), host_calls (by name), stages in order of appearance: a graph each and
        "loose kernels", with launches, kernels, busy_us, span_us and busy_us by kind.
    """
    launches = launches_of(events)
    graphs = [launch for launch in launches if len(launch.kernels) > GRAPH_KERNELS]
    if not graphs:
        raise ValueError("no graph in the trace")
    # Each graph runs once a cycle, so any of them marks it. The target's kernels last longest: its matrices are larger.
    edges = [graph.start for graph in graphs if len(graph.kernels) == len(graphs[0].kernels)]
    largest = max(graphs, key=lambda graph: graph.busy_us / len(graph.kernels))
    if len(edges) < 4:
        raise ValueError(f"only {len(edges)} cycles in the trace")
    edges = edges[1:]  # the first may be cut
    cycles = len(edges) - 1
    inside = [launch for launch in launches if edges[0] <= launch.start < edges[-1]]
    stages: dict[str, dict[str, Any]] = {}
    for launch in inside:
        count = len(launch.kernels)
        name = "loose kernels" if count <= GRAPH_KERNELS else f"graph of {count} kernels"
        if count == len(largest.kernels):
            name = f"target, {name}"
        stage = stages.setdefault(name, {"launches": 0.0, "kernels": 0.0, "busy_us": 0.0, "span_us": 0.0, "kinds": {}})
        stage["launches"] += 1 / cycles
        stage["kernels"] += count / cycles
        stage["busy_us"] += launch.busy_us / cycles
        stage["span_us"] += (launch.end - launch.start) / cycles
        for kernel, duration_us in launch.kernels:
            kind = kind_of(kernel)
            if name == "loose kernels":
                kind = kernel[:60]
            times, us = stage["kinds"].get(kind, (0.0, 0.0))
            stage["kinds"][kind] = (times + 1 / cycles, us + duration_us / cycles)
    gpu = [(e["ts"], e["ts"] + e["dur"]) for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    spans = [(max(start, edges[0]), min(end, edges[-1])) for start, end in gpu if end > edges[0] and start < edges[-1]]
    host = [e for e in events if e.get("cat") == "cuda_runtime" and edges[0] <= e["ts"] < edges[-1]]
    waits = [e for e in host if "ynchronize" in e["name"]]
    period_us = (edges[-1] - edges[0]) / cycles
    return {
        "cycles": cycles,
        "period_us": period_us,
        "idle_us": period_us - covered_us(spans) / cycles,
        "period_spread_us": [min(b - a for a, b in pairwise(edges)), max(b - a for a, b in pairwise(edges))],
        "host_calls": {name: n / cycles for name, n in Counter(e["name"] for e in host).most_common()},
        "host_waits_us": sum(e["dur"] for e in waits) / cycles,
        "host_in_calls_us": sum(e["dur"] for e in host if e not in waits) / cycles,
        "stages": stages,
        "gaps": gaps(launches, edges[0], edges[-1], cycles),
    }  # fmt: skip


def gaps(launches: Sequence[Launch], first: float, last: float, cycles: int) -> list[dict[str, Any]]:
    """Where nothing runs for longest: between which kernels, how often a cycle, and for how long a cycle in all."""
    found: dict[tuple[str, str], tuple[float, float]] = defaultdict(lambda: (0.0, 0.0))
    reached, before = first, ""
    for launch in launches:
        if first <= launch.start < last and before and launch.start > reached:
            times, us = found[before, launch.kernels[0][0][:40]]
            found[before, launch.kernels[0][0][:40]] = (times + 1 / cycles, us + (launch.start - reached) / cycles)
        if launch.end > reached:
            reached, before = launch.end, launch.kernels[-1][0][:40]
    longest = sorted(found.items(), key=lambda item: -item[1][1])[:MOST_GAPS]
    return [{"after": a, "before": b, "times": times, "us": us} for (a, b), (times, us) in longest]


def timeline(events: Sequence[dict[str, Any]]) -> list[dict[str, float]]:
    """Every graph of a trace in order: its kernels, when it starts and ends, and how long nothing ran since the graph
    before it. For cycles that are not alike, as where gears change."""
    launches = launches_of(events)
    rows: list[dict[str, float]] = []
    reached = idle = 0.0
    for launch in launches:
        if reached:
            idle += max(0.0, launch.start - reached)
        if len(launch.kernels) > GRAPH_KERNELS:
            start = launch.start - launches[0].start
            rows.append(
                {"kernels": len(launch.kernels), "start_us": round(start, 1),
                 "end_us": round(start + launch.end - launch.start, 1), "idle_us": round(idle, 1)}
            )  # fmt: skip
            idle = 0.0
        reached = max(reached, launch.end)
    return rows


def trace(server: Server, batch: int, cycles: int = CYCLES) -> list[dict[str, Any]]:
    """Chrome-trace events of some cycles in the middle of an answer."""
    folder = Path(tempfile.mkdtemp(prefix="sdsie-profile-"))
    prompts = [[(7 * i + 31 * j) % 1000 + 10 for j in range(64)] for i in range(batch)]
    body = {"input_ids": prompts, "sampling_params": {"temperature": 0.0, "max_new_tokens": 600, "ignore_eos": True}}
    burst = threading.Thread(target=lambda: server.post("/generate", body))
    server.post("/generate", {**body, "sampling_params": {**body["sampling_params"], "max_new_tokens": 60}})  # type: ignore[dict-item]
    burst.start()
    time.sleep(0.4)
    options = {"output_dir": str(folder), "num_steps": cycles, "activities": ["GPU"], "with_stack": False}
    server.post("/start_profile", options).raise_for_status()
    burst.join()
    deadline = time.monotonic() + 60
    while not (files := sorted(folder.glob("**/*.json*"))):
        if time.monotonic() > deadline:
            raise TimeoutError("SGLang wrote no trace")
        time.sleep(0.5)
    time.sleep(1.0)
    file = files[-1]
    raw = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
    return json.loads(raw)["traceEvents"]


def table(record: dict[str, Any]) -> str:
    """Markdown: one block a variant."""
    lines = [f"{machine.where(record['machine'])}; {record['date']}; `{record['command']}`"]
    for name, profile in record["profiles"].items():
        low, high = profile["period_spread_us"]
        calls = sum(profile["host_calls"].values())
        lines += [
            "",
            f"### {name}",
            "",
            f"{profile['period_us']:.0f} us a cycle ({low:.0f} to {high:.0f}, {profile['cycles']} cycles), of which "
            f"nothing runs on the GPU for {profile['idle_us']:.0f} us. Host: {calls:.0f} CUDA calls, "
            f"{profile['host_in_calls_us']:.0f} us in them and {profile['host_waits_us']:.0f} us waiting.",
            "",
            "| stage | launches | kernels | busy us | span us | busy by kind, us (kernels) |",
            "|---|---|---|---|---|---|",
        ]
        for stage, row in profile["stages"].items():
            kinds = sorted(row["kinds"].items(), key=lambda item: -item[1][1])[:9]
            text = ", ".join(f"{kind} {us:.0f} ({times:.0f})" for kind, (times, us) in kinds)
            numbers = f"{row['launches']:.1f} | {row['kernels']:.0f} | {row['busy_us']:.0f} | {row['span_us']:.0f}"
            lines.append(f"| {stage} | {numbers} | {text} |")
        if longest := profile.get("gaps"):
            told = (f"{g['us']:.0f} ({g['times']:.1f}) {g['after']} → {g['before']}" for g in longest)
            lines += ["", "Nothing runs, us a cycle (times): " + "; ".join(told)]
    for name, rows in record.get("timelines", {}).items():
        lines += [
            "",
            f"### {name}, graph by graph",
            "",
            "| kernels | start, us | lasts | idle before |",
            "|---|---|---|---|",
        ]
        for row in rows:
            lasts = row["end_us"] - row["start_us"]
            lines.append(f"| {row['kernels']} | {row['start_us']:.0f} | {lasts:.0f} | {row['idle_us']:.0f} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("record", type=Path)
    args = parser.parse_args()
    record = json.loads(args.record.read_text())
    if "profiles" not in record:
        print(f"{args.record} holds no profiles: measure with bench_gears.py --profile", file=sys.stderr)
        return 2
    print(table(record))
    return 0


if __name__ == "__main__":
    sys.exit(main())
