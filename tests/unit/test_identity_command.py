"""The identity command on fake servers: what it resumes, and what it refuses to mix."""

import json
from contextlib import contextmanager
from pathlib import Path

import pytest

from sdsie_sglang.demo import DemoCheckpoints
from sdsie_sglang.eval import identity
from sdsie_sglang.eval.server import ServerFailed


class FakeServer:
    """Answers every prompt alike, or with another last token under a policy that `differs`."""

    def __init__(self, differs):
        self.differs = differs
        self.policy = {}

    def set_policy(self, **policy):
        self.policy = policy

    def flush_cache(self):
        pass

    def generate(self, ids, max_new_tokens):
        return {"output_ids": [*range(max_new_tokens - 1), 7 if self.policy.get("k") == self.differs else 5]}


@pytest.fixture
def started(monkeypatch):
    made = []

    class Start:
        differs = 99
        fails = False

        @contextmanager
        def __call__(self, arguments):
            if self.fails:
                raise ServerFailed("out of memory")
            made.append(arguments)
            yield FakeServer(self.differs)

    start = Start()
    monkeypatch.setattr(identity.Server, "start", start)
    monkeypatch.setattr(identity, "compose", lambda: DemoCheckpoints(Path("T"), Path("D"), None))
    monkeypatch.setattr(identity, "chat_ids", lambda target, text: [1, 2])
    start.made = made
    return start


@pytest.fixture
def command(tmp_path, monkeypatch):
    def run(*more):
        argv = ["identity", str(tmp_path / "r.json"), "--prompts", "2", "--tokens", "4", "--overlap", "on", *more]
        monkeypatch.setattr("sys.argv", argv)
        return identity.main()

    return run


def test_a_difference_is_exit_code_1_and_nothing_is_measured_twice(started, command, capsys):
    started.differs = 3
    assert command("--policies", "fixed K=1") == 0
    assert command("--policies", "fixed K=1", "fixed K=3") == 1
    out = capsys.readouterr().out
    assert "100.00% of 4 answers" in out
    assert "50.00% of 8 answers" in out
    assert "overlap on, fixed K=3, 1 at once: first difference at token [3, 3]" in out
    assert len(started.made) == 3  # one as shipped, one a command


def test_runs_with_other_flags_are_not_mixed(started, command, tmp_path, capsys):
    """A baseline of one attention backend says nothing of gears on another."""
    assert command("--policies", "fixed K=1") == 0
    with pytest.raises(SystemExit, match="2"):
        command("--policies", "fixed K=1", "--sglang", "--attention-backend", "triton")
    assert "holds another run" in capsys.readouterr().err
    record = json.loads((tmp_path / "r.json").read_text())
    del record["plan"]["sglang"]  # as the first records were
    (tmp_path / "r.json").write_text(json.dumps(record))
    assert command("--policies", "fixed K=1") == 0
    (tmp_path / "r.json").write_text("{")
    with pytest.raises(SystemExit, match="2"):
        command("--policies", "fixed K=1")
    assert "is not JSON" in capsys.readouterr().err


def test_a_server_that_fails_and_senseless_numbers_are_one_line(started, command, capsys):
    started.fails = True
    with pytest.raises(SystemExit, match="1"):
        command("--policies", "fixed K=1")
    assert capsys.readouterr().err == "identity: out of memory\n"
    with pytest.raises(SystemExit, match="2"):
        command("--prompts", "0")
    assert "'0' is not a whole number from 1" in capsys.readouterr().err
