"""All of a cycle's draft passes as one: the same chains as pass by pass. On the CPU nothing is captured."""

import pytest

from sdsie_sglang.eval.server import Server
from tests.e2e.conftest import CONTEXT, ask_all

POLICIES = (
    {"policy": "fixed", "k": 1},
    {"policy": "fixed", "k": 5},
    {"policy": "schedule", "schedule": "5x3,0x3,3x2"},  # behind gear 0 the draft catches up as ever
)


@pytest.fixture(scope="module")
def whole(models, draft):
    arguments = ["--model-path", str(models.target), "--speculative-draft-model-path", draft, *CONTEXT]
    with Server.start(
        [*arguments, "--sdsie-policy", "fixed", "--sdsie-gears", "0,1,3,5", "--sdsie-draft-graph"]
    ) as server:
        assert "draft graphs prepared" in server.log_tail(1000)
        yield server


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: "-".join(map(str, policy.values())))
def test_the_same_answers_in_the_same_cycles(gears, whole, baseline, prompts, policy):
    cycles = []
    for server in (gears, whole):
        server.set_policy(**policy)
        answers = ask_all(server, prompts)
        assert answers.ids == baseline.ids
        cycles.append([(meta["spec_verify_ct"], meta["sdsie"]["cycles"]) for meta in answers.meta])
    assert cycles[0] == cycles[1]
    assert ask_all(whole, prompts, at_once=True).ids == baseline.ids
    assert whole.sdsie()["gate"]["gate_failures"] == 0
