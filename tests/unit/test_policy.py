import math

import pytest
from pydantic import ValidationError

from sdsie_sglang.gears import Observation, PolicySettings, build_policy
from sdsie_sglang.gears.settings import first_error, parse_schedule


def gates_with(policy, last_entropies):
    gates = [policy.start_request() for _ in last_entropies]
    for gate, h in zip(gates, last_entropies, strict=True):
        gate.observe(Observation(k=5, entropy_bits=[h]))
    return gates


@pytest.mark.parametrize("k", [1, 3, 5, 7])
def test_fixed_never_changes(k):
    policy = build_policy(PolicySettings(policy="fixed", k=k))
    assert policy.decide(gates_with(policy, [0.0, 20.0, math.nan])) == k


def test_plain_is_gear_zero():
    policy = build_policy(PolicySettings(policy="plain"))
    assert policy.decide(gates_with(policy, [0.0])) == 0


@pytest.mark.parametrize(
    ("last_entropies", "share", "k"),
    [
        ([0.0], 0.5, 5),
        ([9.0], 0.5, 0),
        ([0.0, 9.0], 0.5, 5),  # exactly half is enough
        ([0.0, 9.0, 9.0], 0.5, 0),
        ([0.0, 9.0, 9.0], 0.3, 5),
        ([0.0, 9.0], 1.0, 0),
        ([math.nan], 0.5, 0),
    ],
)
def test_batch_rule(last_entropies, share, k):
    policy = build_policy(PolicySettings(policy="entropy", engage_share=share))
    assert policy.decide(gates_with(policy, last_entropies)) == k


def test_a_new_request_starts_engaged():
    policy = build_policy(PolicySettings(policy="entropy"))
    assert policy.decide([policy.start_request()]) == 5


def test_last_and_all_differ_as_defined():
    seen = Observation(k=5, entropy_bits=[9.0, 9.0, 0.0])
    last, every = (PolicySettings(policy="entropy", fold=fold) for fold in ("last", "all"))
    for settings, engaged in ((last, True), (every, False)):
        gate = build_policy(settings).start_request()
        gate.observe(seen)
        # all: ema 9, 9, 3.15 with alpha .65; disengaged at the first, 3.15 is not below .15
        assert gate.engaged is engaged


def test_schedule_repeats_and_restarts_with_a_request():
    policy = build_policy(PolicySettings(policy="schedule", schedule=parse_schedule("5x2,0")))
    gate = policy.start_request()
    assert [policy.decide([gate]) for _ in range(5)] == [5, 5, 0, 5, 5]
    gate = policy.start_request()
    assert [policy.decide([gate]) for _ in range(3)] == [5, 5, 0]


@pytest.mark.parametrize("preset", ["tuned", "paper", "class"])
def test_presets_fill_and_can_be_overridden(preset):
    base = PolicySettings(policy="entropy", preset=preset)
    assert base.theta_low < base.theta_high
    assert PolicySettings(preset=preset, alpha=0.9).alpha == 0.9
    assert PolicySettings(preset=preset, alpha=0.9).theta_high == base.theta_high


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ({"theta_low": 1.0, "theta_high": 0.5}, "theta_low (1.0) must be below theta_high (0.5)"),
        ({"theta_low": 0.7}, "must be below"),
        ({"k": 0}, "k: "),
        ({"k": 8}, "k: "),
        ({"alpha": 0.0}, "alpha: "),
        ({"alpha": 1.5}, "alpha: "),
        ({"alpha": math.nan}, "alpha: "),
        ({"policy": "magic"}, "policy: "),
        ({"window": 0}, "window: "),
        ({"schedule": (5, 9)}, "schedule"),
        ({"colour": 1}, "colour: "),
        ({"engage_share": 0.0}, "engage_share: "),
    ],
)
def test_bad_settings_say_what_is_wrong_in_one_line(bad, says):
    with pytest.raises(ValidationError) as caught:
        PolicySettings(**bad)
    line = first_error(caught.value)
    assert says in line
    assert "\n" not in line


@pytest.mark.parametrize("text", ["", "5x", "x5", "5;0", "5x2x3", "-1", "five"])
def test_bad_schedule_text(text):
    with pytest.raises(ValueError, match="schedule"):
        parse_schedule(text)


def test_gears_a_policy_can_ask_for():
    assert PolicySettings(policy="entropy", k=3).gears == (0, 3)
    assert PolicySettings(policy="schedule", schedule=(7, 0, 2)).gears == (0, 2, 7)
    assert PolicySettings(policy="plain").gears == (0,)
