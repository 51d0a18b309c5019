"""The demo: a real model answers three prompts, plain and in gears, side by side.

    python -m sdsie_sglang.demo.compare [--tokens 96] [--record FILE]

Two servers, one after the other: SGLang as shipped, then SGLang with gears, whose policy is changed
while it runs. Both stream their answers. The models are the demo's own unless --target and --draft
name others.
"""

import argparse
import json
import shutil
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from sdsie_sglang.demo.chart import entropy_strip, gear_strip, wrapped
from sdsie_sglang.demo.checkpoints import compose
from sdsie_sglang.demo.errors import DemoError
from sdsie_sglang.eval import headline, machine
from sdsie_sglang.eval.chat import chat_ids
from sdsie_sglang.eval.prompts import timed_prompts, warmup_prompts
from sdsie_sglang.eval.server import Server, ServerFailed

POLICIES: dict[str, dict[str, Any]] = {"fixed": {"policy": "fixed", "k": 5}, "entropy": {"policy": "entropy"}}
KV_TOKENS = "8192"


@dataclass
class Answer:
    """One streamed answer. Speed counts from the first token on, so without prefill."""

    prompt: str
    policy: str
    ids: list[int]
    first_token_s: float
    tok_per_s: float
    sdsie: dict[str, Any] | None


def say(text: str = "", end: str = "\n") -> None:
    print(text, end=end, flush=True)


def wait_line(waited_s: float, last_log_line: str) -> None:
    width = shutil.get_terminal_size().columns
    if sys.stdout.isatty():
        say(f"\r  loading, {waited_s:3.0f} s  {last_log_line}"[: width - 1].ljust(width - 1), end="")
    elif int(waited_s) % 15 == 0:
        say(f"  loading, {waited_s:.0f} s")


def started(arguments: list[str]) -> Server:
    server = Server.start(arguments, on_wait=wait_line)
    say(f"\r  ready after {server.startup_s:.0f} s".ljust(shutil.get_terminal_size().columns - 1))
    return server


def resident_gib(server: Server) -> float:
    """Memory of the server's whole process tree, shared pages counted once (PSS)."""
    root = psutil.Process(server.process.pid)
    return sum(p.memory_full_info().pss for p in [root, *root.children(recursive=True)]) / 2**30


def answer(server: Server, prompt: str, policy: str, ids: list[int], tokens: int, show: bool) -> Answer:
    asked = time.perf_counter()
    first = last = 0.0
    event: dict[str, Any] = {}
    shown = 0
    for event in server.stream(ids, max_new_tokens=tokens):
        last = time.perf_counter()
        first = first or last
        if show:
            say(event["text"][shown:], end="")
            shown = len(event["text"])
    if show:
        say()
    produced = event["output_ids"]
    speed = (len(produced) - 1) / (last - first) if last > first else float("nan")
    return Answer(prompt, policy, produced, first - asked, speed, event["meta_info"].get("sdsie"))


def cycles(trace: Path, skip: int) -> list[dict[str, Any]]:
    return [json.loads(line) for line in trace.read_text().splitlines()[skip:]]


def show_comparison(answers: list[Answer], strips: dict[tuple[str, str], list[dict[str, Any]]]) -> bool:
    """Prints the table; says whether every answer equals the plain one."""
    width = max(40, shutil.get_terminal_size().columns - 12)
    plain = {a.prompt: a for a in answers if a.policy == "plain"}
    same = True
    say(f"\n{'prompt':10s} {'policy':8s} {'identical':>9s} {'tok/s':>7s} {'accepted':>8s}  cycles in each gear")
    for a in answers:
        identical = a.ids == plain[a.prompt].ids
        same &= identical
        shares, accepted = "all plain", "1.00"
        if a.sdsie is not None:
            total = sum(a.sdsie["cycles"].values())
            shares = ", ".join(f"{n / total:.0%} gear {k}" for k, n in a.sdsie["cycles"].items())
            accepted = f"{a.sdsie['accept_length']:.2f}"
        verdict = "-" if a.policy == "plain" else "yes" if identical else "NO"
        say(f"{a.prompt:10s} {a.policy:8s} {verdict:>9s} {a.tok_per_s:7.1f} {accepted:>8s}  {shares}")
    say("\nTarget's entropy after each cycle (full height: 6 bits) and the gear of the cycle (dot: gear 0)")
    for (prompt, policy), lines in strips.items():
        say(f"{prompt}, {policy}:")
        rows = (entropy_strip([c["entropy_bits"][0] for c in lines]), gear_strip([c["k"] for c in lines]))
        for row in wrapped(rows, width):
            say(f"  |{row}")
    return same


def run(args: argparse.Namespace) -> int:
    begun = time.perf_counter()
    if args.target is None:
        say("Models: composing the demo's own ...")
        models = compose()
        target, draft = str(models.target), str(models.draft or models.target)
        if models.draft is None:
            say("There is no trained draft yet: the target drafts for itself, which shows gears but no speed.")
    else:
        target, draft = args.target, args.draft
    reference = timed_prompts(["reference"])
    prompts = {prompt.id.removeprefix("reference-"): chat_ids(target, prompt.text) for prompt in reference}
    warm_up = chat_ids(target, warmup_prompts()[0].text)
    common = ["--model-path", target, "--context-length", "2048", "--max-total-tokens", KV_TOKENS]
    answers: list[Answer] = []
    strips: dict[tuple[str, str], list[dict[str, Any]]] = {}

    say("\nSGLang as shipped")
    with started([*common, "--sdsie-off"]) as server:
        server.generate(warm_up, max_new_tokens=8)
        for name, ids in prompts.items():
            say(f"\n> {name}")
            answers.append(answer(server, name, "plain", ids, args.tokens, show=True))

    say("\nThe same with gears")
    trace = Path(tempfile.mkdtemp(prefix="sdsie-demo-")) / "cycles.jsonl"
    drafted = [*common, "--speculative-draft-model-path", draft, "--sdsie-policy", "fixed", "--sdsie-trace", str(trace)]
    if not args.all_gears:
        drafted += ["--sdsie-gears", "0,5"]
    launched = time.perf_counter()
    with started(drafted) as server:
        server.generate(warm_up, max_new_tokens=8)
        first_token_s = time.perf_counter() - launched
        for policy, settings in POLICIES.items():
            server.set_policy(**settings)
            for name, ids in prompts.items():
                say(f"  {policy}: {name} ...")
                server.flush_cache()
                before = len(cycles(trace, 0))
                answers.append(answer(server, name, policy, ids, args.tokens, show=False))
                strips[name, policy] = cycles(trace, before)
        memory_gib = resident_gib(server)

    same = show_comparison(answers, strips)
    say(f"\nWith gears: start-up to first answer {first_token_s:.0f} s, memory {memory_gib:.1f} GiB.")
    say(f"The whole demo took {time.perf_counter() - begun:.0f} s.")
    if args.record is not None:
        write_record(args.record, answers, first_token_s, memory_gib)
    return 0 if same else 1


def write_record(path: Path, answers: list[Answer], first_token_s: float, memory_gib: float) -> None:
    command = headline.this_command()
    record = {
        "machine": machine.describe(),
        "command": command,
        "first_token_s": first_token_s,
        "memory_gib": memory_gib,
        "answers": [asdict(a) for a in answers],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n")
    figures = {"demo_first_token_s": (first_token_s, "s"), "demo_rss_gib": (memory_gib, "GiB")}
    headline.update(
        [
            headline.Figure(
                name=name,
                value=value,
                unit=unit,
                where=machine.where(),
                record=str(path),
                command=command,
                date=headline.today(),
            )
            for name, (value, unit) in figures.items()
        ]
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=96, help="length of an answer at most (default 96)")
    parser.add_argument("--target", help="a model of yours; needs --draft")
    parser.add_argument("--draft", help="a draft with the same tokenizer")
    parser.add_argument("--all-gears", action="store_true", help="prepare gears 0 to 7")
    parser.add_argument("--record", type=Path, help="write the figures to this file and to headline.json")
    args = parser.parse_args()
    if (args.target is None) != (args.draft is None):
        parser.error("--target and --draft go together")
    try:
        return run(args)
    except (DemoError, ServerFailed, OSError) as error:
        print(f"demo: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
