"""Other people's rules that choose a gear before a cycle, each named by its source."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sdsie_sglang.gears.cost_table import CostTable
from sdsie_sglang.gears.policy import Observation, RequestGate


class CountingGate:
    """Hands its request's accepted drafts to the policy, which keeps one state for all requests."""

    engaged = True
    rejected = 0

    def __init__(self, seen: list[Observation]) -> None:
        self._seen = seen

    def observe(self, seen: Observation) -> None:
        self._seen.append(seen)


@dataclass(frozen=True)
class AcceptEmaSlot:
    """Settings of SGLang's adaptive rule from one batch size on.

    Args:
        steps: gears that it may choose, ascending.
        up, down: hysteresis in tokens, added to the bounds that lie half a token below a gear.
    """

    steps: tuple[int, ...]
    up: float = 0.0
    down: float = 0.0


SGLANG_SLOTS: Mapping[int, AcceptEmaSlot] = {
    1: AcceptEmaSlot((1, 3, 5, 7), down=-0.25),
    8: AcceptEmaSlot((0, 1, 3)),
    32: AcceptEmaSlot((0, 1)),
    64: AcceptEmaSlot((0,)),
}
"""DEFAULT_ADAPTIVE_CONFIG of SGLang 0.5.23, speculative/adaptive_spec_params.py."""


class _AcceptEma:
    """AdaptiveStepSlot of SGLang 0.5.23 (its ceiling is off by default and left out)."""

    ALPHA = 0.2
    WARMUP_BATCHES = 10
    UPDATE_INTERVAL = 5

    def __init__(self, slot: AcceptEmaSlot, initial: int) -> None:
        self._slot = slot
        self.k = initial if initial in slot.steps else slot.steps[len(slot.steps) // 2]
        self._mean = float(self.k - 1)
        self._batches = 0

    def update(self, accepted: Sequence[int]) -> None:
        """One verified batch: its requests' accepted drafts."""
        if self.k > 0:
            self._mean = (1 - self.ALPHA) * self._mean + self.ALPHA * (sum(accepted) / len(accepted))
        self._batches += 1
        since = self._batches - self.WARMUP_BATCHES
        if since > 0 and since % self.UPDATE_INTERVAL == 0:
            self._choose()

    def _choose(self) -> None:
        steps = self._slot.steps
        at = start = steps.index(self.k)
        if self.k == 0:  # probe the smallest positive step
            self.k = steps[min(at + 1, len(steps) - 1)]
            if self.k > 0 and self._mean < 0:
                self._mean = float(self.k - 1)
            return
        while at > 0 and self._mean <= (steps[at - 1] - 0.5 if steps[at - 1] else 0.5) + self._slot.down:
            at -= 1
        if at == start:
            while at < len(steps) - 1 and self._mean > steps[at] - 0.5 + self._slot.up:
                at += 1
        self.k = steps[at]


class AcceptEmaPolicy:
    """SGLang's adaptive speculative steps: an EMA of accepted drafts moves K among given steps.

    SGLang offers it for EAGLE with topk 1 only. Its state is the server's, one for each range of batch sizes.

    Args:
        slots: settings by the batch size they begin at.
        initial: --speculative-num-steps.
    """

    def __init__(self, slots: Mapping[int, AcceptEmaSlot] = SGLANG_SLOTS, initial: int = 5) -> None:
        self._states = {batch: _AcceptEma(slot, initial) for batch, slot in sorted(slots.items())}
        self._seen: list[Observation] = []
        self._last_batch = 1

    def start_request(self) -> CountingGate:
        return CountingGate(self._seen)

    def decide(self, gates: Sequence[RequestGate]) -> int:
        if self._seen:
            self._route(self._last_batch).update([seen.accepted for seen in self._seen])
            self._seen.clear()
        self._last_batch = len(gates)
        return self._route(len(gates)).k

    def _route(self, batch: int) -> _AcceptEma:
        return self._states[max((size for size in self._states if size <= batch), default=min(self._states))]


class GoodputPolicy:
    """TurboSpec (SmartSpec, arXiv 2406.14066): the K with the highest predicted goodput.

    Goodput(K) = batch x (1 - a^(K+1)) / (1 - a) / ms(K, batch), with `a` a moving average over all requests of
    the chance that a drafted token is right, the same at every place and in every text. K = 0 teaches it
    nothing, so it stays there once it is. The average's weight and start are ours; the paper leaves them open.
    """

    ALPHA = 0.1
    START = 0.7

    def __init__(self, table: CostTable) -> None:
        self._table = table
        self._seen: list[Observation] = []
        self._right = self.START

    def start_request(self) -> CountingGate:
        return CountingGate(self._seen)

    def decide(self, gates: Sequence[RequestGate]) -> int:
        compared = sum(min(seen.accepted + 1, seen.k) for seen in self._seen if seen.k)
        if compared:
            right = sum(seen.accepted for seen in self._seen if seen.k) / compared
            self._right += self.ALPHA * (right - self._right)
        self._seen.clear()
        ms = self._table.nearest(len(gates)).ms
        return max(ms, key=lambda k: sum(self._right**place for place in range(k + 1)) / ms[k])
