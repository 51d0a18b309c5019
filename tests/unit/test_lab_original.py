"""The original's two tables, replayed: what must hold whatever the costs."""

import json
import sys

import numpy as np
import pytest

from sdsie_sglang.eval import lab_original
from sdsie_sglang.eval.cost_table import read_costs
from sdsie_sglang.eval.lab_original import SWEEP, movement, sweep, threshold_table
from sdsie_sglang.eval.simulate import LAG, replay
from sdsie_sglang.eval.trace import TRACES, load
from sdsie_sglang.gears import PolicySettings, build_policy
from sdsie_sglang.gears.cost_table import Cell, CostTable, GearCosts

ANSWERS = load(TRACES).traces
H200 = read_costs(None).at(1)
SAME = GearCosts({0: 1.0, 5: 1.0}, None, 0.0)
"""A K-cycle as cheap as a plain one: then drafting can only help."""


def test_throughput_moves_over_the_nine_settings():
    rows = sweep(ANSWERS, H200, LAG)
    assert len(rows) == 9
    assert movement(rows)["fastest_over_slowest"] > 1.05
    shares = [row["active_share"] for row in rows]
    assert shares == sorted(shares)
    assert shares[0] < 0.05
    assert shares[-1] > 0.34  # the original's most active setting


def test_where_drafting_is_free_more_of_it_is_faster():
    rows = sweep(ANSWERS, SAME, LAG)
    assert movement(rows)["rank_correlation_with_activity"] == pytest.approx(1.0)
    assert all(row["over_plain"] >= 1.0 for row in rows)


def test_a_gate_that_nothing_executes_would_not_move():
    """The trap: costs that do not depend on the gear, and a draft that is never right."""
    idle = [
        type(trace)(**{**vars(trace), "run": np.zeros_like(trace.run)}) for trace in ANSWERS[:6]
    ]  # fmt: skip
    moved = movement(sweep(idle, SAME, LAG))
    assert moved["fastest_over_slowest"] == pytest.approx(1.0)
    assert moved["rank_correlation_with_activity"] == 0.0


def test_the_table_is_the_simulators():
    rows = threshold_table(ANSWERS, H200, LAG)
    assert list(rows) == ["Poem", "Physics", "Code"]
    code = next(trace for trace in ANSWERS if trace.id == "reference-code")
    run = replay(
        code, build_policy(PolicySettings(policy="entropy", theta_low=0.55, theta_high=1.25, alpha=0.35)), H200
    )
    plain = replay(code, build_policy(PolicySettings(policy="plain")), H200)
    assert rows["Code"]["paper"]["over_plain"] == pytest.approx(plain.ms / run.ms)
    assert rows["Code"]["paper"]["active_share"] == pytest.approx(np.mean([k > 0 for k in run.gears]))
    assert rows["Code"]["plain_tok_per_s"] == pytest.approx(1000 / H200.ms[0])


def test_there_are_nine_different_settings():
    assert len(set(SWEEP)) == 9
    assert all(low < high for low, high in SWEEP)


def test_record_and_page(tmp_path, monkeypatch, capsys):
    table = CostTable(models="m", where="w", method="t", cells=tuple(Cell(k=k, batch=1, ms=5.0 + k) for k in (0, 3, 5)))
    path = tmp_path / "costs.json"
    path.write_text(table.model_dump_json())
    monkeypatch.setattr(sys, "argv", ["lab", "--cost-table", str(path), "--out", str(tmp_path / "x")])
    lab_original.main()
    record = json.loads((tmp_path / "x.json").read_text())
    assert record["kind"] == "simulation"
    assert record["costs"] == "m; w"
    text = (tmp_path / "x.md").read_text()
    assert "original −10.5 %" in text
    assert "Poem (its answer loops)" in text
    assert record["verdict"] in text


def test_a_table_without_gear_5_is_refused(tmp_path, monkeypatch, capsys):
    cells = (Cell(k=0, batch=1, ms=5.0), Cell(k=3, batch=1, ms=5.0))
    path = tmp_path / "costs.json"
    path.write_text(CostTable(models="m", where="w", method="t", cells=cells).model_dump_json())
    monkeypatch.setattr(sys, "argv", ["lab", "--cost-table", str(path), "--out", str(tmp_path / "x")])
    with pytest.raises(SystemExit) as caught:
        lab_original.main()
    assert caught.value.code == 2
    assert "has gears [0, 3], not [5]" in capsys.readouterr().err
