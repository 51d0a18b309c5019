"""Cost tables that were measured at a first start, one file for all that they depend on."""

import hashlib
import json
import os
import re
import tempfile
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from sdsie_sglang.config import cache_dir
from sdsie_sglang.gears.cost_table import FORMAT, Conditions, CostTable, load_cost_table

VERSIONED = ("sglang", "sdsie-sglang")
DIGEST_CHARACTERS = 16


def path_for(conditions: Conditions, gears: Sequence[int], *, energies: bool) -> Path:
    """Where the table of such a server is kept. Names of models are no part of the key, their configurations are."""
    depends_on = {
        "format": FORMAT,
        "conditions": conditions.model_dump(exclude={"target", "draft"}),
        "gears": sorted(gears),
        "energies": energies,
        "versions": {name: _version(name) for name in VERSIONED},
    }
    digest = hashlib.sha256(json.dumps(depends_on, sort_keys=True).encode()).hexdigest()[:DIGEST_CHARACTERS]
    target = re.sub(r"[^A-Za-z0-9.-]+", "-", conditions.target)[-40:]
    return cache_dir() / "cost_tables" / f"{target}-{digest}.json"


def read(path: Path) -> CostTable | None:
    """None if there is none that can be used: it is measured again then."""
    try:
        return load_cost_table(path)
    except ValueError:
        return None


def write(path: Path, table: CostTable) -> None:
    """All of it or nothing, whoever else writes it at the same time. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, scratch = tempfile.mkstemp(dir=path.parent, suffix=".part")
    try:
        with os.fdopen(handle, "w") as file:
            file.write(table.model_dump_json(indent=1) + "\n")
        os.replace(scratch, path)
    except BaseException:
        os.unlink(scratch)
        raise


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
