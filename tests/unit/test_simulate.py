"""The simulator against served records, against brute force, and against a walk written another way."""

import itertools
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sdsie_sglang.demo.replay import ServedText
from sdsie_sglang.demo.replay import walk as replay_walk
from sdsie_sglang.eval.cost_table import read_costs
from sdsie_sglang.eval.headline import ROOT
from sdsie_sglang.eval.oracle import best_gears
from sdsie_sglang.eval.simulate import (
    GearNotPriced,
    plays_policy,
    plays_rule,
    price,
    replay,
)
from sdsie_sglang.eval.trace import TRACES, Trace, load
from sdsie_sglang.gears import Observation, PolicySettings, build_policy
from sdsie_sglang.gears.cost import CostPolicy
from sdsie_sglang.gears.cost_table import GearCosts
from sdsie_sglang.gears.draft_rules import Svip
from sdsie_sglang.gears.rivals import AcceptEmaPolicy

SERVED_POLICIES = TRACES.with_name("served-policies.json")
SERVED = ROOT / "eval" / "results" / "demo" / "served-draft-k5.json"


def trace_of(run, entropy_bits=None):
    n = len(run)
    return Trace(
        id="x",
        category="math",
        is_code=False,
        repeated=0.0,
        entropy_bits=np.array(entropy_bits if entropy_bits is not None else [0.0] * n, np.float32),
        run=np.minimum(run, np.arange(n - 1, -1, -1)).astype(np.uint8),
        draft_entropy_bits=np.zeros((n, 7), np.float32),
        draft_top_probability=np.ones((n, 7), np.float32),
    )


def costs_of(ms, engaging_ms=0.0, joules=None):
    return GearCosts(dict(enumerate(ms)), joules, engaging_ms)


FLAT = costs_of([1.0] * 8)


def test_cycles_are_those_that_a_server_needed():
    """Verify passes of the 27 prompts, served greedy with K = 5 fixed."""
    record = json.loads(SERVED.read_text())
    traces = {trace.id: trace for trace in load(TRACES).traces}
    policy = build_policy(PolicySettings(policy="fixed", k=record["drafted"]))
    for answer in record["answers"]:
        served = len(answer["tokens"]) - answer["prompt_length"]
        assert len(replay(traces[answer["id"]].cut(served), policy, FLAT).gears) == answer["verify_count"]
    assert len(record["answers"]) == 27


@settings(deadline=None)
@given(st.lists(st.booleans(), min_size=2, max_size=40), st.integers(1, 7))
def test_fixed_gears_agree_with_the_walk_over_flags(flags, k):
    run = [next((i for i, flag in enumerate(flags[t:]) if not flag), len(flags) - t) for t in range(len(flags))]
    run = np.minimum(run, 7)
    run = np.minimum(run, np.arange(len(flags) - 1, -1, -1))
    policy = build_policy(PolicySettings(policy="fixed", k=k))
    wanted = replay_walk([flags] * k, ServedText(list(range(len(flags))), 0)).verify_count
    assert len(replay(trace_of(run), policy, FLAT).gears) == wanted


def test_a_cycle_shows_the_entropies_of_what_it_committed():
    class Recording:
        engaged, rejected = True, 0

        def __init__(self):
            self.seen = []

        def observe(self, seen):
            self.seen.append(seen)

    class Policy:
        def __init__(self):
            self.gate = Recording()

        def start_request(self):
            return self.gate

        def decide(self, gates):
            return 2

    policy = Policy()
    run = replay(trace_of([2, 0, 0, 1, 0, 0], [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]), policy, FLAT)
    assert run.gears == (2, 2)  # 0 -> 3 -> 5, the end
    assert policy.gate.seen == [Observation(2, [0.0, 1.0, 2.0], 3), Observation(2, [3.0, 4.0], 2)]


@pytest.mark.parametrize("lag", [1, 2])
def test_the_policy_sees_a_cycle_so_many_cycles_late(lag):
    """High entropy everywhere: the clutch leaves gear 5 as soon as it has seen the first cycle."""
    policy = build_policy(PolicySettings(policy="entropy"))
    run = replay(trace_of([0] * 6, [9.0] * 6), policy, FLAT, lag)
    assert run.gears == (5,) * lag + (0,) * (5 - lag)


def test_engaging_is_paid_once_for_each_return_from_gear_zero():
    run = price(6, (5, 0, 0, 5, 5, 0, 3), costs_of([1, 1, 1, 1, 1, 2, 1, 1], engaging_ms=10, joules=None))
    assert (run.ms, run.engagements) == (3 * 2 + 4 * 1 + 20, 2)


def test_energy_of_engaging_is_its_time_at_the_power_of_its_cycle():
    costs = costs_of([1.0, 2.0], engaging_ms=4.0, joules={0: 0.5, 1: 3.0})
    assert price(2, (0, 1), costs).joules == pytest.approx(0.5 + 3.0 + 4.0 * 3.0 / 2.0)


def test_a_gear_without_a_price_is_refused():
    with pytest.raises(GearNotPriced, match="gear 5"):
        replay(trace_of([0] * 4), build_policy(PolicySettings(k=5)), costs_of([1.0, 1.0]))


traces = st.lists(st.integers(0, 7), min_size=2, max_size=7).map(trace_of)
prices = st.lists(st.floats(0.1, 9.0), min_size=1, max_size=4)


@settings(deadline=None)
@given(traces, prices, st.floats(0.0, 9.0))
def test_the_oracle_is_the_best_of_all_sequences(trace, ms, engaging_ms):
    costs = costs_of(ms, engaging_ms)
    best = min(
        price(0, gears, costs).ms
        for n in range(1, len(trace))
        for gears in itertools.product(range(len(ms)), repeat=n)
        if ends_there(trace, gears)
    )
    assert price(0, best_gears(trace, costs), costs).ms == pytest.approx(best)


def ends_there(trace, gears):
    """Whether this sequence writes the answer and its last cycle is needed."""
    t, end = 0, len(trace) - 1
    for k in gears:
        if t >= end:
            return False
        t += min(int(trace.run[t]), k) + 1
    return t >= end


long_traces = st.lists(st.integers(0, 7), min_size=2, max_size=60)


@settings(deadline=None)
@given(long_traces, st.lists(st.floats(0.1, 9.0), min_size=8, max_size=8), st.floats(0, 5), st.integers(0, 999))
def test_no_policy_beats_the_oracle(run, ms, engaging_ms, seed):
    trace = trace_of(run, np.random.default_rng(seed).random(len(run)) * 3)
    costs = costs_of(ms, engaging_ms)
    least = price(0, best_gears(trace, costs), costs).ms
    players = [plays_policy(lambda k=k: build_policy(PolicySettings(policy="fixed", k=k))) for k in range(1, 8)]
    players += [plays_policy(lambda: build_policy(PolicySettings(policy="entropy", preset="class")))]
    players += [plays_policy(AcceptEmaPolicy), plays_rule(Svip)]
    for play in players:
        assert play([trace], costs)[0].ms >= least - 1e-9


def test_energy_oracle_saves_energy():
    trace = trace_of([0, 3, 2, 1, 0, 0])
    costs = GearCosts({0: 1.0, 3: 1.0}, {0: 1.0, 3: 50.0}, 0.0)
    assert set(best_gears(trace, costs, "energy")) == {0}
    assert 3 in best_gears(trace, costs, "time")


def test_gears_are_those_that_a_server_ran_under_entropy_and_cost_gate():
    """Two answers each, served on the CPU engine with overlap scheduling; see the record's note on times."""
    record = json.loads(SERVED_POLICIES.read_text())
    traces = {trace.id: trace for trace in load(TRACES).traces}
    table = read_costs(None)
    policies = {"entropy": build_policy(PolicySettings(policy="entropy")), "cost gate": CostPolicy(table)}
    for answer in record["served"]:
        trace = traces[answer["prompt"]].cut(len(answer["tokens"]))
        run = replay(trace, policies[answer["policy"]], table.at(1), record["lag"])
        assert np.bincount(run.gears, minlength=8).tolist() == answer["gears"]
    assert len(record["served"]) == 4
