"""Are greedy float32 answers those of SGLang as shipped, in every gear, at every batch and lag?

    python -m sdsie_sglang.eval.identity eval/results/identity_cpu.json --headline
    python -m sdsie_sglang.eval.identity OUT.json --prompts 1 --tokens 64 --policies --switches --at-once 1 --overlap on
    python -m sdsie_sglang.eval.identity OUT.json --prompts 27 --tokens 250 --policies "fixed K=5" "entropy class" \
        --at-once 1 --overlap on --headline identity_gpu_bf16_deterministic --sglang --enable-deterministic-inference

One server of SGLang as shipped answers the prompts; then one server with gears for each setting of
overlap scheduling answers them under each policy, one at a time and four at once. With --switches it
also leaves gear 0 for gear 5 at each possible token of an answer. Any difference ends the command with
exit code 1. An interrupted run goes on where it stopped.
"""

import argparse
import json
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any

from tqdm import tqdm

from sdsie_sglang.demo import compose
from sdsie_sglang.eval import headline, machine
from sdsie_sglang.eval.arguments import count, measuring, one_line, read_json, replace_text
from sdsie_sglang.eval.chat import chat_ids
from sdsie_sglang.eval.prompts import timed_prompts
from sdsie_sglang.eval.server import Server

POLICIES: dict[str, dict[str, Any]] = {
    **{f"fixed K={k}": {"policy": "fixed", "k": k} for k in (1, 3, 5, 7)},
    **{f"entropy {name}": {"policy": "entropy", "preset": name} for name in ("tuned", "paper", "class")},
}
OVERLAP = {"on": [], "off": ["--disable-overlap-schedule"]}


def answers(server: Server, prompts: list[list[int]], tokens: int, at_once: int) -> list[list[int]]:
    """Token ids of each prompt's greedy answer, natural end of text included."""
    server.flush_cache()
    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(lambda ids: server.generate(ids, max_new_tokens=tokens)["output_ids"], prompts))


def first_difference(ours: list[int], theirs: list[int]) -> int | None:
    """Index of the first token that differs, or None."""
    if ours == theirs:
        return None
    return next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs)))


def switches(tokens: int) -> dict[str, dict[str, Any]]:
    """Gear 0 until the given token, gear 5 from there on: one policy for each token but the first."""
    return {
        f"switch at token {at}": {"policy": "schedule", "schedule": f"0x{at},5x{tokens}"} for at in range(1, tokens)
    }


def key(overlap: str, policy: str, at_once: int) -> str:
    return f"overlap {overlap}, {policy}, {at_once} at once"


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m sdsie_sglang.eval.identity",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--prompts", type=count, default=12, help="of the 27 (12)")
    parser.add_argument("--tokens", type=count, default=128, help="of an answer at most (128)")
    parser.add_argument("--policies", nargs="*", default=list(POLICIES), choices=[*POLICIES], metavar="NAME")
    parser.add_argument("--switches", action="store_true", help="also leave gear 0 at every token of the answers")
    parser.add_argument("--overlap", nargs="+", default=list(OVERLAP), choices=list(OVERLAP))
    parser.add_argument("--at-once", nargs="+", type=count, default=[1, 4], metavar="N")
    parser.add_argument(
        "--headline", nargs="?", const="identity_cpu_fp32", metavar="NAME", help="record the share as a quoted figure"
    )
    parser.add_argument("--sglang", nargs=argparse.REMAINDER, default=[], help="further flags for every server")
    args = parser.parse_args()
    with measuring("identity"):
        return compare(parser, args)


def compare(parser: argparse.ArgumentParser, args: argparse.Namespace) -> int:
    """All of it; the exit code."""
    models = compose()
    target, draft = str(models.target), str(models.draft or models.target)
    chosen = timed_prompts()[:: max(1, 27 // args.prompts)][: args.prompts]
    prompts = [chat_ids(target, prompt.text) for prompt in chosen]
    plan = {
        "prompts": [prompt.id for prompt in chosen],
        "tokens": args.tokens,
        "draft": Path(draft).name,
        "sglang": args.sglang,
    }
    record: dict[str, Any] = {"plan": plan, "baseline": None, "cells": {}}
    if args.out.exists():
        with one_line(parser):
            record = read_json(args.out, "the record")
        if {"sglang": [], **record.get("plan", {})} != plan:  # the first records had no further flags
            parser.error(f"{args.out} holds another run ({record.get('plan')}): choose another file")

    def save() -> None:
        record.update(machine=machine.describe(), command=headline.this_command())
        replace_text(args.out, json.dumps(record, indent=1) + "\n")

    common = ["--model-path", target, "--context-length", "2048", "--max-total-tokens", "16384", *args.sglang]
    if record["baseline"] is None:
        print("SGLang as shipped ...", flush=True)
        with Server.start([*common, "--sdsie-off"]) as server:
            record["baseline"] = answers(server, prompts, args.tokens, 1)
        save()
    lock = threading.Lock()
    policies = {name: POLICIES[name] for name in args.policies} | (switches(args.tokens) if args.switches else {})
    gears = sorted({0, 5} | {policy["k"] for policy in policies.values() if "k" in policy})
    cells = list(product(args.overlap, policies, args.at_once))
    bar = tqdm(total=len(cells), desc="policies", initial=sum(key(*cell) in record["cells"] for cell in cells))

    def run_server(overlap: str) -> None:
        todo = [cell for cell in cells if cell[0] == overlap and key(*cell) not in record["cells"]]
        if not todo:
            return
        drafted = ["--speculative-draft-model-path", draft, "--sdsie-policy", "fixed", *OVERLAP[overlap]]
        drafted += ["--sdsie-gears", ",".join(map(str, gears))]
        with Server.start([*common, *drafted]) as server:
            for cell in todo:
                _, policy, at_once = cell
                server.set_policy(**policies[policy])
                ids = answers(server, prompts, args.tokens, at_once)
                differences = [first_difference(a, b) for a, b in zip(ids, record["baseline"], strict=True)]
                with lock:
                    record["cells"][key(*cell)] = differences
                    save()
                    bar.update()

    # One server a setting, side by side: each keeps one core busy.
    with bar, ThreadPoolExecutor(len(args.overlap)) as pool:
        for done in [pool.submit(run_server, overlap) for overlap in args.overlap]:
            done.result()

    differences = [d for cell in record["cells"].values() for d in cell]
    share = sum(d is None for d in differences) / len(differences)
    print(f"{share:.2%} of {len(differences)} answers identical to SGLang as shipped")
    for name, cell in record["cells"].items():
        if any(d is not None for d in cell):
            print(f"  {name}: first difference at token {[d for d in cell if d is not None]}")
    if args.headline:
        figure = headline.Figure(
            name=args.headline, value=share, unit="1", where=machine.where(), record=headline.in_repository(args.out),
            command=record["command"], date=headline.today(),
            note=f"{len(chosen)} prompts x {args.tokens} tokens, {len(record['cells'])} settings",
        )  # fmt: skip
        headline.update([figure])
    return 0 if share == 1.0 else 1


if __name__ == "__main__":
    sys.exit(main())
