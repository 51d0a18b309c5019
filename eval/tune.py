"""Searches an entropy policy's thresholds on traces: a grid, then Bayesian refinement; cross-validated by prompt.

    python -m sdsie_sglang.eval.tune --cost-table COSTS.json --out SETTINGS.json
    python -m sdsie_sglang.launch_server ... --sdsie-settings SETTINGS.json

Writes SETTINGS.json (what the launcher reads), SETTINGS.report.json and SETTINGS.png, a heat map of the grid. Without
--cost-table it takes those of the H200's gear record, gears 0 and 5. The score is simulated tokens a second over all
prompts; the figure to believe is the cross-validated one: thresholds found on some prompts, played on the others.
"""

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from sdsie_sglang.eval.arguments import count
from sdsie_sglang.eval.bayes import maximise
from sdsie_sglang.eval.headline import this_command, today
from sdsie_sglang.eval.lab import interval
from sdsie_sglang.eval.lab_input import costs_at, need_gears, read_inputs
from sdsie_sglang.eval.simulate import LAG, plays_policy
from sdsie_sglang.eval.trace import TRACES, Trace
from sdsie_sglang.gears import PRESETS, PolicySettings, build_policy
from sdsie_sglang.gears.cost_table import GearCosts

LOW_BITS = (0.0, 0.05, 0.15, 0.3, 0.6, 1.0, 1.5, 2.0, 3.0)
HIGH_BITS = (0.1, 0.3, 0.7, 1.25, 1.8, 2.5, 3.5, 5.0, 8.0)
ALPHAS = (0.35, 0.65, 1.0)
BOUNDS = {"theta_low": (0.0, 4.0), "gap": (0.05, 6.0), "alpha": (0.1, 1.0)}
FOLDS = 9
SEED = 469507


@dataclass(frozen=True)
class Scored:
    """Settings, and each prompt's simulated time in ms."""

    settings: Mapping[str, Any]
    ms: np.ndarray


class Score:
    """Plays settings on all traces; remembers what it has played."""

    def __init__(self, traces: Sequence[Trace], costs: GearCosts, lag: int) -> None:
        self.tokens = np.array([len(trace) - 1 for trace in traces], float)
        self._traces, self._costs, self._lag = traces, costs, lag
        self._known: dict[str, Scored] = {}

    def __call__(self, settings: Mapping[str, Any]) -> Scored:
        key = json.dumps(settings, sort_keys=True)
        if key not in self._known:
            play = plays_policy(lambda: build_policy(PolicySettings(**settings)), self._lag)
            ms = np.array([run.ms for run in play(self._traces, self._costs)])
            self._known[key] = Scored(settings, ms)
        return self._known[key]

    def fixed(self, k: int) -> Scored:
        """Fixed K, which is not among what is searched."""
        play = plays_policy(lambda: build_policy(PolicySettings(policy="fixed", k=k)))
        return Scored({"k": k}, np.array([run.ms for run in play(self._traces, self._costs)]))

    @property
    def all(self) -> list[Scored]:
        """Everything that was played so far."""
        return list(self._known.values())

    def speed(self, scored: Scored, prompts: np.ndarray | slice = slice(None)) -> float:
        """Tokens a second over these prompts."""
        return float(1000.0 * self.tokens[prompts].sum() / scored.ms[prompts].sum())

    def best(self, prompts: np.ndarray | slice = slice(None), among: Sequence[Scored] | None = None) -> Scored:
        return max(self.all if among is None else among, key=lambda scored: self.speed(scored, prompts))


def entropy(k: int, theta_low: float, theta_high: float, alpha: float) -> dict[str, Any]:
    return {
        "policy": "entropy",
        "k": k,
        "theta_low": round(float(theta_low), 4),
        "theta_high": round(float(theta_high), 4),
        "alpha": round(float(alpha), 4),
    }


def grid(ks: Sequence[int]) -> list[dict[str, Any]]:
    """Every point of the grid, and the presets."""
    points = [
        entropy(k, low, high, alpha) for k, alpha, low, high in product(ks, ALPHAS, LOW_BITS, HIGH_BITS) if low < high
    ]
    return points + [entropy(k, **preset) for k in ks for preset in PRESETS.values()]


def refine(score: Score, k: int, steps: int) -> None:
    """Bayesian search around the grid for one K; what it plays is remembered by `score`."""

    def play(point: np.ndarray) -> float:
        low, gap, alpha = point
        return score.speed(score(entropy(k, low, low + gap, alpha)))

    known = [each for each in score.all if each.settings["k"] == k]
    seen = [[s["theta_low"], s["theta_high"] - s["theta_low"], s["alpha"]] for s in (each.settings for each in known)]
    top = np.argsort([-score.speed(each) for each in known])[:40]
    maximise(
        play, np.array(list(BOUNDS.values())), np.array(seen)[top], np.array([score.speed(known[i]) for i in top]),
        steps, np.random.default_rng(SEED),
    )  # fmt: skip


def cross_validated(score: Score, folds: int) -> tuple[np.ndarray, list[Mapping[str, Any]]]:
    """Each prompt's ms under the settings that were best on the prompts of all other folds, and those settings."""
    count = len(score.tokens)
    ms, chosen = np.zeros(count), []
    for held_out in np.array_split(np.random.default_rng(SEED).permutation(count), min(folds, count)):
        best = score.best(np.setdiff1d(np.arange(count), held_out))
        ms[held_out] = best.ms[held_out]
        chosen.append(best.settings)
    return ms, chosen


def draw(score: Score, k: int, fixed_speed: float, subtitle: str, path: Path) -> None:
    """The grid of one K: tokens/s over the best fixed K, one panel an alpha."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(ALPHAS), figsize=(5 * len(ALPHAS), 5.8), sharey=True, layout="constrained")
    for axis, alpha in zip(axes, ALPHAS, strict=True):
        cells = np.full((len(LOW_BITS), len(HIGH_BITS)), np.nan)
        for (i, low), (j, high) in product(enumerate(LOW_BITS), enumerate(HIGH_BITS)):
            if low < high:
                cells[i, j] = score.speed(score(entropy(k, low, high, alpha))) / fixed_speed
                axis.text(j, i, f"{cells[i, j]:.2f}", ha="center", va="center", fontsize=8)
        shown = axis.imshow(cells, origin="lower", cmap="RdYlGn", vmin=0.7, vmax=1.3)
        axis.set_xticks(range(len(HIGH_BITS)), [f"{high:g}" for high in HIGH_BITS])
        axis.set_yticks(range(len(LOW_BITS)), [f"{low:g}" for low in LOW_BITS])
        axis.set(xlabel="disengage above, bits", title=f"alpha {alpha}")
    axes[0].set_ylabel("engage below, bits")
    figure.colorbar(shown, ax=axes, label="tokens/s over the best fixed K", shrink=0.8)
    figure.suptitle(f"Entropy policy, K = {k}, simulated. {subtitle}")
    figure.savefig(path, dpi=90)
    plt.close(figure)


def tune(score: Score, ks: Sequence[int], steps: int, folds: int, on_point: Callable[[], Any]) -> dict[str, Any]:
    """Searches and returns the report."""
    fixed = {k: score.fixed(k) for k in ks}
    best_k = max(fixed, key=lambda k: score.speed(fixed[k]))
    for point in grid(ks):
        score(point)
        on_point()
    for k in ks:
        refine(score, k, steps)
    best = score.best()
    ms, chosen = cross_validated(score, folds)
    reference = fixed[best_k].ms
    low, high = interval(reference, ms)
    return {
        "kind": "simulation",
        "settings": best.settings,
        "tok_per_s": score.speed(best),
        "over_best_fixed": float(reference.sum() / best.ms.sum()),
        "cross_validated_over_best_fixed": float(reference.sum() / ms.sum()),
        "cross_validated_low": low,
        "cross_validated_high": high,
        "best_fixed": f"fixed K={best_k}",
        "best_fixed_tok_per_s": score.speed(fixed[best_k]),
        "chosen_per_fold": chosen,
        "played": len(score.all),
    }


def main() -> None:
    """Search and write."""
    parser = argparse.ArgumentParser(
        prog="python -m sdsie_sglang.eval.tune",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--traces", type=Path, default=TRACES)
    parser.add_argument("--cost-table", "--costs", dest="costs", type=Path)
    parser.add_argument("--batch", type=count, default=1, help="whose costs to take")
    parser.add_argument("--k", type=count, nargs="+", help="gears to try while engaged (default: all of the table)")
    parser.add_argument("--lag", type=int, choices=(1, 2), default=LAG)
    parser.add_argument("--steps", type=int, default=30, help="Bayesian steps for each K")
    parser.add_argument("--folds", type=count, default=FOLDS)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    table, traces = read_inputs(parser, options)
    ks = options.k or [k for k in table.gears if k]
    need_gears(parser, table, [0, *ks])
    score = Score(traces.traces, costs_at(parser, table, options.batch), options.lag)
    with tqdm(total=len(grid(ks)), desc="grid", unit="policy") as progress:
        report = tune(score, ks, options.steps, options.folds, progress.update)
    report |= {
        "costs": f"{table.models}; {table.where}",
        "lag": options.lag,
        "command": this_command(),
        "date": today(),
    }
    options.out.write_text(json.dumps(report["settings"], indent=1) + "\n")
    options.out.with_suffix(".report.json").write_text(json.dumps(report, indent=1) + "\n")
    picture = options.out.with_suffix(".png")
    draw(score, report["settings"]["k"], report["best_fixed_tok_per_s"], report["costs"], picture)
    print(
        f"{report['settings']}: {report['over_best_fixed']:.3f} of {report['best_fixed']} on the prompts it was found "
        f"on, {report['cross_validated_over_best_fixed']:.3f} ({report['cross_validated_low']:.3f} to "
        f"{report['cross_validated_high']:.3f}) cross-validated; {report['played']} policies played"
    )


if __name__ == "__main__":
    main()
