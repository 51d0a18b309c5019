import numpy as np

from sdsie_sglang.eval.signal_worth import DraftSearch, TableSearch, by_both, worth
from sdsie_sglang.gears import Observation
from sdsie_sglang.gears.cost_table import GearCosts
from tests.unit.test_tune import easy_and_hard

COSTS = GearCosts({0: 1.0, 5: 3.0}, None, 0.0)


def test_a_signal_that_tells_easy_from_hard_is_worth_much():
    row = worth(TableSearch(easy_and_hard(), COSTS, "entropy", lag=1), 6, folds=3)
    assert row["gears"][0] == 5
    assert row["gears"][-1] == 0
    assert row["with_hindsight"] >= row["held_out"] > 1.15


def test_a_signal_that_says_nothing_is_worth_nothing():
    traces = easy_and_hard()
    for trace in traces:
        trace.entropy_bits[:] = 0.2
    assert worth(TableSearch(traces, COSTS, "entropy", lag=1), 6, folds=3)["held_out"] <= 1.0 + 1e-9


def test_values_of_both_are_all_different():
    seen = {by_both(Observation(7, [bits], committed)) for bits in (0, 0.2, 0.5, 1.5, 3) for committed in range(1, 9)}
    assert seen == set(range(25))


def test_hindsight_is_never_below_the_best_fixed():
    rng = np.random.default_rng(1)
    traces = easy_and_hard(3)
    for trace in traces:
        trace.entropy_bits[:] = rng.random(len(trace)) * 3
    assert worth(TableSearch(traces, COSTS, "both", lag=2), 3, folds=3)["with_hindsight"] >= 1.0


def test_a_draft_that_knows_when_it_is_wrong_is_worth_what_it_saves():
    """A chain is right while the draft is sure."""
    traces = easy_and_hard()
    costs = GearCosts({k: 1.0 + 0.2 * k for k in range(8)}, None, 0.0)
    for trace in traces:
        place = np.arange(trace.draft_top_probability.shape[1])[None, :]
        trace.draft_top_probability[:] = np.where(place < trace.run[:, None], 0.99, 0.01)
    row = worth(DraftSearch(traces, costs), 6, folds=3)
    assert 0 < row["limit"] < 1
    assert row["with_hindsight"] == row["held_out"] > 1.05
    for trace in traces:
        trace.draft_top_probability[:] = 0.9  # says nothing: every limit is a fixed K
    assert worth(DraftSearch(traces, costs), 6, folds=3)["held_out"] <= 1.0 + 1e-9
