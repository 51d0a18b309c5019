"""What is measured: a configuration, and the datapoints that follow from it.

A part is measured in one go on one machine; methods are compared only within their part.
"""

import hashlib
import random
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from sdsie_sglang.eval.methods import METHODS, PLAIN, Models
from sdsie_sglang.eval.prompts import CATEGORIES, Prompt, timed_prompts
from sdsie_sglang.gears.settings import first_error

CONFIGS = Path(__file__).resolve().with_name("configs")
ROTATION = 7
"""Prompts by which the order is rotated from one repetition to the next, as in the original's protocol."""

# A fast small model answers all 27 prompts in less than an energy window, and no prompt may be sent twice:
# so each prompt also exists with one of these sentences after it.
SUFFIXES = (
    "",
    "Keep the answer short.",
    "Begin with a one-sentence summary.",
    "Assume that the reader is twelve years old.",
    "Number your points.",
    "Give one concrete example.",
    "Explain why each step matters.",
    "Avoid technical words where you can.",
    "End with a question to the reader.",
    "Mention one common mistake.",
    "Write for an expert.",
    "Say what you are unsure about.",
    "Answer in plain, direct sentences.",
    "Use as few adjectives as possible.",
    "Compare it with something from daily life.",
    "Close with one line of advice.",
)


PART_NAME = re.compile(r"[a-z0-9][a-z0-9_-]*")


class ConfigProblem(ValueError):
    """A configuration that cannot be used; one line."""


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class WarmUp(_Strict):
    """When a server counts as warm: each warm-up prompt by itself has settled (rules.settled).

    Args:
        min_s, max_s: how long it lasts at least and at most, for every server alike. A GPU's temperature follows
            its load by some 40 s: halves that lie 10 s apart may agree while 4 °C are still to come, so a short
            `min_s` leaves it to rules.thermal_transient to say what went on moving.
        reading_s: a reading of a prompt repeats it for at least this long, so that power means something.
        readings: per prompt; the newer half is held against the older half.
        power_tolerance: share of that prompt's power. temperature_tolerance_c: not below the sensor's step of 1 °C.
        tokens: length of a warm-up answer.
    """

    min_s: float = Field(default=150.0, ge=0)
    max_s: float = Field(default=450.0, ge=0)
    reading_s: float = Field(default=1.0, ge=0)
    readings: int = Field(default=6, ge=2, multiple_of=2)
    power_tolerance: float = Field(default=0.015, gt=0, lt=1)
    temperature_tolerance_c: float = Field(default=1.0, gt=0)
    tokens: int = Field(default=250, ge=1)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.max_s < self.min_s:
            raise ValueError(f"max_s ({self.max_s}) is below min_s ({self.min_s})")
        if self.temperature_tolerance_c < 1.0:
            raise ValueError(
                f"temperature_tolerance_c ({self.temperature_tolerance_c}) is below the sensor's step of 1 °C"
            )
        return self


class Phase(_Strict):
    """Timed requests at one level of concurrency: every prompt in `variants` forms that no other phase uses."""

    concurrency: int = Field(ge=1)
    variants: int = Field(default=1, ge=1)


class Part(_Strict):
    """What is measured in one go. A plain list in the configuration is its methods.

    Args:
        phases: in place of the configuration's. sglang: flags of the part's servers beside the configuration's.
    """

    methods: tuple[str, ...]
    phases: tuple[Phase, ...] | None = None
    sglang: tuple[str, ...] = ()


class Assumptions(_Strict):
    """What `--plan` reckons with; nothing of it reaches a figure.

    Args:
        start_s: one server's start on an idle machine. start_cpu_s: its processor seconds; `cores` share them.
        first_start_s: by method, what its first start on a machine takes beyond that, to compile.
        server_gib: GPU memory of a waiting server.
        answer_tokens: mean length of an answer.
        tok_per_s: of plain decoding, all requests together, by concurrency (the nearest below counts).
        fastest: the quickest method over plain: its energy window is the shortest.
        stop_s: between two servers: the end of one, and what the next one's warm-up takes beyond its readings.
    """

    start_s: float = Field(default=60.0, ge=0)
    start_cpu_s: float = Field(default=45.0, ge=0)
    first_start_s: dict[str, float] = {}
    cores: int = Field(default=16, ge=1)
    server_gib: float = Field(default=3.0, ge=0)
    answer_tokens: float = Field(default=200.0, gt=0)
    tok_per_s: dict[int, float] = {1: 100.0}
    fastest: float = Field(default=2.0, ge=1)
    stop_s: float = Field(default=2.0, ge=0)


class ModelPaths(_Strict):
    """The user's own models."""

    target: str
    draft: str | None = None
    eagle3: str | None = None
    eagle: str | None = None
    other_draft: str | None = None


class Config(_Strict):
    """A whole measurement.

    Args:
        parts: names of methods, by part; the baseline brackets each and needs no mention (where it has one, it
            is measured between the brackets like any method: an A/A test).
        start_ahead: servers that are started side by side before the first of them is measured (all of one
            repetition at most). While one is measured the others wait, paused, and none starts.
        per_category: prompts of each category, None for all three.
        tokens: length of an answer at most. ignore_eos: go on past the natural end (flatters drafting).
        idle_s: idle power is read for so long before the opening baseline warms up. prefill_s: one-token
            requests for so long after the timed ones, for the power of prefill; 0 leaves either out.
        gpu: NVML's index; None measures no energy even where there is a GPU.
        trace: write gears and entropies of each cycle (costs a little time of gated methods alone).
        other_draft: a second draft beside the demo's own, for the methods `other-draft-k…`.
        sglang: further flags of every server. env: further environment of every server.
        assume: what `--plan` reckons with.
    """

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9_-]*$")
    models: Literal["demo"] | ModelPaths = "demo"
    other_draft: str | None = None
    parts: dict[str, Part] = Field(min_length=1)
    repetitions: int = Field(default=1, ge=1)
    seed: int = 469507
    categories: tuple[str, ...] = CATEGORIES
    per_category: int | None = Field(default=None, ge=1, le=3)
    tokens: int = Field(default=250, ge=1)
    ignore_eos: bool = False
    phases: tuple[Phase, ...] = (Phase(concurrency=1),)
    warm_up: WarmUp = WarmUp()
    idle_s: float = Field(default=10.0, ge=0)
    prefill_s: float = Field(default=0.0, ge=0)
    gpu: int | None = 0
    trace: bool = False
    sglang: tuple[str, ...] = ()
    env: dict[str, str] = {}
    start_ahead: int = Field(default=1, ge=1)
    assume: Assumptions = Assumptions()

    @field_validator("parts", mode="before")
    @classmethod
    def _plain_lists(cls, parts: Any) -> Any:
        if not isinstance(parts, dict):
            return parts
        return {name: {"methods": part} if isinstance(part, (list, tuple)) else part for name, part in parts.items()}

    @field_validator("parts")
    @classmethod
    def _known_methods(cls, parts: dict[str, Part]) -> dict[str, Part]:
        for part, its in parts.items():
            for name in its.methods:
                if name not in METHODS:
                    raise ValueError(f"part {part} names {name!r}; known are {', '.join(METHODS)}")
            if not PART_NAME.fullmatch(part):  # it names a folder
                raise ValueError(f"part {part!r}: a name has small letters, digits, - and _")
            if not its.methods or len(set(its.methods)) != len(its.methods):
                raise ValueError(f"part {part} must name each of its methods once")
        return parts

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.other_draft is not None and self.models != "demo":
            raise ValueError("other_draft goes with the demo's models; name your own among models")
        if unknown := set(self.categories) - set(CATEGORIES):
            raise ValueError(f"unknown categories {sorted(unknown)}; known are {', '.join(CATEGORIES)}")
        for part in self.parts:
            if (forms := sum(phase.variants for phase in self.phases_of(part))) > len(SUFFIXES):
                raise ValueError(f"phases want {forms} forms of each prompt; there are {len(SUFFIXES)}")
        return self

    def phases_of(self, part: str) -> tuple[Phase, ...]:
        own = self.parts[part].phases
        return self.phases if own is None else own

    def digest(self) -> str:
        """Of what is measured and how; not of how many servers wait meanwhile or what the plan reckons with."""
        text = self.model_dump_json(exclude={"start_ahead", "assume"})
        return hashlib.sha256(text.encode()).hexdigest()[:16]


class Datapoint(_Strict):
    """One server's life: a method in one repetition of a part. It owns its record's path."""

    part: str
    repetition: int
    position: int
    role: Literal["open", "method", "close"]
    method: str

    def path(self, folder: Path) -> Path:
        suffix = "" if self.role == "method" else f"-{self.role}"
        return folder / self.part / f"rep{self.repetition}" / f"{self.position:02d}-{self.method}{suffix}.json"


@dataclass(frozen=True)
class Ask:
    """One timed request. `key` names it in every method and repetition."""

    key: str
    prompt: Prompt
    text: str


def load_config(name_or_path: str) -> Config:
    """A preset of `configs/` by name, or a YAML file. Raises ConfigProblem."""
    path = Path(name_or_path)
    if not path.suffix:
        path = CONFIGS / f"{name_or_path}.yaml"
    try:
        values = yaml.safe_load(path.read_text())
    except OSError:
        presets = ", ".join(sorted(p.stem for p in CONFIGS.glob("*.yaml")))
        raise ConfigProblem(f"no such configuration: {path} (presets: {presets})") from None
    except (yaml.YAMLError, UnicodeDecodeError):
        raise ConfigProblem(f"{path} is not YAML") from None
    if not isinstance(values, dict):
        raise ConfigProblem(f"{path} must hold names and values")
    try:
        return Config(**values)
    except ValidationError as error:
        raise ConfigProblem(f"{path}: {first_error(error)}") from None


def with_other_draft(config: Config, folder: Path) -> Config:
    """The configuration with this second draft, measured at each K of the first one where requests come one at a time.
    Raises ConfigProblem."""
    if not (folder / "config.json").is_file():
        raise ConfigProblem(f"{folder} is no checkpoint folder")
    values = config.model_dump()
    for name, part in values["parts"].items():
        if any(phase.concurrency == 1 for phase in config.phases_of(name)):
            others = (f"other-{method}" for method in part["methods"] if method.startswith("draft-k"))
            part["methods"] = (*part["methods"], *(other for other in others if other not in part["methods"]))
    try:
        place = str(folder).replace(str(Path.home()), "~")  # records are shared, and belong to one configuration
        return Config(**{**values, "other_draft": place})
    except ValidationError as error:
        raise ConfigProblem(first_error(error)) from None


def datapoints(
    config: Config, parts: Iterable[str] | None = None, repetitions: Iterable[int] | None = None
) -> list[Datapoint]:
    """Per part and repetition: the baseline, the methods shuffled by the stored seed, the baseline again."""
    plan = []
    for part in config.parts if parts is None else parts:
        for repetition in range(config.repetitions) if repetitions is None else repetitions:
            names = list(config.parts[part].methods)
            random.Random(f"{config.seed}/{part}/{repetition}").shuffle(names)
            servers = [("open", PLAIN.name), *(("method", name) for name in names), ("close", PLAIN.name)]
            plan += [
                Datapoint(part=part, repetition=repetition, position=i, role=role, method=name)  # type: ignore[arg-type]
                for i, (role, name) in enumerate(servers)
            ]
    return plan


def windows(config: Config, points: Iterable[Datapoint]) -> list[list[Datapoint]]:
    """Servers that are started side by side, in the order of the plan: at most `start_ahead`, of one repetition."""
    found: list[list[Datapoint]] = []
    for point in points:
        last = found[-1] if found else []
        same = bool(last) and (last[-1].part, last[-1].repetition) == (point.part, point.repetition)
        if same and len(last) < config.start_ahead:
            last.append(point)
        else:
            found.append([point])
    return found


def asks(config: Config, part: str, phase: int, repetition: int) -> list[Ask]:
    """The requests of a part's phase, in their order: the same for all methods of a repetition."""
    prompts = [
        prompt
        for category in config.categories
        for prompt in timed_prompts([category])[: config.per_category]
    ]  # fmt: skip
    phases = config.phases_of(part)
    first = sum(p.variants for p in phases[:phase])
    every = [
        Ask(f"{prompt.id}/{variant}", prompt, f"{prompt.text} {SUFFIXES[variant]}".strip())
        for variant in range(first, first + phases[phase].variants)
        for prompt in prompts
    ]
    turn = ROTATION * repetition % len(every)
    return every[turn:] + every[:turn]


def resolve_models(config: Config) -> Models:
    """Checkpoints of the configuration; composes the demo's own."""
    if config.models != "demo":
        return Models(**config.models.model_dump())
    from sdsie_sglang.demo import compose

    made = compose()
    draft, eagle3 = (str(p) if p is not None else None for p in (made.draft, made.eagle3))
    other = config.other_draft and str(Path(config.other_draft).expanduser())
    return Models(str(made.target), draft, eagle3, other_draft=other)
