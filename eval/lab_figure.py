"""The laboratory's figure: what every contender loses against the oracle, and how it does in each category."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np


def draw(groups: Mapping[str, Any], subtitle: str, path: Path) -> None:
    """Left: regret over all with its interval. Right: tokens/s over the best fixed K in each group.

    Args:
        groups: `groups` of a laboratory record.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = list(groups["all"]["rows"])
    colours = ["#1b9e77" if name.startswith(("cost", "entropy")) else "#7570b3" for name in names]
    rows = [groups["all"]["rows"][name] for name in names]
    regret, low, high = (np.array([100 * row[key] for row in rows]) for key in ("regret", "regret_low", "regret_high"))
    grid = np.array([[groups[g]["rows"][name]["over_best_fixed"] for g in groups] for name in names])

    figure, (left, right) = plt.subplots(
        1, 2, figsize=(15, 1.8 + 0.36 * len(names)), width_ratios=(1, 1.35), sharey=True, layout="constrained"
    )
    at = np.arange(len(names))
    left.barh(at, regret, color=colours, height=0.6)
    left.errorbar(regret, at, xerr=abs(np.array([low, high]) - regret), fmt="none", ecolor="black", capsize=3)
    left.set(yticks=at, yticklabels=names, xlabel="regret: time beyond the oracle's, %, all prompts (95 % interval)")
    left.invert_yaxis()
    shown = right.imshow(grid, cmap="RdYlGn", vmin=0.6, vmax=1.4, aspect="auto")
    right.set_xticks(range(len(groups)), list(groups), rotation=30, ha="right")
    for y, line in enumerate(grid):
        for x, value in enumerate(line):
            right.text(x, y, f"{value:.2f}", ha="center", va="center", fontsize=8)
    right.set_title("tokens/s over that group's own best fixed K", fontsize=10)
    figure.colorbar(shown, ax=right, shrink=0.8)
    figure.suptitle(f"Simulated on traces. {subtitle}", fontsize=11)
    figure.savefig(path, dpi=90)
    plt.close(figure)
