"""What of this project is live in this process: written by the plugin, read by log and /server_info."""

from typing import Any

_live: dict[str, Any] = {}


def set_live(status: dict[str, Any]) -> None:
    """Adds to what is live: when all is checked and registered, and when the worker knows its conditions."""
    _live.update(status)


def live_status() -> dict[str, Any]:
    """Version, SGLang's version, algorithm and hooks; empty unless the plugin was registered."""
    return dict(_live)


def live_line() -> str:
    """`live_status` as one line for the log; SGLang sets logging up only after it loaded its plugins."""
    return "sdsie {version} on SGLang {sglang}, algorithm {algorithm}, live hooks: {hooks}".format(**_live)
