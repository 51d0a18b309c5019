"""Bayesian maximisation of a function of a few bounded numbers: a Gaussian process and expected improvement."""

from collections.abc import Callable

import numpy as np
from scipy.linalg import cho_factor, cho_solve
from scipy.spatial.distance import cdist
from scipy.stats import norm, qmc

SCALE = 0.25
"""Length scale in the unit cube."""
NOISE = 1e-4
CANDIDATES = 512


def maximise(
    function: Callable[[np.ndarray], float],
    bounds: np.ndarray,
    points: np.ndarray,
    values: np.ndarray,
    steps: int,
    rng: np.random.Generator,
) -> tuple[np.ndarray, float]:
    """Plays `steps` further points, each where the expected improvement is greatest; returns the best of all.

    Args:
        bounds: [dims, 2]; points: [n, dims] known already, with their values [n].
    """
    low, span = bounds[:, 0], bounds[:, 1] - bounds[:, 0]
    known, found = (points - low) / span, np.asarray(values, float)
    for _ in range(steps):
        offered = qmc.LatinHypercube(len(bounds), rng=rng).random(CANDIDATES)
        near = known[found.argmax()] + rng.normal(0.0, 0.05, (CANDIDATES // 4, len(bounds)))
        offered = np.clip(np.concatenate([offered, near]), 0.0, 1.0)
        at = offered[expected_improvement(known, found, offered).argmax()]
        known = np.concatenate([known, at[None]])
        found = np.append(found, function(low + at * span))
    best = int(found.argmax())
    return low + known[best] * span, float(found[best])


def expected_improvement(known: np.ndarray, found: np.ndarray, offered: np.ndarray) -> np.ndarray:
    """Of each of [m, dims] offered points over the best of [n] values found, all in the unit cube."""
    mean, spread = found.mean(), found.std() or 1.0
    scaled = (found - mean) / spread
    factor = cho_factor(_kernel(known, known) + NOISE * np.eye(len(known)), lower=True)
    across = _kernel(offered, known)
    expected = across @ cho_solve(factor, scaled)
    variance = 1.0 - np.einsum("ij,ji->i", across, cho_solve(factor, across.T))
    deviation = np.sqrt(np.maximum(variance, 1e-12))
    z = (expected - scaled.max()) / deviation
    return deviation * (z * norm.cdf(z) + norm.pdf(z))


def _kernel(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Matern 5/2."""
    distance = np.sqrt(5.0) * cdist(a, b) / SCALE
    return (1.0 + distance + distance**2 / 3.0) * np.exp(-distance)
