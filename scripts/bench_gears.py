"""Gears against SGLang as shipped, on one GPU: plain decode, STANDALONE, gear 0, gear K, switching.

    python scripts/bench_gears.py OUT.json [--demo | --target DIR --draft DIR] [--batch 1 16] [--tp N] [--headline]

Without models it writes configurations of the 8B and the 1B Llama shape, loads random weights and
simulates acceptance (SGLANG_SIMULATE_ACC_LEN): timing only, no text. With --demo it answers the 27 evaluation
prompts with the demo's models, and adds EAGLE-3 with the demo's head, as a chain and as a tree. All
servers are on the GPU side by side, one of them runs at a time (the others are paused), and the repeats are
interleaved. Each figure is a ratio of medians with the range of the ratios over repeats. The time of a cycle is what
a long answer takes beyond a short one, untraced: tracing makes the host the slower part. With --tp every server is
split over N GPUs, and figures are named for it (gear0_over_plain_tp2_bs1). If OUT.json is there it is only summarised.
"""

import argparse
import json
import os
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from sdsie_sglang.demo import compose
from sdsie_sglang.eval import headline, machine
from sdsie_sglang.eval.chat import chat_ids
from sdsie_sglang.eval.cost_table import cycle_ms, whole_cycle_ms
from sdsie_sglang.eval.fleet import Fleet, Start, Turns
from sdsie_sglang.eval.methods import METHODS, Models
from sdsie_sglang.eval.prompts import timed_prompts
from sdsie_sglang.eval.server import Server

SHAPES = {
    "8b": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
    },
    "1b": {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
    },
}
COMMON = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# What the project holds itself to.
REQUIRED = {
    "gear0_over_plain_bs1": 0.98,
    "gear0_over_plain_bs16": 0.97,
    "k5_over_standalone_bs1": 1.30,
    "k5_over_standalone_bs16": 1.05,
    "switching_over_steady": 0.97,
}
AT_MOST = {"k5_cycle_over_floor_bs1": 1.55}
SHORT = 4  # how many times longer an answer is than its twin, which tells what prompts take
TP_TOLERANCE = 0.03  # between a ratio over several GPUs and the same ratio on one
ACCEPT_LENGTH = 4.27  # the original project's mean at K=5


def write_shape(folder: Path, shape: str) -> Path:
    """A checkpoint folder with a configuration alone, for --load-format dummy."""
    folder.mkdir(parents=True, exist_ok=True)
    tied = shape == "1b"
    config = {
        **COMMON,
        **SHAPES[shape],
        "head_dim": SHAPES[shape]["hidden_size"] // 32,
        "tie_word_embeddings": tied,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def server_plans(
    args: argparse.Namespace, target: Path, draft: Path, tp: int = 1
) -> dict[str, tuple[list[str], dict[str, str]]]:
    """Arguments and environment of each server, split over `tp` GPUs."""
    common = [
        "--model-path", str(target), "--context-length", "4096", "--max-total-tokens", "16384",
        "--disable-radix-cache", "--cuda-graph-backend-prefill", "disabled", "--log-level", "info",
        "--max-running-requests", str(max(args.batch)), "--cuda-graph-bs-decode", *map(str, args.batch),
        "--skip-tokenizer-init", *args.sglang,
    ]  # fmt: skip
    simulated = args.target is None
    if simulated:
        common += ["--load-format", "dummy"]
    drafted = ["--speculative-draft-model-path", str(draft)]
    steps = [
        "--speculative-num-steps",
        "5",
        "--speculative-eagle-topk",
        "1",
        "--speculative-num-draft-tokens",
        "6",
    ]
    split: dict[str, str] = {}
    if tp > 1:
        common += ["--tp-size", str(tp)]
        # Servers that start side by side have not taken the same from each GPU when SGLang compares what is free.
        split = {"SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "0"}
    accept = {"SGLANG_SIMULATE_ACC_LEN": str(ACCEPT_LENGTH)} if simulated else {}
    plans = {
        "plain": ([*common, "--sdsie-off"], split),
        "standalone": (
            [*common, *drafted, *steps, "--sdsie-off", "--speculative-algorithm", "STANDALONE"],
            accept | split,
        ),
        "gears": ([*common, *drafted, "--sdsie-policy", "fixed", "--sdsie-gears", "0,5"], accept | split),
    }
    if simulated and args.gemv:  # SGLang's own faster product of one row with a matrix, off by default
        arguments, env = plans["standalone"]
        plans["standalone-gemv"] = ([*arguments, "--bf16-gemm-backend", "gemv"], env)
        plans["plain-gemv"] = ([*plans["plain"][0], "--bf16-gemm-backend", "gemv"], split)
    for name in EAGLE3 if args.demo else ():
        models = Models(target=str(target), eagle3=str(args.eagle3))
        plans[name] = ([*common, *METHODS[name].arguments(models)[2:]], split)
    return plans


SWITCHING_CYCLES = 36
EAGLE3 = ("eagle3-chain5", "eagle3-tree")
GEMV = ("plain-gemv", "standalone-gemv")
VARIANTS: dict[str, tuple[str, dict[str, Any] | None]] = {
    "plain": ("plain", None),
    "gear0": ("gears", {"policy": "plain"}),
    "standalone": ("standalone", None),
    "k5": ("gears", {"policy": "fixed", "k": 5}),
    "switching": ("gears", {"policy": "schedule", "schedule": "5x8,0x8"}),
}


@contextmanager
def start_all(plans: Mapping[str, Sequence[Any]], logs: Path) -> Iterator[Mapping[str, Server]]:
    """Starts the planned servers side by side; ends them at the end. Only the one asked for last runs, the others are
    paused.

    Args:
        plans: arguments, environment and, if it is not ours, the launcher's module.
    """
    starts = [
        Start(name, tuple(arguments), True, env, module[0] if module else None, logs / f"{name}.log")
        for name, (arguments, env, *module) in plans.items()
    ]
    with Fleet(starts) as fleet:
        ready = fleet.ready()
        print(*(f"{starts[n].name}: up in {s.startup_s:.0f} s" for n, s in ready.items()), sep="\n", flush=True)
        yield Turns(fleet)


def run_once(
    server: Server, batch: int, tokens: int, prompts: list[list[int]], *, ignore_eos: bool = True
) -> dict[str, float]:
    """All prompts, `batch` at a time. Tokens per second of the whole, prefill included."""
    with ThreadPoolExecutor(batch) as pool:
        started = time.perf_counter()
        done = list(pool.map(lambda ids: server.generate(ids, max_new_tokens=tokens, ignore_eos=ignore_eos), prompts))
        wall_s = time.perf_counter() - started
    produced = sum(len(d["output_ids"]) for d in done)
    accept = [d["meta_info"].get("spec_accept_length") or 1.0 for d in done]
    stats = [d["meta_info"].get("sdsie") for d in done]
    counts = [
        sum(s["cycles"].values()) if s else d["meta_info"].get("spec_verify_ct") or len(d["output_ids"]) - 1
        for s, d in zip(stats, done, strict=True)
    ]
    return {
        "tokens": produced,
        "wall_s": wall_s,
        "tok_per_s": produced / wall_s,
        "accept_length": statistics.mean(accept),
        "cycles": sum(counts) / batch,
    }


def ratio(rows: dict[str, list[dict[str, float]]], over: str, under: str) -> dict[str, float]:
    """Median speed over median speed; low and high over the interleaved pairs."""
    pairs = [a["tok_per_s"] / b["tok_per_s"] for a, b in zip(rows[over], rows[under], strict=True)]
    value = statistics.median(a["tok_per_s"] for a in rows[over]) / statistics.median(
        b["tok_per_s"] for b in rows[under]
    )
    return {"value": value, "low": min(pairs), "high": max(pairs)}


def faster(rows: dict[str, list[dict[str, float]]], name: str) -> str:
    """SGLang at its best: `name`, or the same with its own GEMV."""
    there = [each for each in (name, f"{name}-gemv") if each in rows]
    return max(there, key=lambda each: statistics.median(row["tok_per_s"] for row in rows[each]))


def switching_ratio(rows: dict[str, list[dict[str, float]]]) -> dict[str, float]:
    """Time of the switching run against what its own mix of cycles costs without switches.

    Eight cycles of each gear: the expected time of a pair is the sum of the steady ones.
    """

    expected = sum(statistics.median(whole_cycle_ms(rows[name])) for name in ("k5", "gear0")) / 2
    ratios = sorted(expected / ms for ms in whole_cycle_ms(rows["switching"]))
    return {"value": statistics.median(ratios), "low": ratios[0], "high": ratios[-1]}


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Starts the servers, runs the interleaved repeats and returns the raw record, kept in args.out as it grows."""
    scratch = Path(tempfile.mkdtemp(prefix="sdsie-shapes-"))
    target = args.target or write_shape(scratch / "target", "8b")
    draft = args.draft or write_shape(scratch / "draft", "1b")
    logs = Path(os.environ.get("SDSIE_LOGS", scratch))
    more = EAGLE3 if args.demo else GEMV if args.target is None and args.gemv else ()
    variants = {**VARIANTS, **{name: (name, None) for name in more}}

    record: dict[str, Any] = {
        "machine": machine.describe(),
        "command": headline.this_command(),
        "date": headline.today(),
        "tp": args.tp,
        "rows": {},
        "copy_tb_per_s": copy_tb_per_s() if args.profile else None,
    }
    with start_all(server_plans(args, target, draft, args.tp), logs) as servers:
        record["startup_s"] = {name: server.startup_s for name, server in servers.items()}
        for batch in args.batch:
            rows: dict[str, list[dict[str, float]]] = {name: [] for name in variants}
            prompts = [[(7 * i + 31 * j) % 1000 + 10 for j in range(64)] for i in range(batch)]
            if args.demo:
                prompts = [chat_ids(str(target), prompt.text) for prompt in timed_prompts()]
            for repeat in range(-1, args.repeats):  # the first round warms up
                for name, (server_name, policy) in variants.items():
                    if policy is not None:
                        servers[server_name].set_policy(**policy)
                    run = partial(run_once, servers[server_name], batch, prompts=prompts, ignore_eos=not args.demo)
                    row: dict[str, Any] = run(args.tokens)
                    if not args.demo and name != "switching":
                        row["short"] = run(max(16, args.tokens // SHORT))
                    if repeat >= 0:
                        rows[name].append(row)
            record["rows"][str(batch)] = rows
            keep(record, args.out)
            print(f"batch {batch}: measured", flush=True)
        if args.profile:
            record["profiles"] = profile_all(servers, args.batch)
            record["timelines"] = {"switching, batch 1": switching_timeline(servers)}
            record["k5_floor_ms"] = weights_gb("8b", "1b") / record["copy_tb_per_s"]
    return record


def keep(record: dict[str, Any], out: Path) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(record, indent=1) + "\n")


def profile_all(servers: Mapping[str, Server], batches: list[int]) -> dict[str, Any]:
    """A trace of each variant, by SGLang's own torch profiler; see profile_cycle.py, which prints them."""
    from profile_cycle import summarise, trace

    profiles = {}
    for name in ("plain", "gear0", "standalone", "k5"):
        server_name, policy = VARIANTS[name]
        if policy is not None:
            servers[server_name].set_policy(**policy)
        for batch in batches:
            profiles[f"{name}, batch {batch}"] = summarise(trace(servers[server_name], batch))
    return profiles


def switching_timeline(servers: dict[str, Server]) -> list[dict[str, float]]:
    """Two changes to gear K and two back, graph by graph."""
    from profile_cycle import timeline, trace

    server_name, policy = VARIANTS["switching"]
    servers[server_name].set_policy(**(policy or {}))
    return timeline(trace(servers[server_name], 1, SWITCHING_CYCLES))


def weights_gb(target: str, draft: str, k: int = 5) -> float:
    """What a K-cycle must read at least: the target's weights once and the draft's K times, in bf16."""

    def read(shape: str) -> float:
        config = {**COMMON, **SHAPES[shape]}
        hidden, heads = config["hidden_size"], config["num_attention_heads"]
        attention = hidden * hidden * (2 + 2 * config["num_key_value_heads"] / heads)
        layer = attention + 3 * hidden * config["intermediate_size"]
        return 2e-9 * (layer * config["num_hidden_layers"] + hidden * config["vocab_size"])

    return read(target) + k * read(draft)


def copy_tb_per_s() -> float:
    """What a copy on this GPU moves, bytes read and written counted: the rate of the floor."""
    import torch

    source = torch.empty(4 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    rates = []
    for _ in range(8):
        start.record()
        target.copy_(source)
        end.record()
        end.synchronize()
        rates.append(2 * source.numel() / start.elapsed_time(end) / 1e9)
    del source, target
    torch.cuda.empty_cache()
    return statistics.median(rates)


def summarise(record: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Prints each variant's speed and returns the ratios, which carry the tensor-parallel size if it is not 1."""
    rows = record["rows"]
    tp = f"_tp{record['tp']}" if record.get("tp", 1) > 1 else ""
    for batch, variants in rows.items():
        for name, measured in variants.items():
            speeds = sorted(row["tok_per_s"] for row in measured)
            print(
                f"batch {batch:>3s} {name:10s} {statistics.median(speeds):8.1f} tok/s "
                f"({speeds[0]:.1f} to {speeds[-1]:.1f}), {measured[0]['accept_length']:.2f} tokens a cycle"
            )
    ratios = {
        **{f"gear0_over_plain{tp}_bs{b}": ratio(r, "gear0", faster(r, "plain")) for b, r in rows.items()},
        **{f"k5_over_standalone{tp}_bs{b}": ratio(r, "k5", faster(r, "standalone")) for b, r in rows.items()},
        f"switching_over_steady{tp}": switching_ratio(next(iter(rows.values()))),
    }
    if floor_ms := record.get("k5_floor_ms"):
        over = sorted(ms / floor_ms for ms in cycle_ms(rows["1"]["k5"]))
        ratios["k5_cycle_over_floor_bs1"] = {"value": statistics.median(over), "low": over[0], "high": over[-1]}
    for name, figure in ratios.items():
        print(f"{name}: {figure['value']:.3f} ({figure['low']:.3f} to {figure['high']:.3f})")
    return ratios


def note(name: str, value: float) -> str:
    """Whether a figure reaches what is required of it: over several GPUs, what the quoted one on one GPU is."""
    if name in AT_MOST:
        over = value - AT_MOST[name]
        return f"required at most {AT_MOST[name]:.2f}: {'reached' if over <= 0 else f'exceeded by {over:.3f}'}"
    on_one_gpu = re.sub(r"_tp\d+", "", name)
    if name != on_one_gpu:
        quoted = {figure["name"]: figure["value"] for figure in json.loads(headline.HEADLINE.read_text())}
        if on_one_gpu not in quoted:
            return ""
        apart = abs(value - quoted[on_one_gpu])
        verdict = "reached" if apart <= TP_TOLERANCE else f"{apart:.3f} apart"
        return f"required within {TP_TOLERANCE:.2f} of one GPU's {quoted[on_one_gpu]:.3f}: {verdict}"
    required = REQUIRED.get(name)
    if required is None:
        return ""
    verdict = "reached" if value >= required else f"falls short by {required - value:.3f}"
    return f"required {required:.2f}: {verdict}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--target", type=Path)
    parser.add_argument("--draft", type=Path)
    parser.add_argument("--demo", action="store_true", help="the demo's models on real text")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--tp", type=int, default=1, metavar="N", help="split every server over N GPUs")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--headline", action="store_true", help="record the figures as quoted ones")
    parser.add_argument("--no-gemv", dest="gemv", action="store_false", help="leave out SGLang with its own GEMV")
    parser.add_argument("--profile", action="store_true", help="trace a few cycles of each variant at the end")
    parser.add_argument("--sglang", nargs=argparse.REMAINDER, default=[], help="further flags for every server")
    args = parser.parse_args()
    if (args.target is None) != (args.draft is None):
        parser.error("--target and --draft go together")
    if args.profile and args.tp > 1:
        parser.error("--profile is for one GPU: its floor is one GPU's memory rate")
    if args.profile and (args.demo or args.target):
        parser.error("--profile goes with the 8B and 1B shapes")
    if args.demo:
        models = compose()
        args.target, args.draft, args.eagle3 = models.target, models.draft, models.eagle3

    if args.out.exists():
        record = json.loads(args.out.read_text())
        if missing := [batch for batch in args.batch if str(batch) not in record["rows"]]:
            print(f"{args.out} holds nothing of batch {', '.join(map(str, missing))}", file=sys.stderr)
    else:
        record = measure(args)
        keep(record, args.out)
    ratios = summarise(record)
    if args.headline:
        twins = "short" in next(iter(record["rows"].values()))["k5"][0]
        how = {} if twins else dict.fromkeys(AT_MOST, "; wall time of whole answers by their cycles, prompts included")
        headline.quote(record, args.out, ratios, lambda name: note(name, ratios[name]["value"]) + how.get(name, ""))
    return 0


if __name__ == "__main__":
    sys.exit(main())
