"""The Resolution Gear's benchmark refuses, before it starts a server, a window that gives no energy."""

import sys
from pathlib import Path

import pytest

from sdsie_sglang.eval.energy import MIN_WINDOW_S


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "scripts"))
    import bench_resolution

    yield bench_resolution
    sys.modules.pop("bench_resolution")


def test_a_window_too_short_for_energy_is_refused_before_any_start(bench, monkeypatch, tmp_path, capsys):
    class Started(Exception):
        pass

    def measure(args):
        raise Started

    monkeypatch.setattr(bench, "measure", measure)
    monkeypatch.setattr(bench, "need_gpu", lambda program: None)
    assert bench.main([str(tmp_path / "r.json"), "--energy-s", "9.9"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "--energy-s 9.9" in line
    for enough in ([], ["--energy-s", f"{MIN_WINDOW_S}"]):
        with pytest.raises(Started):
            bench.main([str(tmp_path / "r.json"), *enough])


def test_servers_of_an_8b_shape_are_not_started_without_a_gpu(bench, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(bench, "measure", None)
    with pytest.raises(SystemExit) as stopped:
        bench.main([str(tmp_path / "r.json")])
    assert stopped.value.code == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
