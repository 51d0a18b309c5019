"""The runner on a fake server: brackets, resuming, refusing, failing."""

import errno
import json
import signal
import time
from functools import partial

import pytest

from sdsie_sglang.eval import load, record, report, rules, run, tenants
from sdsie_sglang.eval.compare import summarise
from sdsie_sglang.eval.energy import Gpu, mean_power_w
from sdsie_sglang.eval.methods import METHODS, Models
from sdsie_sglang.eval.plan import Ask, WarmUp, load_config, with_other_draft
from sdsie_sglang.eval.prompts import timed_prompts
from sdsie_sglang.eval.record import read_all
from sdsie_sglang.eval.server import Server, ServerFailed, ends_on_signals
from tests.unit.ruler_fakes import FakeGpu, FakeServer

CONFIG = """
name: tiny
parts: {all: [draft-k3, ngram-16]}
categories: [coding]
per_category: 2
tokens: 5
phases: [{concurrency: 1}, {concurrency: 2, variants: 2}]
warm_up: {min_s: 0, reading_s: 0, tokens: 2}
gpu: null
"""


class FakeStart:
    """In place of Server.launch: remembers what was launched, what happened when, and answers as its arguments say."""

    def __init__(self):
        self.started: list[list[str]] = []
        self.servers: list[FakeServer] = []
        self.events: list[tuple[str, int]] = []
        self.fail_at: int | None = None
        self.refuse: str | None = None
        self.interrupt_at: tuple[str, int] | None = None
        self.lie = False

    def __call__(self, arguments, *, env, port, die_with_parent, module, log):
        self.started.append(arguments[:-2])
        assert arguments[-2] == "--nccl-port"
        number = len(self.started)
        server = FakeServer(finish="abort" if self.fail_at == number else "length")
        server.info = lambda: self.info(arguments)
        server.startup_s = 0.0
        server.is_up = lambda timeout_s=0.0: self.is_up(server, arguments, number)
        server.process_ids = lambda: {number}
        server.log_tail = lambda: "log"
        server.paused_s = 0.0
        for name in ("kill", "stop", "signal_kill", "pause", "resume"):
            setattr(server, name, partial(self.note, name, number))
        stream = server.stream

        def counted(prompt, **sampling):
            self.note("ask", number)
            yield from stream(prompt, **sampling)

        server.stream = counted
        self.servers.append(server)
        self.note("launch", number)
        return server

    def note(self, what, number):
        self.events.append((what, number))
        if (what, number) == self.interrupt_at:
            raise KeyboardInterrupt

    def is_up(self, server, arguments, number):
        if self.refuse in arguments:
            raise ServerFailed("out of memory")
        self.note("up", number)
        server.startup_s = 1.0
        return True

    def first(self, what):
        """Numbers of the servers by when it first happened to them."""
        return list(dict.fromkeys(number for event, number in self.events if event == what))

    def alive(self):
        return set(self.first("launch")) - {number for event, number in self.events if event in ("kill", "stop")}

    def info(self, arguments):
        def value(flag):
            return arguments[arguments.index(flag) + 1] if flag in arguments else None

        info = {"model_path": value("--model-path"), "disable_radix_cache": "--disable-radix-cache" in arguments}
        info["speculative_algorithm"] = value("--speculative-algorithm")
        info["speculative_draft_model_path"] = value("--speculative-draft-model-path")
        info["speculative_num_draft_tokens"] = int(value("--speculative-num-draft-tokens") or 0)
        state = {}
        if "--sdsie-off" not in arguments and not self.lie:
            info["speculative_algorithm"] = "SDSIE"
            policy = {"policy": value("--sdsie-policy"), "k": int(value("--sdsie-k") or 0)}
            state = {"sdsie": {"hooks": ["h"], "gate": {"policy": policy}}}
        return {**info, "internal_states": [state]}


@pytest.fixture
def start(monkeypatch):
    fake = FakeStart()
    monkeypatch.setattr(Server, "launch", fake)
    monkeypatch.setattr(run, "resolve_models", lambda config: Models("T", "D"))
    monkeypatch.setattr(run, "chat_ids", lambda model, text: list(text.encode()))
    monkeypatch.setattr(run, "decode", lambda model, ids: "")
    monkeypatch.setattr(run, "SETTLE_S", 0.0)
    return fake


@pytest.fixture
def config_path(tmp_path):
    path = tmp_path / "tiny.yaml"
    path.write_text(CONFIG)
    return str(path)


def test_a_whole_run_then_nothing_left_to_do(start, config_path, tmp_path):
    out = tmp_path / "out"
    assert run.main([config_path, "--out", str(out)]) == 0
    records = read_all(out)
    assert [r.datapoint.role for r in records] == ["open", "method", "method", "close"]
    assert len(start.started) == 4
    for made, server in zip(records, start.servers, strict=True):
        assert len(made.requests) == 6
        assert {r.tokens for r in made.requests} == {5}
        assert [r.label for r in made.warm_up] == ["warmup-1", "warmup-2", "warmup-3"]
        timed = [bytes(ids) for ids in server.asked[3:]]
        assert len(set(timed)) == len(timed) == 6
        assert not set(timed) & {bytes(ids) for ids in server.asked[:3]}
    assert records[0].command[-2:] == ["--disable-radix-cache", "--sleep-on-idle"]
    assert json.loads((out / "plan.json").read_text())["order"][0]["role"] == "open"
    assert run.main([config_path, "--out", str(out)]) == 0
    assert len(start.started) == 4
    assert report.main([str(out)]) == 0
    assert "2 requests at a time" in (out / "report.md").read_text()


def test_parts_with_phases_and_flags_of_their_own_reach_the_report(start, tmp_path):
    path, out = tmp_path / "parts.yaml", tmp_path / "out"
    own = "sixteen: {methods: [ngram-16], phases: [{concurrency: 16, variants: 3}], sglang: [--x, '16']}"
    path.write_text(CONFIG.replace("parts: {all:", f"parts: {{{own}, all:") + "start_ahead: 4\n")
    assert run.main([str(path), "--out", str(out)]) == 0
    records = read_all(out)
    sizes = {r.datapoint.part: {p: len(r.of_phase(p)) for p in range(len(r.phases))} for r in records}
    assert sizes == {"sixteen": {0: 6}, "all": {0: 2, 1: 4}}
    assert {r.datapoint.part for r in records if "--x" in r.command} == {"sixteen"}
    assert report.main([str(out)]) == 0
    sixteen, both = (out / "report.md").read_text().split("## Part: all")
    assert "16 requests at a time" in sixteen
    assert "16 requests at a time" not in both
    assert "2 requests at a time" in both


def test_a_failed_request_fails_the_run_and_it_resumes_there(start, config_path, tmp_path, capsys):
    out = tmp_path / "out"
    start.fail_at = 3
    assert run.main([config_path, "--out", str(out)]) == 1
    assert "without an answer" in capsys.readouterr().err
    assert len(read_all(out)) == 2
    start.fail_at = None
    assert run.main([config_path, "--out", str(out)]) == 0
    assert len(read_all(out)) == 4
    assert len(start.started) == 5


def test_a_server_that_is_not_ours_is_not_measured(start, config_path, tmp_path, capsys):
    start.lie = True
    assert run.main([config_path, "--out", str(tmp_path / "out")]) == 1
    assert "not the server it should be" in capsys.readouterr().err
    assert all(r.datapoint.method != "draft-k3" for r in read_all(tmp_path / "out"))


def test_a_folder_of_another_configuration_is_refused(start, config_path, tmp_path, capsys):
    out = tmp_path / "out"
    assert run.main([config_path, "--out", str(out)]) == 0
    other = tmp_path / "other.yaml"
    other.write_text(CONFIG.replace("tokens: 5", "tokens: 6"))
    assert run.main([str(other), "--out", str(out)]) == 2
    assert "another configuration" in capsys.readouterr().err
    strange = tmp_path / "strange"
    strange.mkdir()
    (strange / "file").touch()
    assert run.main([config_path, "--out", str(strange)]) == 2
    assert len(start.started) == 4


def test_two_runs_do_not_share_a_folder(start, config_path, tmp_path, capsys):
    out = tmp_path / "out"
    run.claim(run.load_config(config_path), out)
    with run.alone(out):
        assert run.main([config_path, "--out", str(out)]) == 2
    assert "another run is measuring" in capsys.readouterr().err
    assert start.started == []
    assert run.main([config_path, "--out", str(out)]) == 0


def test_a_damaged_plan_is_said(start, config_path, tmp_path, capsys):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "plan.json").write_text('{"digest": ')
    assert run.main([config_path, "--out", str(tmp_path / "out")]) == 2
    assert "is not JSON: choose another folder" in capsys.readouterr().err


def test_a_full_disk_ends_the_run_in_one_line_and_it_goes_on_later(start, config_path, tmp_path, capsys, monkeypatch):
    out, sync = tmp_path / "out", record.os.fsync

    def full(number):
        if len(start.started) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        sync(number)

    monkeypatch.setattr(record.os, "fsync", full)
    assert run.main([config_path, "--out", str(out)]) == 1
    assert capsys.readouterr().err.endswith("No space left on device; the same command goes on from here\n")
    assert len(read_all(out)) == 1
    assert start.alive() == set()
    assert not list(out.rglob(f"*{record.SCRATCH}"))
    monkeypatch.setattr(record.os, "fsync", sync)
    (out / f"plan.7{record.SCRATCH}").touch()  # what a killed run may leave
    assert run.main([config_path, "--out", str(out)]) == 0
    assert len(read_all(out)) == 4


def test_a_missing_checkpoint_is_said_before_anything_starts(start, tmp_path, capsys):
    path = tmp_path / "c.yaml"
    path.write_text(CONFIG.replace("ngram-16", "eagle-k5"))
    assert run.main([str(path), "--out", str(tmp_path / "out")]) == 2
    assert "needs a checkpoint" in capsys.readouterr().err
    assert start.started == []


def test_records_do_not_say_where_this_machine_keeps_its_files(monkeypatch):
    monkeypatch.setenv("HOME", "/home/someone")
    assert record.portable("--model-path /home/someone/.cache/target") == "--model-path ~/.cache/target"


def test_plan_only_prints(start, config_path, tmp_path, capsys):
    assert run.main([config_path, "--out", str(tmp_path / "out"), "--plan"]) == 0
    out = capsys.readouterr().out
    assert out.count("to do  ") == 4
    assert "4 servers to do, each with 6 requests" in out
    assert start.started == []


def test_unknown_part(start, config_path, capsys):
    assert run.main([config_path, "--part", "nosuch"]) == 2
    assert "nosuch" in capsys.readouterr().err


# -- servers that start side by side ----------------------------------------------------------------


@pytest.fixture
def ahead_path(tmp_path):
    path = tmp_path / "ahead.yaml"
    path.write_text(CONFIG + "start_ahead: 3\nrepetitions: 2\n")
    return str(path)


def test_no_start_goes_on_while_anything_is_measured(start, ahead_path, tmp_path):
    assert run.main([ahead_path, "--out", str(tmp_path / "out")]) == 0
    assert len(read_all(tmp_path / "out")) == 8
    windows = [{1, 2, 3}, {4}, {5, 6, 7}, {8}]
    for window in windows:
        at = {what: [i for i, (w, n) in enumerate(start.events) if w == what and n in window] for what in ("up", "ask")}
        launched = [i for i, (w, n) in enumerate(start.events) if w == "launch" and n in window]
        assert max(launched) < min(at["up"])
        first_ups = [start.events.index(("up", n)) for n in window]
        assert max(first_ups) < min(at["ask"])
        begun = [n for w, n in start.events[min(at["ask"]) : max(at["ask"])] if w == "launch"]
        assert begun == []
    assert start.alive() == set()


def test_those_that_wait_are_paused_until_it_is_their_turn(start, ahead_path, tmp_path):
    assert run.main([ahead_path, "--out", str(tmp_path / "out"), "--repetition", "0"]) == 0
    events = [(what, n) for what, n in start.events if n <= 3 and what in ("pause", "resume", "ask", "kill")]
    for n in (1, 2, 3):
        own = [what for what, number in events if number == n]
        assert own.index("pause") < own.index("resume") < own.index("ask")
        assert "pause" not in own[own.index("resume") :]
        running = {n for what, n in events[: events.index(("ask", n))] if what == "resume"}
        ended = {n for what, n in events[: events.index(("ask", n))] if what == "kill"}
        assert running - ended == {n}
    assert all(r.paused_s is not None for r in read_all(tmp_path / "out"))


def test_each_server_serves_one_datapoint_and_ends_before_the_next(start, ahead_path, tmp_path):
    assert run.main([ahead_path, "--out", str(tmp_path / "out")]) == 0
    busy = [n for w, n in start.events if w in ("ask", "kill") for _ in [0]]
    assert [n for i, n in enumerate(busy) if i == 0 or busy[i - 1] != n] == list(range(1, 9))
    assert all(len(server.asked) == 3 + 6 for server in start.servers)


def test_one_method_that_does_not_start_is_missing_and_measured_later(start, ahead_path, tmp_path, capsys):
    out = tmp_path / "out"
    start.refuse = "NGRAM"
    assert run.main([ahead_path, "--out", str(out), "--repetition", "0"]) == 1
    assert "ngram-16.json: out of memory" in capsys.readouterr().err
    assert [r.datapoint.method for r in read_all(out) if r.datapoint.role == "method"] == ["draft-k3"]
    assert {r.datapoint.role for r in read_all(out)} == {"open", "method", "close"}
    assert start.alive() == set()
    start.refuse = None
    assert run.main([ahead_path, "--out", str(out), "--repetition", "0"]) == 0
    assert len(start.started) == 5
    assert len(read_all(out)) == 4


def test_without_a_bracket_nothing_is_measured(start, ahead_path, tmp_path):
    start.refuse = "--sdsie-off"
    assert run.main([ahead_path, "--out", str(tmp_path / "out")]) == 1
    assert read_all(tmp_path / "out") == []
    assert start.alive() == set()


@pytest.mark.parametrize("when", [("launch", 2), ("up", 2), ("ask", 1), ("ask", 2), ("kill", 1)])
def test_an_interrupt_leaves_no_server_and_the_run_goes_on_later(start, ahead_path, tmp_path, capsys, when):
    out = tmp_path / "out"
    start.interrupt_at = when
    assert run.main([ahead_path, "--out", str(out)]) == 130
    assert "interrupted" in capsys.readouterr().err
    launched = set(start.first("launch"))
    assert launched - {n for w, n in start.events if w in ("kill", "signal_kill")} <= {when[1]} & {2}
    start.interrupt_at = None
    assert run.main([ahead_path, "--out", str(out)]) == 0
    assert len(read_all(out)) == 8


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_interrupt_even_where_the_caller_ignores_them_and_only_during_the_run(number):
    before = signal.signal(number, signal.SIG_IGN)
    try:
        with pytest.raises(KeyboardInterrupt), ends_on_signals():
            signal.raise_signal(number)
        assert signal.getsignal(number) is signal.SIG_IGN
    finally:
        signal.signal(number, before)


def test_a_second_draft_is_named_on_the_command_line(start, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(run, "resolve_models", lambda config: Models("T", "D", other_draft=config.other_draft))
    path, out, other = tmp_path / "two.yaml", tmp_path / "out", tmp_path / "other"
    path.write_text(CONFIG.replace("draft-k3, ngram-16", "draft-k3, other-draft-k3"))
    assert run.main([str(path), "--out", str(out)]) == 2
    assert "other-draft-k3 needs a checkpoint for other_draft" in capsys.readouterr().err
    command = [str(path), "--out", str(out), "--other-draft", str(other)]  # the refused run has not claimed it
    assert run.main(command) == 2
    assert "is no checkpoint folder" in capsys.readouterr().err
    other.mkdir()
    (other / "config.json").touch()
    own = tmp_path / "own.yaml"
    own.write_text(path.read_text() + "models: {target: T}\n")
    assert run.main([str(own), "--other-draft", str(other)]) == 2
    assert "goes with the demo's models" in capsys.readouterr().err
    assert start.started == []
    assert run.main(command) == 0
    drafts = {r.datapoint.method: r.server_info["speculative_draft_model_path"] for r in read_all(out)[1:3]}
    assert drafts == {"draft-k3": "D", "other-draft-k3": record.portable(str(other))}


def test_a_second_draft_joins_the_first_where_requests_come_one_at_a_time(tmp_path):
    (tmp_path / "config.json").touch()
    config = with_other_draft(load_config("short"), tmp_path)
    assert config.parts["one"].methods[-3:] == ("other-draft-k3", "other-draft-k5", "other-draft-k7")
    assert config.parts["sixteen"] == load_config("short").parts["sixteen"]
    drafts = load_config("drafts")
    assert with_other_draft(drafts, tmp_path).parts == drafts.parts


def test_start_ahead_can_be_chosen_for_a_run(start, config_path, tmp_path):
    assert run.main([config_path, "--out", str(tmp_path / "out"), "--start-ahead", "4"]) == 0
    assert start.events[:4] == [("launch", n) for n in (1, 2, 3, 4)]
    assert run.main([config_path, "--out", str(tmp_path / "out"), "--start-ahead", "0"]) == 2


def test_another_repetition_than_was_planned(start, config_path, tmp_path, capsys):
    out = str(tmp_path / "out")
    assert run.main([config_path, "--out", out, "--repetition", "-1"]) == 2
    assert "counted from 0" in capsys.readouterr().err
    for repetition in (0, 3):
        assert run.main([config_path, "--out", out, "--repetition", str(repetition)]) == 0
    [part] = summarise(read_all(tmp_path / "out")).parts
    assert {method.repetitions for method in part.phases[0].methods} == {2}
    assert part.missing == []


def test_a_server_that_died_while_it_waited_is_said(start, ahead_path, tmp_path, capsys, monkeypatch):
    real = start.is_up
    monkeypatch.setattr(
        start,
        "is_up",
        lambda server, arguments, n: real(server, arguments, n) and (n != 2 or not start.servers[0].asked),
    )
    assert run.main([ahead_path, "--out", str(tmp_path / "out")]) == 1
    assert "does not answer any more" in capsys.readouterr().err
    assert len(read_all(tmp_path / "out")) == 1
    assert start.alive() == set()


# -- with a GPU ----------------------------------------------------------------------------------


class LiveGpu(FakeGpu):
    """A fake GPU that follows the real clock."""

    def nvml(self):
        fake, born = super().nvml(), time.perf_counter()
        read = fake.nvmlDeviceGetTotalEnergyConsumption.side_effect

        def energy(gpu):
            self.advance(time.perf_counter() - born - self.now_s)
            return read(gpu)

        fake.nvmlDeviceGetTotalEnergyConsumption.side_effect = energy
        return fake


def test_readings_idle_and_prefill_are_recorded(start, tmp_path, monkeypatch):
    fake = LiveGpu(processes=0)
    monkeypatch.setattr(tenants, "STEP_S", 0.0)
    monkeypatch.setattr(run, "open_gpu", lambda config: Gpu(0, fake.nvml()))
    path = tmp_path / "gpu.yaml"
    text = CONFIG.replace("gpu: null", "idle_s: 0.3\nprefill_s: 0.05").replace("min_s: 0,", "min_s: 0, max_s: 0.1,")
    path.write_text(text.replace("[draft-k3, ngram-16]", "[ngram-16]"))
    assert run.main([str(path), "--out", str(tmp_path / "out")]) == 0
    opened, *later = read_all(tmp_path / "out")
    assert [r.idle for r in later] == [None, None]
    assert opened.before == {"memory_gib": 2.0, "processes": 0.0, "waiting": 0.0}
    assert mean_power_w(opened.readings, opened.idle.start_s, opened.idle.end_s) == pytest.approx(400, rel=0.05)
    assert opened.idle.end_s - opened.idle.start_s >= 0.3
    assert opened.idle.end_s <= opened.warm_up[0].start_s < opened.phases[0].start_s < opened.prefill.start_s
    assert opened.warm_up[0].power_w == pytest.approx(400, rel=0.05)
    assert isinstance(opened.warm_up_settled, bool)
    assert opened.prefill_requests > 0
    assert len(opened.readings.energy_j) > 3
    assert "no_energy" in {flag.rule for flag in rules.record_flags(opened)}  # windows of milliseconds


# -- requests ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "events",
    [
        [],
        [{"error": {"message": "out of memory"}}],
        [{"output_ids": [1], "meta_info": {"finish_reason": {"type": "abort"}}}],
        [{"output_ids": [], "meta_info": {"finish_reason": {"type": "stop"}}}],
        [{"output_ids": [1], "meta_info": {"finish_reason": None}}],
    ],
    ids=["nothing", "error", "abort", "empty", "cut off"],
)
def test_every_way_to_fail_is_a_failure(events):
    class Broken:
        def stream(self, prompt, **sampling):
            yield from events

    with pytest.raises(load.RequestFailed):
        load.answer(Broken(), [1], 5, clock=lambda: 0.0)


def test_a_failure_at_concurrency_ends_the_phase():
    server = FakeServer(finish="abort")
    work = [(Ask(str(i), timed_prompts()[0], str(i)), [i]) for i in range(50)]
    with pytest.raises(load.RequestFailed):
        load.run_phase(server, work, phase=0, concurrency=4, tokens=3)
    assert len(server.asked) < 50


def test_warm_up_without_gpu_reads_each_prompt_at_least_once():
    server = FakeServer()
    readings, settled = load.warm_up(server, [("a", [1]), ("b", [2])], WarmUp(min_s=0, reading_s=0), None)
    assert [r.label for r in readings] == ["a", "b"]
    assert settled is None


def test_methods_that_speculate_are_known():
    assert not METHODS["plain"].speculates
    assert all(m.speculates for name, m in METHODS.items() if name != "plain")
