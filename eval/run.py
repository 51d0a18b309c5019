"""The ruler: one fresh server a method and repetition, bracketed by plain decoding, measured into records.

    python -m sdsie_sglang.eval.run short --part draft
    python -m sdsie_sglang.eval.run my-models.yaml --out eval/results/ruler/my-models

CONFIG is a preset (smoke, short, full, batch) or a YAML file. An interrupted run goes on where it stopped; records
are never overwritten. A failed request or a wrong server ends the run with exit code 1.
"""

import argparse
import datetime
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tqdm import tqdm

from sdsie_sglang.demo import DemoError
from sdsie_sglang.eval import headline, machine, record, rules
from sdsie_sglang.eval.chat import chat_ids, decode
from sdsie_sglang.eval.checkpoints_check import checkpoint_problems, prompt_problems
from sdsie_sglang.eval.energy import Gpu, NoEnergy, Recorder, SlowReading
from sdsie_sglang.eval.load import RequestFailed, prefill_only, run_phase, warm_up
from sdsie_sglang.eval.methods import METHODS, MethodError, Models
from sdsie_sglang.eval.plan import Config, ConfigProblem, Datapoint, asks, datapoints, load_config, resolve_models
from sdsie_sglang.eval.prompts import warmup_prompts
from sdsie_sglang.eval.record import Record, Stretch
from sdsie_sglang.eval.server import Server, ServerFailed

RESULTS = headline.ROOT / "eval" / "results" / "ruler"
EVERY_SERVER = ["--disable-radix-cache"]
FREE_TIMEOUT_S = 15.0
SETTLE_S = 0.3
"""Between stretches, so that an edge of the energy counter lies on each side of each."""


class Refused(ValueError):
    """A run that must not start; one line."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m sdsie_sglang.eval.run",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("config")
    parser.add_argument("--part", action="append", help="measure only this part (may be repeated)")
    parser.add_argument("--out", type=Path, help=f"default: {RESULTS.relative_to(headline.ROOT)}/NAME")
    parser.add_argument("--plan", action="store_true", help="print what would be measured, and stop")
    args = parser.parse_args(argv)
    try:
        config = load_config(args.config)
        if unknown := set(args.part or ()) - set(config.parts):
            raise ConfigProblem(f"no part {sorted(unknown)}; there are {', '.join(config.parts)}")
        points = datapoints(config, args.part)
        folder = args.out or RESULTS / config.name
        if args.plan:
            return show_plan(config, points, folder)
        run(config, points, folder)
    except (ConfigProblem, MethodError, Refused, RequestFailed, ServerFailed, DemoError, record.Damaged) as error:
        print(f"ruler: {error}", file=sys.stderr)
        return 1
    return 0


def show_plan(config: Config, points: Sequence[Datapoint], folder: Path) -> int:
    for point in points:
        state = "done" if point.path(folder).exists() else "to do"
        print(f"{state:6s} {point.path(folder)}")
    print(
        f"{len(points)} servers, each with {sum(len(asks(config, p, 0)) for p in range(len(config.phases)))} requests"
    )
    return 0


def run(config: Config, points: Sequence[Datapoint], folder: Path) -> None:
    """Measures what has no record yet."""
    claim(config, folder)
    models = resolve_models(config)
    for point in points:
        METHODS[point.method].arguments(models)  # raises before anything is measured
    for problem in checkpoint_problems(models, {point.method for point in points}):
        raise Refused(problem)
    this_run = datetime.datetime.now(datetime.UTC).strftime("%Y%m%dT%H%M%SZ")
    todo = [point for point in points if not _is_done(point, config, folder)]
    each = sum(len(asks(config, phase, 0)) for phase in range(len(config.phases)))
    with tqdm(total=len(points) * each, initial=(len(points) - len(todo)) * each, unit="request") as bar:
        for point in todo:
            bar.set_description(f"{point.part} {point.repetition} {point.method}")
            done = measure(config, point, models, this_run, bar.update)
            record.write(done, point.path(folder))
            for flag in rules.record_flags(done):
                bar.write(f"  {flag.rule}: {flag.about}: {flag.text}")
    print(f"records: {folder}; next: python -m sdsie_sglang.eval.report {folder}")


def claim(config: Config, folder: Path) -> None:
    """Makes the folder this configuration's. Raises Refused if it is another's."""
    path = folder / "plan.json"
    if path.exists():
        known = json.loads(path.read_text())
        if known["digest"] != config.digest():
            raise Refused(f"{folder} holds another configuration: choose another folder (--out)")
        return
    if folder.exists() and any(folder.iterdir()):
        raise Refused(f"{folder} holds other files: choose another folder (--out)")
    folder.mkdir(parents=True, exist_ok=True)
    order = [point.model_dump() for point in datapoints(config)]
    plan = {"digest": config.digest(), "config": config.model_dump(mode="json"), "order": order}
    path.write_text(json.dumps(plan, indent=1) + "\n")


def _is_done(point: Datapoint, config: Config, folder: Path) -> bool:
    path = point.path(folder)
    if not path.exists():
        return False
    known = record.read(path)
    if known.config_digest != config.digest() or known.datapoint != point:
        raise Refused(f"{path} belongs to another plan")
    return True


def open_gpu(config: Config) -> Gpu | None:
    """The GPU whose energy is read; None on a machine without one. Raises Refused if it has no counter."""
    if config.gpu is None or not machine.describe()["gpus"]:
        return None
    try:
        return Gpu(config.gpu)
    except NoEnergy as error:
        raise Refused(f"{error}; set gpu: null to measure without energy") from None


def wait_until_free(gpu: Gpu, clock: Any) -> SlowReading:
    """The GPU's state once the last server has left it, or after `FREE_TIMEOUT_S` (rules.other_tenants says so)."""
    end = clock() + FREE_TIMEOUT_S
    while True:
        state = gpu.slow(clock())
        if (not state.processes and state.memory_gib <= rules.MAX_FOREIGN_GIB) or clock() > end:
            return state
        time.sleep(0.5)


def measure(config: Config, point: Datapoint, models: Models, this_run: str, on_done: Any = lambda: None) -> Record:
    """One datapoint. Raises ServerFailed or RequestFailed; then there is no record."""
    method, gpu = METHODS[point.method], open_gpu(config)
    zero = time.perf_counter()

    def clock() -> float:
        return time.perf_counter() - zero

    before = None
    if gpu is not None:
        state = wait_until_free(gpu, clock)
        before = {"memory_gib": state.memory_gib, "processes": float(state.processes or 0)}
    trace = Path(tempfile.mkdtemp(prefix="sdsie-ruler-")) / "cycles.jsonl"
    arguments = [*method.arguments(models), *EVERY_SERVER, *config.sglang]
    if config.trace and method.policy is not None:
        arguments += ["--sdsie-trace", str(trace)]
    warm = [(prompt.id, chat_ids(models.target, prompt.text)) for prompt in warmup_prompts()]
    work = [
        [(ask, chat_ids(models.target, ask.text)) for ask in asks(config, phase, point.repetition)]
        for phase in range(len(config.phases))
    ]
    if rules.doubled_start([ids for items in work for _, ids in items]):
        raise Refused(f"prompts for {models.target} begin with two start tokens: its chat template is used wrongly")
    with ExitStack() as stack:
        server = stack.enter_context(Server.start(arguments, env=config.env))
        info = server.info()
        if wrong := method.mismatches(info, models):
            raise ServerFailed(f"{point.method}: not the server it should be: {'; '.join(wrong)}")
        recorder = stack.enter_context(Recorder(gpu, clock)) if gpu is not None else None
        readings = recorder.readings if recorder is not None else None
        idle = _stretch(clock, lambda: time.sleep(config.idle_s)) if config.idle_s and gpu is not None else None
        gauge = rules.gauge_of(readings) if readings is not None else None
        warm_readings, warm_settled = warm_up(server, warm, config.warm_up, gauge, clock)
        requests, stretches = [], []
        for number, (phase, items) in enumerate(zip(config.phases, work, strict=True)):
            time.sleep(SETTLE_S)
            started = clock()
            requests += run_phase(
                server, items, phase=number, concurrency=phase.concurrency, tokens=config.tokens,
                ignore_eos=config.ignore_eos, clock=clock, on_done=on_done,
            )  # fmt: skip
            stretches.append(Stretch(start_s=started, end_s=clock()))
            time.sleep(SETTLE_S)
        prefill, counted = None, (0, 0)
        if config.prefill_s:
            started = clock()
            counted = prefill_only(server, warm, config.prefill_s, clock)
            prefill = Stretch(start_s=started, end_s=clock())
            time.sleep(SETTLE_S)
        live = server.info()["internal_states"][0].get("sdsie")
        startup_s = server.startup_s
    return Record(
        datapoint=point,
        config=config,
        config_digest=config.digest(),
        run=this_run,
        date=headline.today(),
        machine=machine.describe(),
        program=record.portable(headline.this_command()),
        command=["python", "-m", "sdsie_sglang.launch_server", *map(record.portable, arguments)],
        server_info=_plain_values(info),
        live=live,
        startup_s=startup_s,
        before=before,
        idle=idle,
        warm_up=warm_readings,
        warm_up_settled=warm_settled,
        phases=stretches,
        prefill=prefill,
        prefill_requests=counted[0],
        prefill_tokens=counted[1],
        requests=requests,
        readings=readings,
        notes=prompt_problems(models, point.method, decode(models.target, warm[0][1])),
        trace=_read_trace(trace, {request.rid for request in requests}),
    )


def _stretch(clock: Any, work: Any) -> Stretch:
    started = clock()
    work()
    return Stretch(start_s=started, end_s=clock())


def _plain_values(info: dict[str, Any]) -> dict[str, Any]:
    """Server arguments without what is empty, secret or changes by itself."""
    kept = {
        name: record.portable(value) if isinstance(value, str) else value
        for name, value in info.items()
        if isinstance(value, (str, int, float, bool)) and value != ""
    }
    return {name: value for name, value in kept.items() if "key" not in name and name not in ("launch_command", "port")}


def _read_trace(path: Path, rids: set[str]) -> list[dict[str, Any]] | None:
    """Cycles of the timed requests."""
    if not path.exists():
        return None
    cycles = [json.loads(line) for line in path.read_text().splitlines()]
    return [cycle for cycle in cycles if rids & set(cycle["rids"])]


if __name__ == "__main__":
    sys.exit(main())
