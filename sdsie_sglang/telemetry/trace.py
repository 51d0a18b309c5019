"""One JSON line a cycle, for people and for the tests that hold decision against execution."""

import json
from pathlib import Path
from typing import Any, Protocol

from sdsie_sglang.config import ConfigError


class Trace(Protocol):
    def write(self, line: dict[str, Any]) -> None: ...


class NoTrace:
    def write(self, line: dict[str, Any]) -> None:
        pass


class FileTrace:
    """Appends to a file and flushes each line, so that a crash loses nothing."""

    def __init__(self, path: str) -> None:
        self._file = Path(path).open("a", buffering=1)  # noqa: SIM115 (open as long as the server runs)

    def write(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps(line, separators=(",", ":")) + "\n")


def open_trace(path: str | None, *, writes: bool) -> Trace:
    """`writes` is False on every tensor-parallel rank but the first."""
    return FileTrace(path) if path and writes else NoTrace()


def check_trace_path(path: str | None) -> None:
    """Raises ConfigError if a trace could not be written there."""
    if path is None:
        return
    try:
        Path(path).open("a").close()
    except OSError as error:
        raise ConfigError(f"trace file {path}: {error.strerror}") from None
