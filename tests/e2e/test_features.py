"""What a user of SGLang expects keeps working while the gears change."""

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import pytest
import requests

from sdsie_sglang.eval.chat import chat_ids, decode
from sdsie_sglang.eval.prompts import timed_prompts
from tests.e2e.conftest import CONSTRAINTS, TOKENS, ask_all


@pytest.fixture(autouse=True)
def changing_gears(gears):
    gears.set_policy(policy="schedule", schedule="5x2,0x2,3")


def test_streaming_adds_up_to_the_same_answer(gears, baseline, prompts):
    events = list(gears.stream(prompts[2], max_new_tokens=TOKENS, ignore_eos=True))
    assert len(events) > 3
    assert all(b["text"].startswith(a["text"]) for a, b in pairwise(events))
    assert events[-1]["output_ids"] == baseline.ids[2]
    assert events[-1]["meta_info"]["sdsie"]["cycles"]


def test_logprobs_are_the_baselines(gears, prompts):
    def logprobs(**policy):
        gears.set_policy(**policy)
        gears.flush_cache()
        done = gears.generate(prompts[1], max_new_tokens=20, return_logprob=True, top_logprobs_num=2)
        return done["meta_info"]["output_token_logprobs"], done["meta_info"]["output_top_logprobs"]

    plain, plain_top = logprobs(policy="plain")
    mixed, mixed_top = logprobs(policy="schedule", schedule="5x2,0x2,3")
    assert [token for _, token, _ in mixed] == [token for _, token, _ in plain]
    assert [p for p, _, _ in mixed] == pytest.approx([p for p, _, _ in plain], abs=1e-3)
    assert [[t for _, t, _ in top] for top in mixed_top] == [[t for _, t, _ in top] for top in plain_top]


def test_stop_strings(gears, models, baseline, prompts):
    text = decode(str(models.target), baseline.ids[1])
    stop = text.split()[6]
    done = gears.generate(prompts[1], max_new_tokens=TOKENS, stop=[stop])
    assert stop not in done["text"]
    assert done["meta_info"]["finish_reason"]["matched"] == stop


def test_json_schema(gears, models):
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 12}, "size": {"type": "integer"}},
        "required": ["city", "size"],
        "additionalProperties": False,
    }
    prompt = chat_ids(str(models.target), "Name a city and its size as JSON.")
    done = gears.generate(prompt, max_new_tokens=80, json_schema=json.dumps(schema))
    answer = json.loads(done["text"])
    assert isinstance(answer["city"], str)
    assert isinstance(answer["size"], int)
    assert {"0", "5"} <= set(done["meta_info"]["sdsie"]["cycles"])


def test_a_bias_leaves_the_entropy_alone(gears, prompts, trace_path):
    """Entropy is that of the raw distribution: forcing a token by bias must not bring it to zero."""
    before = len(trace_path.read_text().splitlines())
    done = gears.generate(prompts[0], max_new_tokens=8, logit_bias={"260": 1000.0}, ignore_eos=True)
    assert set(done["output_ids"][1:]) == {260}
    lines = [json.loads(line) for line in trace_path.read_text().splitlines()[before:]]
    assert max(max(line["entropy_bits"]) for line in lines) > 0.5


@pytest.mark.parametrize("which", range(len(CONSTRAINTS)), ids=[next(iter(c)) for c in CONSTRAINTS])
def test_what_depends_on_every_token_runs_gear_0_and_is_exact(gears, baseline, prompts, which):
    gears.set_policy(policy="fixed", k=7)
    done = gears.generate(prompts[-1], max_new_tokens=TOKENS, **CONSTRAINTS[which])
    assert done["output_ids"] == baseline.constrained[which]
    assert set(done["meta_info"]["sdsie"]["cycles"]) == {"0"}


def test_sampling_is_honoured_and_seeded(gears, prompts):
    def sample(seed, temperature=1.0, **more):
        gears.flush_cache()
        return gears.generate(
            prompts[0], temperature=temperature, max_new_tokens=24, sampling_seed=seed, ignore_eos=True, **more
        )["output_ids"]  # fmt: skip

    assert sample(1, top_k=1) == sample(2, top_k=1), "top-k 1 is greedy"
    drawn = {tuple(sample(seed, temperature=1.5)) for seed in range(3)}
    assert len(drawn) == 3, "temperature was ignored"


def test_multi_turn_and_a_radix_hit_on_gear_0_text(gears, models, baseline, prompts):
    """A second turn behind text that was generated with the draft asleep: same answer as from scratch."""
    target = str(models.target)
    question = timed_prompts(["reference"])[2].text
    gears.set_policy(policy="plain")
    gears.flush_cache()
    answer = gears.generate(prompts[2], max_new_tokens=TOKENS, ignore_eos=True)
    turn = chat_ids(target, question, answer["text"], "Explain it in one sentence.")
    gears.set_policy(policy="fixed", k=5)
    warm = gears.generate(turn, max_new_tokens=16, ignore_eos=True)
    assert warm["meta_info"]["cached_tokens"] > len(prompts[2])
    gears.flush_cache()
    cold = gears.generate(turn, max_new_tokens=16, ignore_eos=True)
    assert warm["output_ids"] == cold["output_ids"]
    assert warm["meta_info"]["spec_verify_ct"] == cold["meta_info"]["spec_verify_ct"], "the draft saw stale KV"


def test_abort_frees_the_server(gears, baseline, prompts):
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(gears.generate, prompts[0], max_new_tokens=1500, ignore_eos=True, rid="doomed")
        time.sleep(1.5)
        gears.post("/abort_request", {"rid": "doomed"})
        assert running.result(timeout=60)["meta_info"]["finish_reason"]["type"] == "abort"
    assert ask_all(gears, prompts).ids == baseline.ids


def test_policy_changes_under_load_never_change_an_answer(gears, baseline, prompts):
    stop = threading.Event()

    def turn_knobs():
        policies = [
            {"policy": "plain"},
            {"policy": "fixed", "k": 7},
            {"policy": "entropy", "preset": "class"},
        ]
        while not stop.is_set():
            for policy in policies:
                gears.set_policy(**policy)
                time.sleep(0.15)

    with ThreadPoolExecutor(1) as pool:
        knobs = pool.submit(turn_knobs)
        try:
            assert ask_all(gears, prompts, at_once=True).ids == baseline.ids
        finally:
            stop.set()
        knobs.result()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"policy": "fixed", "k": 9}, "k: "),
        ({"policy": "entropy", "theta_low": 0.9, "theta_high": 0.2}, "theta_low"),
        ({"policy": "entropy", "alpha": 0}, "alpha: "),
        ({"policy": "magic"}, "policy: "),
        ({"colour": 3}, "colour: "),
    ],
)
def test_a_bad_change_is_a_400_and_changes_nothing(gears, change, says):
    before = gears.sdsie()["gate"]["policy"]
    with pytest.raises(requests.HTTPError) as caught:
        gears.set_policy(**change)
    assert caught.value.response.status_code == 400
    assert says in caught.value.response.json()["message"]
    assert gears.sdsie()["gate"]["policy"] == before


def test_what_is_live_is_published(gears):
    live = gears.sdsie()
    assert live["algorithm"] == "SDSIE"
    assert "eagle_utils.eagle_sample" in live["hooks"]
    assert "live hooks" in gears.log.read_text(errors="replace")
