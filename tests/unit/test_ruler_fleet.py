"""Servers that start side by side: all up before any is used, and none left behind, whatever happens."""

import contextlib
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from sdsie_sglang.eval.fleet import Fleet, Start
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
        assert len(pids) >= 6  # each has a child
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
def test_nothing_is_left_after_an_interrupt_or_an_error(error):
    pids = set()

    def fail():
        with fleet(Start("a", ()), Start("b", ("--hang",))) as it:
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


@pytest.mark.skipif(sys.platform != "linux", reason="uses prctl")
def test_servers_die_even_if_the_ruler_is_killed():
    program = (
        "from sdsie_sglang.eval.fleet import Fleet, Start; import time\n"
        f"with Fleet([Start('a', ()), Start('b', ())], module={MODULE!r}) as fleet:\n"
        "    fleet.ready(); print(*fleet.process_ids(), flush=True); time.sleep(600)\n"
    )
    ruler = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    pids = {int(pid) for pid in ruler.stdout.readline().split()}
    assert len(pids) >= 4
    os.kill(ruler.pid, signal.SIGKILL)
    ruler.wait()
    ruler.stdout.close()
    assert wait_for(lambda: not alive(pids))


def test_ports_are_different_and_free():
    ports = fixed_ports(40)
    assert len(set(ports)) == 40
    assert set(ports) <= set(FIXED_PORTS)
    with pytest.raises(ServerFailed, match="ports"):
        fixed_ports(len(FIXED_PORTS) + 1)
