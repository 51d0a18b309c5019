"""A command line of SGLang's, read and rewritten before SGLang parses it."""

from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml


def names(arg: str, flag: str) -> bool:
    """Whether `arg` is the flag, also cut short as argparse allows, with or without `=value`."""
    name = arg.split("=", 1)[0]
    return len(name) > len("--x") and name.startswith("--") and flag.startswith(name)


def gives(argv: Sequence[str], flag: str) -> bool:
    """On the command line or in the file that SGLang's --config names."""
    return any(names(arg, flag) for arg in argv) or flag in _from_config_file(argv)


def value_of(argv: Sequence[str], flag: str) -> str | None:
    """On the command line or in the file that SGLang's --config names; None if it is in neither."""
    for i, arg in enumerate(argv):
        if names(arg, flag):
            return arg.split("=", 1)[1] if "=" in arg else next(iter(argv[i + 1 : i + 2]), None)
    value = _from_config_file(argv).get(flag)
    return None if value is None else str(value)


def without(argv: Sequence[str], flags: Iterable[str]) -> list[str]:
    """The command line less these flags, in full or cut short, and their values."""
    flags = tuple(flags)
    kept: list[str] = []
    skips_value = False
    for arg in argv:
        if any(names(arg, flag) for flag in flags):
            skips_value = "=" not in arg
        elif skips_value and not arg.startswith("--"):
            skips_value = False
        else:
            kept.append(arg)
            skips_value = False
    return kept


def _from_config_file(argv: Sequence[str]) -> dict[str, Any]:
    """What SGLang's own --config file gives, by flag; SGLang complains of a file that it cannot read."""
    path = next((value for flag, value in pairwise(argv) if flag == "--config"), None)
    try:
        values = yaml.safe_load(Path(path).read_text()) if path is not None else None
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return {f"--{str(key).replace('_', '-')}": v for key, v in values.items()} if isinstance(values, dict) else {}
