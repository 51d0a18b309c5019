"""Where a decode cycle's time goes on a GPU: kernels by stage and kind, launches, and the time in which nothing runs.

    python scripts/profile_cycle.py OUT.json [--target DIR --draft DIR] [--variants plain k5 standalone]

The servers are those of `bench_gears.py`, one busy at a time; each is traced by SGLang's own torch profiler,
GPU activity only, so that the host is hardly slowed. A cycle lasts from one start of the target's graph to the
next. If OUT.json is there it is only printed.
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

from bench_gears import SHAPES, VARIANTS, server_plans, start_all, write_shape

from sdsie_sglang.eval import headline, machine
from sdsie_sglang.eval.server import Server

CYCLES = 12
KINDS = {
    "gemm": r"nvjet|gemm|gemv|cutlass|splitk|int4|fragment",
    "attention": r"flash|fmha|attn|attention|mha",
    "norm": r"norm",
    "rope and KV write": r"rope|rotary|set_kv|store_cache|kv_cache|copy_kv",
    "activation": r"silu|act_and_mul",
    "argmax, sampling, entropy": r"argmax|topk|softmax|sample|entropy|arg_max|verify_tree|reduce",
    "copies": r"memcpy|memset|copy|fill",
}
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
    largest = max(graph.busy_us for graph in graphs)
    targets = [graph for graph in graphs if graph.busy_us > 0.7 * largest]
    edges = [graph.start for graph in targets]
    if len(edges) < 4:
        raise ValueError(f"only {len(edges)} cycles in the trace")
    edges = edges[1:]  # the first may be cut
    cycles = len(edges) - 1
    inside = [launch for launch in launches if edges[0] <= launch.start < edges[-1]]
    stages: dict[str, dict[str, Any]] = {}
    for launch in inside:
        count = len(launch.kernels)
        name = "loose kernels" if count <= GRAPH_KERNELS else f"graph of {count} kernels"
        if launch in targets:
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
    }  # fmt: skip


def trace(server: Server, batch: int, folder: Path) -> list[dict[str, Any]]:
    """Chrome-trace events of some steady cycles."""
    prompts = [[(7 * i + 31 * j) % 1000 + 10 for j in range(64)] for i in range(batch)]
    body = {"input_ids": prompts, "sampling_params": {"temperature": 0.0, "max_new_tokens": 600, "ignore_eos": True}}
    burst = threading.Thread(target=lambda: server.post("/generate", body))
    server.post("/generate", {**body, "sampling_params": {**body["sampling_params"], "max_new_tokens": 60}})  # type: ignore[dict-item]
    burst.start()
    time.sleep(0.4)
    options = {"output_dir": str(folder), "num_steps": CYCLES, "activities": ["GPU"], "with_stack": False}
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


def measure(args: argparse.Namespace) -> dict[str, Any]:
    scratch = Path(tempfile.mkdtemp(prefix="sdsie-profile-"))
    target = args.target or write_shape(scratch / "target", "8b")
    draft = args.draft or write_shape(scratch / "draft", "1b")
    plans = server_plans(args, target, draft)
    record: dict[str, Any] = {
        "machine": machine.describe(),
        "command": headline.this_command(),
        "date": headline.today(),
        "shapes": SHAPES if args.target is None else [str(target), str(draft)],
        "profiles": {},
    }
    needed = {VARIANTS[name][0] for name in args.variants}
    with start_all({name: plan for name, plan in plans.items() if name in needed}, scratch) as servers:
        for name in args.variants:
            server_name, policy = VARIANTS[name]
            if policy is not None:
                servers[server_name].set_policy(**policy)
            for batch in args.batch:
                folder = Path(tempfile.mkdtemp(dir=scratch))
                record["profiles"][f"{name}, batch {batch}"] = summarise(trace(servers[server_name], batch, folder))
                print(f"{name}, batch {batch}: traced", flush=True)
    return record


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
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--target", type=Path)
    parser.add_argument("--draft", type=Path)
    parser.add_argument("--batch", type=int, nargs="+", default=[1])
    parser.add_argument("--variants", nargs="+", default=["plain", "gear0", "standalone", "k5"], choices=list(VARIANTS))
    parser.add_argument("--sglang", nargs=argparse.REMAINDER, default=[], help="further flags for every server")
    parser.set_defaults(demo=False)
    args = parser.parse_args()
    if args.out.exists():
        record = json.loads(args.out.read_text())
    else:
        record = measure(args)
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(record, indent=1) + "\n")
    print(table(record))
    return 0


if __name__ == "__main__":
    sys.exit(main())
