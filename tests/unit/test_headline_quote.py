"""A benchmark's ratios in headline.json come with its record, command, date and machine."""

import json

import pytest

from sdsie_sglang.eval import headline


def test_quoted_figures_carry_their_record(tmp_path, monkeypatch):
    written = tmp_path / "headline.json"
    monkeypatch.setattr(headline.update, "__defaults__", (written,))
    machine = {"gpus": [{"name": "NVIDIA H200"}], "cores": 1, "cpu": "a CPU"}
    record = {"machine": machine, "command": "python scripts/x.py", "date": "2026-01-01"}
    headline.quote(
        record, tmp_path / "r.json", {"a_ratio": {"value": 1.2, "low": 1.1, "high": 1.3}}, lambda name: f"of {name}"
    )
    (figure,) = json.loads(written.read_text())
    assert figure["value"] == pytest.approx(1.2)
    assert (figure["command"], figure["date"], figure["note"]) == ("python scripts/x.py", "2026-01-01", "of a_ratio")
    assert figure["record"].endswith("r.json")
    assert "H200" in figure["where"]
