"""The glue between cycles and policy: fixed lag, fallback, policy changes, telemetry. No SGLang."""

import json
import math

import pytest
import torch

from sdsie_sglang.gears import PolicySettings
from sdsie_sglang.telemetry.metrics import NoMetrics
from sdsie_sglang.telemetry.trace import FileTrace, NoTrace
from sdsie_sglang.worker.cycle import Cycle, HostCopy
from sdsie_sglang.worker.gate import Gate
from tests.unit.cycle_numbers import host_copy
from tests.unit.test_conditions import table


class CountingMetrics(NoMetrics):
    failures = 0

    def gate_failed(self):
        self.failures += 1


def make_gate(lag=2, trace=None, metrics=None, **policy):
    settings = PolicySettings(**{"policy": "entropy", **policy})
    return Gate(settings, (0, 3, 5), lag, trace or NoTrace(), metrics or NoMetrics())


def launch(gate, states, k, entropies, committed=1):
    rows = [[committed, h] for h in entropies]
    cycle = Cycle(
        number=gate.cycles - 1,
        k=k,
        draft_passes=k,
        catch_up_passes=0,
        rids=[str(i) for i in range(len(states))],
        states=states,
        gates=[state.gate for state in states],
        numbers=host_copy(k, rows),
    )
    gate.launched(cycle)
    return cycle


@pytest.mark.parametrize("lag", [1, 2])
def test_the_lag_is_fixed_whatever_has_arrived(lag):
    """One high entropy at cycle 3 shows in the decision of cycle 3 + lag, not before and not after."""
    gate = make_gate(lag)
    states = [gate.new_state()]
    decided = []
    for n in range(10):
        k = gate.next_gear(states)
        decided.append(k)
        launch(gate, states, k, [9.0 if n == 3 else 0.0])
        gate.settle_oldest()  # the result has long been there
    first_low = 3 + lag
    assert decided[:first_low] == [5] * first_low
    assert decided[first_low] == 0


def test_gates_are_those_of_the_launch_so_a_retracted_request_forgets():
    gate = make_gate(lag=1)
    state = gate.new_state()
    launch(gate, [state], gate.next_gear([state]), [9.0])
    gate.restart(state)  # retracted and prefilled again before the result was fed
    assert gate.next_gear([state]) == 5, "the old entropy went to the old gate"


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_unusable_entropy_runs_gear_0_and_is_counted(bad):
    gate = make_gate(lag=1)
    state = gate.new_state()
    launch(gate, [state], gate.next_gear([state]), [bad])
    gate.settle_oldest()
    assert gate.next_gear([state]) == 0
    assert state.stats.rejected_entropies == 1
    assert state.gate.rejected == 1


class Broken:
    def start_request(self):
        return None

    def decide(self, gates):
        raise RuntimeError("broken on purpose")


def test_a_failing_policy_means_gear_0_and_is_counted():
    metrics = CountingMetrics()
    gate = make_gate(metrics=metrics)
    gate._policy = Broken()
    states = [gate.new_state()]
    assert [gate.next_gear(states) for _ in range(3)] == [0, 0, 0]
    assert gate.failures == metrics.failures == 3
    assert gate.snapshot()["gate_failures"] == 3


def test_a_gear_that_was_not_prepared_is_never_run():
    gate = make_gate()
    gate.change(PolicySettings(policy="fixed", k=7))  # not let in by `check`; the last line of defence
    assert gate.check(PolicySettings(policy="fixed", k=7)) is not None
    assert gate.next_gear([gate.new_state()]) == 0
    assert gate.failures == 1


def test_a_change_of_policy_reaches_running_requests():
    gate = make_gate(lag=1)
    state = gate.new_state()
    launch(gate, [state], gate.next_gear([state]), [9.0])
    assert gate.next_gear([state]) == 0
    gate.change(PolicySettings(policy="fixed", k=3))
    assert gate.next_gear([state]) == 3
    gate.change(PolicySettings(policy="entropy"))
    assert gate.next_gear([state]) == 5, "a fresh clutch is engaged"


def test_fold_all_sees_only_committed_positions(tmp_path):
    gate = make_gate(lag=1, fold="all", trace=FileTrace(str(tmp_path / "t.jsonl")))
    state = gate.new_state()
    k = gate.next_gear([state])
    cycle = Cycle(0, k, k, 0, ["r"], [state], [state.gate], host_copy(k, [[2.0, 0.1, 0.2, 9.0, 9.0, 9.0, 9.0]]))
    assert [list(seen.entropy_bits) for seen in cycle.settle()] == [pytest.approx([0.1, 0.2])]
    gate.launched(cycle)
    gate.settle_oldest()
    assert state.stats.summary()["mean_entropy_bits"] == pytest.approx(0.2)
    assert json.loads((tmp_path / "t.jsonl").read_text())["committed"] == [2]


def test_passes_are_those_that_the_device_ran():
    """Where a chain may stop, how many passes it took comes with the cycle's numbers."""
    gate = make_gate(lag=1, policy="fixed", k=5)
    states = [gate.new_state(), gate.new_state()]
    k = gate.next_gear(states)
    numbers = HostCopy(torch.tensor([2.0, 3.0, 0.1, 0.2, 4.0]))  # committed, entropies, passes
    gates = [state.gate for state in states]
    gate.launched(Cycle(0, k, k + 1, 1, ["a", "b"], states, gates, numbers, stops=True))
    gate.settle_oldest()
    assert [state.stats.summary()["draft_passes"] for state in states] == [5, 5]
    assert [state.stats.summary()["mean_entropy_bits"] for state in states] == pytest.approx([0.1, 0.2])


def test_stats_add_up():
    gate = make_gate(lag=1, policy="schedule", schedule="3,0,0,3")
    state = gate.new_state()
    for committed in (4, 1, 1, 2):
        k = gate.next_gear([state])
        launch(gate, [state], k, [1.0], committed)
        gate.settle_oldest()
    assert state.stats.summary() == {
        "cycles": {"0": 2, "3": 2},
        "switches": 2,
        "draft_passes": 6,
        "int4_layers": 0,
        "mean_entropy_bits": 1.0,
        "accept_length": 2.0,
        "rejected_entropies": 0,
    }


def test_trace_is_json_even_for_unusable_entropies(tmp_path):
    gate = make_gate(trace=FileTrace(str(tmp_path / "t.jsonl")))
    state = gate.new_state()
    launch(gate, [state], gate.next_gear([state]), [math.nan])
    gate.settle_oldest()
    line = (tmp_path / "t.jsonl").read_text()
    assert json.loads(line, parse_constant=pytest.fail)["entropy_bits"] == [None]


def cost_gate(tmp_path, gears=(0, 3, 5)):
    path = tmp_path / "costs.json"
    path.write_text(table(gears=(0, 1, 3, 5), each_ms=0.1).model_dump_json())
    return Gate(PolicySettings(policy="cost", cost_table=str(path)), gears, 2, NoTrace(), NoMetrics())


def test_the_cost_gate_runs_prepared_gears_only_and_says_why(tmp_path):
    gate = cost_gate(tmp_path)
    states = [gate.new_state()]
    ran = []
    for _ in range(60):
        ran.append(gate.next_gear(states))
        launch(gate, states, ran[-1], [0.1], committed=ran[-1] + 1)
    assert set(ran) <= {0, 3, 5}
    assert gate.failures == 0
    told = json.loads(json.dumps(gate.snapshot()["explanation"]), parse_constant=pytest.fail)
    assert told["chosen"] == {str(k): ran.count(k) for k in sorted(set(ran))}
    last = told["last"]
    assert last["gear"] == ran[-1] == int(max(last["worth"], key=last["worth"].get))
    assert set(last["tokens"]) == {"0", "3", "5"}
    assert last["tokens"]["5"] > 4.0, "everything that was drafted was right"
    assert last["cost"]["5"] == pytest.approx(1.5)


def test_other_policies_have_nothing_to_explain():
    assert make_gate().snapshot()["explanation"] is None


def test_a_table_that_went_away_changes_nothing(tmp_path):
    gate = cost_gate(tmp_path)
    settings = gate.settings
    gate.change(PolicySettings(policy="fixed", k=3))
    (tmp_path / "costs.json").unlink()
    with pytest.raises(ValueError, match="No such file"):
        gate.change(settings)
    assert gate.settings.policy == "fixed"
    assert gate.next_gear([gate.new_state()]) == 3
