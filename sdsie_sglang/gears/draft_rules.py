"""Other people's rules that stop a draft while it drafts, each named by its source.

They read the draft's own distribution after every token, which in a server costs a round trip to the host for each
token. SGLang's captured chains have no place for that; they are run in the simulator, where that is free.
"""

import math
from typing import Protocol


class DraftRule(Protocol):
    """Decides after each drafted token whether it was the last. One per request."""

    def stops(self, entropy_bits: float, top_probability: float) -> bool:
        """Both are of the draft's distribution that the newest token was taken from."""
        ...

    def verified(self, k: int, accepted: int) -> None:
        """Of `k` drafted tokens, `accepted` were right."""
        ...


class Svip:
    """SVIP (arXiv 2411.18462, its code): stop if sqrt(0.15 H) > 0.3, H in nats: above 0.87 bits."""

    SCALE = 0.15
    LIMIT = 0.3

    def stops(self, entropy_bits: float, top_probability: float) -> bool:
        return math.sqrt(self.SCALE * entropy_bits * math.log(2)) > self.LIMIT

    def verified(self, k: int, accepted: int) -> None:
        pass


class ConstantConfidence:
    """Transformers' default assistant schedule: stop if the token's probability is below 0.4."""

    LIMIT = 0.4

    def stops(self, entropy_bits: float, top_probability: float) -> bool:
        return top_probability < self.LIMIT

    def verified(self, k: int, accepted: int) -> None:
        pass


class CumulativeConfidence:
    """Stop once all tokens of the chain are unlikely to be right: the product of their probabilities is below a limit.

    What EAGLE-2 (arXiv 2406.16858) calls the confidence of a node, put to a chain.
    """

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self._chain = 1.0

    def stops(self, entropy_bits: float, top_probability: float) -> bool:
        self._chain *= top_probability
        return self._chain < self.limit

    def verified(self, k: int, accepted: int) -> None:
        self._chain = 1.0


class AdaEdl:
    """AdaEDL (arXiv 2410.18351): stop if 1 - sqrt(gamma H) < limit, H in nats.

    The left side bounds the chance of acceptance from below. The limit follows acceptance as in Draft & Verify
    (arXiv 2309.08168): a <- 0.5 a + 0.5 accepted share; up by 0.01 if a is below 0.9, else down, smoothed by
    0.9. gamma = 0.2 and the limit's start are from memory of the paper, not checked against its code.
    """

    GAMMA = 0.2
    TARGET = 0.9
    STEP = 0.01
    SHARE_MEMORY = 0.5
    LIMIT_MEMORY = 0.9

    def __init__(self, limit: float = 0.4) -> None:
        self.limit = limit
        self._share = self.TARGET

    def stops(self, entropy_bits: float, top_probability: float) -> bool:
        return 1.0 - math.sqrt(self.GAMMA * entropy_bits * math.log(2)) < self.limit

    def verified(self, k: int, accepted: int) -> None:
        self._share = self.SHARE_MEMORY * self._share + (1 - self.SHARE_MEMORY) * accepted / k
        moved = self.limit + (self.STEP if self._share < self.TARGET else -self.STEP)
        self.limit = self.LIMIT_MEMORY * self.limit + (1 - self.LIMIT_MEMORY) * moved
