"""GPU energy from NVML's total-energy counter, read so that its coarseness is known and not in the way.

The counter (Volta and newer, mJ since the driver was loaded) moves only about every 100 ms, by tens of joules: a
difference over one short request is mostly that step. So a thread samples it all the time and keeps the moments at
which it moved (its edges); a window's energy is taken from edge to edge, and reported only over at least `MIN_WINDOW_S`
together.
Power readings integrated over the same window must agree. This is the only reader of energy in the repository.

Units: seconds of the caller's clock (`_s`), joules (`_j`), watts (`_w`), degrees Celsius (`_c`).
Sources: NVML API reference, nvmlDeviceGetTotalEnergyConsumption; ML.ENERGY on the counter's 100 ms; arXiv 2312.02741
on power readings that see a part of the runtime only.
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from types import TracebackType
from typing import Any, Self

import numpy as np
from pydantic import BaseModel

MIN_WINDOW_S = 10.0
MIN_PIECE_S = 3.0
"""Windows of one label in several servers' lives are pooled to `MIN_WINDOW_S`; each must span many counter steps."""
FAST_PERIOD_S = 0.01
MAX_UNSEEN_STEPS = 3
"""A window may begin or end so many counter steps from the nearest edge; a thread that did not sample leaves more."""
SLOW_EVERY = 10
"""Temperature, clock, reasons, memory and processes are read at every tenth sample of energy and power."""


class NoEnergy(ValueError):
    """Energy that the readings cannot give; says why."""


class SlowReading(BaseModel):
    """What changes slowly. `throttle` are NVML's clock event reasons, a bit mask; `processes` compute on the GPU
    and `strangers` of them are none of ours (None where a container may not see them or nobody keeps account)."""

    t_s: float
    temperature_c: int
    sm_clock_mhz: int
    throttle: int
    memory_gib: float
    processes: int | None
    strangers: int | None = None


class Readings(BaseModel):
    """Raw timelines of one GPU. Energy and power are step functions: only the samples that changed are kept.

    Args:
        energy_j: (t_s, counter) whenever the counter was first seen to have moved, and at the start.
        power_w: (t_s, watts) likewise.
        sampled: samples taken; end_s: time of the last.
    """

    energy_j: list[tuple[float, float]] = []
    power_w: list[tuple[float, float]] = []
    slow: list[SlowReading] = []
    sampled: int = 0
    end_s: float = 0.0


@dataclass(frozen=True)
class Quantum:
    """The counter's measured step: medians over all edges."""

    period_s: float
    energy_j: float
    edges: int


class Gpu:
    """One GPU through pynvml. Raises NoEnergy where there is none or its counter is not supported.

    Args:
        ours: processes that may be on it (servers that wait or are measured); every other one is a
            stranger; None where nobody keeps account.
    """

    def __init__(self, index: int = 0, nvml: Any = None) -> None:
        if nvml is None:
            import pynvml

            nvml = pynvml
        self._nvml = nvml
        self.ours: frozenset[int] | None = None
        try:
            nvml.nvmlInit()
            self._gpu = nvml.nvmlDeviceGetHandleByIndex(index)
            nvml.nvmlDeviceGetTotalEnergyConsumption(self._gpu)
        except nvml.NVMLError as error:
            raise NoEnergy(f"GPU {index} gives no energy: {error}") from None

    def energy_j(self) -> float:
        with self._reading():
            return self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._gpu) / 1000

    def power_w(self) -> float:
        with self._reading():
            return self._nvml.nvmlDeviceGetPowerUsage(self._gpu) / 1000

    def slow(self, t_s: float) -> SlowReading:
        with self._reading():
            return self._slow(t_s)

    @contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            yield
        except self._nvml.NVMLError as error:
            raise NoEnergy(f"the GPU cannot be read any more: {error}") from error

    def _slow(self, t_s: float) -> SlowReading:
        nvml, gpu, pids = self._nvml, self._gpu, self.pids()
        return SlowReading(
            t_s=t_s,
            temperature_c=nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU),
            sm_clock_mhz=nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_SM),
            throttle=nvml.nvmlDeviceGetCurrentClocksThrottleReasons(gpu),
            memory_gib=nvml.nvmlDeviceGetMemoryInfo(gpu).used / 2**30,
            processes=None if pids is None else len(pids),
            strangers=None if pids is None or self.ours is None else len(pids - self.ours),
        )

    def pids(self) -> frozenset[int] | None:
        """Processes that compute on the GPU, by the ids that NVML gives them; None if it may not say."""
        try:
            return frozenset(p.pid for p in self._nvml.nvmlDeviceGetComputeRunningProcesses(self._gpu))
        except self._nvml.NVMLError:
            return None


class Recorder:
    """Samples a GPU in a thread between `with` and its end; `readings` grows meanwhile.

    Args:
        clock: the one that also times the requests.
    """

    def __init__(
        self, gpu: Gpu, clock: Callable[[], float] = time.perf_counter, period_s: float = FAST_PERIOD_S
    ) -> None:
        self.readings = Readings()
        self._gpu = gpu
        self._clock = clock
        self._period_s = period_s
        self._stop = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="gpu-readings", daemon=True)

    def __enter__(self) -> Self:
        self.sample()  # so that whoever asks at once is answered
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()
        if self._error is not None and error is None:
            raise self._error

    def sample(self) -> None:
        """One sample now; the thread calls it."""
        now, readings = self._clock(), self.readings
        for kept, value in ((readings.energy_j, self._gpu.energy_j()), (readings.power_w, self._gpu.power_w())):
            if not kept or kept[-1][1] != value:
                kept.append((now, value))
        if readings.sampled % SLOW_EVERY == 0:
            readings.slow.append(self._gpu.slow(now))
        readings.sampled += 1
        readings.end_s = now

    def _run(self) -> None:
        try:
            while not self._stop.wait(self._period_s):
                self.sample()
        except BaseException as error:
            self._error = error


def quantum(readings: Readings) -> Quantum:
    """How often and by how much the counter moves. Raises NoEnergy if it never moved twice."""
    edges = readings.energy_j[1:]  # the first is the start of sampling, no edge
    if len(edges) < 2:
        raise NoEnergy("the energy counter did not move")
    t_s, energy_j = np.array(edges).T
    return Quantum(float(np.median(np.diff(t_s))), float(np.median(np.diff(energy_j))), len(edges))


def window_energy_j(readings: Readings, start_s: float, end_s: float, min_s: float = MIN_WINDOW_S) -> float:
    """Energy of a window, from its first edge to its last; what lies outside them (less than one step at each
    end) counts at the mean power between them. Raises NoEnergy: too short, or the counter stood still or went back."""
    if end_s - start_s < min_s:
        raise NoEnergy(f"a window of {end_s - start_s:.1f} s is shorter than {min_s:.0f} s")
    edges = [(t, e) for t, e in readings.energy_j[1:] if start_s <= t <= end_s]
    if len(edges) < 2:
        raise NoEnergy("the energy counter did not move within the window")
    if any(after < before for (_, before), (_, after) in pairwise(edges)):
        raise NoEnergy("the energy counter went backwards within the window")
    (first_s, first_j), (last_s, last_j) = edges[0], edges[-1]
    step_s = float(np.median(np.diff([t for t, _ in edges])))
    unseen_s = max(first_s - start_s, end_s - last_s)
    if unseen_s > MAX_UNSEEN_STEPS * step_s:
        raise NoEnergy(f"the energy counter was not seen to move in {unseen_s:.1f} s of the window")
    return (last_j - first_j) / (last_s - first_s) * (end_s - start_s)


def integrated_power_j(readings: Readings, start_s: float, end_s: float) -> float:
    """Power readings, each held until the next, integrated: the cross-check of the counter."""
    if not readings.power_w:
        raise NoEnergy("there are no power readings")
    t_s, power_w = np.array(readings.power_w).T
    inside = t_s[(t_s > start_s) & (t_s < end_s)]
    steps = np.concatenate([[start_s], inside, [end_s]])
    held = power_w[np.clip(np.searchsorted(t_s, steps[:-1], side="right") - 1, 0, None)]
    return float(np.sum(np.diff(steps) * held))


def shares_j(readings: Readings, spans: Sequence[tuple[float, float]]) -> list[float]:
    """Energy of each span, where spans that overlap share equally what was used meanwhile.

    The counter is taken as linear between its edges. One span's share may be off by a part of a step; the shares
    of all spans together are not, which is why only sums over at least `MIN_WINDOW_S` are reported.
    """
    edges = np.array(readings.energy_j[1:])
    if len(edges) < 2:
        raise NoEnergy("the energy counter did not move")
    moments = np.unique(np.array(spans).ravel())
    counter = np.interp(moments, edges[:, 0], edges[:, 1])
    bounds = np.searchsorted(moments, np.array(spans))
    active = np.zeros(len(moments) - 1)
    for first, last in bounds:
        active[first:last] += 1
    each = np.diff(counter) / np.maximum(active, 1)
    return [float(each[first:last].sum()) for first, last in bounds]


def mean_power_w(readings: Readings, start_s: float, end_s: float) -> float:
    """Mean of the power readings over a stretch of any length; for warm-up and idle, not for energy."""
    return integrated_power_j(readings, start_s, end_s) / (end_s - start_s)


def mean_temperature_c(readings: Readings, start_s: float, end_s: float) -> float:
    """Mean temperature of a stretch; the nearest reading if none falls into it."""
    inside = [r.temperature_c for r in readings.slow if start_s <= r.t_s <= end_s]
    if not inside:
        inside = [min(readings.slow, key=lambda r: abs(r.t_s - end_s)).temperature_c]
    return float(np.mean(inside))
