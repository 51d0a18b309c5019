"""All of a cycle's draft passes as one: the same chains as pass by pass. On the CPU nothing is captured."""

import json
from collections import Counter

import pytest

from sdsie_sglang.eval.server import Server
from sdsie_sglang.eval.simulate import RuleChooser, walk
from sdsie_sglang.eval.trace import TRACES, load
from sdsie_sglang.gears.draft_rules import CumulativeConfidence
from tests.e2e.conftest import CONTEXT, TOKENS, ask_all

LIMIT = 0.2

POLICIES = (
    {"policy": "fixed", "k": 1},
    {"policy": "fixed", "k": 5},
    {"policy": "schedule", "schedule": "5x3,0x3,3x2"},  # behind gear 0 the draft catches up as ever
)


class AfterAWholeChain(RuleChooser):
    """Behind the prompt the draft catches up pass by pass, and nothing stops it."""

    def choose(self, t: int) -> int:
        return 7 if t == 0 else super().choose(t)


@pytest.fixture(scope="module")
def one_by_one(models, draft):
    arguments = ["--model-path", str(models.target), "--speculative-draft-model-path", draft, *CONTEXT]
    with Server.start(
        [*arguments, "--sdsie-policy", "fixed", "--sdsie-gears", "0,1,3,5", "--sdsie-no-draft-graph"]
    ) as server:
        assert "draft graphs prepared" not in server.log.read_text(errors="replace")
        yield server


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: "-".join(map(str, policy.values())))
def test_the_same_answers_in_the_same_cycles(gears, one_by_one, baseline, prompts, policy):
    assert "draft graphs prepared" in gears.log.read_text(errors="replace")
    cycles = []
    for server in (gears, one_by_one):
        server.set_policy(**policy)
        answers = ask_all(server, prompts)
        assert answers.ids == baseline.ids
        cycles.append([(meta["spec_verify_ct"], meta["sdsie"]["cycles"]) for meta in answers.meta])
    assert cycles[0] == cycles[1]
    for server in (gears, one_by_one):
        assert ask_all(server, prompts, at_once=True).ids == baseline.ids
    assert gears.sdsie()["gate"]["gate_failures"] == 0


def test_a_chain_ends_where_the_draft_stops_believing(models, draft, baseline, prompts, tmp_path):
    """The same answers; and the cycles and passes that the simulator names from traces of these prompts."""
    trace_path = tmp_path / "cycles.jsonl"
    arguments = ["--model-path", str(models.target), "--speculative-draft-model-path", draft, *CONTEXT]
    arguments += ["--sdsie-policy", "fixed", "--sdsie-k", "7", "--sdsie-draft-stop", str(LIMIT)]
    with Server.start([*arguments, "--sdsie-trace", str(trace_path)]) as server:
        answers = ask_all(server, prompts)
        together = ask_all(server, prompts, at_once=True)
    assert answers.ids == together.ids == baseline.ids
    cycles = [json.loads(line) for line in trace_path.read_text().splitlines()]
    ran = Counter(line["draft_passes"] - line["catch_up_passes"] for line in cycles)
    assert {1, 7} <= set(ran), "some chains end at once, some are whole"
    traces = [trace.cut(TOKENS) for trace in load(TRACES).traces if trace.category == "reference"]
    for meta, trace in zip(answers.meta, traces, strict=False):
        expected = walk(trace, AfterAWholeChain(trace, CumulativeConfidence(LIMIT), 7))
        assert meta["spec_verify_ct"] == len(expected)
        assert meta["sdsie"]["draft_passes"] == sum(expected)
