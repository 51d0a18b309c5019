"""Replays a policy on a trace, exactly: the gears a server would run under greedy decoding, and their cost.

From position t a cycle in gear K commits a = min(run[t], K) drafted tokens and one more, shows the policy the
entropy at position t + a, costs what the table says, and ends at t + a + 1. The policy sees a cycle `lag` cycles
late, as in the server. Prefill, and the draft's first reading of the prompt, are no part of it.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

from sdsie_sglang.eval.trace import Trace
from sdsie_sglang.gears import Observation, Policy
from sdsie_sglang.gears.cost_table import GearCosts
from sdsie_sglang.gears.draft_rules import DraftRule

LAG = 2
"""With overlap scheduling, SGLang's default; 1 without."""


class GearNotPriced(ValueError):
    """A policy wants a gear that the cost table does not have."""


@dataclass(frozen=True)
class Run:
    """One answer under one policy.

    Args:
        tokens: of the answer, the prefill's not counted.
        gears: of each cycle.
        joules: None where the table has no energies.
        engagements: K-cycles that came after gear 0 and had to catch up.
    """

    tokens: int
    gears: tuple[int, ...]
    ms: float
    joules: float | None
    engagements: int


class Chooser(Protocol):
    """What the walk over one answer asks: the gear at a position, then what came of it."""

    def choose(self, t: int) -> int: ...

    def happened(self, t: int, k: int, accepted: int) -> None: ...


def walk(trace: Trace, chooser: Chooser) -> tuple[int, ...]:
    """The gear of each cycle, from the token after the prefill's to the end of the answer."""
    run = trace.run.tolist()
    t, end, gears = 0, len(run) - 1, []
    while t < end:
        k = chooser.choose(t)
        accepted = min(run[t], k)
        chooser.happened(t, k, accepted)
        gears.append(k)
        t += accepted + 1
    return tuple(gears)


def price(tokens: int, gears: Sequence[int], costs: GearCosts) -> Run:
    """What these cycles cost. Raises GearNotPriced."""
    engagements = sum(before == 0 < after for before, after in pairwise(gears))
    try:
        ms = sum(costs.ms[k] for k in gears) + engagements * costs.engaging_ms
        joules = None
        if costs.joules is not None:
            _, engaging = costs.of("energy")
            joules = sum(costs.joules[k] for k in gears)
            joules += sum(engaging[b] for a, b in pairwise(gears) if a == 0 < b)
    except KeyError as error:
        raise GearNotPriced(f"gear {error} is not in the cost table: it has {list(costs.gears)}") from None
    return Run(tokens, tuple(gears), ms, joules, engagements)


class PolicyChooser:
    """A request of its own under `policy`, whose other state may have seen other requests."""

    def __init__(self, trace: Trace, policy: Policy, lag: int) -> None:
        self._entropy_bits = trace.entropy_bits.tolist()
        self._policy = policy
        self._gates = [policy.start_request()]
        self._lag = lag
        self._unfed: deque[Observation] = deque()

    def choose(self, t: int) -> int:
        while len(self._unfed) >= self._lag:
            self._gates[0].observe(self._unfed.popleft())
        return self._policy.decide(self._gates)

    def happened(self, t: int, k: int, accepted: int) -> None:
        self._unfed.append(Observation(k, self._entropy_bits[t : t + accepted + 1], accepted + 1))

    def finish(self) -> None:
        """The last cycles' results arrive after the request has ended."""
        while self._unfed:
            self._gates[0].observe(self._unfed.popleft())


class RuleChooser:
    """A rule that stops the draft, after at least one token and at most `widest`."""

    def __init__(self, trace: Trace, rule: DraftRule, widest: int) -> None:
        self._entropy_bits = trace.draft_entropy_bits.tolist()
        self._top = trace.draft_top_probability.tolist()
        self._rule = rule
        self._widest = widest

    def choose(self, t: int) -> int:
        for place in range(self._widest):
            if self._rule.stops(self._entropy_bits[t][place], self._top[t][place]):
                return place + 1
        return self._widest

    def happened(self, t: int, k: int, accepted: int) -> None:
        self._rule.verified(k, accepted)


def replay(trace: Trace, policy: Policy, costs: GearCosts, lag: int = LAG) -> Run:
    """One answer under a policy, whose shared state goes on to the next one."""
    chooser = PolicyChooser(trace, policy, lag)
    gears = walk(trace, chooser)
    chooser.finish()
    return price(len(trace) - 1, gears, costs)


def replay_rule(trace: Trace, rule: DraftRule, costs: GearCosts) -> Run:
    """One answer under a rule that stops the draft. Looking at every drafted token is not charged."""
    return price(len(trace) - 1, walk(trace, RuleChooser(trace, rule, max(costs.gears))), costs)


Player = Callable[[Sequence[Trace], GearCosts], list[Run]]
"""Plays answers one after another, in this order, as one server does."""


def plays_policy(build: Callable[[], Policy], lag: int = LAG) -> Player:
    """A new policy for the whole sequence."""

    def play(traces: Sequence[Trace], costs: GearCosts) -> list[Run]:
        policy = build()
        return [replay(trace, policy, costs, lag) for trace in traces]

    return play


def plays_rule(build: Callable[[], DraftRule]) -> Player:
    """A new rule for each answer."""

    def play(traces: Sequence[Trace], costs: GearCosts) -> list[Run]:
        return [replay_rule(trace, build(), costs) for trace in traces]

    return play
