"""A replica that dies ends the server.

SGLang watches the processes that its launcher started; those of data-parallel replicas are children of the
data-parallel controller, which goes on handing requests to a dead one, and they wait for ever.
"""

import os
import signal
from collections.abc import Callable
from typing import Any

from sdsie_sglang.patches.hook import Hook, Kind


def watch_replicas(original: Callable[[Any], None], controller: Any) -> None:
    """AROUND the controller's loop: a scheduler that crashes is reported to the launcher, as SGLang's own are."""
    from sglang.srt.utils.watchdog import SubprocessWatchdog

    launcher = os.getppid()
    signal.signal(signal.SIGQUIT, lambda signum, frame: os.kill(launcher, signal.SIGQUIT))  # sent by the watchdog
    processes = [process for process in controller.scheduler_procs if process is not None]
    watchdog = SubprocessWatchdog(processes, [f"replica_scheduler_{process.pid}" for process in processes])
    watchdog.start()
    try:
        original(controller)
    finally:
        watchdog.stop()


HOOK = Hook(
    target="sglang.srt.managers.data_parallel_controller.DataParallelController.event_loop",
    kind=Kind.AROUND,
    function=watch_replicas,
    parameters=("self",),
    why="with --dp-size a replica that dies ends the server; SGLang alone lets its requests wait for ever",
    upstream="none",
    remove_when="SGLang's data-parallel controller watches its schedulers",
)
