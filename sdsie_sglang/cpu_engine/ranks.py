"""Tensor- and data-parallel ranks on one host: SGLang's CPU engine wants a NUMA node for each, and no NCCL."""

import logging
import os
from collections.abc import Callable
from typing import Any

import torch

logger = logging.getLogger(__name__)

BIND_VARIABLE = "SGLANG_CPU_OMP_THREADS_BIND"


def share_cores(original: Callable[..., Any], *, numa_index: int, world_size: int) -> Any:
    """AROUND `numa_utils.init_threads_binding`: ranks share the cores where there are fewer NUMA nodes.

    SGLang refuses to start such ranks unless SGLANG_CPU_OMP_THREADS_BIND names the cores of each. Its threads are
    not bound by this project's ops, so all that matters is that the ranks together do not run more threads than
    there are cores. OMP_NUM_THREADS wins over this.

    Args:
        numa_index: the rank, counted over all replicas.
        world_size: tensor-parallel ranks of all replicas.

    Returns:
        The rank's cores, as text like "0,2,4".
    """
    if world_size == 1 or os.environ.get(BIND_VARIABLE, "all") != "all":
        return original(numa_index=numa_index, world_size=world_size)
    cores = sorted(os.sched_getaffinity(0))
    own = cores[numa_index % world_size :: world_size] or [cores[numa_index % len(cores)]]
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(len(own))
    logger.info("sdsie: %d ranks share %d cores; give --max-total-tokens if memory is short", world_size, len(cores))
    return ",".join(map(str, own))


def group_on_gloo(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """AROUND `parallel_state.init_model_parallel_group`: none of the communicators that need a GPU.

    SGLang opens NCCL wherever its library can be loaded, and torch's CUDA wheels bring it along.
    """
    return original(*args, **{**kwargs, "use_pynccl": False, "use_custom_allreduce": False})
