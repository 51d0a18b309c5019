"""The wrapper of SGLang's serving benchmark, without a server."""

import errno
import json
import sys
from pathlib import Path

import pytest

from sdsie_sglang.eval import serving
from sdsie_sglang.eval.load import RequestFailed
from sdsie_sglang.eval.methods import Models
from sdsie_sglang.eval.record import Stretch
from tests.unit.ruler_fakes import config

PAGE = """\
# TYPE sdsie:cycles_total counter
sdsie:cycles_total{gear="0",model_name="m"} 3.0
sdsie:cycles_total{gear="5",model_name="m"} 4.0
# TYPE sdsie:draft_passes_total counter
sdsie:draft_passes_total{model_name="m"} 20.0
# TYPE sglang:other_total counter
sglang:other_total{model_name="m"} 9.0
"""


def test_command_turns_off_what_flatters_and_contaminates(tmp_path):
    command = serving.bench_command("http://x", "T", 4.0, 10, ["--dataset-name", "random-ids"], tmp_path / "o")
    text = " ".join(command)
    assert "--warmup-requests 0" in text
    assert "--disable-ignore-eos" in text
    assert "--request-rate 4.0" in text


def test_the_benchmark_knows_every_flag(tmp_path):
    """A flag renamed by SGLang would otherwise be noticed on a GPU."""
    import re
    from pathlib import Path

    import sglang

    source = (Path(sglang.__path__[0]) / "benchmark" / "serving.py").read_text()
    command = serving.bench_command("u", "T", 1.0, 1, ["--backend", "--dataset-name", "--dataset-path"], tmp_path / "o")
    for flag in command:
        if flag.startswith("--"):
            assert f'"{flag}"' in source, flag
    assert serving.STARTS in source
    assert re.search(r"await asyncio\.sleep\(1\.0\)", source)


def test_prompts_are_never_repeated(tmp_path):
    path = tmp_path / "p.jsonl"
    assert serving.write_prompts(config(), path, 100) == 100
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert len({line["messages"][0]["content"] for line in lines}) == 100
    assert {line["temperature"] for line in lines} == {0.0}
    assert serving.write_prompts(config(), path, 9999) == 27 * 16


def test_counters():
    assert serving.counters(PAGE) == {"cycles in gear 0": 3.0, "cycles in gear 5": 4.0, "draft_passes": 20.0}


def test_window_begins_a_second_after_the_line():
    assert serving.started_at([(1.0, "x"), (2.0, f"... {serving.STARTS}..."), (9.0, "y")]) == 3.0
    assert serving.started_at([(1.0, "x")]) is None


def test_a_failed_request_fails_the_run():
    serving.check({"completed": 2, "errors": ["", ""]}, 2)
    with pytest.raises(RequestFailed, match="1 of 2 requests failed: broken"):
        serving.check({"completed": 1, "errors": ["", "broken"]}, 2)


def fake_bench(tmp_path, body):
    script = tmp_path / "bench.py"
    script.write_text(body)
    return [sys.executable, str(script)]


def test_run_bench_reads_result_and_window(tmp_path):
    out = tmp_path / "o.jsonl"
    body = f"print('{serving.STARTS}')\nopen({str(out)!r}, 'w').write('{{\"duration\": 12.5}}\\n')\n"
    result, window = serving.run_bench(fake_bench(tmp_path, body), out, lambda: 4.0)
    assert result == {"duration": 12.5}
    assert window == Stretch(start_s=5.0, end_s=17.5)


def test_run_bench_says_why_it_failed(tmp_path):
    with pytest.raises(RequestFailed, match="no such dataset"):
        serving.run_bench(fake_bench(tmp_path, "raise SystemExit('no such dataset')"), tmp_path / "o", lambda: 0.0)


def test_table():
    bench = {"output_throughput": 100.0, "median_ttft_ms": 20.0, "p99_ttft_ms": 50.0, "median_tpot_ms": 3.0,
             "total_output_tokens": 1000}  # fmt: skip
    row = serving.Served(
        method="entropy-tuned", rate=2.0, command=[], bench_command=[], bench=bench, live=None,
        gears=serving.counters(PAGE), window=Stretch(start_s=0, end_s=10), energy_j=500.0,
    )  # fmt: skip
    assert "| entropy-tuned | 2 | 100.0 | 20 / 50 | 3.00 | 0.500 | 43% gear 0, 57% gear 5 |" in serving.table([row])


def test_a_record_that_cannot_be_read_or_is_anothers_is_said(tmp_path, capsys, monkeypatch):
    out = tmp_path / "r.json"
    monkeypatch.setattr(serving, "resolve_models", lambda config: Models("T", "D"))
    out.write_text('{"plan": ')
    assert serving.main([str(out)]) == 2
    assert "is not JSON" in capsys.readouterr().err
    out.write_text('{"plan": {}, "rows": []}')
    assert serving.main([str(out)]) == 2
    assert "holds another run" in capsys.readouterr().err


def test_what_was_measured_outlives_a_later_failure(tmp_path, capsys, monkeypatch):
    """The record of the first server is whole when the second fails while it is measured or written down."""
    out, written = tmp_path / "r.json", []

    def serve(name, rate, *rest):
        bench = {"output_throughput": 1.0, "median_ttft_ms": 1.0, "p99_ttft_ms": 1.0, "median_tpot_ms": 1.0}
        return serving.Served(
            method=name, rate=rate, command=[], bench_command=[], bench=bench, live=None, gears={},
            window=Stretch(start_s=0, end_s=1),
        )  # fmt: skip

    def full(self, text):
        written.append(self)
        if len(written) == 2:
            with self.open("w") as half:
                half.write(text[:50])
            raise OSError(errno.ENOSPC, "No space left on device")
        return write_text(self, text)

    write_text = Path.write_text
    monkeypatch.setattr(serving, "resolve_models", lambda config: Models("T", "D"))
    monkeypatch.setattr(serving, "serve", serve)
    monkeypatch.setattr(Path, "write_text", full)
    command = [str(out), "--methods", "plain", "--rates", "1", "2"]
    with pytest.raises(SystemExit, match="1"):
        serving.main(command)
    assert "serving: [Errno 28] No space left on device" in capsys.readouterr().err
    assert len(json.loads(out.read_text())["rows"]) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["r.json"]
    assert serving.main(command) == 0
    assert len(json.loads(out.read_text())["rows"]) == 2
