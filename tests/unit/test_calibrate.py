"""Calibration against a server that takes a known time for everything."""

import pytest
import requests

from sdsie_sglang.calibration import calibration as calibrating
from sdsie_sglang.calibration.calibration import Calibration
from sdsie_sglang.calibration.readings import Burst, Power, Raw, build_table, cycle_ms
from sdsie_sglang.eval import calibrate
from sdsie_sglang.eval.cost_table import GEAR_RECORD, from_gear_record, read_costs
from sdsie_sglang.eval.energy import Readings
from sdsie_sglang.eval.server import ServerFailed
from sdsie_sglang.gears.cost_table import Conditions

PREFILL_MS, ENGAGING_MS = 50.0, 9.0
CYCLE_MS = {0: 5.0, 3: 8.0, 5: 11.0}


class FakeServer:
    """Accepts every second drafted token; its clock is the one that calibration reads."""

    def __init__(self):
        self.now_s = 0.0
        self.policies = []
        self.sent = 0

    def set_policy(self, **settings):
        self.policies.append(settings)

    def post(self, route, body):
        assert route == "/generate"
        batch, tokens = len(body["input_ids"]), body["sampling_params"]["max_new_tokens"]
        settings = self.policies[-1]
        cycle, made, switches, last, cycles = 0, 1, 0, None, {}
        ms = PREFILL_MS
        while made < tokens:
            k = {"plain": 0, "fixed": settings.get("k")}.get(settings["policy"])
            if k is None:
                on = int(settings["schedule"].split("x")[1].split(",")[0])
                k = 5 if cycle % (2 * on) < on else 0
            ms += CYCLE_MS[k] * batch + (ENGAGING_MS if last == 0 and k else 0.0)
            switches += last is not None and last != k
            cycles[str(k)] = cycles.get(str(k), 0) + 1
            made, last, cycle = made + 1 + k // 2, k, cycle + 1
        self.now_s += ms / 1000
        self.sent += 1
        stats = {"cycles": cycles, "switches": switches}
        return FakeResponse([{"meta_info": {"sdsie": stats}}] * batch)


class FakeResponse:
    def __init__(self, answers):
        self._answers = answers

    def raise_for_status(self):
        pass

    def json(self):
        return self._answers


@pytest.fixture
def server(monkeypatch):
    fake = FakeServer()
    monkeypatch.setattr(calibrating.time, "perf_counter", lambda: fake.now_s)
    return fake


def about():
    return {"models": "m", "where": "w", "method": "t"}


def test_cycles_come_out_without_prefill(server):
    raw = Raw()
    Calibration(server, (0, 3, 5), 16, 144, raw, lambda: None).measure((1, 4), rounds=2)
    table = build_table(raw, (0, 3, 5), (1, 4), **about())
    for k, ms in CYCLE_MS.items():
        assert table.at(1).ms[k] == pytest.approx(ms)
        assert table.at(4).ms[k] == pytest.approx(4 * ms)
    assert table.at(1).engaging_ms == pytest.approx(ENGAGING_MS)
    assert table.at(1).joules is None


def test_a_stopped_run_goes_on_where_it_was(server):
    raw = Raw()
    Calibration(server, (0, 5), 16, 144, raw, lambda: None).measure((1,), rounds=1)
    sent, saved = server.sent, []
    again = Raw.model_validate_json(raw.model_dump_json())
    Calibration(server, (0, 5), 16, 144, again, lambda: saved.append(1)).measure((1,), rounds=1)
    assert server.sent == sent
    Calibration(server, (0, 5), 16, 144, again, lambda: saved.append(1)).measure((1,), rounds=2)
    assert server.sent == sent + 3 * 2
    assert len(saved) == 3


def test_a_burst_that_ran_another_gear_is_no_reading(server, monkeypatch):
    """A gate that fails runs gear 0: that must not become what gear 5 costs."""
    raw = Raw()
    calibration = Calibration(server, (5,), 16, 144, raw, lambda: None)
    real = server.set_policy
    monkeypatch.setattr(server, "set_policy", lambda **settings: real(policy="plain"))
    with pytest.raises(ServerFailed, match=r"a burst of gear 5 ran \{0: 15\} cycles"):
        calibration.measure((1,), rounds=1)
    assert raw.bursts == []


def conditions(**changes):
    values = {
        "target": "t", "target_config": "1", "draft": "d", "draft_config": "2", "hardware": "h", "dtype": "bfloat16",
        "attention_backend": "fa3", "tp_size": 1,
    }  # fmt: skip
    return Conditions(**{**values, **changes})


@pytest.mark.parametrize(
    ("measured_for", "says"),
    [
        ((conditions(), 16, 144), None),
        ((conditions(target="other", target_config="3"), 16, 144), "target other, not t"),
        ((conditions(), 16, 96), "bursts of 16 and 96 tokens, not 16 and 144"),
        (None, "nobody wrote down"),
    ],
)
def test_readings_of_another_calibration_are_not_taken_for_this_ones(measured_for, says):
    raw = Raw()
    raw.claim(conditions(dtype="float16"), 1, 2)  # nothing was read yet
    if measured_for is not None:
        raw.claim(*measured_for)
    else:
        raw = Raw()
    raw.bursts.append(Burst(gear=0, batch=1, round=0, tokens=16, cycles={0: 16}, switches=0, wall_s=1.0))
    again = Raw.model_validate_json(raw.model_dump_json())
    if says is None:
        again.claim(conditions(), 16, 144)
    else:
        with pytest.raises(ValueError, match=says):
            again.claim(conditions(), 16, 144)


@pytest.mark.parametrize("error", [ServerFailed("out of memory"), requests.ConnectionError("refused")])
def test_a_server_that_fails_is_one_line(monkeypatch, tmp_path, capsys, error):
    def start(arguments):
        raise error

    monkeypatch.setattr(calibrate.Server, "start", start)
    monkeypatch.setattr("sys.argv", ["calibrate", str(tmp_path / "c.json"), "--target", "t", "--draft", "d"])
    with pytest.raises(SystemExit) as ended:
        calibrate.main()
    assert ended.value.code == 1
    assert capsys.readouterr().err == f"calibrate: {error}\n"


def test_energy_is_power_times_the_cycle(server):
    raw = Raw()
    Calibration(server, (0, 5), 16, 144, raw, lambda: None).measure((1,), rounds=1)
    raw.powers.append(Power(gear=0, batch=1, watts=400.0, window_s=10.0))
    assert build_table(raw, (0, 5), (1,), **about()).at(1).joules is None  # gear 5 is missing
    raw.powers.append(Power(gear=5, batch=1, watts=500.0, window_s=10.0))
    assert build_table(raw, (0, 5), (1,), **about()).at(1).joules == pytest.approx({0: 2.0, 5: 5.5})


def test_power_is_the_counters_over_the_window(server, monkeypatch):
    """A counter that moves every 100 ms at 300 W, by the server's own clock."""

    class Recording:
        def __init__(self, gpu):
            self.readings = Readings()

        def __enter__(self):
            return self

        def __exit__(self, *_):
            steps = range(int(server.now_s * 10) + 1)
            self.readings.energy_j = [(0.1 * step, 300.0 * 0.1 * step) for step in steps]

    monkeypatch.setattr(calibrating, "Recorder", Recording)
    raw, saved = Raw(), []
    calibration = Calibration(server, (0, 5), 16, 144, raw, lambda: saved.append(1))
    calibration.measure_power((1, 4), gpu=None)
    assert {(power.gear, power.batch) for power in raw.powers} == {(0, 1), (5, 1), (0, 4), (5, 4)}
    assert len(saved) == 4
    for power in raw.powers:
        assert power.watts == pytest.approx(300.0)
        assert power.window_s >= 10.0
    sent = server.sent
    calibration.measure_power((1, 4), gpu=None)
    assert server.sent == sent  # all there already


def test_bursts_that_tell_nothing_are_refused():
    same = Burst(gear=5, batch=1, round=0, tokens=16, cycles={5: 4}, switches=0, wall_s=1.0)
    with pytest.raises(ValueError, match="ask for more tokens"):
        cycle_ms(same, same)


def test_the_gear_record_gives_a_table_of_two_gears():
    table = read_costs(None)
    assert (table.gears, table.batches) == ((0, 5), (1, 16))
    assert table.at(1).ms[0] < table.at(1).ms[5] < 3 * table.at(1).ms[0]
    assert "H200" in table.where
    assert str(GEAR_RECORD).endswith("8b_1b.json")


def test_steady_cycles_and_switching_of_a_gear_record():
    def bursts(wall_s):
        return [{"wall_s": wall_s, "cycles": 100.0}]

    record = {
        "machine": {"gpus": [], "cores": 2, "cpu": "c"},
        "command": "x",
        "date": "2026-01-01",
        "rows": {"1": {"gear0": bursts(0.5), "k5": bursts(1.5), "switching": bursts(1.5)}},
    }
    table = from_gear_record(record)
    assert table.at(1).ms == pytest.approx({0: 5.0, 5: 15.0})
    assert table.at(1).engaging_ms == pytest.approx(16 * (15.0 - 10.0))


def test_a_shorter_twin_takes_the_prompts_out_of_a_cycle_and_not_out_of_switching():
    def burst(wall_s, cycles, **more):
        return [{"wall_s": wall_s, "cycles": cycles, **more}]

    record = {
        "machine": {"gpus": [], "cores": 2, "cpu": "c"},
        "command": "x",
        "date": "2026-01-01",
        "rows": {
            "1": {
                "gear0": burst(0.6, 100.0, short={"wall_s": 0.225, "cycles": 25.0}),  # 0.1 s of prompt
                "k5": burst(1.6, 100.0, short={"wall_s": 0.475, "cycles": 25.0}),
                "switching": burst(1.3, 100.0),
            }
        },
    }
    table = from_gear_record(record)
    assert table.at(1).ms == pytest.approx({0: 5.0, 5: 15.0})
    assert table.at(1).engaging_ms == pytest.approx(16 * (13.0 - (6.0 + 16.0) / 2))
    assert "beyond a shorter one's" in table.method


def test_gears_that_were_not_measured_are_estimated_only_when_asked_for():
    """Gear 5 takes 15 ms; its trace has four draft decodes in 4 ms beside an extend and the target."""

    def bursts(wall_s):
        return [{"wall_s": wall_s, "cycles": 100.0}]

    stages = {"graph of 60 kernels": 1000.0, "graph of 240 kernels": 4000.0, "target, graph of 300 kernels": 9000.0}
    record = {
        "machine": {"gpus": [], "cores": 2, "cpu": "c"},
        "command": "x",
        "date": "2026-01-01",
        "rows": {"1": {"gear0": bursts(0.5), "k5": bursts(1.5)}},
        "profiles": {"k5, batch 1": {"stages": {name: {"span_us": us} for name, us in stages.items()}}},
    }
    measured, estimated = from_gear_record(record), from_gear_record(record, estimate=True)
    assert measured.gears == (0, 5)
    assert "not measured and are not played" in measured.method
    assert estimated.at(1).ms == pytest.approx({0: 5.0, **{k: 10.0 + k for k in range(1, 8)}})
    assert "ESTIMATED" in estimated.method
    with pytest.raises(ValueError, match="no trace of gear 5 at batch 1"):
        from_gear_record({**record, "profiles": {}}, estimate=True)


def test_a_budget_buys_the_first_batch_size_then_what_fits(server):
    """Batch 1 is measured whatever it takes; further sizes and rounds only while they should fit."""
    calibration = Calibration(server, (0, 3, 5), 16, 144, Raw(), lambda: None)
    assert calibration.measure_within((1, 4), budget_s=0.001) == (1,)
    one_s = server.now_s
    raw = Raw()
    calibration = Calibration(server, (0, 3, 5), 16, 144, raw, lambda: None)
    began = server.now_s
    assert calibration.measure_within((1, 4), budget_s=20 * one_s) == (1, 4)
    assert server.now_s - began <= 20 * one_s
    assert {burst.round for burst in raw.bursts if burst.batch == 4} >= {0, 1}
    table = calibration.table((1, 4), models="m", where="w")
    assert table.at(4).ms == pytest.approx({k: 4 * ms for k, ms in CYCLE_MS.items()})
    assert table.at(1).engaging_ms == pytest.approx(ENGAGING_MS)


def test_short_bursts_switch_often_enough_to_engage_anew(server):
    calibration = Calibration(server, (0, 5), 4, 40, Raw(), lambda: None)
    calibration.measure((1,), rounds=1)
    cycles = calibration.schedule_cycles
    assert {"policy": "schedule", "schedule": f"5x{cycles},0x{cycles}"} in server.policies
    assert cycles * (5 + 1) + cycles + 1 < 40, "even if all that is drafted is right"


def test_a_new_server_is_told_how_many_gpus(monkeypatch, tmp_path):
    started = []

    class Stopped(Exception):
        pass

    def start(arguments):
        started.append(arguments)
        raise Stopped

    monkeypatch.setattr(calibrate.Server, "start", start)
    argv = ["calibrate", str(tmp_path / "c.json"), "--target", "t", "--draft", "d", "--tp", "2"]
    monkeypatch.setattr("sys.argv", argv)
    with pytest.raises(Stopped):
        calibrate.main()
    at = started[0].index("--tp-size")
    assert started[0][at + 1] == "2"


def test_the_policy_is_put_back_without_the_table_that_stays(server):
    class Live:
        def sdsie(self):
            policy = {"policy": "cost", "cost_table": "/t", "schedule": [5, 0], "k": 5, "window": None}
            return {"gate": {"policy": policy}}

    assert calibrate.policy_of(Live()) == {"policy": "cost", "schedule": "5,0", "k": 5}
