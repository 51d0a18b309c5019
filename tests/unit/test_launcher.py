"""What a command line means before SGLang sees it: which settings, and whether the target drafts for itself."""

import pytest

from sdsie_sglang import launch_server
from tests.unit.test_default_policy import table

DRAFT = ["--speculative-draft-model-path", "d"]


@pytest.fixture
def served(monkeypatch, tmp_path):
    """Runs the launcher up to where SGLang would be started; returns settings and what else was handed over."""
    seen = {}
    monkeypatch.setenv("SDSIE_CONFIG", "")
    monkeypatch.setattr(launch_server, "check_install", lambda: None)
    monkeypatch.setattr(launch_server, "enable_cpu_engine", lambda: False)
    monkeypatch.setattr(
        launch_server, "serve", lambda settings, arguments, **rest: seen.update(rest, settings=dict(settings))
    )

    def run(*argv: str, file: str | None = None):
        if file is not None:
            (tmp_path / "sglang.yaml").write_text(file)
            argv = (*argv, "--config", str(tmp_path / "sglang.yaml"))
        launch_server.main(["--model-path", "m", *argv])
        return seen["settings"], seen["unasked"]

    return run


def test_no_draft_named(served):
    assert served() == ({"draft": "self-int4"}, True)
    assert served(*DRAFT) == ({}, False)
    assert served(file="speculative-draft-model-path: d") == ({}, False)
    assert served("--sdsie-draft", "self-int4") == ({"draft": "self-int4"}, False)
    assert served("--sdsie-draft", "model") == ({"draft": "model"}, False), "refused later, for want of one"
    assert served("--sdsie-resolution-layers", "mlp.down_proj@all")[1] is False


def test_a_policy_for_the_self_draft_is_narrow_unless_it_says_otherwise(served):
    assert served("--sdsie-policy", "fixed")[0]["k"] == 2
    assert served("--sdsie-policy", "fixed", "--sdsie-k", "5")[0]["k"] == 5
    assert "k" not in served("--sdsie-policy", "fixed", *DRAFT)[0]


@pytest.mark.parametrize("algorithm", ["SDSIE", None])
def test_a_cost_table_means_the_cost_gate_wherever_the_algorithm_is_named(served, tmp_path, algorithm):
    path = tmp_path / "costs.json"
    path.write_text(table().model_dump_json())
    file = "speculative-draft-model-path: d\n" + (f"speculative-algorithm: {algorithm}\n" if algorithm else "")
    settings, unasked = served("--sdsie-cost-table", str(path), file=file)
    assert (settings["policy"], unasked) == ("cost", False)


def test_sglang_as_shipped_is_left_alone(served):
    assert served("--sdsie-off") == ({}, False)
    assert served("--speculative-algorithm", "NGRAM") == ({}, False)
    assert served(file="speculative-algorithm: EAGLE3") == ({}, False)
    with pytest.raises(SystemExit) as caught:
        served("--sdsie-k", "3", file="speculative_algorithm: EAGLE3")
    assert caught.value.code == 2
