"""The cost-model gate: the gear that earns most tokens for what its cycle costs. No thresholds.

With N tokens to write, the total cost is least if every cycle picks the K with the most

    E[tokens | K] - rate * cost(K)

where `rate` is what is earned in the long run, in tokens per ms or per J (Dinkelbach's form of the best
ratio; picking the best ratio of each cycle alone drafts too little where drafting goes well). E[tokens | K]
= requests + sum over requests of P(run >= 1) + … + P(run >= K), learned online; cost(K) is the measured one
at the current batch size.
"""

import random
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from sdsie_sglang.gears.cost_table import CostTable, GearCosts, Objective
from sdsie_sglang.gears.limits import MAX_K
from sdsie_sglang.gears.policy import Observation, RequestGate
from sdsie_sglang.gears.run_lengths import REQUEST_FADE, UNKNOWN, RunLengths, entropy_bin

# These numbers, and those of run_lengths.py, were chosen on the demo pair's traces, at three made-up cost tables and
# at the H200's: they are not settings, and figures on those traces at those costs are in-sample. The last changed ones,
# ADVANCE_CYCLES and HOPE, were chosen on half of the prompts: `eval.lab --prompts held-out` plays the others.
RATE_DECAY = 0.98
EXPLORE_CYCLES = 3
"""An exploration out of gear 0 lasts this long, so that engaging pays for more than one look."""
ADVANCE_CYCLES = 32
"""What may be explored beyond the share `explore`, in cycles of the widest gear, while a gear may well be better than
gear 0, which teaches nothing. It is an advance: this much may be owed at a time, and nothing is advanced beyond."""
PAID_BACK_SHARE = 0.01
"""An advance spent in vain is paid back by this share of the total cost, and cleared by text that turns out to be worth
drafting. Without that, requests that can't be drafted would cost more than all that is saved elsewhere."""
HOPE = 2.0
"""Standard deviations that "may well be" means."""


class CostGate:
    """One request's context: its last known entropy and how its drafts fared lately."""

    engaged = True

    def __init__(self, lengths: RunLengths) -> None:
        self.rejected = 0
        self.fresh = True
        self._lengths = lengths
        self._own = lengths.start_request()
        self._entropy = UNKNOWN
        self._asked: deque[tuple[int, int]] = deque()  # gear and entropy bin of decisions not yet judged

    def survival(self, hope: float = 0.0) -> Sequence[float]:
        """P(run >= k) for k = 1 … MAX_K in the present context; see `RunLengths.survival`."""
        return self._lengths.survival(self._entropy, self._own, hope)

    def decided(self, k: int) -> None:
        """Remembers the context, to learn from it once the cycle's outcome is known."""
        self.fresh = False
        self._asked.append((k, self._entropy))

    def observe(self, seen: Observation) -> None:
        k, entropy = self._asked.popleft() if self._asked else (None, UNKNOWN)
        self._entropy = entropy_bin(seen.entropy_bits[-1]) if seen.entropy_bits else UNKNOWN
        self.rejected += self._entropy == UNKNOWN
        self._own.fade(REQUEST_FADE)
        if k == seen.k:
            self._lengths.add(entropy, self._own, seen.k, seen.accepted)


class _Decision(NamedTuple):
    """One cycle's, kept as it was made: turned into words only when somebody asks."""

    gear: int
    exploring: bool
    batch: int
    tokens: dict[int, float]
    cost: dict[int, float]
    rate: float


class CostPolicy:
    """Chooses one gear for the whole batch from the sum over its requests.

    Going back and forth between gear 0 and drafting costs `engaging`, so it changes sides only once staying
    has cost as much as that (the rule of ski rental: never worse than twice the best choice in hindsight).

    It explores wider gears than it thinks best, but even if all that they draft were wrong, this takes at most
    the share `explore` of the total cost, besides an advance that is spent only in gear 0, which teaches nothing.
    Where that is spent in vain it is bounded too: by `PAID_BACK_SHARE`, and once by `ADVANCE_CYCLES`.
    Before it has seen anything it believes that half of the drafted tokens are right.

    Args:
        objective: "time" (ms) or "energy" (J; the table must have it).
        explore: share of the cost that may go into exploring.
        seed: of the choice which gear to explore; the same observations then give the same gears.
    """

    def __init__(self, table: CostTable, objective: Objective = "time", explore: float = 0.005, seed: int = 0) -> None:
        table.at(table.batches[0]).of(objective)  # raises where energies are missing
        self._table = table
        self._objective: Objective = objective
        self._explore = explore
        self._random = random.Random(seed)
        self._lengths = RunLengths()
        self._costs: dict[int, tuple[dict[int, float], dict[int, float]]] = {}
        self._drafting = False
        self._regret = 0.0
        self._credit = 0.0
        self._owed = 0.0
        self._exploring = (0, 0)  # gear, cycles left
        self._trial = False  # drafting only to explore: its engaging is paid, going back is free
        self._earned = self._spent = 0.0  # multiples of gear 0's
        self._chosen: Counter[int] = Counter()
        self._explored = 0
        self._last: _Decision | None = None

    def start_request(self) -> CostGate:
        return CostGate(self._lengths)

    def decide(self, gates: Sequence[RequestGate]) -> int:
        own = [gate for gate in gates if isinstance(gate, CostGate)]
        cost, engaging = self._costs_at(len(gates))
        tokens = self._expected_tokens(own, cost)
        rate = len(gates) / cost[0] * (max(1.0, self._earned / self._spent) if self._spent else 1.0)
        worth = {k: tokens[k] - rate * cost[k] for k in cost}
        gear, left = self._exploring
        best = None
        if left > 0:
            self._exploring = (gear, left - 1)
            k = gear
        else:
            free = self._trial or all(gate.fresh for gate in own)
            best = self._hold(worth, {k: rate * engaging[k] for k in cost}, free=free)
            k = self._maybe_explore(best, cost, engaging, own, rate)
        self._drafting = k > 0
        self._earned = RATE_DECAY * self._earned + tokens[k] / len(gates)
        self._spent = RATE_DECAY * self._spent + cost[k] / cost[0]
        for gate in own:
            gate.decided(k)
        self._chosen[k] += 1
        self._explored += k != best
        self._last = _Decision(k, k != best, len(gates), tokens, cost, rate)
        return k

    def explain(self) -> dict[str, Any]:
        """What it chose last and expected then, for the whole batch; how often it chose each gear.

        `tokens` are those of a cycle; `worth` is what a cycle brings beyond what its cost earns elsewhere.
        """
        told: dict[str, Any] = {
            "saves": self._objective,
            "chosen": {str(k): n for k, n in sorted(self._chosen.items())},
            "explored": self._explored,
            "last": None,
        }
        if (last := self._last) is not None:
            told["last"] = {
                "gear": last.gear,
                "exploring": last.exploring,
                "batch": last.batch,
                "tokens": {str(k): last.tokens[k] for k in last.cost},
                "cost": {str(k): cost for k, cost in last.cost.items()},
                "cost_unit": "ms" if self._objective == "time" else "J",
                "worth": {str(k): last.tokens[k] - last.rate * cost for k, cost in last.cost.items()},
            }
        return told

    def _costs_at(self, batch: int) -> tuple[dict[int, float], dict[int, float]]:
        if batch not in self._costs:
            costs: GearCosts = self._table.nearest(batch)
            self._costs[batch] = costs.of(self._objective)
        return self._costs[batch]

    @staticmethod
    def _expected_tokens(gates: Sequence[CostGate], gears: Iterable[int], hope: float = 0.0) -> dict[int, float]:
        """Tokens of the whole batch in a cycle of each gear."""
        total = [0.0] * MAX_K
        for gate in gates:
            for place, chance in enumerate(gate.survival(hope)):
                total[place] += chance
        return {k: len(gates) + sum(total[:k]) for k in gears}

    def _hold(self, worth: dict[int, float], engaging: dict[int, float], *, free: bool) -> int:
        """The most valuable gear on the side, drafting or not, that we are on or change to now.

        Args:
            worth, engaging: in tokens.
            free: changing sides costs nothing that staying would save: the requests are new, or an
                exploration ends.
        """
        drafted = max((k for k in worth if k), key=lambda k: worth[k], default=0)
        if drafted == 0:
            return 0
        stay, change = (drafted, 0) if self._drafting else (0, drafted)
        if free:
            self._regret = 0.0
            return change if worth[change] > worth[stay] else stay
        self._regret = max(0.0, self._regret + worth[change] - worth[stay])
        if self._regret > 0.0 and self._regret >= engaging[drafted]:
            self._regret = 0.0
            return change
        return stay

    def _maybe_explore(
        self,
        best: int,
        cost: dict[int, float],
        engaging: dict[int, float],
        gates: Sequence[CostGate],
        rate: float,
    ) -> int:
        """`best`, or a wider gear if what it costs more can be paid."""
        widest = max(cost.values()) - cost[0]
        self._credit += self._explore * cost[best]
        self._owed = 0.0 if best else max(0.0, self._owed - PAID_BACK_SHARE * cost[best])
        self._trial = False
        wider = [k for k in cost if k > best]
        if not wider or self._explore == 0.0:
            return best
        gear = self._random.choice(wider)
        cycles = 1 if self._drafting and best else EXPLORE_CYCLES
        loss = cycles * (cost[gear] - cost[best]) + (0.0 if self._drafting else engaging[gear])
        if loss > self._credit:
            needed = loss - self._credit
            if best or self._owed + needed > ADVANCE_CYCLES * widest:
                return best
            hoped = self._expected_tokens(gates, (best, gear), HOPE)
            if hoped[gear] - rate * cost[gear] <= hoped[best] - rate * cost[best]:
                return best
            self._owed += needed
            loss = self._credit
        self._credit -= loss
        self._exploring = (gear, cycles - 1)
        self._trial = best == 0
        return gear
