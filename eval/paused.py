"""Process groups that are stopped (SIGSTOP) and never outlive the program that stopped them.

A stopped process hears of nothing but SIGKILL and SIGCONT: should the program be killed, helpers of a stopped server
that end by themselves otherwise would stay for ever. So a small process of its own waits for the program's end,
whatever that is, and then kills the groups that are still stopped.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading

_KEEPER = """\
import os, signal, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
stopped = set()
for line in sys.stdin:
    (stopped.add if line[0] == "+" else stopped.discard)(int(line[1:]))
for group in stopped:
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        pass
"""

_lock = threading.Lock()
_keeper: subprocess.Popen[str] | None = None


def stop(group: int) -> None:
    """Stops every process of a group until `go_on`."""
    _tell(f"+{group}")
    signal_group(group, signal.SIGSTOP)


def go_on(group: int) -> None:
    """Lets a stopped group go on."""
    signal_group(group, signal.SIGCONT)
    _tell(f"-{group}")


def signal_group(group: int, number: signal.Signals) -> None:
    """Sends a signal to all of a group, if there is anything left of it."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)


def _tell(line: str) -> None:
    global _keeper
    with _lock:
        if _keeper is None or _keeper.poll() is not None:
            # In a session of its own, so that a Ctrl-C does not reach it; it ends when its input does.
            _keeper = subprocess.Popen(
                [sys.executable, "-S", "-E", "-c", _KEEPER], stdin=subprocess.PIPE, text=True, start_new_session=True
            )
        assert _keeper.stdin is not None
        _keeper.stdin.write(line + "\n")
        _keeper.stdin.flush()
