"""Writes the demo's table: accept lengths of draft and head on the 27 prompts, and what servers say.

`python -m sdsie_sglang.eval.demo_table` reads `eval/results/demo/answers.json` and the `served-….json`
beside it, writes `replay.json` there, its section of `sdsie_sglang/demo/README.md`, and three figures of
`eval/results/headline.json`.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sdsie_sglang.demo import compose
from sdsie_sglang.eval.compare import PartSummary, PhaseSummary, Summary
from sdsie_sglang.eval.demo_replay import (
    CHAIN_LENGTHS,
    DRAFT_LENGTHS,
    Agreement,
    Replayed,
    Replayer,
    accept_interval,
    accept_length,
    compare,
    position_rates,
    read_served,
    set_threads,
)
from sdsie_sglang.eval.headline import ROOT, Figure, this_command, today, update
from sdsie_sglang.eval.machine import where
from sdsie_sglang.eval.prompts import CATEGORIES

RESULTS = ROOT / "eval" / "results" / "demo"
PAGE = ROOT / "sdsie_sglang" / "demo" / "README.md"
COLUMNS = [("draft", k) for k in DRAFT_LENGTHS] + [("eagle3", k) for k in CHAIN_LENGTHS]
DRAFTERS = ("draft", "shifted", "eagle3")
SERVED_ON_A_GPU = ROOT / "eval" / "results" / "ruler" / "short" / "summary.json"

BEGIN, END = "<!-- written by demo_table -->", "<!-- end of what demo_table writes -->"
NEW_PAGE = f"# Demo\n\n{BEGIN}\n{END}\n"
SECTION = """\
## Accept length

Tokens a cycle, the prefill's token not counted; greedy, float32, 27 prompts, up to {new_tokens} new tokens,
by replay of the target's answers. An answer loops if more than 30 % of its 4-grams occurred before; the
small target often does, and loops flatter every draft. The tree (topk 8, 32 verified tokens, 5 steps) has no
replay: its column is what SGLang served{tree_note}.

{lengths}

SGLang feeds its STANDALONE draft without the first token. The same draft fed like that gives
{shifted} at K = 3, 5, 7 over all prompts.

## Acceptance by position

How often the n-th drafted token is right when all before it were (all prompts).

{positions}

## Servers agree

Each method served the prompts through SGLang 0.5.23 ({served_where}), greedy in float32.
"Predicted" counts the prompts whose number of verify passes the replay names exactly; "identical" those whose
tokens are plain decoding's. `draft-k…` is this project's fixed gear, `standalone-k…` SGLang as shipped with the
same draft, `eagle3-tree` has topk 8 and 32 verified tokens. Where fewer new tokens were asked for than above, fewer
answers loop and accept lengths are shorter.

{agreement}

## Speed on a GPU

{speeds_where}, bf16, FlashAttention 3 (the tree: flashinfer), the 27 prompts one at a time, up to
{speeds_tokens} new tokens, by the ruler
(`eval/results/ruler/short`, with its report: flags, categories, fidelity). Speed is against plain decoding measured
before and after; square brackets hold 95 % intervals. `other-draft-k…` is the draft of four layers, see below. At this
size the host bounds a cycle, not memory, so nothing here says what a larger model gains.

{speeds}
"""


def lengths_table(answers: Sequence[Replayed], tree: Mapping[str, tuple[int, int]]) -> str:
    """One row a category, then all, code, and all without looping answers.

    Args:
        tree: by prompt, tokens that the tree's cycles committed and their number.
    """
    groups = {category: [a for a in answers if a.category == category] for category in CATEGORIES}
    groups["all"] = list(answers)
    groups["code (4 prompts)"] = [answer for answer in answers if answer.is_code]
    groups["all without loops"] = _without_loops(answers)
    groups["code without loops"] = _without_loops(groups["code (4 prompts)"])
    head = ["prompts", "answers", "looping", *(f"{_title(name)} {k}" for name, k in COLUMNS), "head tree"]
    rows = []
    for title, group in groups.items():
        counts = [str(len(group)), str(sum(answer.loops for answer in group))]
        chains = [f"{accept_length(group, name, k):.2f}" for name, k in COLUMNS]
        served = [tree[answer.id] for answer in group if answer.id in tree]
        cycles = sum(count for _, count in served)
        rows.append([title, *counts, *chains, f"{sum(n for n, _ in served) / cycles:.2f}" if cycles else "–"])
    return markdown(head, rows)


def tree_cycles(record: dict[str, Any] | None) -> dict[str, tuple[int, int]]:
    """Tokens committed and cycles of each prompt that the tree served; empty without its record."""
    answers = record["answers"] if record else []
    return {a["id"]: (len(a["tokens"]) - a["prompt_length"] - 1, a["verify_count"]) for a in answers}


def served_on_a_gpu() -> tuple[Summary, PartSummary, PhaseSummary]:
    """What the ruler measured of the demo's models, one request at a time."""
    summary = Summary.model_validate_json(SERVED_ON_A_GPU.read_text())
    part, phase = next((part, ph) for part in summary.parts for ph in part.phases if ph.concurrency == 1)
    return summary, part, phase


def speeds_table(phase: PhaseSummary) -> str:
    """Speed and energy of each way of decoding."""
    rows = []
    for method in (phase.baseline, *phase.methods):
        name = f"`{method.method}`" + (", before and after" if method is phase.baseline else "")
        gain, length, energy = method.change and method.change.speed, method.accept_length, method.j_per_token
        over = f"{1 + gain.value:.2f}" if gain else "1"
        if gain and gain.low is not None and gain.high is not None:
            over += f" [{1 + gain.low:.2f}, {1 + gain.high:.2f}]"
        rows.append(
            [
                name,
                f"{method.tok_per_s:.0f}",
                over,
                f"{energy:.3f}" if energy else "–",
                f"{length:.2f}" if length else "–",
            ]
        )
    return markdown(["method", "tokens/s", "over plain", "J a token", "tokens a pass"], rows)


def _title(drafter: str) -> str:
    return "draft K =" if drafter == "draft" else "head chain"


def positions_table(answers: Sequence[Replayed]) -> str:
    """Draft and head, 1st … 7th token. The head was trained for five steps."""
    rates = {name: position_rates(answers, name) for name in ("draft", "eagle3")}
    head = ["", *(str(n + 1) for n in range(len(rates["draft"])))]
    return markdown(head, [[name, *(f"{rate:.2f}" for rate in values)] for name, values in rates.items()])


def agreement_table(agreements: Sequence[Agreement]) -> str:
    """One row a served method."""

    def share(part: int | None, whole: int) -> str:
        return "–" if part is None else f"{part} of {whole}"

    rows = [
        [
            f"`{a.method}`",
            str(a.new_tokens),
            share(a.predicted, a.prompts),
            share(a.identical, a.prompts),
            "–" if a.accept_length is None else f"{a.accept_length:.2f}",
        ]
        for a in agreements
    ]
    return markdown(["method", "new tokens", "predicted", "identical", "accept length"], rows)


def markdown(head: list[str], rows: list[list[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def figures(answers: Sequence[Replayed], record: str) -> list[Figure]:
    """The headline figures of draft and head."""
    code = [answer for answer in answers if answer.is_code]
    named = {
        "draft_accept_len_k5_all": (answers, "draft"),
        "draft_accept_len_k5_code": (code, "draft"),
        "eagle3_accept_len_chain5_all": (answers, "eagle3"),
    }
    return [
        Figure(
            name=name,
            value=round(accept_length(group, drafter, 5), 4),
            low=round(accept_interval(group, drafter, 5)[0], 4),
            high=round(accept_interval(group, drafter, 5)[1], 4),
            unit="tokens per cycle",
            where=f"replay in float32 on {where()}; trained on one H200",
            record=record,
            command=this_command(),
            date=today(),
            note="95 % interval over prompts; prefill token not counted; "
            f"without looping answers {accept_length(_without_loops(group), drafter, 5):.2f}",
        )
        for name, (group, drafter) in named.items()
    ]


def _without_loops(answers: Sequence[Replayed]) -> list[Replayed]:
    return [answer for answer in answers if not answer.loops]


def _record(answers: Sequence[Replayed], agreements: Sequence[Agreement]) -> dict[str, Any]:
    """Raw figures: per answer, drafter and draft length its tokens and cycles; served records' agreement."""
    rows = [
        {
            "id": answer.id,
            "category": answer.category,
            "is_code": answer.is_code,
            "loops": answer.loops,
            "tokens": len(answer.answer),
            "walks": {name: {str(k): asdict(answer.walk(name, k)) for k in (3, 5, 7)} for name in DRAFTERS},
        }
        for answer in answers
    ]
    return {"answers": rows, "served": [asdict(agreement) for agreement in agreements]}


def write_section(page: Path, section: str, begin: str = BEGIN, end: str = END) -> None:
    """Replace what lies between the two marks of the page; the rest of it is written by hand."""
    text = page.read_text() if page.is_file() else NEW_PAGE
    before, rest = text.split(begin)
    page.write_text(f"{before}{begin}\n{section}{end}{rest.split(end)[1]}")


def main() -> None:
    """Replay, compare, write."""
    parser = argparse.ArgumentParser(prog="python -m sdsie_sglang.eval.demo_table", description=__doc__)
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    options.results = options.results.resolve()
    if not (options.results / "answers.json").is_file():
        parser.error(f"{options.results} holds no answers.json")
    try:
        summary, part, phase = served_on_a_gpu()
    except (OSError, ValueError, StopIteration) as error:
        parser.error(f"{SERVED_ON_A_GPU} cannot be used ({error or 'nothing one request at a time'})")
    quoted = options.results == RESULTS
    set_threads()
    replayer = Replayer(compose())
    source = json.loads((options.results / "answers.json").read_text())
    answers = [replayer.replay(answer, DRAFTERS) for answer in source["answers"]]
    served = read_served(options.results)
    agreements = [compare(record, served.get("plain"), replayer) for record in served.values()]
    path = options.results / "replay.json"
    path.write_text(json.dumps(_record(answers, agreements)) + "\n")
    tree = served.get("eagle3-tree")
    section = SECTION.format(
        new_tokens=source["new_tokens"],
        tree_note=f" on the CPU, up to {tree['new_tokens']} new tokens" if tree else "",
        lengths=lengths_table(answers, tree_cycles(tree)),
        speeds=speeds_table(phase),
        speeds_where=where(part.machine),
        speeds_tokens=summary.config["tokens"],
        shifted=", ".join(f"{accept_length(answers, 'shifted', k):.2f}" for k in DRAFT_LENGTHS),
        positions=positions_table(answers),
        served_where=", ".join(sorted({record["where"] for record in served.values()})) or "none yet",
        agreement=agreement_table(agreements),
    )
    if quoted:  # another folder's table is printed only
        write_section(PAGE, section)
        update(figures(answers, str(path.relative_to(ROOT))))
    print(section)


if __name__ == "__main__":
    main()
