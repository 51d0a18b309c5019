"""Measures what a cycle of each gear costs on this machine, for the cost gate and the simulator.

    python -m sdsie_sglang.eval.calibrate COSTS.json                            # the demo pair
    python -m sdsie_sglang.eval.calibrate COSTS.json --target DIR --draft DIR   # your models
    python -m sdsie_sglang.eval.calibrate COSTS.json --url http://host:30000    # a running server's

Random weights of any shape: a folder with config.json alone and `--server-args "--load-format dummy"`.
Beside COSTS.json lies COSTS.raw.json with every burst; a run that was stopped goes on from there.

A burst is one batch of equal requests, so that all of them need the same cycles. ms a cycle = (time of a long
burst - time of a short one) / (their cycles), in which prefill and whatever else a request costs once cancel.
Rounds over all gears, in a new order each, so that a drift of the machine meets all gears alike. J a cycle = mean
power over at least 10 s of such bursts x ms a cycle.
"""

import argparse
import random
import shlex
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict
from tqdm import tqdm

from sdsie_sglang.eval import machine
from sdsie_sglang.eval.energy import MIN_WINDOW_S, Gpu, NoEnergy, Recorder, window_energy_j
from sdsie_sglang.eval.headline import this_command, today
from sdsie_sglang.eval.server import Server
from sdsie_sglang.gears.cost_table import Cell, CostTable, Engaging
from sdsie_sglang.gears.limits import MAX_K

PROMPT = list(range(100, 164))
"""64 token ids that any vocabulary has; what they say does not matter, only cycles are timed."""
SCHEDULE_CYCLES = 8
MODEL_KEYS = ("model_path", "speculative_draft_model_path")
METHOD = (
    "difference of long and short bursts of equal requests, median of {rounds} rounds over all gears in random order, "
    "{tokens} tokens a request; engaging from runs that switch every {cycles} cycles; J from mean power over "
    "{window:.0f} s"
)


class Burst(BaseModel):
    """One batch of equal requests, in one policy.

    Args:
        gear: K, or None for the switching run.
        cycles: of each request, by gear; switches: of each request.
        wall_s: from sending to the last answer.
    """

    model_config = ConfigDict(frozen=True)

    gear: int | None
    batch: int
    round: int
    tokens: int
    cycles: dict[int, int]
    switches: int
    wall_s: float


class Power(BaseModel):
    """Mean power while one gear ran at one batch size, in W."""

    model_config = ConfigDict(frozen=True)

    gear: int
    batch: int
    watts: float
    window_s: float


class Raw(BaseModel):
    """All readings of a calibration, kept after each burst."""

    bursts: list[Burst] = []
    powers: list[Power] = []

    def measured(self, gear: int | None, batch: int, round_: int) -> bool:
        """Whether both bursts of this round are there."""
        return sum((b.gear, b.batch, b.round) == (gear, batch, round_) for b in self.bursts) >= 2

    def pairs(self, gear: int | None, batch: int) -> list[tuple[Burst, Burst]]:
        """Short and long burst of each round."""
        mine = [b for b in self.bursts if (b.gear, b.batch) == (gear, batch)]
        rounds = sorted({b.round for b in mine})
        both = [sorted((b for b in mine if b.round == r), key=lambda b: b.tokens) for r in rounds]
        return [(of_round[0], of_round[-1]) for of_round in both if len(of_round) >= 2]


def cycle_ms(short: Burst, long: Burst) -> float:
    """Milliseconds of a cycle. Raises ValueError if the long burst needed no more cycles."""
    more = sum(long.cycles.values()) - sum(short.cycles.values())
    if more <= 0:
        raise ValueError(f"{long.tokens} tokens took no more cycles than {short.tokens}: ask for more tokens")
    return 1000.0 * (long.wall_s - short.wall_s) / more


def engaging_ms(short: Burst, long: Burst, ms: dict[int, float]) -> float:
    """What going from gear 0 to K costs beyond the cycles themselves, of a run that starts in K."""
    steady = sum(ms[k] * (long.cycles.get(k, 0) - short.cycles.get(k, 0)) for k in ms)
    engagements = long.switches // 2 - short.switches // 2
    if engagements <= 0:
        raise ValueError("the run never engaged anew: ask for more tokens")
    return (1000.0 * (long.wall_s - short.wall_s) - steady) / engagements


def build_table(raw: Raw, gears: Sequence[int], batches: Sequence[int], **about: Any) -> CostTable:
    """Medians and ranges over the rounds; energies only where every gear has them."""
    watts = {(power.gear, power.batch): power.watts for power in raw.powers}
    known = all((k, batch) in watts for k in gears for batch in batches)
    cells, engaging = [], []
    for batch in batches:
        ms = {}
        for k in gears:
            values = [cycle_ms(*pair) for pair in raw.pairs(k, batch)]
            ms[k] = statistics.median(values)
            joules = watts[k, batch] * ms[k] / 1000.0 if known else None
            cells.append(Cell(k=k, batch=batch, ms=ms[k], ms_low=min(values), ms_high=max(values), joules=joules))
        switching = [engaging_ms(*pair, ms) for pair in raw.pairs(None, batch)]
        if switching:
            engaging.append(Engaging(batch=batch, ms=max(0.0, statistics.median(switching))))
    return CostTable(cells=tuple(cells), engaging=tuple(engaging), **about)


def send(server: Server, gear: int | None, batch: int, round_: int, tokens: int) -> Burst:
    """One burst in the policy in force. Raises requests.HTTPError."""
    started = time.perf_counter()
    response = server.post(
        "/generate",
        {
            "input_ids": [PROMPT] * batch,
            "sampling_params": {"temperature": 0.0, "max_new_tokens": tokens, "ignore_eos": True},
        },
    )
    wall_s = time.perf_counter() - started
    response.raise_for_status()
    stats = [done["meta_info"]["sdsie"] for done in response.json()]
    longest = max(stats, key=lambda each: sum(each["cycles"].values()))
    cycles = {int(k): n for k, n in longest["cycles"].items()}
    return Burst(
        gear=gear,
        batch=batch,
        round=round_,
        tokens=tokens,
        cycles=cycles,
        switches=longest["switches"],
        wall_s=wall_s,
    )


class Calibration:
    """Args:
    short, long: tokens of a burst's requests.
    keep: called after each reading, to save it.
    """

    def __init__(
        self, server: Server, gears: Sequence[int], short: int, long: int, raw: Raw, keep: Callable[[], None]
    ) -> None:
        self._server = server
        self._gears = tuple(gears)
        self._short, self._long = short, long
        self._raw = raw
        self._keep = keep
        self._switched = max((k for k in gears if k <= 5), default=0)

    def measure(self, batches: Sequence[int], rounds: int, seed: int = 0) -> None:
        """All gears, and switching, at all batch sizes; what is there already is not measured again."""
        rng = random.Random(seed)
        what: list[tuple[int | None, int]] = [(k, batch) for batch in batches for k in self._gears]
        if self._switched:
            what += [(None, batch) for batch in batches]
        with tqdm(total=rounds * len(what), desc="cycles", unit="cell") as progress:
            for round_ in range(rounds):
                rng.shuffle(what)
                for gear, batch in what:
                    if not self._raw.measured(gear, batch, round_):
                        self._measure_cell(gear, batch, round_)
                    progress.update()

    def measure_power(self, batches: Sequence[int], gpu: Gpu, window_s: float = MIN_WINDOW_S) -> None:
        """Mean power of each gear and batch size, over bursts one after another."""
        done = {(power.gear, power.batch) for power in self._raw.powers}
        todo = [(k, batch) for batch in batches for k in self._gears if (k, batch) not in done]
        for gear, batch in tqdm(todo, desc="energy", unit="cell"):
            self._shift(gear)
            send(self._server, gear, batch, -1, self._long)
            with Recorder(gpu) as recorder:
                started = time.perf_counter()
                while time.perf_counter() - started <= window_s + 0.5:
                    send(self._server, gear, batch, -1, self._long)
                ended = time.perf_counter()
            watts = window_energy_j(recorder.readings, started, ended, min_s=window_s) / (ended - started)
            self._raw.powers.append(Power(gear=gear, batch=batch, watts=watts, window_s=ended - started))
            self._keep()

    def _measure_cell(self, gear: int | None, batch: int, round_: int) -> None:
        self._shift(gear)
        if round_ == 0:
            send(self._server, gear, batch, -1, self._short)  # warms up, not kept
        for tokens in (self._short, self._long):
            self._raw.bursts.append(send(self._server, gear, batch, round_, tokens))
        self._keep()

    def _shift(self, gear: int | None) -> None:
        if gear is None:
            self._server.set_policy(
                policy="schedule", schedule=f"{self._switched}x{SCHEDULE_CYCLES},0x{SCHEDULE_CYCLES}"
            )
        elif gear == 0:
            self._server.set_policy(policy="plain")
        else:
            self._server.set_policy(policy="fixed", k=gear)


class Attached(Server):
    """A server that somebody else started and will stop."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")

    def stop(self) -> None:
        pass


def open_server(options: argparse.Namespace) -> Server:
    """The one at `--url`, or a new one with the models named, or with the demo's."""
    if options.url:
        return Attached(options.url)
    target, draft = options.target, options.draft
    if target is None:
        from sdsie_sglang.demo import compose

        models = compose()
        target, draft = models.target, models.draft
    gears = ",".join(map(str, options.gears or range(MAX_K + 1)))
    arguments = ["--model-path", str(target), "--speculative-draft-model-path", str(draft), "--sdsie-gears", gears]
    arguments += ["--sdsie-policy", "plain", "--disable-radix-cache", "--max-running-requests", str(max(options.batch))]
    return Server.start([*arguments, *shlex.split(options.server_args)])


def policy_of(server: Server) -> dict[str, Any]:
    """The policy in force, as `set_policy` takes it."""
    settings = {k: v for k, v in server.sdsie()["gate"]["policy"].items() if v is not None}
    return {**settings, "schedule": ",".join(map(str, settings["schedule"]))}


def open_gpu() -> Gpu | None:
    """None, with a line that says why, where energy cannot be measured."""
    try:
        return Gpu()
    except NoEnergy as error:
        print(f"no energies: {error}")
        return None


def main() -> None:
    """Measure and write the table."""
    parser = argparse.ArgumentParser(
        prog="python -m sdsie_sglang.eval.calibrate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--url", help="a running server, whose policy is put back afterwards")
    parser.add_argument("--target", type=Path)
    parser.add_argument("--draft", type=Path)
    parser.add_argument("--server-args", default="", help="more arguments of a new server, in one string")
    parser.add_argument("--gears", type=int, nargs="+", help="default: all that the server has prepared")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--short", type=int, default=16, help="tokens of a short burst's requests")
    parser.add_argument("--long", type=int, default=144, help="tokens of a long burst's requests")
    parser.add_argument("--no-energy", action="store_true")
    options = parser.parse_args()
    if (options.target is None) != (options.draft is None):
        parser.error("--target and --draft go together")
    raw_path = options.out.with_suffix(".raw.json")
    raw = Raw.model_validate_json(raw_path.read_text()) if raw_path.exists() else Raw()
    options.out.parent.mkdir(parents=True, exist_ok=True)

    def keep() -> None:
        raw_path.write_text(raw.model_dump_json() + "\n")

    opened = open_server(options)
    with opened if not options.url else nullcontext(opened) as server:
        live = server.sdsie()["gate"]
        gears = sorted({0, *(options.gears or live["gears"])} & set(live["gears"]))
        before = policy_of(server)
        info = server.info()
        calibration = Calibration(server, gears, options.short, options.long, raw, keep)
        try:
            calibration.measure(options.batch, options.rounds)
            gpu = None if options.no_energy else open_gpu()
            if gpu is not None:
                calibration.measure_power(options.batch, gpu)
        finally:
            server.set_policy(**before)
    table = build_table(
        raw,
        gears,
        options.batch,
        models=" and ".join(Path(info[key]).name for key in MODEL_KEYS) + f", {info['dtype']}",
        where=machine.where(),
        method=METHOD.format(rounds=options.rounds, tokens=options.long, cycles=SCHEDULE_CYCLES, window=MIN_WINDOW_S),
        machine=machine.describe(),
        command=this_command(),
        date=today(),
    )
    options.out.write_text(table.model_dump_json(indent=1) + "\n")
    print_table(table)


def print_table(table: CostTable) -> None:
    """One line a batch size."""
    print("batch   " + "".join(f"gear {k:<7}" for k in table.gears) + "engaging")
    for batch in table.batches:
        costs = table.at(batch)
        print(f"{batch:<8}" + "".join(f"{costs.ms[k]:<9.2f}ms " for k in table.gears) + f"{costs.engaging_ms:.2f} ms")


if __name__ == "__main__":
    main()
