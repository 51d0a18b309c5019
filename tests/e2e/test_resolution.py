"""The Resolution Gear on one server: off it is plain SGLang, on every cycle runs INT4, and the clutch switches."""

import json
import subprocess
import sys

import pytest
import requests

from sdsie_sglang.eval.server import Server
from sdsie_sglang.gears import Observation, PolicySettings, build_policy
from tests.e2e.conftest import CONSTRAINTS, CONTEXT, TOKENS, ask_all, install_plugin

SPEC = "mlp.down_proj@spread:8"
LAYERS = 8


@pytest.fixture(scope="module")
def trace_file(tmp_path_factory):
    return tmp_path_factory.mktemp("trace") / "cycles.jsonl"


@pytest.fixture(scope="module")
def server(baseline, models, trace_file):
    arguments = ["--model-path", str(models.target), "--sdsie-resolution-layers", SPEC, *CONTEXT]
    with Server.start([*arguments, "--sdsie-trace", str(trace_file), "--enable-metrics"]) as server:
        yield server


def test_the_clutch_is_the_default_and_the_layers_are_shown(server):
    live = server.sdsie()
    assert live["gate"]["policy"]["policy"] == "entropy"
    assert len(live["resolution"]["layers"]) == LAYERS


@pytest.mark.parametrize("at_once", [False, True], ids=["sequential", "at-once"])
def test_policy_plain_is_plain_sglang(server, baseline, prompts, at_once):
    server.set_policy(policy="plain")
    answers = ask_all(server, prompts, at_once=at_once)
    assert answers.ids == baseline.ids
    for meta in answers.meta:
        assert set(meta["sdsie"]["cycles"]) == {"0"}
        assert meta["sdsie"]["int4_layers"] == 0


def test_penalties_work_in_gear_0(server, baseline, prompts):
    server.set_policy(policy="plain")
    server.flush_cache()
    found = [server.generate(prompts[-1], max_new_tokens=TOKENS, **c)["output_ids"] for c in CONSTRAINTS]
    assert tuple(found) == baseline.constrained


def test_policy_fixed_runs_int4_in_every_cycle(server, prompts):
    server.set_policy(policy="plain")
    plain = ask_all(server, prompts)
    server.set_policy(policy="fixed", k=3)
    answers = ask_all(server, prompts)
    for meta in answers.meta:
        stats = meta["sdsie"]
        assert stats["cycles"] == {"R": TOKENS - 1}, "one token a cycle after the prefill's"
        assert stats["int4_layers"] == LAYERS * (TOKENS - 1)
        assert stats["draft_passes"] == 0
        assert stats["accept_length"] == 1.0
    assert answers.ids != plain.ids, "eight layers in four bits leave their mark on four answers"
    assert server.sdsie()["gate"]["gate_failures"] == 0


def test_the_clutch_switches_and_the_trace_says_what_ran(server, prompts, trace_file):
    """Replays the traced entropies through the same policy object, away from the server."""
    settings = {"policy": "entropy", "preset": "class", "smoothing": "window"}
    server.set_policy(**settings)
    rids = {meta["id"] for meta in ask_all(server, prompts).meta}
    lines = [line for line in map(json.loads, trace_file.read_text().splitlines()) if line["rids"][0] in rids]
    lag = server.sdsie()["gate"]["lag"]
    policy = build_policy(PolicySettings(**settings))
    for rid in rids:
        cycles, gate = [line for line in lines if line["rids"] == [rid]], policy.start_request()
        for n, cycle in enumerate(cycles):
            if n >= lag:
                gate.observe(Observation(1, cycles[n - lag]["entropy_bits"], 1))
            engaged = policy.decide([gate]) > 0
            assert cycle["k"] == ("R" if engaged else 0)
            assert cycle["int4_layers"] == (LAYERS if engaged else 0)
    assert {line["k"] for line in lines} == {0, "R"}, "the prompts exercise both gears"


def test_metrics_name_the_gear(server, prompts):
    server.set_policy(policy="fixed")
    ask_all(server, prompts[-1:])
    text = requests.get(f"{server.url}/metrics", timeout=30).text
    assert any('gear="R"' in line for line in text.splitlines() if line.startswith("sdsie:cycles_total"))
    assert any(line.startswith("sdsie:int4_layers_total") for line in text.splitlines())


def test_a_bad_spec_ends_in_one_line_before_weights_are_loaded(models):
    done = subprocess.run(
        [
            sys.executable,
            *("-m", "sdsie_sglang.launch_server", "--model-path", str(models.target)),
            *("--sdsie-resolution-layers", "mlp.down_proj@30"),
        ],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 2
    assert "layer 30 of mlp.down_proj@30 is not there: the model has 0 to 29" in done.stderr.splitlines()[-1]


def test_full_precision_that_calls_itself_gear_r_ends_the_server(models, prompts, tmp_path, request):
    plugin = install_plugin(tmp_path, request.path.parent / "saboteur" / "sdsie_same_precision.py")
    arguments = ["--model-path", str(models.target), "--sdsie-resolution-layers", SPEC, *CONTEXT]
    arguments += ["--sdsie-policy", "schedule", "--sdsie-schedule", "0,1", "--skip-server-warmup"]
    with Server.start(arguments, env={"PYTHONPATH": plugin}) as server:
        with pytest.raises(requests.RequestException):
            server.generate(prompts[0], max_new_tokens=24, ignore_eos=True)
        server.process.wait(60)
        assert "gear R was decided, but" in server.log.read_text(errors="replace")
