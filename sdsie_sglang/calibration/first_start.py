"""The cost table of a first start: measured on a server of its own, before the user's opens its port.

So no user's request can meet the calibration, and if it fails nothing but the table is missing. The price is one
more loading of the models, once on a machine.
"""

import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import date
from types import FrameType
from typing import Any

import requests

from sdsie_sglang.arguments import gives, without
from sdsie_sglang.calibration.calibration import Calibration
from sdsie_sglang.calibration.readings import Raw
from sdsie_sglang.eval import machine
from sdsie_sglang.eval.energy import Gpu, NoEnergy
from sdsie_sglang.eval.server import Server, ServerFailed
from sdsie_sglang.gears.cost_table import Conditions, CostTable

START_TIMEOUT_S = 3600.0
SAYS_EVERY_S = 15
OF_THE_ADDRESS = ("--host", "--port")
OF_THE_CLIENTS = (
    "--api-key",
    "--admin-api-key",
    "--ssl-keyfile",
    "--ssl-certfile",
    "--ssl-ca-certs",
    "--ssl-keyfile-password",
)


class NotMeasured(RuntimeError):
    """There is no cost table, and why. One line."""


@dataclass(frozen=True)
class Bursts:
    """Sizes that suit a machine: tokens of a short and of a long burst's requests, and batch sizes in their order."""

    short: int
    long: int
    batches: tuple[int, ...]

    def up_to(self, running: int) -> "Bursts":
        """For a server that runs so many requests at once: a larger batch would wait in its queue."""
        return replace(self, batches=tuple(batch for batch in self.batches if batch <= running))


ON_GPU = Bursts(16, 144, (1, 4, 16))
ON_CPU = Bursts(4, 40, (1, 4))


def private_arguments(arguments: Sequence[str]) -> list[str]:
    """The user's arguments for a server that nobody else shall find or use. Raises NotMeasured."""
    kept = without(arguments, (*OF_THE_ADDRESS, *OF_THE_CLIENTS))
    for flag in OF_THE_CLIENTS:
        if gives(kept, flag):
            raise NotMeasured(f"{flag} stands in the --config file: give it on the command line")
    return [*kept, "--disable-radix-cache"]


def check_measurable(args: Any) -> None:
    """Raises NotMeasured for servers that one HTTP client on this machine cannot time.

    Args:
        args: SGLang's arguments, resolved.
    """
    for wrong, why in (
        (args.nnodes > 1, "the server spans several machines"),
        (args.dp_size > 1, "the server has several replicas"),
        (bool(args.use_ray or args.grpc_mode or args.smg_grpc_mode or args.encoder_only), "it is no HTTP server"),
    ):
        if wrong:
            raise NotMeasured(
                f"{why}: measure one with sdsie_sglang.eval.calibrate and give it with --sdsie-cost-table"
            )


def measure(
    arguments: Sequence[str],
    conditions: Conditions,
    gears: Sequence[int],
    bursts: Bursts,
    budget_s: float,
    gpu: Gpu | None,
) -> CostTable:
    """Starts a server with these arguments, measures and ends it. Settings reach it in the environment.

    Args:
        gpu: to measure energies too; None: times alone.

    Raises:
        NotMeasured: it did not start or could not be measured.
    """
    log = None
    try:
        with _ended_by_sigterm():
            started = Server.start(private_arguments(arguments), on_wait=_say_waiting, timeout_s=START_TIMEOUT_S)
            with started as server:
                log = server.log
                raw = Raw()
                calibration = Calibration(server, gears, bursts.short, bursts.long, raw, lambda: None)
                batches = calibration.measure_within(bursts.batches, budget_s)
                if gpu is not None:
                    calibration.measure_power(batches, gpu)
        return calibration.table(
            batches,
            models=conditions.models,
            where=machine.where(),
            conditions=conditions,
            machine=machine.describe(),
            command="sdsie_sglang.launch_server, first start",
            date=date.today().isoformat(),
        )
    except ServerFailed as error:
        raise NotMeasured(f"the server to measure it on failed: {str(error).splitlines()[-1]}") from None
    except (ValueError, OSError, requests.RequestException, NoEnergy) as error:
        where = f" (log: {log})" if log is not None else ""
        raise NotMeasured(f"{type(error).__name__}: {' '.join(str(error).split())[:200]}{where}") from None


def say(text: str) -> None:
    """For the person who starts the server; SGLang's own log goes the same way."""
    print(f"sdsie: {text}", file=sys.stderr, flush=True)


def _say_waiting(waited_s: float, last_log_line: str) -> None:
    if waited_s >= 1 and int(waited_s) % SAYS_EVERY_S == 0:
        say(f"starting the server to measure, {waited_s:.0f} s")


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """A polite end of the launcher ends the server that it measures as well."""

    def end(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
