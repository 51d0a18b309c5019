"""The summary of a trace, on made-up events whose times are known."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

from profile_cycle import covered_us, summarise, table, timeline

GRAPHS = ((50, 5.0), (60, 5.0), (70, 10.0))  # kernels and their spacing in us; the last is the target's
LOOSE = 3
GAP_US = 1.0
PERIOD_US = sum(count * us for count, us in GRAPHS) + LOOSE * 4.0


def events(cycles: int) -> list[dict]:
    """Cycles of three graphs and a few loose kernels, one after another without a pause between them."""
    made, now, correlation = [], 0.0, 0
    for _ in range(cycles):
        for count, us in GRAPHS:
            correlation += 1
            made.append({"cat": "cuda_runtime", "name": "cudaGraphLaunch", "ts": now, "dur": 4.0})
            for i in range(count):
                name = "nvjet_gemm" if i % 2 else "rms_norm"
                args = {"correlation": correlation}
                made.append({"cat": "kernel", "name": name, "ts": now, "dur": us - GAP_US, "args": args})
                now += us
        for _ in range(LOOSE):
            correlation += 1
            args = {"correlation": correlation}
            made.append({"cat": "kernel", "name": "fill_kernel", "ts": now, "dur": 4.0 - GAP_US, "args": args})
            now += 4.0
    return made


def test_means_are_those_of_one_cycle():
    profile = summarise(events(8))
    assert profile["period_us"] == pytest.approx(PERIOD_US)
    assert profile["idle_us"] == pytest.approx((50 + 60 + 70 + LOOSE) * GAP_US)
    assert profile["host_calls"] == {"cudaGraphLaunch": pytest.approx(3.0)}
    target = profile["stages"]["target, graph of 70 kernels"]
    assert (target["launches"], target["busy_us"]) == (pytest.approx(1.0), pytest.approx(70 * 9.0))
    assert target["kinds"]["gemm"] == (pytest.approx(35.0), pytest.approx(35 * 9.0))
    assert profile["stages"]["loose kernels"]["kernels"] == pytest.approx(LOOSE)


def test_a_trace_without_whole_cycles_is_refused():
    with pytest.raises(ValueError, match="cycles"):
        summarise(events(2))
    with pytest.raises(ValueError, match="no graph"):
        summarise([{"cat": "kernel", "name": "fill", "ts": 0.0, "dur": 1.0, "args": {"correlation": 1}}])


def test_overlapping_kernels_count_once():
    assert covered_us([(0.0, 4.0), (1.0, 2.0), (3.0, 6.0), (8.0, 9.0)]) == 7.0


def test_gaps_are_named_by_the_kernels_around_them():
    longest = summarise(events(8))["gaps"]
    around = {(gap["after"], gap["before"]): (gap["times"], gap["us"]) for gap in longest}
    assert around["fill_kernel", "fill_kernel"] == (pytest.approx(LOOSE - 1), pytest.approx((LOOSE - 1) * GAP_US))
    assert around["nvjet_gemm", "rms_norm"] == (pytest.approx(2.0), pytest.approx(2 * GAP_US)), "graph to graph"


def test_a_timeline_has_every_graph_and_the_idle_time_before_it():
    rows = timeline(events(2))
    assert [row["kernels"] for row in rows] == [50, 60, 70, 50, 60, 70]
    assert rows[1]["start_us"] == pytest.approx(50 * 5.0)
    assert rows[1]["end_us"] == pytest.approx(50 * 5.0 + 60 * 5.0 - GAP_US)
    assert rows[3]["idle_us"] == pytest.approx((LOOSE + 1) * GAP_US)


def test_the_table_names_every_stage():
    record = {
        "machine": {"gpus": [{"name": "a GPU"}], "cores": 1, "cpu": "a CPU"},
        "date": "2026-01-01",
        "command": "measure",
        "profiles": {"k5, batch 1": summarise(events(8))},
        "timelines": {"switching": timeline(events(2))},
    }
    text = table(record)
    assert "### k5, batch 1" in text
    assert text.count("| graph of") == 2
    assert "| target, graph of 70 kernels | 1.0 | 70 |" in text
    assert "### switching, graph by graph" in text
    assert "fill_kernel → fill_kernel" in text
