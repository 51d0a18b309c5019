"""How many drafted tokens will be right: learned online, from coarse to fine."""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Hashable

from sdsie_sglang.gears.limits import MAX_K

ENTROPY_EDGES_BITS = (0.02, 0.1, 0.3, 0.7, 1.2, 2.0, 3.0)
"""Resolution of the last entropy; more bins than this learn no faster than they forget."""
RECENT_EDGES = (0.2, 0.4, 0.6, 0.8)
UNKNOWN = -1
UNTRIED = 0.5
"""Chance that a drafted token is right where nothing was ever seen."""
WEIGHT = 8.0
"""A coarser estimate counts like this many tokens seen."""


def entropy_bin(entropy_bits: float) -> int:
    """UNKNOWN for what is no usable number."""
    return bisect_right(ENTROPY_EDGES_BITS, entropy_bits) if entropy_bits >= 0.0 else UNKNOWN


def recent_bin(accepted_share: float | None) -> int:
    """UNKNOWN where nothing was drafted lately."""
    return UNKNOWN if accepted_share is None else bisect_right(RECENT_EDGES, accepted_share)


class _Counts:
    """Per place in the chain: how often the token there was compared, and how often it was right."""

    __slots__ = ("right", "seen")

    def __init__(self) -> None:
        self.seen = [0.0] * MAX_K
        self.right = [0.0] * MAX_K

    def add(self, k: int, accepted: int) -> None:
        for place in range(min(accepted + 1, k)):
            self.seen[place] += 1.0
            self.right[place] += place < accepted

    def towards(self, place: int, coarser: float) -> float:
        """The share that was right, as far as it was seen, else `coarser`."""
        return (self.right[place] + WEIGHT * coarser) / (self.seen[place] + WEIGHT)


class RunLengths:
    """P(run >= k | entropy bin, recent acceptance), shared by all requests.

    Each place in the chain has its own chance of being right given that all before it were. The chance in a
    context is drawn towards that of its recent acceptance alone, that one towards the overall chance, and
    that one towards the place before it and, at the first, towards `UNTRIED`.
    """

    def __init__(self) -> None:
        self._all = _Counts()
        self._finer: defaultdict[Hashable, _Counts] = defaultdict(_Counts)

    def add(self, entropy: int, recent: int, k: int, accepted: int) -> None:
        """A cycle in this context proposed `k` tokens, of which `accepted` were right."""
        for counts in (self._all, self._finer[recent], self._finer[entropy, recent]):
            counts.add(k, accepted)

    def survival(self, entropy: int, recent: int) -> list[float]:
        """P(run >= k) for k = 1 … MAX_K."""
        by_recent, by_both = self._finer[recent], self._finer[entropy, recent]
        alive, overall, result = 1.0, UNTRIED, []
        for place in range(MAX_K):
            overall = self._all.towards(place, overall)
            alive *= by_both.towards(place, by_recent.towards(place, overall))
            result.append(alive)
        return result
