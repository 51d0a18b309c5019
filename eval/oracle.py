"""The best sequence of gears that could have been chosen, by dynamic programming: the ceiling of every policy."""

from collections.abc import Sequence

from sdsie_sglang.eval.simulate import Player, Run, price
from sdsie_sglang.eval.trace import Trace
from sdsie_sglang.gears.cost_table import GearCosts, Objective


def best_gears(trace: Trace, costs: GearCosts, objective: Objective = "time") -> tuple[int, ...]:
    """Gears of least total cost. A state is a position and whether the cycle before was gear 0.

    least[behind][t] = min over K of cost(K) + (engaging if behind and K) + least[K == 0][t + min(run[t], K) + 1]
    """
    run = trace.run.tolist()
    end = len(run) - 1
    cost, engaging = costs.of(objective)
    least = [[0.0] * (end + 1) for _ in range(2)]
    choice = [[0] * (end + 1) for _ in range(2)]
    for t in range(end - 1, -1, -1):
        after = {k: cost[k] + least[k == 0][min(t + min(run[t], k) + 1, end)] for k in cost}
        for behind in range(2):
            total = {k: after[k] + (engaging[k] if behind else 0.0) for k in cost}
            best = min(total, key=lambda k: (total[k], k))
            least[behind][t], choice[behind][t] = total[best], best
    gears: list[int] = []
    t, behind = 0, 0
    while t < end:
        k = choice[behind][t]
        gears.append(k)
        t, behind = t + min(run[t], k) + 1, int(k == 0)
    return tuple(gears)


def plays_oracle(objective: Objective = "time") -> Player:
    """Knows every answer before it is given."""

    def play(traces: Sequence[Trace], costs: GearCosts) -> list[Run]:
        return [price(len(trace) - 1, best_gears(trace, costs, objective), costs) for trace in traces]

    return play
