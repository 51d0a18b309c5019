"""The rules that make a measurement one, as functions of readings and records. Each says nothing or what is wrong.

A flag does not hide a figure: it is printed beside it. What voids a run (a failed request, a wrong server) is an
exception where it happens.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from pydantic import BaseModel

from sdsie_sglang.eval.energy import (
    MIN_PIECE_S,
    MIN_WINDOW_S,
    NoEnergy,
    Readings,
    integrated_power_j,
    mean_power_w,
    mean_temperature_c,
    window_energy_j,
)
from sdsie_sglang.eval.machine import PACKAGES
from sdsie_sglang.eval.methods import METHODS, PLAIN
from sdsie_sglang.eval.plan import WarmUp
from sdsie_sglang.eval.record import Record, WarmUpReading

MAX_DRIFT = 0.03
MAX_TRANSIENT_C = 2.0
MAX_COUNTER_GAP = 0.05
MIN_ACCEPT_LENGTH = 1.05
MAX_OVER_ACCEPT_LENGTH = 1.15
MAX_LENGTH_DIFFERENCE = 0.20
MAX_FOREIGN_GIB = 3.0

# NVML's clock event reasons that mean the GPU ran slower than it could (nvml.h): power cap, hardware slowdown,
# software and hardware thermal slowdown, power brake. Idle, clocks that a user set and sync boost are none.
THROTTLE_REASONS = {
    0x04: "power cap",
    0x08: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
}


class Flag(BaseModel):
    """Something that a reader must know about a figure."""

    rule: str
    about: str
    text: str


# -- warm-up -------------------------------------------------------------------------------------


def settled(readings: Sequence[WarmUpReading], settings: WarmUp) -> bool:
    """Whether each label *by itself* stopped moving: the newer half of its last readings against the older.

    Pooled over labels, one that heats and one that cools can cancel out; and labels differ in power by more
    than the tolerance, so a pooled mean says more about which labels are in it than about warmth.
    """
    labels = {reading.label for reading in readings}
    return all(_label_settled([r for r in readings if r.label == label], settings) for label in labels)


def _label_settled(readings: Sequence[WarmUpReading], settings: WarmUp) -> bool:
    if len(readings) < settings.readings:
        return False
    last = readings[-settings.readings :]
    half = settings.readings // 2
    power = np.array([reading.power_w for reading in last], dtype=float)
    temperature = np.array([reading.temperature_c for reading in last], dtype=float)
    moved_w = abs(power[half:].mean() - power[:half].mean())
    moved_c = abs(temperature[half:].mean() - temperature[:half].mean())
    return bool(
        moved_w <= settings.power_tolerance * power.mean() and moved_c <= settings.temperature_tolerance_c
    )  # fmt: skip


def unsettled_warm_up(record: Record) -> list[Flag]:
    """Warm-up ran out of time before every label had settled."""
    if record.warm_up_settled is False:
        return [_flag("unsettled_warm_up", record, f"not settled within {record.config.warm_up.max_s:.0f} s")]
    return []


def tolerance_below_noise(record: Record) -> list[Flag]:
    """The tolerance is finer than what a reading can resolve, so that settling was luck.

    Noise: the scatter of a label's differences from reading to reading (which a slow trend leaves alone),
    carried to a difference between two means of half the readings.
    """
    settings = record.config.warm_up
    by_label = defaultdict(list)
    for reading in record.warm_up:
        if reading.power_w is not None:
            by_label[reading.label].append(reading.power_w)
    too_noisy = {}
    for label, powers in by_label.items():
        if len(powers) < 4:
            continue
        one = float(np.std(np.diff(powers), ddof=1)) / np.sqrt(2)
        noise = one * np.sqrt(4 / settings.readings) / float(np.mean(powers))
        if noise > settings.power_tolerance:
            too_noisy[label] = f"{noise:.1%}"
    if not too_noisy:
        return []
    text = f"power scatters by {', '.join(too_noisy.values())} in {', '.join(too_noisy)}"
    return [_flag("tolerance_below_noise", record, f"{text}; the tolerance is {settings.power_tolerance:.1%}")]


def unequal_warm_up(records: Sequence[Record]) -> list[Flag]:
    """Servers of one part were not warmed up alike: other prompts, other settings, less than the least time."""
    flags = []
    usual = Counter(_warm_up_kind(record) for record in records).most_common(1)[0][0]
    for record in records:
        passed = record.warm_up[-1].end_s - record.warm_up[0].start_s if record.warm_up else 0.0
        least = record.config.warm_up.min_s
        if _warm_up_kind(record) != usual:
            flags.append(_flag("unequal_warm_up", record, "warmed up otherwise than the rest of its part"))
        elif passed < least:
            flags.append(_flag("unequal_warm_up", record, f"warmed up for {passed:.0f} s of at least {least:.0f} s"))
    return flags


def _warm_up_kind(record: Record) -> tuple[Any, ...]:
    labels = tuple(sorted({reading.label for reading in record.warm_up}))
    return (*labels, record.config.warm_up.model_dump_json(), record.warm_up_settled is None)


# -- the machine ---------------------------------------------------------------------------------


def thermal_transient(record: Record) -> list[Flag]:
    """The GPU was still warming (or cooling) while it was timed: first against last quarter of a phase."""
    flags = []
    for phase, stretch in enumerate(record.phases):
        values = [r.temperature_c for r in _slow(record, stretch.start_s, stretch.end_s)]
        quarter = len(values) // 4
        if quarter == 0:
            continue
        moved = float(np.mean(values[-quarter:]) - np.mean(values[:quarter]))
        if abs(moved) > MAX_TRANSIENT_C:
            flags.append(_flag("thermal_transient", record, f"phase {phase}: {moved:+.1f} °C while it was timed"))
    return flags


def throttled(record: Record) -> list[Flag]:
    """Clocks were held down during a timed phase, by reason and share of readings."""
    readings = [r for s in record.phases for r in _slow(record, s.start_s, s.end_s)]
    flags = []
    for bit, name in THROTTLE_REASONS.items():
        hit = sum(bool(r.throttle & bit) for r in readings)
        if hit:
            flags.append(_flag("throttled", record, f"{name} in {hit / len(readings):.0%} of readings"))
    return flags


def other_tenants(record: Record) -> list[Flag]:
    """Somebody else used the GPU: before this server was measured, or while it was timed.

    Our own servers that wait meanwhile are known (tenants.py); `record.before` counts what is none of them.
    """
    flags = []
    if record.before is not None and (record.before["processes"] or record.before["memory_gib"] > MAX_FOREIGN_GIB):
        text = f"{record.before['processes']:.0f} processes, {record.before['memory_gib']:.1f} GiB of others before it"
        flags.append(_flag("other_tenants", record, text))
    readings = [r for s in record.phases for r in _slow(record, s.start_s, s.end_s)]
    if readings:
        first = (_slow(record, 0.0, record.phases[0].start_s) or readings)[0]
        more = max(max((r.processes or 0) - (first.processes or 0), r.strangers or 0) for r in readings)
        grown_gib = max(r.memory_gib for r in readings) - first.memory_gib
        if more > 0:
            flags.append(_flag("other_tenants", record, f"{more} more processes while it was timed"))
        elif grown_gib > MAX_FOREIGN_GIB:
            flags.append(_flag("other_tenants", record, f"{grown_gib:.1f} GiB more in use while it was timed"))
    return flags


def waiting_servers(records: Sequence[Record]) -> list[Flag]:
    """Plain is the faster, the fewer of our own servers wait beside it (three of different numbers at least)."""
    plain = [r for r in records if r.datapoint.method == PLAIN.name and r.before is not None and r.phases]
    seen = sorted(((r.before or {}).get("waiting", 0.0), _phase_tok_per_s(r), r.paused_s is None) for r in plain)
    speeds = [speed for _, speed, _ in seen]
    if len({waiting for waiting, *_ in seen}) < 3 or speeds != sorted(speeds, reverse=True):
        return []
    if speeds[0] <= (1 + MAX_DRIFT) * speeds[-1]:
        return []
    each = ", ".join(f"{speed:.0f} tok/s beside {waiting:.0f}" for waiting, speed, _ in reversed(seen))
    idle = ", idle and not paused" if any(idle for *_, idle in seen) else ""
    return [_flag("waiting_servers", plain[-1], f"plain is faster beside fewer servers that wait{idle}: {each}")]


def _phase_tok_per_s(record: Record) -> float:
    """Of the first phase, all requests together."""
    first = record.phases[0]
    return sum(request.tokens for request in record.of_phase(0)) / (first.end_s - first.start_s)


def short_pool(seconds: float) -> str | None:
    """All windows of a label together are too short for energy."""
    if seconds >= MIN_WINDOW_S:
        return None
    return f"its windows last {seconds:.1f} s together, less than {MIN_WINDOW_S:.0f} s; no energy is reported"


def _slow(record: Record, start_s: float, end_s: float) -> list[Any]:
    return [] if record.readings is None else [r for r in record.readings.slow if start_s <= r.t_s <= end_s]


# -- energy --------------------------------------------------------------------------------------


def energy_rules(record: Record) -> list[Flag]:
    """Window too short to be pooled, counter silent, or counter and integrated power apart."""
    if record.readings is None:
        return []
    flags = []
    for phase, stretch in enumerate(record.phases):
        try:
            counter = window_energy_j(record.readings, stretch.start_s, stretch.end_s, MIN_PIECE_S)
            power = integrated_power_j(record.readings, stretch.start_s, stretch.end_s)
        except NoEnergy as error:
            flags.append(_flag("no_energy", record, f"phase {phase}: {error}; no energy is reported"))
            continue
        gap = power / counter - 1
        if abs(gap) > MAX_COUNTER_GAP:
            text = f"phase {phase}: integrated power is {gap:+.1%} off the counter"
            flags.append(_flag("counter_against_power", record, text))
    return flags


# -- the requests --------------------------------------------------------------------------------


def repeated_prompts(record: Record) -> list[Flag]:
    """A prompt was sent twice in the server's life: n-gram drafting would replay its own answer."""
    seen = Counter(request.input_ids_sha for request in record.requests)
    again = sum(n - 1 for n in seen.values())
    return [_flag("repeated_prompt", record, f"{again} timed requests repeat an earlier prompt")] if again else []


def unequal_inputs(records: Sequence[Record]) -> list[Flag]:
    """Methods did not get the same token ids (another chat template) or not the same requests."""
    shown: dict[str, Counter[str]] = defaultdict(Counter)
    for record in records:
        for request in record.requests:
            shown[request.key][request.input_ids_sha] += 1
    flags = []
    for record in records:
        given = {r.key: r.input_ids_sha for r in record.requests}
        other = sum(ids != shown[key].most_common(1)[0][0] for key, ids in given.items())
        if other:
            flags.append(_flag("unequal_inputs", record, f"{other} prompts have other token ids than elsewhere"))
        if missing := len(shown) - len(given):
            flags.append(_flag("unequal_inputs", record, f"{missing} prompts are missing"))
    return flags


def doubled_start(prompts: Sequence[Sequence[int]]) -> bool:
    """Whether all prompts begin with one token twice: the template wrote a start token and the tokenizer another."""
    return bool(prompts) and all(len(ids) > 1 and ids[0] == ids[1] for ids in prompts)


def ignores_end(record: Record) -> list[Flag]:
    """Answers went on past their natural end, which flatters drafting."""
    return [_flag("ignore_eos", record, "answers go on past their natural end")] if record.config.ignore_eos else []


# -- the method ----------------------------------------------------------------------------------


def not_speculating(method: str, accept_length: float | None) -> str | None:
    """A drafter whose drafts are never right; a gate that stays shut is not meant (see `gates`)."""
    kind = METHODS[method]
    if not kind.speculates or kind.gates:
        return None
    if accept_length is None:
        return "no verify pass was counted"
    if accept_length < MIN_ACCEPT_LENGTH:
        return f"accept length {accept_length:.2f}: it does not speculate (a wrong checkpoint?)"
    return None


def unexplained_speed_up(speed_ratio: float, accept_length: float | None) -> str | None:
    """Faster than the tokens a pass can explain: something else differs from the baseline."""
    limit = MAX_OVER_ACCEPT_LENGTH * (accept_length or 1.0)
    return f"{speed_ratio:.2f} times as fast on {accept_length or 1:.2f} tokens a pass" if speed_ratio > limit else None


def length_mismatch(tokens: int, baseline_tokens: int) -> str | None:
    """Answers of another total length: speeds and J/token then compare different work."""
    difference = tokens / baseline_tokens - 1
    return f"{difference:+.0%} tokens against plain" if abs(difference) > MAX_LENGTH_DIFFERENCE else None


def drift(opened: float, closed: float) -> tuple[float, str | None]:
    """Relative change between the brackets, and what is wrong with it."""
    change = closed / opened - 1
    return change, f"{change:+.1%} between the brackets" if abs(change) > MAX_DRIFT else None


def split_brackets(records: Sequence[Record]) -> list[Flag]:
    """A repetition's servers were measured in several invocations or on several machines."""
    flags = []
    first = records[0]
    for record in records[1:]:
        here, there = _machine(record), _machine(first)
        if other := [f"{name} {here[name]}, not {there[name]}" for name in here if here[name] != there.get(name)]:
            text = f"measured otherwise than the opening bracket: {'; '.join(other)}"
            flags.append(_flag("other_machine", record, text))
        elif record.run != first.run:
            flags.append(_flag("resumed", record, "measured in a later run than the opening bracket"))
    return flags


def _machine(record: Record) -> dict[str, Any]:
    machine = record.machine
    gpus = [f"{gpu['name']} (driver {gpu['driver']}, {gpu['power_limit_w']:.0f} W)" for gpu in machine["gpus"]]
    return {
        "processor": machine["cpu"],
        "commit": machine["commit"],
        "GPU": ", ".join(gpus) or "none",
        **dict.fromkeys(PACKAGES),
        **machine["packages"],
    }


def gate_failures(record: Record) -> list[Flag]:
    """The gate failed and ran gear 0 instead: the method measured is not the one that was meant."""
    failures = ((record.live or {}).get("gate") or {}).get("gate_failures", 0)
    return [_flag("gate_failures", record, f"the gate failed {failures} times")] if failures else []


def checkpoint_notes(record: Record) -> list[Flag]:
    """What was found about the checkpoints before the server started."""
    return [_flag("checkpoint", record, note) for note in record.notes]


def record_flags(record: Record) -> list[Flag]:
    """All rules that need one record."""
    rules = (
        unsettled_warm_up, tolerance_below_noise, thermal_transient, throttled, other_tenants, energy_rules,
        repeated_prompts, ignores_end, checkpoint_notes,
        gate_failures,
    )  # fmt: skip
    return [flag for rule in rules for flag in rule(record)]


def group_flags(records: Sequence[Record]) -> list[Flag]:
    """All rules that hold the records of one part and repetition against each other."""
    rules = (unequal_warm_up, unequal_inputs, split_brackets, waiting_servers)
    return [flag for rule in rules for flag in rule(records)]


def gauge_of(readings: Readings) -> Any:
    """Mean power and temperature of a stretch, for `load.warm_up`."""
    return lambda start, end: (mean_power_w(readings, start, end), mean_temperature_c(readings, start, end))


def _flag(rule: str, record: Record, text: str) -> Flag:
    point = record.datapoint
    role = "" if point.role == "method" else f" ({point.role})"
    return Flag(rule=rule, about=f"{point.part}, repetition {point.repetition}, {point.method}{role}", text=text)


def unique(flags: Iterable[Flag]) -> list[Flag]:
    """Each flag once, in order."""
    return list({(f.rule, f.about, f.text): f for f in flags}.values())
