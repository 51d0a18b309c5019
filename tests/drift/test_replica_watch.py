"""A crashed scheduler of a replica is reported to the launcher, by SGLang's own watchdog; no server needed."""

import multiprocessing
import signal
import time
from types import SimpleNamespace

import pytest

from sdsie_sglang.cpu_engine import enable
from sdsie_sglang.patches.replica_watch import watch_replicas

PATIENCE_S = 120.0  # importing SGLang takes most of it


def be_a_scheduler(pids, exit_code):
    pids.send(multiprocessing.current_process().pid)
    raise SystemExit(exit_code)


def be_the_controller(pids, exit_code, looked):
    enable()
    processes = [multiprocessing.Process(target=be_a_scheduler, args=(pids, exit_code))]
    processes[0].start()

    def loop(controller):
        looked.set()
        time.sleep(5.0)  # several looks of the watchdog

    watch_replicas(loop, SimpleNamespace(scheduler_procs=[*processes, None]))


@pytest.fixture
def reports():
    """How often this process, which plays the launcher, was told that a child failed."""
    seen = []
    before = signal.signal(signal.SIGQUIT, lambda signum, frame: seen.append(signum))
    yield seen
    signal.signal(signal.SIGQUIT, before)


@pytest.mark.parametrize(("exit_code", "reported"), [(3, True), (0, False)])
def test_a_crash_is_reported_and_an_end_is_not(reports, exit_code, reported):
    context = multiprocessing.get_context("spawn")
    receive, send = context.Pipe(duplex=False)
    looked = context.Event()
    controller = context.Process(target=be_the_controller, args=(send, exit_code, looked))
    controller.start()
    assert receive.poll(PATIENCE_S)
    assert looked.wait(PATIENCE_S)
    controller.join(PATIENCE_S)
    assert controller.exitcode == 0
    assert bool(reports) == reported
