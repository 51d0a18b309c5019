"""What every rule drafts and gets accepted: facts of the traces that need no cost table.

    python -m sdsie_sglang.eval.lab_acceptance

Writes NAME.json and NAME.md. Which of these is fastest depends on what a drafted token costs: eval.lab says that.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from sdsie_sglang.eval.arguments import one_line
from sdsie_sglang.eval.contenders import contenders
from sdsie_sglang.eval.headline import this_command, today
from sdsie_sglang.eval.lab import MAX_REPEATED
from sdsie_sglang.eval.simulate import LAG, Run
from sdsie_sglang.eval.trace import TRACES, Trace, load
from sdsie_sglang.gears.cost_table import Cell, CostTable
from sdsie_sglang.gears.limits import MAX_K

PRICED = ("cost gate", "TurboSpec goodput", "oracle")
"""These look at costs, so without a table they have nothing to say."""


def unit_table() -> CostTable:
    """Every cycle costs 1, so that gears can be played; nothing that depends on it is reported."""
    cells = tuple(Cell(k=k, batch=1, ms=1.0) for k in range(MAX_K + 1))
    return CostTable(models="none", where="nowhere", method="counts cycles", cells=cells)


def count(runs: Sequence[Run]) -> dict[str, float]:
    """Over all answers of one rule."""
    tokens, cycles = sum(run.tokens for run in runs), sum(len(run.gears) for run in runs)
    drafted = sum(sum(run.gears) for run in runs)
    return {
        "tokens_per_cycle": tokens / cycles,
        "drafted_per_token": drafted / tokens,
        "accepted_share": (tokens - cycles) / drafted if drafted else 0.0,
        "gear0_share": sum(run.gears.count(0) for run in runs) / cycles,
        "engagements_per_100_tokens": 100 * sum(run.engagements for run in runs) / tokens,
    }


def play(traces: Sequence[Trace], lag: int) -> dict[str, dict[str, float]]:
    """One row a rule, the answers in their own order."""
    costs = unit_table().at(1)
    every = contenders(unit_table(), lag)
    return {name: count(each.play(traces, costs)) for name, each in every.items() if name not in PRICED}


def markdown(groups: dict[str, dict[str, dict[str, float]]], command: str) -> str:
    lines = [f"`{command}`: facts of the traces, no times.", ""]
    for group, rows in groups.items():
        lines += [
            f"| {group} | tokens a cycle | drafted a token | of these accepted | cycles in gear 0 | engaged anew |"
        ]
        lines += ["|---|---|---|---|---|---|"]
        for name, row in rows.items():
            lines.append(
                f"| {name} | {row['tokens_per_cycle']:.2f} | {row['drafted_per_token']:.2f} | "
                f"{100 * row['accepted_share']:.0f} % | {100 * row['gear0_share']:.0f} % | "
                f"{row['engagements_per_100_tokens']:.1f} / 100 tokens |"
            )
        lines.append("")
    return "\n".join(lines)


def main() -> None:
    """Count, write, print."""
    parser = argparse.ArgumentParser(
        prog="python -m sdsie_sglang.eval.lab_acceptance",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--traces", type=Path, default=TRACES)
    parser.add_argument("--lag", type=int, choices=(1, 2), default=LAG)
    parser.add_argument("--out", type=Path, default=TRACES.with_name("acceptance"), help="without an ending")
    options = parser.parse_args()
    with one_line(parser):
        traces = load(options.traces).traces
        options.out.parent.mkdir(parents=True, exist_ok=True)
    unlooped = [trace for trace in traces if trace.repeated <= MAX_REPEATED]
    groups = {
        f"all {len(traces)} answers": play(traces, options.lag),
        f"{len(unlooped)} without loops": play(unlooped, options.lag),
    }
    command = this_command()
    text = markdown(groups, command)
    record = {"kind": "replay", "lag": options.lag, "groups": groups, "command": command, "date": today()}
    options.out.with_suffix(".json").write_text(json.dumps(record, indent=1) + "\n")
    options.out.with_suffix(".md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
