"""From records to figures: each method of a part against plain decoding around it. Reads files only.

Speed of a prompt is paired with the mean of the two brackets of its repetition. The best configuration of a family
is chosen on one half of the prompts and reported on the other.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel

from sdsie_sglang.eval import rules
from sdsie_sglang.eval.energy import (
    MIN_PIECE_S,
    MIN_WINDOW_S,
    NoEnergy,
    Quantum,
    mean_power_w,
    quantum,
    shares_j,
    window_energy_j,
)
from sdsie_sglang.eval.fidelity import Identity, identity
from sdsie_sglang.eval.intervals import (
    Array,
    Estimate,
    Spread,
    energy_change,
    energy_spread,
    holm,
    pooled,
    speed_change,
    speed_spread,
    wilcoxon_p,
)
from sdsie_sglang.eval.methods import METHODS, PLAIN
from sdsie_sglang.eval.plan import asks
from sdsie_sglang.eval.record import Record, Request
from sdsie_sglang.eval.rules import Flag

MIN_CATEGORY_S = 10.0
"""A category's energy is given only if its requests lasted at least this long together, in every column."""


class Change(BaseModel):
    """Against plain decoding."""

    speed: Estimate
    energy: Estimate | None = None


class MethodSummary(BaseModel):
    """One method at one level of concurrency, or the baseline itself (no `change`).

    Args:
        tok_per_s: mean over prompts of a request's speed. throughput_tok_per_s: all tokens over the phase's time.
        j_per_token, j_per_total_token: window energy over output tokens, and over prompt and output tokens.
        position: share of cycles whose n-th drafted token was accepted, from n = 1.
        p_holm: signed-rank test on speed, corrected over the part's methods.
    """

    method: str
    family: str
    prompts: int
    repetitions: int
    tok_per_s: float
    decode_tok_per_s: float | None
    first_token_ms: float
    throughput_tok_per_s: float
    mean_tokens: float
    j_per_token: float | None = None
    j_per_total_token: float | None = None
    accept_length: float | None = None
    position: list[float] = []
    gears: dict[str, float] = {}
    change: Change | None = None
    decode_change: Estimate | None = None
    p: float | None = None
    p_holm: float | None = None
    categories: dict[str, Change] = {}
    identity: Identity | None = None


class Best(BaseModel):
    """A family's best configuration, chosen on one half of the prompts; `change` is of the other half."""

    family: str
    method: str
    chosen_from: int
    change: Change


class HeadToHead(BaseModel):
    """`over` against `under`, on the reporting half; `wins` counts prompts on which it was faster."""

    over: str
    under: str
    change: Change
    wins: int
    prompts: int


class PhaseSummary(BaseModel):
    concurrency: int
    baseline: MethodSummary
    methods: list[MethodSummary]
    best: list[Best]
    head_to_head: list[HeadToHead]
    aa: Change
    aa_from: str
    drift: list[float]
    energy_drift: list[float]


class PartSummary(BaseModel):
    """Methods that may be compared with each other."""

    part: str
    machine: dict[str, Any]
    quantum: Quantum | None
    idle_w: float | None
    prefill_j_per_token: dict[str, float]
    phases: list[PhaseSummary]
    flags: list[Flag]
    missing: list[str]


class Summary(BaseModel):
    name: str
    commands: list[str]
    config: dict[str, Any]
    parts: list[PartSummary]


@dataclass(frozen=True)
class Cells:
    """What one column measured. Arrays are [prompts, repetitions]; forms of a prompt are one prompt."""

    prompts: tuple[str, ...]
    categories: tuple[str, ...]
    repetitions: tuple[int, ...]
    speed: Array  # geometric mean over the prompt's forms, output tokens a second
    decode: Array
    tokens: Array
    total_tokens: Array
    seconds: Array
    energy_j: Array | None
    requests: tuple[Request, ...]
    phase_s: float

    def rows(self, chosen: Sequence[int]) -> "Cells":
        pick = list(chosen)
        return replace(
            self,
            prompts=tuple(self.prompts[i] for i in pick),
            categories=tuple(self.categories[i] for i in pick),
            speed=self.speed[pick],
            decode=self.decode[pick],
            tokens=self.tokens[pick],
            total_tokens=self.total_tokens[pick],
            seconds=self.seconds[pick],
            energy_j=None if self.energy_j is None else self.energy_j[pick],
        )


def request_energies(record: Record, phase: int) -> list[float] | None:
    """Joules of each request of a phase: its share of the phase's window, which must be fit to be pooled."""
    if record.readings is None:
        return None
    requests, stretch = record.of_phase(phase), record.phases[phase]
    try:
        total = window_energy_j(record.readings, stretch.start_s, stretch.end_s, MIN_PIECE_S)
        parts = shares_j(record.readings, [(r.start_s, r.end_s) for r in requests])
    except NoEnergy:
        return None
    return [part * total / sum(parts) for part in parts]


def cells(records: Sequence[Record], phase: int) -> Cells:
    """One column: the records of a method, one a repetition. Energy only if all have it, over long enough together."""
    order = sorted({(r.prompt, r.category) for r in records[0].of_phase(phase)}, key=lambda pc: _file_order(pc[0]))
    grouped: list[dict[str, list[Request]]] = []
    energies: list[dict[str, float]] = []
    for record in records:
        by_prompt: dict[str, list[Request]] = defaultdict(list)
        joules: dict[str, float] = defaultdict(float)
        shares = request_energies(record, phase)
        for i, request in enumerate(record.of_phase(phase)):
            by_prompt[request.prompt].append(request)
            if shares is not None:
                joules[request.prompt] += shares[i]
        grouped.append(by_prompt)
        energies.append(joules)

    def table(value: Any) -> Array:
        return np.array([[value(group[prompt]) for group in grouped] for prompt, _ in order], dtype=float)

    def geometric(values: list[float | None]) -> float:
        known = [v for v in values if v is not None]
        return float(np.exp(np.mean(np.log(known)))) if known else float("nan")

    phase_s = sum(record.phases[phase].end_s - record.phases[phase].start_s for record in records)
    has_energy = all(energies) and phase_s >= MIN_WINDOW_S
    return Cells(
        prompts=tuple(prompt for prompt, _ in order),
        categories=tuple(category for _, category in order),
        repetitions=tuple(record.datapoint.repetition for record in records),
        speed=table(lambda rs: geometric([r.tok_per_s for r in rs])),
        decode=table(lambda rs: geometric([r.decode_tok_per_s for r in rs])),
        tokens=table(lambda rs: sum(r.tokens for r in rs)),
        total_tokens=table(lambda rs: sum(r.tokens + r.input_tokens for r in rs)),
        seconds=table(lambda rs: sum(r.end_s - r.start_s for r in rs)),
        energy_j=np.array([[e[prompt] for e in energies] for prompt, _ in order]) if has_energy else None,
        requests=tuple(r for record in records for r in record.of_phase(phase)),
        phase_s=phase_s,
    )


def _file_order(prompt: str) -> int:
    from sdsie_sglang.eval.prompts import all_prompts

    return [p.id for p in all_prompts()].index(prompt)


def merged(opened: Cells, closed: Cells) -> Cells:
    """The baseline: mean speed of the brackets, their tokens and energies together."""
    energy_j = None
    if opened.energy_j is not None and closed.energy_j is not None:
        energy_j = opened.energy_j + closed.energy_j
    return replace(
        opened,
        speed=(opened.speed + closed.speed) / 2,
        decode=(opened.decode + closed.decode) / 2,
        tokens=opened.tokens + closed.tokens,
        total_tokens=opened.total_tokens + closed.total_tokens,
        seconds=opened.seconds + closed.seconds,
        energy_j=energy_j,
        requests=opened.requests + closed.requests,
        phase_s=opened.phase_s + closed.phase_s,
    )


def with_decode(over: Cells, under: Cells) -> tuple[Array, Array]:
    """Decode speeds of the prompts that have one on both sides in every repetition: an answer of one token has none."""
    known = ~np.isnan(over.decode + under.decode).any(axis=1)
    return over.decode[known], under.decode[known]


Pair = tuple[Cells, Cells]
"""A method's column and the baseline's of the same repetitions."""
TWO_OVER_BRACKETS = 4 / 3
"""Variance of one server against another, over that of one against the mean of two."""


@dataclass(frozen=True)
class Servers:
    """How differently the servers of a part behave, pooled over its methods; for the same prompts as the change."""

    speed: Spread | None
    decode: Spread | None
    energy: Spread | None


def servers(pairs: Sequence[Pair], rows: Sequence[int] | None = None, share: float = 1.0) -> Servers:
    """Of some prompts (rows; all by default).

    Args:
        share: of the variance of a method against its brackets.
    """
    picked = [(over.rows(rows), under.rows(rows)) if rows is not None else (over, under) for over, under in pairs]

    def times(spread: Spread | None) -> Spread | None:
        return None if spread is None else Spread(share * spread.variance, spread.freedom)

    return Servers(
        speed=times(pooled([speed_spread(o.speed, u.speed) for o, u in picked])),
        decode=times(pooled([speed_spread(*both) for o, u in picked if len((both := with_decode(o, u))[0])])),
        energy=times(
            pooled(
                [
                    energy_spread(o.energy_j, o.tokens, u.energy_j, u.tokens)
                    for o, u in picked
                    if o.energy_j is not None and u.energy_j is not None
                ]
            )
        ),
    )


def change(over: Cells, under: Cells, seed: int, its_servers: Servers, min_s: float = 0.0) -> Change:
    """Speed and, if both sides have it over at least `min_s`, energy."""
    energy = None
    long_enough = min(over.seconds.sum(), under.seconds.sum()) >= min_s
    if over.energy_j is not None and under.energy_j is not None and long_enough:
        energy = energy_change(over.energy_j, over.tokens, under.energy_j, under.tokens, seed, its_servers.energy)
    return Change(speed=speed_change(over.speed, under.speed, seed, its_servers.speed), energy=energy)


def halves(cell: Cells) -> tuple[list[int], list[int]]:
    """Indices of the choosing and of the reporting half: every other prompt, so that both have all categories."""
    indices = range(len(cell.prompts))
    return [i for i in indices if i % 2 == 0], [i for i in indices if i % 2 == 1]


def describe(name: str, column: Cells) -> MethodSummary:
    """Figures of a column by itself."""
    requests = column.requests
    verified = sum(r.verify_count or 0 for r in requests)
    joules = None if column.energy_j is None else float(column.energy_j.sum())
    known = column.decode[~np.isnan(column.decode)]
    return MethodSummary(
        method=name,
        family=METHODS[name].family,
        prompts=len(column.prompts),
        repetitions=column.speed.shape[1],
        tok_per_s=float(column.speed.mean()),
        decode_tok_per_s=float(known.mean()) if len(known) else None,
        first_token_ms=float(np.median([r.first_token_s - r.start_s for r in requests]) * 1000),
        throughput_tok_per_s=sum(r.tokens for r in requests) / column.phase_s,
        mean_tokens=float(np.mean([r.tokens for r in requests])),
        j_per_token=None if joules is None else joules / float(column.tokens.sum()),
        j_per_total_token=None if joules is None else joules / float(column.total_tokens.sum()),
        accept_length=sum(r.tokens for r in requests) / verified if verified else None,
        position=accepted_by_position(requests),
        gears=gear_shares(requests),
    )


def accepted_by_position(requests: Sequence[Request]) -> list[float]:
    """Share of cycles that accepted at least n drafted tokens, n = 1, 2, ..."""
    histograms = [r.drafts_accepted for r in requests if r.drafts_accepted]
    if not histograms:
        return []
    counts = np.zeros(max(map(len, histograms)))
    for histogram in histograms:
        counts[: len(histogram)] += histogram
    at_least = counts[::-1].cumsum()[::-1] / counts.sum()
    return [float(share) for share in at_least[1:] if share > 0]


def gear_shares(requests: Sequence[Request]) -> dict[str, float]:
    """Share of cycles in each gear, for this project's methods."""
    cycles: dict[str, int] = defaultdict(int)
    for request in requests:
        for gear, n in ((request.sdsie or {}).get("cycles") or {}).items():
            cycles[gear] += n
    total = sum(cycles.values())
    return {gear: n / total for gear, n in sorted(cycles.items())} if total else {}


def summarise(records: Sequence[Record]) -> Summary:
    """Everything the report shows. Raises ValueError if no part has a complete repetition, or if a record does not hold
    what its plan asks for."""
    for record in records:
        check_requests(record)
    by_part: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        by_part[record.datapoint.part].append(record)
    config = records[0].config
    parts = [_part(name, by_part[name]) for name in config.parts if _complete(by_part[name])]
    if not parts:
        raise ValueError("no part has both brackets and a method between them yet")
    programs = list(dict.fromkeys(record.program for record in records))
    return Summary(name=config.name, commands=programs, config=config.model_dump(mode="json"), parts=parts)


def check_requests(record: Record) -> None:
    """Raises ValueError unless a record has each request of its phases once."""
    point, config = record.datapoint, record.config
    for phase in range(len(config.phases_of(point.part))):
        wanted = sorted(ask.key for ask in asks(config, point.part, phase, point.repetition))
        if len(record.phases) <= phase or sorted(request.key for request in record.of_phase(phase)) != wanted:
            raise ValueError(f"{point.path(Path())}: the requests of phase {phase} are not those of its plan")


def _complete(records: Sequence[Record]) -> list[int]:
    """Repetitions that have both brackets."""
    roles: dict[int, set[str]] = defaultdict(set)
    for record in records:
        roles[record.datapoint.repetition].add(record.datapoint.role)
    return sorted(r for r, have in roles.items() if {"open", "close", "method"} <= have)


def _part(name: str, records: list[Record]) -> PartSummary:
    repetitions = _complete(records)
    used = [r for r in records if r.datapoint.repetition in repetitions]
    config = records[0].config
    flags = [flag for record in used for flag in rules.record_flags(record)]
    for repetition in repetitions:
        flags += rules.group_flags([r for r in used if r.datapoint.repetition == repetition])
    wanted = [(r, m) for r in sorted({*range(config.repetitions), *repetitions}) for m in config.parts[name].methods]
    have = {(r.datapoint.repetition, r.datapoint.method) for r in used if r.datapoint.role == "method"}
    phases = []
    for number in range(len(config.phases_of(name))):
        summary, found = _phase(name, used, number)
        phases.append(summary)
        flags += found
    return PartSummary(
        part=name,
        machine=records[0].machine,
        quantum=_quantum(used),
        idle_w=_idle_w(used),
        prefill_j_per_token=_prefill(used),
        phases=phases,
        flags=rules.unique(flags),
        missing=[f"{m}, repetition {r}" for r, m in wanted if (r, m) not in have],
    )


def _phase(part: str, records: list[Record], number: int) -> tuple[PhaseSummary, list[Flag]]:
    config = records[0].config
    columns: dict[tuple[str, str], list[Record]] = defaultdict(list)
    for record in sorted(records, key=lambda r: r.datapoint.repetition):
        columns[record.datapoint.role, record.datapoint.method].append(record)
    opened, closed = (cells(columns[role, PLAIN.name], number) for role in ("open", "close"))
    baseline = merged(opened, closed)
    flags: list[Flag] = []
    concurrency = config.phases_of(part)[number].concurrency
    about = f"{part}, concurrency {concurrency}"

    def flag(rule: str, method: str, text: str | None) -> None:
        if text:
            flags.append(Flag(rule=rule, about=f"{about}, {method}", text=text))

    measured: dict[str, Pair] = {}
    for (role, name), its_records in columns.items():
        if role == "method":
            against = _repetitions(columns, number, [r.datapoint.repetition for r in its_records])
            measured[name] = (cells(its_records, number), against)
    spread = servers(list(measured.values()))
    summaries = []
    opening = {(r.datapoint.repetition, q.key): q for r in columns["open", PLAIN.name] for q in r.of_phase(number)}
    for name, (column, against) in measured.items():
        its_records = columns["method", name]
        summary = describe(name, column)
        summary.change = change(column, against, config.seed, spread)
        decoded = with_decode(column, against)
        if len(decoded[0]):
            summary.decode_change = speed_change(*decoded, config.seed, spread.decode)
        summary.p = wilcoxon_p(column.speed, against.speed)
        summary.categories = _categories(column, against, config.seed, list(measured.values()))
        summary.identity = identity(
            [(opening[r.datapoint.repetition, q.key].output_ids, q.output_ids) for r in its_records
             for q in r.of_phase(number)]
        )  # fmt: skip
        tokens = int(column.tokens.sum())
        flag("not_speculating", name, rules.not_speculating(name, summary.accept_length))
        flag(
            "unexplained_speedup",
            name,
            rules.unexplained_speed_up(1 + summary.change.speed.value, summary.accept_length),
        )
        if any(r.readings is not None for r in its_records):
            flag("no_energy", name, rules.short_pool(column.phase_s))
        flag("length_mismatch", name, rules.length_mismatch(tokens, int(against.tokens.sum()) // 2))
        summaries.append(summary)
    for summary, corrected in zip(
        summaries, holm([None if s.method == PLAIN.name else s.p for s in summaries]), strict=True
    ):
        summary.p_holm = corrected
    drifts = [rules.drift(_gmean(opened, i), _gmean(closed, i)) for i in range(opened.speed.shape[1])]
    for i, (_, text) in enumerate(drifts):
        flag("drift", f"repetition {i}", text)
    aa, aa_from = _aa(summaries, opened, closed, config.seed, servers(list(measured.values()), share=TWO_OVER_BRACKETS))
    for what, found in (("speed", aa.speed), ("energy", aa.energy)):
        if found is not None and found.holds_zero is False:
            flag(
                "a_a", what, f"plain against plain differs: {found.value:+.1%} ({found.low:+.1%} to {found.high:+.1%})"
            )
    best = _best(summaries, measured, config.seed)
    result = PhaseSummary(
        concurrency=concurrency,
        baseline=describe(PLAIN.name, baseline),
        methods=sorted(summaries, key=lambda s: list(METHODS).index(s.method)),
        best=best,
        head_to_head=_head_to_head(best, measured, config.seed),
        aa=aa,
        aa_from=aa_from,
        drift=[value for value, _ in drifts],
        energy_drift=_energy_drift(opened, closed),
    )
    return result, flags


def _repetitions(columns: dict[tuple[str, str], list[Record]], number: int, wanted: list[int]) -> Cells:
    """The baseline of these repetitions."""
    opened, closed = (
        cells([r for r in columns[role, PLAIN.name] if r.datapoint.repetition in wanted], number)
        for role in ("open", "close")
    )
    return merged(opened, closed)


def _categories(column: Cells, baseline: Cells, seed: int, pairs: Sequence[Pair]) -> dict[str, Change]:
    found = {}
    for category in dict.fromkeys(column.categories):
        chosen = [i for i, c in enumerate(column.categories) if c == category]
        spread = servers(pairs, chosen)
        found[category] = change(column.rows(chosen), baseline.rows(chosen), seed, spread, MIN_CATEGORY_S)
    return found


def _best(summaries: list[MethodSummary], measured: dict[str, tuple[Cells, Cells]], seed: int) -> list[Best]:
    families: dict[str, list[str]] = defaultdict(list)
    for summary in summaries:
        if summary.method != PLAIN.name:
            families[summary.family].append(summary.method)
    found = []
    for family, names in families.items():
        choosing, reporting = halves(measured[names[0]][0])
        if not reporting:
            continue

        def gain(name: str, rows: list[int] = choosing) -> float:
            column, baseline = measured[name]
            return float(np.mean(np.log(column.rows(rows).speed / baseline.rows(rows).speed)))

        name = max(names, key=gain)
        column, baseline = (cell.rows(reporting) for cell in measured[name])
        spread = servers(list(measured.values()), reporting)
        found.append(
            Best(family=family, method=name, chosen_from=len(names), change=change(column, baseline, seed, spread))
        )
    return found


def _head_to_head(best: list[Best], measured: dict[str, tuple[Cells, Cells]], seed: int) -> list[HeadToHead]:
    """Each pair of best configurations that have the same repetitions."""
    pairs = []
    for i, first in enumerate(best):
        for second in best[i + 1 :]:
            over, under = (measured[b.method][0] for b in (first, second))
            if over.repetitions != under.repetitions:
                continue
            _, reporting = halves(over)
            over, under = over.rows(reporting), under.rows(reporting)
            spread = servers(list(measured.values()), reporting, TWO_OVER_BRACKETS)
            wins = int((np.log(over.speed / under.speed).mean(1) > 0).sum())
            pairs.append(
                HeadToHead(
                    over=first.method, under=second.method, change=change(over, under, seed, spread),
                    wins=wins, prompts=len(reporting),
                )
            )  # fmt: skip
    return pairs


def _aa(
    summaries: list[MethodSummary], opened: Cells, closed: Cells, seed: int, its_servers: Servers
) -> tuple[Change, str]:
    for summary in summaries:
        if summary.method == PLAIN.name and summary.change is not None:
            return summary.change, "a third plain server between the brackets, against them"
    return change(closed, opened, seed, its_servers), "closing against opening bracket"


def _gmean(cell: Cells, repetition: int) -> float:
    return float(np.exp(np.log(cell.speed[:, repetition]).mean()))


def _energy_drift(opened: Cells, closed: Cells) -> list[float]:
    if opened.energy_j is None or closed.energy_j is None:
        return []
    per_token = [cell.energy_j.sum(0) / cell.tokens.sum(0) for cell in (opened, closed)]  # type: ignore[union-attr]
    return [float(x) for x in per_token[1] / per_token[0] - 1]


def _quantum(records: Sequence[Record]) -> Quantum | None:
    steps = []
    for record in records:
        if record.readings is not None:
            try:
                steps.append(quantum(record.readings))
            except NoEnergy:
                continue
    if not steps:
        return None
    return Quantum(
        float(np.median([s.period_s for s in steps])),
        float(np.median([s.energy_j for s in steps])),
        sum(s.edges for s in steps),
    )


def _idle_w(records: Sequence[Record]) -> float | None:
    watts = [mean_power_w(r.readings, r.idle.start_s, r.idle.end_s) for r in records if r.readings and r.idle]
    return float(np.median(watts)) if watts else None


def _prefill(records: Sequence[Record]) -> dict[str, float]:
    """Joules a prompt token of the prefill stretch, by method."""
    found: dict[str, list[float]] = defaultdict(list)
    for record in records:
        if record.readings is None or record.prefill is None or not record.prefill_tokens:
            continue
        try:
            joules = window_energy_j(record.readings, record.prefill.start_s, record.prefill.end_s)
        except NoEnergy:
            continue
        found[record.datapoint.method].append(joules / record.prefill_tokens)
    return {method: float(np.mean(values)) for method, values in found.items()}
