"""Traces: what a cycle would have found at every position of a plain greedy answer.

`python -m sdsie_sglang.eval.trace` reads `eval/results/demo/answers.json` and writes
`eval/results/traces/demo-draft.npz` (minutes on two cores, no server). With greedy decoding any policy can then
be replayed exactly: see `eval/simulate.py`.
"""

import argparse
import json
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from tqdm import tqdm

from sdsie_sglang.demo import DemoError, compose
from sdsie_sglang.demo.llama import Llama
from sdsie_sglang.demo.replay import ServedText, repeated_share
from sdsie_sglang.eval import machine
from sdsie_sglang.eval.arguments import count, one_line, read_json
from sdsie_sglang.eval.draft_chains import draft_chains
from sdsie_sglang.eval.headline import ROOT, this_command, today
from sdsie_sglang.gears.settings import MAX_K
from sdsie_sglang.kernels.entropy import entropy_bits

FORMAT = 1
TRACES = ROOT / "eval" / "results" / "traces" / "demo-draft.npz"
ANSWERS = ROOT / "eval" / "results" / "demo" / "answers.json"
STEPS = MAX_K


@dataclass(frozen=True)
class Trace:
    """One answer of n tokens. Position t means: the answer's tokens 0 … t are known, t + 1 comes next.

    The prefill gives token 0, so a request's first cycle starts at t = 0 and its last at n - 2 at most.

    Args:
        entropy_bits: [n] float32, the target's entropy of the distribution that token t + 1 came from.
        run: [n] uint8, how many of the draft's next `STEPS` greedy proposals from t are the answer's; none
            can be where the answer ends.
        draft_entropy_bits, draft_top_probability: [n, STEPS] float32, of the draft along its own proposal
            from t (stored with 11 bits of precision).
        repeated: share of the answer's 4-grams that occurred before.
    """

    id: str
    category: str
    is_code: bool
    repeated: float
    entropy_bits: np.ndarray
    run: np.ndarray
    draft_entropy_bits: np.ndarray
    draft_top_probability: np.ndarray

    def __len__(self) -> int:
        """Tokens of the answer, the prefill's included."""
        return len(self.run)

    def cut(self, tokens: int) -> "Trace":
        """The same answer had it been stopped after `tokens` tokens."""
        n = min(tokens, len(self))
        return Trace(
            self.id,
            self.category,
            self.is_code,
            self.repeated,
            self.entropy_bits[:n],
            np.minimum(self.run[:n], np.arange(n - 1, -1, -1)).astype(np.uint8),
            self.draft_entropy_bits[:n],
            self.draft_top_probability[:n],
        )


@dataclass(frozen=True)
class TraceSet:
    """Traces and where they come from."""

    traces: tuple[Trace, ...]
    about: dict[str, Any]


def trace_answer(target: Llama, draft: Llama, answer: dict[str, Any]) -> tuple[Trace, int]:
    """One answer's trace, and how many of its tokens are not what `target` itself would write next."""
    text = ServedText(answer["tokens"], answer["prompt_length"])
    tokens = torch.tensor(text.tokens, device=target.embedding.device)
    first = text.prompt_length
    with torch.inference_mode():
        logits = F.linear(target(tokens[None])[0][0, first:], target.embedding)
    strange = int((logits[:-1].argmax(-1) != tokens[first + 1 :]).sum())
    chains = draft_chains(draft, tokens, first, STEPS)
    trace = Trace(
        id=answer["id"],
        category=answer["category"],
        is_code=answer["is_code"],
        repeated=repeated_share(text.tokens[first:]),
        entropy_bits=entropy_bits(logits).numpy(force=True),
        run=run_lengths(chains.tokens.numpy(force=True), tokens[first:].numpy(force=True)),
        draft_entropy_bits=chains.entropy_bits.numpy(force=True),
        draft_top_probability=chains.top_probability.numpy(force=True),
    )
    return trace, strange


def run_lengths(proposals: np.ndarray, answer: np.ndarray) -> np.ndarray:
    """[n] uint8: leading tokens of proposals[t] that equal answer[t + 1 :].

    Args:
        proposals: [n, steps] token ids, proposals[t] drafted after the answer's token t.
        answer: [n] token ids.
    """
    steps = proposals.shape[1]
    padded = np.concatenate([answer[1:], np.full(steps, -1)])
    following = np.lib.stride_tricks.sliding_window_view(padded, steps)[: len(answer)]
    return np.cumprod(proposals == following, axis=1).sum(1).astype(np.uint8)


def save(path: Path, traces: Sequence[Trace], about: dict[str, Any]) -> None:
    """One compressed file; the draft's figures in half precision."""
    names = [{"id": t.id, "category": t.category, "is_code": t.is_code, "repeated": t.repeated} for t in traces]
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(
        path,
        about=np.array(json.dumps({"format": FORMAT, **about, "answers": names})),
        length=np.array([len(t) for t in traces]),
        entropy_bits=np.concatenate([t.entropy_bits for t in traces]).astype(np.float32),
        run=np.concatenate([t.run for t in traces]).astype(np.uint8),
        draft_entropy_bits=np.concatenate([t.draft_entropy_bits for t in traces]).astype(np.float16),
        draft_top_probability=np.concatenate([t.draft_top_probability for t in traces]).astype(np.float16),
    )


def load(path: Path = TRACES) -> TraceSet:
    """Raises ValueError with one line if the file is no trace file, of another format, or empty."""
    try:
        with path.open("rb") as opened:
            whole = zipfile.is_zipfile(opened)
    except OSError as error:
        raise ValueError(f"traces {path}: {error.strerror}") from None
    if not whole:
        raise ValueError(f"traces {path}: not a trace file, or a part of one: write it with eval.trace")
    with np.load(path) as file:
        if "about" not in file:
            raise ValueError(f"traces {path}: not written by eval.trace")
        about = json.loads(str(file["about"]))
        if about.pop("format") != FORMAT:
            raise ValueError(f"traces {path}: not of format {FORMAT}: write them anew with eval.trace")
        if not about["answers"]:
            raise ValueError(f"traces {path}: there is no answer in them")
        ends = np.cumsum(file["length"])[:-1]
        columns = [
            np.split(file[name].astype(kind), ends)
            for name, kind in (
                ("entropy_bits", np.float32),
                ("run", np.uint8),
                ("draft_entropy_bits", np.float32),
                ("draft_top_probability", np.float32),
            )
        ]
    names = about.pop("answers")
    traces = (Trace(**name, **_named(parts)) for name, *parts in zip(names, *columns, strict=True))
    return TraceSet(tuple(traces), about)


def _named(parts: Sequence[np.ndarray]) -> dict[str, Any]:
    return dict(zip(("entropy_bits", "run", "draft_entropy_bits", "draft_top_probability"), parts, strict=True))


def read_answers(path: Path) -> dict[str, Any]:
    """A record of plain greedy answers. Raises ValueError with one line."""
    record = read_json(path, "answers")
    if not record.get("answers"):
        raise ValueError(f"answers {path}: there is no answer in them")
    return record


def main() -> None:
    """Trace every answer of a record and write the file."""
    parser = argparse.ArgumentParser(prog="python -m sdsie_sglang.eval.trace", description=__doc__)
    parser.add_argument("--answers", type=Path, default=ANSWERS, help="record of plain greedy answers")
    parser.add_argument("--limit", type=count, help="only the first answers")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=TRACES)
    options = parser.parse_args()
    with one_line(parser):
        record = read_answers(options.answers)
        options.out.parent.mkdir(parents=True, exist_ok=True)
    models = compose()
    if models.draft is None:
        raise DemoError("the draft's weights are not shipped with this checkout")
    target, draft = (
        Llama.from_checkpoint(folder).float().to(options.device) for folder in (models.target, models.draft)
    )
    traces, strange = [], 0
    for answer in tqdm(record["answers"][: options.limit], desc="traces"):
        trace, differing = trace_answer(target, draft, answer)
        traces.append(trace)
        strange += differing
    about = {
        "target": "SmolLM2-135M-Instruct",
        "draft": "demo draft",
        "dtype": "float32",
        "answers_from": options.answers.name,
        "tokens_not_argmax": strange,
        "machine": machine.describe(),
        "command": this_command(),
        "date": today(),
    }
    save(options.out, traces, about)
    print(f"{options.out}: {len(traces)} answers, {sum(map(len, traces))} positions, {strange} tokens not argmax")


if __name__ == "__main__":
    main()
