"""What is served where no policy is named. Servers to measure are fakes here."""

from types import SimpleNamespace

import pytest

from sdsie_sglang import default_policy
from sdsie_sglang.calibration.first_start import NotMeasured, check_measurable, private_arguments
from sdsie_sglang.config import ConfigError, config_from_env, parse_config
from sdsie_sglang.default_policy import choose, completed, leaves_open, undecided
from sdsie_sglang.eval.energy import NoEnergy
from tests.unit.test_conditions import HERE, table

ARGS = SimpleNamespace(
    nnodes=1,
    dp_size=1,
    use_ray=False,
    grpc_mode=False,
    smg_grpc_mode=False,
    encoder_only=False,
    device="cuda",
    max_running_requests=48,
)


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("SDSIE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("SDSIE_CONFIG", "")  # put back afterwards, whatever is written to it


@pytest.fixture
def measured(monkeypatch):
    """Every call that starts a server to measure; what it gives, or raises, can be set."""
    calls = SimpleNamespace(count=0, fails=None, each_ms=0.5, config=None, gpu=None, bursts=None)

    def measure(arguments, conditions, gears, bursts, budget_s, gpu):
        calls.count += 1
        calls.config, calls.gpu, calls.bursts = config_from_env(), gpu, bursts
        if calls.fails is not None:
            raise calls.fails
        return table(gears=gears, each_ms=calls.each_ms, joules=2.0 if gpu else None)

    monkeypatch.setattr(default_policy, "measure", measure)
    return calls


def decide(args=ARGS, **settings):
    assert leaves_open(settings)
    return choose(settings, args, HERE, ["--model-path", "m"])


def test_only_a_policy_or_its_settings_close_the_question():
    assert leaves_open({})
    assert leaves_open({"gears": "0,3", "trace": "t", "objective": "energy", "seed": 3, "explore": 0.01})
    for name, value in {"policy": "fixed", "k": 3, "preset": "paper", "schedule": "5"}.items():
        assert not leaves_open({name: value})
    assert leaves_open({"policy": "cost", "k": 3}), "its table is to be found"
    assert not leaves_open({"draft_stop": 0.2}), "stopped chains hide from the cost gate what it would learn from"
    assert completed({"cost_table": "t"}, [])["policy"] == "cost"
    assert not leaves_open(completed({"cost_table": "t"}, []))


def test_the_first_start_measures_and_the_next_does_not(measured, capsys):
    config = decide(seed=3)
    assert (config.policy.policy, config.policy.seed) == ("cost", 3)
    assert config.built_gears(graphs=True) == default_policy.GEARS
    first = capsys.readouterr().err
    assert "measuring what each gear costs here, once" in first
    assert "cost gate for speed, gears 0 1 2 3 5 7: costs measured just now" in first
    assert measured.config.policy.policy == "plain", "the server to measure asks nothing in its turn"
    again = decide(seed=3)
    assert measured.count == 1
    assert again == config
    second = capsys.readouterr().err
    assert second.count("\n") == 1
    assert config.policy.cost_table in second


def test_what_it_says_is_what_the_costs_say(measured, capsys):
    decide()
    assert "1.00 ms in gear 0 and 4.50 at K = 7, which pays from 4.50 tokens a cycle on" in capsys.readouterr().err
    measured.each_ms = 1.0
    decide(gears="0,3")
    assert "no draft can pay at these costs" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("settings", "args", "says"),
    [
        ({"no_calibrate": True}, {}, "--sdsie-no-calibrate"),
        ({}, {"nnodes": 2}, "several machines"),
        ({}, {"dp_size": 2}, "replicas"),
        ({}, {"grpc_mode": True}, "no HTTP server"),
    ],
)
def test_without_a_table_fixed_k_is_served_and_said(measured, capsys, settings, args, says):
    config = decide(SimpleNamespace(**{**vars(ARGS), **args}), **settings)
    assert (config.policy.policy, config.policy.k) == ("fixed", 5)
    said = capsys.readouterr().err
    assert "fixed K = 5" in said
    assert says in said
    assert said.count("\n") == 1
    assert measured.count == 0


@pytest.mark.parametrize(("running", "batches"), [(48, (1, 4, 16)), (4, (1, 4)), (1, (1,))])
def test_no_batch_is_larger_than_the_server_runs_at_once(measured, running, batches):
    decide(SimpleNamespace(**{**vars(ARGS), "max_running_requests": running}))
    assert measured.bursts.batches == batches


def test_a_failed_measurement_serves_fixed_k_and_keeps_nothing(measured, capsys):
    measured.fails = NotMeasured("the server to measure it on failed: no memory")
    assert decide().policy.policy == "fixed"
    assert "no memory" in capsys.readouterr().err
    measured.fails = None
    assert decide().policy.policy == "cost"


def test_a_cost_gate_that_was_asked_for_is_served_or_refused(measured):
    assert decide(policy="cost").policy.policy == "cost"
    with pytest.raises(ConfigError, match=r"no cost table \(--sdsie-no-calibrate\)"):
        decide(policy="cost", no_calibrate=True)


@pytest.mark.parametrize(("gears", "policy", "k"), [("0,3", "fixed", 3), ("0,7", "fixed", 7), ("0", "plain", None)])
def test_the_fallback_keeps_to_the_gears_that_were_named(measured, gears, policy, k):
    config = decide(gears=gears, no_calibrate=True)
    assert config.policy.policy == policy
    assert k is None or config.policy.k == k
    assert config.gears == tuple(int(g) for g in gears.split(","))


@pytest.mark.parametrize(("gears", "k"), [(None, 2), ("0,1,5", 1), ("0,5", 5)])
def test_a_self_draft_falls_back_to_a_narrower_gear(measured, capsys, gears, k):
    config = decide(draft="self-int4", no_calibrate=True, **({"gears": gears} if gears else {}))
    assert (config.policy.policy, config.policy.k) == ("fixed", k)
    assert f"fixed K = {k}" in capsys.readouterr().err


def test_energy_needs_a_gpu_that_tells_it(measured, monkeypatch):
    def no_gpu():
        raise NoEnergy("GPU 0 gives no energy")

    monkeypatch.setattr(default_policy, "Gpu", no_gpu)
    with pytest.raises(ConfigError, match="objective energy: GPU 0 gives no energy"):
        decide(objective="energy")
    monkeypatch.setattr(default_policy, "Gpu", lambda: "a GPU")
    assert decide(objective="energy").policy.objective == "energy"
    assert measured.gpu == "a GPU"


def test_bad_settings_are_refused_before_anything_is_measured():
    for settings in ({"objective": "peace"}, {"seed": -1}, {"gears": "0,9"}, {"calibration_seconds": 0}):
        with pytest.raises(ConfigError):
            undecided(settings)


def test_no_draft_named_means_the_target_itself():
    assert "draft" not in completed({"resolution_layers": "mlp.down_proj@all"}, [])
    assert completed({}, ["--model-path", "m"])["draft"] == "self-int4"
    assert completed({"draft": "model"}, [])["draft"] == "model"
    for flag in ("--speculative-draft-model-path", "--speculative-draft-model"):
        assert "draft" not in completed({}, [flag, "d"])


def test_the_server_to_measure_is_nobody_elses(tmp_path):
    given = ["--model-path", "m", "--host", "0.0.0.0", "--port=80", "--api-key", "secret", "--tp-size", "2"]
    assert private_arguments(given) == ["--model-path", "m", "--tp-size", "2", "--disable-radix-cache"]
    file = tmp_path / "config.yaml"
    file.write_text("api-key: secret\n")
    with pytest.raises(NotMeasured, match="--api-key stands in the --config file"):
        private_arguments(["--config", str(file)])
    check_measurable(ARGS)


def test_what_was_chosen_reaches_the_processes(measured, monkeypatch):
    from sdsie_sglang.config import config_to_env

    config = decide()
    config_to_env(config)
    assert config_from_env() == config
    assert parse_config({"policy": "plain"}).policy.cost_table is None
