"""What the laboratory's commands are given, read and checked before anything is played."""

import argparse
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from sdsie_sglang.eval.arguments import one_line, read_json
from sdsie_sglang.eval.cost_table import read_costs
from sdsie_sglang.eval.trace import TraceSet, load
from sdsie_sglang.gears import PolicySettings
from sdsie_sglang.gears.cost_table import CostTable, GearCosts, Objective


def read_inputs(parser: argparse.ArgumentParser, options: argparse.Namespace) -> tuple[CostTable, TraceSet]:
    """Of --cost-table and --traces; whether the folder of --out can be made is found out now."""
    with one_line(parser):
        table, traces = read_costs(options.costs), load(options.traces)
        options.out.parent.mkdir(parents=True, exist_ok=True)
    return table, traces


def costs_at(parser: argparse.ArgumentParser, table: CostTable, batch: int, objective: Objective = "time") -> GearCosts:
    """At one batch size, which the table must have measured around, with what `objective` needs."""
    with one_line(parser):
        costs = table.at(batch)
        costs.of(objective)
    return costs


def need_gears(parser: argparse.ArgumentParser, table: CostTable, gears: Iterable[int]) -> None:
    """Ends the command if the table has no price for one of them."""
    if missing := sorted(set(gears) - set(table.gears)):
        parser.error(f"the cost table has gears {list(table.gears)}, not {missing}")


def read_settings(parser: argparse.ArgumentParser, path: Path, table: CostTable) -> Mapping[str, Any]:
    """Settings of a policy, written by eval.tune, whose gears the table has."""
    with one_line(parser):
        settings = read_json(path, "settings file")
        gears = PolicySettings(**settings).gears
    need_gears(parser, table, gears)
    return settings
