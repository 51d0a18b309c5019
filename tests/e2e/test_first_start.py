"""No policy named: the first start measures what gears cost, on a server of its own, then serves the cost gate. No
draft named either: the target drafts for itself."""

from sdsie_sglang.eval.server import Server
from sdsie_sglang.gears.cost_table import load_cost_table
from tests.e2e.conftest import CONTEXT, ask_all


def test_a_first_start_measures_and_serves_the_cost_gate(baseline, models, draft, prompts, tmp_path):
    arguments = ["--model-path", str(models.target), "--speculative-draft-model-path", draft, *CONTEXT]
    arguments += ["--sdsie-gears", "0,3", "--sdsie-calibration-seconds", "1"]
    with Server.start(arguments, env={"SDSIE_CACHE": str(tmp_path)}) as server:
        live = server.sdsie()
        policy = live["gate"]["policy"]
        said = [line for line in server.log.read_text(errors="replace").splitlines() if line.startswith("sdsie: ")]
        assert policy["policy"] == "cost"
        assert live["gate"]["cycles"] <= 16, "SGLang's own warm-up alone: nothing was measured on this server"
        assert "measuring what each gear costs here" in said[0]
        assert f"costs measured just now, kept in {policy['cost_table']}" in said[-1]
        table = load_cost_table(policy["cost_table"])
        assert (table.gears, table.batches[0]) == ((0, 3), 1)
        assert table.conditions is not None
        assert table.conditions.model_dump() == live["conditions"]
        assert "measured on another server" not in server.log.read_text(errors="replace")
        answers = ask_all(server, prompts[:2])
        assert answers.ids == baseline.ids[:2]
        assert server.sdsie()["gate"]["gate_failures"] == 0
    assert [path.suffix for path in (tmp_path / "cost_tables").iterdir()] == [".json"]


def test_a_model_alone_is_enough(baseline, models, prompts, tmp_path):
    arguments = ["--model-path", str(models.target), *CONTEXT]
    arguments += ["--sdsie-gears", "0,2", "--sdsie-calibration-seconds", "1"]
    with Server.start(arguments, env={"SDSIE_CACHE": str(tmp_path)}) as server:
        said = [line for line in server.log.read_text(errors="replace").splitlines() if line.startswith("sdsie: ")]
        assert "the target drafts for itself in INT4" in said[0]
        assert "cost gate for speed, gears 0 2: costs measured just now" in said[-1]
        live = server.sdsie()
        assert live["gate"]["policy"]["policy"] == "cost"
        assert live["conditions"]["draft"] == "self-int4"
        answers = ask_all(server, prompts[:2])
        assert answers.ids == baseline.ids[:2]
        server.set_policy(policy="fixed", k=2)
        drafted = ask_all(server, prompts[:2])
        assert drafted.ids == baseline.ids[:2]
        assert sum(meta["sdsie"]["draft_passes"] for meta in drafted.meta) > 0
        assert server.sdsie()["gate"]["gate_failures"] == 0
