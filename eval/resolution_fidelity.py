"""How far the Resolution Gear may go: fidelity against layers gated, calibration and gate, on SmolLM2 in PyTorch.

    python -m sdsie_sglang.eval.resolution_fidelity             # eval/results/resolution: minutes on one GPU
    python -m sdsie_sglang.eval.resolution_fidelity --quick     # some settings, short answers: minutes on a CPU

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
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict
from torch import Tensor
from tqdm import tqdm

from sdsie_sglang.demo import compose
from sdsie_sglang.demo.llama import Llama
from sdsie_sglang.eval import machine
from sdsie_sglang.eval.headline import ROOT, this_command, today
from sdsie_sglang.eval.intervals import Estimate, estimate
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
from sdsie_sglang.gears import PRESETS, PolicySettings
from sdsie_sglang.int4.calibration import calibrate
from sdsie_sglang.int4.resolution import PLACES, pick
from sdsie_sglang.int4.settings import CALIBRATIONS

PROG = "python -m sdsie_sglang.eval.resolution_fidelity"
RESULTS = ROOT / "eval" / "results" / "resolution"
ANSWERS = ROOT / "eval" / "results" / "demo" / "answers.json"
WARMUP_IDS = ROOT / "eval" / "data" / "warmup_ids.json"
REFERENCE = "reference"
COUNTS = (1, 2, 4, 8)
GATES: dict[str, PolicySettings] = {
    "always": PolicySettings(policy="fixed"),
    **{name: PolicySettings.model_validate({"policy": "entropy", "preset": name}) for name in PRESETS},
}
ORIGINAL = {"calibration": "channel", "gate": "class", "place": "first"}
ORIGINAL_MATCH = {1: (1.0, 0.356, 1.0), 2: (0.072, 0.096, 0.076), 4: (0.028, 0.08, 0.104), 32: (0.036, 0.024, 0.092)}
"""What it published for poem, physics and code by gated layers of an 8B model's 32."""
# A setting is called safe while, over prompts, the interval's worse end keeps to both.
SAFE_KL_NATS = 0.01
SAFE_TOP1 = 0.98
KEPT_MATCH = 0.5  # a mean token match below this is called collapsed
SAMPLES = 512  # rows of a layer's inputs for calibration by text, as int4/activations.py
OWN_TOKENS = 128


class Setting(BaseModel):
    """What is gated, by whom: `layers` of a model; place `all` for the whole of it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    place: str
    count: int
    gate: str

    def layers(self, total: int) -> tuple[int, ...]:
        return pick("first" if self.place == "all" else self.place, self.count, total)


class Row(BaseModel):
    """One setting; each list has one value a prompt.

    Args:
        match: share of equal tokens at equal places.
        first: index of the first different token; -1: none.
        int4_share: of decode steps.
        kl_nats, top1, nll: means over the control's answer; None where it was not read.
    """

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    setting: Setting
    match: list[float]
    first: list[int]
    int4_share: list[float]
    kl_nats: list[float] | None = None
    top1: list[float] | None = None
    nll: list[float] | None = None


class Part(BaseModel):
    """All settings of one calibration.

    Args:
        digest: of everything that a measurement depends on; another one is measured again.
        control_nll: of each prompt's own answer.
    """

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    digest: str
    calibration: str
    recomputing: bool
    prompts: list[str]
    new_tokens: int
    layers: int
    lag: int
    dtype: str
    control_nll: list[float] | None
    rows: list[Row]
    wall_s: float
    machine: dict[str, Any]
    command: str
    date: str


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


# -- what the record says ------------------------------------------------------------------------


def mean(values: Sequence[float]) -> Estimate:
    """Mean over prompts with its interval."""
    data = np.array(values, dtype=np.float64)
    return estimate(lambda p, r: data[p].mean(-1), len(data), 1, seed=0)


def perplexity(nll: Sequence[float]) -> Estimate:
    """exp of the mean over prompts."""
    data = np.array(nll, dtype=np.float64)
    return estimate(lambda p, r: np.exp(data[p].mean(-1)), len(data), 1, seed=0)


class Figures(BaseModel):
    """One setting's figures over the prompts. `reference` is the match of poem, physics and code."""

    setting: Setting
    match: Estimate
    reference: list[float]
    identical: float
    first: float | None
    int4_share: float
    kl_nats: Estimate | None
    top1: Estimate | None
    perplexity: Estimate | None

    @property
    def is_safe(self) -> bool:
        """By what each token's distribution says, at the worse end of the interval."""
        if self.kl_nats is None or self.top1 is None:
            return False
        return upper(self.kl_nats) <= SAFE_KL_NATS and lower(self.top1) >= SAFE_TOP1


def upper(found: Estimate) -> float:
    return found.value if found.high is None else found.high


def lower(found: Estimate) -> float:
    return found.value if found.low is None else found.low


def figures(part: Part) -> list[Figures]:
    found = []
    for row in part.rows:
        parted = [first for first in row.first if first >= 0]
        found.append(
            Figures(
                setting=row.setting,
                match=mean(row.match),
                reference=[m for m, name in zip(row.match, part.prompts, strict=True) if name.startswith(REFERENCE)],
                identical=1 - len(parted) / len(row.first),
                first=float(np.median(parted)) if parted else None,
                int4_share=float(np.mean(row.int4_share)),
                kl_nats=None if row.kl_nats is None else mean(row.kl_nats),
                top1=None if row.top1 is None else mean(row.top1),
                perplexity=None if row.nll is None else perplexity(row.nll),
            )
        )
    return found


Summary = dict[str, list[Figures]]


def line_of(found: Sequence[Figures], gate: str, place: str) -> list[Figures]:
    """One gate's settings by count; all layers belong to every place."""
    chosen = [f for f in found if f.setting.gate == gate and f.setting.place in (place, "all")]
    return sorted(chosen, key=lambda f: f.setting.count)


def safe_layers(found: Sequence[Figures], gate: str) -> int:
    """The largest count up to which every count is safe at every place; 0: none."""
    safe = 0
    for count in sorted({f.setting.count for f in found}):
        if not all(f.is_safe for f in found if f.setting.gate == gate and f.setting.count == count):
            break
        safe = count
    return safe


def answer(summary: Summary, original: Sequence[Figures] | None, layers: int) -> str:
    """The sentences that answer the open question, from the figures alone."""
    gate = "always" if any(f.setting.gate == "always" for found in summary.values() for f in found) else None
    gate = gate or next(iter(summary.values()))[0].setting.gate
    safe = {name: safe_layers(found, gate) for name, found in summary.items()}
    parts = []
    if original:
        line = line_of(original, ORIGINAL["gate"], ORIGINAL["place"])
        said = ", ".join(f"{100 * f.match.value:.0f} % at {f.setting.count}" for f in line)
        lost = next((f.setting.count for f in line if f.match.value < KEPT_MATCH), None)
        where = f"falls below half at {lost} gated layers" if lost else "never falls below half"
        way = "channel min-max, class gate, first layers, no cache"
        parts.append(f"In the original's own way ({way}) token match is {said}: it {where}.")
    if ORIGINAL["calibration"] in summary:
        at = next(f for f in summary[ORIGINAL["calibration"]] if f.setting.place == "all" and f.setting.gate == gate)
        if at.kl_nats and at.top1 and at.match.value < KEPT_MATCH:
            parts.append(
                f"With channel min-max in all {layers} layers (gate {gate}) token match is "
                f"{100 * at.match.value:.0f} %, yet token by token KL is {at.kl_nats.value:.4f} nats and the same "
                f"token is named {100 * at.top1.value:.1f} % of the time: match counts what follows a different "
                "token as lost."
            )
    best = max(safe.values())
    named = ", ".join(f"{name} {count}" for name, count in safe.items())
    base = safe.get(ORIGINAL["calibration"])
    widened = (
        "finer calibration widens the safe range"
        if base is not None and best > base
        else "no calibration tried widens the safe range"
    )
    parts.append(
        f"Safe (KL at most {SAFE_KL_NATS} nats and top-1 at least {100 * SAFE_TOP1:.0f} % at the worse end of the 95 % "
        f"interval, at every place, gate {gate}) are this many of {layers} layers: {named}. So "
        + (f"{widened}, from {base} to {best} layers." if base is not None and best > base else f"{widened}.")
    )
    return " ".join(parts)


def shown(found: Estimate | None, digits: int, scale: float = 1.0) -> str:
    if found is None:
        return "–"
    text = f"{scale * found.value:.{digits}f}"
    if found.low is None or found.high is None:
        return text
    return f"{text} ({scale * found.low:.{digits}f} to {scale * found.high:.{digits}f})"


def table(found: Sequence[Figures]) -> str:
    head = ["gate", "layers", "match, %", "poem / physics / code", "identical", "first different", "INT4 steps"]
    head += ["KL, nats", "same top token, %", "perplexity"]
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for f in found:
        cells = [
            f"`{f.setting.gate}`",
            f"{f.setting.count}, {f.setting.place}" if f.setting.place != "all" else f"all {f.setting.count}",
            shown(f.match, 1, 100),
            " / ".join(f"{100 * match:.1f}" for match in f.reference),
            f"{100 * f.identical:.0f} %",
            "–" if f.first is None else f"{f.first:.0f}",
            f"{100 * f.int4_share:.0f} %",
            shown(f.kl_nats, 4),
            shown(f.top1, 1, 100),
            shown(f.perplexity, 3),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def page(parts: Sequence[Part]) -> tuple[str, Summary, list[Figures] | None]:
    """The page, and the figures on it."""
    summary = {part.calibration: figures(part) for part in parts if not part.recomputing}
    original = next((figures(part) for part in parts if part.recomputing), None)
    some = parts[0]
    control = next((part.control_nll for part in parts if part.control_nll), None)
    text = [
        f"# The Resolution Gear's fidelity: SmolLM2-135M, {some.layers} layers, `mlp.down_proj`",
        f"Written by `{some.command}` on {some.date}, {machine.where(some.machine)}, {some.dtype}, greedy, up to "
        f"{some.new_tokens} tokens, {len(some.prompts)} prompts, decisions {some.lag} cycles late as in the server; "
        "raw figures beside this page. In parentheses 95 % intervals over prompts."
        + (f" Perplexity of the control's own answers: {perplexity(control).value:.3f}." if control else ""),
        answer(summary, original, some.layers),
        "![fidelity against layers](fidelity.png)",
    ]
    for name, found in summary.items():
        text += [f"## `{name}`", table(found)]
    if original is not None:
        published = "; ".join(
            f"{n}: {' / '.join(f'{100 * m:.1f}' for m in match)}" for n, match in ORIGINAL_MATCH.items()
        )
        text += [
            "## The original's own way",
            "Channel min-max, no cache (a gear changes how all the text before is read), decisions one token late, "
            "beginning in full precision. It published, for an 8B model's 32 layers, poem / physics / code: "
            f"{published}.",
            table(original),
        ]
    return "\n\n".join(text) + "\n", summary, original


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
    parts = run(options)
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
