"""Which weight of a layer that holds two runs.

One switch a process, read at each call. A CUDA graph keeps the branch that was taken while it was captured.
"""

from collections.abc import Iterator
from contextlib import contextmanager

_int4 = False


def is_int4() -> bool:
    """Whether layers that hold both precisions multiply by their INT4 weight."""
    return _int4


@contextmanager
def running_int4() -> Iterator[None]:
    """Within it, layers that hold both precisions run in INT4."""
    global _int4
    before, _int4 = _int4, True
    try:
        yield
    finally:
        _int4 = before
