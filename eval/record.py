"""The record of one server's life: raw readings and how they came about. Every figure is computed from records."""

import hashlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from sdsie_sglang.eval.energy import Readings
from sdsie_sglang.eval.plan import Config, Datapoint
from sdsie_sglang.gears.settings import first_error

VERSION = 1
SCRATCH = ".part"
"""How a file's name ends while it is written; what a killed run leaves of one is of no use."""


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
    """Writes a new record at once or not at all, sealed. Raises FileExistsError rather than overwrite."""
    values = json.loads(record.model_dump_json())
    write_new(path, json.dumps({**values, "seal": _seal(values)}, separators=(",", ":")) + "\n")


def write_new(path: Path, text: str) -> None:
    """A new file with all of the text, or none. Raises FileExistsError rather than overwrite."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_suffix(f".{os.getpid()}{SCRATCH}")
    try:
        with scratch.open("w") as out:
            out.write(text)
            out.flush()
            os.fsync(out.fileno())
        os.link(scratch, path)
    finally:
        scratch.unlink(missing_ok=True)


def _seal(values: dict[str, Any]) -> str:
    """Of everything else in a record: a figure that was touched up afterwards does not fit it."""
    text = json.dumps(values, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def read(path: Path) -> Record:
    """Raises Damaged."""
    try:
        values = json.loads(path.read_text())
        if not isinstance(values, dict):
            raise Damaged(f"{path} is no record")
        seal = values.pop("seal", None)  # the first records had none
        if seal is not None and seal != _seal(values):
            raise Damaged(f"{path} was changed after it was measured")
        return Record(**values)
    except Damaged:
        raise
    except ValidationError as error:
        raise Damaged(f"{path}: {first_error(error)}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise Damaged(f"{path} cannot be read: {str(error).splitlines()[0]}") from None


def read_all(folder: Path) -> list[Record]:
    """All records under a results folder, in the order of their paths.

    Raises Damaged: also for a record that lies where another belongs, or that was measured under another configuration.
    """
    records: list[Record] = []
    for path in sorted(folder.glob("*/rep*/*.json")):
        record = read(path)
        if record.datapoint.path(folder) != path:
            raise Damaged(f"{path} is the record of {record.datapoint.path(Path())}")
        if record.config_digest != (records or [record])[0].config_digest:
            raise Damaged(f"{path} was measured under another configuration than the records before it")
        records.append(record)
    return records
