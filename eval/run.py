"""The ruler: one fresh server a method and repetition, bracketed by plain decoding, measured into records.

    python -m sdsie_sglang.eval.run short --part one --plan
    python -m sdsie_sglang.eval.run short --part one
    python -m sdsie_sglang.eval.run my-models.yaml --out eval/results/ruler/my-models

CONFIG is a preset (smoke, short, full, batch, drafts) or a YAML file. An interrupted run goes on where it stopped;
records are never overwritten. A failed request or a wrong server ends the run with exit code 1, a configuration or
folder that cannot be used with 2. Where the configuration says so (`start_ahead`), servers start side by side, and then
wait, paused, until it is their turn.
"""

import argparse
import contextlib
import datetime
import fcntl
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from tqdm import tqdm

from sdsie_sglang.demo import DemoError
from sdsie_sglang.eval import headline, machine, record, rules
from sdsie_sglang.eval.arguments import read_json
from sdsie_sglang.eval.chat import chat_ids, decode
from sdsie_sglang.eval.checkpoints_check import checkpoint_problems, prompt_problems
from sdsie_sglang.eval.energy import Gpu, NoEnergy, Recorder
from sdsie_sglang.eval.fleet import Fleet, Start
from sdsie_sglang.eval.load import RequestFailed, prefill_only, run_phase, warm_up
from sdsie_sglang.eval.methods import METHODS, MethodError, Models
from sdsie_sglang.eval.plan import (
    Config,
    ConfigProblem,
    Datapoint,
    asks,
    datapoints,
    load_config,
    resolve_models,
    windows,
    with_other_draft,
)
from sdsie_sglang.eval.prompts import warmup_prompts
from sdsie_sglang.eval.record import Record, Stretch
from sdsie_sglang.eval.run_plan import plan_text
from sdsie_sglang.eval.server import Server, ServerFailed, ends_on_signals
from sdsie_sglang.eval.tenants import Tenants

RESULTS = headline.ROOT / "eval" / "results" / "ruler"
EVERY_SERVER = ["--disable-radix-cache", "--sleep-on-idle"]
"""A scheduler without requests would poll all the time: one core for each server until it is paused."""
PLAN = "plan.json"
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
    parser.add_argument(
        "--repetition",
        action="append",
        type=int,
        help="only this one, from 0 (may be repeated); also one more than the configuration asks for",
    )
    parser.add_argument("--start-ahead", type=int, help="servers started side by side; default: the configuration's")
    parser.add_argument("--other-draft", type=Path, metavar="DIR", help="a second draft, measured beside the first")
    parser.add_argument("--out", type=Path, help=f"default: {RESULTS.relative_to(headline.ROOT)}/NAME")
    parser.add_argument("--plan", action="store_true", help="print what would be measured and how long, and stop")
    args = parser.parse_args(argv)
    try:
        config = load_config(args.config)
        if unknown := set(args.part or ()) - set(config.parts):
            raise ConfigProblem(f"no part {sorted(unknown)}; there are {', '.join(config.parts)}")
        if any(repetition < 0 for repetition in args.repetition or ()):
            raise ConfigProblem("repetitions are counted from 0")
        if args.start_ahead is not None:
            if args.start_ahead < 1:
                raise ConfigProblem("--start-ahead must be 1 or more")
            config = config.model_copy(update={"start_ahead": args.start_ahead})
        if args.other_draft is not None:
            config = with_other_draft(config, args.other_draft)
        points = datapoints(config, args.part, args.repetition and dict.fromkeys(args.repetition))
        folder = args.out or RESULTS / config.name
        if args.plan:
            print(plan_text(config, points, folder))
            return 0
        with ends_on_signals():
            run(config, points, folder)
    except KeyboardInterrupt:
        print("ruler: interrupted; the same command goes on from here", file=sys.stderr)
        return 130
    except (ConfigProblem, MethodError, Refused, DemoError, record.Damaged) as error:
        print(f"ruler: {error}", file=sys.stderr)
        return 2
    except (RequestFailed, ServerFailed, NoEnergy) as error:
        print(f"ruler: {error}", file=sys.stderr)
        return 1
    except OSError as error:  # a disk that is full, say: what was written so far is whole
        print(f"ruler: {error}; the same command goes on from here", file=sys.stderr)
        return 1
    return 0


def run(config: Config, points: Sequence[Datapoint], folder: Path) -> None:
    """Measures what has no record yet."""
    models = resolve_models(config)
    for point in points:
        METHODS[point.method].arguments(models)  # raises before anything is measured
    for problem in checkpoint_problems(models, {point.method for point in points}):
        raise Refused(problem)
    claim(config, folder)
    with alone(folder):
        _run(config, points, models, folder)


def _run(config: Config, points: Sequence[Datapoint], models: Models, folder: Path) -> None:
    this_run = datetime.datetime.now(datetime.UTC).strftime("%Y%m%dT%H%M%SZ")
    todo = [point for point in points if not _is_done(point, config, folder)]
    requests = {point: _requests(config, point) for point in points}
    gpu, failed = open_gpu(config), []
    with tqdm(total=sum(requests.values()), unit="request") as bar:
        bar.update(sum(requests.values()) - sum(requests[point] for point in todo))
        for window in windows(config, todo):
            failed += measure_window(config, window, models, gpu, this_run, folder, bar)
    if failed:
        raise ServerFailed("not measured, because they did not start: " + "; ".join(failed))
    print(f"records: {folder}; next: python -m sdsie_sglang.eval.report {folder}")


def claim(config: Config, folder: Path) -> None:
    """Makes the folder this configuration's. Raises Refused if it is another's."""
    path = folder / PLAN
    if not path.exists():
        if folder.exists() and any(file.suffix != record.SCRATCH for file in folder.iterdir()):
            raise Refused(f"{folder} holds other files: choose another folder (--out)")
        order = [point.model_dump() for point in datapoints(config)]
        plan = {"digest": config.digest(), "config": config.model_dump(mode="json"), "order": order}
        with contextlib.suppress(FileExistsError):  # another run was quicker: it holds that run's plan
            record.write_new(path, json.dumps(plan, indent=1) + "\n")
    try:
        known = read_json(path, "the plan")
    except ValueError as error:
        raise Refused(f"{error}: choose another folder (--out)") from None
    if known.get("digest") != config.digest():
        raise Refused(f"{folder} holds another configuration: choose another folder (--out)")


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """One run at a time writes into a folder. Raises Refused."""
    with (folder / PLAN).open() as plan:
        try:
            fcntl.flock(plan, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Refused(f"another run is measuring into {folder}") from None
        yield


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


def measure_window(
    config: Config, window: Sequence[Datapoint], models: Models, gpu: Gpu | None, this_run: str, folder: Path, bar: Any
) -> list[str]:
    """Starts all servers of a window, then measures and ends one after another, the rest being paused; which did not
    start, and why.

    Raises ServerFailed or RequestFailed; then what was measured so far has its records.
    """
    tenants = Tenants(gpu) if gpu is not None else None
    if tenants is not None:
        tenants.wait_until_free()
    traces = [Path(tempfile.mkdtemp(prefix="sdsie-ruler-")) / "cycles.jsonl" for _ in window]
    commands = [arguments_of(config, point, models, trace) for point, trace in zip(window, traces, strict=True)]
    starts = [
        Start(str(point.path(Path())), tuple(arguments), must=point.role != "method")
        for point, arguments in zip(window, commands, strict=True)
    ]
    with Fleet(starts, config.env) as fleet:
        chat_ids(models.target, warmup_prompts()[0].text)  # loads the tokenizer while the servers start
        servers = fleet.ready(lambda up: bar.set_description(f"starting {len(window)} servers, {up} are up"))
        if tenants is not None:
            tenants.started(len(servers), fleet.process_ids())
        for number in servers:
            point, server = window[number], fleet.take_turn(number)
            bar.set_description(f"{point.part} {point.repetition} {point.method}")
            before = None
            if tenants is not None:
                before = {**tenants.others(), "waiting": float(fleet.waiting() - 1)}

            def end(number: int = number) -> None:
                fleet.end(number, gently=config.trace)

            if not server.is_up():
                raise ServerFailed(f"{point.method}: the server does not answer any more:\n{server.log_tail()}")
            done = measure(
                config, point, models, server, commands[number], this_run, gpu=gpu, before=before, on_done=bar.update,
                end=partial(tenants.ended, end) if tenants is not None else end, trace=traces[number],
            )  # fmt: skip
            record.write(done, point.path(folder))
            for flag in rules.record_flags(done):
                bar.write(f"  {flag.rule}: {flag.about}: {flag.text}")
        return list(fleet.failed.values())


def arguments_of(config: Config, point: Datapoint, models: Models, trace: Path) -> list[str]:
    """A datapoint's server's."""
    method = METHODS[point.method]
    arguments = [*method.arguments(models), *EVERY_SERVER, *config.sglang, *config.parts[point.part].sglang]
    if config.trace and method.policy is not None:
        arguments += ["--sdsie-trace", str(trace)]
    return arguments


def _requests(config: Config, point: Datapoint) -> int:
    return sum(len(asks(config, point.part, phase, 0)) for phase in range(len(config.phases_of(point.part))))


def measure(
    config: Config,
    point: Datapoint,
    models: Models,
    server: Server,
    arguments: Sequence[str],
    this_run: str,
    *,
    gpu: Gpu | None,
    before: dict[str, float] | None,
    end: Callable[[], None],
    trace: Path,
    on_done: Callable[[], Any] = lambda: None,
) -> Record:
    """One datapoint on a server that nobody has used; `end` ends it. Raises ServerFailed or RequestFailed."""
    method = METHODS[point.method]
    phases = config.phases_of(point.part)
    zero = time.perf_counter()

    def clock() -> float:
        return time.perf_counter() - zero

    warm = [(prompt.id, chat_ids(models.target, prompt.text)) for prompt in warmup_prompts()]
    work = [
        [(ask, chat_ids(models.target, ask.text)) for ask in asks(config, point.part, phase, point.repetition)]
        for phase in range(len(phases))
    ]
    if rules.doubled_start([ids for items in work for _, ids in items]):
        raise Refused(f"prompts for {models.target} begin with two start tokens: its chat template is used wrongly")
    with ExitStack() as stack:
        info = server.info()
        if wrong := method.mismatches(info, models):
            raise ServerFailed(f"{point.method}: not the server it should be: {'; '.join(wrong)}")
        recorder = stack.enter_context(Recorder(gpu, clock)) if gpu is not None else None
        readings = recorder.readings if recorder is not None else None
        idle = None
        if config.idle_s and gpu is not None and point.role == "open":  # later ones follow a busy server at once
            idle = _stretch(clock, lambda: time.sleep(config.idle_s))
        gauge = rules.gauge_of(readings) if readings is not None else None
        warm_readings, warm_settled = warm_up(server, warm, config.warm_up, gauge, clock)
        requests, stretches = [], []
        for number, (phase, items) in enumerate(zip(phases, work, strict=True)):
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
    end()
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
        startup_s=server.startup_s,
        paused_s=server.paused_s,
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
