"""What would make text differ from the target's own: run in gear 0, or refused."""

import asyncio
from types import SimpleNamespace

import pytest
from fastapi import HTTPException

from sdsie_sglang.lossless import relaxed_thresholds
from sdsie_sglang.patches.internal_state import refuse_bad_policy
from sdsie_sglang.worker.request_state import needs_plain

PLAIN = {"frequency_penalty": 0.0, "presence_penalty": 0.0, "repetition_penalty": 1.0, "min_new_tokens": 0}


def request(custom_logit_processor=None, **sampling):
    params = SimpleNamespace(**{**PLAIN, **sampling})
    return SimpleNamespace(sampling_params=params, custom_logit_processor=custom_logit_processor)


@pytest.mark.parametrize(
    ("asked", "wanted"),
    [
        ({}, False),
        ({"frequency_penalty": 0.1}, True),
        ({"presence_penalty": -0.1}, True),
        ({"repetition_penalty": 1.1}, True),
        ({"min_new_tokens": 1}, True),
        ({"custom_logit_processor": '{"callable": "80"}'}, True),
    ],
    ids=str,
)
def test_requests_that_only_one_token_a_pass_serves_exactly(asked, wanted):
    assert needs_plain(request(**asked)) is wanted


def test_relaxed_thresholds():
    assert relaxed_thresholds({"speculative_accept_threshold_single": 1.0, "other": 0.5}) == []
    assert relaxed_thresholds({"speculative_accept_threshold_acc": 0.9}) == ["speculative_accept_threshold_acc"]


@pytest.mark.parametrize("gears", [True, False], ids=["gears", "SGLang as shipped"])
def test_a_running_server_with_gears_does_not_relax_what_it_accepts(gears):
    asked = []

    async def states():
        return [{"sdsie": {"gate": {"gears": [0, 5]}}}] if gears else [{}]

    async def original(manager, obj):
        asked.append(obj.server_args)
        return [True]

    manager = SimpleNamespace(get_internal_state=states)
    change = SimpleNamespace(server_args={"speculative_accept_threshold_single": 0.5})
    if gears:
        with pytest.raises(HTTPException, match="never accept what the target would not have said"):
            asyncio.run(refuse_bad_policy(original, manager, change))
        assert asked == []
        change.server_args["speculative_accept_threshold_single"] = 1.0
    assert asyncio.run(refuse_bad_policy(original, manager, change)) == [True]
