"""INT4 in whole models on one GPU: the target alone, as a draft model, and as the target's own draft.

    python scripts/bench_int4_model.py OUT.json [--accept 2=2.6 3=3.2 4=3.6 5=3.9] [--lm-head] [--headline]

Random weights of the 8B (target) and the 1B (draft) Llama shape and simulated acceptance: timing only, no text.
The draft model's accept length is 4.27 at K = 5 in both precisions; the self-draft's is what the calibration has on
real text, read from eval/results/int4/fidelity.json unless --accept gives it. One server drafts for itself in all
its gears; it simulates the accept length of the narrowest, and what the wider ones would give follows from the time
of their cycles, which does not depend on how many tokens are accepted. Servers run side by side, one of them busy
at a time, repeats interleaved. If OUT.json is there it is only summarised.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench_gears import ACCEPT_LENGTH, ratio, run_once, start_all, write_shape

from sdsie_sglang.eval import headline, int4_fidelity, machine

REQUIRED = {
    "int4_model_over_bf16_bs1": 1.6,
    "k5_int4_draft_over_bf16_draft": 1.08,
    "self_draft_over_plain_bs1": 1.2,
}
SELF_GEARS = (2, 3, 4, 5)
SELF = "self-draft"
Rows = dict[str, list[dict[str, float]]]


def common_flags(target: Path, args: argparse.Namespace) -> list[str]:
    """Of every server."""
    return [
        "--model-path", str(target), "--load-format", "dummy", "--dtype", "bfloat16", "--context-length", "4096",
        "--max-total-tokens", "8192", "--disable-radix-cache", "--cuda-graph-backend-prefill", "disabled",
        "--max-running-requests", "1", "--cuda-graph-bs-decode", "1", "--skip-tokenizer-init", *args.sglang,
    ]  # fmt: skip


def int4_flags(args: argparse.Namespace) -> list[str]:
    return ["--sdsie-int4-calibration", args.calibration, *(["--sdsie-int4-lm-head"] if args.lm_head else [])]


def server_plans(
    args: argparse.Namespace, target: Path, draft: Path, accept: Mapping[int, float]
) -> dict[str, tuple[Any, ...]]:
    """bf16 and INT4 without speculation, K = 5 with a draft model in each precision, and the self-draft."""
    common, simulated = common_flags(target, args), {"SGLANG_SIMULATE_ACC_LEN": str(ACCEPT_LENGTH)}
    gears = ["--sdsie-policy", "fixed", "--sdsie-gears"]
    drafted = [*common, "--speculative-draft-model-path", str(draft), *gears, "0,5"]
    quantised = ["--speculative-draft-model-quantization", "sdsie_int4", *int4_flags(args)]
    # SGLang's own launcher: ours always speculates.
    settings = {"SDSIE_CONFIG": json.dumps({"int4_calibration": args.calibration, "int4_lm_head": args.lm_head})}
    narrowest = min(accept)
    itself = [*common, "--sdsie-draft", "self-int4", *int4_flags(args), *gears, ",".join(map(str, (0, *accept)))]
    return {
        "plain": ([*common, "--sdsie-off"], {}),
        "k5, bf16 draft": (drafted, simulated),
        "k5, INT4 draft": ([*drafted, *quantised], simulated),
        "INT4": ([*common, "--quantization", "sdsie_int4"], settings, "sglang.launch_server"),
        SELF: ([*itself, "--sdsie-k", str(narrowest)], {"SGLANG_SIMULATE_ACC_LEN": str(accept[narrowest])}),
    }


def self_name(k: int | str) -> str:
    return f"self-draft k{k}"


def as_accepted(prefill: dict[str, float], run: dict[str, float], accept: float) -> dict[str, float]:
    """What `run` would have been at `accept` tokens a cycle, its cycles lasting what they lasted.

    Args:
        prefill: a run of one token, which has no cycle.
    """
    cycle_s = (run["wall_s"] - prefill["wall_s"]) / run["cycles"]
    cycles = (run["tokens"] - 1) / accept
    wall_s = prefill["wall_s"] + cycles * cycle_s
    simulated = {f"simulated_{name}": run[name] for name in ("wall_s", "cycles", "accept_length")}
    tokens_per_s = run["tokens"] / wall_s
    return {
        **run, **simulated, "wall_s": wall_s, "cycles": cycles, "tok_per_s": tokens_per_s, "accept_length": accept,
        "cycle_ms": cycle_s * 1e3, "prefill_s": prefill["wall_s"],
    }  # fmt: skip


def accept_lengths(args: argparse.Namespace) -> dict[int, float]:
    """Tokens a cycle of each gear: given, or the calibration's over the 27 prompts. Raises SystemExit."""
    if args.accept:
        return dict(args.accept)
    if not args.fidelity.exists():
        raise SystemExit(
            f"{args.fidelity} is not there: give --accept, or run python -m sdsie_sglang.eval.int4_fidelity"
        )
    record = int4_fidelity.Record.model_validate_json(args.fidelity.read_text())
    runs = next((f.runs for f in record.calibrations if f.calibration == args.calibration), None)
    if runs is None:
        raise SystemExit(f"{args.fidelity} has no calibration {args.calibration}")
    return {k: round(int4_fidelity.accept_length(runs.values(), k), 3) for k in SELF_GEARS}


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Starts the servers, runs the interleaved repeats and returns the raw record."""
    accept = accept_lengths(args)
    scratch = Path(tempfile.mkdtemp(prefix="sdsie-shapes-"))
    target, draft = write_shape(scratch / "target", "8b"), write_shape(scratch / "draft", "1b")
    logs = Path(os.environ.get("SDSIE_LOGS", scratch))
    prompts = [[(31 * j) % 1000 + 10 for j in range(64)]]
    plans = server_plans(args, target, draft, accept)
    variants = {name: name for name in plans if name != SELF} | {self_name(k): SELF for k in accept}
    rows: Rows = {name: [] for name in variants}
    with start_all(plans, logs) as servers:
        for repeat in range(-1, args.repeats):  # the first warms up
            for name, server_name in variants.items():
                server = servers[server_name]
                if server_name == SELF:
                    k = int(name.removeprefix(self_name("")))
                    server.set_policy(policy="fixed", k=k)
                    row = as_accepted(
                        run_once(server, 1, 1, prompts), run_once(server, 1, args.tokens, prompts), accept[k]
                    )
                else:
                    row = run_once(server, 1, args.tokens, prompts)
                if repeat >= 0:
                    rows[name].append(row)
        startup_s = {name: server.startup_s for name, server in servers.items()}
    return {
        "machine": machine.describe(),
        "command": headline.this_command(),
        "date": headline.today(),
        "calibration": args.calibration,
        "lm_head": args.lm_head,
        "accept_length": {"draft model": ACCEPT_LENGTH, **{self_name(k): length for k, length in accept.items()}},
        "startup_s": startup_s,
        "rows": rows,
    }


def summarise(record: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Prints each variant's speed and returns the ratios."""
    rows: Rows = record["rows"]
    for name, measured in rows.items():
        speeds = sorted(row["tok_per_s"] for row in measured)
        print(
            f"{name:20s} {statistics.median(speeds):8.1f} tok/s ({speeds[0]:.1f} to {speeds[-1]:.1f}), "
            f"{statistics.mean(row['accept_length'] for row in measured):.2f} tokens a cycle"
        )
    selves = {name: ratio(rows, name, "plain") for name in rows if name.startswith("self-draft")}
    best = max(selves, key=lambda name: selves[name]["value"])
    for name, figure in selves.items():
        print(f"{name} over plain: {figure['value']:.3f} ({figure['low']:.3f} to {figure['high']:.3f})")
    ratios = {
        "int4_model_over_bf16_bs1": ratio(rows, "INT4", "plain"),
        "k5_int4_draft_over_bf16_draft": ratio(rows, "k5, INT4 draft", "k5, bf16 draft"),
        "self_draft_over_plain_bs1": selves[best],
    }
    for name, figure in ratios.items():
        print(f"{name}: {figure['value']:.3f} ({figure['low']:.3f} to {figure['high']:.3f})  {note(name, record)}")
    return ratios


def note(name: str, record: dict[str, Any]) -> str:
    """What the figure belongs to."""
    head = "output head in INT4" if record["lm_head"] else "output head in bf16"
    about = f"8B shape, batch 1, {record['calibration']}, {head}"
    if name == "self_draft_over_plain_bs1":
        rows = record["rows"]
        best = max(
            (row for row in rows if row.startswith("self-draft")),
            key=lambda row: ratio(rows, row, "plain")["value"],
        )
        about += f"; best of K = 2 to 5: {best} at {record['accept_length'][best]} tokens a cycle"
    if name == "k5_int4_draft_over_bf16_draft":
        about += f"; 1B draft, both at {record['accept_length']['draft model']} tokens a cycle"
    return f"required {REQUIRED[name]:.2f}; {about}"


def gear_and_length(text: str) -> tuple[int, float]:
    """'3=3.2' -> (3, 3.2)."""
    k, _, length = text.partition("=")
    if not k.isdigit() or not 1 <= float(length) <= int(k) + 1:
        raise argparse.ArgumentTypeError(f"{text!r} must look like 3=3.2, at most K + 1 tokens a cycle")
    return int(k), float(length)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--accept", type=gear_and_length, nargs="+", metavar="K=LENGTH", help="of the self-draft")
    parser.add_argument("--fidelity", type=Path, default=int4_fidelity.RESULTS / "fidelity.json")
    parser.add_argument("--calibration", default="g128")
    parser.add_argument("--lm-head", action="store_true", help="the output head in INT4 as well")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--headline", action="store_true", help="record the figures as quoted ones")
    parser.add_argument("--sglang", nargs=argparse.REMAINDER, default=[], help="further flags for every server")
    args = parser.parse_args()
    if args.out.exists():
        record = json.loads(args.out.read_text())
    else:
        record = measure(args)
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(record, indent=1) + "\n")
    ratios = summarise(record)
    if args.headline:
        headline.quote(record, args.out, ratios, lambda name: note(name, record))
    return 0


if __name__ == "__main__":
    sys.exit(main())
