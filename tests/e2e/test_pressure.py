"""Overlap scheduling off, prompts in chunks, little KV memory, and requests retracted again and again."""

import pytest

from sdsie_sglang.eval.chat import chat_ids
from sdsie_sglang.eval.server import Server
from tests.e2e.conftest import ask_all

LONG = "Summarise these numbers: " + ", ".join(str(n) for n in range(60))


@pytest.fixture(scope="module")
def pressed(baseline, models, draft):
    """KV for 480 tokens; SGLang's own test switch takes a request's KV away every eleventh forward."""
    with Server.start(
        [
            "--model-path", str(models.target), "--speculative-draft-model-path", draft,
            "--context-length", "460", "--max-total-tokens", "480", "--chunked-prefill-size", "64",
            "--disable-overlap-schedule", "--schedule-conservativeness", "0.05", "--sdsie-policy", "entropy",
        ],
        env={"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "11"},
    ) as server:  # fmt: skip
        yield server


def test_without_overlap_the_lag_is_one(pressed):
    assert pressed.sdsie()["gate"]["lag"] == 1


@pytest.mark.parametrize("policy", [{"policy": "fixed", "k": 5}, {"policy": "entropy", "preset": "class"}])
def test_sequential_answers_equal_the_baseline(pressed, baseline, prompts, policy):
    pressed.set_policy(**policy)
    assert ask_all(pressed, prompts).ids == baseline.ids


def test_retracted_requests_finish_with_the_same_answers(pressed, baseline, prompts):
    pressed.set_policy(policy="schedule", schedule="5x2,0x3")
    answers = ask_all(pressed, prompts, at_once=True)
    assert sum(meta["num_retractions"] for meta in answers.meta) > 0, "nothing was retracted"
    assert answers.ids == baseline.ids


def test_chunked_prompts_catch_up_in_chunks(pressed, models):
    """A prompt of several chunks: the draft sees it whole when it is first engaged."""
    prompt = chat_ids(str(models.target), LONG)
    assert len(prompt) > 3 * 64
    runs = {}
    for name, policy in (
        ("plain", {"policy": "plain"}),
        ("engaged at once", {"policy": "fixed", "k": 3}),
        ("engaged late", {"policy": "schedule", "schedule": "0x6,3x200"}),
    ):
        pressed.set_policy(**policy)
        runs[name] = ask_all(pressed, [prompt], max_new_tokens=16)
    assert runs["plain"].ids == runs["engaged at once"].ids == runs["engaged late"].ids
    stats = runs["engaged at once"].meta[0]["sdsie"]
    chunks = stats["draft_passes"] - 3 * sum(stats["cycles"].values())
    assert chunks >= 3, "the prompt went through the draft in one piece"
