"""INT4 in whole models on one GPU: the target alone, as a draft model, and as the target's own draft.

    python scripts/bench_int4_model.py OUT.json [--self-draft g128 g32] [--lm-head] [--headline]

Random weights of the 8B (target) and the 1B (draft) Llama shape and simulated acceptance: timing only, no text. What
is measured of a gear is its cycle's time, which does not depend on how many tokens are accepted; speeds are those
at 4.27 tokens a cycle for the draft model at K = 5 in both precisions, and for the self-draft at the accept length
that a calibration has on real text (eval/results/int4/fidelity.json). A cycle's time does not depend either on how
a group's scale was chosen: weights of the same group size are as large and take the same kernel, so `mse` is quoted
from cycles of `g128`. `awq` is not: it multiplies inputs first, and cannot be made while a model is loaded.

Servers run side by side, one of them busy at a time, repeats interleaved. Before each measured answer its server
answers with one token, which wakes it up and whose time is the prefill's. If OUT.json is there it is only summarised.
"""

import argparse
import json
import os
import re
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench_gears import ACCEPT_LENGTH, ratio, run_once, start_all, write_shape

from sdsie_sglang.eval import headline, int4_fidelity, machine
from sdsie_sglang.int4.settings import CALIBRATIONS

REQUIRED = {
    "int4_model_over_bf16_bs1": 1.6,
    "k5_int4_draft_over_bf16_draft": 1.08,
    "self_draft_over_plain_bs1": 1.2,
}
SELF_GEARS = (1, 2, 3, 4, 5)
SELF = "self-draft"
SELF_ROW = re.compile(rf"{SELF} (?:(\w+) )?k(\d+)")
Rows = dict[str, list[dict[str, float]]]
AcceptLengths = Mapping[str, Mapping[int, float]]
"""Tokens a cycle of each calibration and gear."""


def need_gpu(program: str) -> None:
    """Before servers of an 8B shape are started. Raises SystemExit(2)."""
    import torch

    if not torch.cuda.is_available():
        print(f"{program}: error: this measures on an NVIDIA GPU, and there is none here", file=sys.stderr)
        raise SystemExit(2)


def common_flags(target: Path, args: argparse.Namespace) -> list[str]:
    """Of every server."""
    return [
        "--model-path", str(target), "--load-format", "dummy", "--dtype", "bfloat16", "--context-length", "4096",
        "--max-total-tokens", "8192", "--disable-radix-cache", "--cuda-graph-backend-prefill", "disabled",
        "--max-running-requests", "1", "--cuda-graph-bs-decode", "1", "--skip-tokenizer-init", *args.sglang,
    ]  # fmt: skip


def int4_flags(calibration: str, args: argparse.Namespace) -> list[str]:
    return ["--sdsie-int4-calibration", calibration, *(["--sdsie-int4-lm-head"] if args.lm_head else [])]


def server_plans(
    args: argparse.Namespace, target: Path, draft: Path, accept: AcceptLengths
) -> dict[str, tuple[Any, ...]]:
    """bf16 and INT4 without speculation, K = 5 with a draft model in each precision, and the self-drafts."""
    common, simulated = common_flags(target, args), {"SGLANG_SIMULATE_ACC_LEN": str(ACCEPT_LENGTH)}
    gears = ["--sdsie-policy", "fixed", "--sdsie-gears"]
    drafted = [*common, "--speculative-draft-model-path", str(draft), *gears, "0,5"]
    quantised = ["--speculative-draft-model-quantization", "sdsie_int4", *int4_flags(args.calibration, args)]
    # SGLang's own launcher: ours always speculates.
    settings = {"SDSIE_CONFIG": json.dumps({"int4_calibration": args.calibration, "int4_lm_head": args.lm_head})}
    narrowest = min(SELF_GEARS)
    itself = [*common, "--sdsie-draft", "self-int4", *gears, ",".join(map(str, (0, *SELF_GEARS)))]
    return {
        "plain": ([*common, "--sdsie-off"], {}),
        "k5, bf16 draft": (drafted, simulated),
        "k5, INT4 draft": ([*drafted, *quantised], simulated),
        "INT4": ([*common, "--quantization", "sdsie_int4"], settings, "sglang.launch_server"),
        **{
            f"{SELF} {calibration}": (
                [*itself, *int4_flags(calibration, args), "--sdsie-k", str(narrowest)],
                {"SGLANG_SIMULATE_ACC_LEN": str(accept[calibration][narrowest])},
            )
            for calibration in args.self_draft
        },
    }


def self_name(calibration: str, k: int) -> str:
    return f"{SELF} {calibration} k{k}"


def calibration_and_gear(name: str, record: Mapping[str, Any]) -> tuple[str, int] | None:
    """Of a self-draft's row; None for others. Records with one self-draft name its calibration once for all."""
    found = SELF_ROW.fullmatch(name)
    return None if found is None else (found[1] or record["calibration"], int(found[2]))


def as_fast(calibration: str) -> list[str]:
    """Calibrations whose cycles take what this one's take: groups of the same size, nothing done to the inputs."""

    def kind(name: str) -> tuple[object, ...]:
        how = CALIBRATIONS[name]
        return how.group, how.symmetric, how.needs_text

    return [name for name in CALIBRATIONS if kind(name) == kind(calibration)]


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


def accept_lengths(path: Path) -> dict[str, dict[int, float]]:
    """Each calibration's over the 27 prompts. Raises SystemExit."""
    if not path.exists():
        raise SystemExit(f"{path} is not there: run python -m sdsie_sglang.eval.int4_fidelity")
    record = int4_fidelity.Record.model_validate_json(path.read_text())
    return {
        found.calibration: {k: round(int4_fidelity.accept_length(found.runs.values(), k), 3) for k in SELF_GEARS}
        for found in record.calibrations
    }


def measure(args: argparse.Namespace, accept: AcceptLengths) -> dict[str, Any]:
    """Starts the servers, runs the interleaved repeats and returns the raw record."""
    scratch = Path(tempfile.mkdtemp(prefix="sdsie-shapes-"))
    target, draft = write_shape(scratch / "target", "8b"), write_shape(scratch / "draft", "1b")
    logs = Path(os.environ.get("SDSIE_LOGS", scratch))
    prompts = [[(31 * j) % 1000 + 10 for j in range(64)]]
    plans = server_plans(args, target, draft, accept)
    # Name -> server, gear to put in force, tokens a cycle.
    variants: dict[str, tuple[str, int | None, float | None]] = {
        name: (name, None, ACCEPT_LENGTH if name.startswith("k5") else None)
        for name in plans
        if not name.startswith(SELF)
    }
    for calibration in args.self_draft:
        for k in SELF_GEARS:
            variants[self_name(calibration, k)] = (f"{SELF} {calibration}", k, accept[calibration][k])
    rows: Rows = {name: [] for name in variants}
    with start_all(plans, logs) as servers:
        for repeat in range(-args.warm_up, args.repeats):
            for name, (server_name, k, length) in variants.items():
                server = servers[server_name]
                if k is not None:
                    server.set_policy(policy="fixed", k=k)
                run_once(server, 1, 1, prompts)  # it may have slept
                prefill = run_once(server, 1, 1, prompts)
                row = run_once(server, 1, args.tokens, prompts)
                row = {**row, "prefill_s": prefill["wall_s"]} if length is None else as_accepted(prefill, row, length)
                if repeat >= 0:
                    rows[name].append(row)
        startup_s = {name: servers[name].startup_s for name in plans}
    return {
        "machine": machine.describe(),
        "command": headline.this_command(),
        "date": headline.today(),
        "calibration": args.calibration,
        "lm_head": args.lm_head,
        "accept_length": {
            "draft model": ACCEPT_LENGTH,
            **{self_name(c, k): accept[c][k] for c in args.self_draft for k in SELF_GEARS},
        },
        "startup_s": startup_s,
        "rows": rows,
    }


def at_length(rows: Sequence[dict[str, float]], accept: float) -> list[dict[str, float]]:
    """A self-draft's rows at another accept length: their cycles and prefills as they were measured."""

    def moved(row: dict[str, float]) -> dict[str, float]:
        wall_s = row["prefill_s"] + (row["tokens"] - 1) / accept * row["cycle_ms"] / 1e3
        return {**row, "tok_per_s": row["tokens"] / wall_s, "accept_length": accept}

    return [moved(row) for row in rows]


def self_drafts(record: dict[str, Any], accept: AcceptLengths) -> dict[tuple[str, int], dict[str, float]]:
    """Self-draft over plain by calibration and K: each that was measured, and those that are as fast."""
    rows: Rows = record["rows"]
    found = {}
    for name in rows:
        if (of := calibration_and_gear(name, record)) is None:
            continue
        measured, k = of
        for calibration in as_fast(measured):
            if calibration in accept:
                there = {"plain": rows["plain"], SELF: at_length(rows[name], accept[calibration][k])}
                found[calibration, k] = ratio(there, SELF, "plain")
    return found


def best_of(drafts: Mapping[tuple[str, int], dict[str, float]]) -> tuple[str, int]:
    return max(drafts, key=lambda of: drafts[of]["value"])


def summarise(record: dict[str, Any], accept: AcceptLengths) -> dict[str, dict[str, float]]:
    """Prints each variant's speed and returns the ratios."""
    rows: Rows = record["rows"]
    for name, measured in rows.items():
        speeds = sorted(row["tok_per_s"] for row in measured)
        print(
            f"{name:20s} {statistics.median(speeds):8.1f} tok/s ({speeds[0]:.1f} to {speeds[-1]:.1f}), "
            f"{statistics.mean(row['accept_length'] for row in measured):.2f} tokens a cycle"
        )
    selves = self_drafts(record, accept)
    for (calibration, k), figure in selves.items():
        print(
            f"self-draft {calibration} K = {k} over plain, at {accept[calibration][k]:.2f} tokens a cycle: "
            f"{figure['value']:.3f} ({figure['low']:.3f} to {figure['high']:.3f})"
        )
    ratios = {
        "int4_model_over_bf16_bs1": ratio(rows, "INT4", "plain"),
        "k5_int4_draft_over_bf16_draft": ratio(rows, "k5, INT4 draft", "k5, bf16 draft"),
        "self_draft_over_plain_bs1": selves[best_of(selves)],
    }
    for name, figure in ratios.items():
        said = note(name, figure["value"], record, accept)
        print(f"{name}: {figure['value']:.3f} ({figure['low']:.3f} to {figure['high']:.3f})  {said}")
    return ratios


def note(name: str, value: float, record: dict[str, Any], accept: AcceptLengths) -> str:
    """What the figure belongs to, and whether it reaches what is required."""
    head = "output head in INT4" if record["lm_head"] else "output head in bf16"
    about = f"8B shape, batch 1, {head}"
    if name == "self_draft_over_plain_bs1":
        drafts = self_drafts(record, accept)
        calibration, k = best_of(drafts)
        gears = ", ".join(str(gear) for gear in sorted({gear for _, gear in drafts}))
        tried = ", ".join(dict.fromkeys(name for name, _ in drafts))
        about += (
            f"; best of K = {gears} and of {tried}: {calibration}, K = {k}, at its {accept[calibration][k]} tokens a "
            "cycle on SmolLM2-135M's answers"
        )
        measured = {of[0] for row in record["rows"] if (of := calibration_and_gear(row, record))}
        if calibration not in measured:
            about += (
                f"; cycles measured with {as_fast(calibration)[0]} weights, which are as large and take the same kernel"
            )
    else:
        about += f", {record['calibration']}"
    if name == "k5_int4_draft_over_bf16_draft":
        about += f"; 1B draft, both at {record['accept_length']['draft model']} tokens a cycle"
    short = REQUIRED[name] - value
    verdict = "reached" if short <= 0 else f"falls short by {short:.3f}"
    return f"required {REQUIRED[name]:.2f}: {verdict}; {about}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--fidelity", type=Path, default=int4_fidelity.RESULTS / "fidelity.json")
    while_loaded = [name for name, how in CALIBRATIONS.items() if not how.needs_text]
    parser.add_argument("--calibration", choices=while_loaded, default="g128", help="of INT4 target and draft model")
    parser.add_argument(
        "--self-draft", choices=while_loaded, nargs="+", default=["g128", "g32"], help="one server each"
    )
    parser.add_argument("--lm-head", action="store_true", help="the output head in INT4 as well")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--warm-up", type=int, default=2, help="rounds before the measured ones")
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--headline", action="store_true", help="record the figures as quoted ones")
    parser.add_argument("--sglang", nargs=argparse.REMAINDER, default=[], help="further flags for every server")
    args = parser.parse_args()
    accept = accept_lengths(args.fidelity)
    if missing := set(args.self_draft) - accept.keys():
        raise SystemExit(f"{args.fidelity} has no calibration {', '.join(sorted(missing))}")
    if args.out.exists():
        record = json.loads(args.out.read_text())
    else:
        need_gpu(parser.prog)
        record = measure(args, accept)
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(record, indent=1) + "\n")
    ratios = summarise(record, accept)
    if args.headline:
        headline.quote(record, args.out, ratios, lambda name: note(name, ratios[name]["value"], record, accept))
    return 0


if __name__ == "__main__":
    sys.exit(main())
