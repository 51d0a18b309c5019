"""Estimates with intervals: paired by prompt, resampled by prompt and by repetition, on SciPy.

Answers of one prompt are alike, and so is everything that one server measured: prompts and repetitions are
resampled as wholes, each independently of the other. A bootstrap of few wholes is too narrow: two repetitions that
differ by luck alone leave the truth out half of the time. So the intervals of changes are stretched to the width that
a jackknife over prompts and repetitions with Student's t asks for (Satterthwaite's degrees of freedom); how differently
servers behave is pooled over the methods of a part. With one repetition the interval says nothing about it.

Sources: Owen, The pigeonhole bootstrap, Annals of Applied Statistics 1 (2007); Hesterberg, What Teachers Should Know
About the Bootstrap, The American Statistician 69 (2015); Satterthwaite, Biometrics Bulletin 2 (1946).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel
from scipy import stats

RESAMPLES = 2000
LEVEL = 0.95
Array = NDArray[np.float64]
Statistic = Callable[[NDArray[np.intp], NDArray[np.intp]], Array]


class Estimate(BaseModel):
    """A relative change (0.2 is 20 % more) with its 95 % interval; no interval if nothing could be resampled."""

    value: float
    low: float | None = None
    high: float | None = None

    @property
    def holds_zero(self) -> bool | None:
        return None if self.low is None or self.high is None else self.low <= 0.0 <= self.high


def estimate(statistic: Statistic, prompts: int, repetitions: int, seed: int) -> Estimate:
    """Bootstrap of a statistic of prompt indices (..., P) and repetition indices (..., R)."""
    rows, columns = np.arange(prompts), np.arange(repetitions)
    value = float(statistic(rows, columns))
    if prompts < 2 and repetitions < 2:
        return Estimate(value=value)

    def resampled(*indices: NDArray[np.float64], axis: int = -1) -> Array:
        drawn = [i.astype(np.intp) for i in indices]
        if prompts < 2:
            return statistic(np.broadcast_to(rows, (*drawn[0].shape[:-1], prompts)), drawn[0])
        if repetitions < 2:
            return statistic(drawn[0], np.broadcast_to(columns, (*drawn[0].shape[:-1], repetitions)))
        return statistic(drawn[0], drawn[1])

    data = [x for x in (rows, columns) if len(x) > 1]
    with np.errstate(invalid="ignore"):
        found = stats.bootstrap(
            data, resampled, n_resamples=RESAMPLES, confidence_level=LEVEL, method="percentile",
            vectorized=True, rng=np.random.default_rng(seed),
        )  # fmt: skip
    return Estimate(value=value, low=float(found.confidence_interval.low), high=float(found.confidence_interval.high))


@dataclass(frozen=True)
class Spread:
    """How differently servers of a part behave.

    Args:
        variance: of log(1 + change) from one repetition to another. freedom: how many degrees it is known with.
    """

    variance: float
    freedom: float


def pooled(spreads: Sequence[Spread | None]) -> Spread | None:
    """Of all methods of a part, taken as alike: two repetitions of one method say next to nothing about it.

    Methods share their brackets, so that their spreads are related (a third of the variance of each is common, a ninth
    of the variance's own): fewer degrees of freedom than their sum.
    """
    known = [spread for spread in spreads if spread is not None]
    freedom = sum(spread.freedom for spread in known)
    if not freedom:
        return None
    variance = sum(spread.freedom * spread.variance for spread in known) / freedom
    return Spread(variance, freedom / (1 + (len(known) - 1) / 9))


def change(statistic: Statistic, prompts: int, repetitions: int, seed: int, servers: Spread | None = None) -> Estimate:
    """`estimate` of a relative change, its interval stretched on both sides for how few were resampled.

    Args:
        servers: how differently they behave; by default what these repetitions show.
    """
    found = estimate(statistic, prompts, repetitions, seed)
    needed = _half_width(statistic, prompts, repetitions, servers)
    if found.low is None or found.high is None or needed is None or found.value <= -1.0:
        return found
    middle, low, high = (float(np.log1p(x)) for x in (found.value, found.low, found.high))
    if not np.isfinite(needed) or not high > low:
        return found
    stretch = max(1.0, 2 * needed / (high - low))
    return Estimate(
        value=found.value,
        low=float(np.expm1(middle - stretch * max(0.0, middle - low))),
        high=float(np.expm1(middle + stretch * max(0.0, high - middle))),
    )


def _half_width(statistic: Statistic, prompts: int, repetitions: int, servers: Spread | None) -> float | None:
    """Of the 95 % interval of log(1 + change), leaving out each prompt and each repetition; None if nothing varies."""
    rows, columns = np.arange(prompts), np.arange(repetitions)
    of_prompts = _left_out([statistic(np.delete(rows, i), columns) for i in rows] if prompts > 1 else [])
    servers = servers or server_spread(statistic, prompts, repetitions)
    parts = [
        (spread.variance / n, spread.freedom) for spread, n in ((of_prompts, prompts), (servers, repetitions)) if spread
    ]
    total = sum(variance for variance, _ in parts)
    if not total > 0.0:
        return None
    freedom = total**2 / sum(variance**2 / degrees for variance, degrees in parts)
    return float(stats.t.ppf((1 + LEVEL) / 2, freedom) * np.sqrt(total))


def server_spread(statistic: Statistic, prompts: int, repetitions: int) -> Spread | None:
    """What repetitions show of it; None for one."""
    rows, columns = np.arange(prompts), np.arange(repetitions)
    return _left_out([statistic(rows, np.delete(columns, i)) for i in columns] if repetitions > 1 else [])


def _left_out(changes: Sequence[Any]) -> Spread | None:
    """Jackknife: the variance of one, from the changes without each."""
    n = len(changes)
    return Spread(n * (n - 1) * float(np.var(np.log1p(changes))), n - 1) if n > 1 else None


def speed_change(over: Array, under: Array, seed: int = 0, servers: Spread | None = None) -> Estimate:
    """Geometric mean over prompts and repetitions of over/under, less 1. Arrays are [prompts, repetitions]."""
    return change(_speed(over, under), over.shape[0], over.shape[1], seed, servers)


def speed_spread(over: Array, under: Array) -> Spread | None:
    """Of `speed_change`."""
    return server_spread(_speed(over, under), over.shape[0], over.shape[1])


def _speed(over: Array, under: Array) -> Statistic:
    logs = np.log(over / under)

    def statistic(p: NDArray[np.intp], r: NDArray[np.intp]) -> Array:
        return np.expm1(logs[p[..., :, None], r[..., None, :]].mean((-2, -1)))

    return statistic


def energy_change(
    over_j: Array, over_tokens: Array, under_j: Array, under_tokens: Array, seed: int = 0, servers: Spread | None = None
) -> Estimate:
    """J/token against J/token, each of all drawn prompts together, less 1.

    A ratio of sums: one short request's energy is uncertain by a part of the counter's step, their sum is not.
    """
    statistic = _energy(over_j, over_tokens, under_j, under_tokens)
    return change(statistic, over_j.shape[0], over_j.shape[1], seed, servers)


def energy_spread(over_j: Array, over_tokens: Array, under_j: Array, under_tokens: Array) -> Spread | None:
    """Of `energy_change`."""
    return server_spread(_energy(over_j, over_tokens, under_j, under_tokens), over_j.shape[0], over_j.shape[1])


def _energy(over_j: Array, over_tokens: Array, under_j: Array, under_tokens: Array) -> Statistic:
    def statistic(p: NDArray[np.intp], r: NDArray[np.intp]) -> Array:
        where = (p[..., :, None], r[..., None, :])
        sums = [a[where].sum((-2, -1)) for a in (over_j, over_tokens, under_j, under_tokens)]
        return sums[0] / sums[1] / (sums[2] / sums[3]) - 1

    return statistic


def wilcoxon_p(over: Array, under: Array) -> float | None:
    """Two-sided signed-rank test over prompts (their mean log ratio over repetitions); None for too few."""
    differences = np.log(over / under).mean(1)
    if len(differences) < 6 or not np.any(differences):  # below 6 no p under 0.05 is possible
        return None
    return float(stats.wilcoxon(differences).pvalue)


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """Holm's step-down correction; None stays None and counts as no test."""
    order = sorted((p, i) for i, p in enumerate(p_values) if p is not None)
    corrected: list[float | None] = [None] * len(p_values)
    highest = 0.0
    for rank, (p, i) in enumerate(order):
        highest = max(highest, min(1.0, p * (len(order) - rank)))
        corrected[i] = highest
    return corrected
