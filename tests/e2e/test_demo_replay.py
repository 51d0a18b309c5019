"""A server needs exactly as many verify passes as the replay says, with the draft and with the head."""

import pytest

from sdsie_sglang.eval.chat import chat_ids
from sdsie_sglang.eval.demo_replay import Replayer, compare
from sdsie_sglang.eval.demo_serve import METHODS
from sdsie_sglang.eval.prompts import timed_prompts
from sdsie_sglang.eval.server import Server

pytestmark = pytest.mark.e2e
TOKENS = 48
PROMPTS = 4


@pytest.fixture(scope="module")
def replayer(models) -> Replayer:
    return Replayer(models)


@pytest.mark.parametrize("name", ["draft-k5", "eagle3-chain5"])
def test_replay_names_every_verify_count(models, replayer, name):
    method = METHODS[name]
    answers = []
    with Server.start(method.arguments(models)) as server:
        for prompt in timed_prompts()[:PROMPTS]:
            ids = chat_ids(str(models.target), prompt.text)
            done = server.generate(ids, max_new_tokens=TOKENS)
            answers.append(
                {
                    "id": prompt.id,
                    "category": prompt.category,
                    "is_code": prompt.is_code,
                    "prompt_length": len(ids),
                    "tokens": ids + done["output_ids"],
                    "verify_count": done["meta_info"]["spec_verify_ct"],
                }
            )
    record = {"method": name, "new_tokens": TOKENS, **vars(method), "answers": answers}
    agreement = compare(record, None, replayer)
    assert agreement.differing == []
    assert agreement.predicted == PROMPTS
    assert agreement.accept_length > 1.5
