"""A debug switch: any wait for the device while a cycle is issued is an error.

A scheduler thread that waits leaves the GPU idle until it has caught up. PyTorch sees the waits that it causes itself
(`torch.cuda.set_sync_debug_mode`); the one that is allowed is the ragged catch-up's, which reads lengths at most once a
prompt.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def syncs_are_errors(wanted: bool) -> Iterator[None]:
    """Raises RuntimeError where PyTorch would wait for the device; nothing without `wanted`."""
    if not wanted:
        yield
        return
    with _mode("error"):
        yield


@contextmanager
def syncs_are_allowed() -> Iterator[None]:
    """Within `syncs_are_errors`, for the one place that may wait."""
    if not torch.cuda.is_available():
        yield
        return
    with _mode("default"):
        yield


@contextmanager
def _mode(mode: str) -> Iterator[None]:
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode(mode)
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
