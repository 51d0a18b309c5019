"""What the whole-model benchmark quotes: cycles as measured, accept lengths of calibrations that are as fast."""

import sys
from pathlib import Path

import pytest

ACCEPT = {
    "g128": {1: 1.5, 2: 2.0},
    "mse": {1: 1.8, 2: 2.5},
    "awq": {1: 2.0, 2: 3.0},
    "g32": {1: 1.9, 2: 2.9},
}


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "scripts"))
    import bench_int4_model

    yield bench_int4_model
    sys.modules.pop("bench_int4_model")


def self_row(cycle_ms, accept, tokens=101.0, prefill_s=0.0):
    wall_s = prefill_s + (tokens - 1) / accept * cycle_ms / 1e3
    return {
        "tokens": tokens, "wall_s": wall_s, "tok_per_s": tokens / wall_s, "accept_length": accept, "cycles": 1.0,
        "cycle_ms": cycle_ms, "prefill_s": prefill_s,
    }  # fmt: skip


def record(**self_rows):
    plain = {"tokens": 101.0, "wall_s": 1.0, "tok_per_s": 101.0, "accept_length": 1.0, "cycles": 0.0}
    rows = {name.replace("_", " "): [row] for name, row in self_rows.items()}
    rows = {name.replace("self draft", "self-draft"): row for name, row in rows.items()}
    others = {name: [plain] for name in ("plain", "INT4", "k5, INT4 draft", "k5, bf16 draft")}
    return {
        "rows": {**others, **rows}, "calibration": "g128", "lm_head": False, "accept_length": {"draft model": 4.27},
    }  # fmt: skip


def test_only_weights_of_one_size_through_one_kernel_are_as_fast(bench):
    assert bench.as_fast("g128") == ["g128", "mse"], "awq multiplies its inputs, g64 has more scales"
    assert bench.as_fast("g32") == ["g32"]
    assert bench.as_fast("channel") == ["channel"]


def test_an_older_record_names_its_calibration_once(bench):
    old = record(self_draft_k2=self_row(20.0, 2.0))
    found = bench.self_drafts(old, ACCEPT)
    assert set(found) == {("g128", 2), ("mse", 2)}
    assert found["g128", 2]["value"] == pytest.approx(1.0), "50 cycles of 20 ms"
    assert found["mse", 2]["value"] == pytest.approx(1.25), "40 of them"


def test_the_best_is_named_with_whose_cycles_were_measured(bench):
    new = record(self_draft_g128_k2=self_row(20.0, 2.0), self_draft_g32_k1=self_row(19.0, 1.9))
    said = bench.note("self_draft_over_plain_bs1", 1.25, new, ACCEPT)
    assert said.startswith("required 1.20: reached")
    assert "mse, K = 2, at its 2.5 tokens a cycle" in said
    assert "cycles measured with g128 weights" in said
    faster = record(self_draft_g128_k2=self_row(20.0, 2.0), self_draft_g32_k1=self_row(10.0, 1.9))
    said = bench.note("self_draft_over_plain_bs1", 1.9, faster, ACCEPT)
    assert "g32, K = 1, at its 1.9 tokens a cycle" in said
    assert "cycles measured with" not in said


def test_a_prefill_stays_as_it_was(bench):
    (row,) = bench.at_length([self_row(10.0, 2.0, prefill_s=0.5)], 4.0)
    assert row["tokens"] / row["tok_per_s"] == pytest.approx(0.5 + 25 * 0.01)


def test_every_row_is_measured_on_a_server_that_is_awake(bench, monkeypatch, tmp_path):
    asked = []

    class FakeServer:
        startup_s = 1.0

        def set_policy(self, **policy):
            asked.append(policy)

    def run_once(server, batch, tokens, prompts):
        asked.append(tokens)
        return {
            "tokens": float(tokens),
            "wall_s": 0.01 * tokens,
            "tok_per_s": 100.0,
            "accept_length": 2.0,
            "cycles": 5.0,
        }

    class Started:
        def __init__(self, plans, logs):
            self.servers = {name: FakeServer() for name in plans}

        def __enter__(self):
            return self.servers

        def __exit__(self, *exception):
            return None

    monkeypatch.setattr(bench, "run_once", run_once)
    monkeypatch.setattr(bench, "start_all", Started)
    monkeypatch.setattr(bench, "SELF_GEARS", (1, 2))
    args = type("Args", (), {
        "self_draft": ["g128"], "calibration": "g128", "lm_head": False, "sglang": [], "repeats": 2, "warm_up": 1,
        "tokens": 9,
    })()  # fmt: skip
    found = bench.measure(args, ACCEPT)
    assert {len(rows) for rows in found["rows"].values()} == {2}
    assert set(found["rows"]) == {
        "plain", "INT4", "k5, bf16 draft", "k5, INT4 draft", "self-draft g128 k1", "self-draft g128 k2"
    }  # fmt: skip
    tokens = [each for each in asked if isinstance(each, int)]
    assert tokens == [1, 1, 9] * (6 * 3)
    assert {row["accept_length"] for row in found["rows"]["k5, INT4 draft"]} == {4.27}
    assert {row["accept_length"] for row in found["rows"]["self-draft g128 k2"]} == {2.0}
