"""Measures what a cycle of each gear costs on this machine, for the cost gate and the simulator.

    python -m sdsie_sglang.eval.calibrate COSTS.json                            # the demo pair
    python -m sdsie_sglang.eval.calibrate COSTS.json --target DIR --draft DIR   # your models
    python -m sdsie_sglang.eval.calibrate COSTS.json --url http://host:30000    # a running server's

Random weights of any shape: a folder with config.json alone and `--server-args "--load-format dummy"`. Several
GPUs: `--tp 2`. Beside COSTS.json lies COSTS.raw.json with every burst; a run that was stopped goes on from there.
How it measures: `sdsie_sglang/calibration`.
"""

import argparse
import shlex
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from sdsie_sglang.calibration.calibration import Calibration
from sdsie_sglang.calibration.readings import Raw
from sdsie_sglang.eval import machine
from sdsie_sglang.eval.arguments import count, measuring, one_line, replace_text
from sdsie_sglang.eval.energy import Gpu, NoEnergy
from sdsie_sglang.eval.headline import this_command, today
from sdsie_sglang.eval.server import Server
from sdsie_sglang.gears.cost_table import Conditions, CostTable
from sdsie_sglang.gears.limits import MAX_K
from sdsie_sglang.gears.settings import first_error


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
    arguments += ["--tp-size", str(options.tp)]
    return Server.start([*arguments, *shlex.split(options.server_args)])


def policy_of(server: Server) -> dict[str, Any]:
    """The policy in force, as `set_policy` takes it: the cost table is the server's own."""
    gate = server.sdsie()["gate"]
    settings = {k: v for k, v in gate["policy"].items() if v is not None and k != "cost_table"}
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
    parser.add_argument("--target", type=Path, help="default: the demo's")
    parser.add_argument("--draft", type=Path, help="goes with --target")
    parser.add_argument(
        "--tp", type=count, default=1, help="GPUs of a new server, which share each tensor; J are GPU 0's"
    )
    parser.add_argument("--server-args", default="", help="more arguments of a new server, in one string")
    parser.add_argument(
        "--gears", type=int, nargs="+", choices=range(MAX_K + 1), help="default: all that the server has prepared"
    )
    parser.add_argument("--batch", type=count, nargs="+", default=[1, 4, 16], help="requests at a time (1 4 16)")
    parser.add_argument("--rounds", type=count, default=5, help="over all gears and batch sizes (5)")
    parser.add_argument("--short", type=count, default=16, help="tokens of a short burst's requests")
    parser.add_argument("--long", type=count, default=144, help="tokens of a long burst's requests")
    parser.add_argument("--no-energy", action="store_true", help="ms alone, also on a GPU")
    options = parser.parse_args()
    if (options.target is None) != (options.draft is None):
        parser.error("--target and --draft go together")
    if options.long <= options.short:
        parser.error("--long must be more than --short: a cycle's cost is what they differ by")
    raw_path = options.out.with_suffix(".raw.json")
    with one_line(parser):
        raw = Raw.model_validate_json(raw_path.read_text()) if raw_path.exists() else Raw()
        options.out.parent.mkdir(parents=True, exist_ok=True)

    def keep() -> None:
        replace_text(raw_path, raw.model_dump_json() + "\n")

    with measuring("calibrate"):
        measure(options, raw, raw_path, keep)


def measure(options: argparse.Namespace, raw: Raw, raw_path: Path, keep: Callable[[], None]) -> None:
    """All of it on a server, and the table. Raises what servers and files do; SystemExit, with a line, for readings
    that are another calibration's or give no costs."""
    opened = open_server(options)
    with opened if not options.url else nullcontext(opened) as server:
        live = server.sdsie()
        prepared = live["gate"]["gears"]
        conditions = Conditions(**live["conditions"])
        try:
            raw.claim(conditions, options.short, options.long)
        except ValueError as error:
            print(f"calibrate: {raw_path} {error}: choose another file", file=sys.stderr)
            raise SystemExit(2) from None
        gears = sorted({0, *(options.gears or prepared)} & set(prepared))
        before = policy_of(server)
        calibration = Calibration(server, gears, options.short, options.long, raw, keep)
        try:
            calibration.measure(options.batch, options.rounds)
            gpu = None if options.no_energy else open_gpu()
            if gpu is not None:
                calibration.measure_power(options.batch, gpu)
        finally:
            server.set_policy(**before)
    try:
        table = calibration.table(
            options.batch,
            models=conditions.models,
            where=machine.where(),
            conditions=conditions,
            machine=machine.describe(),
            command=this_command(),
            date=today(),
        )
    except ValidationError as error:
        print(f"calibrate: these readings give no costs ({first_error(error)}): give more --rounds", file=sys.stderr)
        raise SystemExit(1) from None
    except ValueError as error:
        print(f"calibrate: these readings give no costs: {error}", file=sys.stderr)
        raise SystemExit(1) from None
    replace_text(options.out, table.model_dump_json(indent=1) + "\n")
    print_table(table)


def print_table(table: CostTable) -> None:
    """One line a batch size."""
    print("batch   " + "".join(f"gear {k:<7}" for k in table.gears) + "engaging")
    for batch in table.batches:
        costs = table.at(batch)
        print(f"{batch:<8}" + "".join(f"{costs.ms[k]:<9.2f}ms " for k in table.gears) + f"{costs.engaging_ms:.2f} ms")


if __name__ == "__main__":
    main()
