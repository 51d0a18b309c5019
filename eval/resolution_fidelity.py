"""How far the Resolution Gear may go: fidelity against layers gated, calibration and gate, on SmolLM2 in PyTorch.

    python -m sdsie_sglang.eval.resolution_fidelity             # eval/results/resolution: minutes on one GPU
    python -m sdsie_sglang.eval.resolution_fidelity --quick     # some settings, short answers: minutes on a CPU
    python -m sdsie_sglang.eval.resolution_fidelity --summarise # page and picture from the files that are there

Needs no SGLang and no tokenizer: prompts are taken as token ids from eval/results/demo/answers.json. One file a
calibration; those that are there are not measured again. Against the same model in the same batch, without INT4:
token match as the original counted it (equal tokens at equal places, over the shorter answer), the first different
token, and, reading the control's own answers (teacher forced), KL, top-1 agreement and perplexity, which a first
different token does not spoil. Intervals are over prompts.
"""

import argparse
import hashlib
import json
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from tqdm import tqdm

from sdsie_sglang.demo import compose
from sdsie_sglang.demo.llama import Llama
from sdsie_sglang.eval import machine
from sdsie_sglang.eval.headline import ROOT, this_command, today
from sdsie_sglang.eval.resolution_decode import (
    END,
    Gates,
    Low,
    Text,
    force,
    generate,
    generate_recomputing,
    padded,
    read,
)
from sdsie_sglang.eval.resolution_record import ORIGINAL, REFERENCE, Part, Row, Setting
from sdsie_sglang.eval.resolution_report import page
from sdsie_sglang.gears import PRESETS, PolicySettings
from sdsie_sglang.int4.calibration import calibrate
from sdsie_sglang.int4.resolution import PLACES
from sdsie_sglang.int4.settings import CALIBRATIONS

PROG = "python -m sdsie_sglang.eval.resolution_fidelity"
RESULTS = ROOT / "eval" / "results" / "resolution"
ANSWERS = ROOT / "eval" / "results" / "demo" / "answers.json"
WARMUP_IDS = ROOT / "eval" / "data" / "warmup_ids.json"
COUNTS = (1, 2, 4, 8)
GATES: dict[str, PolicySettings] = {
    "always": PolicySettings(policy="fixed"),
    **{name: PolicySettings.model_validate({"policy": "entropy", "preset": name}) for name in PRESETS},
}
SAMPLES = 512  # rows of a layer's inputs for calibration by text, as int4/activations.py
OWN_TOKENS = 128


def settings_of(counts: Sequence[int], total: int, gates: Sequence[str], places: Sequence[str]) -> list[Setting]:
    """Every place with every count, and all layers once, under each gate."""
    small = [count for count in counts if count < total]
    return [
        *(Setting(place=place, count=count, gate=gate) for gate in gates for count in small for place in places),
        *(Setting(place="all", count=total, gate=gate) for gate in gates),
    ]


def low_weights(model: Llama, calibration: str, inputs: Sequence[Tensor] | None, layers: Iterable[int]) -> list[Tensor]:
    """Each down_proj as it multiplies in effect; those of layers that are not named stay empty."""
    wanted = set(layers)
    found = []
    for i, block in enumerate(model.blocks):
        weight = block.down.data
        if i not in wanted:
            found.append(weight.new_empty(0))
            continue
        seen = None if inputs is None else inputs[i]
        found.append(calibrate(weight, calibration, inputs=seen, dtype=weight.dtype).effective().to(weight.dtype))
    return found


def own_inputs(model: Llama, prompts: Sequence[Sequence[int]]) -> list[Tensor]:
    """Each down_proj's inputs [samples, MLP] over the warm-up prompts and the model's own answers to them."""
    device = model.embedding.device
    tokens, lengths = padded(prompts, device)
    logits, cache = read(model, tokens, lengths)
    nothing = Low([], torch.zeros(len(prompts), len(model.blocks), dtype=torch.bool, device=device))
    answers = generate(model, cache, logits.argmax(-1), nothing, Gates([None] * len(prompts), lag=1), OWN_TOKENS).tokens
    texts = [[*ids, *cut(answer)] for ids, answer in zip(prompts, answers, strict=True)]
    tokens, lengths = padded(texts, device)
    inners: list[Tensor] = []
    read(model, tokens, lengths, inners=inners)
    real = torch.arange(tokens.shape[1], device=device) < lengths[:, None]
    stride = max(1, int(real.sum()) // SAMPLES)
    return [inner[real][::stride] for inner in inners]


def cut(answer: NDArray[np.int64]) -> list[int]:
    """Up to and with the end of text."""
    ends = np.flatnonzero(answer == END)
    return answer[: ends[0] + 1 if len(ends) else len(answer)].tolist()


def compare(control: Sequence[int], other: Sequence[int]) -> tuple[float, int]:
    """Token match over the shorter answer, and the index of the first different token or -1."""
    common = min(len(control), len(other))
    equal = np.array(control[:common]) == np.array(other[:common])
    different = np.flatnonzero(~equal)
    if len(different):
        return float(equal.mean()), int(different[0])
    return 1.0, -1 if len(control) == len(other) else common


def rows_of(settings: Sequence[Setting], text: Text, prompts: int) -> list[Row]:
    """Settings against the control, whose answers are the first rows."""
    answers = [cut(answer) for answer in text.tokens]
    found = []
    for i, setting in enumerate(settings, 1):
        mine = range(i * prompts, (i + 1) * prompts)
        compared = [compare(answers[row % prompts], answers[row]) for row in mine]
        shares = [float(text.engaged[row, : max(1, len(answers[row]) - 1)].mean()) for row in mine]
        found.append(
            Row(
                setting=setting,
                match=[round(match, 6) for match, _ in compared],
                first=[first for _, first in compared],
                int4_share=[round(share, 6) for share in shares],
            )
        )
    return found


def masks(settings: Sequence[Setting], prompts: int, total: int, device: torch.device) -> Tensor:
    """[rows, layers] bool: none for the control, then each setting's for every prompt."""
    chosen = torch.zeros(len(settings) + 1, total, dtype=torch.bool)
    for i, setting in enumerate(settings, 1):
        chosen[i, list(setting.layers(total))] = True
    return chosen.repeat_interleave(prompts, 0).to(device)


class Study:
    """The model and the prompts, read once in full precision."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.device = torch.device(options.device)
        folder = compose().target
        dtype = getattr(torch, options.dtype)
        self.model = Llama.from_checkpoint(folder).to(dtype).to(self.device)
        self.total = len(self.model.blocks)
        answers = json.loads(ANSWERS.read_text())["answers"]
        chosen = [answer for answer in answers if options.prompts == "all" or answer["category"] == REFERENCE]
        self.ids = [answer["id"] for answer in chosen]
        self.prompts = [answer["tokens"][: answer["prompt_length"]] for answer in chosen]
        self._inputs: list[Tensor] | None = None
        tokens, lengths = padded(self.prompts, self.device)
        with torch.inference_mode():
            logits, self.cache = read(self.model, tokens, lengths)
        self.first = logits.argmax(-1)
        self.weights_sha = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()

    def low(self, calibration: str, settings: Sequence[Setting]) -> Low:
        inputs = None
        if CALIBRATIONS[calibration].needs_text:
            if self._inputs is None:
                self._inputs = own_inputs(self.model, list(json.loads(WARMUP_IDS.read_text()).values()))
            inputs = self._inputs
        mask = masks(settings, len(self.prompts), self.total, self.device)
        gated = torch.nonzero(mask.any(0)).flatten().tolist()
        return Low(low_weights(self.model, calibration, inputs, gated), mask)

    def gates(self, settings: Sequence[Setting], lag: int, *, waits: bool = False) -> Gates:
        chosen = [None, *(GATES[setting.gate] for setting in settings)]
        return Gates([gate for gate in chosen for _ in self.prompts], lag, waits=waits)

    def part(self, calibration: str, settings: Sequence[Setting], *, recomputing: bool) -> Part:
        """Measures every setting with one calibration."""
        started, new = time.perf_counter(), self.options.tokens
        low = self.low(calibration, settings)
        control_nll = None
        lag = 1 if recomputing else self.options.lag
        if recomputing:
            rows = [prompt for _ in range(len(settings) + 1) for prompt in self.prompts]
            text = generate_recomputing(self.model, rows, low, self.gates(settings, lag, waits=True), new)
            found = rows_of(settings, text, len(self.prompts))
        else:
            text = generate(self.model, self.cache, self.first, low, self.gates(settings, lag), new)
            found = rows_of(settings, text, len(self.prompts))
            answers = [cut(answer) for answer in text.tokens[: len(self.prompts)]]
            tokens, lengths = padded([answer + [0] * (new - len(answer)) for answer in answers], self.device)
            lengths = torch.tensor([len(answer) for answer in answers], device=self.device)
            read_by = force(self.model, self.cache, tokens, lengths, low, self.gates(settings, lag))
            split = [
                np.round(x, 7).reshape(-1, len(self.prompts)).tolist() for x in (read_by.kl, read_by.top1, read_by.nll)
            ]
            control_nll = split[2][0]
            found = [
                row.model_copy(update={"kl_nats": kl, "top1": top1, "nll": nll})
                for row, kl, top1, nll in zip(found, *(values[1:] for values in split), strict=True)
            ]
        return Part(
            digest=self.digest(calibration, settings, recomputing),
            calibration=calibration,
            recomputing=recomputing,
            prompts=self.ids,
            new_tokens=new,
            layers=self.total,
            lag=lag,
            dtype=self.options.dtype,
            control_nll=control_nll,
            rows=found,
            wall_s=round(time.perf_counter() - started, 1),
            machine=machine.describe(),
            command=this_command(),
            date=today(),
        )

    def digest(self, calibration: str, settings: Sequence[Setting], recomputing: bool) -> str:
        o = self.options
        text = json.dumps(
            [
                self.weights_sha, self.prompts, calibration, recomputing, o.tokens, o.lag, o.dtype, o.device,
                [setting.model_dump() for setting in settings],
                {name: gate.model_dump() for name, gate in GATES.items()},
            ]
        )  # fmt: skip
        return hashlib.sha256(text.encode()).hexdigest()


def there_already(options: argparse.Namespace) -> list[Part]:
    """The files of `options.out`, as they are. Raises SystemExit where there is none."""
    names = [*options.calibrations, *(["original"] if options.original else [])]
    paths = [path for name in names if (path := options.out / f"{name}.json").exists()]
    parts = [Part.model_validate_json(path.read_text()) for path in paths]
    if all(part.recomputing for part in parts):
        print(f"{PROG}: error: {options.out} holds no calibration's record to summarise", file=sys.stderr)
        raise SystemExit(2)
    return parts


def run(options: argparse.Namespace) -> list[Part]:
    """Measures what is not there yet; one file a calibration, and one for the original's way."""
    study = Study(options)
    settings = settings_of(options.counts, study.total, options.gates, options.places)
    originals = settings_of(options.counts, study.total, [ORIGINAL["gate"], "always"], [ORIGINAL["place"]])
    jobs = [(name, name, settings, False) for name in options.calibrations]
    if options.original:
        jobs.append(("original", ORIGINAL["calibration"], originals, True))
    options.out.mkdir(parents=True, exist_ok=True)
    parts = []
    for name, calibration, wanted, recomputing in tqdm(jobs, unit="calibration"):
        path = options.out / f"{name}.json"
        there = Part.model_validate_json(path.read_text()) if path.exists() else None
        if there is None or there.digest != study.digest(calibration, wanted, recomputing):
            with torch.inference_mode():
                there = study.part(calibration, wanted, recomputing=recomputing)
            path.write_text(there.model_dump_json() + "\n")
        parts.append(there)
    return parts


def parser() -> argparse.ArgumentParser:
    cuda = torch.cuda.is_available()
    made = argparse.ArgumentParser(prog=PROG, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--quick", action="store_true", help="reference prompts, 32 tokens, few settings")
    made.add_argument("--calibrations", nargs="+", choices=list(CALIBRATIONS), default=list(CALIBRATIONS))
    made.add_argument("--gates", nargs="+", choices=list(GATES), default=list(GATES))
    made.add_argument("--counts", nargs="+", type=int, default=list(COUNTS), help="layers gated, besides all")
    made.add_argument("--places", nargs="+", choices=PLACES, default=list(PLACES))
    made.add_argument("--prompts", choices=("all", REFERENCE), default="all")
    made.add_argument("--tokens", type=int, default=250)
    made.add_argument("--lag", type=int, default=2, help="cycles between an entropy and its decision (default 2)")
    made.add_argument("--no-original", dest="original", action="store_false", help="leave the original's way out")
    made.add_argument("--device", default="cuda" if cuda else "cpu")
    made.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16" if cuda else "float32")
    made.add_argument("--summarise", action="store_true", help="measure nothing: page and picture of what is there")
    made.add_argument("--out", type=Path, default=RESULTS)
    return made


QUICK = {
    "calibrations": ["channel", "g64"],
    "gates": ["always", "class"],
    "counts": [1, 8],
    "places": ["first", "spread"],
    "prompts": REFERENCE,
    "tokens": 32,
    "original": False,
}


def main(argv: Sequence[str] | None = None) -> int:
    made = parser()
    options = made.parse_args(argv)
    if options.quick:
        if options.out == RESULTS:
            made.error("--quick measures too little to be kept there: give --out")
        for name, value in QUICK.items():
            if getattr(options, name) == made.get_default(name):
                setattr(options, name, value)
    if options.tokens < 2 or options.lag < 1 or min(options.counts) < 1:
        made.error("--tokens must be at least 2, --lag and --counts at least 1")
    parts = there_already(options) if options.summarise else run(options)
    text, summary, original = page(parts)
    (options.out / "fidelity.md").write_text(text)
    from sdsie_sglang.eval.resolution_figure import draw

    draw(
        summary, original, f"SmolLM2-135M, mlp.down_proj, {len(parts[0].prompts)} prompts", options.out / "fidelity.png"
    )
    print(text)
    print(f"measured in {sum(part.wall_s for part in parts):.0f} s", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
