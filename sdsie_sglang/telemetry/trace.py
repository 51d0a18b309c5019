"""One JSON line a cycle, for people and for the tests that hold decision against execution."""

import json
import os
from pathlib import Path
from typing import Any, Protocol

from sdsie_sglang.config import ConfigError


class Trace(Protocol):
    def write(self, line: dict[str, Any]) -> None: ...


class NoTrace:
    def write(self, line: dict[str, Any]) -> None:
        pass


class FileTrace:
    """Appends to a file and flushes each line, so that a crash loses nothing.

    Args:
        dp_rank: data-parallel rank; replicas of one server write to one file.
        replica: the server's name among several.
    """

    def __init__(self, path: str, dp_rank: int = 0, replica: str | None = None) -> None:
        self._who: dict[str, Any] = {"dp_rank": dp_rank}
        if replica is not None:
            self._who["replica"] = replica
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def write(self, line: dict[str, Any]) -> None:
        text = json.dumps({**self._who, **line}, separators=(",", ":")) + "\n"
        os.write(self._file, text.encode())  # one call a line: lines of several replicas do not mix


def open_trace(path: str | None, *, tp_rank: int, dp_rank: int, every_rank: bool, replica: str | None = None) -> Trace:
    """The first tensor-parallel rank writes; with `every_rank` all do, to FILE, FILE.rank1, FILE.rank2, …"""
    if not path or (tp_rank and not every_rank):
        return NoTrace()
    return FileTrace(f"{path}.rank{tp_rank}" if tp_rank else path, dp_rank, replica)


def check_trace_path(path: str | None) -> None:
    """Raises ConfigError if a trace could not be written there."""
    if path is None:
        return
    try:
        Path(path).open("a").close()
    except OSError as error:
        raise ConfigError(f"trace file {path}: {error.strerror}") from None
