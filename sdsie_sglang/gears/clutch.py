"""The Schmitt-trigger clutch: the only one in the repository (equations: README, "The clutch")."""

import math

from sdsie_sglang.gears.smoothing import Smoother


class Clutch:
    """Engages on low smoothed entropy, disengages on high, holds in between. One per request.

    Both comparisons are strict. It starts engaged. An entropy that is not finite, or is negative,
    disengages it, is counted in `rejected`, and leaves the smoothed value as it was.

    Args:
        theta_low: bits; disengaged and smoothed < theta_low engages.
        theta_high: bits; engaged and smoothed > theta_high disengages.
        smoother: its state belongs to this clutch alone.
    """

    def __init__(self, theta_low: float, theta_high: float, smoother: Smoother) -> None:
        if not theta_low < theta_high:
            raise ValueError(f"theta_low ({theta_low}) must be below theta_high ({theta_high})")
        self._theta_low = theta_low
        self._theta_high = theta_high
        self._smoother = smoother
        self.engaged = True
        self.smoothed_bits: float | None = None
        self.rejected = 0

    def observe(self, entropy_bits: float) -> bool:
        """Takes the next entropy (bits) and returns whether the clutch is engaged now."""
        if not math.isfinite(entropy_bits) or entropy_bits < 0.0:
            self.rejected += 1
            self.engaged = False
            return False
        self.smoothed_bits = self._smoother.update(entropy_bits)
        if self.engaged and self.smoothed_bits > self._theta_high:
            self.engaged = False
        elif not self.engaged and self.smoothed_bits < self._theta_low:
            self.engaged = True
        return self.engaged
