"""Does a server do what the simulator says? The same policies on the same answers, in both.

    python -m sdsie_sglang.eval.confirm OUT.json --cost-table COSTS.json [--limit 9] [--tokens 128]

One server; each prompt is served in every policy, the policies' order turning from prompt to prompt, and its
decode time is taken from the first streamed token to the last. Compared are the cycles in each gear, which must be
equal where the text is, and tokens a second. The cost gate is replayed over the same prompts in the same order; with
overlap scheduling a server runs one cycle more after an answer's end, from which it learns and the replay does not, so
from the second prompt on its gears may differ.
"""

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from sdsie_sglang.demo import compose
from sdsie_sglang.eval import headline, machine
from sdsie_sglang.eval.arguments import count
from sdsie_sglang.eval.calibrate import Attached
from sdsie_sglang.eval.chat import chat_ids
from sdsie_sglang.eval.lab_input import need_gears, read_inputs
from sdsie_sglang.eval.prompts import timed_prompts
from sdsie_sglang.eval.server import Server
from sdsie_sglang.eval.simulate import replay
from sdsie_sglang.eval.trace import ANSWERS, TRACES, Trace
from sdsie_sglang.gears import PolicySettings, build_policy
from sdsie_sglang.gears.cost_table import CostTable


@dataclass(frozen=True)
class Served:
    """One answer of a server.

    decode_s: from the first streamed token to the last; gears: cycles in each of the 8 gears.
    """

    policy: str
    prompt: str
    tokens: list[int]
    gears: list[int]
    decode_s: float


@dataclass(frozen=True)
class Comparison:
    """One policy over all prompts.

    same_text, same_gears: prompts whose tokens are the trace's, and whose cycles in each gear are the simulator's.
    error: simulated over served tokens/s, minus 1.
    """

    policy: str
    prompts: int
    same_text: int
    same_gears: int
    served_tok_per_s: float
    simulated_tok_per_s: float
    error: float


def policies(costs: Path, k: int) -> dict[str, dict[str, Any]]:
    """Settings of each policy to be confirmed."""
    return {
        "plain": {"policy": "plain"},
        f"fixed K={k}": {"policy": "fixed", "k": k},
        "entropy": {"policy": "entropy"},
        "cost gate": {"policy": "cost", "cost_table": str(costs.resolve())},
    }


def served_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """As a running server takes them: it has its own cost table from its start."""
    return {name: value for name, value in settings.items() if name != "cost_table"}


def serve(server: Server, policy: str, prompt: str, ids: list[int], tokens: int) -> Served:
    """One answer, streamed."""
    arrived, final = [], {}
    for event in server.stream(ids, max_new_tokens=tokens):
        arrived.append(time.perf_counter())
        final = event
    cycles = final["meta_info"]["sdsie"]["cycles"]
    gears = [cycles.get(str(k), 0) for k in range(8)]
    return Served(policy, prompt, final["output_ids"], gears, arrived[-1] - arrived[0])


def compare(
    served: Sequence[Served],
    settings: Mapping[str, Any],
    table: CostTable,
    traces: Mapping[str, Trace],
    answers: Mapping[str, list[int]],
    lag: int,
) -> Comparison:
    """The answers of one policy, in the order in which they were served, against their replay."""
    policy, costs = build_policy(PolicySettings(**settings)), table.at(1)
    same_text = same_gears = 0
    ms = tokens = 0.0
    for answer in served:
        trace = traces[answer.prompt].cut(len(answer.tokens))
        run = replay(trace, policy, costs, lag)
        same_text += answers[answer.prompt][: len(answer.tokens)] == answer.tokens
        same_gears += np.bincount(run.gears, minlength=8).tolist() == answer.gears
        ms += run.ms
        tokens += run.tokens
    measured = tokens / sum(answer.decode_s for answer in served)
    simulated = 1000.0 * tokens / ms
    return Comparison(
        served[0].policy, len(served), same_text, same_gears, measured, simulated, simulated / measured - 1
    )


def main() -> None:
    """Serve, replay, compare, write."""
    parser = argparse.ArgumentParser(
        prog="python -m sdsie_sglang.eval.confirm",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("out", type=Path)
    parser.add_argument(
        "--cost-table",
        "--costs",
        dest="costs",
        type=Path,
        required=True,
        help="written by eval.calibrate on this machine",
    )
    parser.add_argument("--traces", type=Path, default=TRACES)
    parser.add_argument("--url", help="a running server with the demo pair and this cost table")
    parser.add_argument("--limit", type=count, help="only the first prompts")
    parser.add_argument("--tokens", type=count, default=128)
    parser.add_argument("-k", type=count, default=5, help="the fixed gear")
    parser.add_argument("--only", nargs="+", choices=("plain", "fixed", "entropy", "cost"), help="(default: all)")
    parser.add_argument("--warmup-tokens", type=int, default=32, help="of an untimed answer before each policy's first")
    parser.add_argument("--headline", action="store_true", help="write simulator_error to headline.json")
    options = parser.parse_args()
    table, read = read_inputs(parser, options)
    need_gears(parser, table, {0, 5, options.k})
    models, traces = compose(), {trace.id: trace for trace in read.traces}
    answers = {
        answer["id"]: answer["tokens"][answer["prompt_length"] :]
        for answer in json.loads(ANSWERS.read_text())["answers"]
    }
    wanted = policies(options.costs, options.k)
    if options.only:
        wanted = {name: settings for name, settings in wanted.items() if settings["policy"] in options.only}
    gears = ",".join(map(str, table.gears))
    arguments = ["--model-path", str(models.target), "--speculative-draft-model-path", str(models.draft)]
    arguments += ["--sdsie-gears", gears, "--dtype", "float32", "--disable-radix-cache"]
    arguments += ["--sdsie-policy", "plain", "--sdsie-cost-table", str(options.costs.resolve())]
    with Attached(options.url) if options.url else Server.start(arguments) as server:
        lag = server.sdsie()["gate"]["lag"]
        prompts = [
            (prompt.id, chat_ids(str(models.target), prompt.text)) for prompt in timed_prompts()[: options.limit]
        ]
        done = serve_all(server, wanted, prompts, options.tokens, options.warmup_tokens)
    comparisons = [
        compare([each for each in done if each.policy == name], settings, table, traces, answers, lag)
        for name, settings in wanted.items()
    ]
    record = {
        "lag": lag,
        "comparisons": [asdict(each) for each in comparisons],
        "served": [asdict(each) for each in done],
        "machine": machine.describe(),
        "command": headline.this_command(),
        "date": headline.today(),
    }
    options.out.write_text(json.dumps(record) + "\n")
    for each in comparisons:
        print(
            f"{each.policy}: text equal on {each.same_text}, gears on {each.same_gears} of {each.prompts} prompts; "
            f"served {each.served_tok_per_s:.1f}, simulated {each.simulated_tok_per_s:.1f} tokens/s "
            f"({100 * each.error:+.1f} %)"
        )
    if options.headline:
        headline.update([_figure(comparisons, record, options.out)])


def serve_all(
    server: Server,
    wanted: Mapping[str, Mapping[str, Any]],
    prompts: Sequence[tuple[str, list[int]]],
    tokens: int,
    warmup_tokens: int,
) -> list[Served]:
    """Every prompt in every policy. The cost gate learns and must be left in force, so it comes last, alone."""
    names = [name for name in wanted if name != "cost gate"]
    turns = [(i, names[(i + j) % len(names)]) for i in range(len(prompts)) for j in range(len(names))]
    turns += [(i, "cost gate") for i in range(len(prompts)) if "cost gate" in wanted]
    done: list[Served] = []
    before = None
    for i, name in tqdm(turns, desc="answers"):
        prompt, ids = prompts[i]
        if warmup_tokens and i == 0 and name != "cost gate":
            server.set_policy(**served_settings(wanted[name]))
            server.generate(ids, max_new_tokens=warmup_tokens)
        if name != before:
            server.set_policy(**served_settings(wanted[name]))
        before = name
        done.append(serve(server, name, prompt, ids, tokens))
    return done


def _figure(comparisons: Sequence[Comparison], record: Mapping[str, Any], out: Path) -> headline.Figure:
    worst = max(comparisons, key=lambda each: abs(each.error))
    return headline.Figure(
        name="simulator_error",
        value=abs(worst.error),
        unit="1",
        where=machine.where(record["machine"]),
        record=str(out),
        command=record["command"],
        date=record["date"],
        note=f"largest, {worst.policy}; required 0.03: {'reached' if abs(worst.error) <= 0.03 else 'not reached'}; "
        f"gears equal on {sum(c.same_gears for c in comparisons)} of {sum(c.prompts for c in comparisons)} answers",
    )


if __name__ == "__main__":
    main()
