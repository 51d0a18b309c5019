import math
import random

import pytest

from sdsie_sglang.gears import Observation
from sdsie_sglang.gears.cost_table import Cell, CostTable
from sdsie_sglang.gears.draft_rules import AdaEdl, ConstantConfidence, CumulativeConfidence, Svip
from sdsie_sglang.gears.rivals import SGLANG_SLOTS, AcceptEmaPolicy, GoodputPolicy


def table(ms):
    return CostTable(
        models="m", where="w", method="t", cells=tuple(Cell(k=k, batch=1, ms=value) for k, value in ms.items())
    )


def play(policy, batch, accepted_of, cycles):
    """Gears of so many cycles; what a cycle showed is known at the next."""
    gates, gears = [policy.start_request() for _ in range(batch)], []
    for cycle in range(cycles):
        k = policy.decide(gates)
        gears.append(k)
        for gate in gates:
            gate.observe(Observation(k, [0.0], min(k, accepted_of(cycle)) + 1))
    return gears


@pytest.mark.parametrize("batch", [1, 7, 8, 33, 64])
@pytest.mark.parametrize("seed", range(4))
def test_accept_ema_is_sglangs(batch, seed):
    """The same gears as SGLang's own class, fed with the same accepted drafts."""
    theirs = pytest.importorskip("sglang.srt.speculative.adaptive_spec_params")
    params = theirs.AdaptiveSpeculativeParams(initial_steps=5)
    rng = random.Random(seed)
    mood = [rng.choice((0, 1, 3, 6, 7)) for _ in range(20)]
    accepted = [max(0, mood[cycle // 15] + rng.choice((-1, 0, 1))) for cycle in range(300)]
    wanted = []
    for cycle in range(300):
        k = params.get_steps_for_batch(batch)
        wanted.append(k)
        params.on_verify_complete([min(k, accepted[cycle])] * batch, batch)
    assert play(AcceptEmaPolicy(), batch, accepted.__getitem__, 300) == wanted
    if batch < 64:
        assert len(set(wanted)) > 1


def test_slots_are_sglangs_defaults():
    theirs = pytest.importorskip("sglang.srt.speculative.adaptive_spec_params").DEFAULT_ADAPTIVE_CONFIG
    assert {int(batch): list(slot.steps) for batch, slot in SGLANG_SLOTS.items()} == {
        int(batch): entry["candidate_steps"] for batch, entry in theirs.items()
    }
    for batch, slot in SGLANG_SLOTS.items():
        assert (slot.up, slot.down) == (theirs[str(batch)]["up_hysteresis"], theirs[str(batch)]["down_hysteresis"])


def test_goodput_follows_acceptance_and_cost():
    cheap_draft = {k: 10.0 + 0.5 * k for k in range(8)}
    assert play(GoodputPolicy(table(cheap_draft)), 1, lambda _: 7, 60)[-1] == 7
    assert play(GoodputPolicy(table(cheap_draft)), 1, lambda _: 0, 60)[-1] == 0
    dear_draft = {k: 10.0 + 20.0 * k for k in range(8)}
    assert play(GoodputPolicy(table(dear_draft)), 1, lambda _: 7, 60)[-1] == 0


def test_goodput_is_the_papers_sum():
    policy = GoodputPolicy(table({0: 1.0, 1: 1.6, 2: 2.4}))
    policy._right = 0.7  # goodput 1, 1.7 / 1.6, 2.19 / 2.4
    assert policy.decide([policy.start_request()]) == 1


@pytest.mark.parametrize(("nats", "stops"), [(0.59, False), (0.61, True)])
def test_svip_stops_above_six_tenths_of_a_nat(nats, stops):
    assert Svip().stops(nats / math.log(2), 0.5) is stops


@pytest.mark.parametrize(("top", "stops"), [(0.41, False), (0.39, True)])
def test_constant_confidence(top, stops):
    assert ConstantConfidence().stops(9.0, top) is stops


def test_cumulative_confidence_begins_anew_with_each_chain():
    rule = CumulativeConfidence(0.5)
    for _ in range(2):
        assert [rule.stops(0.0, top) for top in (0.9, 0.7, 0.7)] == [False, False, True]
        rule.verified(3, 1)


def test_adaedl_stops_where_its_bound_is_below_the_limit():
    rule = AdaEdl(limit=0.5)
    nats = 0.25 / 0.2  # the bound is 1 - sqrt(0.25) = 0.5 there
    assert rule.stops(1.01 * nats / math.log(2), 0.5)
    assert not rule.stops(0.99 * nats / math.log(2), 0.5)


def test_adaedl_limit_follows_acceptance():
    rule = AdaEdl(limit=0.4)
    rule.verified(4, 0)
    assert rule.limit == pytest.approx(0.4 + 0.1 * 0.01)
    for _ in range(30):
        rule.verified(4, 4)
    assert rule.limit < 0.4
