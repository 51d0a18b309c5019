"""Everything that the laboratory compares, by name, as far as a cost table has the gears for it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from sdsie_sglang.eval.oracle import plays_oracle
from sdsie_sglang.eval.simulate import LAG, Player, plays_policy, plays_rule
from sdsie_sglang.gears import PRESETS, Policy, PolicySettings, build_policy
from sdsie_sglang.gears.cost import CostPolicy
from sdsie_sglang.gears.cost_table import CostTable, Objective
from sdsie_sglang.gears.draft_rules import AdaEdl, ConstantConfidence, Svip
from sdsie_sglang.gears.limits import MAX_K
from sdsie_sglang.gears.rivals import SGLANG_SLOTS, AcceptEmaPolicy, GoodputPolicy

Kind = Literal["fixed", "ours", "rival", "oracle"]


@dataclass(frozen=True)
class Contender:
    """One way of choosing gears.

    Args:
        learns: its state outlives a request, so the order of the prompts matters.
        needs: gears that the cost table must have.
    """

    kind: Kind
    play: Player
    learns: bool = False
    needs: tuple[int, ...] = (0,)


def contenders(
    table: CostTable,
    lag: int = LAG,
    objective: Objective = "time",
    tuned: Mapping[str, Any] | None = None,
) -> dict[str, Contender]:
    """All that can be played on this table.

    Args:
        tuned: settings of an entropy policy that `eval.tune` found; shown as "entropy searched".
    """
    found = {name: each for name, each in _all(table, lag, objective, tuned).items() if _priced(each, table)}
    return found


def left_out(table: CostTable) -> list[str]:
    """Names of those that need gears which the table lacks."""
    return [name for name, each in _all(table, LAG, "time", None).items() if not _priced(each, table)]


def _priced(contender: Contender, table: CostTable) -> bool:
    return set(contender.needs) <= set(table.gears)


def _all(table: CostTable, lag: int, objective: Objective, tuned: Mapping[str, Any] | None) -> dict[str, Contender]:
    def policy(build: Callable[[], Policy]) -> Player:
        return plays_policy(build, lag)

    def named(**settings: Any) -> Player:
        return policy(lambda: build_policy(PolicySettings(**settings)))

    every = tuple(range(MAX_K + 1))
    sglang_steps = next(slot.steps for batch, slot in SGLANG_SLOTS.items() if batch == 1)
    found = {"plain": Contender("fixed", named(policy="plain"))}
    for k in range(1, MAX_K + 1):
        found[f"fixed K={k}"] = Contender("fixed", named(policy="fixed", k=k), needs=(k,))
    for preset in PRESETS:
        found[f"entropy {preset}"] = Contender("ours", named(policy="entropy", preset=preset), needs=(0, 5))
    if tuned is not None:
        found["entropy searched"] = Contender("ours", named(**tuned), needs=PolicySettings(**tuned).gears)
    found["cost gate"] = Contender("ours", policy(lambda: CostPolicy(table, objective)), learns=True)
    found["SGLang accept EMA"] = Contender("rival", policy(AcceptEmaPolicy), learns=True, needs=sglang_steps)
    found["TurboSpec goodput"] = Contender("rival", policy(lambda: GoodputPolicy(table)), learns=True)
    for name, rule in (("SVIP", Svip), ("AdaEDL", AdaEdl), ("constant confidence", ConstantConfidence)):
        found[name] = Contender("rival", plays_rule(rule), needs=every)
    found["oracle"] = Contender("oracle", plays_oracle(objective))
    return found
