"""Do sampled answers have the target's distribution, whatever the gear? A chi-square test on a small vocabulary.

    python -m sdsie_sglang.eval.sampling_check eval/results/sampling_cpu.json
    python -m sdsie_sglang.eval.sampling_check OUT.json --top-k 40 --top-p 0.8 --sglang --attention-backend triton

A random target of 512 tokens and a draft that agrees with it about two times in three answer at temperature 1, with
top-k, top-p and min-p if asked for (`--top-k 40 --top-p 0.8`: of the whole distribution, as SGLang's sampler does). For
each drawn token the target's own conditional distribution is computed; its tokens, sorted by probability, are cut
into cells, and the cells' counts are held against the sum of their probabilities. Exit code 1 if any gear is rejected.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from scipy.stats import chisquare
from tqdm import tqdm

from sdsie_sglang.eval import arguments, headline, machine
from sdsie_sglang.eval.server import Server
from sdsie_sglang.eval.tiny_models import tiny_prompts, write_tiny_models

CELLS = 12
MIN_EXPECTED = 5.0
REJECT_BELOW = 1e-3
MAX_OUTSIDE = 1e-3
"""Share of drawn tokens beyond the filters' edge: where float32 and float64 see it differently."""
NO_FILTERS = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
POLICIES: dict[str, dict[str, Any]] = {
    "gear 0": {"policy": "plain"},
    **{f"gear {k}": {"policy": "fixed", "k": k} for k in (1, 3, 5)},
    "switching": {"policy": "schedule", "schedule": "5x2,0x3,3x1,0x1"},
}


def cells_of(probabilities: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Cuts each row's tokens, most likely first, into `CELLS` of about the same probability.

    Args:
        probabilities: [n, vocabulary] float64.

    Returns:
        The cell of each token [n, vocabulary] and the mass of each cell [n, CELLS].
    """
    ordered, order = probabilities.sort(dim=-1, descending=True)
    before = ordered.cumsum(-1) - ordered
    cell = (before * CELLS).floor().clamp(0, CELLS - 1).to(torch.int64)
    mass = torch.zeros(probabilities.shape[0], CELLS, dtype=torch.float64).scatter_add_(1, cell, ordered)
    return torch.zeros_like(order).scatter_(1, order, cell), mass


def filtered(probabilities: torch.Tensor, top_k: int, top_p: float, min_p: float) -> torch.Tensor:
    """What is left of each row [n, vocabulary], with a sum of 1: top-k and top-p of the whole distribution, of it what
    is at least `min_p` times as likely as the likeliest."""
    ordered, order = probabilities.sort(dim=-1, descending=True)
    rank = torch.arange(ordered.shape[-1])
    gone = ordered.cumsum(-1) - ordered > top_p
    if top_k > 0:
        gone |= rank >= top_k
    kept = ordered.masked_fill(gone | (ordered < min_p * ordered[:, :1]), 0.0)
    return torch.zeros_like(probabilities).scatter_(1, order, kept / kept.sum(-1, keepdim=True))


def count(
    model: Any, answers: Sequence[tuple[list[int], list[int]]], top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Observed and expected counts [CELLS] over all drawn tokens of (prompt, answer) pairs, and how many of the drawn
    tokens the filters leave out."""
    observed, expected = torch.zeros(CELLS, dtype=torch.float64), torch.zeros(CELLS, dtype=torch.float64)
    outside = 0
    for prompt, answer in answers:
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
        probabilities = filtered(torch.softmax(logits.double(), dim=-1), top_k, top_p, min_p)
        cell, mass = cells_of(probabilities)
        tokens = torch.tensor(answer).unsqueeze(1)
        outside += int((probabilities.gather(1, tokens) == 0).sum())
        drawn = cell.gather(1, tokens).flatten()
        observed += torch.bincount(drawn, minlength=CELLS)
        expected += mass.sum(0)
    return observed, expected, outside


def chi_square(observed: torch.Tensor, expected: torch.Tensor) -> tuple[float, float]:
    """Chi-square and its p-value; cells that expect fewer than `MIN_EXPECTED` draws are one cell, or none."""
    common = expected >= MIN_EXPECTED
    pairs = [torch.cat([counts[common], counts[~common].sum().unsqueeze(0)]).numpy() for counts in (observed, expected)]
    if pairs[1][-1] == 0:
        pairs = [counts[:-1] for counts in pairs]
    test = chisquare(*pairs)
    return float(test.statistic), float(test.pvalue)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m sdsie_sglang.eval.sampling_check",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--requests", type=arguments.count, default=200, help="of each policy (200)")
    parser.add_argument("--tokens", type=arguments.count, default=32, help="of each answer (32)")
    parser.add_argument("--at-once", type=arguments.count, default=8, help="requests at a time (8)")
    parser.add_argument("--top-k", type=arguments.count, default=0, help="left out: none")
    parser.add_argument("--top-p", type=float, default=1.0, help="left out: none")
    parser.add_argument("--min-p", type=float, default=0.0, help="left out: none")
    parser.add_argument("--sglang", nargs=argparse.REMAINDER, default=[], help="further flags for the server")
    args = parser.parse_args()
    if args.out.exists():
        parser.error(f"{args.out} is there: choose another file")
    with arguments.measuring("sampling_check"):
        return check(args)


def check(args: argparse.Namespace) -> int:
    """Draws, counts and writes the record; the exit code."""
    from transformers import AutoModelForCausalLM

    target, draft = write_tiny_models(Path(tempfile.mkdtemp(prefix="sdsie-tiny-")) / "models", head_dim=64)
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    prompts = tiny_prompts(8)
    filters = {"top_k": args.top_k, "top_p": args.top_p, "min_p": args.min_p}
    asked = {name: value for name, value in filters.items() if value != NO_FILTERS[name]}
    flags = [
        "--model-path", str(target), "--speculative-draft-model-path", str(draft), "--skip-tokenizer-init",
        "--context-length", "512", "--max-total-tokens", "16384", "--max-running-requests", str(args.at_once),
        "--sdsie-policy", "fixed", "--sdsie-gears", "0,1,3,5", *args.sglang,
    ]  # fmt: skip
    record: dict[str, Any] = {
        "machine": machine.describe(),
        "command": headline.this_command(),
        "date": headline.today(),
        "cells": CELLS,
        "filters": asked,
        "policies": {},
    }
    with Server.start(flags) as server, ThreadPoolExecutor(args.at_once) as pool:
        for name, policy in POLICIES.items():
            server.set_policy(**policy)

            def draw(seed: int) -> tuple[list[int], list[int], dict[str, int]]:
                prompt = prompts[seed % len(prompts)]
                done = server.generate(
                    prompt, temperature=1.0, max_new_tokens=args.tokens, ignore_eos=True, sampling_seed=seed, **asked
                )
                return prompt, done["output_ids"], done["meta_info"]["sdsie"]["cycles"]

            drawn = list(tqdm(pool.map(draw, range(args.requests)), total=args.requests, desc=name))
            observed, expected, outside = count(model, [(prompt, answer) for prompt, answer, _ in drawn], **filters)
            statistic, p_value = chi_square(observed, expected)
            record["policies"][name] = {
                "observed": observed.tolist(),
                "expected": expected.tolist(),
                "chi_square": statistic,
                "p_value": p_value,
                "outside": outside / (len(drawn) * args.tokens),
                "cycles": [cycles for *_, cycles in drawn][:8],
            }
            left_out = f", {outside} drawn tokens that the filters leave out" if asked else ""
            print(f"{name}: chi-square {statistic:.1f} over {CELLS} cells, p = {p_value:.3f}{left_out}", flush=True)
    arguments.replace_text(args.out, json.dumps(record, indent=1) + "\n")
    rejected = (each["p_value"] < REJECT_BELOW or each["outside"] > MAX_OUTSIDE for each in record["policies"].values())
    return 1 if any(rejected) else 0


if __name__ == "__main__":
    sys.exit(main())
