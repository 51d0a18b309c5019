"""Process set-up that the compiled build does in C++: thread binding, left to the operating system here."""

from .registry import op


@op("init_cpu_threads_env(str? cpu_ids) -> ()")
def init_cpu_threads_env(cpu_ids: str | None) -> None:
    """Bind OpenMP threads to the cores of a NUMA node: not done; `cpu_engine/ranks.py` says how many there are."""
