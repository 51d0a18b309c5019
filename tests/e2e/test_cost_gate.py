"""The cost gate in a server decides what the same policy decides outside, and answers stay what they were."""

from pathlib import Path

import pytest
import requests

from sdsie_sglang.gears import Observation, PolicySettings, build_policy

GATE = {"policy": "cost", "seed": 7}


def replay(lines, settings, lag):
    """Gears that a new policy chooses from what the traced cycles showed, each known `lag` cycles late."""
    policy = build_policy(PolicySettings(**settings))
    gates, chosen = {}, []
    for n, line in enumerate(lines):
        if n >= lag:
            shown = lines[n - lag]
            for rid, bits, committed in zip(shown["rids"], shown["entropy_bits"], shown["committed"], strict=True):
                gates[rid].observe(Observation(shown["k"], [bits], committed))
        for rid in line["rids"]:
            gates.setdefault(rid, None)
            gates[rid] = gates[rid] or policy.start_request()
        chosen.append(policy.decide([gates[rid] for rid in line["rids"]]))
    return chosen


def test_decisions_are_those_of_the_policy_and_answers_those_of_the_target(cycles_of, gears, baseline, cost_table):
    answers, lines = cycles_of(**GATE)
    assert answers.ids == baseline.ids
    ran = [line["k"] for line in lines]
    assert len(set(ran)) >= 2, "the gate never changed gear"
    assert set(ran) <= {0, 1, 3, 5}, "the table has no other gears"
    settings = {**GATE, "cost_table": str(cost_table)}
    assert ran == replay(lines, settings, gears.sdsie()["gate"]["lag"])
    told = gears.sdsie()["gate"]
    assert told["gate_failures"] == 0
    assert told["policy"]["cost_table"] == str(cost_table)
    assert told["explanation"]["chosen"] == {str(k): ran.count(k) for k in sorted(set(ran))}
    assert told["explanation"]["last"]["gear"] == ran[-1]
    assert set(told["explanation"]["last"]["tokens"]) == {"0", "1", "3", "5"}


def test_the_same_seed_gives_the_same_gears(cycles_of):
    runs = [[line["k"] for line in cycles_of(**GATE)[1]] for _ in range(2)]
    assert runs[0] == runs[1]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"policy": "cost", "cost_table": "/etc/hostname"}, "keeps the one it was started with"),
        ({"policy": "cost", "objective": "energy"}, "no energies"),
        ({"policy": "cost", "explore": 0.5}, "explore"),
    ],
)
def test_a_running_server_keeps_its_table(gears, change, says):
    before = gears.sdsie()["gate"]["policy"]
    with pytest.raises(requests.HTTPError) as caught:
        gears.set_policy(**change)
    assert caught.value.response.status_code == 400
    assert says in caught.value.response.json()["message"]
    assert gears.sdsie()["gate"]["policy"] == before


def test_a_table_from_elsewhere_is_served_with_one_line_that_says_so(gears, cost_table: Path):
    lines = [line for line in gears.log.read_text(errors="replace").splitlines() if "measured on another" in line]
    assert len(lines) == 1
    assert str(cost_table) in lines[0]
    assert "not an abacus" in lines[0]
    assert gears.sdsie()["conditions"]["hardware"] not in ("", "an abacus")
