"""What the record of the Resolution Gear's study says: the sentence, the tables, the page. Measures nothing."""

from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel

from sdsie_sglang.eval import machine
from sdsie_sglang.eval.intervals import Estimate, estimate
from sdsie_sglang.eval.resolution_record import (
    ORIGINAL,
    ORIGINAL_MATCH,
    REFERENCE,
    SAFE_KL_NATS,
    SAFE_TOP1,
    Part,
    Row,
    Setting,
)
from sdsie_sglang.int4.resolution import PLACES


def mean(values: Sequence[float]) -> Estimate:
    """Mean over prompts with its interval."""
    data = np.array(values, dtype=np.float64)
    return estimate(lambda p, r: data[p].mean(-1), len(data), 1, seed=0)


def perplexity(nll: Sequence[float]) -> Estimate:
    """exp of the mean over prompts."""
    data = np.array(nll, dtype=np.float64)
    return estimate(lambda p, r: np.exp(data[p].mean(-1)), len(data), 1, seed=0)


def layers_within(rows: Sequence[Row], limit: float = SAFE_KL_NATS) -> Estimate:
    """How many layers KL stays within `limit` nats for, of rows that differ in their count alone.

    Between two counts that were measured KL is taken as a power of the count. Below the first count it is 0, and
    the last count if all keep within. The interval is over prompts.
    """
    ordered = sorted(rows, key=lambda row: row.setting.count)
    counts = np.log([row.setting.count for row in ordered])
    data = np.array([row.kl_nats for row in ordered], dtype=np.float64)  # [counts, prompts]

    def crossing(p: NDArray[np.intp], r: NDArray[np.intp]) -> NDArray[np.float64]:
        kl = data[:, p].mean(-1)  # [counts, …]
        above = kl > limit
        first = np.where(above.any(0), above.argmax(0), len(counts) - 1)
        before = np.maximum(first - 1, 0)
        low, high = (np.take_along_axis(kl, i[None], 0)[0] for i in (before, first))
        with np.errstate(divide="ignore", invalid="ignore"):
            share = np.log(limit / low) / np.log(high / low)
            between = np.exp(counts[before] + share * (counts[first] - counts[before]))
        inside = np.where(first == 0, 0.0, between)
        return np.where(above.any(0), inside, np.exp(counts[-1]))

    return estimate(crossing, data.shape[1], 1, seed=0)


def relative_kl(over: Row, under: Row) -> Estimate:
    """KL of one setting over that of another, both means over the same prompts; the interval is paired."""
    a, b = (np.array(row.kl_nats, dtype=np.float64) for row in (over, under))
    return estimate(lambda p, r: a[p].mean(-1) / b[p].mean(-1), len(a), 1, seed=0)


class Figures(BaseModel):
    """One setting's figures over the prompts. `reference` is the match of poem, physics and code."""

    setting: Setting
    match: Estimate
    reference: list[float]
    identical: float
    first: float | None
    int4_share: float
    kl_nats: Estimate | None
    top1: Estimate | None
    perplexity: Estimate | None

    @property
    def is_safe(self) -> bool:
        """By what each token's distribution says, at the worse end of the interval."""
        if self.kl_nats is None or self.top1 is None:
            return False
        return upper(self.kl_nats) <= SAFE_KL_NATS and lower(self.top1) >= SAFE_TOP1


def upper(found: Estimate) -> float:
    return found.value if found.high is None else found.high


def lower(found: Estimate) -> float:
    return found.value if found.low is None else found.low


def figures(part: Part) -> list[Figures]:
    found = []
    for row in part.rows:
        parted = [first for first in row.first if first >= 0]
        found.append(
            Figures(
                setting=row.setting,
                match=mean(row.match),
                reference=[m for m, name in zip(row.match, part.prompts, strict=True) if name.startswith(REFERENCE)],
                identical=1 - len(parted) / len(row.first),
                first=float(np.median(parted)) if parted else None,
                int4_share=float(np.mean(row.int4_share)),
                kl_nats=None if row.kl_nats is None else mean(row.kl_nats),
                top1=None if row.top1 is None else mean(row.top1),
                perplexity=None if row.nll is None else perplexity(row.nll),
            )
        )
    return found


Summary = dict[str, list[Figures]]


def line_of(found: Sequence[Figures], gate: str, place: str) -> list[Figures]:
    """One gate's settings by count; all layers belong to every place."""
    chosen = [f for f in found if f.setting.gate == gate and f.setting.place in (place, "all")]
    return sorted(chosen, key=lambda f: f.setting.count)


def safe_layers(found: Sequence[Figures], gate: str) -> int:
    """The largest count up to which every count is safe at every place; 0: none."""
    safe = 0
    for count in sorted({f.setting.count for f in found}):
        if not all(f.is_safe for f in found if f.setting.gate == gate and f.setting.count == count):
            break
        safe = count
    return safe


def layer_words(names: Sequence[str], counts: Mapping[str, int]) -> str:
    """`30 with g64, 8 with g32 and awq`, by falling count."""
    by_count: dict[int, list[str]] = {}
    for name in names:
        by_count.setdefault(counts[name], []).append(name)
    said = []
    for count in sorted(by_count, reverse=True):
        *most, last = by_count[count]
        said.append(f"{count} with {', '.join(most)} and {last}" if most else f"{count} with {last}")
    return ", ".join(said)


def open_question(summary: Summary, layers: int) -> str:
    """The sentence that answers whether better calibration widens the safe range, from the figures alone."""
    gates = list(dict.fromkeys(f.setting.gate for found in summary.values() for f in found))
    base = ORIGINAL["calibration"]
    if base not in summary or len(summary) < 2:
        return f"Whether finer calibration widens the safe range needs {base} and another calibration."
    widened, same = [], []
    for gate in gates:
        safe = {name: safe_layers(found, gate) for name, found in summary.items()}
        finer = {name: count for name, count in safe.items() if name != base}
        if max(finer.values()) > safe[base]:
            widened.append(
                f"`{gate}` from {safe[base]} of {layers} layers with {base} to {layer_words(list(finer), safe)}"
            )
        else:
            most = (
                f"at most {max(finer.values())} of {layers} layers are safe" if max(finer.values()) else "none is safe"
            )
            same.append(f"`{gate}`, where {most} with any calibration")
    if not widened:
        return f"No calibration tried widens the safe range: {'; '.join(same)}."
    yes = f"Better calibration widens the safe range under gate {'; '.join(widened)}"
    return yes + (f"; it does not under gate {'; '.join(same)}." if same else ".")


def cliff(original: Sequence[Figures]) -> str:
    """Token match in the original's own way, against what it published."""
    line = line_of(original, ORIGINAL["gate"], ORIGINAL["place"])
    said = ", ".join(f"{shown(f.match, 0, 100)} % at {f.setting.count}" for f in line)
    published = ", ".join(f"{100 * np.mean(match):.0f} % at {n}" for n, match in ORIGINAL_MATCH.items())
    same = ", ".join(f"{100 * np.mean(f.reference):.0f} % at {f.setting.count}" for f in line)
    text = (
        f"In the original's own way (channel min-max, `{ORIGINAL['gate']}` gate, first layers, no cache) token match "
        f"is {said} gated layers. Its own three prompts gave it {published} of an 8B model's 32, and give {same} here."
    )
    steps = [(a.match.value - b.match.value, a.setting.count, b.setting.count) for a, b in pairwise(line)]
    if steps:
        drop, before, after = max(steps)
        text += f" The largest step here is {100 * drop:.0f} points, from {before} to {after} layers."
    return text


def what_kl_says(found: Sequence[Figures], layers: int) -> str:
    """The original's calibration and gate, token by token; and all layers all the time."""
    line = [f for f in line_of(found, ORIGINAL["gate"], ORIGINAL["place"]) if f.kl_nats]
    text = []
    if line:
        values = ", ".join(f"{f.kl_nats.value:.4f} at {f.setting.count}" for f in line if f.kl_nats)
        text.append(f"Token by token the same settings (in the server's way, with a cache) are {values} nats apart.")
    at = next((f for f in found if f.setting.place == "all" and f.setting.gate == "always"), None)
    if at is not None and at.kl_nats and at.top1:
        text.append(
            f"With INT4 always in all {layers} layers match is {shown(at.match, 0, 100)} %, yet KL is "
            f"{shown(at.kl_nats, 4)} nats and the same token is on top {shown(at.top1, 1, 100)} % of the time: match "
            "counts what follows a different token as lost."
        )
    return " ".join(text)


def where_it_hurts(summary: Summary, layers: int) -> str:
    """Which place costs most: one layer there, INT4 always, against all layers."""
    parts = []
    for name, found in summary.items():
        ones = [f for f in found if f.setting.gate == "always" and f.setting.count == 1 and f.kl_nats]
        whole = next((f for f in found if f.setting.gate == "always" and f.setting.place == "all" and f.kl_nats), None)
        if len(ones) < 2 or whole is None:
            continue
        worst = max(ones, key=lambda f: f.kl_nats.value if f.kl_nats else 0.0)
        others = max(f.kl_nats.value for f in ones if f.kl_nats and f is not worst)
        assert worst.kl_nats
        assert whole.kl_nats
        parts.append(
            f"{name} {worst.kl_nats.value:.4f} for the {worst.setting.place} layer, at most {others:.4f} for one "
            f"elsewhere, {whole.kl_nats.value:.4f} for all {layers}"
        )
    return f"Which layer matters more than how many (KL in nats, INT4 always): {'; '.join(parts)}." if parts else ""


def answer(summary: Summary, original: Sequence[Figures] | None, layers: int) -> str:
    """What the study says, from the figures alone: the sentence first, then what it stands on."""
    parts = [
        f"**{open_question(summary, layers)}**",
        f"Safe is a number of layers up to which, at every place, KL is at most {SAFE_KL_NATS} nats and the same token "
        f"is on top at least {100 * SAFE_TOP1:.0f} % of the time, at the worse end of the 95 % interval; neighbouring "
        "counts of it often differ by less than the intervals do.",
    ]
    if original:
        parts.append(cliff(original))
    if ORIGINAL["calibration"] in summary:
        parts.append(what_kl_says(summary[ORIGINAL["calibration"]], layers))
    parts.append(where_it_hurts(summary, layers))
    return "\n\n".join(part for part in parts if part)


def rows_at(part: Part, gate: str, place: str) -> list[Row]:
    """One gate's rows at a place, all layers among them, that were read token by token."""
    chosen = (row for row in part.rows if row.setting.gate == gate and row.setting.place in (place, "all"))
    return [row for row in chosen if row.kl_nats is not None]


def overview(parts: Sequence[Part], summary: Summary) -> str:
    """One row a calibration: the safe range under each gate, and KL itself."""
    measured = [part for part in parts if not part.recomputing]
    gates = list(dict.fromkeys(row.setting.gate for part in measured for row in part.rows))
    places = [p for p in PLACES if any(row.setting.place == p for part in measured for row in part.rows)]
    base = next((part for part in measured if part.calibration == ORIGINAL["calibration"]), None)
    gate = "always" if "always" in gates else gates[0]
    head = ["calibration", *(f"safe, `{name}`" for name in gates)]
    head += [f"KL within {SAFE_KL_NATS}, {place}" for place in places]
    head += [f"KL of all layers over {base.calibration}'s" if base else "", "match of all layers, %"]
    head = [name for name in head if name]
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for part in measured:
        found = summary[part.calibration]
        cells = [f"`{part.calibration}`", *(str(safe_layers(found, name)) for name in gates)]
        for place in places:
            rows = rows_at(part, gate, place)
            cells.append(shown(layers_within(rows), 1) if rows else "–")
        whole = [next((row for row in rows_at(p, gate, "all")), None) for p in (part, base) if p is not None]
        if base is not None:
            over, under = whole
            cells.append(shown(relative_kl(over, under), 2) if over and under and part is not base else "1")
        cells.append(shown(next(f.match for f in found if f.setting.gate == gate and f.setting.place == "all"), 1, 100))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + (
        f"\n\nSafe: number of layers, under each gate. The other columns are of INT4 under gate `{gate}`: layers for "
        f"which KL stays within {SAFE_KL_NATS} nats by place, interpolated between the counts measured (0: not even "
        "one); KL of all layers as a share of the original's calibration, paired by prompt; token match of all layers. "
        "In parentheses 95 % intervals over prompts."
    )


def shown(found: Estimate | None, digits: int, scale: float = 1.0) -> str:
    if found is None:
        return "–"
    text = f"{scale * found.value:.{digits}f}"
    if found.low is None or found.high is None:
        return text
    return f"{text} ({scale * found.low:.{digits}f} to {scale * found.high:.{digits}f})"


def table(found: Sequence[Figures]) -> str:
    head = ["gate", "layers", "match, %", "poem / physics / code", "identical", "first different", "INT4 steps"]
    head += ["KL, nats", "same top token, %", "perplexity"]
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for f in found:
        cells = [
            f"`{f.setting.gate}`",
            f"{f.setting.count}, {f.setting.place}" if f.setting.place != "all" else f"all {f.setting.count}",
            shown(f.match, 1, 100),
            " / ".join(f"{100 * match:.1f}" for match in f.reference),
            f"{100 * f.identical:.0f} %",
            "–" if f.first is None else f"{f.first:.0f}",
            f"{100 * f.int4_share:.0f} %",
            shown(f.kl_nats, 4),
            shown(f.top1, 1, 100),
            shown(f.perplexity, 3),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def page(parts: Sequence[Part]) -> tuple[str, Summary, list[Figures] | None]:
    """The page, and the figures on it."""
    summary = {part.calibration: figures(part) for part in parts if not part.recomputing}
    original = next((figures(part) for part in parts if part.recomputing), None)
    some = parts[0]
    control = next((part.control_nll for part in parts if part.control_nll), None)
    text = [
        f"# The Resolution Gear's fidelity: SmolLM2-135M, {some.layers} layers, `mlp.down_proj`",
        f"Written by `{some.command}` on {some.date}, {machine.where(some.machine)}, {some.dtype}, greedy, up to "
        f"{some.new_tokens} tokens, {len(some.prompts)} prompts, decisions {some.lag} cycles late as in the server; "
        "raw figures beside this page. In parentheses 95 % intervals over prompts."
        + (f" Perplexity of the control's own answers: {perplexity(control).value:.3f}." if control else ""),
        "## What it says",
        answer(summary, original, some.layers),
        "## By calibration",
        overview(parts, summary),
        "![fidelity against layers](fidelity.png)",
        "Rows 1 to 4: layers spread over the model, one row a gate, all on the same scales. Last row: INT4 always, by "
        "where the layers are. Points of one count are set side by side so that their intervals can be told apart.",
        "## Every setting",
    ]
    for name, found in summary.items():
        text += [f"<details><summary><code>{name}</code></summary>", table(found), "</details>"]
    if original is not None:
        published = "; ".join(
            f"{n}: {' / '.join(f'{100 * m:.1f}' for m in match)}" for n, match in ORIGINAL_MATCH.items()
        )
        text += [
            "## The original's own way",
            "Channel min-max, no cache (a gear changes how all the text before is read), decisions one token late, "
            "beginning in full precision. It published, for an 8B model's 32 layers, poem / physics / code: "
            f"{published}.",
            table(original),
        ]
    return "\n\n".join(text) + "\n", summary, original
