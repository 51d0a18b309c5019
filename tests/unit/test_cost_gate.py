import json
import random
from itertools import pairwise

import pytest
from pydantic import ValidationError

from sdsie_sglang.gears import Observation, PolicySettings, build_policy
from sdsie_sglang.gears.cost import CostPolicy
from sdsie_sglang.gears.cost_table import Cell, CostTable, Engaging, load_cost_table
from sdsie_sglang.gears.run_lengths import RunLengths, entropy_bin
from sdsie_sglang.gears.settings import first_error

MS = (4.9, 7.0, 8.0, 9.0, 10.0, 11.0, 12.0, 13.0)


def table(ms=MS, engaging_ms=0.0, joules=None, batches=(1,)):
    return CostTable(
        models="m",
        where="w",
        method="t",
        cells=tuple(
            Cell(k=k, batch=b, ms=value * (1 + 0.01 * b), joules=joules[k] if joules else None)
            for k, value in enumerate(ms)
            for b in batches
        ),
        engaging=(Engaging(batch=1, ms=engaging_ms),) if engaging_ms else (),
    )


def play(policy, run_at, cycles, entropy_at=lambda _: 0.5, batch=1, lag=2):
    """Gears of so many cycles of one batch, whose requests all have the run `run_at(cycle)`."""
    gates, gears, unfed = [policy.start_request() for _ in range(batch)], [], []
    for cycle in range(cycles):
        while len(unfed) >= lag:
            seen = unfed.pop(0)
            for gate in gates:
                gate.observe(seen)
        k = policy.decide(gates)
        gears.append(k)
        unfed.append(Observation(k, [entropy_at(cycle)], min(k, run_at(cycle)) + 1))
    return gears


def cost_of(gears, engaging_ms=0.0, ms=MS):
    switches = sum(a == 0 < b for a, b in pairwise(gears))
    return sum(ms[k] for k in gears) + engaging_ms * switches


@pytest.mark.parametrize("engaging_ms", [0.0, 17.0])
def test_text_that_cannot_be_drafted_costs_at_most_two_percent(engaging_ms):
    gears = play(CostPolicy(table(engaging_ms=engaging_ms)), lambda _: 0, 3000)
    assert cost_of(gears, engaging_ms) <= 1.02 * 3000 * MS[0]
    assert gears[-1500:].count(0) > 1450


def test_text_that_is_always_right_is_drafted_as_far_as_it_goes():
    gears = play(CostPolicy(table()), lambda _: 7, 400)
    assert gears[-200:].count(7) > 190


@pytest.mark.parametrize("engaging_ms", [0.0, 17.0])
def test_it_comes_back_when_the_text_becomes_easy(engaging_ms):
    """It cannot lock itself out: exploring is paid for by what gear 0 earns."""
    gears = play(CostPolicy(table(engaging_ms=engaging_ms)), lambda cycle: 0 if cycle < 2000 else 7, 20000)
    assert gears[1000:2000].count(0) > 900
    assert min(gears[-500:]) > 0


def test_without_exploring_nothing_is_ever_tried():
    dear = table((4.9, *(9.0 + 2 * k for k in range(7))))
    assert set(play(CostPolicy(dear, explore=0.0), lambda _: 7, 300)) == {0}
    assert set(play(CostPolicy(dear), lambda _: 7, 300)[-50:]) == {7}


def test_entropy_that_tells_runs_apart_is_used():
    """Low entropy means that everything will be right, high that nothing will be."""
    rng = random.Random(1)
    easy = [rng.random() < 0.5 for _ in range(6000)]

    def entropy_at(cycle):  # what is known at cycle n is the entropy of cycle n - 2
        return 0.01 if easy[min(cycle + 2, 5999)] else 2.5

    gears = play(CostPolicy(table()), lambda cycle: 7 if easy[cycle] else 0, 6000, entropy_at)
    late = range(4000, 6000)
    drafted_easy = [gears[c] for c in late if easy[c]]
    drafted_hard = [gears[c] for c in late if not easy[c]]
    assert sum(drafted_easy) / len(drafted_easy) > 4.5
    assert sum(drafted_hard) / len(drafted_hard) < 1.5


def test_the_same_seed_gives_the_same_gears():
    runs = [play(CostPolicy(table(), seed=s), lambda c: c % 5, 500) for s in (3, 3, 4)]
    assert runs[0] == runs[1]
    assert runs[0] != runs[2]


def test_it_saves_what_it_is_asked_to_save():
    """Drafting is fast and dear here."""
    joules = (1.0, *(20.0,) * 7)
    assert play(CostPolicy(table(joules=joules), "time"), lambda _: 7, 600)[-1] == 7
    assert play(CostPolicy(table(joules=joules), "energy"), lambda _: 7, 600)[-1] == 0


def test_energy_needs_a_table_with_energies():
    with pytest.raises(ValueError, match="energies"):
        CostPolicy(table(), "energy")


def test_engaging_is_not_paid_for_a_short_gain():
    """Runs of two good cycles between two bad ones: going back and forth would cost more than it brings."""
    policy = CostPolicy(table(engaging_ms=50.0))
    gears = play(policy, lambda cycle: 7 if cycle % 4 < 2 else 0, 2000)
    switches = sum(a == 0 < b for a, b in pairwise(gears[500:]))
    assert switches < 20


def test_only_gears_of_the_table_are_chosen():
    cells = tuple(Cell(k=k, batch=1, ms=ms) for k, ms in ((0, 4.9), (3, 8.0), (5, 10.0)))
    policy = CostPolicy(CostTable(models="m", where="w", method="t", cells=cells))
    assert set(play(policy, lambda c: c % 7, 800)) <= {0, 3, 5}


def test_one_gear_serves_a_batch_of_unlike_requests():
    """The sum decides: one request that is always right among seven that never are does not pay here."""
    policy = CostPolicy(table(batches=(1, 8)))
    gates = [policy.start_request() for _ in range(8)]
    gears, unfed = [], []
    for _ in range(3000):
        if len(unfed) >= 2:
            for gate, seen in zip(gates, unfed.pop(0), strict=True):
                gate.observe(seen)
        k = policy.decide(gates)
        gears.append(k)
        unfed.append([Observation(k, [0.5], 1 + (k if i == 0 else 0)) for i in range(8)])
    assert gears[-300:].count(0) > 280


def test_unusable_entropies_are_counted_and_do_no_harm():
    policy = CostPolicy(table())
    gate = policy.start_request()
    policy.decide([gate])
    gate.observe(Observation(0, [float("nan")], 1))
    assert gate.rejected == 1
    assert policy.decide([gate]) in range(8)


def test_a_cycle_decided_elsewhere_teaches_nothing():
    policy = CostPolicy(table())
    gate = policy.start_request()
    gate.observe(Observation(5, [0.5], 6))  # another policy's, from before a change
    before = gate.survival()
    gate.observe(Observation(5, [0.5], 6))
    assert gate.survival() == before


def test_learned_chances_approach_the_true_ones():
    lengths, own, rng = RunLengths(), RunLengths.start_request(), random.Random(0)
    chance = {entropy_bin(0.05): 0.9, entropy_bin(2.5): 0.3}
    for _ in range(4000):
        entropy = rng.choice(list(chance))
        run = next((i for i in range(7) if rng.random() > chance[entropy]), 7)
        lengths.add(entropy, own, 7, run)
    for entropy, p in chance.items():
        survival = lengths.survival(entropy, own)
        assert survival[0] == pytest.approx(p, abs=0.08)
        assert list(survival) == sorted(survival, reverse=True)


def test_costs_between_measured_batches_are_linear_and_outside_refused():
    cells = (Cell(k=0, batch=1, ms=4.0), Cell(k=0, batch=5, ms=8.0))
    made = CostTable(models="m", where="w", method="t", cells=cells)
    assert made.at(2).ms == {0: 5.0}
    assert made.nearest(64).ms == {0: 8.0}
    with pytest.raises(ValueError, match="batch 64 is outside"):
        made.at(64)


@pytest.mark.parametrize(
    ("cells", "says"),
    [
        ([(5, 1)], "gear 0 is missing"),
        ([(0, 1), (0, 1)], "may appear once"),
        ([(0, 1), (5, 1), (0, 8)], "is missing"),
        ([(0, 1), (8, 1)], "less than or equal to 7"),
    ],
)
def test_bad_tables(cells, says):
    with pytest.raises(ValidationError, match=says):
        CostTable(models="m", where="w", method="t", cells=tuple({"k": k, "batch": b, "ms": 1.0} for k, b in cells))


def test_the_server_builds_it_from_settings(tmp_path):
    path = tmp_path / "costs.json"
    path.write_text(table().model_dump_json())
    settings = PolicySettings(policy="cost", cost_table=str(path), seed=7)
    assert settings.gears == tuple(range(8))
    assert isinstance(build_policy(settings), CostPolicy)
    assert PolicySettings(**settings.model_dump()) == settings


@pytest.mark.parametrize(
    ("content", "more", "says"),
    [
        (None, {}, "No such file"),
        ("{", {}, "cost table"),
        (json.dumps({"format": 2}), {}, "format"),
        ("good", {"objective": "energy"}, "no energies"),
        ("good", {"explore": 0.5}, "explore"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(tmp_path, content, more, says):
    path = tmp_path / "costs.json"
    if content is not None:
        path.write_text(table().model_dump_json() if content == "good" else content)
    with pytest.raises(ValidationError) as caught:
        PolicySettings(policy="cost", cost_table=str(path), **more)
    assert says in first_error(caught.value)
    assert "\n" not in first_error(caught.value)


def test_a_table_is_asked_for():
    with pytest.raises(ValidationError, match="needs cost_table"):
        PolicySettings(policy="cost")


def test_a_table_that_was_measured_anew_is_read_anew(tmp_path):
    path = tmp_path / "costs.json"
    path.write_text(table().model_dump_json())
    first = load_cost_table(path)
    path.write_text(table(ms=tuple(2 * ms for ms in MS)).model_dump_json())
    assert load_cost_table(path).cells[0].ms == 2 * first.cells[0].ms
