from sdsie_sglang.gears import Observation
from sdsie_sglang.worker.cycle import Cycle
from tests.unit.cycle_numbers import host_copy


def cycle_of(k, numbers):
    n = len(numbers)
    return Cycle(
        number=0,
        k=k,
        draft_passes=k,
        catch_up_passes=0,
        rids=["r"] * n,
        states=[None] * n,
        gates=[None] * n,
        numbers=host_copy(k, numbers),
    )


def test_last_entropy_alone_comes_with_the_tokens_committed():
    assert cycle_of(5, [[3.0, 0.5], [1.0, 2.5]]).settle() == [Observation(5, [0.5], 3), Observation(5, [2.5], 1)]


def test_all_entropies_are_those_of_committed_positions():
    seen = cycle_of(3, [[2.0, 0.5, 0.25, 9.0, 9.0], [4.0, 1.0, 2.0, 3.0, 4.0]]).settle()
    assert seen == [Observation(3, [0.5, 0.25], 2), Observation(3, [1.0, 2.0, 3.0, 4.0], 4)]
    assert [each.accepted for each in seen] == [1, 3]


def test_gear_zero_accepts_nothing():
    (seen,) = cycle_of(0, [[1.0, 0.5]]).settle()
    assert (seen.accepted, seen.entropy_bits) == (0, [0.5])
