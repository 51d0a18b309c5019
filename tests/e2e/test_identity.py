"""Greedy answers in float32 are those of SGLang as shipped, whatever the gears do."""

import pytest

from tests.e2e.conftest import ask_all

POLICIES = {
    "plain": {"policy": "plain"},
    "fixed-1": {"policy": "fixed", "k": 1},
    "fixed-3": {"policy": "fixed", "k": 3},
    "fixed-5": {"policy": "fixed", "k": 5},
    "fixed-7": {"policy": "fixed", "k": 7},
    "entropy-tuned": {"policy": "entropy", "preset": "tuned"},
    "entropy-paper-all": {"policy": "entropy", "preset": "paper", "fold": "all"},
    "entropy-class-window": {"policy": "entropy", "preset": "class", "smoothing": "window"},
    "schedule": {"policy": "schedule", "schedule": "0x3,3x2,0,7x2,1"},
}


@pytest.mark.parametrize("at_once", [False, True], ids=["sequential", "at-once"])
@pytest.mark.parametrize("name", POLICIES)
def test_answers_equal_the_baseline(gears, baseline, prompts, name, at_once):
    gears.set_policy(**POLICIES[name])
    answers = ask_all(gears, prompts, at_once=at_once)
    assert answers.ids == baseline.ids
    assert gears.sdsie()["gate"]["gate_failures"] == 0


def test_the_gears_differ_so_that_identity_means_something(gears, prompts):
    gears.set_policy(policy="schedule", schedule="0x3,3x2,0,7x2,1")
    for meta in ask_all(gears, prompts).meta:
        assert {"0", "3", "7"} <= set(meta["sdsie"]["cycles"])
        assert meta["sdsie"]["switches"] >= 3


def test_a_switch_at_every_position_of_an_answer(gears, baseline, prompts):
    """One run a position: gear 0 up to it, gear 5 from it on."""
    for position in range(1, 24, 3):
        gears.set_policy(policy="schedule", schedule=f"0x{position},5x500")
        assert ask_all(gears, prompts[2:3], max_new_tokens=24).ids == [baseline.ids[2][:24]]
