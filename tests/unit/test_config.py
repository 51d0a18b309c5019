import argparse
import json

import pytest

from sdsie_sglang.cli import add_cli_args, config_from_args
from sdsie_sglang.config import ConfigError, config_from_env, config_to_env, flat, parse_config, parse_policy
from sdsie_sglang.gears import build_policy
from sdsie_sglang.gears.settings import unprepared
from sdsie_sglang.patches.internal_state import encode_update, split_update
from tests.unit.test_conditions import table


def parse(*argv):
    parser = argparse.ArgumentParser()
    add_cli_args(parser)
    return config_from_args(parser.parse_args(argv))


def test_defaults_are_the_shippable_ones():
    config = parse()
    assert (config.policy.policy, config.policy.k) == ("fixed", 5)
    assert config.built_gears(graphs=True) == (0, 5)
    assert config.built_gears(graphs=False) == (0, 1, 2, 3, 4, 5, 6, 7)


def test_flags_reach_the_policy():
    config = parse("--sdsie-policy", "entropy", "--sdsie-preset", "paper", "--sdsie-alpha", "0.5", "--sdsie-k", "3")
    assert config.policy.model_dump(include={"policy", "k", "theta_low", "alpha"}) == {
        "policy": "entropy",
        "k": 3,
        "theta_low": 0.55,
        "alpha": 0.5,
    }


@pytest.mark.parametrize(
    "text", ["policy: entropy\nk: 3\ngears: [0, 3]\n", '{"policy": "entropy", "k": 3, "gears": [0, 3]}']
)
def test_settings_file_in_yaml_or_json_and_flags_win(tmp_path, text):
    file = tmp_path / "settings"
    file.write_text(text)
    assert parse("--sdsie-settings", str(file)).gears == (0, 3)
    assert parse("--sdsie-settings", str(file), "--sdsie-policy", "plain").policy.policy == "plain"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("- a list", "names and values"),
        ("{", "neither YAML nor JSON"),
        ("colour: 1", "colour: "),
        ("k: 9", "k: "),
    ],
)
def test_bad_settings_file(tmp_path, text, says):
    file = tmp_path / "settings"
    file.write_text(text)
    with pytest.raises(ConfigError, match=says):
        parse("--sdsie-settings", str(file))


@pytest.mark.parametrize("text", ["theta-low: 0.1\ngears: 0,5\n", "--sdsie-theta-low: 0.1\ngears: [0, 5]\n"])
def test_settings_file_takes_the_names_of_the_flags(tmp_path, text):
    file = tmp_path / "settings"
    file.write_text(text)
    config = parse("--sdsie-settings", str(file))
    assert (config.policy.theta_low, config.gears) == (0.1, (0, 5))


@pytest.mark.parametrize(
    "text", ["off: true", "1: 2", "null: 3", "[" * 3000, "schedule: '0x9999" + ",0x9999" * 7 + "'"]
)
def test_odd_settings_files_end_in_a_line(tmp_path, text):
    file = tmp_path / "settings"
    file.write_text(text)
    with pytest.raises(ConfigError):
        parse("--sdsie-settings", str(file))


def test_environment_is_below_the_flags(monkeypatch):
    monkeypatch.setenv("SDSIE_CONFIG", '{"policy": "entropy", "k": 3}')
    config = parse("--sdsie-k", "4")
    assert (config.policy.policy, config.policy.k) == ("entropy", 4)


def test_missing_settings_file():
    with pytest.raises(ConfigError, match="No such file"):
        parse("--sdsie-settings", "/nowhere/settings.yaml")


def test_gears_must_hold_those_of_the_policy():
    with pytest.raises(ConfigError, match=r"lack \[5\]"):
        parse("--sdsie-gears", "0,3")
    with pytest.raises(ConfigError, match="0 to 7"):
        parse("--sdsie-gears", "0,5,9")


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"draft_stop": 0.2, "no_draft_graph": True}, "in one graph"),
        ({"draft_stop": 0.2, "draft": "self-int4"}, "a draft model of its own"),
        ({"draft_stop": 1.0}, "less than 1"),
    ],
)
def test_what_a_chain_that_stops_needs(settings, says):
    with pytest.raises(ConfigError, match=says):
        parse_config(settings)


def test_environment_round_trip(monkeypatch):
    monkeypatch.delenv("SDSIE_CONFIG", raising=False)
    config = parse("--sdsie-policy", "schedule", "--sdsie-schedule", "5x2,0", "--sdsie-trace", "/tmp/t")
    assert not config.check_ranks
    config = parse("--sdsie-policy", "schedule", "--sdsie-schedule", "5x2,0", "--sdsie-check-ranks")
    assert config.check_ranks
    config_to_env(config)
    assert config_from_env() == config
    assert parse_config(flat(config)) == config


@pytest.mark.parametrize(("text", "says"), [("{", "not JSON"), ("[1]", "object"), ('{"k": 0}', "k: ")])
def test_bad_environment(monkeypatch, text, says):
    monkeypatch.setenv("SDSIE_CONFIG", text)
    with pytest.raises(ConfigError, match=says):
        config_from_env()


def test_runtime_changes_travel_as_names_with_numbers():
    settings = {"policy": "entropy", "theta_low": 0.1, "k": 3, "schedule": "5x8,0x8"}
    sent = json.loads(json.dumps(encode_update(settings)))
    assert all(isinstance(value, int | float) for value in sent.values())
    assert split_update({**sent, "pp_max_micro_batch_size": 8}) == (settings, {"pp_max_micro_batch_size": 8})


@pytest.fixture
def costs(tmp_path):
    path = tmp_path / "costs.json"
    path.write_text(table(gears=(0, 1, 3, 5)).model_dump_json())
    return str(path)


def test_a_cost_table_decides_which_gears_are_built(costs):
    config = parse(
        "--sdsie-policy", "cost", "--sdsie-cost-table", costs, "--sdsie-objective", "speed", "--sdsie-seed", "4"
    )
    assert config.built_gears(graphs=True) == (0, 1, 3, 5)
    assert (config.policy.objective, config.policy.seed) == ("speed", 4)
    later = parse("--sdsie-policy", "fixed", "--sdsie-k", "2", "--sdsie-cost-table", costs)
    assert later.built_gears(graphs=True) == (0, 1, 2, 3, 5), "it may be asked for while the server runs"
    bounded = parse("--sdsie-policy", "cost", "--sdsie-cost-table", costs, "--sdsie-gears", "0,3")
    assert bounded.built_gears(graphs=True) == (0, 3)
    assert unprepared(bounded.policy, (0, 3)) is None
    assert build_policy(bounded.policy, (0, 3)).explain()["chosen"] == {}


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--sdsie-policy", "cost"], "needs cost_table"),
        (["--sdsie-policy", "cost", "--sdsie-cost-table", "/nowhere"], "No such file"),
        (["--sdsie-policy", "fixed", "--sdsie-cost-table", "/nowhere"], "No such file"),
        (
            ["--sdsie-policy", "cost", "--sdsie-cost-table", "{costs}", "--sdsie-gears", "0,3,6"],
            r"gears \[6\] are not in",
        ),
        (["--sdsie-policy", "cost", "--sdsie-cost-table", "{costs}", "--sdsie-gears", "0"], "a gear besides 0"),
        (["--sdsie-policy", "cost", "--sdsie-cost-table", "{costs}", "--sdsie-objective", "energy"], "no energies"),
        (["--sdsie-policy", "cost", "--sdsie-cost-table", "{costs}", "--sdsie-objective", "peace"], "objective: "),
        (["--sdsie-policy", "cost", "--sdsie-cost-table", "{costs}", "--sdsie-seed", "-1"], "seed: "),
        (["--sdsie-policy", "cost", "--sdsie-cost-table", "{bad}"], "cost table"),
        (["--sdsie-policy", "cost", "--sdsie-cost-table", "{binary}"], "not a text file"),
        (["--sdsie-calibration-seconds", "0"], "calibration_seconds: "),
    ],
)
def test_what_is_wrong_with_a_cost_gate_is_said(costs, tmp_path, flags, says):
    (tmp_path / "bad").write_text('{"format": 1}')
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    names = {"costs": costs, "bad": tmp_path / "bad", "binary": tmp_path / "binary"}
    with pytest.raises(ConfigError, match=says) as caught:
        parse(*(flag.format(**names) for flag in flags))
    assert "\n" not in str(caught.value)


def test_a_chain_that_stops_hides_from_the_cost_gate(costs):
    with pytest.raises(ConfigError, match="hides from the cost gate"):
        parse("--sdsie-cost-table", str(costs), "--sdsie-draft-stop", "0.2")


def test_a_running_server_keeps_its_cost_table(costs, monkeypatch):
    monkeypatch.setenv("SDSIE_CONFIG", json.dumps({"policy": "plain", "cost-table": costs}))
    assert parse_policy({"policy": "cost", "explore": 0.01}).cost_table == costs
    with pytest.raises(ConfigError, match="keeps the one it was started with"):
        parse_policy({"policy": "cost", "cost_table": "/etc/passwd"})
    monkeypatch.setenv("SDSIE_CONFIG", "{}")
    with pytest.raises(ConfigError, match="needs cost_table"):
        parse_policy({"policy": "cost"})


def test_a_cost_gate_with_none_of_its_gears_is_refused(costs):
    policy = parse("--sdsie-policy", "cost", "--sdsie-cost-table", costs).policy
    assert "were not prepared" in unprepared(policy, (0, 2, 7))
    assert unprepared(policy, (0, 3, 7)) is None
