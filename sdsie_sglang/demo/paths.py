"""Where the demo keeps what it makes."""

import os
from pathlib import Path


def cache_dir() -> Path:
    """The demo's cache: `$SDSIE_CACHE`, else `$XDG_CACHE_HOME/sdsie`, else `~/.cache/sdsie`."""
    own = os.environ.get("SDSIE_CACHE")
    if own:
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "sdsie"
