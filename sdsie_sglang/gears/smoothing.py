"""Smoothing of the entropy signal before the clutch compares it with its thresholds."""

from collections import deque
from typing import Protocol


class Smoother(Protocol):
    """Folds one entropy (bits) into a running value and returns that value (bits)."""

    def update(self, entropy_bits: float) -> float: ...


class Ema:
    """Exponential moving average: m_t = alpha * h_t + (1 - alpha) * m_{t-1}, m_0 = h_0."""

    def __init__(self, alpha: float) -> None:
        self._alpha = alpha
        self._mean: float | None = None

    def update(self, entropy_bits: float) -> float:
        if self._mean is None:
            self._mean = entropy_bits
        else:
            self._mean = self._alpha * entropy_bits + (1.0 - self._alpha) * self._mean
        return self._mean


class MovingWindow:
    """Mean of the last `width` entropies, of as many as there are at the beginning."""

    def __init__(self, width: int) -> None:
        self._last: deque[float] = deque(maxlen=width)

    def update(self, entropy_bits: float) -> float:
        self._last.append(entropy_bits)
        return sum(self._last) / len(self._last)
