"""What a cycle of each gear costs at each batch size, as measured on one machine."""

from bisect import bisect_left
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from stat import S_ISREG
from typing import Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from sdsie_sglang.gears.limits import MAX_K

FORMAT: Final = 1
Objective = Literal["time", "energy"]


class Cell(BaseModel):
    """One gear at one batch size.

    Args:
        ms: milliseconds of a cycle; ms_low, ms_high: range over the repeats.
        joules: of a cycle, whole device; None where it was not measured.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    k: int = Field(ge=0, le=MAX_K)
    batch: int = Field(ge=1)
    ms: float = Field(gt=0.0)
    ms_low: float | None = None
    ms_high: float | None = None
    joules: float | None = Field(default=None, gt=0.0)


class Engaging(BaseModel):
    """What a K-cycle costs on top if the cycle before it was gear 0 and the draft has to catch up."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    batch: int = Field(ge=1)
    ms: float = Field(ge=0.0)


class Conditions(BaseModel):
    """What a cycle's cost depends on, and a server says of itself.

    Args:
        target, draft: the models' names, for people; two names may be the same model.
        target_config, draft_config: digests of their configurations.
        hardware: the GPU's name, or the processor and its cores.
        skinny_gemm: whether this project's product of few rows may run (--sdsie-no-skinny-gemm).
        fused_layer: whether what lies between a layer's products may run inside them (--sdsie-no-fused-layer).
        fused_attention: whether attention of few rows may be one launch (--sdsie-no-fused-attention).
        draft_graph: whether all draft passes of a cycle may be one CUDA graph (not --sdsie-no-draft-graph).
        quantization, draft_quantization: None where the checkpoint says it, or there is none.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    target: str
    target_config: str
    draft: str
    draft_config: str
    hardware: str
    dtype: str
    attention_backend: str
    tp_size: int = Field(ge=1)
    quantization: str | None = None
    draft_quantization: str | None = None
    skinny_gemm: bool = True
    fused_layer: bool = True
    fused_attention: bool = True
    draft_graph: bool = False

    @property
    def models(self) -> str:
        """Target and draft in one phrase."""
        return f"{self.target} and {self.draft}, {self.dtype}, {self.attention_backend}, tp_size {self.tp_size}"

    def differences(self, measured: "Conditions") -> list[str]:
        """What is not as it was `measured`, in words; empty if the costs hold here."""
        names = {"target_config": "target", "draft_config": "draft"}
        compared = [name for name in Conditions.model_fields if name not in names.values()]
        return [
            f"{names.get(name, name)} {getattr(self, names.get(name, name))}, not "
            f"{getattr(measured, names.get(name, name))}"
            for name in compared
            if getattr(self, name) != getattr(measured, name)
        ]


class CostTable(BaseModel):
    """Every gear that can be chosen, at every batch size measured. Written by `eval.calibrate`.

    Args:
        models, where: target and draft, and the hardware, in words.
        method: how the figures were got.
        conditions: of the server that was measured; None where nobody wrote them down.
        engaging: empty where it was not measured; it counts as nothing then.
        machine, command, date: what a record must say about itself.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal[1] = FORMAT
    models: str
    where: str
    method: str
    cells: tuple[Cell, ...] = Field(min_length=1)
    engaging: tuple[Engaging, ...] = ()
    conditions: Conditions | None = None
    machine: dict[str, Any] = Field(default_factory=dict)
    command: str = ""
    date: str = ""

    @model_validator(mode="after")
    def _check(self) -> "CostTable":
        seen = {(cell.k, cell.batch) for cell in self.cells}
        if len(seen) != len(self.cells):
            raise ValueError("a gear at a batch size may appear once")
        if 0 not in self.gears:
            raise ValueError("gear 0 is missing: it is what every gate falls back to")
        missing = [(k, b) for k in self.gears for b in self.batches if (k, b) not in seen]
        if missing:
            raise ValueError(f"gear and batch size {missing[0]} is missing")
        return self

    @property
    def gears(self) -> tuple[int, ...]:
        """Ascending; 0 is always among them."""
        return tuple(sorted({cell.k for cell in self.cells}))

    @property
    def batches(self) -> tuple[int, ...]:
        """Batch sizes that were measured, ascending."""
        return tuple(sorted({cell.batch for cell in self.cells}))

    def only(self, gears: Iterable[int]) -> "CostTable":
        """The table without the gears that are not named; gear 0 stays."""
        kept = {0, *gears}
        return self.model_copy(update={"cells": tuple(cell for cell in self.cells if cell.k in kept)})

    def at(self, batch: int) -> "GearCosts":
        """Costs at one batch size: measured, or linear between the measured ones around it.

        Raises:
            ValueError: the batch is larger or smaller than any that was measured.
        """
        sizes = self.batches
        if not sizes[0] <= batch <= sizes[-1]:
            raise ValueError(f"batch {batch} is outside of the measured {sizes[0]} to {sizes[-1]}")
        above = sizes[bisect_left(sizes, batch)]
        below = above if above == batch else sizes[bisect_left(sizes, batch) - 1]
        share = 0.0 if above == below else (batch - below) / (above - below)
        cells = {(cell.k, cell.batch): cell for cell in self.cells}

        def between(low: float, high: float) -> float:
            return low + share * (high - low)

        joules = None
        if all(cell.joules is not None for cell in self.cells):
            joules = {
                k: between(cells[k, below].joules or 0.0, cells[k, above].joules or 0.0) for k in self.gears
            }  # fmt: skip
        return GearCosts(
            ms={k: between(cells[k, below].ms, cells[k, above].ms) for k in self.gears},
            joules=joules,
            engaging_ms=self._engaging_ms(batch),
        )

    def nearest(self, batch: int) -> "GearCosts":
        """As `at`, with the smallest or largest measured batch size beyond them: for a running server."""
        return self.at(min(max(batch, self.batches[0]), self.batches[-1]))

    def _engaging_ms(self, batch: int) -> float:
        """That of the batch size nearest to `batch`."""
        if not self.engaging:
            return 0.0
        return min(self.engaging, key=lambda cost: (abs(cost.batch - batch), cost.batch)).ms


class GearCosts:
    """Costs of one cycle at one batch size, by gear.

    Args:
        ms, joules: by gear; joules is None where a figure is missing.
        engaging_ms: see `Engaging`. Its energy is that time at the power of the cycle it comes with.
    """

    def __init__(self, ms: dict[int, float], joules: dict[int, float] | None, engaging_ms: float) -> None:
        self.ms = ms
        self.joules = joules
        self.engaging_ms = engaging_ms

    @property
    def gears(self) -> tuple[int, ...]:
        return tuple(self.ms)

    def of(self, objective: Objective) -> tuple[dict[int, float], dict[int, float]]:
        """Cost of a cycle in each gear, and what engaging adds to it; ms or J.

        Raises:
            ValueError: energy was not measured.
        """
        if objective == "time":
            return self.ms, {k: self.engaging_ms if k else 0.0 for k in self.ms}
        if self.joules is None:
            raise ValueError("this cost table has no energies: measure it on a GPU with eval.calibrate")
        joules = self.joules
        return joules, {k: self.engaging_ms / self.ms[k] * joules[k] if k else 0.0 for k in self.ms}


MAX_BYTES = 1 << 20


def load_cost_table(path: str | Path) -> CostTable:
    """Raises ValueError with one line if the file cannot be used."""
    try:
        state = Path(path).stat()
        if not S_ISREG(state.st_mode) or state.st_size > MAX_BYTES:
            raise ValueError(f"cost table {path}: not an ordinary file of at most {MAX_BYTES} bytes")
        return _parse(str(path), state.st_mtime_ns)
    except OSError as error:
        raise ValueError(f"cost table {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ValueError(f"cost table {path}: not a text file") from None
    except ValidationError as error:
        first = error.errors()[0]
        message = first["msg"].removeprefix("Value error, ")
        raise ValueError(f"cost table {path}: {' '.join([*map(str, first['loc']), message])}") from None


@lru_cache(maxsize=8)
def _parse(path: str, changed_ns: int) -> CostTable:
    return CostTable.model_validate_json(Path(path).read_text())
