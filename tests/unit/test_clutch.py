import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sdsie_sglang.gears import PRESETS, Clutch
from sdsie_sglang.gears.smoothing import Ema, MovingWindow

entropies = st.lists(st.floats(0.0, 17.0), min_size=1, max_size=80)
thresholds = st.tuples(st.floats(0.01, 3.0), st.floats(0.01, 3.0)).map(lambda t: (t[0], t[0] + t[1]))


def run(clutch: Clutch, series: list[float]) -> list[bool]:
    return [clutch.observe(h) for h in series]


def test_switch_points_worked_out_by_hand():
    # EMA, alpha 1/2, thresholds 0.5 and 1.0, starting engaged:
    #   h   0.0   2.0   2.0   0.0    0.0    0.0     0.9
    #   ema 0.0   1.0   1.5   0.75   0.375  0.1875  0.54375
    # 1.0 is not above 1.0: holds. 1.5 disengages. 0.75 holds. 0.375 engages. 0.54 holds.
    clutch = Clutch(0.5, 1.0, Ema(0.5))
    assert run(clutch, [0.0, 2.0, 2.0, 0.0, 0.0, 0.0, 0.9]) == [True, True, False, False, True, True, True]
    assert clutch.smoothed_bits == 0.54375


def test_switch_points_of_the_tuned_preset_by_hand():
    # alpha 0.65, 0.15 / 0.70. ema: 0.4, 0.79, 0.2765, 0.096775, 0.09837125
    tuned = PRESETS["tuned"]
    clutch = Clutch(tuned["theta_low"], tuned["theta_high"], Ema(tuned["alpha"]))
    assert run(clutch, [0.4, 1.0, 0.0, 0.0]) == [True, False, False, True]
    assert clutch.smoothed_bits == pytest.approx(0.096775)


def test_window_of_three_by_hand():
    # thresholds 0.5 / 2.5; means 3, 2, 4/3, 1/3, 0: disengages at once, engages at 1/3
    clutch = Clutch(0.5, 2.5, MovingWindow(3))
    assert run(clutch, [3.0, 1.0, 0.0, 0.0, 0.0]) == [False, False, False, True, True]


def test_thresholds_must_be_apart():
    for low, high in ((1.0, 1.0), (2.0, 1.0), (math.nan, 1.0)):
        with pytest.raises(ValueError, match="theta_low"):
            Clutch(low, high, Ema(0.5))


@given(thresholds, st.floats(0.01, 1.0), entropies)
def test_switches_only_across_its_threshold(theta, alpha, series):
    low, high = theta
    clutch = Clutch(low, high, Ema(alpha))
    before = clutch.engaged
    for h in series:
        after = clutch.observe(h)
        assert clutch.smoothed_bits is not None
        if low <= clutch.smoothed_bits <= high:
            assert after == before, "switched inside the dead band"
        elif clutch.smoothed_bits > high:
            assert not after
        else:
            assert after
        before = after


@given(thresholds, st.floats(0.01, 1.0), entropies, st.integers(-3, 3))
def test_scale_law(theta, alpha, series, exponent):
    """Entropies and thresholds in another unit give the same gears (powers of two are exact)."""
    factor = 2.0**exponent
    one = Clutch(theta[0], theta[1], Ema(alpha))
    other = Clutch(theta[0] * factor, theta[1] * factor, Ema(alpha))
    assert run(one, series) == run(other, [h * factor for h in series])


@given(thresholds, st.floats(0.01, 1.0), entropies, entropies)
def test_reset_law(theta, alpha, past, series):
    """A new clutch knows nothing of an earlier request: state is the object's alone."""
    used = Clutch(*theta, Ema(alpha))
    run(used, past)
    assert run(Clutch(*theta, Ema(alpha)), series) == run(Clutch(*theta, Ema(alpha)), series)
    first = Clutch(*theta, Ema(alpha))
    first.observe(series[0])
    assert first.smoothed_bits == series[0]


@given(thresholds, st.lists(st.sampled_from([math.nan, math.inf, -math.inf, -1.0]), min_size=1, max_size=20))
def test_unusable_entropies_never_engage_and_are_counted(theta, series):
    clutch = Clutch(*theta, Ema(0.5))
    assert run(clutch, series) == [False] * len(series)
    assert clutch.rejected == len(series)
    assert clutch.smoothed_bits is None
    assert clutch.observe(theta[0] / 2), "the next usable low entropy engages again"


@given(entropies, st.floats(0.01, 1.0))
def test_ema_stays_within_what_it_saw(series, alpha):
    ema = Ema(alpha)
    values = [ema.update(h) for h in series]
    assert all(min(series) - 1e-9 <= v <= max(series) + 1e-9 for v in values)


@given(entropies, st.integers(1, 8))
def test_window_is_the_mean_of_the_last(series, width):
    window = MovingWindow(width)
    for i, h in enumerate(series):
        last = series[max(0, i + 1 - width) : i + 1]
        assert window.update(h) == pytest.approx(math.fsum(last) / len(last))
