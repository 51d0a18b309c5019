"""Trains the demo's draft and EAGLE-3 head on one GPU, from text that the target writes itself.

    PYTHONPATH=. python scripts/train_demo_models/main.py generate --target DIR --run RUN --seconds 150
    PYTHONPATH=. python scripts/train_demo_models/main.py draft    --target DIR --run RUN --seconds 165
    PYTHONPATH=. python scripts/train_demo_models/main.py eagle3   --target DIR --run RUN --seconds 165
    PYTHONPATH=. python scripts/train_demo_models/ship.py --run RUN

`generate` writes the corpus, `draft` trains candidates of several depths and finishes the best, `eagle3`
trains the head for as long as the finished draft was trained. `draft` and `eagle3` save their state every minute and
go on from it when run again; they never take longer than their time box. `generate` does not: what thousands of
half-written conversations hold on the GPU is larger than its two and a half minutes are worth, so one that was
interrupted starts anew; one that finished is kept, and run again it does nothing. Each run of a stage is noted in
RUN/STAGE.runs.json: options, versions, hardware, seconds, whether it finished. DIR is the `target` folder that
`python -m sdsie_sglang.demo` prints.
"""

import argparse
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from corpus import Corpus, build
from features import Features
from judge import Texts, accept_lengths, held_out_texts, step_milliseconds
from loss import compile_divergence
from sampler import Sampler, chat_frame
from seeds import make_seeds
from training import DraftStudent, HeadStudent, Plan, Trainer
from transformers import AutoTokenizer

from sdsie_sglang.demo.eagle3_head import AUX_HIDDEN_STATES, Eagle3Head
from sdsie_sglang.demo.llama import Llama
from sdsie_sglang.demo.replay import ServedText, draft_flags, head_flags
from sdsie_sglang.eval import machine
from sdsie_sglang.eval.prompts import all_prompts

DRAFT_LENGTHS = (3, 5, 7)
CHAIN_LENGTHS = (3, 5, 7)


def generate(options: argparse.Namespace) -> None:
    """Sample conversations and write `corpus.npz` and, last, `corpus.json` (what was kept and dropped)."""
    if (options.run / "corpus.json").is_file():
        print(f"{options.run} holds a finished corpus: kept as it is", flush=True)
        return
    target, tokenizer = _target(options), AutoTokenizer.from_pretrained(options.target)
    seeds = make_seeds(options.seeds, options.seed)
    sampler = Sampler(target, tokenizer, seeds, options.slots, options.length, options.rows)
    start = time.monotonic()
    conversations = sampler.run(options.seconds)
    sampled = time.monotonic() - start
    before, between = chat_frame(tokenizer)
    evaluation = [tokenizer(prompt.text, add_special_tokens=False).input_ids for prompt in all_prompts()]
    corpus, counts = build(conversations, seeds, len(before), len(between), evaluation)
    corpus.save(options.run / "corpus.npz")
    answer_tokens = int((corpus.lengths - corpus.answer_starts).sum())
    facts = {
        "sampling_seconds": round(sampled, 1),
        "rows": counts,
        "kept_tokens": len(corpus.tokens),
        "kept_answer_tokens": answer_tokens,
        "greedy_rows": int(corpus.greedy.sum()),
        "held_out_rows": int(corpus.held_out.sum()),
    }
    (options.run / "corpus.json").write_text(json.dumps(facts, indent=1) + "\n")
    print(json.dumps(facts), flush=True)
    for row in range(min(options.show, len(corpus.lengths))):
        first = corpus.offsets[row]
        print("---", tokenizer.decode(corpus.tokens[first : first + corpus.lengths[row]].astype(int)))


def draft(options: argparse.Namespace) -> None:
    """Train each candidate a while, choose by measured tokens per millisecond, finish that one."""
    target = _target(options)
    features = _features(options, target, taps=())
    texts = _texts(options, features.corpus)
    plan = _plan(options)
    target_ms = step_milliseconds(target)
    kept = options.run / "draft-trials.json"  # a candidate is judged once: when resumed, it may have trained further
    trials = json.loads(kept.read_text()) if kept.is_file() else {}
    trainers = {}
    for layers in options.candidates:
        student = DraftStudent(Llama.from_checkpoint(options.target, layers).to(options.device))
        name = f"draft{len(layers)}"
        trainers[name] = Trainer(student, features, plan, options.run, name)
        if name in trials:
            continue
        trainers[name].train(options.trial_seconds)
        lengths = _draft_lengths(student.model, texts)
        fresh = Llama.from_checkpoint(options.target, layers).to(options.device, torch.bfloat16)
        own_ms = step_milliseconds(fresh)
        cycle_ms = target_ms + 5 * own_ms
        trials[name] = {
            "layers": list(layers),
            "target_step_ms": target_ms,
            "draft_step_ms": own_ms,
            "tokens_per_ms_k5": lengths["held out"]["all"]["5"] / cycle_ms,
            "accept_lengths": lengths,
        }
        kept.write_text(json.dumps(trials, indent=1) + "\n")
        print(json.dumps({name: trials[name]}), flush=True)
    chosen = _choose(trials, options.least)
    print("chosen", chosen, flush=True)
    trainers[chosen].train(plan.seconds)
    result = {
        "chosen": chosen,
        "trials": trials,
        "final": _draft_lengths(trainers[chosen].student.model, texts),
    }
    (options.run / "draft.json").write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result["final"]), flush=True)


def eagle3(options: argparse.Namespace) -> None:
    """Train the head."""
    target = _target(options)
    features = _features(options, target, taps=AUX_HIDDEN_STATES)
    texts = _texts(options, features.corpus)
    head = Eagle3Head.from_target(options.target).to(options.device)
    Trainer(HeadStudent(head), features, _plan(options), options.run, "eagle3").train(options.seconds)
    lengths = {
        name: accept_lengths(some, lambda text: head_flags(target, head, text, max(CHAIN_LENGTHS)), CHAIN_LENGTHS)
        for name, some in texts.items()
    }
    (options.run / "eagle3.json").write_text(json.dumps({"final": lengths}, indent=1) + "\n")
    print(json.dumps(lengths), flush=True)


def _draft_lengths(model: Llama, texts: dict[str, Texts]) -> dict[str, dict[str, dict[str, float]]]:
    return {
        name: accept_lengths(some, lambda text: [draft_flags(model, text)] * max(DRAFT_LENGTHS), DRAFT_LENGTHS)
        for name, some in texts.items()
    }


def _choose(trials: dict[str, dict], least: float) -> str:
    """The candidate with the most tokens per millisecond among those that accept enough, else the deepest."""
    enough = [name for name, trial in trials.items() if trial["accept_lengths"]["held out"]["all"]["5"] >= least]
    if not enough:
        return max(trials, key=lambda name: len(trials[name]["layers"]))
    return max(enough, key=lambda name: trials[name]["tokens_per_ms_k5"])


@contextmanager
def recorded(options: argparse.Namespace) -> Iterator[None]:
    """Notes a run of a stage in RUN/STAGE.runs.json, beside earlier ones, however it ends."""
    path = options.run / f"{options.stage}.runs.json"
    started, clock = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), time.monotonic()
    finished = False
    try:
        yield
        finished = True
    finally:
        run = {
            "started": started,
            "total_seconds": round(time.monotonic() - clock, 1),
            "finished": finished,
            "options": {name: v.name if isinstance(v, Path) else v for name, v in vars(options).items()},
            "machine": machine.describe(),
        }
        earlier = json.loads(path.read_text()) if path.is_file() else []
        path.write_text(json.dumps([*earlier, run], indent=1) + "\n")


def _target(options: argparse.Namespace) -> Llama:
    return Llama.from_checkpoint(options.target).to(options.device, torch.bfloat16)


def _features(options: argparse.Namespace, target: Llama, taps: tuple[int, ...]) -> Features:
    corpus = Corpus.load(options.run / "corpus.npz")
    start = time.monotonic()
    features = Features(corpus, target, taps, options.batch_tokens)
    print(f"features of {len(corpus.tokens)} tokens in {time.monotonic() - start:.1f} s", flush=True)
    if options.device == "cuda":
        compile_divergence()
    return features


def _texts(options: argparse.Namespace, corpus: Corpus) -> dict[str, Texts]:
    """Held-out answers and, if given, the evaluation prompts' answers (only ever read, never trained on)."""
    texts = {"held out": held_out_texts(corpus, options.held_out_texts)}
    if options.answers:
        answers = json.loads(options.answers.read_text())["answers"]
        texts["prompts"] = [
            (answer["category"], ServedText(answer["tokens"], answer["prompt_length"])) for answer in answers
        ]
    return texts


def _plan(options: argparse.Namespace) -> Plan:
    return Plan(options.seconds, options.batch_tokens, options.places, options.learning_rate)


def _layers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("-"))


STAGES = {"generate": generate, "draft": draft, "eagle3": eagle3}


def main() -> None:
    """Run one stage."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", choices=list(STAGES))
    parser.add_argument("--target", type=Path, required=True, help="checkpoint folder of the target")
    parser.add_argument("--run", type=Path, required=True, help="folder for everything that is made")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seconds", type=float, default=160.0, help="time box of the stage")
    parser.add_argument("--answers", type=Path, help="answers to the evaluation prompts, for scoring only")
    sampling = parser.add_argument_group("generate")
    sampling.add_argument("--slots", type=int, default=4096)
    sampling.add_argument("--length", type=int, default=416, help="tokens of a conversation, prompt included")
    sampling.add_argument("--rows", type=int, default=150_000)
    sampling.add_argument("--seeds", type=int, default=150_000)
    sampling.add_argument("--seed", type=int, default=469507)
    sampling.add_argument("--show", type=int, default=0, help="print this many conversations")
    training = parser.add_argument_group("draft and eagle3")
    training.add_argument("--batch-tokens", type=int, default=32768)
    training.add_argument("--places", type=int, default=16384, help="predictions a step, a multiple of 4096")
    training.add_argument("--learning-rate", type=float, default=1e-3)
    training.add_argument("--held-out-texts", type=int, default=300)
    training.add_argument(
        "--candidates", type=_layers, nargs="+", default=[(0, 29), (0, 1, 28, 29), (0, 1, 2, 27, 28, 29)],
        help="the target's layers that each candidate draft starts from, as in 0-1-28-29",
    )  # fmt: skip
    training.add_argument("--trial-seconds", type=float, default=40.0)
    training.add_argument("--least", type=float, default=2.5, help="accept length a chosen candidate must reach")
    options = parser.parse_args()
    options.run.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(options.seed)
    with recorded(options):
        STAGES[options.stage](options)


if __name__ == "__main__":
    main()
