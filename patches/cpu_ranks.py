"""Several ranks on one host without a GPU (cpu_engine/ranks.py)."""

from sdsie_sglang.cpu_engine.ranks import group_on_gloo, share_cores
from sdsie_sglang.patches.hook import Hook, Kind

CORES = Hook(
    target="sglang.srt.utils.numa_utils.init_threads_binding",
    kind=Kind.AROUND,
    function=share_cores,
    parameters=("numa_index", "world_size"),
    why="CPU engine only: more tensor- and data-parallel ranks than NUMA nodes are refused",
    upstream="none",
    remove_when="SGLang lets ranks share a NUMA node without naming their cores",
)
GROUPS = Hook(
    target="sglang.srt.distributed.parallel_state.init_model_parallel_group",
    kind=Kind.AROUND,
    function=group_on_gloo,
    parameters=("group_ranks", "local_rank", "backend", "use_pynccl", "use_custom_allreduce"),
    why="CPU engine only: where NCCL is installed, as torch's CUDA wheels do, a group of CPU ranks opens it and fails",
    upstream="none",
    remove_when="SGLang leaves NCCL alone for CPU groups",
)
