"""What SGLang can be told that would make speculative text differ from the target's own."""

from collections.abc import Mapping
from typing import Any

THRESHOLDS = ("speculative_accept_threshold_single", "speculative_accept_threshold_acc")


def relaxed_thresholds(settings: Mapping[str, Any]) -> list[str]:
    """Names of settings that accept drafted tokens beyond what the target's distribution allows."""
    return [name for name in THRESHOLDS if settings.get(name, 1.0) != 1.0]
