"""Fidelity against layers gated, one line a calibration: by gate, and by where the layers are."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

COLOURS = {
    "channel": ("black", "s"),
    "g128": ("#9ecae1", "o"),
    "g64": ("#4292c6", "o"),
    "g32": ("#084594", "o"),
    "mse": ("#41ab5d", "^"),
    "awq": ("#e6550d", "D"),
}
APART = 0.11
"""Between neighbouring calibrations at one count, in powers of two, so that intervals do not cover each other."""


def draw(summary: Mapping[str, Sequence[Any]], original: Sequence[Any] | None, subtitle: str, path: Path) -> None:
    """Rows: gates, then one for places (INT4 always). Columns: token match, KL, how often another token is on top.

    Args:
        summary: `resolution_report.Figures` of each calibration; original: those of the original's way.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.lines import Line2D

    from sdsie_sglang.eval.resolution_record import SAFE_KL_NATS, SAFE_TOP1

    everything = [f for found in summary.values() for f in found]
    gates = list(dict.fromkeys(f.setting.gate for f in everything))
    places = [p for p in dict.fromkeys(f.setting.place for f in everything) if p != "all"]
    place = "spread" if "spread" in places else places[0] if places else "all"
    others = [p for p in ("first", "middle", "last") if p in places] if "always" in gates else []
    counts = sorted({f.setting.count for f in everything})
    columns = (
        ("match", "token match with full precision, %", lambda x: 100 * x, None),
        ("kl_nats", "KL, nats a token", lambda x: x, SAFE_KL_NATS),
        ("top1", "another token on top, %", lambda x: 100 * (1 - x), 100 * (1 - SAFE_TOP1)),
    )
    rows = len(gates) + bool(others)
    figure, axes = plt.subplots(rows, 3, figsize=(15, 3.5 * rows), squeeze=False, layout="constrained")

    def panel(axis: Any, gate: str, at_place: str, column: Any, title: str) -> None:
        key, label, shown, safe = column
        for i, (name, found) in enumerate(summary.items()):
            points(axis, found, gate, at_place, key, shown, name, (i - (len(summary) - 1) / 2) * APART)
        if key == "match" and original is not None and at_place == place:
            points(axis, original, gate, "first", key, shown, None, 0.0)
        if safe is not None:
            axis.axhspan(0, safe, color="green", alpha=0.07, lw=0)
            axis.axhline(safe, color="green", ls=":", lw=1)
            axis.set_yscale("log")
        axis.set_xscale("log", base=2)
        axis.set_xticks(counts, [str(count) for count in counts])
        axis.minorticks_off()
        axis.set_title(title, fontsize=10)
        axis.set_ylabel(label, fontsize=9)
        axis.grid(alpha=0.3)

    for row, gate in zip(axes, gates, strict=False):
        for axis, column in zip(row, columns, strict=True):
            panel(axis, gate, place, column, f"gate {gate}, layers {place}")
    for k, column in enumerate(columns):
        share_scale([row[k] for row in axes[: len(gates)]], column[3])
    if others:
        for axis, at_place in zip(axes[-1], others, strict=False):
            panel(axis, "always", at_place, columns[1], f"gate always, layers {at_place}")
        for axis in axes[-1][len(others) :]:
            axis.set_visible(False)
        share_scale(axes[-1][: len(others)], SAFE_KL_NATS)
    for axis in axes[-1]:
        axis.set_xlabel("layers gated")
    handles = [
        Line2D([], [], color=colour, marker=marker, markersize=5, label=name)
        for name, (colour, marker) in COLOURS.items()
        if name in summary
    ]
    if original is not None:
        handles.append(
            Line2D([], [], color="crimson", ls="--", marker="x", label="the original's way (first layers, no cache)")
        )
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), fontsize=10)
    figure.suptitle(f"{subtitle}; bars: 95 % over prompts; green: within what is called safe", fontsize=12)
    figure.savefig(path, dpi=90)
    plt.close(figure)


def points(
    axis: Any, found: Sequence[Any], gate: str, place: str, key: str, shown: Any, name: str | None, beside: float
) -> None:
    """One line with its intervals, moved `beside` by so many powers of two; no name: the original's."""
    from sdsie_sglang.eval.resolution_report import line_of, lower, upper

    line = [f for f in line_of(found, gate, place) if getattr(f, key) is not None]
    if not line:
        return
    ends = [[shown(getattr(f, key).value), *(shown(end(getattr(f, key))) for end in (lower, upper))] for f in line]
    values = [value for value, *_ in ends]
    low, high = ([abs(x) for x in side] for side in zip(*((v - min(e), max(e) - v) for v, *e in ends), strict=True))
    at = [f.setting.count * 2**beside for f in line]
    colour, marker = COLOURS.get(name, ("grey", "o")) if name else ("crimson", "x")
    axis.errorbar(
        at, values, yerr=(low, high), color=colour, marker=marker, markersize=4, capsize=2, lw=1.3, elinewidth=0.9,
        ls="-" if name else "--",
    )  # fmt: skip


def share_scale(axes: Sequence[Any], safe: float | None) -> None:
    """The same y scale for panels of one kind; what is called safe is on it."""
    limits = [axis.get_ylim() for axis in axes]
    low, high = min(low for low, _ in limits), max(high for _, high in limits)
    for axis in axes:
        axis.set_ylim(low if safe is None else min(low, safe / 2), high)
