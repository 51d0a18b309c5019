"""Fidelity against layers gated, one line a calibration."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def draw(summary: Mapping[str, Sequence[Any]], original: Sequence[Any] | None, subtitle: str, path: Path) -> None:
    """Rows: gates (always, and the first preset that was measured). Columns: token match, KL, top-1 agreement.

    Args:
        summary: `resolution_fidelity.Figures` of each calibration; original: those of the original's way.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.lines import Line2D

    from sdsie_sglang.eval.resolution_fidelity import SAFE_KL_NATS, SAFE_TOP1, line_of

    gates = list(dict.fromkeys(f.setting.gate for found in summary.values() for f in found))
    places = [p for p in dict.fromkeys(f.setting.place for found in summary.values() for f in found) if p != "all"]
    place = "spread" if "spread" in places else places[0] if places else "all"
    columns = (
        ("match", "token match with full precision, %", 100.0),
        ("kl_nats", "KL, nats a token", 1.0),
        ("top1", "same top token, %", 100.0),
    )
    figure, axes = plt.subplots(
        len(gates), 3, figsize=(14, 3.3 * len(gates)), sharex=True, squeeze=False, layout="constrained"
    )
    colours = plt.get_cmap("viridis")
    names = list(summary)
    for row, gate in zip(axes, gates, strict=True):
        for axis, (key, label, scale) in zip(row, columns, strict=True):
            for i, name in enumerate(names):
                line = [f for f in line_of(summary[name], gate, place) if getattr(f, key) is not None]
                at = [f.setting.count for f in line]
                found = [getattr(f, key) for f in line]
                values = [scale * e.value for e in found]
                low = [scale * (e.value - (e.value if e.low is None else e.low)) for e in found]
                high = [scale * ((e.value if e.high is None else e.high) - e.value) for e in found]
                low, high = ([max(0.0, x) for x in side] for side in (low, high))
                colour = colours(i / max(1, len(names) - 1) * 0.9)
                axis.errorbar(at, values, yerr=(low, high), color=colour, marker="o", markersize=4, capsize=2, lw=1.4)
            if key == "match" and original is not None:
                line = line_of(original, gate, "first")
                if line:
                    axis.plot([f.setting.count for f in line], [100 * f.match.value for f in line], "k--x", lw=1)
            if key == "kl_nats":
                axis.set_yscale("log")
                axis.axhline(SAFE_KL_NATS, color="grey", ls=":", lw=1)
            if key == "top1":
                axis.axhline(100 * SAFE_TOP1, color="grey", ls=":", lw=1)
            axis.set_xscale("log", base=2)
            counts = sorted({f.setting.count for found in summary.values() for f in found})
            axis.set_xticks(counts, [str(count) for count in counts])
            axis.set_title(f"gate: {gate}", fontsize=9)
            axis.set_ylabel(label, fontsize=9)
            axis.grid(alpha=0.3)
    for axis in axes[-1]:
        axis.set_xlabel(f"layers gated ({place})")
    handles = [
        Line2D([], [], color=colours(i / max(1, len(names) - 1) * 0.9), marker="o", label=name)
        for i, name in enumerate(names)
    ]
    if original is not None:
        handles.append(
            Line2D([], [], color="black", ls="--", marker="x", label="original's way (first layers, no cache)")
        )
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), fontsize=9)
    figure.suptitle(f"{subtitle}; bars: 95 % over prompts; dotted: what is called safe", fontsize=11)
    figure.savefig(path, dpi=90)
    plt.close(figure)
