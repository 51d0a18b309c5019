"""The laboratory's tables, and the comparison of a server with the simulator."""

from pathlib import Path

import numpy as np
import pytest

from sdsie_sglang.eval.confirm import Served, compare
from sdsie_sglang.eval.contenders import contenders, left_out
from sdsie_sglang.eval.cost_table import read_costs
from sdsie_sglang.eval.lab import ALL, figures, groups, half, interval, markdown, play, summarise, verdict
from sdsie_sglang.eval.lab_figure import draw
from sdsie_sglang.eval.simulate import replay
from sdsie_sglang.eval.trace import TRACES, load
from sdsie_sglang.gears import PolicySettings, build_policy
from sdsie_sglang.gears.cost_table import Cell, CostTable

TRACES_27 = load(TRACES).traces


def whole_table(joules=False):
    cells = tuple(
        Cell(k=k, batch=1, ms=5.0 if k == 0 else 5.5 + k, joules=2.0 + k if joules else None) for k in range(8)
    )
    return CostTable(models="m", where="w", method="t", cells=cells)


@pytest.fixture(scope="module")
def summary():
    table = whole_table(joules=True)
    played = {name: play(each, TRACES_27[::4], table.at(1), 2) for name, each in contenders(table).items()}
    return summarise(played, TRACES_27[::4])


def test_every_contender_is_played_where_its_gears_have_prices():
    assert left_out(whole_table()) == []
    names = set(contenders(whole_table()))
    assert {"plain", "fixed K=7", "entropy paper", "cost gate", "SVIP", "AdaEDL", "oracle"} <= names
    assert {"SVIP", "SGLang accept EMA", "fixed K=3"} <= set(left_out(read_costs(None)))
    assert "fixed K=5" in contenders(read_costs(None))


def test_nobody_beats_the_oracle_and_plain_is_plain(summary):
    for group in summary.values():
        for row in group["rows"].values():
            assert row["over_oracle"] <= 1 + 1e-9
            assert row["regret"] == pytest.approx(1 / row["over_oracle"] - 1)
        assert group["rows"]["plain"]["tok_per_s"] == pytest.approx(200.0)
        assert group["rows"]["plain"]["j_per_token"] == pytest.approx(2.0)
        assert group["rows"][group["best_fixed"]]["over_best_fixed"] == 1.0


def test_the_report_says_what_it_is(summary, tmp_path):
    assert verdict(summary).startswith("Simulated")
    text = markdown(summary, "# x", ["note"])
    assert "| cost gate |" in text
    assert text.endswith("note\n")
    draw(summary, "s", tmp_path / "x.png")
    assert (tmp_path / "x.png").stat().st_size > 10_000


def test_headline_figures_say_that_they_are_simulated(summary):
    record = {"groups": summary, "command": "c", "date": "2026-01-01"}
    found = {figure.name: figure for figure in figures(record, whole_table(), Path("x.json"))}
    assert set(found) == {
        "cost_gate_over_best_worst_category",
        "cost_gate_over_oracle",
        "cost_gate_over_best_fixed",
    }
    default = figures(record, whole_table(), TRACES)
    assert {figure.record for figure in default} == {"eval/results/traces/demo-draft.npz"}
    assert all("simulated" in figure.note for figure in found.values())
    assert found["cost_gate_over_oracle"].value <= 1.0


def test_groups_cover_all_categories():
    found = groups(TRACES_27)
    assert len(found[ALL]) == 27
    assert sum(len(members) for name, members in found.items() if not name.startswith(ALL)) == 27


def test_intervals_hold_the_ratio_and_shrink_with_agreement():
    rng = np.random.default_rng(0)
    under = rng.random(30) + 1
    low, high = interval(1.2 * under, under)
    assert low == pytest.approx(1.2)
    assert high == pytest.approx(1.2)
    low, high = interval(1.2 * under * (1 + 0.2 * rng.standard_normal(30)), under)
    assert low < 1.2 < high + 0.1


def test_a_server_that_did_as_simulated_agrees():
    table, settings = whole_table(), {"policy": "entropy", "preset": "paper"}
    trace = TRACES_27[3].cut(60)
    run = replay(trace, build_policy(PolicySettings(**settings)), table.at(1), lag=1)
    gears = np.bincount(run.gears, minlength=8).tolist()
    answers = {trace.id: list(range(250))}
    served = Served("entropy", trace.id, list(range(60)), gears, run.ms / 1000 / 1.02)
    result = compare([served], settings, table, {trace.id: TRACES_27[3]}, answers, lag=1)
    assert (result.same_text, result.same_gears) == (1, 1)
    assert result.error == pytest.approx(1 / 1.02 - 1)
    other = Served("entropy", trace.id, [9, *range(1, 60)], gears[::-1], run.ms / 1000)
    result = compare([other], settings, table, {trace.id: TRACES_27[3]}, answers, lag=1)
    assert (result.same_text, result.same_gears) == (0, 0)


def test_a_cold_cost_gate_keeps_up_on_prompts_that_its_constants_were_not_chosen_on():
    """At the H200's costs: 0.99 of the better of plain and fixed K = 5 on every category, the learning included."""
    traces, table = half(TRACES_27, "held-out"), read_costs(None)
    wanted = {name: contenders(table)[name] for name in ("plain", "fixed K=5", "cost gate", "oracle")}
    found = summarise({name: play(each, traces, table.at(1), 8) for name, each in wanted.items()}, traces)
    worst = {name: group["rows"]["cost gate"]["over_best_constant"] for name, group in found.items()}
    assert min(worst.values()) >= 0.99, worst


def test_halves_part_the_prompts():
    seen, held_out = half(TRACES_27, "seen"), half(TRACES_27, "held-out")
    assert {t.id for t in seen} | {t.id for t in held_out} == {t.id for t in half(TRACES_27, "both")}
    assert (len(seen), len(held_out)) == (13, 14)
