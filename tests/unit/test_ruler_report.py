"""The report of a whole fake measurement: what it must say, that it needs no other file, and its quoted figures."""

import json
import random
import re
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from sdsie_sglang.eval import figures, headline, record, report
from sdsie_sglang.eval.compare import summarise
from sdsie_sglang.eval.fidelity import Fidelity, Parting
from sdsie_sglang.eval.intervals import Estimate
from sdsie_sglang.eval.page import markdown
from sdsie_sglang.eval.token_gears import Cycle, cycles_of, pieces
from tests.unit.ruler_fakes import FakeGpu, config, fake_record

METHODS = {
    # watts, tok/s, accept length, accepted by position
    "plain": (400, 100, None, None),
    "draft-k3": (330, 165, 3.2, [10, 15, 25, 50]),
    "draft-k5": (320, 176, 4.3, [10, 10, 10, 15, 20, 35]),
    "entropy-tuned": (340, 150, 2.4, [10, 10, 10, 10, 10, 20]),
    "eagle3-tree": (345, 206, 3.5, [20, 20, 20, 20, 20, 10]),
    "ngram-16": (350, 108, 1.4, [70, 20, 10]),
}
GPU = {"name": "Fake GPU", "driver": "1", "power_limit_w": 500.0}


def fake_measurement(repetitions=2):
    """Records as a GPU run would give them, with some scatter between prompts and between servers."""
    settings = config(name="fake", parts={"all": tuple(METHODS)}, repetitions=repetitions)
    machine = {"python": "3", "cpu": "fake", "cores": 2, "commit": "abc", "packages": {"sglang": "0"}, "gpus": [GPU]}
    chance = random.Random(3)
    records = []
    for repetition in range(repetitions):
        for role, method in [("open", "plain"), *(("method", m) for m in METHODS), ("close", "plain")]:
            watts, speed, accept, histogram = METHODS[method]
            gpu = FakeGpu(load_w=lambda t, w=watts: w, leak=0.0, start_c=20 + 0.1 * watts)
            scatter = {}
            made = fake_record(
                role,
                method,
                repetition=repetition,
                position=len(records) % 8,
                settings=settings,
                gpu=gpu,
                tok_per_s=speed * chance.gauss(1, 0.004),
                accept=accept,
                machine=machine,
                speeds=lambda prompt, s=scatter, fast=accept or 0: s.setdefault(
                    prompt, chance.gauss(1, 0.02 + 0.04 * fast)
                ),
            )
            for request in made.requests:
                request.drafts_accepted = histogram
            if method == "entropy-tuned" and repetition == 0:
                add_trace(made, chance)
            records.append(made)
    return records


def add_trace(made, chance):
    request = made.requests[0]
    request.rid = "shown"
    made.live = {"gate": {"policy": {"policy": "entropy", "theta_low": 0.15, "theta_high": 0.7}}}
    made.trace, at, number = [], 1, 0
    while at < request.tokens:
        gear = 5 if number // 6 % 2 == 0 else 0
        committed = chance.randint(1, 6) if gear else 1
        bits = abs(chance.gauss(0.2 if gear else 1.5, 0.4))
        made.trace.append({"cycle": number, "k": gear, "rids": ["x", "shown"], "committed": [1, committed],
                           "entropy_bits": [9.0, bits]})  # fmt: skip
        at, number = at + committed, number + 1
    request.sdsie = {"cycles": {"0": 30, "5": 20}}


@pytest.fixture(scope="module")
def records():
    return fake_measurement()


@pytest.fixture
def folder(records, tmp_path, monkeypatch):
    monkeypatch.setattr(report, "decode", lambda model, ids: "".join(f" word{i}<&>" for i in ids))
    for made in records:
        record.write(made, made.datapoint.path(tmp_path))
    partings = [
        Parting(
            method="all/draft-k5", key="math-1/0", index=3, margin=0.01, rounding_kl=1e-4, plain_nll=0.5, method_nll=0.5
        )
    ]
    judged = [str(r.datapoint.path(Path())) for r in records if r.datapoint.role != "open"]
    found = Fidelity(judged=judged[:-1], limit=40, partings=partings)
    (tmp_path / "fidelity.json").write_text(found.model_dump_json())
    return tmp_path


def test_report_says_what_was_measured_and_stands_alone(folder):
    assert report.main([str(folder)]) == 0
    page = (folder / "report.html").read_text()
    assert not re.search(r'(src|href)="(?!data:|#)', page)
    assert page.count("data:image/svg+xml;base64,") >= 6
    assert "word1&lt;&amp;&gt;" in page
    assert "gear 5" in page
    text = (folder / "report.md").read_text()
    for words in (
        "draft-k5",
        "counter moves every",
        "A/A",
        "Drift between the brackets",
        "head to head",
        "coding",
        "near ties",
    ):
        assert words in text
    assert re.search(r"\| draft-k5 \| \+\d+\.\d % \[\+\d+\.\d, \+\d+\.\d\] \| −\d+\.\d % \[", text)
    assert "nan" not in text


def test_figures_are_recomputed_from_files_alone(folder, records):
    assert report.write(folder) == summarise(sorted(records, key=lambda r: str(r.datapoint.path(folder))))


def test_records_are_not_overwritten(folder, records):
    with pytest.raises(FileExistsError):
        record.write(records[0], records[0].datapoint.path(folder))
    assert not list(folder.rglob("*.part"))


def test_a_damaged_record_is_named(folder, capsys):
    victim = next(folder.rglob("*ngram-16.json"))
    victim.write_text(victim.read_text()[:100])
    assert report.main([str(folder)]) == 2
    assert victim.name in capsys.readouterr().err


def test_a_record_that_was_touched_up_is_named(folder, capsys):
    victim = next(folder.rglob("*draft-k5.json"))
    values = json.loads(victim.read_text())
    values["requests"][0]["end_s"] -= 0.1
    victim.write_text(json.dumps(values))
    assert report.main([str(folder)]) == 2
    assert f"{victim} was changed after it was measured" in capsys.readouterr().err


def test_a_record_in_anothers_place_and_one_of_another_plan_are_named(folder, records, capsys):
    victim = next(folder.rglob("rep1/*ngram-16.json"))
    text = victim.read_text()
    victim.write_text(next(folder.rglob("rep0/*ngram-16.json")).read_text())
    assert report.main([str(folder)]) == 2
    assert "is the record of all/rep0" in capsys.readouterr().err
    victim.write_text(text)
    other = records[-1].model_copy(update={"config_digest": "other"})
    path = other.datapoint.path(folder)
    path.unlink()
    record.write(other, path)
    assert report.main([str(folder)]) == 2
    assert "another configuration" in capsys.readouterr().err


def test_a_record_without_all_requests_is_named(records):
    short = records[1].model_copy(update={"requests": records[1].requests[1:]})
    with pytest.raises(ValueError, match="not those of its plan"):
        summarise([records[0], short, *records[2:]])


def test_what_nothing_is_known_of_is_said(folder, records):
    """A server that the target was not asked about; methods of one repetition; a bar without an interval."""
    assert report.main([str(folder)]) == 0
    text = (folder / "report.md").read_text()
    last = sorted(r.datapoint.path(Path()) for r in records if r.datapoint.role != "open")[-1]
    assert f"not been asked about these servers' answers yet: {last}" in text
    assert "Measured on one server each" not in text
    once = [r for r in records if (r.datapoint.repetition, r.datapoint.method) != (1, "ngram-16")]
    part = summarise(once).parts[0]
    assert "Measured on one server each: ngram-16. How much" in markdown(report.part_blocks(part, once))
    first = [r for r in records if r.datapoint.repetition == 0]
    text = markdown(report.part_blocks(summarise(first).parts[0], first))
    assert "nothing of how another start of the same server would differ" in text
    assert np.isnan(figures._error([Estimate(value=1.0)])).all()


def test_nothing_differs_is_said(records):
    judged = [str(r.datapoint.path(Path())) for r in records if r.datapoint.role != "open"]
    text = markdown(report.fidelity_blocks(records, Fidelity(judged=judged, limit=40, partings=[])))
    assert "No answer of 14 servers differs" in text
    assert "not been asked" in markdown(report.fidelity_blocks(records, None))
    cut = markdown(report.fidelity_blocks(records, Fidelity(judged=judged, limit=40, partings=[], cut=3)))
    assert "3 answers end where plain's goes on" in cut
    assert "No answer" not in cut


def test_bests_of_different_repetitions_are_not_held_against_each_other(records):
    """draft of the first repetition alone and n-gram of the second alone: as many servers, but not the same hour."""
    wanted = {("draft-k5", 0), ("ngram-16", 1), ("plain", 0), ("plain", 1)}
    kept = [r for r in records if (r.datapoint.method, r.datapoint.repetition) in wanted]
    [phase] = summarise(kept).parts[0].phases
    assert len(phase.best) == 2
    assert phase.head_to_head == []


def test_a_quoted_figure_carries_the_flags_of_its_part(records, tmp_path):
    drifted = [r.model_copy(deep=True) for r in records]
    for request in drifted[7].requests:
        request.end_s = request.start_s + 1.2 * (request.end_s - request.start_s)
    found = {f.name: f for f in report.headline_figures(summarise(drifted), tmp_path)}
    assert "flags of the part: " in found["k5_over_plain_demo_bs1"].note
    assert "drift" in found["k5_over_plain_demo_bs1"].note


def test_quoted_figures(records, tmp_path):
    found = {f.name: f for f in report.headline_figures(summarise(records), tmp_path)}
    assert set(found) == {
        "aa_speed",
        *(f"{m}_over_plain_demo_bs1{e}" for m in ("k5", "entropy", "eagle3", "ngram") for e in ("", "_energy")),
    }
    assert found["k5_over_plain_demo_bs1"].value == pytest.approx(1.76, rel=0.05)
    assert found["k5_over_plain_demo_bs1_energy"].value == pytest.approx(320 / 400 / 1.76, rel=0.05)
    aa = found["aa_speed"]
    assert aa.low < aa.value < aa.high
    assert aa.value == pytest.approx(0.0, abs=0.02)


def test_headline_figures_are_written_to_the_file(folder, tmp_path, monkeypatch, capsys):
    written = tmp_path / "headline.json"
    monkeypatch.setattr(report.headline, "update", partial(headline.update, path=written))
    assert report.main([str(folder), "--headline"]) == 0
    found = {f["name"]: f for f in json.loads(written.read_text())}
    assert len(found) == 9
    for name in ("k5", "entropy", "eagle3", "ngram"):
        for figure in (found[f"{name}_over_plain_demo_bs1"], found[f"{name}_over_plain_demo_bs1_energy"]):
            assert figure["low"] < figure["value"] < figure["high"]
            assert figure["where"] == "1 x Fake GPU"
    assert found["aa_speed"]["low"] < 0 < found["aa_speed"]["high"]


def test_energy_of_a_whole_measurement_is_pooled_over_servers(records):
    """J/token: all joules of a method's servers over all their tokens."""
    [phase] = summarise(records).parts[0].phases
    by_name = {m.method: m for m in phase.methods}
    for name in ("draft-k5", "ngram-16", "plain"):
        its = [r for r in records if (r.datapoint.role, r.datapoint.method) == ("method", name)]
        tokens = sum(q.tokens for r in its for q in r.requests)
        seconds = sum(r.phases[0].end_s - r.phases[0].start_s for r in its)
        assert by_name[name].j_per_token == pytest.approx(METHODS[name][0] * seconds / tokens, rel=0.01)


def test_nothing_is_quoted_from_a_machine_without_gpu(tmp_path):
    made = [fake_record("open", "plain"), fake_record(accept=3), fake_record("close", "plain")]
    assert report.headline_figures(summarise(made), tmp_path) == []


def test_cycles_and_their_text():
    request = fake_record().requests[0]
    request.rid, request.output_ids = "r", [10, 11, 12, 13, 14]
    lines = [
        {"cycle": 2, "k": 0, "rids": ["r"], "committed": [1], "entropy_bits": [1.5]},
        {"cycle": 1, "k": 5, "rids": ["other", "r"], "committed": [6, 2], "entropy_bits": [0.0, 0.1]},
        {"cycle": 3, "k": 5, "rids": ["r"], "committed": [4], "entropy_bits": [0.2]},
    ]
    cycles = cycles_of(request, lines)
    assert cycles == [Cycle(1, 3, 5, 0.1), Cycle(3, 4, 0, 1.5), Cycle(4, 5, 5, 0.2)]
    text = pieces(request.output_ids, cycles, lambda ids: "".join(chr(87 + i) for i in ids))
    assert text == [("a", None), ("bc", cycles[0]), ("d", cycles[1]), ("e", cycles[2])]
