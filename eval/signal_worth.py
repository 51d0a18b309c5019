"""What is a signal worth? The best gear for each value of a signal, found with hindsight on the same answers.

    python -m sdsie_sglang.eval.signal_worth --cost-table COSTS.json

A policy that knows only the signal cannot do better than the table found here for it (up to what coordinate ascent
misses), so its gain over the best fixed K is the most that any gate on that signal can bring. The held-out figure,
tables found on some prompts and played on the others, is what one may expect. ``draft`` is not known when a cycle
begins: a rule reads the draft's own probabilities after each token, free of charge, and stops the chain where their
product falls below the best limit. Simulated; written to NAME.json.
"""

import argparse
import json
from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from tqdm import tqdm

from sdsie_sglang.eval.arguments import count
from sdsie_sglang.eval.headline import this_command, today
from sdsie_sglang.eval.lab import SEED, interval
from sdsie_sglang.eval.lab_input import costs_at, need_gears, read_inputs
from sdsie_sglang.eval.simulate import LAG, replay, replay_rule
from sdsie_sglang.eval.trace import TRACES, Trace
from sdsie_sglang.gears import Observation, RequestGate
from sdsie_sglang.gears.cost_table import GearCosts
from sdsie_sglang.gears.draft_rules import CumulativeConfidence
from sdsie_sglang.gears.limits import MAX_K

EDGES_BITS = (0.1, 0.4, 1.0, 2.0)
LIMITS = (0.0, *np.arange(0.02, 0.62, 0.02).round(2).tolist(), 1.0)
SWEEPS = 2
FOLDS = 9


def by_entropy(seen: Observation) -> int:
    """The target's entropy at the last committed position: five bins."""
    return bisect_right(EDGES_BITS, seen.entropy_bits[-1])


def by_accepted(seen: Observation) -> int:
    """Drafted tokens accepted by the last known cycle; after gear 0, none were."""
    return min(seen.accepted, 4)


def by_both(seen: Observation) -> int:
    return 5 * by_entropy(seen) + by_accepted(seen)


SIGNALS: dict[str, tuple[Callable[[Observation], int], int]] = {
    "entropy": (by_entropy, 5),
    "accepted": (by_accepted, 5),
    "both": (by_both, 25),
}


DRAFT = "draft"


class SignalGate:
    """Remembers the last known value of the signal."""

    engaged = True
    rejected = 0

    def __init__(self, signal: Callable[[Observation], int]) -> None:
        self.value: int | None = None
        self._signal = signal

    def observe(self, seen: Observation) -> None:
        self.value = self._signal(seen)


class SignalPolicy:
    """A gear for each value; `start` where nothing is known yet."""

    def __init__(self, signal: Callable[[Observation], int], gears: Sequence[int], start: int) -> None:
        self._signal, self._gears, self._start = signal, gears, start

    def start_request(self) -> SignalGate:
        return SignalGate(self._signal)

    def decide(self, gates: Sequence[RequestGate]) -> int:
        gate = gates[0]
        assert isinstance(gate, SignalGate)
        return self._start if gate.value is None else self._gears[gate.value]


class Search(Protocol):
    """Ways to use a signal, played on all traces."""

    def fixed_ms(self, k: int) -> np.ndarray: ...

    def ms(self, way: Any, fixed: int) -> np.ndarray:
        """Simulated time of each answer."""
        ...

    def best(self, prompts: np.ndarray) -> tuple[Any, int]:
        """The way with the least time on these prompts, and the best fixed K on them."""
        ...


class DraftSearch:
    """Limits of `CumulativeConfidence`, which never stop the chain (0) to after the first token (1)."""

    def __init__(self, traces: Sequence[Trace], costs: GearCosts) -> None:
        self._traces, self._costs = traces, costs

    @cache  # noqa: B019 one search a command
    def fixed_ms(self, k: int) -> np.ndarray:
        policy = SignalPolicy(by_entropy, (k,) * 5, k)
        return np.array([replay(trace, policy, self._costs).ms for trace in self._traces])

    @cache  # noqa: B019
    def ms(self, way: float, fixed: int) -> np.ndarray:
        del fixed  # a chain begins anew in each cycle
        return np.array([replay_rule(trace, CumulativeConfidence(way), self._costs).ms for trace in self._traces])

    def best(self, prompts: np.ndarray) -> tuple[float, int]:
        fixed = min(self._costs.gears, key=lambda k: self.fixed_ms(k)[prompts].sum())
        return min(LIMITS, key=lambda limit: self.ms(limit, fixed)[prompts].sum()), fixed


class TableSearch:
    """Plays tables of one signal on all traces; remembers what it has played."""

    def __init__(self, traces: Sequence[Trace], costs: GearCosts, signal: str, lag: int) -> None:
        self._traces, self._costs, self._lag = traces, costs, lag
        self._signal, self.values = SIGNALS[signal]
        self._known: dict[tuple[int, ...], np.ndarray] = {}

    def fixed_ms(self, k: int) -> np.ndarray:
        return self.ms((k,) * self.values, k)

    def ms(self, gears: tuple[int, ...], start: int) -> np.ndarray:
        if (start, *gears) not in self._known:
            policy = SignalPolicy(self._signal, gears, start)
            self._known[start, *gears] = np.array(
                [replay(trace, policy, self._costs, self._lag).ms for trace in self._traces]
            )
        return self._known[start, *gears]

    def best(self, prompts: np.ndarray) -> tuple[tuple[int, ...], int]:
        """The table with the least time on these prompts, by coordinate ascent from the best fixed K, and that K."""
        fixed = min(self._costs.gears, key=lambda k: self.fixed_ms(k)[prompts].sum())
        table = (fixed,) * self.values
        for _ in range(SWEEPS):
            for value in range(self.values):
                offered = [(*table[:value], k, *table[value + 1 :]) for k in self._costs.gears]
                table = min(offered, key=lambda each: self.ms(each, fixed)[prompts].sum())
        return table, fixed


def worth(search: Search, answers: int, folds: int = FOLDS) -> dict[str, Any]:
    """Gain over the best fixed K, with hindsight and held out."""
    everyone = np.arange(answers)
    way, fixed = search.best(everyone)
    reference = search.fixed_ms(fixed)
    held_out = np.zeros(answers)
    for fold in np.array_split(np.random.default_rng(SEED).permutation(answers), min(folds, answers)):
        found, start = search.best(np.setdiff1d(everyone, fold))
        held_out[fold] = search.ms(found, start)[fold]
    low, high = interval(reference, held_out)
    return {
        "limit" if isinstance(way, float) else "gears": way,
        "best_fixed": fixed,
        "with_hindsight": float(reference.sum() / search.ms(way, fixed).sum()),
        "held_out": float(reference.sum() / held_out.sum()),
        "held_out_low": low,
        "held_out_high": high,
    }


def main() -> None:
    """Search, print, write."""
    parser = argparse.ArgumentParser(
        prog="python -m sdsie_sglang.eval.signal_worth",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--traces", type=Path, default=TRACES)
    parser.add_argument("--cost-table", "--costs", dest="costs", type=Path)
    parser.add_argument("--batch", type=count, default=1, help="whose costs to take")
    parser.add_argument("--signals", nargs="+", choices=sorted((*SIGNALS, DRAFT)), default=["entropy", "accepted"])
    parser.add_argument("--folds", type=count, default=FOLDS)
    parser.add_argument("--out", type=Path, default=TRACES.with_name("signal-h200-gears.json"))
    options = parser.parse_args()
    table, read = read_inputs(parser, options)
    costs, traces = costs_at(parser, table, options.batch), read.traces
    searches: dict[str, Search] = {
        f"{signal}, lag {lag}": TableSearch(traces, costs, signal, lag)
        for lag in (1, 2)
        for signal in options.signals
        if signal != DRAFT
    }
    if DRAFT in options.signals:
        need_gears(parser, table, range(1, MAX_K + 1))
        searches[DRAFT] = DraftSearch(traces, costs)
    rows: dict[str, Any] = {}
    for name, search in tqdm(searches.items()):
        rows[name] = row = worth(search, len(traces), options.folds)
        tqdm.write(
            f"{name}: {row['with_hindsight']:.3f} of fixed K={row['best_fixed']} with hindsight, "
            f"{row['held_out']:.3f} ({row['held_out_low']:.3f} to {row['held_out_high']:.3f}) held out"
        )
    record = {
        "kind": "simulation",
        "rows": rows,
        "entropy_edges_bits": EDGES_BITS,
        "default_lag": LAG,
        "costs": f"{table.models}; {table.where}",
        "command": this_command(),
        "date": today(),
    }
    options.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
