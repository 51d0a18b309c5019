"""Command lines: a wrong value or file is one line and exit code 2, said before anything is computed."""

import argparse
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from sdsie_sglang.gears.settings import first_error


def count(text: str) -> int:
    """An argparse type: a whole number from 1."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1")
    return int(text)


@contextmanager
def one_line(parser: argparse.ArgumentParser) -> Iterator[None]:
    """A file that cannot be read or a value that cannot be used ends the command. Around reading alone."""
    try:
        yield
    except ValidationError as error:
        parser.error(first_error(error))
    except (ValueError, OSError) as error:
        parser.error(" ".join(str(error).split()))


def read_json(path: Path, what: str) -> dict[str, Any]:
    """A file that holds one JSON object. Raises ValueError with one line that says `what` it should have been."""
    try:
        found = json.loads(path.read_text())
    except OSError as error:
        raise ValueError(f"{what} {path}: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise ValueError(f"{what} {path} is not JSON") from None
    if not isinstance(found, dict):
        raise ValueError(f"{what} {path} must hold names and values")
    return found
