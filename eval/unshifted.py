"""Accept length of this project's fixed gear K over that of SGLang's own STANDALONE, same K, same draft, same text.

    python -m sdsie_sglang.eval.unshifted [--headline]                                  # the demo's models
    python -m sdsie_sglang.eval.unshifted FOLDER --target DIR --draft DIR --dtype bfloat16

SGLang feeds its STANDALONE draft each token one place early and never the first one; here the draft reads every token
at its own place. Both serve the 27 prompts greedily, one request at a time (`demo_serve`); a `served-….json` that
FOLDER already holds is not served again. The ratio is over all cycles of the prompts that both answered with the same
tokens, its 95 % interval a bootstrap over prompts. Writes FOLDER/unshifted_kK.json.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel

from sdsie_sglang.demo import DemoCheckpoints, compose
from sdsie_sglang.eval import demo_serve, headline, intervals
from sdsie_sglang.eval.arguments import count, measuring, read_json
from sdsie_sglang.eval.machine import where

FIGURE = "unshifted_over_standalone_accept_len"
FIGURE_K = 5
LENGTHS = (3, 5, 7)


class Problem(ValueError):
    """Why there is no ratio; one line."""


class Prompt(BaseModel):
    """One prompt. `tokens`: of the answer, the prefill's not counted; cycles: verify passes of each side."""

    id: str
    category: str
    same_tokens: bool
    tokens: int
    unshifted_cycles: int
    standalone_cycles: int


class Comparison(BaseModel):
    """The ratio, what it is made of, and the commands that served both sides. No interval from a single prompt."""

    k: int
    new_tokens: int
    dtype: str
    where: str
    command: str
    date: str
    served_by: list[str]
    unshifted_accept_length: float
    standalone_accept_length: float
    ratio: float
    low: float | None
    high: float | None
    prompts: list[Prompt]


def served(
    folder: Path, name: str, models: DemoCheckpoints, new_tokens: int, dtype: str, sglang: Sequence[str]
) -> dict[str, Any]:
    """The folder's record of a method, served now if it is not there. Raises Problem for one of other settings."""
    path = folder / f"served-{name}.json"
    if not path.exists():
        demo_serve.write(demo_serve.serve(name, models, new_tokens, dtype=dtype, sglang=sglang), folder)
    try:
        record = read_json(path, "the record")
    except ValueError as error:
        raise Problem(str(error)) from None
    wanted = demo_serve.METHODS[name].checkpoints(models)
    if record.get("checkpoints", wanted) != wanted:
        raise Problem(f"{path} was served with other models")
    if (record["new_tokens"], record["dtype"]) != (new_tokens, dtype):
        raise Problem(f"{path} was served with {record['new_tokens']} new tokens in {record['dtype']}")
    if (flags := record.get("sglang", [])) != list(sglang):  # the first records had no further flags
        raise Problem(f"{path} was served with --sglang {' '.join(flags) or '(nothing)'}")
    return record


def compare(unshifted: dict[str, Any], standalone: dict[str, Any]) -> Comparison:
    """Two records of `demo_serve` with the same prompts. Raises Problem if no answer is the same."""
    theirs = {answer["id"]: answer for answer in standalone["answers"]}
    if list(theirs) != [answer["id"] for answer in unshifted["answers"]]:
        raise Problem("the two records are not of the same prompts")
    prompts = [
        Prompt(
            id=ours["id"],
            category=ours["category"],
            same_tokens=ours["tokens"] == theirs[ours["id"]]["tokens"],
            tokens=len(ours["tokens"]) - ours["prompt_length"] - 1,
            unshifted_cycles=ours["verify_count"],
            standalone_cycles=theirs[ours["id"]]["verify_count"],
        )
        for ours in unshifted["answers"]
    ]
    counts = np.array([(p.tokens, p.unshifted_cycles, p.standalone_cycles) for p in prompts if p.same_tokens], float)
    if not len(counts):
        raise Problem("no prompt was answered with the same tokens")
    tokens, ours_all, theirs_all = counts.sum(0)

    def statistic(p: Any, r: Any) -> Any:
        return counts[p, 2].sum(-1) / counts[p, 1].sum(-1) - 1

    change = intervals.estimate(statistic, len(counts), 1, seed=0)
    return Comparison(
        k=unshifted["drafted"],
        new_tokens=unshifted["new_tokens"],
        dtype=unshifted["dtype"],
        where=where(unshifted["machine"]),
        command=headline.this_command(),
        date=headline.today(),
        served_by=[record.get("command", "") for record in (unshifted, standalone)],
        unshifted_accept_length=tokens / ours_all,
        standalone_accept_length=tokens / theirs_all,
        ratio=1 + change.value,
        low=None if change.low is None else 1 + change.low,
        high=None if change.high is None else 1 + change.high,
        prompts=prompts,
    )


def figure(comparison: Comparison, record: str) -> headline.Figure:
    same = sum(prompt.same_tokens for prompt in comparison.prompts)
    return headline.Figure(
        name=FIGURE,
        value=round(comparison.ratio, 4),
        low=None if comparison.low is None else round(comparison.low, 4),
        high=None if comparison.high is None else round(comparison.high, 4),
        unit="1",
        where=comparison.where,
        record=record,
        command=comparison.command,
        date=comparison.date,
        note=f"demo pair, K = {comparison.k}, {comparison.dtype}, up to {comparison.new_tokens} new tokens; "
        f"{comparison.unshifted_accept_length:.3f} against {comparison.standalone_accept_length:.3f} tokens a cycle "
        f"over the {same} of {len(comparison.prompts)} prompts that both answered with the same tokens; 95 % interval "
        "over prompts",
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m sdsie_sglang.eval.unshifted",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", type=Path, nargs="?", default=demo_serve.RESULTS)
    parser.add_argument("--target", type=Path)
    parser.add_argument("--draft", type=Path)
    parser.add_argument("--k", type=int, choices=LENGTHS, default=FIGURE_K)
    parser.add_argument("--new-tokens", type=count, default=128, help="of an answer at most (128)")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--headline", action="store_true", help="put the ratio into headline.json (demo, K = 5)")
    parser.add_argument("--sglang", nargs=argparse.REMAINDER, default=[], help="further flags of both servers")
    options = parser.parse_args(argv)
    if (options.target is None) != (options.draft is None):
        parser.error("--target and --draft go together")
    if options.target is not None and options.folder == demo_serve.RESULTS:
        parser.error("a pair of your own needs a FOLDER of its own")
    if options.headline and (options.target is not None or options.k != FIGURE_K):
        parser.error(f"--headline quotes the demo's models at K = {FIGURE_K}")
    try:
        own = options.target is not None
        with measuring("unshifted"):
            models = DemoCheckpoints(options.target, options.draft, None) if own else compose()
            ours, theirs = (
                served(options.folder, name, models, options.new_tokens, options.dtype, options.sglang)
                for name in (f"draft-k{options.k}", f"standalone-k{options.k}")
            )
        comparison = compare(ours, theirs)
    except Problem as error:
        print(f"unshifted: {error}", file=sys.stderr)
        return 2
    path = (options.folder / f"unshifted_k{options.k}.json").resolve()
    path.write_text(comparison.model_dump_json(indent=1) + "\n")
    low, high = comparison.low, comparison.high
    interval = "no interval" if low is None or high is None else f"{low:.4f} to {high:.4f}"
    print(
        f"{comparison.unshifted_accept_length:.3f} tokens a cycle unshifted, "
        f"{comparison.standalone_accept_length:.3f} by STANDALONE: {comparison.ratio:.4f} "
        f"({interval}), "
        f"{sum(p.same_tokens for p in comparison.prompts)} of {len(comparison.prompts)} answers the same"
    )
    if options.headline:
        headline.update([figure(comparison, headline.in_repository(path))])
    return 0


if __name__ == "__main__":
    sys.exit(main())
