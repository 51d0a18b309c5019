"""Command lines: a wrong value or file is one line and exit code 2, said before anything is computed."""

import argparse
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import requests
from pydantic import ValidationError

from sdsie_sglang.demo import DemoError
from sdsie_sglang.eval.server import ServerFailed, ends_on_signals
from sdsie_sglang.gears.settings import first_error


def count(text: str) -> int:
    """An argparse type: a whole number from 1."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1")
    return int(text)


@contextmanager
def measuring(command: str) -> Iterator[None]:
    """Around measuring: a server that fails or an interrupt ends the command with a line and exit code 1 or 130, models
    that cannot be had with 2, and no server is left behind. What was measured until then is the command's to keep."""
    try:
        with ends_on_signals():
            yield
    except KeyboardInterrupt:
        sys.exit(_said(f"{command}: interrupted; the same command goes on from here", 130))
    except DemoError as error:
        sys.exit(_said(f"{command}: {error}", 2))
    except (ServerFailed, requests.RequestException, OSError) as error:
        sys.exit(_said(f"{command}: {error}", 1))


def _said(line: str, code: int) -> int:
    print(line, file=sys.stderr)
    return code


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


def replace_text(path: Path, text: str) -> None:
    """A file with all of the text in place of what it held, or as it was: records that grow are never cut off."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_suffix(f".{os.getpid()}.part")
    try:
        scratch.write_text(text)
        scratch.replace(path)
    finally:
        scratch.unlink(missing_ok=True)
