"""The `smoke` preset from servers to the HTML report, as CI runs it; two servers side by side, the second paused."""

import json

import pytest

from sdsie_sglang.eval import report, run
from sdsie_sglang.eval.record import read_all


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    out = tmp_path_factory.mktemp("ruler") / "smoke"
    assert run.main(["smoke", "--start-ahead", "2", "--out", str(out)]) == 0
    assert report.main([str(out)]) == 0
    return out


def test_every_server_was_the_one_it_should_be(folder):
    opened, gated, closed = read_all(folder)
    assert [r.datapoint.role for r in (opened, gated, closed)] == ["open", "method", "close"]
    assert opened.live is None
    assert closed.live is None
    assert gated.live["hooks"]
    assert gated.live["gate"]["policy"]["preset"] == "tuned"
    assert gated.live["gate"]["gate_failures"] == 0


def test_the_one_that_waited_was_paused(folder):
    opened, gated, _ = read_all(folder)
    assert gated.paused_s > opened.requests[-1].end_s - opened.requests[0].start_s
    assert opened.paused_s < gated.paused_s


def test_answers_are_identical_and_traced(folder):
    opened, gated, closed = read_all(folder)
    assert [r.output_ids for r in gated.requests] == [r.output_ids for r in opened.requests]
    assert [r.output_ids for r in closed.requests] == [r.output_ids for r in opened.requests]
    for request in gated.requests:
        committed = [c["committed"][c["rids"].index(request.rid)] for c in gated.trace if request.rid in c["rids"]]
        assert 1 + sum(committed) >= request.tokens


def test_report(folder):
    summary = json.loads((folder / "summary.json").read_text())
    [part] = summary["parts"]
    [method] = part["phases"][0]["methods"]
    assert method["method"] == "entropy-tuned"
    assert method["identity"]["identical"] == 1.0
    # A busy machine drifts; a checkout that someone commits to meanwhile counts as another machine.
    assert {flag["rule"] for flag in part["flags"]} <= {"drift", "a_a", "other_machine"}
    page = (folder / "report.html").read_text()
    assert "Gears over one answer" in page
    assert "drafted" in page
    assert "entropy-tuned" in (folder / "report.md").read_text()


def test_measured_once(folder):
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("rep*/*.json")}
    assert run.main(["smoke", "--out", str(folder)]) == 0
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("rep*/*.json")} == before
