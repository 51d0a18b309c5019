"""What preparing a part of the worker took, in the log: each gear costs start-up time and memory of graphs."""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sglang.srt.utils.common import get_available_gpu_memory

logger = logging.getLogger(__name__)


@contextmanager
def logged(owner: Any, what: str) -> Iterator[None]:
    """Says how long what runs inside took, and how much memory. owner: a worker or model runner of SGLang's."""
    started, free_gb = time.perf_counter(), get_available_gpu_memory(owner.device, owner.gpu_id)
    yield
    used_gb = free_gb - get_available_gpu_memory(owner.device, owner.gpu_id)
    logger.info("sdsie: %s prepared in %.1f s, %.2f GB", what, time.perf_counter() - started, used_gb)
