"""`eval/results/headline.json`: the figures that are quoted, each with the record it comes from.

Written only by the commands that measure. A figure that was never measured is absent.
"""

import datetime
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from sdsie_sglang.eval.machine import this_command as this_command
from sdsie_sglang.eval.machine import where as where_of

ROOT = Path(__file__).resolve().parents[1]
HEADLINE = ROOT / "eval" / "results" / "headline.json"


class Figure(BaseModel):
    """One quoted figure.

    Args:
        low, high: an interval, or the spread over repeats; None where there is none.
        unit: "1" for a ratio or a share.
        where: the hardware.
        record: path in the repository of the raw record.
        note: what falls short, and why.
    """

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    name: str = Field(pattern=r"^[a-z0-9_]+$")
    value: float
    low: float | None = None
    high: float | None = None
    unit: str
    where: str
    record: str
    command: str
    date: str
    note: str = ""


def in_repository(path: Path) -> str:
    """A record's path as figures carry it: from the repository's root, if it lies there, else its name."""
    whole = path.resolve()
    return str(whole.relative_to(ROOT)) if whole.is_relative_to(ROOT) else path.name


def today() -> str:
    return datetime.datetime.now(datetime.UTC).date().isoformat()


def quote(
    record: Mapping[str, Any], path: Path, figures: Mapping[str, Mapping[str, float]], note: Callable[[str], str]
) -> None:
    """Puts a benchmark's ratios into the file.

    Args:
        record: its raw record: machine, command and date are taken from it.
        figures: value, low and high of each name.
        note: what to say of the figure of that name.
    """
    update(
        [
            Figure(
                name=name,
                **figure,
                unit="1",
                where=where_of(record["machine"]),
                record=str(path),
                command=record["command"],
                date=record["date"],
                note=note(name),
            )
            for name, figure in figures.items()
        ]
    )


def update(figures: list[Figure], path: Path = HEADLINE) -> None:
    """Puts the figures into the file, each in place of an earlier one of its name; sorted by name."""
    known = {f["name"]: f for f in json.loads(path.read_text())} if path.exists() else {}
    known |= {figure.name: figure.model_dump() for figure in figures}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps([known[name] for name in sorted(known)], indent=1) + "\n")
