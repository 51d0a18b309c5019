"""How many drafted tokens will be right: learned online, shared by all requests, adapted to each.

A drafted token is right, given that all before it were, with probability

    logistic(place + entropy bin + request)

one weight for its place in the chain, one for the bin of the request's last known entropy, one for how the
request's own drafts fared lately. Additive weights need far fewer cycles than a table of all combinations.
Each weight is a normal belief, updated by one Newton step for every token that was compared.
"""

import math
from bisect import bisect_right
from collections.abc import Sequence

from sdsie_sglang.gears.limits import MAX_K

ENTROPY_EDGES_BITS = (0.02, 0.1, 0.3, 0.7, 1.2, 2.0, 3.0)
"""Resolution of the last entropy, not thresholds: nothing is switched by them."""
UNKNOWN = len(ENTROPY_EDGES_BITS) + 1
PLACE_SD = 1.5
ENTROPY_SD = 0.7
REQUEST_SD = 0.5
SHARED_MEMORY = 2000.0
"""A shared weight is never surer than after this many tokens of its kind, so that it can follow a change."""
REQUEST_MEMORY = 40.0


def entropy_bin(entropy_bits: float) -> int:
    """UNKNOWN for what is no usable number."""
    return bisect_right(ENTROPY_EDGES_BITS, entropy_bits) if entropy_bits >= 0.0 else UNKNOWN


class Weight:
    """A normal belief about one weight.

    Args:
        sd: before anything was seen; the mean is 0 then.
        memory: tokens after which it gets no surer.
    """

    __slots__ = ("_most", "mean", "precision")

    def __init__(self, sd: float, memory: float) -> None:
        self.mean = 0.0
        self.precision = 1.0 / sd**2
        self._most = self.precision + memory / 4.0  # a token adds p (1 - p), 1/4 at most

    def learn(self, error: float, information: float) -> None:
        """One token: `error` = right - p, `information` = p (1 - p)."""
        self.precision = min(self.precision + information, self._most)
        self.mean += error / self.precision


class RunLengths:
    """P(run >= k) in a request's present context."""

    def __init__(self) -> None:
        self._places = [Weight(PLACE_SD, SHARED_MEMORY) for _ in range(MAX_K)]
        self._bins = [Weight(ENTROPY_SD, SHARED_MEMORY) for _ in range(UNKNOWN + 1)]

    @staticmethod
    def start_request() -> Weight:
        return Weight(REQUEST_SD, REQUEST_MEMORY)

    def add(self, entropy: int, request: Weight, k: int, accepted: int) -> None:
        """A cycle proposed `k` tokens, of which `accepted` were right; `entropy` is the bin it was decided by."""
        for place in range(min(accepted + 1, k)):
            weights = (self._places[place], self._bins[entropy], request)
            p = _logistic(sum(weight.mean for weight in weights))
            for weight in weights:
                weight.learn((place < accepted) - p, p * (1.0 - p))

    def survival(self, entropy: int, request: Weight) -> Sequence[float]:
        """P(run >= k) for k = 1 … MAX_K."""
        shared = self._bins[entropy].mean + request.mean
        alive, result = 1.0, []
        for place in self._places:
            alive *= _logistic(place.mean + shared)
            result.append(alive)
        return result


def _logistic(x: float) -> float:
    return 1.0 / (1.0 + math.exp(-x))
