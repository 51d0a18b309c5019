"""What INT4 weights are made of: plain settings, no torch, no SGLang."""

from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, get_args

from pydantic import BaseModel, ConfigDict, field_validator

CalibrationName = Literal["channel", "g128", "g64", "g32", "mse", "awq"]


@dataclass(frozen=True)
class Calibration:
    """Args:
    group: consecutive k that share a scale; 0 is one scale a row.
    symmetric: zero is code 8; otherwise a float a group.
    method: `quantize`'s name for how the range is chosen.
    needs_text: scales inputs by what a little text shows of them.
    """

    group: int
    symmetric: bool
    method: str = "minmax"
    needs_text: bool = False


CALIBRATIONS = MappingProxyType(
    {
        "channel": Calibration(group=0, symmetric=False),
        "g128": Calibration(group=128, symmetric=True),
        "g64": Calibration(group=64, symmetric=True),
        "g32": Calibration(group=32, symmetric=True),
        "mse": Calibration(group=128, symmetric=True, method="mse"),
        "awq": Calibration(group=128, symmetric=True, needs_text=True),
    }
)
assert set(CALIBRATIONS) == set(get_args(CalibrationName))


FUSED = MappingProxyType(
    {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")},
)
"""What SGLang runs as one layer, by its name for it."""


class Int4Settings(BaseModel):
    """Args:
    calibration: how a weight becomes INT4 while it is loaded; a saved checkpoint says its own.
    exclude: layers whose name contains one of these keep full precision, as `mlp.down_proj` or `layers.0.`. A name of
        a part of a fused layer, or of the fused layer, means the whole of it, in checkpoints as in SGLang.
    lm_head: whether the output head is INT4 as well.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    calibration: CalibrationName = "g128"
    exclude: tuple[str, ...] = ()
    lm_head: bool = False

    @field_validator("exclude", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        """A flag gives names separated by commas."""
        return tuple(part.strip() for part in value.split(",") if part.strip()) if isinstance(value, str) else value

    def excludes(self, name: str) -> bool:
        """Whether the layer of this name keeps full precision."""
        parent, dot, own = name.rpartition(".")
        together = next(((whole, *parts) for whole, parts in FUSED.items() if own in (whole, *parts)), (own,))
        return any(part in f"{parent}{dot}{each}" for part in self.exclude for each in together)
