"""The record of the Resolution Gear's study: one file a calibration; and what the study is held against."""

from typing import Any

from pydantic import BaseModel, ConfigDict

from sdsie_sglang.int4.resolution import pick

REFERENCE = "reference"
ORIGINAL = {"calibration": "channel", "gate": "class", "place": "first"}
ORIGINAL_MATCH = {1: (1.0, 0.356, 1.0), 2: (0.072, 0.096, 0.076), 4: (0.028, 0.08, 0.104), 32: (0.036, 0.024, 0.092)}
"""What it published for poem, physics and code by gated layers of an 8B model's 32."""
# A setting is called safe while, over prompts, the interval's worse end keeps to both.
SAFE_KL_NATS = 0.01
SAFE_TOP1 = 0.98


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
