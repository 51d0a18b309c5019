"""Servers that start side by side: all up before any is used, and none left behind, whatever happens."""

import contextlib
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from sdsie_sglang.eval.fleet import Fleet, Start, Turns
from sdsie_sglang.eval.server import FIXED_PORTS, Server, ServerFailed, fixed_ports

MODULE = "tests.unit.fake_http_server"


def fleet(*starts: Start) -> Fleet:
    return Fleet(starts, module=MODULE)


def alive(pids: set[int]) -> set[int]:
    found = set()
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                found.add(pid)
    return found


def wait_for(what, timeout_s=20.0):
    end = time.monotonic() + timeout_s
    while not (got := what()) and time.monotonic() < end:
        time.sleep(0.05)
    return got


def test_all_are_up_together_and_each_ends_alone():
    with fleet(Start("a", ()), Start("b", ()), Start("c", ())) as servers:
        counts = []
        up = servers.ready(counts.append)
        assert sorted(up) == [0, 1, 2]
        assert counts[-1] == 3
        assert all(server.startup_s > 0 for server in up.values())
        assert len({server.url for server in up.values()}) == 3
        pids = servers.process_ids()
        assert len(pids) >= 9  # each has two children
        mine = up[1].process_ids()
        servers.end(1)
        assert not alive(mine)
        assert servers.waiting() == 2
        assert alive(pids - mine) == pids - mine
    assert not alive(pids)


def test_one_that_fails_to_start_leaves_the_others():
    with fleet(Start("a", ()), Start("bad", ("--fail",))) as servers:
        assert list(servers.ready()) == [0]
        assert "cannot load the model" in servers.failed[1]
        assert servers.failed[1].startswith("bad: ")


def test_one_that_must_start_ends_all():
    first = fleet(Start("a", ()), Start("b", ("--fail",), must=True))
    pids = set()

    def start_and_wait():
        with first:
            pids.update(first.process_ids())
            first.ready()

    with pytest.raises(ServerFailed, match="cannot load"):
        start_and_wait()
    assert pids
    assert not alive(pids)


def test_none_that_starts_is_a_failure():
    with pytest.raises(ServerFailed, match="cannot load"), fleet(Start("a", ("--fail",))) as it:
        it.ready()


def test_one_that_takes_too_long_has_failed():
    with pytest.raises(ServerFailed, match="not healthy"), fleet(Start("a", ("--hang",))) as it:
        it.ready(timeout_s=0.2)


@pytest.mark.parametrize("error", [KeyboardInterrupt, ServerFailed, RuntimeError])
@pytest.mark.parametrize("ready", [False, True])
def test_nothing_is_left_after_an_interrupt_or_an_error(error, ready):
    pids = set()

    def fail():
        with fleet(Start("a", ()), Start("b", () if ready else ("--hang",))) as it:
            if ready:
                it.ready()
                it.take_turn(1)
            wait_for(lambda: len(it.process_ids()) >= 4)
            pids.update(it.process_ids())
            raise error

    with pytest.raises(error):
        fail()
    assert len(pids) >= 4
    assert not alive(pids)


def test_a_launch_that_fails_half_way_leaves_nothing(monkeypatch):
    launched = []
    real = Server.launch

    def launch(*args, **kwargs):
        if launched:
            raise OSError("no more processes")
        launched.append(real(*args, **kwargs))
        return launched[0]

    monkeypatch.setattr(Server, "launch", launch)
    with pytest.raises(OSError, match="no more"), fleet(Start("a", ()), Start("b", ())):
        pytest.fail("must not be entered")
    assert not launched[0].process_ids()


def stopped(pids: set[int]) -> set[int]:
    return {pid for pid in pids if psutil.Process(pid).status() == psutil.STATUS_STOPPED}


def test_those_that_wait_are_stopped_and_only_one_runs():
    with fleet(Start("a", ()), Start("b", ()), Start("c", ())) as servers:
        up = servers.ready()
        everyone = servers.process_ids()
        assert wait_for(lambda: stopped(everyone) == everyone)
        assert not up[1]._is_healthy(timeout_s=0.3)
        assert servers.take_turn(1) is up[1]
        mine = up[1].process_ids()
        assert wait_for(lambda: stopped(everyone) == everyone - mine)
        assert up[1].is_up()
        assert up[1].paused_s > 0
        assert up[0].paused_s == 0
        servers.take_turn(2)
        assert wait_for(lambda: stopped(everyone) == everyone - up[2].process_ids())
        assert up[2].is_up()


def test_servers_take_turns_by_name():
    starts = Start("a", (), log=None), Start("bad", ("--fail",)), Start("c", ())
    with fleet(*starts) as servers:
        up = servers.ready()
        turns = Turns(servers)
        assert list(turns) == ["a", "c"]
        assert turns["c"] is up[2]
        assert wait_for(lambda: stopped(servers.process_ids()) == up[0].process_ids())


def test_a_paused_server_hears_that_it_is_to_stop():
    server = Server.start([], module=MODULE)
    pids = server.process_ids()
    server.pause()
    assert wait_for(lambda: stopped(pids) == pids)
    server.stop()
    assert server.process.returncode == -signal.SIGTERM
    assert not alive(pids)


def test_pausing_and_resuming_may_be_repeated_and_come_too_late():
    server = Server.start([], module=MODULE)
    try:
        server.pause()
        server.pause()
        server.resume()
        assert wait_for(lambda: not stopped(server.process_ids()))
        server.kill()
        server.pause()
        server.resume()
    finally:
        server.kill()
    assert not server.process_ids()


@pytest.mark.skipif(sys.platform != "linux", reason="uses prctl")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_servers_die_however_the_ruler_ends(number):
    """Even those that are stopped, and their helpers."""
    program = (
        "from sdsie_sglang.eval.fleet import Fleet, Start; from sdsie_sglang.eval.run import ends_on_signals\n"
        "import time\n"
        f"with ends_on_signals(), Fleet([Start('a', ()), Start('b', ())], module={MODULE!r}) as fleet:\n"
        "    fleet.ready(); fleet.take_turn(0); print(*fleet.process_ids(), flush=True); time.sleep(600)\n"
    )
    ruler = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    pids = {int(pid) for pid in ruler.stdout.readline().split()}
    assert len(pids) >= 6
    os.kill(ruler.pid, number)
    ruler.wait()
    ruler.stdout.close()
    assert wait_for(lambda: not alive(pids))


def test_ports_are_different_and_free():
    ports = fixed_ports(40)
    assert len(set(ports)) == 40
    assert set(ports) <= set(FIXED_PORTS)
    with pytest.raises(ServerFailed, match="ports"):
        fixed_ports(len(FIXED_PORTS) + 1)
