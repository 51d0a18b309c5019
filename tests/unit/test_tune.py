import numpy as np
import pytest

from sdsie_sglang.eval.bayes import maximise
from sdsie_sglang.eval.tune import Score, cross_validated, grid, tune
from sdsie_sglang.gears import PolicySettings
from sdsie_sglang.gears.cost_table import GearCosts
from tests.unit.test_simulate import trace_of

COSTS = GearCosts({0: 1.0, 5: 3.0}, None, 0.0)


def easy_and_hard(count=6, n=120):
    """Answers with long easy and long hard stretches, told apart by the entropy."""
    traces = []
    for seed in range(count):
        rng = np.random.default_rng(seed)
        hard = np.repeat(rng.random(n // 20) < 0.5, 20)
        traces.append(trace_of(np.where(hard, 0, 7), np.where(hard, 3.0, 0.05)))
    return traces


def test_thresholds_that_part_easy_from_hard_are_found():
    score = Score(easy_and_hard(), COSTS, lag=1)
    report = tune(score, [5], steps=4, folds=3, on_point=lambda: None)
    assert report["over_best_fixed"] > 1.15
    assert report["cross_validated_over_best_fixed"] > 1.1
    assert report["cross_validated_over_best_fixed"] <= report["over_best_fixed"] + 1e-9
    assert 0.05 < report["settings"]["theta_high"] < 3.0
    PolicySettings(**report["settings"])  # what the launcher will read


def test_each_point_is_played_once():
    score = Score(easy_and_hard(2), COSTS, lag=2)
    points = grid([5])
    for _ in range(2):
        for point in points[:5]:
            score(point)
    assert len(score.all) == 5


def test_every_point_of_the_grid_is_valid():
    for point in grid([1, 7]):
        PolicySettings(**point)


def test_no_prompt_is_judged_by_settings_found_on_it():
    """Two settings; each prompt favours one, all others the other: cross-validation must take the worse."""
    score = Score(easy_and_hard(3), COSTS, lag=1)
    first, second = score(grid([5])[0]), score(grid([5])[40])
    first.ms[:] = [100.0, 1.0, 1.0]
    second.ms[:] = [1.0, 1.5, 1.5]
    ms, chosen = cross_validated(score, folds=3)
    assert len(chosen) == 3
    assert ms[0] == 100.0  # without the first prompt, the first settings look best


def test_bayesian_search_finds_a_peak():
    peak = np.array([0.7, -1.0])
    bounds = np.array([[0.0, 1.0], [-2.0, 2.0]])
    rng = np.random.default_rng(0)
    points = bounds[:, 0] + rng.random((8, 2)) * (bounds[:, 1] - bounds[:, 0])

    def hill(point):
        return -float((((point - peak) / [1.0, 4.0]) ** 2).sum())

    best, value = maximise(hill, bounds, points, np.array([hill(p) for p in points]), 25, rng)
    assert best == pytest.approx(peak, abs=0.15)
    assert value > -0.01
