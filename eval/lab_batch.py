"""Batch rules: how one gear serves a batch of unlike requests, and what a gear of their own would give at most.

    python -m sdsie_sglang.eval.lab_batch --cost-table COSTS.json --sizes 4 16 64

Without --cost-table: the H200's gear record, gears 0 and 5, batches up to 16. Writes NAME.json and NAME.md. Simulated.
"""

import argparse
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from sdsie_sglang.eval.arguments import count
from sdsie_sglang.eval.headline import this_command, today
from sdsie_sglang.eval.lab import SEED
from sdsie_sglang.eval.lab_input import costs_at, read_inputs
from sdsie_sglang.eval.oracle import plays_oracle
from sdsie_sglang.eval.simulate import LAG, plays_policy
from sdsie_sglang.eval.simulate_batch import BatchRun, mixed_queue, replay_batch
from sdsie_sglang.eval.trace import TRACES, Trace
from sdsie_sglang.gears import PRESETS, Policy, PolicySettings, build_policy
from sdsie_sglang.gears.batch_rules import MeanEntropyPolicy
from sdsie_sglang.gears.cost import CostPolicy
from sdsie_sglang.gears.cost_table import Cell, CostTable, Engaging, GearCosts
from sdsie_sglang.gears.rivals import SGLANG_SLOTS, AcceptEmaPolicy

ALONE = "a gear of its own: "
"""Each request pays its own gear's share of the batch's cycle: a bound, for a batch waits for its widest."""


def rules(table: CostTable, preset: str) -> dict[str, Callable[[], Policy]]:
    """Every way to decide for a batch that the table has the gears for."""

    def entropy(**more: Any) -> PolicySettings:
        return PolicySettings.model_validate({"policy": "entropy", "preset": preset, **more})

    found: dict[str, Callable[[], Policy]] = {"plain": lambda: build_policy(PolicySettings(policy="plain"))}
    for k in table.gears[1:]:
        found[f"fixed K={k}"] = lambda k=k: build_policy(PolicySettings(policy="fixed", k=k))  # type: ignore[misc]
    if 5 in table.gears:
        found["entropy, half engaged"] = lambda: build_policy(entropy())
        found["entropy, any engaged"] = lambda: build_policy(entropy(engage_share=0.001))
        found["entropy, all engaged"] = lambda: build_policy(entropy(engage_share=1.0))
        found["entropy, mean"] = lambda: MeanEntropyPolicy(entropy())
    found["cost gate, sum"] = lambda: CostPolicy(table)
    if {k for slot in SGLANG_SLOTS.values() for k in slot.steps} <= set(table.gears):
        found["SGLang accept EMA"] = AcceptEmaPolicy
    return found


def play(
    traces: tuple[Trace, ...], table: CostTable, size: int, preset: str, rounds: int, lag: int
) -> dict[str, dict[str, float]]:
    """Every rule on the same queues of one batch size: mean over the queues, their spread, and what was wasted."""
    costs = table.at(size)
    runs: dict[str, list[BatchRun]] = {name: [] for name in rules(table, preset)}
    for round_ in range(rounds):
        queue = mixed_queue(traces, max(len(traces), 4 * size), np.random.default_rng(SEED + round_))
        for name, build in rules(table, preset).items():
            runs[name].append(replay_batch(queue, size, build(), costs, lag))
    result = {}
    for name, each in runs.items():
        speeds = [run.tok_per_s for run in each]
        drafted, accepted = sum(run.drafted for run in each), sum(run.accepted for run in each)
        result[name] = {
            "tok_per_s": float(np.mean(speeds)),
            "low": min(speeds),
            "high": max(speeds),
            "accepted_share": accepted / drafted if drafted else 0.0,
            "gear0_share": float(sum(run.cycles[0] for run in each) / sum(run.cycles.sum() for run in each)),
        }
    return result | {ALONE + name: row for name, row in alone(traces, table, costs, size, lag).items()}


def alone(
    traces: tuple[Trace, ...], table: CostTable, costs: GearCosts, size: int, lag: int
) -> dict[str, dict[str, float]]:
    """Bounds: `size` requests side by side, each with the gear of its own choice at the batch's prices."""
    result = {}
    cells = tuple(Cell(k=k, batch=1, ms=ms) for k, ms in costs.ms.items())
    prices = table.model_copy(update={"cells": cells, "engaging": (Engaging(batch=1, ms=costs.engaging_ms),)})
    for name, player in {"cost gate": plays_policy(lambda: CostPolicy(prices), lag), "oracle": plays_oracle()}.items():
        runs = player(traces, costs)
        speed = size * 1000.0 * sum(run.tokens for run in runs) / sum(run.ms for run in runs)
        result[name] = {"tok_per_s": speed, "low": speed, "high": speed}
    return result


def markdown(sizes: Mapping[int, Mapping[str, Mapping[str, float]]], notes: list[str]) -> str:
    names = list(next(iter(sizes.values())))
    lines = [f"| tokens/s (range over queues) | {' | '.join(f'batch {size}' for size in sizes)} |"]
    lines.append("|---" * (len(sizes) + 1) + "|")
    for name in names:
        cells = [
            f"{rows[name]['tok_per_s']:.0f} ({rows[name]['low']:.0f}–{rows[name]['high']:.0f})"
            for rows in sizes.values()
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", *notes, ""])


def main() -> None:
    """Simulate, write, print."""
    parser = argparse.ArgumentParser(
        prog="python -m sdsie_sglang.eval.lab_batch",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--traces", type=Path, default=TRACES)
    parser.add_argument("--cost-table", "--costs", dest="costs", type=Path)
    parser.add_argument("--sizes", type=count, nargs="+", default=[4, 16])
    parser.add_argument("--preset", choices=sorted(PRESETS), default="paper", help="thresholds of the entropy rules")
    parser.add_argument("--rounds", type=count, default=5, help="queues for each size")
    parser.add_argument("--lag", type=int, choices=(1, 2), default=LAG)
    parser.add_argument("--out", type=Path, default=TRACES.with_name("batch-h200-gears"), help="without an ending")
    options = parser.parse_args()
    table, traces = read_inputs(parser, options)
    for size in options.sizes:
        costs_at(parser, table, size)
    sizes = {
        size: play(traces.traces, table, size, options.preset, options.rounds, options.lag)
        for size in tqdm(options.sizes, desc="batch sizes")
    }
    record = {
        "kind": "simulation",
        "sizes": sizes,
        "preset": options.preset,
        "lag": options.lag,
        "costs": f"{table.models}; {table.where}. {table.method}",
        "command": this_command(),
        "date": today(),
    }
    notes = [f"`{record['command']}`, simulated.", f"\nCosts: {record['costs']}."]
    text = markdown(sizes, notes)
    options.out.with_suffix(".json").write_text(json.dumps(record) + "\n")
    options.out.with_suffix(".md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
