"""Mixed traffic: the queues are what they say, and the ratios are those of the simulator."""

import json
import sys

import numpy as np
import pytest

from sdsie_sglang.eval import lab_mixed
from sdsie_sglang.eval.cost_table import read_costs
from sdsie_sglang.eval.lab_mixed import GATE, ORACLE, PROSE, TRAFFIC, Kinds, joined, markdown, study, verdict
from sdsie_sglang.eval.simulate import replay
from sdsie_sglang.eval.trace import TRACES, load
from sdsie_sglang.gears import PolicySettings, build_policy
from sdsie_sglang.gears.cost_table import Cell, CostTable

ANSWERS = load(TRACES).traces
KINDS = Kinds.of(ANSWERS)
SHORT = tuple(trace.cut(40) for trace in ANSWERS)


def table(ms, batches=(1, 16)) -> CostTable:
    cells = tuple(Cell(k=k, batch=b, ms=value) for k, value in ms.items() for b in batches)
    return CostTable(models="m", where="w", method="t", cells=cells)


def kinds_of(queue):
    return ["code" if trace.is_code else "prose" if trace.category in PROSE else "other" for trace in queue]


def queue(name, size=16):
    return TRAFFIC[name].queue(KINDS, np.random.default_rng(1), size)


def test_a_conversation_goes_to_code_and_back():
    assert kinds_of(queue("conversation, a turn a request", 1)) == [
        *["prose"] * 2, *["code"] * 2, *["prose"] * 2, *["code"] * 2, *["prose"] * 2,
    ]  # fmt: skip


def test_batches_of_different_kinds():
    half = kinds_of(queue("16 at a time, half code"))
    assert half[:16].count("code") == 8
    there = kinds_of(queue("16 at a time, prose then code then prose"))
    assert there == [*["prose"] * 32, *["code"] * 32, *["prose"] * 32]
    every = queue("16 at a time, all kinds")
    assert len({trace.category for trace in every}) == 9


def test_a_joined_answer_is_its_parts():
    parts = (KINDS.prose[0], KINDS.code[0])
    whole = joined(parts)
    assert len(whole) == sum(map(len, parts))
    n = len(parts[0])
    assert whole.run[n - 1] == 0  # nothing is drafted across the seam
    np.testing.assert_array_equal(whole.entropy_bits[n:], parts[1].entropy_bits)
    costs = table({0: 1.0, 5: 2.0}).at(1)
    fixed = build_policy(PolicySettings(policy="fixed"))
    first, second, both = (replay(trace, fixed, costs) for trace in (*parts, whole))
    seam = len(both.gears) - len(first.gears) - len(second.gears)
    assert 0 <= seam <= 1  # at most the cycle that writes the second part's first token


def test_where_drafting_never_pays_the_gate_is_plain_but_for_exploring():
    found = study(SHORT, table({0: 1.0, 5: 50.0}), 2, 2)
    for traffic in found.values():
        assert traffic["best_constant"] == "plain"
        assert 0.9 < traffic["rows"]["plain"]["gate_over_it"] <= 1.0
        assert traffic["rows"]["fixed K=5"]["gate_over_it"] > 3


def test_where_drafting_is_free_the_gate_is_fixed():
    found = study(SHORT, table({0: 1.0, 5: 1.0}), 2, 2)
    for traffic in found.values():
        assert traffic["best_constant"] == "fixed K=5"
        assert traffic["rows"]["fixed K=5"]["gate_over_it"] == pytest.approx(1.0, abs=0.03)


def test_nobody_beats_the_oracle():
    found = study(SHORT, read_costs(None), 2, 2)
    singles = [traffic for traffic in found.values() if traffic["size"] == 1]
    assert len(singles) == 2
    for traffic in singles:
        best = traffic["rows"][ORACLE]["tok_per_s"]
        assert all(row["tok_per_s"] <= best + 1e-9 for row in traffic["rows"].values())
        assert traffic["rows"][GATE]["gate_over_it"] == 1.0


def test_a_table_of_batch_1_leaves_the_batches_out():
    found = study(SHORT, table({0: 1.0, 5: 2.0}, batches=(1,)), 1, 2)
    assert {traffic["size"] for traffic in found.values()} == {1}


def test_traces_without_code_are_refused():
    with pytest.raises(ValueError, match="no prose or no code"):
        Kinds.of([trace for trace in ANSWERS if not trace.is_code])


def test_record_and_page(tmp_path, monkeypatch):
    path = tmp_path / "costs.json"
    path.write_text(table({0: 5.0, 5: 12.0}).model_dump_json())
    argv = ["lab", "--cost-table", str(path), "--rounds", "1", "--out", str(tmp_path / "x")]
    monkeypatch.setattr(sys, "argv", argv)
    lab_mixed.main()
    record = json.loads((tmp_path / "x.json").read_text())
    assert record["kind"] == "simulation"
    assert record["left_out"] == []
    assert verdict(record["traffic"]) == record["verdict"]
    assert markdown(record) == (tmp_path / "x.md").read_text()
