import json
from itertools import pairwise

import pytest

from sdsie_sglang.eval.headline import HEADLINE
from sdsie_sglang.eval.lab_acceptance import play
from sdsie_sglang.eval.trace import TRACES, load


@pytest.fixture(scope="module")
def rows():
    return play(load(TRACES).traces, lag=2)


def test_accept_length_is_the_one_that_was_measured_by_replay(rows):
    figures = {figure["name"]: figure["value"] for figure in json.loads(HEADLINE.read_text())}
    assert rows["fixed K=5"]["tokens_per_cycle"] == pytest.approx(figures["draft_accept_len_k5_all"], abs=1e-3)


def test_a_wider_gear_accepts_more_and_wastes_more(rows):
    fixed = [rows[f"fixed K={k}"] for k in range(1, 8)]
    for narrow, wide in pairwise(fixed):
        assert narrow["tokens_per_cycle"] < wide["tokens_per_cycle"]
        assert narrow["accepted_share"] > wide["accepted_share"]


def test_plain_drafts_nothing_and_rules_never_stop_drafting(rows):
    assert rows["plain"]["drafted_per_token"] == 0.0
    assert rows["plain"]["gear0_share"] == 1.0
    for name in ("SVIP", "AdaEDL", "constant confidence"):
        assert rows[name]["gear0_share"] == 0.0
    assert "oracle" not in rows
