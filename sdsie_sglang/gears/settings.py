"""What a policy can be told, validated. These settings may change while the server runs."""

import re
from collections.abc import Iterable
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from sdsie_sglang.gears.cost_table import Objective, load_cost_table
from sdsie_sglang.gears.limits import MAX_K, MAX_SCHEDULE

PolicyName = Literal["plain", "fixed", "entropy", "schedule", "cost"]
SAVES: dict[str, Objective] = {"speed": "time", "energy": "energy"}
"""What each objective saves."""

# theta_low, theta_high in bits; alpha of the EMA. `tuned` won the original's grid search,
# `paper` is its paper's equation, `class` the default of its clutch class.
PRESETS: dict[str, dict[str, float]] = {
    "tuned": {"theta_low": 0.15, "theta_high": 0.70, "alpha": 0.65},
    "paper": {"theta_low": 0.55, "theta_high": 1.25, "alpha": 0.35},
    "class": {"theta_low": 0.60, "theta_high": 1.40, "alpha": 0.65},
}


class PolicySettings(BaseModel):
    """Settings of one policy. Thresholds left out come from `preset`.

    Raises:
        pydantic.ValidationError: a value is out of range; `first_error` turns it into one line.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    policy: PolicyName = "fixed"
    k: int = Field(default=5, ge=1, le=MAX_K, description="draft tokens a cycle while engaged")
    preset: Literal["tuned", "paper", "class"] = "tuned"
    theta_low: float = Field(default=0.15, ge=0.0, description="bits")
    theta_high: float = Field(default=0.70, gt=0.0, description="bits")
    alpha: float = Field(default=0.65, gt=0.0, le=1.0, description="weight of the newest entropy")
    smoothing: Literal["ema", "window"] = "ema"
    window: int = Field(default=3, ge=1, le=1024, description="width of the moving window")
    fold: Literal["last", "all"] = "last"
    engage_share: float = Field(default=0.5, gt=0.0, le=1.0, description="share of a batch that engages it")
    schedule: tuple[int, ...] = Field(default=(5, 0), description="gears a cycle, repeated for ever")
    cost_table: str | None = Field(default=None, description="file written by eval.calibrate, for policy cost")
    objective: Literal["speed", "energy"] = Field(default="speed", description="what policy cost is after")
    explore: float = Field(default=0.005, ge=0.0, le=0.1, description="share of the cost spent on exploring")
    seed: int = Field(default=0, ge=0, description="of the exploration of policy cost")

    @field_validator("schedule", mode="before")
    @classmethod
    def _parse_schedule(cls, value: Any) -> Any:
        return parse_schedule(value) if isinstance(value, str) else value

    @model_validator(mode="before")
    @classmethod
    def _fill_from_preset(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        return {**PRESETS.get(str(values.get("preset", "tuned")), {}), **values}

    @model_validator(mode="after")
    def _check(self) -> "PolicySettings":
        if not self.theta_low < self.theta_high:
            raise ValueError(f"theta_low ({self.theta_low}) must be below theta_high ({self.theta_high})")
        if not self.schedule or not all(0 <= k <= MAX_K for k in self.schedule):
            raise ValueError(f"schedule must name gears from 0 to {MAX_K}")
        if self.policy == "cost":
            if self.cost_table is None:
                raise ValueError("policy cost needs cost_table, a file written by sdsie_sglang.eval.calibrate")
            table = load_cost_table(self.cost_table)
            table.at(table.batches[0]).of(SAVES[self.objective])
        return self

    @property
    def gears(self) -> tuple[int, ...]:
        """Every K that this policy can ask for, ascending; 0 is plain decoding."""
        if self.policy == "cost" and self.cost_table is not None:
            return load_cost_table(self.cost_table).gears
        used = {"plain": {0}, "fixed": {self.k}, "entropy": {0, self.k}, "schedule": set(self.schedule)}
        return tuple(sorted(used[self.policy]))


def parse_schedule(text: str) -> tuple[int, ...]:
    """'5x8,0x8' -> eight cycles in gear 5, eight in gear 0. Raises ValueError on anything else."""
    gears: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d)(?:x(\d{1,4}))?\s*", part)
        if match is None:
            raise ValueError(f"schedule must look like 5x8,0x8 (gear x cycles), not {text!r}")
        gears += [int(match[1])] * int(match[2] or 1)
        if len(gears) > MAX_SCHEDULE:
            raise ValueError(f"schedule is longer than {MAX_SCHEDULE} cycles")
    return tuple(gears)


def unprepared(settings: PolicySettings, prepared: Iterable[int]) -> str | None:
    """Why a server that prepared these gears at start cannot run `settings`, or None.

    The cost gate makes do with those of its table's gears that were prepared.
    """
    prepared = tuple(prepared)
    missing = sorted(set(settings.gears) - set(prepared))
    if not missing or (settings.policy == "cost" and set(settings.gears) & set(prepared) - {0}):
        return None
    return f"gears {missing} were not prepared at start (there are {list(prepared)}): see --sdsie-gears"


def first_error(error: ValidationError) -> str:
    """One line for a person: the field as it was asked for, and what is wrong with it."""
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"])
    message = first["msg"].removeprefix("Value error, ")
    return f"{where}: {message} (got {first['input']!r})" if where else message
