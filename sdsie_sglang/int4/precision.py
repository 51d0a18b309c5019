"""Which weight of a layer that holds two runs.

One switch a process, read at each call. A CUDA graph keeps the branch that was taken while it was captured.
"""

from collections.abc import Iterator
from contextlib import contextmanager

_int4 = False
_products = 0


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


def count_int4_product() -> None:
    """Called for each product that a layer with both precisions computes by its INT4 weight."""
    global _products
    _products += 1


def int4_products() -> int:
    """How many there were in this process. A product within a CUDA graph counts while the graph is captured."""
    return _products
