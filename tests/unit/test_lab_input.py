"""What the laboratory's commands refuse: one line, exit code 2, before anything is played."""

import json
import sys

import numpy as np
import pytest

from sdsie_sglang.eval import (
    calibrate,
    confirm,
    cost_table,
    lab,
    lab_acceptance,
    lab_batch,
    lab_mixed,
    lab_original,
    signal_worth,
    trace,
    tune,
)
from sdsie_sglang.eval.trace import TRACES


@pytest.fixture
def files(tmp_path):
    """Names that stand for bad files, and where each lies."""
    content = {"half.json": b'{"cells": [', "list.json": b"[1]", "junk.npz": b"junk", "empty.json": b'{"answers": []}'}
    content["negative.json"] = b'{"policy": "entropy", "theta_low": -1}'
    content["gear3.json"] = b'{"policy": "entropy", "k": 3}'
    content["part.npz"] = TRACES.read_bytes()[:20_000]
    for name, data in content.items():
        (tmp_path / name).write_bytes(data)
    np.savez(tmp_path / "other.npz", x=np.zeros(3))
    about = {"format": trace.FORMAT, "answers": []}
    np.savez(tmp_path / "none.npz", about=np.array(json.dumps(about)), length=np.zeros(0, int))
    return tmp_path


def refusal(module, arguments, folder, monkeypatch, capsys):
    """The last line that the command prints as it ends with exit code 2."""
    monkeypatch.setattr(sys, "argv", ["x", *(str(folder / a) if "." in a else a for a in arguments)])
    with pytest.raises(SystemExit) as ended:
        module.main()
    assert ended.value.code == 2
    return capsys.readouterr().err.strip().splitlines()[-1]


OUT = ("--out", "out.x")


@pytest.mark.parametrize(
    ("module", "arguments", "says"),
    [
        (lab, ("--cost-table", "missing.json", *OUT), "No such file"),
        (lab, ("--cost-table", "half.json", *OUT), "Invalid JSON"),
        (lab, ("--traces", "missing.npz", *OUT), "No such file"),
        (lab, ("--traces", "junk.npz", *OUT), "not a trace file"),
        (lab, ("--traces", "part.npz", *OUT), "not a trace file, or a part of one"),
        (lab, ("--traces", "other.npz", *OUT), "not written by eval.trace"),
        (lab, ("--traces", "none.npz", *OUT), "no answer in them"),
        (lab, ("--tuned", "missing.json", *OUT), "No such file"),
        (lab, ("--tuned", "half.json", *OUT), "is not JSON"),
        (lab, ("--tuned", "list.json", *OUT), "names and values"),
        (lab, ("--tuned", "negative.json", *OUT), "theta_low"),
        (lab, ("--tuned", "gear3.json", *OUT), "the cost table has gears [0, 5], not [3]"),
        (lab, ("--batch", "64", *OUT), "outside of the measured 1 to 16"),
        (lab, ("--orders", "0", *OUT), "not a whole number from 1"),
        (lab, ("--objective", "energy", *OUT), "has no energies"),
        (lab_batch, ("--sizes", "64", *OUT), "outside of the measured"),
        (lab_batch, ("--rounds", "0", *OUT), "whole number"),
        (lab_mixed, ("--rounds", "0", *OUT), "whole number"),
        (lab_mixed, ("--traces", "junk.npz", *OUT), "not a trace file"),
        (lab_original, ("--batch", "99", *OUT), "outside of the measured"),
        (lab_acceptance, ("--traces", "missing.npz", *OUT), "No such file"),
        (signal_worth, ("--batch", "99", *OUT), "outside of the measured"),
        (tune, ("--k", "3", *OUT), "not [3]"),
        (tune, ("--k", "0", *OUT), "whole number"),
        (trace, ("--answers", "missing.json", *OUT), "No such file"),
        (trace, ("--answers", "half.json", *OUT), "not JSON"),
        (trace, ("--answers", "empty.json", *OUT), "no answer in them"),
        (confirm, ("out.x", "--cost-table", "missing.json"), "No such file"),
        (cost_table, ("out.x", "--record", "missing.json"), "No such file"),
        (calibrate, ("out.x", "--tp", "0"), "whole number"),
        (calibrate, ("out.x", "--gears", "9"), "invalid choice"),
        (calibrate, ("out.x", "--short", "50", "--long", "20"), "--long must be more than --short"),
    ],
)
def test_what_cannot_be_used_is_one_line(files, monkeypatch, capsys, module, arguments, says):
    assert says in refusal(module, arguments, files, monkeypatch, capsys)
    assert not (files / "out.x").exists()
