"""SGLang's own serving benchmark against each method, with energy and gears beside its figures.

    python -m sdsie_sglang.eval.serving eval/results/serving/demo.json --methods plain draft-k5 --rates 2 8

One fresh server a (method, rate). The benchmark's own warm-up repeats its first request, which n-gram drafting would
then replay, and its default goes on past the natural end: both are turned off. Prompts are those of the ruler, each in
a form of its own, as chat messages; `--bench --dataset-name NAME ...` takes another dataset of the benchmark's
(random-ids, custom, generated-shared-prefix; speed-bench if you have its files).
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families
from pydantic import BaseModel
from tqdm import tqdm

from sdsie_sglang.eval import headline, machine
from sdsie_sglang.eval.arguments import count, measuring, read_json, replace_text
from sdsie_sglang.eval.chat import chat_ids
from sdsie_sglang.eval.energy import NoEnergy, Readings, Recorder, integrated_power_j, window_energy_j
from sdsie_sglang.eval.load import RequestFailed, warm_up
from sdsie_sglang.eval.methods import METHODS, PLAIN, MethodError, Models
from sdsie_sglang.eval.plan import SUFFIXES, Config, ConfigProblem, Part, Phase, asks, load_config, resolve_models
from sdsie_sglang.eval.prompts import warmup_prompts
from sdsie_sglang.eval.record import Stretch, portable
from sdsie_sglang.eval.rules import gauge_of
from sdsie_sglang.eval.run import EVERY_SERVER, SETTLE_S, Refused, open_gpu
from sdsie_sglang.eval.server import Server, ServerFailed

STARTS = "Starting main benchmark run"
PAUSE_S = 1.0
"""bench_serving prints STARTS, sleeps for so long, and sends its first request (benchmark/serving.py of 0.5.23)."""
COUNTERS = (
    "sdsie:cycles_total",
    "sdsie:committed_tokens_total",
    "sdsie:draft_passes_total",
    "sdsie:gear_switches_total",
)


class Served(BaseModel):
    """One method at one request rate.

    Args:
        bench: what bench_serving wrote, its text output and the server's arguments left out. Its accept length
            is over the server's whole life, warm-up included.
        gears: this run's increase of each of this project's counters, by gear where it has one.
        window: when the benchmark's requests ran. energy_j: None if too short or without GPU (`no_energy` says why).
    """

    method: str
    rate: float
    command: list[str]
    bench_command: list[str]
    bench: dict[str, Any]
    live: dict[str, Any] | None
    gears: dict[str, float]
    window: Stretch
    energy_j: float | None = None
    power_j: float | None = None
    no_energy: str = ""
    readings: Readings | None = None

    @property
    def j_per_token(self) -> float | None:
        return None if self.energy_j is None else self.energy_j / self.bench["total_output_tokens"]


def write_prompts(config: Config, path: Path, requests: int) -> int:
    """The ruler's prompts as the benchmark's `openai` dataset; how many (no prompt is repeated to fill up)."""
    everything = Part(methods=(PLAIN.name,), phases=(Phase(concurrency=1, variants=len(SUFFIXES)),))
    every = config.model_copy(update={"parts": {"all": everything}})
    chosen = asks(every, "all", 0, 0)[:requests]
    lines = [
        {"messages": [{"role": "user", "content": ask.text}], "max_tokens": config.tokens, "temperature": 0.0}
        for ask in chosen
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return len(lines)


def bench_command(url: str, target: str, rate: float, requests: int, dataset: Sequence[str], out: Path) -> list[str]:
    """bench_serving without what would flatter or contaminate."""
    return [
        sys.executable, "-m", "sglang.benchmark.serving", "--base-url", url, "--model", target,
        "--num-prompts", str(requests), "--request-rate", str(rate), "--warmup-requests", "0", "--disable-ignore-eos",
        "--disable-tqdm", "--output-file", str(out), "--output-details", *dataset,
    ]  # fmt: skip


def counters(metrics: str) -> dict[str, float]:
    """This project's counters from a /metrics page; a gear's name is appended."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(metrics):
        for sample in family.samples:
            if sample.name in COUNTERS:
                gear = sample.labels.get("gear")
                key = sample.name.removeprefix("sdsie:").removesuffix("_total") + (f" in gear {gear}" if gear else "")
                found[key] = found.get(key, 0.0) + sample.value
    return found


def started_at(lines: Iterable[tuple[float, str]]) -> float | None:
    """When the first request was sent, from the benchmark's lines with their times."""
    return next((at + PAUSE_S for at, line in lines if STARTS in line), None)


def check(result: dict[str, Any], requests: int) -> None:
    """Raises RequestFailed if any request failed."""
    errors = [error for error in result.get("errors", []) if error]
    if errors or result["completed"] != requests:
        raise RequestFailed(f"{requests - result['completed']} of {requests} requests failed: {(errors or ['?'])[0]}")


def run_bench(command: list[str], out: Path, clock: Any) -> tuple[dict[str, Any], Stretch]:
    """Runs the benchmark; its result and the window of its requests. Raises RequestFailed."""
    lines: list[tuple[float, str]] = []
    env = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env) as bench:
        assert bench.stdout is not None
        for line in bench.stdout:
            lines.append((clock(), line.rstrip()))
    start_s = started_at(lines)
    if bench.returncode or start_s is None or not out.exists():
        tail = "\n".join(line for _, line in lines[-10:])
        raise RequestFailed(f"bench_serving ended with {bench.returncode}:\n{tail}")
    result = json.loads(out.read_text().splitlines()[-1])
    return result, Stretch(start_s=start_s, end_s=start_s + result["duration"])


def serve(name: str, rate: float, config: Config, models: Models, requests: int, dataset: Sequence[str]) -> Served:
    """One method at one rate on a fresh server."""
    method, gpu, zero = METHODS[name], open_gpu(config), time.perf_counter()

    def clock() -> float:
        return time.perf_counter() - zero

    scratch = Path(tempfile.mkdtemp(prefix="sdsie-serving-"))
    if not dataset:
        requests = write_prompts(config, scratch / "prompts.jsonl", requests)
        dataset = ["--backend", "sglang-oai-chat", "--dataset-name", "openai", "--dataset-path"]
        dataset = [*dataset, str(scratch / "prompts.jsonl")]
    arguments = [*method.arguments(models), *EVERY_SERVER, "--enable-metrics", *config.sglang]
    warm = [(prompt.id, chat_ids(models.target, prompt.text)) for prompt in warmup_prompts()]
    with Server.start(arguments, env=config.env) as server:
        info = server.info()
        if wrong := method.mismatches(info, models):
            raise ServerFailed(f"{name}: not the server it should be: {'; '.join(wrong)}")
        recorder = Recorder(gpu, clock) if gpu is not None else None
        if recorder is not None:
            recorder.__enter__()
        try:
            warm_up(server, warm, config.warm_up, gauge_of(recorder.readings) if recorder else None, clock)
            time.sleep(SETTLE_S)
            before = counters(server.metrics())
            command = bench_command(server.url, models.target, rate, requests, dataset, scratch / "bench.jsonl")
            result, window = run_bench(command, scratch / "bench.jsonl", clock)
            time.sleep(SETTLE_S)
            after = counters(server.metrics())
        finally:
            if recorder is not None:
                recorder.__exit__(None, None, None)
        live = server.info()["internal_states"][0].get("sdsie")
    check(result, requests)
    dropped = ("server_info", "generated_texts", "errors")
    served = Served(
        method=name,
        rate=rate,
        command=["python", "-m", "sdsie_sglang.launch_server", *map(portable, arguments)],
        bench_command=["python", *map(portable, command[1:])],
        bench={k: v for k, v in result.items() if k not in dropped},
        live=live,
        gears={k: v - before.get(k, 0.0) for k, v in after.items() if v != before.get(k, 0.0)},
        window=window,
        readings=recorder.readings if recorder is not None else None,
    )
    if served.readings is not None:
        try:
            served.energy_j = window_energy_j(served.readings, window.start_s, window.end_s)
            served.power_j = integrated_power_j(served.readings, window.start_s, window.end_s)
        except NoEnergy as error:
            served.no_energy = str(error)
    return served


def table(rows: Sequence[Served]) -> str:
    """Markdown, one row a run."""
    head = ["method", "requests/s", "output tok/s", "first token p50 / p99 ms", "per token p50 ms", "J/token", "gears"]
    lines = [head, ["---", *["---:"] * (len(head) - 1)]]
    for row in rows:
        cycles = {k.removeprefix("cycles in gear "): v for k, v in row.gears.items() if k.startswith("cycles in gear")}
        total = sum(cycles.values())
        lines.append(
            [
                row.method,
                f"{row.rate:g}",
                f"{row.bench['output_throughput']:.1f}",
                f"{row.bench['median_ttft_ms']:.0f} / {row.bench['p99_ttft_ms']:.0f}",
                f"{row.bench['median_tpot_ms']:.2f}",
                "–" if row.j_per_token is None else f"{row.j_per_token:.3f}",
                ", ".join(f"{v / total:.0%} gear {k}" for k, v in sorted(cycles.items())) or "–",
            ]
        )
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m sdsie_sglang.eval.serving",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("out", type=Path, help="an existing record is completed, never overwritten")
    parser.add_argument("--config", default="short", help="models, server flags, warm-up, length (default short)")
    parser.add_argument("--methods", nargs="+", choices=sorted(METHODS), default=["plain", "draft-k5", "entropy-tuned"])
    parser.add_argument("--rates", nargs="+", type=float, default=[2.0, 8.0, 32.0], help="requests a second")
    parser.add_argument(
        "--requests", type=count, default=200, help=f"at most {27 * len(SUFFIXES)} with the ruler's prompts"
    )
    parser.add_argument("--bench", nargs=argparse.REMAINDER, default=[], help="the dataset's flags for bench_serving")
    args = parser.parse_args(argv)
    try:
        with measuring("serving"):
            done = measure(args)
    except (ConfigProblem, MethodError, Refused, ValueError) as error:
        print(f"serving: {error}", file=sys.stderr)
        return 2
    except (RequestFailed, NoEnergy) as error:
        print(f"serving: {error}", file=sys.stderr)
        return 1
    text = table(done)
    args.out.with_suffix(".md").write_text(text + "\n")
    print(text)
    return 0


def measure(args: argparse.Namespace) -> list[Served]:
    """What the record has and what it lacks, written down after each server. Raises what its parts do."""
    config = load_config(args.config)
    models = resolve_models(config)
    plan = {"config": config.model_dump(mode="json"), "requests": args.requests, "bench": args.bench}
    known: dict[str, Any] = read_json(args.out, "the record") if args.out.exists() else {"plan": plan, "rows": []}
    if known.get("plan") != json.loads(json.dumps(plan)):
        raise Refused(f"{args.out} holds another run: choose another file")
    done = [Served(**row) for row in known["rows"]]
    have = {(row.method, row.rate) for row in done}
    todo = [(m, r) for r in args.rates for m in args.methods if (m, r) not in have]
    for name, rate in tqdm(todo, unit="server"):
        done.append(serve(name, rate, config, models, args.requests, args.bench))
        record = {
            "plan": plan, "machine": machine.describe(), "program": portable(headline.this_command()),
            "date": headline.today(), "rows": [row.model_dump() for row in done],
        }  # fmt: skip
        replace_text(args.out, json.dumps(record) + "\n")
    return done


if __name__ == "__main__":
    sys.exit(main())
