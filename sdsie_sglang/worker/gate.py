"""From requests to the gear of their next cycle, and from a finished cycle back to the policy.

The policy's input at cycle n is what the cycles up to n - lag showed, never "whatever has
arrived": so a run repeats, and tensor-parallel ranks cannot disagree.
"""

import logging
import math
from collections import deque
from collections.abc import Sequence
from typing import Any

from sdsie_sglang.gears import PolicySettings, RequestGate, build_policy
from sdsie_sglang.gears.policy import Explains
from sdsie_sglang.gears.settings import unprepared
from sdsie_sglang.telemetry.metrics import Metrics
from sdsie_sglang.telemetry.trace import Trace
from sdsie_sglang.worker.cycle import Cycle
from sdsie_sglang.worker.request_state import RequestState

logger = logging.getLogger(__name__)


class Gate:
    """Args:
    gears: every K that has been prepared.
    lag: 2 with overlap scheduling, else 1.
    """

    def __init__(
        self, settings: PolicySettings, gears: Sequence[int], lag: int, trace: Trace, metrics: Metrics
    ) -> None:
        self.gears = tuple(gears)
        self.settings = settings
        self.failures = 0
        self.publish_failures = 0
        self.cycles = 0
        self._policy = build_policy(settings, self.gears)
        self._lag = lag
        self._trace = trace
        self._metrics = metrics
        self._unsettled: deque[Cycle] = deque()
        self._unfed: deque[Cycle] = deque()

    def check(self, settings: PolicySettings) -> str | None:
        """Why this server cannot run `settings`, or None."""
        return unprepared(settings, self.gears)

    def change(self, settings: PolicySettings) -> None:
        """Puts another policy in force; running requests begin it afresh. Raises ValueError, changing nothing."""
        self._policy = build_policy(settings, self.gears)
        self.settings = settings
        logger.info("sdsie: policy changed to %s", settings.model_dump_json())

    def new_state(self) -> RequestState:
        return RequestState(gate=self._policy.start_request(), policy=self._policy)

    def restart(self, state: RequestState) -> None:
        """For a request that is prefilled again: the clutch forgets, the counts stay."""
        state.gate, state.policy = self._policy.start_request(), self._policy

    def next_gear(self, states: Sequence[RequestState]) -> int:
        """The gear of the next cycle. Any failure in here means gear 0, and is counted."""
        number = self.cycles
        self.cycles += 1
        try:
            while self._unfed and self._unfed[0].number <= number - self._lag:
                self._feed(self._unfed.popleft())
            k = self._policy.decide([self._gate(state) for state in states])
            if any(state.plain_only for state in states):
                return 0
            if k not in self.gears:
                raise ValueError(f"policy {self.settings.policy} chose gear {k}, prepared are {self.gears}")
        except Exception:
            self._failed()
            return 0
        return k

    def launched(self, cycle: Cycle) -> None:
        self._unfed.append(cycle)
        self._unsettled.append(cycle)

    def settle_oldest(self) -> None:
        """Called when SGLang processes the result of the oldest cycle: publishes what it did."""
        if not self._unsettled:
            return
        cycle = self._unsettled.popleft()
        try:
            self._publish(cycle)
        except Exception:  # a full disk must not stop the answers
            self.publish_failures += 1
            if self.publish_failures == 1:
                logger.exception("sdsie: telemetry of a cycle was lost. Further losses are only counted.")

    def snapshot(self) -> dict[str, Any]:
        return {
            "policy": self.settings.model_dump(),
            "gears": list(self.gears),
            "lag": self._lag,
            "cycles": self.cycles,
            "gate_failures": self.failures,
            "publish_failures": self.publish_failures,
            "explanation": self._policy.explain() if isinstance(self._policy, Explains) else None,
        }

    def _gate(self, state: RequestState) -> RequestGate:
        if state.policy is not self._policy:
            self.restart(state)
        return state.gate

    def _feed(self, cycle: Cycle) -> None:
        for gate, seen in zip(cycle.gates, cycle.settle(), strict=True):
            gate.observe(seen)

    def _publish(self, cycle: Cycle) -> None:
        observations = cycle.settle()
        self._metrics.cycle(cycle.gear, cycle.draft_passes, cycle.int4_layers)
        for state, seen, committed in zip(cycle.states, observations, cycle.committed, strict=True):
            entropy_bits = seen.entropy_bits[-1] if seen.entropy_bits else math.nan
            switched = state.stats.add_cycle(cycle.gear, cycle.draft_passes, committed, entropy_bits, cycle.int4_layers)
            self._metrics.request_cycle(cycle.gear, committed, switched, entropy_bits)
        self._trace.write(cycle.trace_line())

    def _failed(self) -> None:
        self.failures += 1
        self._metrics.gate_failed()
        if self.failures == 1:
            logger.exception("sdsie: the gate failed; running gear 0. Further failures are only counted.")
