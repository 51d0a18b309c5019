"""What a run would measure and about how long it takes, from what the configuration assumes."""

from collections.abc import Sequence
from pathlib import Path

from sdsie_sglang.eval.energy import MIN_PIECE_S, MIN_WINDOW_S
from sdsie_sglang.eval.plan import Assumptions, Config, Datapoint, asks, windows

WARM_UP_PROMPTS = 3
AROUND_PHASE_S = 0.6
"""The ruler's pauses before and after a phase."""


def start_s(servers: int, assume: Assumptions) -> float:
    """Of servers that start side by side: one's time, and the processor seconds of all shared by the cores."""
    return assume.start_s + servers * assume.start_cpu_s / assume.cores


def starts_s(started: Sequence[Sequence[Datapoint]], assume: Assumptions) -> float:
    """Of servers that start window by window: a method's first start is the one that compiles."""
    total_s, known = 0.0, set[str]()
    for window in started:
        new = {point.method for point in window} - known
        total_s += start_s(len(window), assume) + max((assume.first_start_s.get(m, 0.0) for m in new), default=0.0)
        known |= new
    return total_s


def phase_s(config: Config, part: str, phase: int, speed_up: float = 1.0) -> float:
    """Of one timed phase."""
    concurrency = config.phases_of(part)[phase].concurrency
    known = [c for c in config.assume.tok_per_s if c <= concurrency] or [min(config.assume.tok_per_s)]
    tokens = len(asks(config, part, phase, 0)) * min(config.tokens, config.assume.answer_tokens)
    return tokens / (config.assume.tok_per_s[max(known)] * speed_up)


def server_s(config: Config, part: str) -> float:
    """A server's life once it is up: warm-up, phases, prefill, its end."""
    warm = config.warm_up
    reading_s = max(warm.reading_s, warm.tokens / config.assume.tok_per_s[min(config.assume.tok_per_s)])
    readings = warm.readings if config.gpu is not None else 1
    warm_s = max(warm.min_s, readings * WARM_UP_PROMPTS * reading_s)
    phases = range(len(config.phases_of(part)))
    return warm_s + sum(AROUND_PHASE_S + phase_s(config, part, p) for p in phases) + config.prefill_s + (
        config.assume.stop_s
    )  # fmt: skip


def plan_text(config: Config, points: Sequence[Datapoint], folder: Path) -> str:
    """Every server and whether it is done; per part the servers, requests, tokens and seconds that are left."""
    lines = [f"{'done' if p.path(folder).exists() else 'to do':6s} {p.path(folder)}" for p in points]
    todo = [p for p in points if not p.path(folder).exists()]
    assume, total_s = config.assume, 0.0
    for part in dict.fromkeys(p.part for p in points):
        its = [p for p in todo if p.part == part]
        requests = sum(len(asks(config, part, phase, 0)) for phase in range(len(config.phases_of(part))))
        tokens = requests * min(config.tokens, assume.answer_tokens)
        started = windows(config, its)
        side_by_side = max(map(len, started), default=0)
        starting_s = starts_s(started, assume)
        idle_s = sum(p.role == "open" for p in its) * (config.idle_s if config.gpu is not None else 0.0)
        memory = "" if config.gpu is None else f" (about {side_by_side * assume.server_gib:.0f} GiB)"
        part_s = starting_s + idle_s + len(its) * server_s(config, part)
        total_s += part_s
        lines.append(
            f"part {part}: {len(its)} servers to do, each with {requests} requests of about "
            f"{tokens / requests:.0f} tokens ({len(its) * tokens:.0f} in all); about {part_s:.0f} s: "
            f"{starting_s:.0f} s of starts, {side_by_side} side by side at most{memory}, and "
            f"{server_s(config, part):.1f} s a server"
        )
        for number, phase in enumerate(config.phases_of(part)):
            lines.append(f"  {_window_text(config, part, number, phase.concurrency)}")
    lines.append(f"{len(todo)} of {len(points)} servers to do, about {total_s / 60:.1f} minutes, if {_assumed(assume)}")
    return "\n".join(lines)


def _window_text(config: Config, part: str, number: int, concurrency: int) -> str:
    plain_s = phase_s(config, part, number)
    fast_s = phase_s(config, part, number, config.assume.fastest)
    pooled_s = fast_s * config.repetitions
    seconds = f"concurrency {concurrency}: {plain_s:.1f} s a server at plain's speed, {fast_s:.1f} s for the fastest"
    if config.gpu is None:
        return f"{seconds}; no energy"
    enough = fast_s >= MIN_PIECE_S and pooled_s >= MIN_WINDOW_S
    return f"{seconds}, {pooled_s:.1f} s of energy window over {config.repetitions} repetitions" + (
        "" if enough else f": TOO SHORT ({MIN_PIECE_S:.0f} s each and {MIN_WINDOW_S:.0f} s together are needed)"
    )


def _assumed(assume: Assumptions) -> str:
    speeds = ", ".join(f"{speed:.0f} tok/s at {c}" for c, speed in sorted(assume.tok_per_s.items()))
    first = "".join(f" ({s:.0f} s more for the first {m})" for m, s in assume.first_start_s.items())
    return (
        f"a start takes {assume.start_s:.0f} s and {assume.start_cpu_s:.0f} s of {assume.cores} cores{first}, plain "
        f"makes {speeds}, the fastest {assume.fastest:.2g} times that, answers have {assume.answer_tokens:.0f} tokens"
    )
