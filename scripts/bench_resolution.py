"""The Resolution Gear on one GPU: INT4 layers in a plain decode against bf16, batch 1, 8B Llama shape.

    python scripts/bench_resolution.py OUT.json [--headline]

Random weights: timing and energy only, no text (fidelity: python -m sdsie_sglang.eval.resolution_fidelity). Three
servers side by side, one of them busy at a time, repeats interleaved: SGLang as shipped; down_proj in both precisions
in every layer; every linear layer in both. Policy `fixed` is always INT4, `plain` is gear 0 of the same server, a
schedule switches graphs every 8 cycles. bf16 is the faster of SGLang as shipped and gear 0, so that nothing but
INT4 counts for it. If OUT.json is there it is only summarised.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench_gears import ratio, run_once, start_all, write_shape
from bench_int4_model import Rows, common_flags, need_gpu

from sdsie_sglang.eval import headline, machine
from sdsie_sglang.eval.energy import MIN_WINDOW_S, Gpu, NoEnergy, Recorder, window_energy_j
from sdsie_sglang.eval.server import Server

FIGURE = "gated_all_layers_over_bf16"
REQUIRED = 1.0
SPECS = {
    "down_proj": "mlp.down_proj@all",
    "all linear": "self_attn.qkv_proj@all;self_attn.o_proj@all;mlp.gate_up_proj@all;mlp.down_proj@all",
}
POLICIES: dict[str, dict[str, Any]] = {
    "INT4": {"policy": "fixed"},
    "gear 0": {"policy": "plain"},
    "switching": {"policy": "schedule", "schedule": "5x8,0x8"},
}
PLAIN = "plain"


def variants() -> dict[str, tuple[str, dict[str, Any] | None]]:
    """Name -> server and policy."""
    gated = {f"{server}, {name}": (server, policy) for server in SPECS for name, policy in POLICIES.items()}
    return {PLAIN: (PLAIN, None), **gated}


def put_in_force(server: Server, policy: dict[str, Any] | None) -> None:
    """SGLang as shipped has no policy."""
    if policy is not None:
        server.set_policy(**policy)


def energies(servers: Mapping[str, Server], prompts: list[list[int]], args: argparse.Namespace) -> dict[str, Any]:
    """J a token of each variant over a window of its own; empty, with the reason, where it cannot be read."""
    found: dict[str, Any] = {}
    try:
        gpu = Gpu()
        for name, (server_name, policy) in variants().items():
            put_in_force(servers[server_name], policy)
            run_once(servers[server_name], 1, args.tokens, prompts)
            with Recorder(gpu) as recorder:
                start_s, tokens = time.perf_counter(), 0.0
                while (end_s := time.perf_counter()) < start_s + args.energy_s:
                    tokens += run_once(servers[server_name], 1, args.tokens, prompts)["tokens"]
            joules = window_energy_j(recorder.readings, start_s, end_s)
            found[name] = {
                "joules": joules,
                "tokens": tokens,
                "j_per_token": joules / tokens,
                "window_s": end_s - start_s,
            }
    except (NoEnergy, ImportError) as error:
        found["missing"] = str(error)
    return found


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Starts the servers, runs the interleaved repeats and returns the raw record."""
    scratch = Path(tempfile.mkdtemp(prefix="sdsie-shapes-"))
    common = common_flags(write_shape(scratch / "target", "8b"), args)
    plans: dict[str, tuple[list[str], dict[str, str]]] = {PLAIN: ([*common, "--sdsie-off"], {})}
    for name, spec in SPECS.items():
        gated = ["--sdsie-resolution-layers", spec, "--sdsie-int4-calibration", args.calibration]
        plans[name] = ([*common, *gated], {})
    prompts = [[(31 * j) % 1000 + 10 for j in range(64)]]
    rows: Rows = {name: [] for name in variants()}
    shares: dict[str, float] = {}
    logs = Path(os.environ.get("SDSIE_LOGS", scratch))
    with start_all(plans, logs) as servers:
        for repeat in range(-1, args.repeats):  # the first warms up
            for name, (server_name, policy) in variants().items():
                server = servers[server_name]
                put_in_force(server, policy)
                run_once(server, 1, 1, prompts)  # it may have slept
                row = run_once(server, 1, args.tokens, prompts)
                if repeat >= 0:
                    rows[name].append(row)
        for name, (server_name, policy) in variants().items():
            put_in_force(servers[server_name], policy)
            shares[name] = int4_share(servers[server_name], prompts[0], args.tokens)
        joules = energies(servers, prompts, args)
        startup_s = {name: server.startup_s for name, server in servers.items()}
        layers = {name: len(servers[name].sdsie()["resolution"]["layers"]) for name in SPECS}
    return {
        "machine": machine.describe(),
        "command": headline.this_command(),
        "date": headline.today(),
        "calibration": args.calibration,
        "specs": SPECS,
        "gated_layers": layers,
        "startup_s": startup_s,
        "int4_share": shares,
        "energy": joules,
        "rows": rows,
    }


def int4_share(server: Server, ids: list[int], tokens: int) -> float:
    """Share of an answer's decode cycles that ran in INT4, by the server's own count of what ran."""
    stats = server.generate(ids, max_new_tokens=tokens, ignore_eos=True)["meta_info"].get("sdsie")
    return stats["cycles"].get("R", 0) / sum(stats["cycles"].values()) if stats else 0.0


def bf16(rows: Rows, server: str) -> str:
    """The faster bf16: SGLang as shipped, or gear 0 of the same server."""
    return max((PLAIN, f"{server}, gear 0"), key=lambda name: statistics.median(row["tok_per_s"] for row in rows[name]))


def switching_ratio(rows: Rows, server: str) -> dict[str, float]:
    """What half of the cycles in each precision should take, over what it takes with a switch every 8."""

    def cycle_s(name: str) -> float:
        return statistics.median(row["wall_s"] / row["cycles"] for row in rows[f"{server}, {name}"])

    expected = (cycle_s("INT4") + cycle_s("gear 0")) / 2
    ratios = sorted(expected / (row["wall_s"] / row["cycles"]) for row in rows[f"{server}, switching"])
    return {"value": statistics.median(ratios), "low": ratios[0], "high": ratios[-1]}


def summarise(record: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Prints each variant, and returns the ratios."""
    rows: Rows = record["rows"]
    for name, measured in rows.items():
        speeds = sorted(row["tok_per_s"] for row in measured)
        energy = record["energy"].get(name)
        print(
            f"{name:24s} {statistics.median(speeds):7.1f} tok/s ({speeds[0]:.1f} to {speeds[-1]:.1f}), "
            f"{100 * record['int4_share'][name]:.0f} % of cycles in INT4"
            + (f", {energy['j_per_token']:.2f} J/token" if energy else "")
        )
    if "missing" in record["energy"]:
        print(f"no energy: {record['energy']['missing']}")
    ratios = {FIGURE: ratio(rows, "down_proj, INT4", bf16(rows, "down_proj"))}
    ratios["all linear layers over bf16"] = ratio(rows, "all linear, INT4", bf16(rows, "all linear"))
    for server in SPECS:
        ratios[f"switching over steady, {server}"] = switching_ratio(rows, server)
    for name, figure in ratios.items():
        print(f"{name}: {figure['value']:.3f} ({figure['low']:.3f} to {figure['high']:.3f})")
    return ratios


def note(record: dict[str, Any], value: float) -> str:
    """What the figure belongs to, and whether it reaches what is required."""
    verdict = "reached" if value >= REQUIRED else f"falls short by {REQUIRED - value:.3f}"
    base = bf16(record["rows"], "down_proj")
    return (
        f"required {REQUIRED:.2f}: {verdict}; down_proj of all {record['gated_layers']['down_proj']} layers, "
        f"{record['calibration']}, 8B shape, batch 1, against {'SGLang as shipped' if base == PLAIN else 'gear 0'}"
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--calibration", default="g128")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument(
        "--energy-s",
        type=float,
        default=1.5 * MIN_WINDOW_S,
        help=f"window of each variant, {MIN_WINDOW_S:.0f} at least",
    )
    parser.add_argument("--headline", action="store_true", help="record the figure as a quoted one")
    parser.add_argument("--sglang", nargs=argparse.REMAINDER, default=[], help="further flags for every server")
    args = parser.parse_args(argv)
    if args.out.exists():
        record = json.loads(args.out.read_text())
    elif args.energy_s < MIN_WINDOW_S:
        print(
            f"{parser.prog}: error: --energy-s {args.energy_s:g} is less than the {MIN_WINDOW_S:.0f} s that energy is "
            "reported over",
            file=sys.stderr,
        )
        return 2
    else:
        need_gpu(parser.prog)
        record = measure(args)
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(record, indent=1) + "\n")
    figure = summarise(record)[FIGURE]
    if args.headline:
        headline.quote(record, args.out, {FIGURE: figure}, lambda _: note(record, figure["value"]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
