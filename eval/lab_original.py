"""The original's threshold table and its sweep of clutch settings, on this project's pair.

    python -m sdsie_sglang.eval.lab_original                           # costs of the gear record of one H200
    python -m sdsie_sglang.eval.lab_original --cost-table TABLE.json   # a table written by eval.calibrate

The original compared two settings on three prompts against plain decoding, and swept nine clutch settings over
which throughput stood still, because nothing executed what the clutch decided. Here gears are executed, so it must
move. Writes NAME.json and NAME.md. Simulated: gears as in a server, greedy, batch 1; times are the cost table's.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import spearmanr

from sdsie_sglang.eval.arguments import count
from sdsie_sglang.eval.contenders import Contender
from sdsie_sglang.eval.headline import this_command, today
from sdsie_sglang.eval.lab import MAX_REPEATED, Played, interval, play, speed
from sdsie_sglang.eval.lab_input import costs_at, need_gears, read_inputs
from sdsie_sglang.eval.simulate import LAG, plays_policy
from sdsie_sglang.eval.trace import TRACES, Trace
from sdsie_sglang.gears import PRESETS, PolicySettings, build_policy
from sdsie_sglang.gears.cost_table import CostTable, GearCosts

SETTINGS = {"paper": "production 0.55 / 1.25, α 0.35", "tuned": "best found 0.15 / 0.70, α 0.65"}
PROMPTS = {"reference-poem": "Poem", "reference-physics": "Physics", "reference-code": "Code"}

# Quoted: README of Creepybits/software-defined-stochastic-inference-engine, Llama 3.1 8B and 3.2 1B on an RTX 5090;
# tokens/s against plain in percent, and the band of its sweep in tokens/s.
ORIGINAL_PERCENT = {
    "paper": {"Poem": -10.5, "Physics": -13.1, "Code": 31.1},
    "tuned": {"Poem": -5.6, "Physics": -4.7, "Code": 34.8},
}
ORIGINAL_BAND = (51.1, 51.8)

SWEEP = (
    (0.02, 0.05),
    (0.05, 0.20),
    (0.10, 0.40),
    (0.15, 0.70),
    (0.30, 1.00),
    (0.60, 1.40),
    (1.00, 2.00),
    (1.50, 3.00),
    (2.50, 5.00),
)
"""θ_low, θ_high in bits; α is the class default's. Of the original's nine settings only the span is known (its gate
active 0 to 34 % of the time): these go from hardly ever to mostly engaged on this pair."""
SWEEP_ALPHA = 0.65
NEEDS = (0, 5)


def entropy(costs: GearCosts, traces: Sequence[Trace], lag: int, **settings: Any) -> Played:
    """An entropy policy with K = 5, as the original's, on these answers."""

    def build() -> Any:
        return build_policy(PolicySettings(policy="entropy", **settings))

    return play(Contender("ours", plays_policy(build, lag), needs=NEEDS), traces, costs, 1)


def plain(costs: GearCosts, traces: Sequence[Trace]) -> Played:
    return play(
        Contender("fixed", plays_policy(lambda: build_policy(PolicySettings(policy="plain")))), traces, costs, 1
    )


def fixed(costs: GearCosts, traces: Sequence[Trace]) -> Played:
    return play(
        Contender("fixed", plays_policy(lambda: build_policy(PolicySettings(policy="fixed", k=5)))), traces, costs, 1
    )


def active(played: Played) -> float:
    """Share of cycles that drafted."""
    return float(1.0 - played.cycles[:, 0].sum() / played.cycles.sum())


def threshold_table(traces: Sequence[Trace], costs: GearCosts, lag: int) -> dict[str, dict[str, Any]]:
    """Per prompt: plain, both settings and fixed K = 5. Raises KeyError if a reference prompt has no trace."""
    by_id = {trace.id: trace for trace in traces}
    rows: dict[str, dict[str, Any]] = {}
    for prompt, name in PROMPTS.items():
        one = [by_id[prompt]]
        base, always = plain(costs, one), fixed(costs, one)
        everyone = np.arange(1)
        row: dict[str, Any] = {
            "plain_tok_per_s": speed(base, everyone),
            "fixed_k5_over_plain": speed(always, everyone) / speed(base, everyone),
            "repeated": one[0].repeated,
        }
        for preset in SETTINGS:
            gated = entropy(costs, one, lag, preset=preset)
            row[preset] = {
                "over_plain": speed(gated, everyone) / speed(base, everyone),
                "active_share": active(gated),
                "original_percent": ORIGINAL_PERCENT[preset][name],
            }
        rows[name] = row
    return rows


def sweep(traces: Sequence[Trace], costs: GearCosts, lag: int) -> list[dict[str, float]]:
    """Every setting on all answers: throughput, how much it drafted, and against plain (95 % interval over prompts)."""
    base = plain(costs, traces)
    everyone = np.arange(len(traces))
    rows = []
    for low_bits, high_bits in SWEEP:
        gated = entropy(costs, traces, lag, theta_low=low_bits, theta_high=high_bits, alpha=SWEEP_ALPHA)
        low, high = interval(base.ms, gated.ms)
        rows.append(
            {
                "theta_low": low_bits,
                "theta_high": high_bits,
                "active_share": active(gated),
                "tok_per_s": speed(gated, everyone),
                "over_plain": speed(gated, everyone) / speed(base, everyone),
                "over_plain_low": low,
                "over_plain_high": high,
                "engagements_per_100_tokens": float(100 * gated.engagements.sum() / gated.tokens.sum()),
            }
        )
    return rows


def movement(rows: Sequence[dict[str, float]]) -> dict[str, float]:
    """How far throughput moved over the sweep, beside the original's band."""
    speeds = [row["tok_per_s"] for row in rows]
    shares = [row["active_share"] for row in rows]
    moves = max(speeds) - min(speeds) > 1e-9 and max(shares) > min(shares)
    return {
        "slowest_tok_per_s": min(speeds),
        "fastest_tok_per_s": max(speeds),
        "fastest_over_slowest": max(speeds) / min(speeds),
        "original_fastest_over_slowest": ORIGINAL_BAND[1] / ORIGINAL_BAND[0],
        "rank_correlation_with_activity": float(spearmanr(shares, speeds).statistic) if moves else 0.0,
    }


def verdict(moved: dict[str, float]) -> str:
    return (
        f"Over the nine settings simulated throughput goes from {moved['slowest_tok_per_s']:.0f} to "
        f"{moved['fastest_tok_per_s']:.0f} tok/s, a ratio of {moved['fastest_over_slowest']:.2f} (the original's, "
        f"whose gate nothing executed: {moved['original_fastest_over_slowest']:.2f}). Its rank correlation with "
        f"the share of cycles that draft is {moved['rank_correlation_with_activity']:+.2f}."
    )


def percent(ratio: float) -> str:
    """A ratio to plain as a signed change, with a true minus."""
    return f"{100 * (ratio - 1):+.1f} %".replace("-", "\u2212")


def markdown(record: dict[str, Any], table: CostTable) -> str:
    """Both tables."""
    lines = ["# The original's tables on this pair (simulated)", "", f"`{record['command']}`", ""]
    lines += [f"| prompt | plain tok/s | {' | '.join(SETTINGS.values())} | fixed K = 5 |", "|---|---|---|---|---|"]
    for name, row in record["threshold_table"].items():
        gated = [row[preset] for preset in SETTINGS]
        cells = [
            f"{percent(each['over_plain'])} ({100 * each['active_share']:.0f} % of cycles draft; original "
            f"{percent(1 + each['original_percent'] / 100)})"
            for each in gated
        ]
        loops = " (its answer loops)" if row["repeated"] > MAX_REPEATED else ""
        lines.append(
            f"| {name}{loops} | {row['plain_tok_per_s']:.0f} | {' | '.join(cells)} | "
            f"{percent(row['fixed_k5_over_plain'])} |"
        )
    lines += [
        "",
        f"| θ low / high, bits (α {SWEEP_ALPHA}) | cycles that draft | tok/s | over plain (95 % interval) | engaged |",
    ]
    lines.append("|---|---|---|---|---|")
    for setting in record["sweep"]:
        lines.append(
            f"| {setting['theta_low']:.2f} / {setting['theta_high']:.2f} | {100 * setting['active_share']:.0f} % | "
            f"{setting['tok_per_s']:.1f} | {setting['over_plain']:.3f} ({setting['over_plain_low']:.3f} to "
            f"{setting['over_plain_high']:.3f}) | {setting['engagements_per_100_tokens']:.1f} / 100 tokens |"
        )
    lines += ["", record["verdict"], "", f"Costs: {table.models}; {table.where}. {table.method}.", ""]
    return "\n".join(lines)


def main() -> None:
    """Simulate, write, print."""
    parser = argparse.ArgumentParser(
        prog="python -m sdsie_sglang.eval.lab_original",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--traces", type=Path, default=TRACES)
    parser.add_argument("--cost-table", "--costs", dest="costs", type=Path)
    parser.add_argument("--batch", type=count, default=1, help="whose costs to take; one request is simulated")
    parser.add_argument("--lag", type=int, choices=(1, 2), default=LAG, help="1 without overlap scheduling")
    parser.add_argument("--out", type=Path, default=TRACES.with_name("original-h200-gears"), help="without an ending")
    options = parser.parse_args()
    table, read = read_inputs(parser, options)
    need_gears(parser, table, NEEDS)
    costs, traces = costs_at(parser, table, options.batch), read.traces
    rows = sweep(traces, costs, options.lag)
    moved = movement(rows)
    record = {
        "kind": "simulation",
        "verdict": verdict(moved),
        "threshold_table": threshold_table(traces, costs, options.lag),
        "sweep": rows,
        "movement": moved,
        "presets": {name: PRESETS[name] for name in SETTINGS},
        "lag": options.lag,
        "costs": f"{table.models}; {table.where}",
        "command": this_command(),
        "date": today(),
    }
    text = markdown(record, table)
    options.out.with_suffix(".json").write_text(json.dumps(record, indent=1) + "\n")
    options.out.with_suffix(".md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
