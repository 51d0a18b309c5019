"""Puts a finished run's weights into the package, with manifest, record and card.

`python scripts/train_demo_models/ship.py --run DIR [--hardware TEXT]`

With `--draft-to FOLDER` the draft alone goes there, with its manifest, and the package stays as it is:
`python -m sdsie_sglang.demo --weights FOLDER --out CHECKPOINTS` composes it, to be compared with the shipped one.
"""

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

from sdsie_sglang.demo.checkpoints import WEIGHTS
from sdsie_sglang.demo.digest import sha256_of
from sdsie_sglang.demo.eagle3_head import AUX_HIDDEN_STATES
from sdsie_sglang.demo.gguf_source import GGUF_NAME, PACKAGE, VERSION

CARD = """\
# Demo weights: a draft and an EAGLE-3 head for SmolLM2-135M-Instruct

Licence: Apache-2.0, like the model that they are distilled from ({package} {version}, `{gguf}`,
HuggingFaceTB's SmolLM2-135M-Instruct). Made by `scripts/train_demo_models/main.py`, put here by `ship.py`;
this page is written by the latter. `python -m sdsie_sglang.demo` composes complete checkpoints from these
files and checks the hashes.

**Draft**: {layers} decoder layers that started as the target's layers {started}; embedding and output head
are the target's. It reads every token at its own position, as any language model does.

**Head**: one EAGLE-3 layer over the target's hidden states {taps}, full vocabulary, the target's own
embedding and output head; five unrolled draft steps in training (training-time test).

## Data

The target wrote it: it completed openings of user turns in nine categories (temperatures 0.6–1.0), then
answered them (three in ten greedily, the others at 0.5–0.8), in bfloat16. {sampled} conversations in
{sampling_seconds} s; kept {kept} rows with {answer_tokens} answer tokens.
Of the kept rows {greedy} ({greedy_share:.0f} %) were answered greedily. Dropped: {dropped}. A user turn
that shares seven tokens in a row with an evaluation prompt counts as one of those and is dropped.
{held_out} rows (5 %, by user turn) are held out.

## Training

KL divergence from the target's distribution, whole vocabulary, answer tokens only; AdamW, peak learning
rate 1e-3, falling to zero over the last 45 % of the time; 16,384 predicted places a step. {hardware}.

| | seconds | steps | predicted places | passes over the corpus | divergence | agreement of tops |
|---|---|---|---|---|---|---|
{training}

For the head, divergence and agreement are those of draft steps 1 … 5. Seconds are training time alone. Loss
curves are in `training.json`.

| after | draft divergence | draft agreement | head divergence, step 1 | head agreement, step 1 |
|---|---|---|---|---|
{curves}

## Choice of depth

Each candidate trained for {trial_seconds:.0f} s; the rule was: most tokens per millisecond at K = 5 among
those whose accept length on held-out answers is at least 2.5, else the deepest. The time of a cycle is one
step of the target ({target_ms:.2f} ms) and five of the draft, each measured as a CUDA graph at batch 1. The
first candidates had fewer steps in the same time (start-up costs fell on them), so the trial is biased
towards the later, deeper ones: a finished {runner_up}-layer draft may well be faster than the one shipped.
This run did not train it to the end.

| layers | steps | ms a draft step | accept length, K=5 | tokens per ms |
|---|---|---|---|---|
{trials}
| {layers}, finished | {finished_steps} | {finished_ms:.3f} | {finished_length:.2f} | {finished_rate:.3f} |

## Files

| file | SHA-256 |
|---|---|
{files}
"""


def ship_draft(run: Path, folder: Path) -> None:
    """Copy the shards of the chosen draft and write a manifest of them alone."""
    draft = _read(run / "draft.json")
    chosen = draft["chosen"]
    folder.mkdir(parents=True, exist_ok=True)
    layers = len(draft["trials"][chosen]["layers"])
    _write(
        folder / "manifest.json",
        {"draft": {"files": _copy_shards(run, chosen, folder, "draft"), "layers": layers}},
    )


def ship(run: Path, weights: Path, hardware: str) -> None:
    """Copy the shards of the chosen draft and the head; write manifest, record and card."""
    draft, corpus = _read(run / "draft.json"), _read(run / "corpus.json")
    chosen = draft["trials"][draft["chosen"]]
    # A losing candidate's curve ends with its trial.
    curves = {name: _read(run / f"{name}.curve.json") for name in [*draft["trials"], "eagle3"]}
    weights.mkdir(exist_ok=True)
    for old in weights.glob("*.safetensors"):
        old.unlink()
    manifest = {
        "draft": {
            "files": _copy_shards(run, draft["chosen"], weights, "draft"),
            "layers": len(chosen["layers"]),
        },
        "eagle3": {
            "files": _copy_shards(run, "eagle3", weights, "eagle3"),
            "aux_hidden_states": list(AUX_HIDDEN_STATES),
        },
    }
    _write(weights / "manifest.json", manifest)
    record = {"corpus": corpus, "draft": draft, "eagle3": _read(run / "eagle3.json"), "curves": curves}
    if stages := {path.name.removesuffix(".runs.json"): _read(path) for path in sorted(run.glob("*.runs.json"))}:
        record["stages"] = stages
    (weights / "training.json").write_text(json.dumps(record, sort_keys=True) + "\n")
    (weights / "README.md").write_text(_card(manifest, record, hardware))


def _card(manifest: dict[str, Any], record: dict[str, Any], hardware: str) -> str:
    draft, corpus, curves = record["draft"], record["corpus"], record["curves"]
    name = draft["chosen"]
    chosen, rows = draft["trials"][name], corpus["rows"]
    length = draft["final"]["held out"]["all"]["5"]
    runner_up = max(
        (trial for other, trial in draft["trials"].items() if other != name),
        key=lambda trial: trial["tokens_per_ms_k5"],
    )
    files = {**manifest["draft"]["files"], **manifest["eagle3"]["files"]}
    return CARD.format(
        package=PACKAGE,
        version=VERSION,
        gguf=GGUF_NAME,
        layers=len(chosen["layers"]),
        started=", ".join(map(str, chosen["layers"])),
        taps=", ".join(map(str, AUX_HIDDEN_STATES)),
        sampled=f"{sum(rows.values()):,}",
        sampling_seconds=round(corpus["sampling_seconds"]),
        kept=f"{rows['kept']:,}",
        answer_tokens=f"{corpus['kept_answer_tokens']:,}",
        greedy=f"{corpus['greedy_rows']:,}",
        greedy_share=100 * corpus["greedy_rows"] / rows["kept"],
        dropped=", ".join(f"{reason} {count:,}" for reason, count in rows.items() if reason != "kept"),
        held_out=f"{corpus['held_out_rows']:,}",
        hardware=hardware,
        training="\n".join([_training_row("draft", curves[name]), _training_row("head", curves["eagle3"])]),
        curves="\n".join(_curve_rows(curves[name], curves["eagle3"])),
        trial_seconds=min(curve["elapsed"] for curve in curves.values()),
        target_ms=chosen["target_step_ms"],
        runner_up=len(runner_up["layers"]),
        trials="\n".join(
            _trial_row(trial, _steps_in_trial(curves[other], curves)) for other, trial in draft["trials"].items()
        ),
        finished_steps=f"{curves[name]['step']:,}",
        finished_ms=chosen["draft_step_ms"],
        finished_length=length,
        finished_rate=length / (chosen["target_step_ms"] + 5 * chosen["draft_step_ms"]),
        files="\n".join(f"| `{file}` | `{digest}` |" for file, digest in files.items()),
    )


def _training_row(title: str, curve: dict[str, Any]) -> str:
    last = curve["curve"][-1]
    divergence, agreement = (" / ".join(f"{value:.2f}" for value in last[key]) for key in
                             ("divergence", "agreement"))  # fmt: skip
    return (
        f"| {title} | {curve['elapsed']:.0f} | {curve['step']:,} | {curve['places']:,} | {curve['epoch']} "
        f"| {divergence} | {agreement} |"
    )


def _curve_rows(draft: dict[str, Any], head: dict[str, Any]) -> list[str]:
    """Both curves at every sixth of the draft's time."""
    rows = []
    for sixth in range(1, 7):
        seconds = draft["elapsed"] * sixth / 6
        cells = [f"{seconds:.0f} s"]
        for curve in (draft["curve"], head["curve"]):
            point = min(curve, key=lambda point: abs(point["seconds"] - seconds))
            cells += [f"{point['divergence'][0]:.3f}", f"{point['agreement'][0]:.3f}"]
        rows.append("| " + " | ".join(cells) + " |")
    return rows


def _steps_in_trial(curve: dict[str, Any], curves: dict[str, Any]) -> int:
    """Steps that a candidate had made when its trial ended, to the 50 steps that curves are kept at."""
    trial = min(other["elapsed"] for other in curves.values())
    return max(point["step"] for point in curve["curve"] if point["seconds"] <= trial + 0.5)


def _trial_row(trial: dict[str, Any], steps: int) -> str:
    length = trial["accept_lengths"]["held out"]["all"]["5"]
    return (
        f"| {len(trial['layers'])} | {steps:,} | {trial['draft_step_ms']:.3f} | {length:.2f} "
        f"| {trial['tokens_per_ms_k5']:.3f} |"
    )


def _copy_shards(run: Path, stem: str, weights: Path, name: str) -> dict[str, str]:
    digests = {}
    for shard in sorted(run.glob(f"{stem}-*.safetensors")):
        shipped = weights / shard.name.replace(stem, name)
        shutil.copyfile(shard, shipped)
        digests[shipped.name] = sha256_of(shipped)
    return digests


def _read(path: Path) -> Any:
    return json.loads(path.read_text())


def _write(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n")


def main() -> None:
    """Ship one run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, required=True, help="folder that main.py wrote")
    parser.add_argument("--hardware", default="One NVIDIA H200, PyTorch 2.11")
    parser.add_argument("--draft-to", type=Path, metavar="FOLDER", help="put the draft alone there")
    options = parser.parse_args()
    if options.draft_to is not None:
        ship_draft(options.run, options.draft_to)
        print(options.draft_to)
        return
    ship(options.run, WEIGHTS, options.hardware)
    print(WEIGHTS)


if __name__ == "__main__":
    main()
