"""What one request's cycles did, for its `meta_info`."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class RequestStats:
    """Counts over a request's whole life, retractions included."""

    cycles: Counter[int | str] = field(default_factory=Counter)
    switches: int = 0
    draft_passes: int = 0
    int4_layers: int = 0
    committed: int = 0
    entropy_sum_bits: float = 0.0
    entropies: int = 0
    rejected_entropies: int = 0
    last_gear: int | str | None = None

    def add_cycle(
        self, gear: int | str, draft_passes: int, committed: int, entropy_bits: float, int4_layers: int = 0
    ) -> bool:
        """Counts one executed cycle; says whether its gear differs from the one before.

        Args:
            gear: that ran: K, or R for the Resolution Gear.
            draft_passes: forward passes of the draft that ran for the batch this request was in.
            committed: tokens committed, bonus included.
            entropy_bits: the target's entropy at the last committed position.
            int4_layers: linear layers that the target itself ran in INT4.
        """
        switched = self.last_gear is not None and self.last_gear != gear
        self.last_gear = gear
        self.cycles[gear] += 1
        self.switches += switched
        self.draft_passes += draft_passes
        self.int4_layers += int4_layers
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
            "cycles": dict(sorted((str(gear), n) for gear, n in self.cycles.items())),
            "switches": self.switches,
            "draft_passes": self.draft_passes,
            "int4_layers": self.int4_layers,
            "mean_entropy_bits": self.entropy_sum_bits / self.entropies if self.entropies else None,
            "accept_length": self.committed / total if total else None,
            "rejected_entropies": self.rejected_entropies,
        }
