"""From a folder of records to one HTML file and a Markdown summary, and, if asked, to headline.json.

    python -m sdsie_sglang.eval.report eval/results/ruler/short [--headline]

Writes report.html, report.md and summary.json into the folder. Reads nothing but the folder's files and the
target's tokenizer (for the text of one answer).
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from pydantic import ValidationError

from sdsie_sglang.demo import DemoError
from sdsie_sglang.eval import figures, headline, machine
from sdsie_sglang.eval.arguments import read_json
from sdsie_sglang.eval.chat import decode
from sdsie_sglang.eval.compare import Change, MethodSummary, PartSummary, PhaseSummary, Summary, summarise
from sdsie_sglang.eval.fidelity import FILE, MAX_MARGIN, Fidelity
from sdsie_sglang.eval.intervals import Estimate
from sdsie_sglang.eval.page import Answer, Block, Code, Flags, Heading, Picture, Table, Text, markdown, page
from sdsie_sglang.eval.plan import resolve_models
from sdsie_sglang.eval.record import Record, read_all
from sdsie_sglang.eval.token_gears import example, pieces
from sdsie_sglang.gears.settings import first_error

NONE = "–"


def signed(share: float, digits: int = 1) -> str:
    """A share as a signed number of percent, with a true minus and no minus before zero."""
    text = f"{round(100 * share, digits) + 0.0:+.{digits}f}"
    return text.replace("-", "\u2212")


def percent(estimate: Estimate | None) -> str:
    if estimate is None:
        return NONE
    value = f"{signed(estimate.value)} %"
    if estimate.low is None or estimate.high is None:
        return value
    return f"{value} [{signed(estimate.low)}, {signed(estimate.high)}]"


def number(value: float | None, digits: int = 2) -> str:
    return NONE if value is None else f"{value:.{digits}f}"


def share(value: float | None) -> str:
    return NONE if value is None else f"{100 * value:.0f} %"


def build(records: Sequence[Record], summary: Summary, fidelity: Fidelity | None) -> list[Block]:
    """The whole report."""
    config = records[0].config
    blocks: list[Block] = [
        Heading(f"The ruler: {summary.name}", 1),
        Text(
            f"{len(records)} servers, {sum(len(r.requests) for r in records)} timed requests, greedy, at most "
            f"{config.tokens} new tokens, {'past the natural end' if config.ignore_eos else 'natural end'}. Each "
            "server is fresh and serves one method. Everything is relative to plain decoding measured before and "
            "after, in the same part and repetition; square brackets hold 95 % intervals. Parts must not be compared "
            "with each other."
        ),
    ]
    for part in summary.parts:
        blocks += part_blocks(part, [r for r in records if r.datapoint.part == part.part])
    blocks += gear_blocks(records)
    blocks += fidelity_blocks(records, fidelity)
    blocks += method_blocks(records, summary)
    return blocks


def part_blocks(part: PartSummary, records: Sequence[Record]) -> list[Block]:
    facts = [f"Measured on {machine.where(part.machine)}, commit {part.machine['commit']}."]
    if part.quantum is not None:
        step = part.quantum
        facts.append(
            f"The energy counter moves every {1000 * step.period_s:.0f} ms by {step.energy_j:.1f} J (medians over "
            f"{step.edges} steps), so that one request's own difference would be off by up to {step.energy_j:.0f} J; "
            "only windows that last 10 s and more together are reported."
        )
    else:
        facts.append("No energy was measured.")
    if part.idle_w is not None:
        facts.append(f"Idle with the model loaded: {part.idle_w:.0f} W.")
    blocks: list[Block] = [Heading(f"Part: {part.part}"), Text(" ".join(facts))]
    if part.missing:
        blocks.append(Text(f"Not measured yet: {'; '.join(part.missing)}."))
    blocks.append(Flags([f"{flag.rule}: {flag.about}: {flag.text}" for flag in part.flags]))
    for phase in part.phases:
        blocks += phase_blocks(phase)
    if part.prefill_j_per_token:
        blocks.append(Heading("Prefill alone", 3))
        rows = [[method, f"{1000 * value:.2f}"] for method, value in part.prefill_j_per_token.items()]
        blocks.append(Table(["method", "mJ per prompt token"], rows))
    first = [r for r in records if r.datapoint.repetition == 0]
    _picture(
        blocks, figures.power(first), "Power (grey) and temperature (orange) over each server's life, first repetition."
    )
    return blocks


def phase_blocks(phase: PhaseSummary) -> list[Block]:
    base = phase.baseline
    energy = "" if base.j_per_token is None else f", {base.j_per_token:.3f} J per output token"
    blocks: list[Block] = [
        Heading(f"{phase.concurrency} request{'s' if phase.concurrency > 1 else ''} at a time", 3),
        Text(
            f"Plain: {base.tok_per_s:.1f} tok/s a request, {base.throughput_tok_per_s:.1f} tok/s in all{energy}, first "
            f"token after {base.first_token_ms:.0f} ms. Drift between the brackets: "
            f"{', '.join(f'{signed(d)} %' for d in phase.drift)}"
            + (f" (energy {', '.join(f'{signed(d)} %' for d in phase.energy_drift)})" if phase.energy_drift else "")
            + f". A/A ({phase.aa_from}): speed {percent(phase.aa.speed)}"
            + (f", energy {percent(phase.aa.energy)}" if phase.aa.energy is not None else "")
            + "."
        ),
        Table(
            ["method", "speed", "energy / token", "tok/s", "J/token", "tokens a pass", "identical", "p (Holm)"],
            [method_row(m) for m in phase.methods],
        ),
        Table(
            ["method", "decode speed", "tok/s in all", "first token, ms", "J/total token", "mean tokens", "prefix"],
            [detail_row(m) for m in [base, *phase.methods]],
        ),
        Text(
            "Speed, decode speed (after the first token) and energy are against plain. Tokens a pass: all tokens over "
            "the target's passes after prefill. Identical: answers that are plain's to the last token; prefix: mean "
            "share of plain's answer before the first difference. First token: median.",
            note=True,
        ),
    ]  # fmt: skip
    if once := [m.method for m in phase.methods if m.repetitions == 1]:
        known = len(once) < len(phase.methods)
        how = (
            "How much another start of a server changes is taken from the methods that were measured more often."
            if known
            else "Their intervals say how much prompts differ, and nothing of how another start of the same server "
            "would differ; the A/A test does."
        )
        blocks.append(Text(f"Measured on one server each: {', '.join(once)}. {how}", note=True))
    _picture(blocks, figures.speed_energy(phase), "Speed against energy per output token; right and down is better.")
    _picture(blocks, figures.forest(phase), "Speed against plain decoding, with 95 % intervals.")
    if phase.best:
        blocks.append(Heading("Each family's best", 3))
        blocks.append(
            Text("Chosen on every other prompt, reported on the prompts that had no say in the choice.", note=True)
        )
        rows = [
            [b.family, b.method, f"of {b.chosen_from}", percent(b.change.speed), percent(b.change.energy)]
            for b in phase.best
        ]
        blocks.append(Table(["family", "best", "chosen", "speed", "energy / token"], rows))
    if phase.head_to_head:
        rows = [
            [f"{h.over} / {h.under}", percent(h.change.speed), percent(h.change.energy), f"{h.wins} of {h.prompts}"]
            for h in phase.head_to_head
        ]
        blocks.append(Table(["head to head", "speed", "energy / token", "prompts won"], rows))
    names = list(phase.methods[0].categories)
    if len(names) > 1:
        blocks.append(Heading("By category", 3))
        head = ["method", *names]
        blocks.append(Table(head, [[m.method, *(_both(m.categories[n]) for n in names)] for m in phase.methods]))
        blocks.append(
            Text("Speed, and after the stroke energy per token where a category lasted 10 s or more.", note=True)
        )
        _picture(blocks, figures.categories(phase), "Speed by category, with 95 % intervals.")
    _picture(
        blocks,
        figures.positions(phase),
        "How often the n-th drafted token was accepted, over all cycles (gear 0 accepts none).",
    )
    geared = [m for m in phase.methods if m.gears]
    if geared:
        gears = sorted({g for m in geared for g in m.gears})
        rows = [[m.method, *(share(m.gears.get(g)) for g in gears)] for m in geared]
        blocks.append(Table(["cycles in gear", *gears], rows))
    return blocks


def method_row(m: MethodSummary) -> list[str]:
    change = m.change
    return [
        m.method,
        percent(change.speed if change else None),
        percent(change.energy if change else None),
        number(m.tok_per_s, 1),
        number(m.j_per_token, 3),
        number(m.accept_length),
        share(m.identity.identical if m.identity else None),
        NONE if m.p_holm is None else f"{m.p_holm:.2g}",
    ]


def detail_row(m: MethodSummary) -> list[str]:
    return [
        m.method if m.change else "baseline",
        percent(m.decode_change),
        number(m.throughput_tok_per_s, 1),
        number(m.first_token_ms, 0),
        number(m.j_per_total_token, 3),
        number(m.mean_tokens, 0),
        share(m.identity.prefix if m.identity else None),
    ]


def _both(change: Change) -> str:
    speed = f"{signed(change.speed.value, 0)} %"
    return speed if change.energy is None else f"{speed} / {signed(change.energy.value, 0)} %"


def gear_blocks(records: Sequence[Record]) -> list[Block]:
    """One answer's gears over its text."""
    shown = example(records)
    if shown is None:
        return []
    record, request, cycles = shown
    try:
        target = resolve_models(record.config).target
        text = pieces(request.output_ids, cycles, lambda ids: decode(target, ids))
    except (OSError, ValueError, DemoError):  # the models are not on the machine that writes the report
        return []
    policy = ((record.live or {}).get("gate") or {}).get("policy") or {}
    thresholds = (policy["theta_low"], policy["theta_high"]) if policy.get("policy") == "entropy" else None
    blocks: list[Block] = [
        Heading("Gears over one answer"),
        Text(
            f"{record.datapoint.method} on {request.prompt}: {len(cycles)} cycles for {request.tokens} tokens. Shaded "
            "words were drafted and verified, the others decoded plainly; the underline is the darker the higher the "
            "target's entropy at the end of the cycle."
        ),
        Answer(text),
    ]
    _picture(blocks, figures.gears(cycles, thresholds), "The target's entropy over the answer, and where it drafted.")
    return blocks


def fidelity_blocks(records: Sequence[Record], fidelity: Fidelity | None) -> list[Block]:
    """What the target says of differing answers, and of which servers it was not asked."""
    blocks: list[Block] = [Heading("Fidelity")]
    to_judge = {str(r.datapoint.path(Path())) for r in records if r.datapoint.role != "open"}
    missing = sorted(to_judge - set(fidelity.judged if fidelity is not None else ()))
    if missing:
        text = (
            "The target has not been asked about differing answers yet"
            if fidelity is None
            else f"The target has not been asked about these servers' answers yet: {', '.join(missing)}"
        )
        blocks.append(Text(f"{text} (python -m sdsie_sglang.eval.fidelity DIR). Token identity is in the tables."))
    partings = fidelity.partings if fidelity is not None else []
    if fidelity is not None and fidelity.cut:
        blocks.append(Text(f"{fidelity.cut} answers end where plain's goes on, or go on where it ends."))
    if not partings:
        if fidelity is not None and not fidelity.cut:
            blocks.append(Text(f"No answer of {len(fidelity.judged)} servers differs from plain's in a token."))
        return blocks
    rows = []
    for method in dict.fromkeys(p.method for p in partings):
        its = [p for p in partings if p.method == method]
        n = len(its)
        rows.append(
            [
                method,
                str(n),
                f"{sum(p.is_rounding for p in its)}",
                f"{max(abs(p.margin) for p in its):.3f}",
                f"{sum(p.rounding_kl for p in its) / n:.2e}",
                f"{sum(p.plain_nll for p in its) / n:.3f}",
                f"{sum(p.method_nll for p in its) / n:.3f}",
            ]
        )
    blocks.append(
        Table(["method", "answers", "near ties", "largest margin", "rounding KL", "plain's NLL", "method's NLL"], rows)
    )
    blocks.append(
        Text(
            "In nats, by the target in float32, teacher forced. A near tie: the two tokens differ by at most "
            f"{MAX_MARGIN} in log-probability. Rounding KL: float32 against the served precision on plain's answer. "
            f"At most {fidelity.limit if fidelity is not None else 0} differing answers of a server were asked about.",
            note=True,
        )
    )
    return blocks


def method_blocks(records: Sequence[Record], summary: Summary) -> list[Block]:
    """How it was measured, in full."""
    packages = ", ".join(f"{name} {version}" for name, version in records[0].machine["packages"].items() if version)
    servers = {r.datapoint.method: " ".join(r.command) for r in records}
    return [
        Heading("How this was measured"),
        Text(
            "Speed: output tokens of a request over its time, prefill included, paired by prompt with the mean of the "
            "two brackets; geometric mean. Energy: NVML's total-energy counter over each phase, from counter edge to "
            "counter edge, a method's phases together at least 10 s, shared among the requests that ran. Intervals: "
            "bootstrap over prompts and over repetitions (2000 draws), stretched to the width of a jackknife with "
            "Student's t, since prompts of a category and repetitions are few (how differently servers behave is "
            "pooled over the methods). p: Wilcoxon's signed-rank test over "
            "prompts, Holm-corrected over a table's methods; it takes the servers as they were, so that what makes one "
            "server a little faster on all prompts makes it small: the interval says if it outlasts a restart."
        ),
        Text(f"Python {records[0].machine['python']}, {packages}." if "python" in records[0].machine else packages),
        Code("\n".join(summary.commands)),
        Code("\n".join(f"{name}: {command}" for name, command in servers.items())),
        Code(json.dumps(summary.config, indent=1)),
    ]


def _picture(blocks: list[Block], figure: object, caption: str) -> None:
    if figure is not None:
        blocks.append(Picture(figures.svg_uri(figure), caption))  # type: ignore[arg-type]


# -- headline figures --------------------------------------------------------------------------


def headline_figures(summary: Summary, folder: Path) -> list[headline.Figure]:
    """Of the demo models on a GPU, one request at a time. Empty for anything else."""
    found: list[headline.Figure] = []
    if summary.config["models"] != "demo":
        return found
    for part in summary.parts:
        phase = next((p for p in part.phases if p.concurrency == 1), None)
        if phase is None or not part.machine["gpus"]:
            continue
        rules = sorted({flag.rule for flag in part.flags})
        caveats = f"; flags of the part: {', '.join(rules)}" if rules else ""
        if part.missing:
            caveats += f"; not measured: {', '.join(part.missing)}"

        def add(
            name: str, estimate: Estimate | None, note: str, ratio: bool = True, part: PartSummary = part,
            caveats: str = caveats,
        ) -> None:  # fmt: skip
            if estimate is None:
                return
            shift = 1.0 if ratio else 0.0
            low, high = (None if e is None else e + shift for e in (estimate.low, estimate.high))
            found.append(
                headline.Figure(
                    name=name, value=estimate.value + shift, low=low, high=high, unit="1",
                    where=machine.where(part.machine), record=headline.in_repository(folder / part.part),
                    command=" && ".join(summary.commands), date=headline.today(),
                    note=f"part {part.part}; {note}{caveats}",
                )
            )  # fmt: skip

        if any(m.method == "plain" for m in phase.methods):
            holds = "holds 0" if phase.aa.speed.holds_zero else "does not hold 0"
            add("aa_speed", phase.aa.speed, f"{phase.aa_from}; the interval {holds}", ratio=False)
        for m in phase.methods:
            if m.change is not None and (short := {"draft-k5": "k5", "ngram-16": "ngram"}.get(m.method)):
                add(f"{short}_over_plain_demo_bs1", m.change.speed, "all prompts")
                add(f"{short}_over_plain_demo_bs1_energy", m.change.energy, "all prompts")
        for b in phase.best:
            if b.family in ("entropy", "eagle3"):
                note = f"{b.method}, best of {b.chosen_from}, on the prompts that had no say"
                add(f"{b.family}_over_plain_demo_bs1", b.change.speed, note)
                add(f"{b.family}_over_plain_demo_bs1_energy", b.change.energy, note)
    return list({f.name: f for f in reversed(found)}.values())  # the first part that has a figure


def write(folder: Path) -> Summary:
    """Reads the folder's records and writes report.html, report.md and summary.json. Raises ValueError."""
    records = read_all(folder)
    if not records:
        raise ValueError(f"{folder} holds no records")
    path = folder / FILE
    fidelity = Fidelity(**read_json(path, "the fidelity")) if path.exists() else None
    summary = summarise(records)
    blocks = build(records, summary, fidelity)
    (folder / "summary.json").write_text(summary.model_dump_json(indent=1) + "\n")
    (folder / "report.md").write_text(markdown(blocks))
    (folder / "report.html").write_text(page(f"The ruler: {summary.name}", blocks))
    return summary


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m sdsie_sglang.eval.report",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--headline", action="store_true", help="put the quoted figures into headline.json")
    args = parser.parse_args(argv)
    try:
        summary = write(args.folder)
    except ValidationError as error:
        print(
            f"report: {args.folder / FILE}: {first_error(error)}: run sdsie_sglang.eval.fidelity again", file=sys.stderr
        )
        return 2
    except (ValueError, OSError) as error:
        print(f"report: {error}", file=sys.stderr)
        return 2
    print(args.folder / "report.html")
    if args.headline:
        quoted = headline_figures(summary, args.folder)
        if not quoted:
            print("report: nothing here is quoted: that takes the demo models on a GPU", file=sys.stderr)
            return 1
        headline.update(quoted)
        print(f"{len(quoted)} figures written to {headline.HEADLINE.relative_to(headline.ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
