import numpy as np

from sdsie_sglang.eval.signal_worth import Search, by_both, worth
from sdsie_sglang.gears import Observation
from sdsie_sglang.gears.cost_table import GearCosts
from tests.unit.test_tune import easy_and_hard

COSTS = GearCosts({0: 1.0, 5: 3.0}, None, 0.0)


def test_a_signal_that_tells_easy_from_hard_is_worth_much():
    row = worth(Search(easy_and_hard(), COSTS, "entropy", lag=1), 6, folds=3)
    assert row["gears"][0] == 5
    assert row["gears"][-1] == 0
    assert row["with_hindsight"] >= row["held_out"] > 1.15


def test_a_signal_that_says_nothing_is_worth_nothing():
    traces = easy_and_hard()
    for trace in traces:
        trace.entropy_bits[:] = 0.2
    assert worth(Search(traces, COSTS, "entropy", lag=1), 6, folds=3)["held_out"] <= 1.0 + 1e-9


def test_values_of_both_are_all_different():
    seen = {by_both(Observation(7, [bits], committed)) for bits in (0, 0.2, 0.5, 1.5, 3) for committed in range(1, 9)}
    assert seen == set(range(25))


def test_hindsight_is_never_below_the_best_fixed():
    rng = np.random.default_rng(1)
    traces = easy_and_hard(3)
    for trace in traces:
        trace.entropy_bits[:] = rng.random(len(trace)) * 3
    assert worth(Search(traces, COSTS, "both", lag=2), 3, folds=3)["with_hindsight"] >= 1.0
