"""Who is on the GPU: servers of ours that wait there, and strangers.

NVML's process ids are those of the host: where a container hides them or counts them otherwise, what was added
while our servers started is taken as ours, at most one process a server.
"""

import time
from collections.abc import Callable

from sdsie_sglang.eval import rules
from sdsie_sglang.eval.energy import Gpu, SlowReading

FREE_TIMEOUT_S = 15.0
GONE_TIMEOUT_S = 5.0
STEP_S = 0.1
SAME_GIB = 0.01


class Tenants:
    """Keeps account of one GPU over a fleet's life.

    Args:
        gpu: its `ours` is kept up to date, so that each reading counts strangers.
        clock: of the GPU's readings; any.
    """

    def __init__(self, gpu: Gpu, clock: Callable[[], float] = time.monotonic) -> None:
        self._gpu = gpu
        self._clock = clock
        self._pids_before: frozenset[int] = frozenset()
        self._before_gib = 0.0
        self._ours_gib = 0.0
        self._uncounted = 0

    def wait_until_free(self) -> SlowReading:
        """The GPU's state once everybody has left it, or after `FREE_TIMEOUT_S` (rules.other_tenants says so)."""
        self._gpu.ours = frozenset()
        end = self._clock() + FREE_TIMEOUT_S
        while True:
            state = self._gpu.slow(self._clock())
            if (not state.processes and state.memory_gib <= rules.MAX_FOREIGN_GIB) or self._clock() > end:
                self._pids_before = self._gpu.pids() or frozenset()
                self._before_gib = state.memory_gib
                return state
            time.sleep(5 * STEP_S)

    def started(self, servers: int, process_ids: set[int]) -> None:
        """All of a fleet are up: what they hold is ours. `process_ids` as this machine's `ps` shows them."""
        now = self._gpu.pids() or frozenset()
        added = now - self._pids_before
        known = now & process_ids
        self._gpu.ours = frozenset(known or added)
        self._uncounted = 0 if known else max(0, len(added) - servers)
        self._ours_gib = self._gpu.slow(self._clock()).memory_gib - self._before_gib

    def ended(self, end: Callable[[], None]) -> None:
        """Ends one of ours, waits until memory stands still, and takes it off the account."""
        had_gib = last_gib = self._gpu.slow(self._clock()).memory_gib
        end()
        until = self._clock() + GONE_TIMEOUT_S
        while self._clock() < until:
            time.sleep(2 * STEP_S)
            before_gib, last_gib = last_gib, self._gpu.slow(self._clock()).memory_gib
            if abs(last_gib - before_gib) < SAME_GIB:
                break
        self._ours_gib = max(0.0, self._ours_gib - max(0.0, had_gib - last_gib))

    def others(self) -> dict[str, float]:
        """Processes and memory (GiB) of others now."""
        state = self._gpu.slow(self._clock())
        return {
            "processes": float((state.strangers or 0) + self._uncounted),
            "memory_gib": max(0.0, state.memory_gib - self._ours_gib),
        }
