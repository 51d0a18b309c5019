"""What each INT4 calibration costs SmolLM2: perplexity, KL, and the accept length of the self-draft.

    python -m sdsie_sglang.eval.int4_fidelity      # writes eval/results/int4/fidelity.json and fidelity.md

No server and no GPU: each calibration is written as the checkpoint that SGLang would load, read back, and run in
float32 in PyTorch. Held-out text is that of Python's own language reference (`pydoc_data.topics`), which no
calibration reads. Accept lengths are exact for greedy decoding: from every position of the target's plain answers
to the 27 prompts, the INT4 model proposes on the target's own keys and values, as the server's does. A run that
was cut off goes on where it stopped.
"""

import argparse
import hashlib
import json
import math
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from pydoc_data import topics
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import BaseModel, ConfigDict
from safetensors.torch import save_file
from tqdm import tqdm
from transformers import AutoTokenizer

from sdsie_sglang.demo import compose
from sdsie_sglang.demo.llama import Llama
from sdsie_sglang.eval import machine
from sdsie_sglang.eval.demo_table import markdown
from sdsie_sglang.eval.draft_chains import self_chains
from sdsie_sglang.eval.headline import ROOT, this_command, today
from sdsie_sglang.eval.prompts import CATEGORIES
from sdsie_sglang.eval.trace import ANSWERS, run_lengths
from sdsie_sglang.int4.checkpoint import load_effective
from sdsie_sglang.int4.quantize import quantise_folder
from sdsie_sglang.int4.settings import CALIBRATIONS, Int4Settings

RESULTS = ROOT / "eval" / "results" / "int4"
WINDOW = 512  # tokens read at once; each but the first is predicted
STEPS = 5


class Fidelity(BaseModel):
    """One calibration.

    Args:
        gigabytes: of the checkpoint.
        perplexity: of the held-out text.
        kl_nats: mean KL(unquantised || INT4) a token of it.
        top1: share of its positions where both name the same next token.
        runs: an answer's id -> for each of its positions, how many of `STEPS` proposals the target accepts.
    """

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    calibration: str
    gigabytes: float
    perplexity: float
    kl_nats: float
    top1: float
    runs: dict[str, list[int]]


class Record(BaseModel):
    """All calibrations, and what they were measured on."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    model: str
    text: str
    text_sha256: str
    text_tokens: int
    answer_tokens: int
    perplexity: float
    answers: list[dict[str, Any]]
    calibrations: list[Fidelity]
    machine: dict[str, Any]
    command: str
    date: str


def held_out_text(characters: int) -> str:
    """The first characters of the language reference, topics in alphabetical order."""
    return "\n\n".join(topics.topics[name] for name in sorted(topics.topics))[:characters]


def windows_of(folder: Path, text: str, tokens: int) -> torch.Tensor:
    """[windows, WINDOW] token ids, `tokens` in all at most."""
    ids = AutoTokenizer.from_pretrained(folder)(text)["input_ids"][:tokens]
    count = len(ids) // WINDOW
    return torch.tensor(ids[: count * WINDOW]).view(count, WINDOW)


def log_probabilities(model: Llama, window: torch.Tensor) -> torch.Tensor:
    """[WINDOW - 1, vocabulary] of each token but the first."""
    with torch.inference_mode():
        return F.linear(model(window[None])[0][0, :-1], model.embedding).log_softmax(-1)


def perplexity(predicted: Sequence[torch.Tensor], windows: torch.Tensor) -> float:
    """exp of the mean negative log-likelihood; predicted: each window's log-probabilities."""
    nll = [-p.gather(1, w[1:, None]).mean() for p, w in zip(predicted, windows, strict=True)]
    return math.exp(float(torch.stack(nll).mean()))


def compare(plain: Sequence[torch.Tensor], low: Llama, windows: torch.Tensor) -> dict[str, float]:
    """Perplexity of `low`, and how far its distributions are from the unquantised model's log-probabilities."""
    sums = np.zeros(3)
    for p, window in zip(plain, windows, strict=True):
        q = log_probabilities(low, window)
        nll = -q.gather(1, window[1:, None]).mean()
        kl = (p.exp() * (p - q)).sum(-1).mean()
        sums += [float(nll), float(kl), float((p.argmax(-1) == q.argmax(-1)).float().mean())]
    nll, kl, top1 = sums / len(windows)
    return {"perplexity": math.exp(nll), "kl_nats": kl, "top1": top1}


def accept_length(runs: Iterable[Sequence[int]], k: int) -> float:
    """Tokens a cycle of gear K over answers: cycles walk each from its first token, which the prefill gives."""
    tokens, cycles = 0, 0
    for run in runs:
        position = 0
        while position < len(run) - 1:
            position += min(run[position], k) + 1
            cycles += 1
        tokens += len(run) - 1
    return tokens / cycles if cycles else math.nan


def quantised_model(folder: Path, calibration: str, scratch: Path) -> tuple[Llama, int]:
    """The model as its saved checkpoint multiplies, in float32; and the checkpoint's bytes."""
    saved = scratch / calibration
    size = quantise_folder(folder, saved, Int4Settings.model_validate({"calibration": calibration}), "cpu")
    plain = scratch / f"{calibration}-plain"
    plain.mkdir()
    save_file({key: value.contiguous() for key, value in load_effective(saved).items()}, plain / "model.safetensors")
    return Llama.from_checkpoint(plain).float(), size


def measure(options: argparse.Namespace) -> Record:
    """One calibration after the other, each written when it is done; those that the record has are kept."""
    target = compose().target
    plain = Llama.from_checkpoint(target).float()
    text = held_out_text(20 * options.text_tokens)
    windows = windows_of(target, text, options.text_tokens)
    expected = [log_probabilities(plain, window) for window in windows]
    source = json.loads(ANSWERS.read_text())["answers"][: options.limit]
    answers = [{**a, "tokens": a["tokens"][: a["prompt_length"] + options.answer_tokens]} for a in source]
    record = Record(
        model="SmolLM2-135M-Instruct",
        text="pydoc_data.topics in alphabetical order",
        text_sha256=hashlib.sha256(text.encode()).hexdigest(),
        text_tokens=windows.numel(),
        answer_tokens=options.answer_tokens,
        perplexity=perplexity(expected, windows),
        answers=[{key: a[key] for key in ("id", "category", "is_code")} for a in answers],
        calibrations=[],
        machine=machine.describe(),
        command=this_command(),
        date=today(),
    )
    done = {found.calibration: found for found in kept(record, options.out)}
    for calibration in options.calibrations:
        if calibration not in done:
            done[calibration] = measure_one(calibration, target, plain, answers, expected, windows)
        record.calibrations = [done[name] for name in CALIBRATIONS if name in done]
        write(record, options.out)
    return record


def measure_one(
    calibration: str,
    target: Path,
    plain: Llama,
    answers: Sequence[dict[str, Any]],
    expected: Sequence[torch.Tensor],
    windows: torch.Tensor,
) -> Fidelity:
    """One calibration, written to a scratch folder as the checkpoint that SGLang would load."""
    with tempfile.TemporaryDirectory() as scratch:
        low, size = quantised_model(target, calibration, Path(scratch))
    runs = {}
    for answer in tqdm(answers, desc=calibration):
        ids, first = torch.tensor(answer["tokens"]), answer["prompt_length"]
        proposals = self_chains(plain, low, ids, first, STEPS).tokens.numpy()
        runs[answer["id"]] = run_lengths(proposals, ids[first:].numpy()).tolist()
    return Fidelity(calibration=calibration, gigabytes=size / 1e9, runs=runs, **compare(expected, low, windows))


def kept(record: Record, out: Path) -> list[Fidelity]:
    """Calibrations that an earlier run measured on the same text and answers."""
    path = out / "fidelity.json"
    if not path.exists():
        return []
    earlier = Record.model_validate_json(path.read_text())
    same = ("model", "text_sha256", "text_tokens", "answer_tokens", "answers")
    return earlier.calibrations if all(getattr(earlier, key) == getattr(record, key) for key in same) else []


def write(record: Record, out: Path) -> None:
    """The record, and its page."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "fidelity.json").write_text(record.model_dump_json() + "\n")
    (out / "fidelity.md").write_text(page(record))


def page(record: Record) -> str:
    """Two tables in Markdown."""
    fidelity = [
        ["none (float32)", "", f"{record.perplexity:.2f}", "0", "100 %", *["" for _ in range(2, STEPS + 1)]],
        *(
            [
                f"`{f.calibration}`",
                f"{f.gigabytes:.3f}",
                f"{f.perplexity:.2f}",
                f"{f.kl_nats:.4f}",
                f"{100 * f.top1:.1f} %",
                *(f"{accept_length(f.runs.values(), k):.2f}" for k in range(2, STEPS + 1)),
            ]
            for f in record.calibrations
        ),
    ]
    categories = [name for name in CATEGORIES if any(a["category"] == name for a in record.answers)]
    by_category = [
        [f"`{f.calibration}`"]
        + [
            f"{accept_length((f.runs[a['id']] for a in record.answers if a['category'] == name), STEPS):.2f}"
            for name in categories
        ]
        + [f"{accept_length((f.runs[a['id']] for a in record.answers if a['is_code']), STEPS):.2f}"]
        for f in record.calibrations
    ]
    head = ["calibration", "GB", "perplexity", "KL, nats", "same top token"]
    return PAGE.format(
        record=record,
        tokens=record.answer_tokens,
        fidelity=markdown([*head, *(f"K = {k}" for k in range(2, STEPS + 1))], fidelity),
        steps=STEPS,
        categories=markdown(["calibration", *categories, "code"], by_category),
    )


PAGE = """# INT4 on {record.model}

Written by `{record.command}` on {record.date}; raw figures in `fidelity.json`.

Perplexity and KL (unquantised || INT4) on {record.text_tokens} tokens of Python's language reference; the output
head, which is the embedding, stays unquantised. Right: accept length of the self-draft, tokens a cycle of gear K,
greedy, over at most {tokens} tokens of the target's plain answer to each of the 27 prompts; the prefill's token not
counted.

{fidelity}

Accept length at K = {steps} by category:

{categories}
"""


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m sdsie_sglang.eval.int4_fidelity",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--calibrations", nargs="+", choices=list(CALIBRATIONS), default=list(CALIBRATIONS))
    parser.add_argument("--text-tokens", type=int, default=8 * WINDOW, help="of the held-out text")
    parser.add_argument("--answer-tokens", type=int, default=96, help="of each answer")
    parser.add_argument("--limit", type=int, help="only the first answers")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    record = measure(options)
    print(page(record))


if __name__ == "__main__":
    main()
