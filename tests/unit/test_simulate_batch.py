import numpy as np
import pytest

from sdsie_sglang.eval.simulate import replay
from sdsie_sglang.eval.simulate_batch import mixed_queue, replay_batch
from sdsie_sglang.gears import Observation, PolicySettings, build_policy
from sdsie_sglang.gears.batch_rules import MeanEntropyPolicy
from sdsie_sglang.gears.cost_table import GearCosts
from tests.unit.test_simulate import FLAT, trace_of

COSTS = GearCosts({0: 1.0, 5: 3.0}, None, 2.0)
RANDOM = np.random.default_rng(5)
TRACES = [trace_of(RANDOM.integers(0, 8, 40), RANDOM.random(40) * 2) for _ in range(6)]


def test_a_batch_of_one_is_the_single_replay():
    for preset in ("tuned", "class"):
        settings = PolicySettings(policy="entropy", preset=preset)
        alone = replay(TRACES[0], build_policy(settings), COSTS)
        batch = replay_batch(TRACES[:1], 1, build_policy(settings), COSTS)
        assert batch.cycles.tolist() == np.bincount(alone.gears, minlength=8).tolist()
        assert batch.ms == alone.ms


def test_equal_requests_go_in_step():
    policy = build_policy(PolicySettings(policy="fixed"))
    one = replay_batch(TRACES[:1], 1, policy, FLAT)
    three = replay_batch(TRACES[:1] * 3, 3, policy, FLAT)
    assert (three.tokens, three.ms) == (3 * one.tokens, one.ms)


def test_who_ends_makes_room_for_the_next():
    policy = build_policy(PolicySettings(policy="plain"))
    short, long = trace_of([0] * 3), trace_of([0] * 9)
    # 2 cycles for the first, then the third joins; it ends after 2 more, and there is no next.
    assert replay_batch([short, long, short], 2, policy, FLAT).cycles[0] == 4


def test_a_queue_that_does_not_fill_the_batch_is_refused():
    with pytest.raises(ValueError, match="do not fill"):
        replay_batch(TRACES[:2], 3, build_policy(PolicySettings(policy="plain")), FLAT)


def test_accepted_is_what_came_beyond_one_token_a_request_and_cycle():
    run = replay_batch(TRACES, 4, build_policy(PolicySettings(policy="fixed")), FLAT)
    assert run.drafted == 5 * 4 * run.cycles[5]
    assert run.tokens == run.accepted + 4 * run.cycles.sum()
    assert 0 < run.accepted < run.drafted


def test_a_mixed_queue_has_every_kind_before_any_again():
    queue = mixed_queue(TRACES, 12, np.random.default_rng(0))
    assert {id(t) for t in queue[:6]} == {id(t) for t in queue[6:]} == {id(t) for t in TRACES}


@pytest.mark.parametrize(("entropies", "k"), [([0.0, 1.0], 5), ([0.0, 3.0], 0), ([float("nan"), 0.1], 5)])
def test_the_mean_decides(entropies, k):
    policy = MeanEntropyPolicy(PolicySettings(policy="entropy", preset="paper"))  # disengages above 1.25 bits
    gates = [policy.start_request() for _ in entropies]
    assert policy.decide(gates) == 5
    for gate, bits in zip(gates, entropies, strict=True):
        gate.observe(Observation(5, [bits], 1))
    assert policy.decide(gates) == k
