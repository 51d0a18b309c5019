"""What one request's cycles did, for its `meta_info`."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class RequestStats:
    """Counts over a request's whole life, retractions included."""

    cycles: Counter[int] = field(default_factory=Counter)
    switches: int = 0
    draft_passes: int = 0
    committed: int = 0
    entropy_sum_bits: float = 0.0
    entropies: int = 0
    rejected_entropies: int = 0
    last_gear: int | None = None

    def add_cycle(self, k: int, draft_passes: int, committed: int, entropy_bits: float) -> bool:
        """Counts one executed cycle; says whether its gear differs from the one before.

        Args:
            k: gear that ran.
            draft_passes: forward passes of the draft that ran for the batch this request was in.
            committed: tokens committed, bonus included.
            entropy_bits: the target's entropy at the last committed position.
        """
        switched = self.last_gear is not None and self.last_gear != k
        self.last_gear = k
        self.cycles[k] += 1
        self.switches += switched
        self.draft_passes += draft_passes
        self.committed += committed
        if entropy_bits == entropy_bits and entropy_bits != float("inf"):
            self.entropy_sum_bits += entropy_bits
            self.entropies += 1
        else:
            self.rejected_entropies += 1
        return switched

    def summary(self) -> dict[str, Any]:
        """JSON-ready; keys of `cycles` are gears as text."""
        total = self.cycles.total()
        return {
            "cycles": {str(k): n for k, n in sorted(self.cycles.items())},
            "switches": self.switches,
            "draft_passes": self.draft_passes,
            "mean_entropy_bits": self.entropy_sum_bits / self.entropies if self.entropies else None,
            "accept_length": self.committed / total if total else None,
            "rejected_entropies": self.rejected_entropies,
        }
