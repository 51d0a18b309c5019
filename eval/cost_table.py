"""Cost tables from records that were made for something else.

`python -m sdsie_sglang.eval.cost_table OUT.json` writes one from the gear record of one H200. It has gears 0 and 5
at batches 1 and 16 and no energies: a whole table is what `eval.calibrate` measures.
"""

import argparse
import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sdsie_sglang.eval import machine
from sdsie_sglang.eval.headline import ROOT
from sdsie_sglang.gears.cost_table import Cell, CostTable, Engaging, load_cost_table

GEAR_RECORD = ROOT / "eval" / "results" / "gears" / "8b_1b_fa3.json"
GEARS = {"gear0": 0, "k5": 5}
METHOD = (
    "ms a cycle = wall time of a burst / its cycles, median of {repeats} bursts, prefill and the draft's first reading "
    "of the prompt included; engaging = what the run that switches every 8 cycles took beyond its steady cycles, for "
    "each pair of switches; random weights, accept length simulated"
)


def from_gear_record(record: Mapping[str, Any]) -> CostTable:
    """The table that a record of `scripts/bench_gears.py` allows: gear 0 and gear 5."""
    cells, engaging = [], []
    for batch, rows in record["rows"].items():
        for name, k in GEARS.items():
            ms = _cycle_ms(rows[name])
            cells.append(Cell(k=k, batch=int(batch), ms=statistics.median(ms), ms_low=min(ms), ms_high=max(ms)))
        steady = statistics.mean(cell.ms for cell in cells[-2:])
        if "switching" in rows:
            pair_ms = 16 * (statistics.median(_cycle_ms(rows["switching"])) - steady)
            engaging.append(Engaging(batch=int(batch), ms=max(0.0, pair_ms)))
    repeats = len(next(iter(record["rows"].values()))["gear0"])
    return CostTable(
        models="shapes of Llama-3.1-8B and Llama-3.2-1B, bf16",
        where=machine.where(record["machine"]),
        method=METHOD.format(repeats=repeats),
        cells=tuple(cells),
        engaging=tuple(engaging),
        machine=record["machine"],
        command=record["command"],
        date=record["date"],
    )


def _cycle_ms(bursts: Sequence[Mapping[str, float]]) -> list[float]:
    return [1000.0 * burst["wall_s"] / burst["cycles"] for burst in bursts]


def read_costs(path: Path | None) -> CostTable:
    """A table from a file, or the one that the H200's gear record allows."""
    if path is None:
        return from_gear_record(json.loads(GEAR_RECORD.read_text()))
    return load_cost_table(path)


def main() -> None:
    """Write the table of the gear record."""
    parser = argparse.ArgumentParser(prog="python -m sdsie_sglang.eval.cost_table", description=__doc__)
    parser.add_argument("out", type=Path)
    options = parser.parse_args()
    table = read_costs(None)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(table.model_dump_json(indent=1) + "\n")
    for cell in table.cells:
        print(f"gear {cell.k}, batch {cell.batch}: {cell.ms:.2f} ms")
    for cost in table.engaging:
        print(f"engaging, batch {cost.batch}: {cost.ms:.1f} ms")


if __name__ == "__main__":
    main()
