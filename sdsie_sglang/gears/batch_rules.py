"""Other ways than a vote to make one decision for a batch of entropies. For comparison in the simulator."""

import math
from collections.abc import Sequence

from sdsie_sglang.gears.clutch import Clutch
from sdsie_sglang.gears.policy import Observation, RequestGate
from sdsie_sglang.gears.settings import PolicySettings
from sdsie_sglang.gears.smoothing import Ema


class SmoothedGate:
    """One request's smoothed entropy, in bits."""

    engaged = True

    def __init__(self, alpha: float) -> None:
        self.smoothed_bits: float | None = None
        self.rejected = 0
        self._ema = Ema(alpha)

    def observe(self, seen: Observation) -> None:
        last = seen.entropy_bits[-1]
        if math.isfinite(last) and last >= 0.0:
            self.smoothed_bits = self._ema.update(last)
        else:
            self.rejected += 1


class MeanEntropyPolicy:
    """One clutch for the batch, on the mean of its requests' smoothed entropies."""

    def __init__(self, settings: PolicySettings) -> None:
        self._settings = settings
        self._clutch = Clutch(settings.theta_low, settings.theta_high, Ema(1.0))

    def start_request(self) -> SmoothedGate:
        return SmoothedGate(self._settings.alpha)

    def decide(self, gates: Sequence[RequestGate]) -> int:
        smoothed = [
            gate.smoothed_bits for gate in gates if isinstance(gate, SmoothedGate) and gate.smoothed_bits is not None
        ]
        if smoothed:
            self._clutch.observe(sum(smoothed) / len(smoothed))
        return self._settings.k if self._clutch.engaged else 0
