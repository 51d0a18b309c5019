"""Cost tables from records that were made for something else.

    python -m sdsie_sglang.eval.cost_table OUT.json              # from the gear record of one H200: gears 0 and 5
    python -m sdsie_sglang.eval.cost_table OUT.json --estimate   # gears 1 to 7 estimated from its trace of gear 5

Both have batches 1 and 16 and no energies: a whole table, all of it measured, is what `eval.calibrate` writes.
"""

import argparse
import json
import re
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sdsie_sglang.eval import machine
from sdsie_sglang.eval.arguments import one_line
from sdsie_sglang.eval.headline import ROOT
from sdsie_sglang.gears.cost_table import Cell, CostTable, Engaging, load_cost_table
from sdsie_sglang.gears.limits import MAX_K

GEAR_RECORD = ROOT / "eval" / "results" / "gears" / "8b_1b.json"
GEAR = 5
GEARS = {"gear0": 0, "k5": GEAR}
WHOLE = (
    "wall time of a burst / its cycles, median of {repeats} bursts, prefill and the draft's first reading of the "
    "prompt included"
)
BEYOND = "wall time of a burst beyond a shorter one's / its further cycles, median of {repeats} bursts"
METHOD = (
    "ms a cycle = {how}; engaging = what the run that switches every 8 cycles took beyond its steady cycles, for "
    "each pair of switches; random weights, accept length simulated. Plain is gear 0 of this project's server, not "
    "SGLang's own; {gears}"
)
MEASURED = "gears other than 0 and 5 were not measured and are not played"
ESTIMATED = (
    "gears other than 0 and 5 are ESTIMATED: gear 5's time, and for each drafted token more or fewer that of one draft "
    "pass in the record's trace, as if verifying cost the same for each width"
)


def from_gear_record(record: Mapping[str, Any], *, estimate: bool = False) -> CostTable:
    """The table that a record of `scripts/bench_gears.py` allows: gear 0 and gear 5.

    Args:
        estimate: add all other gears, from the time of a draft pass. Raises ValueError if the record has no trace.
    """
    cells, engaging = [], []
    for batch, rows in record["rows"].items():
        for name, k in GEARS.items():
            ms = cycle_ms(rows[name])
            cells.append(Cell(k=k, batch=int(batch), ms=statistics.median(ms), ms_low=min(ms), ms_high=max(ms)))
        if "switching" in rows:  # of whole bursts: a shorter twin would have another mix of gears
            steady = statistics.mean(statistics.median(whole_cycle_ms(rows[name])) for name in GEARS)
            pair_ms = 16 * (statistics.median(whole_cycle_ms(rows["switching"])) - steady)
            engaging.append(Engaging(batch=int(batch), ms=max(0.0, pair_ms)))
        if estimate:
            each = draft_pass_ms(record, int(batch))
            for k in sorted(set(range(1, MAX_K + 1)) - {GEAR}):
                cells.append(Cell(k=k, batch=int(batch), ms=cells[-1].ms + (k - cells[-1].k) * each))
    gear0 = next(iter(record["rows"].values()))["gear0"]
    how = (BEYOND if "short" in gear0[0] else WHOLE).format(repeats=len(gear0))
    return CostTable(
        models="shapes of Llama-3.1-8B and Llama-3.2-1B, bf16",
        where=machine.where(record["machine"]),
        method=METHOD.format(how=how, gears=ESTIMATED if estimate else MEASURED),
        cells=tuple(cells),
        engaging=tuple(engaging),
        machine=record["machine"],
        command=record["command"],
        date=record["date"],
    )


def draft_pass_ms(record: Mapping[str, Any], batch: int) -> float:
    """One decode of the draft, from the trace of gear 5: of its graphs without the target the one with most kernels
    holds the four decodes after the extend. Raises ValueError if there is no such trace.
    """
    try:
        stages = record["profiles"][f"k{GEAR}, batch {batch}"]["stages"]
        kernels = {name: int(match[1]) for name in stages if (match := re.match(r"graph of (\d+) kernels", name))}
        decodes = max(kernels, key=lambda name: kernels[name])
    except (KeyError, ValueError):
        raise ValueError(f"the record has no trace of gear {GEAR} at batch {batch}") from None
    return float(stages[decodes]["span_us"]) / 1000.0 / (GEAR - 1)


def cycle_ms(bursts: Sequence[Mapping[str, Any]]) -> list[float]:
    """ms a cycle of each burst: what it took beyond its shorter twin (``short``), whose prompts are the same, for each
    cycle more. Without a twin as `whole_cycle_ms`."""
    if "short" not in bursts[0]:
        return whole_cycle_ms(bursts)
    pairs = [(burst, burst["short"]) for burst in bursts]
    return [1000.0 * (long["wall_s"] - short["wall_s"]) / (long["cycles"] - short["cycles"]) for long, short in pairs]


def whole_cycle_ms(bursts: Sequence[Mapping[str, Any]]) -> list[float]:
    """The same with prompts shared out among the cycles, and so a little too much."""
    return [1000.0 * burst["wall_s"] / burst["cycles"] for burst in bursts]


def read_costs(path: Path | None) -> CostTable:
    """A table from a file, or the one that the H200's gear record allows."""
    if path is None:
        return from_gear_record(json.loads(GEAR_RECORD.read_text()))
    return load_cost_table(path)


def main() -> None:
    """Write the table of the gear record."""
    parser = argparse.ArgumentParser(
        prog="python -m sdsie_sglang.eval.cost_table",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--record", type=Path, default=GEAR_RECORD, help="of scripts/bench_gears.py")
    parser.add_argument("--estimate", action="store_true", help="add gears that were not measured")
    options = parser.parse_args()
    with one_line(parser):
        table = from_gear_record(json.loads(options.record.read_text()), estimate=options.estimate)
        options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(table.model_dump_json(indent=1) + "\n")
    for cell in table.cells:
        print(f"gear {cell.k}, batch {cell.batch}: {cell.ms:.2f} ms")
    for cost in table.engaging:
        print(f"engaging, batch {cost.batch}: {cost.ms:.1f} ms")


if __name__ == "__main__":
    main()
