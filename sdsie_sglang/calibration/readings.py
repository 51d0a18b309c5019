"""The readings of a calibration, and the cost table that follows from them.

A burst is one batch of equal requests, so that all of them need the same cycles. ms a cycle = (time of a long
burst - time of a short one) / (their cycles), in which prefill and whatever else a request costs once cancel.
J a cycle = mean power over a window of such bursts x ms a cycle.
"""

import statistics
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict

from sdsie_sglang.gears.cost_table import Cell, Conditions, CostTable, Engaging


class Burst(BaseModel):
    """One batch of equal requests, in one policy.

    Args:
        gear: K, or None for the switching run.
        cycles: of each request, by gear; switches: of each request.
        wall_s: from sending to the last answer.
    """

    model_config = ConfigDict(frozen=True)

    gear: int | None
    batch: int
    round: int
    tokens: int
    cycles: dict[int, int]
    switches: int
    wall_s: float


class Power(BaseModel):
    """Mean power while one gear ran at one batch size, in W."""

    model_config = ConfigDict(frozen=True)

    gear: int
    batch: int
    watts: float
    window_s: float


class Raw(BaseModel):
    """All readings of a calibration, kept after each burst.

    Args:
        conditions, short, long: what all of them were measured for and with; None before the first.
    """

    conditions: Conditions | None = None
    short: int | None = None
    long: int | None = None
    bursts: list[Burst] = []
    powers: list[Power] = []

    def claim(self, conditions: Conditions, short: int, long: int) -> None:
        """Makes these the readings of one server and one pair of burst lengths. Raises ValueError if they are not."""
        differences = []
        if self.bursts:
            if self.conditions is None:
                differences = ["nobody wrote down what they were measured for"]
            else:
                differences = self.conditions.differences(conditions)
            if (self.short, self.long) != (short, long):
                differences.append(f"bursts of {self.short} and {self.long} tokens, not {short} and {long}")
        if differences:
            raise ValueError(f"holds readings of another calibration: {'; '.join(differences)}")
        self.conditions, self.short, self.long = conditions, short, long

    def measured(self, gear: int | None, batch: int, round_: int) -> bool:
        """Whether both bursts of this round are there."""
        return sum((b.gear, b.batch, b.round) == (gear, batch, round_) for b in self.bursts) >= 2

    def pairs(self, gear: int | None, batch: int) -> list[tuple[Burst, Burst]]:
        """Short and long burst of each round."""
        mine = [b for b in self.bursts if (b.gear, b.batch) == (gear, batch)]
        rounds = sorted({b.round for b in mine})
        both = [sorted((b for b in mine if b.round == r), key=lambda b: b.tokens) for r in rounds]
        return [(of_round[0], of_round[-1]) for of_round in both if len(of_round) >= 2]


def cycle_ms(short: Burst, long: Burst) -> float:
    """Milliseconds of a cycle. Raises ValueError if the long burst needed no more cycles."""
    more = sum(long.cycles.values()) - sum(short.cycles.values())
    if more <= 0:
        raise ValueError(f"{long.tokens} tokens took no more cycles than {short.tokens}: ask for more tokens")
    return 1000.0 * (long.wall_s - short.wall_s) / more


def engaging_ms(short: Burst, long: Burst, ms: dict[int, float]) -> float:
    """What going from gear 0 to K costs beyond the cycles themselves, of a run that starts in K."""
    steady = sum(ms[k] * (long.cycles.get(k, 0) - short.cycles.get(k, 0)) for k in ms)
    engagements = long.switches // 2 - short.switches // 2
    if engagements <= 0:
        raise ValueError("the run never engaged anew: ask for more tokens")
    return (1000.0 * (long.wall_s - short.wall_s) - steady) / engagements


def build_table(raw: Raw, gears: Sequence[int], batches: Sequence[int], **about: Any) -> CostTable:
    """Medians and ranges over the rounds; energies only where every gear has them."""
    watts = {(power.gear, power.batch): power.watts for power in raw.powers}
    known = all((k, batch) in watts for k in gears for batch in batches)
    cells, engaging = [], []
    for batch in batches:
        ms = {}
        for k in gears:
            values = [cycle_ms(*pair) for pair in raw.pairs(k, batch)]
            ms[k] = statistics.median(values)
            joules = watts[k, batch] * ms[k] / 1000.0 if known else None
            cells.append(Cell(k=k, batch=batch, ms=ms[k], ms_low=min(values), ms_high=max(values), joules=joules))
        switching = [engaging_ms(*pair, ms) for pair in raw.pairs(None, batch)]
        if switching:
            engaging.append(Engaging(batch=batch, ms=max(0.0, statistics.median(switching))))
    return CostTable(cells=tuple(cells), engaging=tuple(engaging), **about)
