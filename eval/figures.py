"""The report's figures, drawn from summaries and records alone."""

import base64
import io
import math
from collections.abc import Sequence
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from sdsie_sglang.eval.compare import MethodSummary, PhaseSummary
from sdsie_sglang.eval.intervals import Estimate
from sdsie_sglang.eval.record import Record
from sdsie_sglang.eval.token_gears import Cycle

# Okabe and Ito's palette, told apart by colour-blind readers too.
COLOURS = {
    "plain": "#666666",
    "draft": "#0072B2",
    "other-draft": "#F0E442",
    "standalone": "#56B4E9",
    "entropy": "#D55E00",
    "eagle3": "#009E73",
    "eagle": "#CC79A7",
    "ngram": "#E69F00",
}
MARKERS = "osD^vP"
WIDTH_IN = 5.6
STYLE: Any = {
    "font.size": 10.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "axes.axisbelow": True,
    "figure.constrained_layout.use": True,
    "svg.hashsalt": "sdsie",
}


def svg_uri(figure: Figure) -> str:
    """As a data URI, so that a page needs no other file."""
    out = io.StringIO()
    figure.savefig(out, format="svg", metadata={"Date": None})
    return "data:image/svg+xml;base64," + base64.b64encode(out.getvalue().encode()).decode()


def _new(height_in: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(WIDTH_IN, height_in))
    return figure, figure.subplots()


def _error(values: Sequence[Estimate], scale: float = 100.0) -> np.ndarray:
    """Distances of the ends, 2 x n, as matplotlib wants them; NaN, which draws nothing, where there is no interval."""
    low = [math.nan if e.low is None else e.value - e.low for e in values]
    high = [math.nan if e.high is None else e.high - e.value for e in values]
    return np.maximum(np.array([low, high]) * scale, 0)


def _markers(methods: Sequence[MethodSummary]) -> dict[str, str]:
    """Colour says the family, shape the configuration within it."""
    seen: dict[str, int] = {}
    found = {}
    for method in methods:
        n = seen[method.family] = seen.get(method.family, -1) + 1
        found[method.method] = MARKERS[n % len(MARKERS)]
    return found


def speed_energy(phase: PhaseSummary) -> Figure | None:
    """Speed against energy per token, both relative to plain decoding; None without energy."""
    methods = [m for m in phase.methods if m.change is not None and m.change.energy is not None]
    if not methods:
        return None
    with mpl.rc_context(STYLE):
        figure, axes = _new(4.4)
        shapes = _markers(methods)
        for m in methods:
            assert m.change is not None
            assert m.change.energy is not None
            axes.errorbar(
                100 * m.change.speed.value, 100 * m.change.energy.value,
                xerr=_error([m.change.speed]), yerr=_error([m.change.energy]),
                fmt=shapes[m.method], color=COLOURS[m.family], ms=7, capsize=3, label=m.method,
            )  # fmt: skip
        axes.axhline(0, color="black", lw=0.8)
        axes.axvline(0, color="black", lw=0.8)
        axes.plot(0, 0, "o", color="black", ms=5)
        axes.set_xlabel("speed against plain, %")
        axes.set_ylabel("energy per output token against plain, %")
        figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=9.5)
    return figure


def forest(phase: PhaseSummary) -> Figure:
    """Speed of each method with its interval, one a line."""
    methods = [m for m in reversed(phase.methods) if m.change is not None]
    with mpl.rc_context(STYLE):
        figure, axes = _new(1.1 + 0.32 * len(methods))
        for i, m in enumerate(methods):
            assert m.change is not None
            axes.errorbar(
                100 * m.change.speed.value,
                i,
                xerr=_error([m.change.speed]),
                fmt="o",
                color=COLOURS[m.family],
                capsize=3,
            )
        axes.axvline(0, color="black", lw=0.8)
        axes.set_yticks(range(len(methods)), [m.method for m in methods])
        axes.set_ylim(-0.6, len(methods) - 0.4)
        axes.set_xlabel("speed against plain, %, with 95 % interval")
    return figure


def categories(phase: PhaseSummary) -> Figure | None:
    """Speed by category, one row of bars a category."""
    methods = [m for m in phase.methods if m.categories]
    if not methods:
        return None
    names = list(methods[0].categories)
    thick = 0.8 / len(methods)
    with mpl.rc_context(STYLE):
        figure, axes = _new(1.2 + len(names) * (0.16 + 0.16 * len(methods)))
        shades: dict[str, int] = {}
        for i, m in enumerate(methods):
            nth = shades[m.family] = shades.get(m.family, -1) + 1
            values = [m.categories[name].speed for name in names]
            axes.barh(
                np.arange(len(names)) + i * thick, [100 * v.value for v in values], thick * 0.9,
                xerr=_error(values), color=COLOURS[m.family], alpha=1 - 0.3 * nth, label=m.method,
                error_kw={"lw": 0.8, "capsize": 1.5},
            )  # fmt: skip
        axes.set_yticks(np.arange(len(names)) + 0.4 - thick / 2, names)
        axes.set_ylim(len(names) - 0.1 - thick / 2, -0.1 - thick / 2)
        axes.axvline(0, color="black", lw=0.8)
        axes.set_xlabel("speed against plain, %")
        figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=9.5)
    return figure


def positions(phase: PhaseSummary) -> Figure | None:
    """How often the n-th drafted token is accepted."""
    methods = [m for m in phase.methods if m.position]
    if not methods:
        return None
    with mpl.rc_context(STYLE):
        figure, axes = _new(3.6)
        shapes = _markers(methods)
        for m in methods:
            axes.plot(
                range(1, len(m.position) + 1), [100 * p for p in m.position], marker=shapes[m.method],
                color=COLOURS[m.family], label=f"{m.method} ({m.accept_length or 0:.2f})", lw=1.4, ms=5,
            )  # fmt: skip
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_ylim(0, 102)
        axes.set_xlabel("place of the drafted token")
        axes.set_ylabel("cycles that accepted it, %")
        figure.legend(
            loc="outside lower center", ncols=2, frameon=False, fontsize=9.5, title="accept length in brackets"
        )
    return figure


def power(records: Sequence[Record]) -> Figure | None:
    """Power over each server's life, timed windows shaded; temperature beside it."""
    shown = [r for r in records if r.readings is not None and r.readings.power_w]
    if not shown:
        return None
    with mpl.rc_context({**STYLE, "font.size": 9.5}):
        figure = Figure(figsize=(WIDTH_IN, 0.6 + 1.35 * len(shown)))
        rows = figure.subplots(len(shown), 1, sharex=True, squeeze=False)[:, 0]
        for axes, record in zip(rows, shown, strict=True):
            assert record.readings is not None
            last = (record.readings.end_s, record.readings.power_w[-1][1])
            t_s, watts = np.array([*record.readings.power_w, last]).T
            axes.step(t_s, watts, where="post", color="#444444", lw=0.7)
            for stretch in record.phases:
                axes.axvspan(stretch.start_s, stretch.end_s, color=COLOURS["draft"], alpha=0.18, lw=0)
            if record.idle is not None:
                axes.axvspan(record.idle.start_s, record.idle.end_s, color="#999999", alpha=0.2, lw=0)
            hot = axes.twinx()
            hot.plot(
                [r.t_s for r in record.readings.slow], [r.temperature_c for r in record.readings.slow],
                color=COLOURS["entropy"], lw=1,
            )  # fmt: skip
            hot.spines["top"].set_visible(False)
            hot.grid(False)
            hot.yaxis.set_major_locator(MaxNLocator(3, integer=True))
            hot.set_ylabel("°C", color=COLOURS["entropy"])
            role = "" if record.datapoint.role == "method" else f" ({record.datapoint.role})"
            axes.set_title(f"{record.datapoint.method}{role}", loc="left", fontsize=9.5)
            axes.set_ylabel("W")
            axes.set_ylim(bottom=0)
        rows[-1].set_xlabel("seconds; timed windows blue, idle grey")
    return figure


def gears(cycles: Sequence[Cycle], thresholds: tuple[float, float] | None) -> Figure:
    """The target's entropy after each cycle of one answer; cycles that drafted are shaded."""
    with mpl.rc_context(STYLE):
        figure, axes = _new(2.6)
        edges = [cycles[0].first, *(c.last for c in cycles)]
        axes.stairs([c.entropy_bits for c in cycles], edges, color="#222222", lw=1.2, baseline=None)
        for c in cycles:
            if c.gear:
                axes.axvspan(c.first, c.last, color=COLOURS["draft"], alpha=0.2, lw=0)
        for value in thresholds or ():
            axes.axhline(value, color=COLOURS["entropy"], lw=0.9, ls="--")
        axes.set_xlim(edges[0], edges[-1])
        axes.set_ylim(bottom=0)
        axes.set_xlabel("token of the answer; shaded: drafted, dashed: thresholds")
        axes.set_ylabel("entropy, bits")
    return figure
