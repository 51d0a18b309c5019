"""The ratio of accept lengths from two served records: paired, over equal answers, by hand."""

import json

import pytest

from sdsie_sglang.eval import demo_serve, unshifted


def served(method: str, cycles: list[int], answers: list[int], **changes):
    """A record: each answer has so many tokens after the prefill's, and `cycles` verify passes."""
    rows = [
        {"id": f"p{i}", "category": "coding", "is_code": True, "prompt_length": 3, "verify_count": count,
         "tokens": [1, 2, 3, 4, *([i] * length)]}
        for i, (count, length) in enumerate(zip(cycles, answers, strict=True))
    ]  # fmt: skip
    machine = {"cpu": "fake", "cores": 2, "gpus": []}
    return {"method": method, "drafted": 5, "new_tokens": 128, "dtype": "float32", "machine": machine,
            "command": f"serve {method}", "answers": rows, **changes}  # fmt: skip


OURS, THEIRS = served("draft-k5", [10, 20, 5], [30, 40, 20]), served("standalone-k5", [12, 20, 6], [30, 40, 20])


def test_ratio_of_all_cycles():
    found = unshifted.compare(OURS, THEIRS)
    assert found.unshifted_accept_length == pytest.approx(90 / 35)
    assert found.standalone_accept_length == pytest.approx(90 / 38)
    assert found.ratio == pytest.approx(38 / 35)
    assert 1.0 <= found.low <= found.ratio <= found.high <= 1.2  # no draw leaves what single prompts show
    assert found.served_by == ["serve draft-k5", "serve standalone-k5"]


def test_the_interval_is_paired():
    """Prompts differ by a factor of ten, the two sides by exactly 10 % on each: the ratio is certain."""
    ours = served("draft-k5", [10, 100, 50], [30, 40, 20])
    found = unshifted.compare(ours, served("standalone-k5", [11, 110, 55], [30, 40, 20]))
    assert (found.low, found.high) == pytest.approx((1.1, 1.1))


def test_other_answers_do_not_count_and_are_said():
    found = unshifted.compare(OURS, served("standalone-k5", [12, 200, 6], [30, 41, 20]))
    assert found.ratio == pytest.approx(18 / 15)
    assert [p.same_tokens for p in found.prompts] == [True, False, True]
    assert "2 of 3 prompts" in unshifted.figure(found, "r.json").note
    with pytest.raises(unshifted.Problem, match="same tokens"):
        unshifted.compare(OURS, served("standalone-k5", [12, 20, 6], [31, 41, 21]))
    with pytest.raises(unshifted.Problem, match="same prompts"):
        unshifted.compare(OURS, served("standalone-k5", [12], [30]))


def test_one_prompt_has_no_interval():
    found = unshifted.compare(served("draft-k5", [10], [30]), served("standalone-k5", [12], [30]))
    assert (found.ratio, found.low, found.high) == (pytest.approx(1.2), None, None)
    assert unshifted.figure(found, "r.json").low is None


@pytest.fixture
def serving(monkeypatch):
    asked = []

    def serve(name, models, new_tokens, limit=None, dtype="float32", sglang=()):
        asked.append((name, str(models.target), str(models.draft), new_tokens, dtype, list(sglang)))
        checkpoints = demo_serve.METHODS[name].checkpoints(models)
        return {
            **(OURS if name.startswith("draft") else THEIRS),
            "checkpoints": checkpoints,
            "new_tokens": new_tokens,
            "dtype": dtype,
            "sglang": list(sglang),
        }

    monkeypatch.setattr(demo_serve, "serve", serve)
    return asked


def test_a_pair_of_the_users_own_is_served_once(serving, tmp_path, capsys):
    command = [str(tmp_path / "out"), "--target", "T", "--draft", "D", "--dtype", "bfloat16", "--sglang", "--tp", "2"]
    assert unshifted.main(command) == 0
    flags = ("T", "D", 128, "bfloat16", ["--tp", "2"])
    assert serving == [("draft-k5", *flags), ("standalone-k5", *flags)]
    kept = json.loads((tmp_path / "out" / "unshifted_k5.json").read_text())
    assert kept["ratio"] == pytest.approx(38 / 35)
    assert "1.0857" in capsys.readouterr().out
    assert unshifted.main(command) == 0
    assert len(serving) == 2
    assert unshifted.main([str(tmp_path / "out"), "--target", "T", "--draft", "other", "--dtype", "bfloat16"]) == 2
    assert "served with other models" in capsys.readouterr().err
    assert unshifted.main([*command[:5], "--new-tokens", "64"]) == 2
    assert "was served with 128 new tokens in bfloat16" in capsys.readouterr().err
    assert unshifted.main([*command[:7], "--sglang", "--tp", "4"]) == 2
    assert "was served with --sglang --tp 2" in capsys.readouterr().err
    (tmp_path / "out" / "served-draft-k5.json").write_text('{"answers": [')
    assert unshifted.main(command) == 2
    assert "served-draft-k5.json is not JSON" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        ["--target", "T"],
        ["--target", "T", "--draft", "D"],
        ["out", "--target", "T", "--draft", "D", "--headline"],
        ["--headline", "--k", "3"],
    ],
)
def test_what_makes_no_sense_is_refused_before_anything_is_served(arguments, serving):
    with pytest.raises(SystemExit, match="2"):
        unshifted.main(arguments)
    assert serving == []
