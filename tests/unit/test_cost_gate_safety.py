"""The cost gate where drafting is hopeless, replayed exactly: what it may lose against plain decoding is bounded."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from sdsie_sglang.eval.simulate import replay
from sdsie_sglang.gears.cost import CostPolicy
from sdsie_sglang.gears.cost_table import Cell, CostTable, Engaging
from tests.unit.test_simulate import trace_of

TOKENS = 4096
LEARNING_CYCLES = 120
"""What a new server may pay, once, to learn that nothing is right: so many cycles of its widest gear."""


def table_of(first_ms, each_ms, gears, engaging_ms):
    """Gear 0 takes 1 ms."""
    cells = [Cell(k=k, batch=1, ms=first_ms + each_ms * k if k else 1.0) for k in sorted({0, *gears})]
    engaging = (Engaging(batch=1, ms=engaging_ms),) if engaging_ms else ()
    return CostTable(models="m", where="w", method="t", cells=tuple(cells), engaging=engaging)


@given(
    first_ms=st.floats(1.02, 2.0),
    each_ms=st.floats(0.0, 0.5),
    gears=st.sets(st.integers(1, 7), min_size=1),
    engaging_ms=st.sampled_from([0.0, 0.5, 3.5, 10.0]),
    tokens=st.sampled_from([32, 100, 512]),
    lag=st.sampled_from([1, 2]),
    widest_bits=st.sampled_from([0.01, 0.5, 4.0]),
    seed=st.integers(0, 99),
)
@settings(max_examples=20, deadline=None)
def test_text_that_cannot_be_drafted_costs_at_most_two_percent_more_than_plain(
    first_ms, each_ms, gears, engaging_ms, tokens, lag, widest_bits, seed
):
    """Nothing drafted is ever right, whatever the entropies suggest, in a server's life of short and long requests. The
    bound holds at every moment of it, so a life that began badly cannot go on so."""
    table = table_of(first_ms, each_ms, gears, engaging_ms)
    policy, costs, rng = CostPolicy(table, seed=seed), table.at(1), np.random.default_rng(seed)
    once_ms = LEARNING_CYCLES * (max(costs.ms.values()) - costs.ms[0]) + 2 * engaging_ms
    ms = plain_ms = 0.0
    while plain_ms < TOKENS:
        trace = trace_of([0] * (tokens + 1), rng.uniform(0.0, widest_bits, tokens + 1))
        ms += replay(trace, policy, costs, lag).ms
        plain_ms += tokens * costs.ms[0]
        assert ms <= 1.02 * plain_ms + once_ms
