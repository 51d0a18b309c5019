"""The record of one server's life: raw readings and how they came about. Every figure is computed from records."""

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from sdsie_sglang.eval.energy import Readings
from sdsie_sglang.eval.plan import Config, Datapoint

VERSION = 1


class Request(BaseModel):
    """One answered request. Times are seconds of the record's clock, which starts with the record.

    Args:
        key: the prompt and its form; the same in all records.
        phase: index into the configuration's phases.
        input_ids_sha: of the prompt's token ids, to show that all methods got the same.
        verify_count: target passes after prefill, if the method speculates.
        drafts_accepted: how many cycles accepted 0, 1, 2, ... drafted tokens.
        sdsie: this project's own per-request counts.
    """

    key: str
    prompt: str
    category: str
    is_code: bool
    phase: int
    input_tokens: int
    input_ids_sha: str
    output_ids: list[int]
    start_s: float
    first_token_s: float
    end_s: float
    finish: str
    rid: str = ""
    verify_count: int | None = None
    drafts_accepted: list[int] | None = None
    sdsie: dict[str, Any] | None = None

    @property
    def tokens(self) -> int:
        return len(self.output_ids)

    @property
    def tok_per_s(self) -> float:
        """Output tokens a second of the whole request, prefill included (as the original counts)."""
        return self.tokens / (self.end_s - self.start_s)

    @property
    def decode_tok_per_s(self) -> float | None:
        """Tokens a second after the first one."""
        return (self.tokens - 1) / (self.end_s - self.first_token_s) if self.tokens > 1 else None

    @property
    def accept_length(self) -> float | None:
        """Tokens a target pass, as SGLang counts: all tokens over passes after prefill."""
        return self.tokens / self.verify_count if self.verify_count else None


class Stretch(BaseModel):
    """A named stretch of the record's time."""

    start_s: float
    end_s: float


class WarmUpReading(BaseModel):
    """One reading of one warm-up prompt; power and temperature are None where there is no GPU."""

    label: str
    start_s: float
    end_s: float
    tokens: int
    power_w: float | None = None
    temperature_c: float | None = None


class Record(BaseModel):
    """Everything about one datapoint.

    Args:
        run: names the invocation that measured it: brackets of another invocation are another session.
        command: the server's command line; home and scratch folders shortened. server_info: what it said of itself.
        live: this project's hooks and policy, as the server showed them; None for SGLang as shipped.
        paused_s: how long it was stopped (SIGSTOP) while others were measured; None in records of when those that
            waited were idle instead.
        before: GPU memory (GiB) and processes of others before the server was warmed up, and our servers that wait.
        warm_up_settled: None where there is no GPU.
        notes: what a reader must know of the checkpoints (checkpoints_check).
        trace: one object a decode cycle, if the configuration asked for it.
    """

    model_config = ConfigDict(extra="forbid")

    version: int = VERSION
    datapoint: Datapoint
    config: Config
    config_digest: str
    run: str
    date: str
    machine: dict[str, Any]
    program: str
    command: list[str]
    server_info: dict[str, Any]
    live: dict[str, Any] | None
    startup_s: float
    paused_s: float | None = None
    before: dict[str, float] | None
    idle: Stretch | None
    warm_up: list[WarmUpReading]
    warm_up_settled: bool | None
    phases: list[Stretch]
    prefill: Stretch | None
    prefill_requests: int
    prefill_tokens: int
    requests: list[Request]
    readings: Readings | None
    notes: list[str] = []
    trace: list[dict[str, Any]] | None = None

    def of_phase(self, phase: int) -> list[Request]:
        return [request for request in self.requests if request.phase == phase]


def portable(text: str) -> str:
    """Without where this machine keeps its home and its scratch files: records are shared."""
    return text.replace(tempfile.gettempdir(), "$TMPDIR").replace(str(Path.home()), "~")


class Damaged(ValueError):
    """A record that cannot be used; one line."""


def write(record: Record, path: Path) -> None:
    """Writes a new record at once or not at all. Raises FileExistsError rather than overwrite."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_suffix(".part")
    scratch.write_text(record.model_dump_json() + "\n")
    try:
        os.link(scratch, path)
    finally:
        scratch.unlink()


def read(path: Path) -> Record:
    """Raises Damaged."""
    try:
        return Record(**json.loads(path.read_text()))
    except (OSError, ValueError) as error:
        raise Damaged(f"{path}: {str(error).splitlines()[0]}") from None


def read_all(folder: Path) -> list[Record]:
    """All records under a results folder, in the order of their paths. Raises Damaged."""
    return [read(path) for path in sorted(folder.glob("*/rep*/*.json"))]
