"""The policy laboratory: every policy on the traces of 27 answers, at the costs that one machine measured.

    python -m sdsie_sglang.eval.lab                      # costs of the gear record of one H200: gears 0 and 5
    python -m sdsie_sglang.eval.lab --cost-table TABLE.json   # a table written by eval.calibrate

Writes NAME.json, NAME.md and NAME.png. These are simulations: the gears are those a server would run, greedy at
batch 1; the times are the cost table's.
"""

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import bootstrap
from tqdm import tqdm

from sdsie_sglang.eval.arguments import count
from sdsie_sglang.eval.contenders import Contender, contenders, left_out
from sdsie_sglang.eval.headline import Figure, in_repository, this_command, today, update
from sdsie_sglang.eval.lab_figure import draw
from sdsie_sglang.eval.lab_input import costs_at, read_inputs, read_settings
from sdsie_sglang.eval.prompts import CATEGORIES
from sdsie_sglang.eval.simulate import LAG
from sdsie_sglang.eval.trace import TRACES, Trace
from sdsie_sglang.gears.cost_table import CostTable, GearCosts

RESAMPLES = 2000
SEED = 469507
MAX_REPEATED = 0.3
"""An answer with more repeated 4-grams counts as looping, which flatters every draft."""
ALL, UNLOOPED = "all", "all without loops"
HALVES = ("both", "seen", "held-out")
"""The last constants of the cost gate that were changed were chosen on the prompts of the half "seen" alone."""


@dataclass(frozen=True)
class Played:
    """One contender on all answers, in the traces' order, mean over the orders it was played in.

    Args:
        tokens, ms: [answers]; joules: [answers], or None where the table has no energies.
        cycles: [answers, 8], cycles in each gear; engagements: [answers].
        answers_per_s: how fast it was simulated.
    """

    tokens: np.ndarray
    ms: np.ndarray
    joules: np.ndarray | None
    cycles: np.ndarray
    engagements: np.ndarray
    answers_per_s: float


def play(contender: Contender, traces: Sequence[Trace], costs: GearCosts, orders: int) -> Played:
    """Plays all answers; in several random orders if what comes first matters."""
    rng = np.random.default_rng(SEED)
    count = len(traces)
    sums = np.zeros((count, 12))
    rounds = orders if contender.learns else 1
    started = time.perf_counter()
    for _ in range(rounds):
        order = rng.permutation(count)
        for at, run in zip(order, contender.play([traces[i] for i in order], costs), strict=True):
            sums[at, :4] += (run.tokens, run.ms, run.joules or 0.0, run.engagements)
            sums[at, 4:] += np.bincount(run.gears, minlength=8)
    wall_s = time.perf_counter() - started
    mean = sums / rounds
    joules = None if costs.joules is None else mean[:, 2]
    return Played(mean[:, 0], mean[:, 1], joules, mean[:, 4:], mean[:, 3], count * rounds / wall_s)


def groups(traces: Sequence[Trace]) -> dict[str, np.ndarray]:
    """Which answers belong to each category, to all, and to all that do not loop; without empty groups."""
    by_category = np.array([trace.category for trace in traces])
    found = {category: np.flatnonzero(by_category == category) for category in CATEGORIES}
    found[ALL] = np.arange(len(traces))
    found[UNLOOPED] = np.flatnonzero([trace.repeated <= MAX_REPEATED for trace in traces])
    return {name: members for name, members in found.items() if len(members)}


def half(traces: Sequence[Trace], which: str) -> tuple[Trace, ...]:
    """The answers of one of `HALVES`, in their order; which is which is fixed by a seed."""
    order = np.random.default_rng(7).permutation(len(traces))
    cut = len(traces) // 2
    chosen = {"both": order, "seen": order[:cut], "held-out": order[cut:]}[which]
    return tuple(traces[i] for i in sorted(chosen))


def speed(played: Played, members: np.ndarray) -> float:
    """Tokens a second over these answers."""
    return float(1000.0 * played.tokens[members].sum() / played.ms[members].sum())


def interval(over: np.ndarray, under: np.ndarray) -> tuple[float, float]:
    """95 % bootstrap interval over prompts of sum(over) / sum(under), the same answers on both sides."""
    if len(over) < 2 or np.array_equal(over, under):
        return (float(over.sum() / under.sum()),) * 2
    done = bootstrap(
        (over, under),
        lambda a, b, axis=-1: a.sum(axis) / b.sum(axis),
        paired=True,
        vectorized=True,
        n_resamples=RESAMPLES,
        method="percentile",
        rng=np.random.default_rng(SEED),
    ).confidence_interval
    return float(done.low), float(done.high)


def best_fixed(played: Mapping[str, Played], members: np.ndarray) -> str:
    """The fixed K with the most tokens a second over these answers; plain decoding is not one."""
    fixed = [name for name in played if name.startswith("fixed ")]
    return max(fixed, key=lambda name: speed(played[name], members))


def summarise(played: Mapping[str, Played], traces: Sequence[Trace]) -> dict[str, Any]:
    """Per group and contender: tokens/s, J/token, and ratios with intervals.

    `regret` is the share of time beyond the oracle's.
    """
    result: dict[str, Any] = {}
    for group, members in groups(traces).items():
        reference = best_fixed(played, members)
        constant = max(reference, "plain", key=lambda name: speed(played[name], members))
        rows = {}
        for name, each in played.items():
            low, high = interval(played[reference].ms[members], each.ms[members])
            regret_low, regret_high = interval(each.ms[members], played["oracle"].ms[members])
            tokens = each.tokens[members].sum()
            rows[name] = {
                "tok_per_s": speed(each, members),
                "over_best_fixed": speed(each, members) / speed(played[reference], members),
                "over_best_fixed_low": low,
                "over_best_fixed_high": high,
                "over_best_constant": speed(each, members) / speed(played[constant], members),
                "over_oracle": speed(each, members) / speed(played["oracle"], members),
                "regret": float(each.ms[members].sum() / played["oracle"].ms[members].sum()) - 1,
                "regret_low": regret_low - 1,
                "regret_high": regret_high - 1,
                "j_per_token": None if each.joules is None else float(each.joules[members].sum() / tokens),
                "gear_share": (each.cycles[members].sum(0) / each.cycles[members].sum()).round(4).tolist(),
                "engagements_per_100_tokens": float(100 * each.engagements[members].sum() / tokens),
            }
        result[group] = {"prompts": len(members), "best_fixed": reference, "best_constant": constant, "rows": rows}
    return result


def verdict(summary: Mapping[str, Any]) -> str:
    """The answer to the question, from the figures: can a gate beat the best fixed K?"""
    over_all = summary[ALL]
    gates = {n: r for n, r in over_all["rows"].items() if n.startswith(("entropy", "cost"))}
    name, best = max(gates.items(), key=lambda item: item[1]["over_best_fixed"])
    sure = best["over_best_fixed_low"] > 1.0
    says = "beats the best fixed K" if sure else "does not beat the best fixed K beyond the interval"
    worst = min(
        (g["rows"]["cost gate"]["over_best_constant"], category)
        for category, g in summary.items()
        if category not in (ALL, UNLOOPED)
    )
    cost, oracle = over_all["rows"]["cost gate"], over_all["rows"]["oracle"]
    return (
        f"Simulated, greedy, batch 1: the best gate, {name}, {says} ({over_all['best_fixed']}): "
        f"{best['over_best_fixed']:.3f} ({best['over_best_fixed_low']:.3f} to {best['over_best_fixed_high']:.3f}). "
        f"An oracle would reach {oracle['over_best_fixed']:.3f}. The cost gate reaches {cost['over_best_fixed']:.3f} "
        f"of the best fixed K, {cost['over_oracle']:.3f} of the oracle, and in its worst category ({worst[1]}) "
        f"{worst[0]:.3f} of the better of plain and that category's best fixed K."
    )


def markdown(summary: Mapping[str, Any], heading: str, notes: Sequence[str]) -> str:
    """Tokens/s per group, one row a contender; then the ratios over all."""
    names = list(summary)
    lines = [heading, ""]
    lines += [f"| tokens/s | {' | '.join(names)} |", "|" + "---|" * (len(names) + 1)]
    for contender in summary[ALL]["rows"]:
        speeds = [f"{summary[group]['rows'][contender]['tok_per_s']:.0f}" for group in names]
        lines.append(f"| {contender} | {' | '.join(speeds)} |")
    lines += [
        "",
        "| all prompts | over best fixed K (95 % interval) | share of oracle | J/token | gear 0 | engaged anew |",
    ]
    lines.append("|---|---|---|---|---|---|")
    for contender, row in summary[ALL]["rows"].items():
        joules = "–" if row["j_per_token"] is None else f"{row['j_per_token']:.3f}"
        lines.append(
            f"| {contender} | {row['over_best_fixed']:.3f} ({row['over_best_fixed_low']:.3f} to "
            f"{row['over_best_fixed_high']:.3f}) | {row['over_oracle']:.3f} | {joules} | "
            f"{100 * row['gear_share'][0]:.0f} % of cycles | {row['engagements_per_100_tokens']:.1f} / 100 tokens |"
        )
    return "\n".join([*lines, "", *notes, ""])


def report(traces: Sequence[Trace], table: CostTable, options: argparse.Namespace) -> dict[str, Any]:
    """Plays everything and returns the record."""
    costs, tuned = table.at(options.batch), options.tuned
    played = {
        name: play(contender, traces, costs, options.orders)
        for name, contender in tqdm(contenders(table, options.lag, options.objective, tuned).items(), desc="contenders")
    }
    summary = summarise(played, traces)
    return {
        "kind": "simulation",
        "verdict": verdict(summary),
        "left_out": left_out(table),
        "lag": options.lag,
        "objective": options.objective,
        "orders": options.orders,
        "prompts": options.prompts,
        "tuned": tuned,
        "answers_per_s": {name: round(each.answers_per_s) for name, each in played.items()},
        "cost_table": table.model_dump(exclude={"machine"}),
        "groups": summary,
        "command": this_command(),
        "date": today(),
    }


def figures(record: dict[str, Any], table: CostTable, path: Path) -> list[Figure]:
    """The headline figures of the cost gate."""
    summary = record["groups"]
    row = summary[ALL]["rows"]["cost gate"]
    worst = min(
        group["rows"]["cost gate"]["over_best_constant"]
        for name, group in summary.items()
        if name not in (ALL, UNLOOPED)
    )
    values: dict[str, tuple[float, float | None, float | None, str]] = {
        "cost_gate_over_best_worst_category": (worst, None, None, "required 0.99"),
        "cost_gate_over_oracle": (row["over_oracle"], None, None, "required 0.93"),
        "cost_gate_over_best_fixed": (
            row["over_best_fixed"],
            row["over_best_fixed_low"],
            row["over_best_fixed_high"],
            f"best fixed is {summary[ALL]['best_fixed']}; 95 % interval over prompts",
        ),
    }
    return [
        Figure(
            name=name,
            value=round(value, 4),
            low=low,
            high=high,
            unit="1",
            where=table.where,
            record=in_repository(path),
            command=record["command"],
            date=record["date"],
            note=f"simulated on traces of the demo pair, costs of {table.models}, gears {list(table.gears)}; {note}",
        )
        for name, (value, low, high, note) in values.items()
    ]


def main() -> None:
    """Simulate, write, print."""
    parser = argparse.ArgumentParser(
        prog="python -m sdsie_sglang.eval.lab",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--traces", type=Path, default=TRACES)
    parser.add_argument(
        "--cost-table",
        "--costs",
        dest="costs",
        type=Path,
        help="cost table (default: the H200's gear record, gears 0 and 5)",
    )
    parser.add_argument("--batch", type=count, default=1, help="whose costs to take; one request is simulated")
    parser.add_argument("--lag", type=int, choices=(1, 2), default=LAG, help="1 without overlap scheduling")
    parser.add_argument("--objective", choices=("time", "energy"), default="time")
    parser.add_argument("--orders", type=count, default=5, help="random orders of the prompts for what learns")
    parser.add_argument(
        "--prompts",
        choices=HALVES,
        default="both",
        help="half of the prompts: those that the cost gate's last constants were chosen on, or the others",
    )
    parser.add_argument("--tuned", type=Path, help="settings of an entropy policy, written by eval.tune")
    parser.add_argument("--out", type=Path, default=TRACES.with_name("lab-h200-gears"), help="without an ending")
    parser.add_argument("--headline", action="store_true", help="write the cost gate's figures to headline.json")
    options = parser.parse_args()
    table, read = read_inputs(parser, options)
    costs_at(parser, table, options.batch, options.objective)
    if options.tuned is not None:
        options.tuned = read_settings(parser, options.tuned, table)
    traces = half(read.traces, options.prompts)
    if not any(table.gears):
        parser.error("the cost table has gear 0 alone: there is nothing to compare")
    record = {"traces": read.about, **report(traces, table, options)}
    notes = [record["verdict"]]
    if record["left_out"]:
        notes.append(f"\nNot played, for the table lacks their gears: {', '.join(record['left_out'])}.")
    notes.append(f"\nCosts: {table.models}; {table.where}. {table.method}.")
    heading = f"# Simulated on {len(traces)} answers\n\n`{record['command']}`"
    text = markdown(record["groups"], heading, notes)
    options.out.with_suffix(".json").write_text(json.dumps(record, separators=(",", ":")) + "\n")
    options.out.with_suffix(".md").write_text(text)
    draw(record["groups"], f"{table.models}; {table.where}", options.out.with_suffix(".png"))
    if options.headline:
        update(figures(record, table, options.out.with_suffix(".json")))
    print(text)


if __name__ == "__main__":
    main()
