"""INT4: the target drafts for itself and says what it says plainly; saved and made while loading are the same."""

import pytest

from sdsie_sglang.eval.server import Server
from sdsie_sglang.int4.quantize import main as quantize
from tests.e2e.conftest import CONTEXT, ask_all, install_plugin

POLICIES = {
    **{f"fixed-{k}": {"policy": "fixed", "k": k} for k in range(1, 8)},
    "schedule": {"policy": "schedule", "schedule": "0x3,3x2,0,7x2,1"},
    "plain": {"policy": "plain"},
}


@pytest.fixture(scope="module")
def self_draft(baseline, models):
    """No draft model is named anywhere."""
    with Server.start(
        ["--model-path", str(models.target), "--sdsie-draft", "self-int4", "--sdsie-policy", "fixed", *CONTEXT]
    ) as server:
        yield server


SEQUENTIAL = ("fixed-4", "schedule")


@pytest.mark.parametrize(
    ("name", "at_once"),
    [*((name, True) for name in POLICIES), *((name, False) for name in SEQUENTIAL)],
    ids=[*(f"{name}-at-once" for name in POLICIES), *(f"{name}-sequential" for name in SEQUENTIAL)],
)
def test_self_draft_says_what_the_target_says(self_draft, baseline, prompts, name, at_once):
    self_draft.set_policy(**POLICIES[name])
    answers = ask_all(self_draft, prompts, at_once=at_once)
    assert answers.ids == baseline.ids
    assert self_draft.sdsie()["gate"]["gate_failures"] == 0


def test_every_cycle_runs_k_passes_and_nothing_else(self_draft, prompts):
    self_draft.set_policy(policy="fixed", k=4)
    for meta in ask_all(self_draft, prompts).meta:
        stats = meta["sdsie"]
        assert stats["cycles"] == {"4": meta["spec_verify_ct"]}
        assert stats["draft_passes"] == 4 * meta["spec_verify_ct"]
        assert 2.0 < stats["accept_length"] <= 5.0


def test_the_draft_is_int4_and_not_the_target(self_draft, prompts):
    """Were it the target, every cycle would be accepted whole (as the next test's is)."""
    self_draft.set_policy(policy="fixed", k=7)
    assert any(meta["sdsie"]["accept_length"] < 7.5 for meta in ask_all(self_draft, prompts).meta)


def test_a_draft_that_equals_the_target_is_accepted_whole(baseline, models, prompts, tmp_path, request):
    """Both weights the same: then positions, KV slots and the chain's order must all be right."""
    plugin = install_plugin(tmp_path, request.path.parent / "saboteur" / "sdsie_same_precision.py")
    arguments = ["--model-path", str(models.target), "--sdsie-draft", "self-int4", "--sdsie-policy", "fixed", *CONTEXT]
    with Server.start(arguments, env={"PYTHONPATH": plugin}) as server:
        for k in (1, 5):
            server.set_policy(policy="fixed", k=k)
            answers = ask_all(server, prompts, max_new_tokens=2 * (k + 1) + 1)
            assert answers.ids == [ids[: 2 * (k + 1) + 1] for ids in baseline.ids]
            assert [meta["sdsie"]["accept_length"] for meta in answers.meta] == [k + 1] * len(prompts)


def test_a_saved_model_is_the_one_made_while_loading(models, prompts, tmp_path):
    """Target quantised while loading, draft the same saved: every cycle is accepted whole."""
    saved = tmp_path / "saved"
    assert quantize([str(models.target), str(saved), "--calibration", "g32"]) == 0
    arguments = ["--model-path", str(models.target), "--speculative-draft-model-path", str(saved), *CONTEXT]
    arguments += ["--quantization", "sdsie_int4", "--sdsie-int4-calibration", "g32", "--sdsie-policy", "fixed"]
    with Server.start(arguments) as server:
        server.set_policy(policy="fixed", k=5)
        answers = ask_all(server, prompts, max_new_tokens=13)
        assert [meta["sdsie"]["accept_length"] for meta in answers.meta] == [6.0] * len(prompts)
        server.set_policy(policy="plain")
        assert ask_all(server, prompts, max_new_tokens=13).ids == answers.ids
