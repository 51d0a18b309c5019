"""Each trap is set on a fake GPU or in a record, and the rule must fire; without the trap it must not."""

import pytest

from sdsie_sglang.eval import rules
from sdsie_sglang.eval.energy import mean_power_w
from sdsie_sglang.eval.load import warm_up
from sdsie_sglang.eval.plan import ConfigProblem, WarmUp, load_config
from sdsie_sglang.eval.record import Stretch, WarmUpReading
from tests.unit.ruler_fakes import FakeGpu, FakeServer, Lab, config, fake_record

LABELS = [("a", [1]), ("b", [2]), ("c", [3])]


def warmed(gpu: FakeGpu, **settings):
    lab = Lab(gpu)
    server = FakeServer(lab, tok_per_s=250.0)
    lab.run(0.05)
    values = {"min_s": 0, "max_s": 400, "reading_s": 1.0, **settings}
    readings, settled = warm_up(server, LABELS, WarmUp(**values), rules.gauge_of(lab.readings), gpu.clock)
    return lab, readings, settled


def readings_of(**powers_and_temperatures):
    """label=[(W, °C), ...] -> readings in turn."""
    rounds = zip(*powers_and_temperatures.values(), strict=True)
    return [
        WarmUpReading(label=label, start_s=0, end_s=1, tokens=1, power_w=w, temperature_c=c)
        for values in rounds
        for label, (w, c) in zip(powers_and_temperatures, values, strict=True)
    ]


def fired(flags) -> list[str]:
    return [flag.rule for flag in flags]


# -- convergence ---------------------------------------------------------------------------------


def test_cold_gpu_is_not_warm_until_the_transient_is_over():
    gpu = FakeGpu(start_c=30.0)
    *_, settled = warmed(gpu)
    assert settled
    assert gpu.now_s > 40.0
    assert gpu.temperature_c == pytest.approx(60.0, abs=5.0)
    hot = FakeGpu(start_c=60.0)
    warmed(hot)
    assert hot.now_s < 30.0


def test_warm_up_that_runs_out_of_time_says_so():
    lab, readings, settled = warmed(FakeGpu(start_c=30.0), max_s=20)
    assert settled is False
    record = fake_record(warm_up=readings, warm_up_settled=settled, readings=lab.readings)
    assert "unsettled_warm_up" in fired(rules.record_flags(record))


def test_pooled_convergence_of_power_would_be_fooled():
    """One label's power climbs as another's falls: their pooled mean stands still."""
    trap = readings_of(up=[(400 + 10 * i, 60) for i in range(6)], down=[(400 - 10 * i, 60) for i in range(6)])
    pooled = [r.power_w for r in trap]
    assert sum(pooled[:6]) == sum(pooled[6:])
    assert not rules.settled(trap, WarmUp())
    still = readings_of(up=[(400, 60)] * 6, down=[(300, 60)] * 6)
    assert rules.settled(still, WarmUp())


def test_pooled_convergence_of_temperature_would_be_fooled():
    trap = readings_of(up=[(400, 60 + i) for i in range(6)], down=[(400, 60 - i) for i in range(6)])
    assert not rules.settled(trap, WarmUp())


def test_too_few_readings_are_not_settled():
    assert not rules.settled(readings_of(a=[(400, 60)] * 5), WarmUp())


def test_temperature_tolerance_below_the_sensors_step_is_refused(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("name: x\nparts: {all: [draft-k5]}\nwarm_up: {temperature_tolerance_c: 0.3}\n")
    with pytest.raises(ConfigProblem, match="below the sensor's step"):
        load_config(str(path))


def test_power_tolerance_below_the_noise_is_flagged():
    noisy = readings_of(a=[(400 * (1 + 0.05 * (-1) ** i), 60) for i in range(8)])
    assert fired(rules.tolerance_below_noise(fake_record(warm_up=noisy))) == ["tolerance_below_noise"]
    quiet = readings_of(a=[(400 * (1 + 0.002 * (-1) ** i), 60) for i in range(8)])
    assert not rules.tolerance_below_noise(fake_record(warm_up=quiet))


def test_unequal_warm_up_of_the_baseline_is_flagged():
    settings = config(warm_up={"min_s": 3})
    fair = [fake_record(role, m, settings=settings) for role, m in (("open", "plain"), ("method", "draft-k5"))]
    assert not rules.unequal_warm_up(fair)
    hasty = [WarmUpReading(label="warmup-1", start_s=0, end_s=0.5, tokens=10)]
    trap = fake_record("close", "plain", settings=settings, warm_up=hasty)
    assert fired(rules.unequal_warm_up([*fair, trap])) == ["unequal_warm_up"]
    other = [WarmUpReading(label="another", start_s=0, end_s=4, tokens=10)]
    assert fired(rules.unequal_warm_up([*fair, fake_record(warm_up=other)])) == ["unequal_warm_up"]


# -- the machine ---------------------------------------------------------------------------------


def test_thermal_transient_during_timing():
    assert fired(rules.thermal_transient(fake_record(gpu=FakeGpu(start_c=35.0)))) == ["thermal_transient"]
    assert not rules.thermal_transient(fake_record(gpu=FakeGpu(start_c=60.0)))


def test_throttling():
    flags = rules.throttled(fake_record(gpu=FakeGpu(throttle=0x20 | 0x01)))
    assert fired(flags) == ["throttled"]
    assert "thermal" in flags[0].text
    assert "100%" in flags[0].text
    assert not rules.throttled(fake_record(gpu=FakeGpu(throttle=0x01 | 0x02)))  # idle, clocks set by the user


def test_other_tenants():
    gpu = FakeGpu()
    record = fake_record(gpu=gpu)
    assert not rules.other_tenants(record)
    record.before = {"memory_gib": 0.5, "processes": 1.0}
    assert fired(rules.other_tenants(record)) == ["other_tenants"]
    record.before = None
    record.readings.slow[-20].processes += 1
    assert fired(rules.other_tenants(record)) == ["other_tenants"]
    record.readings.slow[-20].processes -= 1
    record.readings.slow[-20].memory_gib += 4
    assert fired(rules.other_tenants(record)) == ["other_tenants"]


def test_other_tenants_beside_our_waiting_servers():
    gpu = FakeGpu(processes=0, pids={11, 12, 13})
    lab = Lab(gpu)
    lab.recorder._gpu.ours = frozenset({11, 12, 13})
    lab.run(5)
    timed = lab.run(5)
    record = fake_record(readings=lab.readings, phases=[timed], before={"processes": 0, "memory_gib": 0, "waiting": 2})
    assert not rules.other_tenants(record)
    gpu.pids = {11, 12, 99}  # one of ours has gone, so that their number tells nothing
    record.phases = [lab.run(5)]
    assert fired(rules.other_tenants(record)) == ["other_tenants"]


def waited(tok_per_s: float, waiting: int, paused_s: float | None = None, method: str = "plain"):
    before = {"processes": 0.0, "memory_gib": 0.0, "waiting": float(waiting)}
    return fake_record("method", method, tok_per_s=tok_per_s, before=before, paused_s=paused_s)


def test_servers_that_wait_cost_the_one_that_is_measured():
    slowed = [waited(432, 11), waited(300, 6, method="draft-k5"), waited(595, 3), waited(647, 0)]
    flags = rules.waiting_servers(slowed)
    assert fired(flags) == ["waiting_servers"]
    assert "432 tok/s beside 11, 595 tok/s beside 3, 647 tok/s beside 0" in flags[0].text
    assert "idle and not paused" in flags[0].text
    assert "waiting_servers" in fired(rules.group_flags(slowed))
    assert "idle" not in rules.waiting_servers([waited(432, 11, 9.0), waited(595, 3, 9.0), waited(647, 0, 9.0)])[0].text
    assert not rules.waiting_servers([waited(595, 11), waited(432, 3), waited(647, 0)])  # not in order
    assert not rules.waiting_servers([waited(640, 11), waited(645, 3), waited(647, 0)])  # within what drifts
    assert not rules.waiting_servers([waited(432, 11), waited(647, 0)])  # two tell nothing
    assert not rules.waiting_servers([fake_record(method="plain") for _ in range(3)])  # no GPU, nobody counted


def test_counter_and_power_apart():
    record = fake_record(gpu=FakeGpu())
    assert not rules.energy_rules(record)
    record.readings.power_w = [(t, w * 0.8) for t, w in record.readings.power_w]
    assert fired(rules.energy_rules(record)) == ["counter_against_power"]


def test_too_short_a_window():
    record = fake_record(gpu=FakeGpu(), tok_per_s=1000.0)
    assert fired(rules.energy_rules(record)) == ["no_energy"]


def test_drift():
    assert rules.drift(100.0, 102.0) == (pytest.approx(0.02), None)
    change, text = rules.drift(100.0, 96.0)
    assert change == pytest.approx(-0.04)
    assert text


def test_resumed_and_moved_repetitions():
    first, later = fake_record("open", "plain"), fake_record(run="r2")
    assert fired(rules.split_brackets([first, later])) == ["resumed"]
    moved = fake_record(machine={**first.machine, "cpu": "another"})
    assert fired(rules.split_brackets([first, moved])) == ["other_machine"]
    [flag] = rules.split_brackets([first, fake_record(machine={**first.machine, "commit": "c-dirty"})])
    assert flag.text.endswith(": commit c-dirty, not c")


# -- requests and methods --------------------------------------------------------------------------


def test_repeated_prompt():
    record = fake_record()
    assert not rules.repeated_prompts(record)
    record.requests.append(record.requests[0])
    assert fired(rules.repeated_prompts(record)) == ["repeated_prompt"]


def test_another_chat_template():
    records = [fake_record(), fake_record("open", "plain"), fake_record("close", "plain")]
    assert not rules.unequal_inputs(records)
    records[0].requests[3].input_ids_sha = "without the template"
    flags = rules.unequal_inputs(records)
    assert fired(flags) == ["unequal_inputs"]
    assert "draft-k5" in flags[0].about
    del records[1].requests[0]
    assert len(rules.unequal_inputs(records)) == 2


def test_doubled_start_token():
    assert rules.doubled_start([[1, 1, 5], [1, 1, 6]])
    assert not rules.doubled_start([[1, 1, 5], [1, 6]])
    assert not rules.doubled_start([])


def test_ignored_end_is_said():
    assert fired(rules.ignores_end(fake_record(settings=config(ignore_eos=True)))) == ["ignore_eos"]
    assert not rules.ignores_end(fake_record())


@pytest.mark.parametrize(
    ("method", "accept_length", "fires"),
    [
        ("eagle-k5", 1.01, True),
        ("eagle-k5", None, True),
        ("draft-k5", 3.1, False),
        ("plain", None, False),
        ("entropy-tuned", 1.0, False),
    ],
)
def test_not_speculating(method, accept_length, fires):
    assert bool(rules.not_speculating(method, accept_length)) == fires


def test_a_gate_that_failed_is_not_the_method_that_was_meant():
    assert fired(rules.record_flags(fake_record(live={"gate": {"gate_failures": 2}}))) == ["gate_failures"]
    assert not rules.gate_failures(fake_record(live={"gate": {"gate_failures": 0}}))
    assert not rules.gate_failures(fake_record())


def test_checkpoint_notes_reach_the_report():
    assert fired(rules.record_flags(fake_record(notes=["no system prompt"]))) == ["checkpoint"]


def test_speed_up_that_accept_length_does_not_explain():
    assert rules.unexplained_speed_up(9.0, 3.0)
    assert not rules.unexplained_speed_up(2.9, 3.0)
    assert rules.unexplained_speed_up(1.2, None)


def test_length_mismatch():
    assert rules.length_mismatch(70, 100)
    assert not rules.length_mismatch(110, 100)


def test_gauge_is_the_mean_over_the_stretch():
    lab = Lab(FakeGpu(leak=0.0))
    stretch: Stretch = lab.run(3)
    assert rules.gauge_of(lab.readings)(stretch.start_s, stretch.end_s) == (
        pytest.approx(mean_power_w(lab.readings, 0, 3)),
        pytest.approx(60, abs=1),
    )
