"""Policies: from what the cycles so far have shown to the gear of the next one."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from sdsie_sglang.gears.clutch import Clutch
from sdsie_sglang.gears.cost_table import load_cost_table
from sdsie_sglang.gears.settings import SAVES, PolicySettings
from sdsie_sglang.gears.smoothing import Ema, MovingWindow


@dataclass(frozen=True, slots=True)
class Observation:
    """What one executed cycle showed about one request.

    Args:
        k: draft tokens that were proposed; 0 in gear 0.
        entropy_bits: the target's entropy at each position committed by the cycle, oldest first
            (1 to k + 1 of them); the last is that of the distribution the bonus token came from.
            The last alone where the policy does not fold all.
        committed: tokens committed, the bonus included: 1 to k + 1. None only where nobody counted.
    """

    k: int
    entropy_bits: Sequence[float]
    committed: int | None = None

    @property
    def accepted(self) -> int:
        """Drafted tokens that were accepted, 0 to k."""
        if self.committed is None:
            raise ValueError("this observation does not say how many tokens were committed")
        return self.committed - 1


class RequestGate(Protocol):
    """One request's share of a policy's state. It is born at prefill and dies with the request."""

    def observe(self, seen: Observation) -> None: ...

    @property
    def engaged(self) -> bool: ...

    @property
    def rejected(self) -> int:
        """Entropies that were not usable numbers."""
        ...


class Policy(Protocol):
    """Chooses one K for a whole batch, since SGLang drafts one K for all of its requests."""

    def start_request(self) -> RequestGate: ...

    def decide(self, gates: Sequence[RequestGate]) -> int:
        """The gear of the next cycle: draft tokens to propose, 0 for plain decoding."""
        ...


class AlwaysEngaged:
    """The gate of a policy that does not listen."""

    engaged = True
    rejected = 0

    def observe(self, seen: Observation) -> None:
        pass


class FixedPolicy:
    """The same gear at every cycle."""

    def __init__(self, k: int) -> None:
        self._k = k

    def start_request(self) -> AlwaysEngaged:
        return AlwaysEngaged()

    def decide(self, gates: Sequence[RequestGate]) -> int:
        return self._k


class SchedulePolicy:
    """A written sequence of gears, repeated: for measuring what a switch costs.

    The sequence is counted from the newest request's first cycle, so that a prompt sent twice
    meets the same gears.
    """

    def __init__(self, schedule: Sequence[int]) -> None:
        self._schedule = tuple(schedule)
        self._cycle = 0

    def start_request(self) -> AlwaysEngaged:
        self._cycle = 0
        return AlwaysEngaged()

    def decide(self, gates: Sequence[RequestGate]) -> int:
        k = self._schedule[self._cycle % len(self._schedule)]
        self._cycle += 1
        return k


class EntropyGate:
    """One request's clutch and how a cycle's entropies are folded into it."""

    def __init__(self, settings: PolicySettings) -> None:
        smoother = MovingWindow(settings.window) if settings.smoothing == "window" else Ema(settings.alpha)
        self._clutch = Clutch(settings.theta_low, settings.theta_high, smoother)
        self._fold_all = settings.fold == "all"

    @property
    def engaged(self) -> bool:
        return self._clutch.engaged

    @property
    def rejected(self) -> int:
        return self._clutch.rejected

    def observe(self, seen: Observation) -> None:
        for entropy_bits in seen.entropy_bits if self._fold_all else seen.entropy_bits[-1:]:
            self._clutch.observe(entropy_bits)


class EntropyPolicy:
    """Gear K while at least `engage_share` of the batch's clutches are engaged, else gear 0."""

    def __init__(self, settings: PolicySettings) -> None:
        self._settings = settings

    def start_request(self) -> EntropyGate:
        return EntropyGate(self._settings)

    def decide(self, gates: Sequence[RequestGate]) -> int:
        engaged = sum(gate.engaged for gate in gates)
        return self._settings.k if engaged >= self._settings.engage_share * len(gates) else 0


@runtime_checkable
class Explains(Protocol):
    """A policy that can say why it chose the gear that it chose last."""

    def explain(self) -> dict[str, Any]:
        """JSON-ready. Called now and then, while the policy is not deciding."""
        ...


def build_policy(settings: PolicySettings, prepared: Iterable[int] | None = None) -> Policy:
    """The policy that `settings` names.

    Args:
        prepared: gears that the server can run, for a policy that chooses among many; None: all.
    """
    match settings.policy:
        case "plain":
            return FixedPolicy(0)
        case "fixed":
            return FixedPolicy(settings.k)
        case "schedule":
            return SchedulePolicy(settings.schedule)
        case "entropy":
            return EntropyPolicy(settings)
        case "cost":
            return _cost_policy(settings, prepared)


def _cost_policy(settings: PolicySettings, prepared: Iterable[int] | None) -> Policy:
    from sdsie_sglang.gears.cost import CostPolicy  # it builds on this module

    assert settings.cost_table is not None, "checked by PolicySettings"
    table = load_cost_table(settings.cost_table)
    if prepared is not None:
        table = table.only(prepared)
    return CostPolicy(table, SAVES[settings.objective], explore=settings.explore, seed=settings.seed)
