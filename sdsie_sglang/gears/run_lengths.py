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
REQUEST_FADE = 0.05
"""A request's own weight goes this far back to the prior with every cycle, drafted or not: texts change, and
what was bad a while ago may be tried again."""


def entropy_bin(entropy_bits: float) -> int:
    """UNKNOWN for what is no usable number."""
    return bisect_right(ENTROPY_EDGES_BITS, entropy_bits) if entropy_bits >= 0.0 else UNKNOWN


class Weight:
    """A normal belief about one weight.

    Args:
        sd: before anything was seen; the mean is 0 then.
        memory: tokens after which it gets no surer.
    """

    __slots__ = ("_least", "_most", "mean", "precision")

    def __init__(self, sd: float, memory: float) -> None:
        self.mean = 0.0
        self.precision = self._least = 1.0 / sd**2
        self._most = self.precision + memory / 4.0  # a token adds p (1 - p), 1/4 at most

    def fade(self, share: float) -> None:
        """Goes this share of the way back to the belief before anything was seen."""
        self.mean -= share * self.mean
        self.precision -= share * (self.precision - self._least)

    def learn(self, error: float, information: float) -> None:
        """One token: `error` = right - p, `information` = p (1 - p)."""
        self.precision = min(self.precision + information, self._most)
        self.mean += error / self.precision


class RunLengths:
    """P(run >= k) in a request's present context."""

    def __init__(self) -> None:
        self._places = [Weight(PLACE_SD, SHARED_MEMORY) for _ in range(MAX_K)]
        self._bins = [Weight(ENTROPY_SD, SHARED_MEMORY) for _ in range(UNKNOWN)]

    @staticmethod
    def start_request() -> Weight:
        return Weight(REQUEST_SD, SHARED_MEMORY)

    def add(self, entropy: int, request: Weight, k: int, accepted: int) -> None:
        """A cycle proposed `k` tokens, of which `accepted` were right; `entropy` is the bin it was decided by."""
        for place in range(min(accepted + 1, k)):
            weights = [self._places[place], request]
            if entropy != UNKNOWN:
                weights.append(self._bins[entropy])
            p = _logistic(self._places[place].mean + self._of_entropy(entropy) + request.mean)
            for weight in weights:
                weight.learn((place < accepted) - p, p * (1.0 - p))

    def survival(self, entropy: int, request: Weight, hope: float = 0.0) -> Sequence[float]:
        """P(run >= k) for k = 1 … MAX_K; with `hope`, of weights so many standard deviations better."""
        shared = self._of_entropy(entropy) + request.mean
        alive, result = 1.0, []
        for place in self._places:
            margin = hope * math.sqrt(1.0 / place.precision + 1.0 / request.precision) if hope else 0.0
            alive *= _logistic(place.mean + shared + margin)
            result.append(alive)
        return result

    def _of_entropy(self, entropy: int) -> float:
        """The bin's weight; of an unknown entropy the mean of all bins, each as sure as it is."""
        if entropy != UNKNOWN:
            return self._bins[entropy].mean
        return sum(w.mean * w.precision for w in self._bins) / sum(w.precision for w in self._bins)


def _logistic(x: float) -> float:
    return 1.0 / (1.0 + math.exp(-x))
