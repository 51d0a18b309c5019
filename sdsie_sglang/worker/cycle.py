"""One decode cycle, from its launch until what it showed has reached the host."""

import math
from dataclasses import dataclass, field
from typing import Any

import torch

from sdsie_sglang.gears import Observation, RequestGate
from sdsie_sglang.int4.resolution import GEAR as R
from sdsie_sglang.worker.request_state import RequestState


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None  # JSON knows no NaN


class HostCopy:
    """A device-to-host copy that nobody waits for until the numbers are read."""

    def __init__(self, values: torch.Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        if values.is_cuda:
            self._host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._host.copy_(values, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()
        else:
            self._host = values

    def read(self) -> list[float]:
        if self._event is not None:
            self._event.synchronize()
        return self._host.tolist()


@dataclass(slots=True)
class Cycle:
    """Args:
    number: decode cycles launched before this one, in this server.
    k: the gear that was decided and that ran.
    draft_passes: forward passes of the draft that ran; where it may stop by itself, at most so many until settled.
    catch_up_passes: those of them that only brought the draft's KV up to date, beyond the one
        that every K-cycle begins with.
    gates: the requests' gates at launch; a retracted request has a new one by now.
    numbers: float32: tokens committed [bs] (left out in gears 0 and R, where it is one), then entropies in bits
        [bs, rows] of the first `rows` verified positions, or of the last committed one if rows is 1; if it stops,
        then the passes that ran.
    stops: whether the draft may have stopped before K tokens.
    int4_layers: linear layers that the target itself ran in INT4; more than none is gear R, whatever K stood for it.
    """

    number: int
    k: int
    draft_passes: int
    catch_up_passes: int
    rids: list[str]
    states: list[RequestState]
    gates: list[RequestGate]
    numbers: HostCopy
    observations: list[Observation] | None = None
    committed: list[int] = field(default_factory=list)
    int4_layers: int = 0
    stops: bool = False

    @property
    def gear(self) -> int | str:
        """What ran, as telemetry calls it."""
        return R if self.int4_layers else self.k

    @property
    def drafts(self) -> bool:
        return self.k > 0 and not self.int4_layers

    def settle(self) -> list[Observation]:
        """Reads the numbers, once. Waits only if the device has not finished the cycle."""
        if self.observations is None:
            bs, values = len(self.rids), self.numbers.read()
            if self.stops:
                self.draft_passes = int(values.pop()) + self.catch_up_passes
            counts, entropies = (values[:bs], values[bs:]) if self.drafts else ([1.0] * bs, values)
            self.committed = [int(count) for count in counts]
            rows = len(entropies) // bs
            self.observations = [
                Observation(self.k, entropies[i * rows : i * rows + min(rows, committed)], committed)
                for i, committed in enumerate(self.committed)
            ]
        return self.observations

    def trace_line(self) -> dict[str, Any]:
        return {
            "cycle": self.number,
            "k": self.gear,
            "int4_layers": self.int4_layers,
            "draft_passes": self.draft_passes,
            "catch_up_passes": self.catch_up_passes,
            "rids": self.rids,
            "committed": self.committed,
            "entropy_bits": [_finite(seen.entropy_bits[-1]) for seen in self.settle()],
        }
