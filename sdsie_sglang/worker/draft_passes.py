"""Counts the draft's forward passes where they happen."""

from typing import Any


class DraftPassCounter:
    """Wraps a model runner's `forward`; passes replayed by a CUDA graph are added by whoever replays.

    Args:
        runner: SGLang's ModelRunner of the draft.
    """

    def __init__(self, runner: Any) -> None:
        self.total = 0
        forward = runner.forward

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.total += 1
            return forward(*args, **kwargs)

        runner.forward = counted

    def add(self, passes: int) -> None:
        self.total += passes
