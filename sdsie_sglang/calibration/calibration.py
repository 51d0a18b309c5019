"""Measures a running server, gear by gear, over HTTP.

Rounds over all gears, in a new order each, so that a drift of the machine meets all gears alike. Nothing else
may use the server meanwhile.
"""

import itertools
import random
import time
from collections.abc import Callable, Sequence
from typing import Any

from tqdm import tqdm

from sdsie_sglang.calibration.readings import Burst, Power, Raw, build_table
from sdsie_sglang.eval.energy import MIN_WINDOW_S, Gpu, Recorder, window_energy_j
from sdsie_sglang.eval.server import Server, ServerFailed
from sdsie_sglang.gears.cost_table import CostTable

PROMPT = list(range(100, 164))
"""64 token ids that any vocabulary has; what they say does not matter, only cycles are timed."""
SCHEDULE_CYCLES = 8
METHOD = (
    "difference of bursts of {long} and {short} tokens of equal requests, median of rounds over all gears in random "
    "order; engaging from runs that switch every {cycles} cycles"
)
POWER_METHOD = "; J from mean power of GPU 0 over {window_s:.0f} s"


def send(server: Server, gear: int | None, batch: int, round_: int, tokens: int) -> Burst:
    """One burst in the policy in force. Raises requests.HTTPError, and ServerFailed if another gear ran than `gear`."""
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
    if gear is not None and set(cycles) != {gear}:
        raise ServerFailed(f"a burst of gear {gear} ran {cycles} cycles by gear: its time says nothing of gear {gear}")
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
        # At most K + 1 tokens a cycle: the long burst must engage anew before it ends.
        self.schedule_cycles = max(1, min(SCHEDULE_CYCLES, (long - 2) // (self._switched + 2)))

    def measure(self, batches: Sequence[int], rounds: int, seed: int = 0) -> None:
        """All gears, and switching, at all batch sizes; what is there already is not measured again."""
        rng = random.Random(seed)
        with tqdm(total=rounds * len(self._cells(batches)), desc="cycles", unit="cell") as progress:
            for round_ in range(rounds):
                self._round(batches, round_, rng, progress)

    def measure_within(self, batches: Sequence[int], budget_s: float, seed: int = 0) -> tuple[int, ...]:
        """As much as fits: a round at the first batch size, whatever it takes; then one at each further size, then
        more rounds, each begun only if it should still fit. Returns the batch sizes that were measured.
        """
        rng, took_s, started = random.Random(seed), dict[int, float](), time.perf_counter()
        with tqdm(desc="measuring cycles", unit="cell") as progress:
            for round_ in itertools.count():
                for batch in batches if round_ == 0 else tuple(took_s):
                    began = time.perf_counter()
                    expected_s = took_s.get(batch, max(took_s.values(), default=0.0))
                    if took_s and began - started + expected_s > budget_s:
                        if round_ == 0:
                            continue
                        return tuple(took_s)
                    self._round((batch,), round_, rng, progress)
                    took_s[batch] = time.perf_counter() - began
        raise AssertionError("itertools.count does not end")

    def table(self, batches: Sequence[int], **about: Any) -> CostTable:
        """What was measured at these batch sizes. Raises ValueError if the readings give no costs."""
        method = METHOD.format(long=self._long, short=self._short, cycles=self.schedule_cycles)
        if self._raw.powers:
            method += POWER_METHOD.format(window_s=min(power.window_s for power in self._raw.powers))
        return build_table(self._raw, self._gears, batches, method=method, **about)

    def _cells(self, batches: Sequence[int]) -> list[tuple[int | None, int]]:
        gears: tuple[int | None, ...] = (*self._gears, None) if self._switched else self._gears
        return [(gear, batch) for batch in batches for gear in gears]

    def _round(self, batches: Sequence[int], round_: int, rng: random.Random, progress: Any) -> None:
        cells = self._cells(batches)
        rng.shuffle(cells)
        for gear, batch in cells:
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
            cycles = self.schedule_cycles
            self._server.set_policy(policy="schedule", schedule=f"{self._switched}x{cycles},0x{cycles}")
        elif gear == 0:
            self._server.set_policy(policy="plain")
        else:
            self._server.set_policy(policy="fixed", k=gear)
