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
        starts = [len(window) for window in windows(config, its)]
        starting_s = sum(start_s(n, assume) for n in starts)
        idle_s = sum(p.role == "open" for p in its) * (config.idle_s if config.gpu is not None else 0.0)
        part_s = starting_s + idle_s + len(its) * server_s(config, part)
        total_s += part_s
        lines.append(
            f"part {part}: {len(its)} servers to do, each with {requests} requests of about "
            f"{tokens / requests:.0f} tokens ({len(its) * tokens:.0f} in all); about {part_s:.0f} s: "
            f"{starting_s:.0f} s of starts, {max(starts, default=0)} side by side at most (about "
            f"{max(starts, default=0) * assume.server_gib:.0f} GiB), and {server_s(config, part):.1f} s a server"
        )
        for number, phase in enumerate(config.phases_of(part)):
            lines.append(f"  {_window_text(config, part, number, phase.concurrency)}")
    lines.append(f"{len(todo)} of {len(points)} servers to do, about {total_s / 60:.1f} minutes, if {_assumed(assume)}")
    return "\n".join(lines)


def _window_text(config: Config, part: str, number: int, concurrency: int) -> str:
    plain_s = phase_s(config, part, number)
    fast_s = phase_s(config, part, number, config.assume.fastest)
    pooled_s = fast_s * config.repetitions
    enough = config.gpu is None or (fast_s >= MIN_PIECE_S and pooled_s >= MIN_WINDOW_S)
    return (
        f"concurrency {concurrency}: {plain_s:.1f} s a server at plain's speed, {fast_s:.1f} s for the fastest, "
        f"{pooled_s:.1f} s of energy window over {config.repetitions} repetitions"
        + ("" if enough else f": TOO SHORT ({MIN_PIECE_S:.0f} s each and {MIN_WINDOW_S:.0f} s together are needed)")
    )


def _assumed(assume: Assumptions) -> str:
    speeds = ", ".join(f"{speed:.0f} tok/s at {c}" for c, speed in sorted(assume.tok_per_s.items()))
    return (
        f"a start takes {assume.start_s:.0f} s and {assume.start_cpu_s:.0f} s of {assume.cores} cores, plain makes "
        f"{speeds}, the fastest {assume.fastest:.2g} times that, answers have {assume.answer_tokens:.0f} tokens"
    )
