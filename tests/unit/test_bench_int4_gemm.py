"""The INT4 benchmark's rivals: what is missing or late is left out and named, and the figure is over what is there."""

import contextlib
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sdsie_sglang.eval import headline


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "scripts"))
    import bench_int4_gemm

    yield bench_int4_gemm
    sys.modules.pop("bench_int4_gemm")


def row(provider, us, m=1, layer="o"):
    return {"model": "8b", "layer": layer, "m": m, "provider": provider, "us": us, "us_all": [us]}


def record(*rows, **skipped):
    return {"rows": list(rows), "skipped": skipped, "environment": {"gpu": "NVIDIA H200", "date": "2026-01-01T"}}


def test_a_rival_that_does_not_end_is_stopped(bench):
    budget = bench.Budget(0.2)
    started = time.monotonic()

    def stubborn():
        while True:
            with contextlib.suppress(Exception):
                time.sleep(0.01)

    with pytest.raises(bench.OutOfTime), budget.of("gemlite"):
        stubborn()
    assert time.monotonic() - started < 30
    assert budget.used["gemlite"] >= 0.2
    with pytest.raises(bench.OutOfTime), budget.of("gemlite"):
        time.sleep(30)
    with budget.of("marlin"):
        pass
    with budget.of("int4"):
        time.sleep(0.3)
    assert "int4" not in budget.used


def test_only_rivals_may_fail(bench):
    skipped = {}
    budget = bench.Budget(150)
    bench.leave_out("marlin", RuntimeError("no\nnvcc"), skipped, budget)
    bench.leave_out("gemlite", bench.OutOfTime(), skipped, budget)
    assert skipped == {"marlin": "RuntimeError: no nvcc", "gemlite": "its 150 s were used up"}
    bench.leave_out("tinygemm", ValueError("odd"), skipped, budget, "8x8, M=1")
    assert "tinygemm" not in skipped, "other cells are measured"
    assert skipped["tinygemm at 8x8, M=1"] == "ValueError: odd"
    with pytest.raises(RuntimeError, match="ours"):
        bench.leave_out("int4", RuntimeError("ours"), skipped, budget)


def test_a_rival_that_is_not_installed_says_so(bench, monkeypatch):
    monkeypatch.setitem(sys.modules, "gemlite", None)
    with pytest.raises(bench.Unavailable, match="gemlite does not import"):
        bench.gemlite_calls(None, 1, None)


def test_the_figure_is_over_what_is_there_and_names_what_is_not(bench, monkeypatch, tmp_path):
    found = record(
        row("int4", 10.0), row("gemlite", 15.0), row("tinygemm", 20.0),
        row("int4", 10.0, m=16), row("tinygemm", 40.0, m=16),
        row("int4", 10.0, m=256), row("tinygemm", 1.0, m=256),
        gemlite="its 150 s were used up", marlin="SGLang's Marlin does not import",
    )  # fmt: skip
    value, low, high, seen, cells = bench.rival_ratio(found["rows"])
    assert (value, low, high) == pytest.approx(((1.5 * 4.0) ** 0.5, 1.5, 4.0))
    assert (seen, cells) == ({"gemlite": 1, "tinygemm": 2, "marlin": 0}, 2)
    written = tmp_path / "headline.json"
    monkeypatch.setattr(headline.update, "__defaults__", (written,))
    bench.write_headlines(found, tmp_path / "r.json")
    (figure,) = json.loads(written.read_text())
    assert figure["name"] == "int4_over_best_rival_m_le_16"
    assert (
        "fastest of tinygemm, gemlite in 1 of 2 cells (its 150 s were used up), without marlin (SGLang"
        in figure["note"]
    )


def test_marlin_words_hold_eight_codes_along_k(bench):
    """The packing that gptq_marlin_repack takes, against one written code by code."""
    import torch

    q = torch.randint(0, 16, (16, 32), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)  # [N, K]
    words = bench.gptq_words(q)
    assert words.shape == (4, 16)
    assert words.dtype == torch.int32
    for n in (0, 7, 15):
        for k in range(32):
            assert (int(words[k // 8, n]) >> (4 * (k % 8))) & 15 == int(q[n, k])


def test_measuring_needs_neither_sglang_nor_pydantic():
    program = "import sys; sys.modules.update(sglang=None, pydantic=None); import bench_int4_gemm"
    scripts = Path(__file__).parents[2] / "scripts"
    done = subprocess.run([sys.executable, "-c", program], cwd=scripts, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_tiles_are_measured_for_the_rows_asked_for_and_recorded(bench, monkeypatch):
    asked = []

    def tune_shape(n, k, group, dtype, buckets, measured):
        asked.append((n, k, group, buckets))
        tile = bench.tile_tables.Tile("fused", per_sm=2)
        measured += [(256, tile, 30.12345), (256, bench.tile_tables.DEQUANT, float("inf"))]
        return {"6144x4096/g64/m256": tile}

    monkeypatch.setattr(bench, "tune_shape", tune_shape)
    found = bench.tune(6144, 4096, bench.parse(["--m", "200", "1", "--group", "64"]))
    assert asked == [(6144, 4096, 64, (8, 16, 256))], "8 and 16 split K alike: both or neither"
    assert [(row["n"], row["m"], row["per_sm"], row["us"]) for row in found] == [
        (6144, 256, 2, 30.123),
        (6144, 256, 0, None),
    ]
    record = {"environment": {}, "rows": [{"us": 1}], "tuning": found}
    assert json.loads(bench.dumps(record)) == record
