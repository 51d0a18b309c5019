"""Mixed traffic: text that goes from prose to code and back, and 16 requests of different kinds at a time.

    python -m sdsie_sglang.eval.lab_mixed                           # costs of the gear record of one H200
    python -m sdsie_sglang.eval.lab_mixed --cost-table TABLE.json   # a table written by eval.calibrate

The cost gate against plain, each fixed K and the entropy presets, on the same queues. Every queue is a server's life:
what the gate has learnt goes on from request to request, and it starts each queue knowing nothing. Writes NAME.json
and NAME.md. Simulated: gears as in a server, greedy; times are the cost table's.
"""

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from sdsie_sglang.eval.arguments import count, one_line
from sdsie_sglang.eval.headline import this_command, today
from sdsie_sglang.eval.lab import SEED
from sdsie_sglang.eval.lab_input import read_inputs
from sdsie_sglang.eval.oracle import plays_oracle
from sdsie_sglang.eval.simulate import LAG, plays_policy
from sdsie_sglang.eval.simulate_batch import mixed_queue, replay_batch
from sdsie_sglang.eval.trace import TRACES, Trace
from sdsie_sglang.gears import PRESETS, Policy, PolicySettings, build_policy
from sdsie_sglang.gears.cost import CostPolicy
from sdsie_sglang.gears.cost_table import CostTable

PROSE = ("writing", "roleplay", "humanities")
GATE, ORACLE = "cost gate", "oracle"
Build = Callable[[], Policy]


def joined(parts: Sequence[Trace]) -> Trace:
    """One answer whose text goes on from part to part; nothing is drafted across a seam."""
    return Trace(
        id="+".join(part.id for part in parts),
        category="mixed",
        is_code=False,
        repeated=float(np.average([part.repeated for part in parts], weights=[len(part) for part in parts])),
        entropy_bits=np.concatenate([part.entropy_bits for part in parts]),
        run=np.concatenate([part.run for part in parts]),
        draft_entropy_bits=np.concatenate([part.draft_entropy_bits for part in parts]),
        draft_top_probability=np.concatenate([part.draft_top_probability for part in parts]),
    )


@dataclass(frozen=True)
class Kinds:
    """Traces by what they are."""

    prose: tuple[Trace, ...]
    code: tuple[Trace, ...]
    every: tuple[Trace, ...]

    @classmethod
    def of(cls, traces: Sequence[Trace]) -> "Kinds":
        """Raises ValueError if there is no prose or no code."""
        prose = tuple(trace for trace in traces if trace.category in PROSE)
        code = tuple(trace for trace in traces if trace.is_code)
        if not prose or not code:
            raise ValueError("the traces hold no prose or no code")
        return cls(prose, code, tuple(traces))


def conversation(kinds: Kinds, rng: np.random.Generator, size: int) -> list[Trace]:
    """A turn is a request: two of prose, two of code, and so on, ending in prose."""
    prose, code = mixed_queue(kinds.prose, 6, rng), mixed_queue(kinds.code, 4, rng)
    return [*prose[:2], *code[:2], *prose[2:4], *code[2:], *prose[4:]]


def one_answer(kinds: Kinds, rng: np.random.Generator, size: int) -> list[Trace]:
    """Six answers, each of prose, code and prose."""
    prose, code = mixed_queue(kinds.prose, 12, rng), mixed_queue(kinds.code, 6, rng)
    return [joined((prose[2 * i], code[i], prose[2 * i + 1])) for i in range(6)]


def all_kinds(kinds: Kinds, rng: np.random.Generator, size: int) -> list[Trace]:
    """All categories in random order."""
    return mixed_queue(kinds.every, 4 * size, rng)


def half_and_half(kinds: Kinds, rng: np.random.Generator, size: int) -> list[Trace]:
    """Prose and code by turns, so that about half of a batch is code."""
    prose, code = mixed_queue(kinds.prose, 2 * size, rng), mixed_queue(kinds.code, 2 * size, rng)
    return [trace for pair in zip(prose, code, strict=True) for trace in pair]


def there_and_back(kinds: Kinds, rng: np.random.Generator, size: int) -> list[Trace]:
    """Twice a batch of prose, then as much code, then prose again."""
    prose = mixed_queue(kinds.prose, 4 * size, rng)
    return [*prose[: 2 * size], *mixed_queue(kinds.code, 2 * size, rng), *prose[2 * size :]]


@dataclass(frozen=True)
class Traffic:
    """One kind of traffic.

    Args:
        size: requests at a time; queue: those of one server's life, in the order of their arrival.
    """

    size: int
    queue: Callable[[Kinds, np.random.Generator, int], list[Trace]]


TRAFFIC = {
    "conversation, a turn a request": Traffic(1, conversation),
    "prose, code and prose in one answer": Traffic(1, one_answer),
    "16 at a time, all kinds": Traffic(16, all_kinds),
    "16 at a time, half code": Traffic(16, half_and_half),
    "16 at a time, prose then code then prose": Traffic(16, there_and_back),
}


def players(table: CostTable) -> dict[str, Build]:
    """Everything that the table has the gears for."""
    found: dict[str, Build] = {"plain": lambda: build_policy(PolicySettings(policy="plain"))}
    for k in table.gears[1:]:
        found[f"fixed K={k}"] = lambda k=k: build_policy(PolicySettings(policy="fixed", k=k))  # type: ignore[misc]
    for preset in PRESETS if 5 in table.gears else ():
        found[f"entropy {preset}"] = lambda preset=preset: build_policy(  # type: ignore[misc]
            PolicySettings(policy="entropy", preset=preset)
        )
    found[GATE] = lambda: CostPolicy(table)
    return found


def tok_per_s(queue: Sequence[Trace], size: int, build: Build, table: CostTable, lag: int) -> float:
    """Of one policy over one queue."""
    costs = table.at(size)
    if size > 1:
        return replay_batch(queue, size, build(), costs, lag).tok_per_s
    runs = plays_policy(build, lag)(queue, costs)
    return 1000.0 * sum(run.tokens for run in runs) / sum(run.ms for run in runs)


def best_tok_per_s(queue: Sequence[Trace], table: CostTable) -> float:
    """Of the oracle, one request at a time."""
    runs = plays_oracle()(queue, table.at(1))
    return 1000.0 * sum(run.tokens for run in runs) / sum(run.ms for run in runs)


def study(
    traces: Sequence[Trace], table: CostTable, rounds: int, lag: int, on_round: Callable[[], object] = lambda: None
) -> dict[str, dict[str, Any]]:
    """Per kind of traffic and player: mean tokens/s over the queues, and the gate's ratio to it with its range.

    Raises:
        ValueError: no prose or code among the traces.
    """
    kinds, found = Kinds.of(traces), {}
    for name, traffic in TRAFFIC.items():
        if traffic.size > table.batches[-1]:
            continue
        speeds: dict[str, list[float]] = {}
        for round_ in range(rounds):
            queue = traffic.queue(kinds, np.random.default_rng(SEED + round_), traffic.size)
            for player, build in players(table).items():
                speeds.setdefault(player, []).append(tok_per_s(queue, traffic.size, build, table, lag))
            if traffic.size == 1:
                speeds.setdefault(ORACLE, []).append(best_tok_per_s(queue, table))
            on_round()
        gate = np.array(speeds[GATE])
        rows = {}
        for player, values in speeds.items():
            ratios = gate / np.array(values)
            rows[player] = {
                "tok_per_s": float(np.mean(values)),
                "gate_over_it": float(np.exp(np.mean(np.log(ratios)))),
                "gate_over_it_low": float(ratios.min()),
                "gate_over_it_high": float(ratios.max()),
            }
        constants = [player for player in rows if player == "plain" or player.startswith("fixed")]
        best = max(constants, key=lambda player: rows[player]["tok_per_s"])
        found[name] = {"size": traffic.size, "best_constant": best, "rows": rows}
    return found


def verdict(found: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """A sentence for each kind of traffic."""
    lines = []
    for name, traffic in found.items():
        best, rows = traffic["best_constant"], traffic["rows"]
        row = rows[best]
        ceiling = f", and {rows[ORACLE]['gate_over_it']:.3f} of the oracle" if ORACLE in rows else ""
        lines.append(
            f"{name}: the cost gate makes {row['gate_over_it']:.3f} ({row['gate_over_it_low']:.3f} to "
            f"{row['gate_over_it_high']:.3f}) of the best constant gear, {best}{ceiling}."
        )
    return lines


def markdown(record: Mapping[str, Any]) -> str:
    """One table of tokens/s, one of the gate's ratios."""
    found = record["traffic"]
    players_ = list(dict.fromkeys(player for traffic in found.values() for player in traffic["rows"]))
    lines = [f"# Mixed traffic (simulated, {record['rounds']} queues each)", "", f"`{record['command']}`", ""]
    for head, cell in (
        ("tokens/s", lambda row: f"{row['tok_per_s']:.0f}"),
        (
            "cost gate over it (range over queues)",
            lambda row: f"{row['gate_over_it']:.3f} ({row['gate_over_it_low']:.3f} to {row['gate_over_it_high']:.3f})",
        ),
    ):
        lines += [f"| {head} | {' | '.join(found)} |", "|---" * (len(found) + 1) + "|"]
        for player in players_:
            cells = [cell(traffic["rows"][player]) if player in traffic["rows"] else "–" for traffic in found.values()]
            lines.append(f"| {player} | {' | '.join(cells)} |")
        lines.append("")
    return "\n".join([*lines, *(f"* {line}" for line in record["verdict"]), "", f"Costs: {record['costs']}.", ""])


def main() -> None:
    """Simulate, write, print."""
    parser = argparse.ArgumentParser(
        prog="python -m sdsie_sglang.eval.lab_mixed",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--traces", type=Path, default=TRACES)
    parser.add_argument("--cost-table", "--costs", dest="costs", type=Path)
    parser.add_argument("--rounds", type=count, default=20, help="queues for each kind of traffic")
    parser.add_argument("--lag", type=int, choices=(1, 2), default=LAG, help="1 without overlap scheduling")
    parser.add_argument("--out", type=Path, default=TRACES.with_name("mixed-h200-gears"), help="without an ending")
    options = parser.parse_args()
    table, traces = read_inputs(parser, options)
    with one_line(parser):
        Kinds.of(traces.traces)
    with tqdm(total=len(TRAFFIC) * options.rounds, desc="queues") as progress:
        found = study(traces.traces, table, options.rounds, options.lag, progress.update)
    record = {
        "kind": "simulation",
        "verdict": verdict(found),
        "traffic": found,
        "left_out": [name for name in TRAFFIC if name not in found],
        "rounds": options.rounds,
        "lag": options.lag,
        "costs": f"{table.models}; {table.where}. {table.method}",
        "command": this_command(),
        "date": today(),
    }
    text = markdown(record)
    options.out.with_suffix(".json").write_text(json.dumps(record, indent=1) + "\n")
    options.out.with_suffix(".md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
