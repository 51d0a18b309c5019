"""Replays a policy on a full batch of traces: one gear serves all of its requests, as in SGLang.

A request that ends makes room for the next, so the batch stays full; the replay stops when there is no next.
Prefills, and the draft's first reading of a prompt, are no part of it.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sdsie_sglang.eval.simulate import LAG
from sdsie_sglang.eval.trace import Trace
from sdsie_sglang.gears import Observation, Policy, RequestGate
from sdsie_sglang.gears.cost_table import GearCosts


@dataclass(frozen=True)
class BatchRun:
    """A stretch of full batches.

    Args:
        tokens: of all requests; cycles: [8] in each gear; drafted, accepted: tokens of all requests.
    """

    tokens: int
    ms: float
    cycles: np.ndarray
    drafted: int
    accepted: int

    @property
    def tok_per_s(self) -> float:
        return 1000.0 * self.tokens / self.ms


class _Seat:
    """A request in the batch."""

    def __init__(self, trace: Trace, gate: RequestGate) -> None:
        self.run = trace.run.tolist()
        self.entropy_bits = trace.entropy_bits.tolist()
        self.gate = gate
        self.t = 0

    @property
    def ended(self) -> bool:
        return self.t >= len(self.run) - 1

    def step(self, k: int) -> tuple[RequestGate, Observation]:
        """One cycle in gear `k`: what it shows, and to whom."""
        accepted = min(self.run[self.t], k)
        seen = Observation(k, self.entropy_bits[self.t : self.t + accepted + 1], accepted + 1)
        self.t += accepted + 1
        return self.gate, seen


def replay_batch(queue: Sequence[Trace], size: int, policy: Policy, costs: GearCosts, lag: int = LAG) -> BatchRun:
    """Args:
    queue: at least `size` requests, in the order of their arrival.
    costs: those at this batch size.
    """
    if len(queue) < size:
        raise ValueError(f"{len(queue)} requests do not fill a batch of {size}")
    waiting = deque(queue)
    seats = [_Seat(waiting.popleft(), policy.start_request()) for _ in range(size)]
    unfed: deque[list[tuple[RequestGate, Observation]]] = deque()
    cycles = np.zeros(8, int)
    ms, tokens, drafted, behind = 0.0, 0, 0, False
    while True:
        while len(unfed) >= lag:
            for gate, seen in unfed.popleft():
                gate.observe(seen)
        k = policy.decide([seat.gate for seat in seats])
        steps = [seat.step(k) for seat in seats]
        unfed.append(steps)
        cycles[k] += 1
        ms += costs.ms[k] + (costs.engaging_ms if behind and k else 0.0)
        behind = k == 0
        tokens += sum(seen.committed or 0 for _, seen in steps)
        drafted += k * size
        for i, seat in enumerate(seats):
            if seat.ended:
                if not waiting:
                    accepted = tokens - int(cycles.sum()) * size
                    return BatchRun(tokens, ms, cycles, drafted, accepted)
                seats[i] = _Seat(waiting.popleft(), policy.start_request())


def mixed_queue(traces: Sequence[Trace], requests: int, rng: np.random.Generator) -> list[Trace]:
    """Requests of all kinds: random orders of all traces, one after another."""
    orders = [rng.permutation(len(traces)) for _ in range(-(-requests // len(traces)))]
    return [traces[i] for i in np.concatenate(orders)[:requests]]
