"""Collectives of tensor parallelism, which the compiled build does in shared memory, over torch.distributed (gloo).

A sum is taken in the order of the ranks. A ring adds in an order that depends on where in the tensor a number
stands, so from three ranks on a row's bits would depend on how many rows are computed with it, and one token and a
verified chain could differ.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from .registry import op

_SUM = int(dist.ReduceOp.SUM)
_ranks = 1


@op("initialize(int size, int rank) -> ()")
def initialize(size: int, rank: int) -> None:
    """Called by SGLang before it makes its process groups: `size` tensor-parallel ranks share this host."""
    global _ranks
    _ranks = size


@op("shm_allreduce(Tensor(a!) data, int reduce_op) -> ()")
def shm_allreduce(data: Tensor, reduce_op: int) -> None:
    """Sum `data` over the ranks in place: in float32, rank 0 first, rounded once to `data`'s type."""
    if reduce_op != _SUM:
        raise NotImplementedError("sgl_kernel.shm_allreduce: only sums are implemented")
    parts = _gather(data)
    total = parts[0].to(torch.float32)
    for part in parts[1:]:
        total = total + part
    data.copy_(total)


@op("shm_allgather(Tensor data, int dim) -> Tensor")
def shm_allgather(data: Tensor, dim: int) -> Tensor:
    """The ranks' `data` side by side along `dim`, rank 0 first."""
    return torch.cat(_gather(data), dim)


def _gather(data: Tensor) -> list[Tensor]:
    if _ranks == 1:
        return [data]
    parts = [torch.empty(data.shape, dtype=data.dtype) for _ in range(_ranks)]
    dist.all_gather(parts, data.contiguous(), group=_group())
    return parts


def _group() -> dist.ProcessGroup | None:
    """The tensor-parallel group. It is all there is but under pipeline parallelism."""
    if dist.get_world_size() == _ranks:
        return None
    from sglang.srt.runtime_context import get_parallel

    return get_parallel().tp_group.device_group
