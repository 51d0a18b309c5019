"""The gate is executed: what ran is what was decided, and it is decided by the canonical clutch."""

import pytest

from sdsie_sglang.gears import Observation, PolicySettings, build_policy


@pytest.mark.parametrize("k", [1, 5])
def test_draft_passes_equal_the_decision(cycles_of, k):
    answers, lines = cycles_of(policy="fixed", k=k)
    assert lines
    assert {line["k"] for line in lines} == {k}
    for line in lines:
        assert line["draft_passes"] == k + line["catch_up_passes"]
        assert all(1 <= committed <= k + 1 for committed in line["committed"])
    for meta in answers.meta:
        stats = meta["sdsie"]
        assert stats["cycles"] == {str(k): meta["spec_verify_ct"]}
        assert stats["draft_passes"] == k * meta["spec_verify_ct"]


def test_forced_off_runs_no_draft_pass(cycles_of):
    answers, lines = cycles_of(policy="plain")
    assert [line["draft_passes"] for line in lines] == [0] * len(lines)
    assert all(meta["sdsie"]["draft_passes"] == 0 for meta in answers.meta)
    assert all(meta["sdsie"]["accept_length"] == 1.0 for meta in answers.meta)


def test_every_decision_is_that_of_the_clutch_fed_with_a_fixed_lag(cycles_of, gears):
    """Replays the traced entropies through the same policy object, away from the server."""
    _, lines = cycles_of(policy="entropy", preset="class", smoothing="window")
    lag = gears.sdsie()["gate"]["lag"]
    policy = build_policy(PolicySettings(policy="entropy", preset="class", smoothing="window"))
    by_request: dict[str, list[dict]] = {}
    for line in lines:
        by_request.setdefault(line["rids"][0], []).append(line)
    gears_seen = set()
    for cycles in by_request.values():
        gate = policy.start_request()
        for n, cycle in enumerate(cycles):
            if n >= lag:
                gate.observe(Observation(cycles[n - lag]["k"], cycles[n - lag]["entropy_bits"]))
            assert cycle["k"] == policy.decide([gate])
            gears_seen.add(cycle["k"])
    assert gears_seen == {0, 5}, "the prompts exercise both gears"


def test_identical_runs_give_identical_gears(cycles_of):
    def gears_of(lines):
        return [(line["k"], line["committed"], line["entropy_bits"]) for line in lines]

    runs = [gears_of(cycles_of(policy="entropy", preset="paper")[1]) for _ in range(2)]
    assert runs[0] == runs[1]


def test_metrics_count_what_ran(gears, cycles_of):
    import requests

    def read():
        text = requests.get(f"{gears.url}/metrics", timeout=30).text
        rows = [line for line in text.splitlines() if line.startswith("sdsie:")]
        return {row.rsplit(" ", 1)[0].split("{")[0] + _gear(row): float(row.rsplit(" ", 1)[1]) for row in rows}

    def _gear(row):
        return "@" + row.split('gear="')[1].split('"')[0] if 'gear="' in row else ""

    before = read()
    _, lines = cycles_of(policy="schedule", schedule="0,3")
    after = read()
    for k in (0, 3):
        ran = sum(line["k"] == k for line in lines)
        assert after[f"sdsie:cycles_total@{k}"] - before.get(f"sdsie:cycles_total@{k}", 0.0) == ran
    passes = sum(line["draft_passes"] for line in lines)
    assert after["sdsie:draft_passes_total"] - before["sdsie:draft_passes_total"] == passes
    entropies = after["sdsie:entropy_bits_count"] - before["sdsie:entropy_bits_count"]
    assert entropies == len(lines)
