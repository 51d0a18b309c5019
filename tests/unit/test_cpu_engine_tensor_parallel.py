"""Collectives of the CPU engine, in real processes over gloo, and how ranks share cores."""

import os

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

from sdsie_sglang.cpu_engine import ranks
from sdsie_sglang.cpu_engine.ops import tensor_parallel

ROWS, WIDTH = 7, 33


def contribution(rank, dtype=torch.float32):
    """Numbers of very different size, so that the order of a sum shows in its bits."""
    generator = torch.Generator().manual_seed(rank)
    values = torch.randn(ROWS, WIDTH, generator=generator) * 10.0 ** torch.randint(
        -4, 5, (1, WIDTH), generator=generator
    )
    return values.to(dtype)


def in_rank_order(size, dtype=torch.float32):
    total = contribution(0, dtype).float()
    for rank in range(1, size):
        total = total + contribution(rank, dtype).float()
    return total.to(dtype)


def run_rank(rank, size, store):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    torch.ops.sgl_kernel.initialize(size, rank)
    for dtype in (torch.float32, torch.bfloat16):
        data = contribution(rank, dtype)
        torch.ops.sgl_kernel.shm_allreduce(data, tensor_parallel._SUM)
        assert torch.equal(data, in_rank_order(size, dtype)), f"{dtype}: another order"
        for row in range(ROWS):
            one = contribution(rank, dtype)[row : row + 1]
            torch.ops.sgl_kernel.shm_allreduce(one, tensor_parallel._SUM)
            assert torch.equal(one[0], data[row]), f"{dtype}: row {row} depends on the rows beside it"
    for dim in (0, 1):
        gathered = torch.ops.sgl_kernel.shm_allgather(contribution(rank).t(), dim)
        assert torch.equal(gathered, torch.cat([contribution(r).t() for r in range(size)], dim))
    dist.destroy_process_group()


@pytest.mark.parametrize("size", [2, 3])
def test_sums_and_gathers_are_the_same_on_all_ranks_whatever_the_shape(size, tmp_path):
    multiprocessing.spawn(run_rank, (size, tmp_path / "store"), nprocs=size)


def test_other_reductions_are_refused():
    with pytest.raises(NotImplementedError, match="only sums"):
        torch.ops.sgl_kernel.shm_allreduce(torch.ones(1), int(dist.ReduceOp.MAX))


@pytest.fixture
def threads(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv(ranks.BIND_VARIABLE, raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {4, 5, 6, 7, 8})
    monkeypatch.setattr(torch, "set_num_threads", lambda n: seen.append(n))
    seen = []
    return seen


def sglangs(*, numa_index, world_size):
    return "SGLang's"


def test_ranks_share_the_cores(threads):
    shares = [ranks.share_cores(sglangs, numa_index=rank, world_size=2) for rank in range(2)]
    assert shares == ["4,6,8", "5,7"]
    assert threads == [3, 2]


def test_more_ranks_than_cores_have_one_each(threads):
    shares = [ranks.share_cores(sglangs, numa_index=rank, world_size=7) for rank in range(7)]
    assert shares == ["4", "5", "6", "7", "8", "4", "5"]
    assert threads == [1] * 7


def test_threads_that_were_asked_for_stay(threads, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    ranks.share_cores(sglangs, numa_index=0, world_size=2)
    assert threads == []


@pytest.mark.parametrize(("world_size", "bound"), [(1, "all"), (2, "0-1|2-3")])
def test_one_rank_and_named_cores_are_left_to_sglang(threads, monkeypatch, world_size, bound):
    monkeypatch.setenv(ranks.BIND_VARIABLE, bound)
    assert ranks.share_cores(sglangs, numa_index=0, world_size=world_size) == "SGLang's"


def test_groups_open_no_gpu_communicator():
    made = ranks.group_on_gloo(lambda *args, **kwargs: (args, kwargs), [[0, 1]], 0, "gloo", group_name="tp")
    assert made == (([[0, 1]], 0, "gloo"), {"group_name": "tp", "use_pynccl": False, "use_custom_allreduce": False})
