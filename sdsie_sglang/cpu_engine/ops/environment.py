"""Process set-up that the compiled build does in C++: thread binding and shared-memory all-reduce.

Threads are left to OMP_NUM_THREADS. One process serves the whole model, so there is no group to set up.
"""

from .registry import op


@op("init_cpu_threads_env(str? cpu_ids) -> ()")
def init_cpu_threads_env(cpu_ids: str | None) -> None:
    """Bind OpenMP threads to the cores of a NUMA node: left to the operating system."""


@op("initialize(int size, int rank) -> ()")
def initialize(size: int, rank: int) -> None:
    """Set up the shared-memory all-reduce of `size` tensor-parallel ranks: there is one rank."""
    if size != 1:
        raise NotImplementedError("this project's CPU ops serve one process: use --tensor-parallel-size 1")
