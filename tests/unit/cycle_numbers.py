"""What a worker hands to a cycle, from one row a request: tokens committed, then entropies in bits."""

import torch

from sdsie_sglang.worker.cycle import HostCopy


def host_copy(k: int, rows: list[list[float]]) -> HostCopy:
    counts = [row[0] for row in rows] if k else []
    return HostCopy(torch.tensor(counts + [bits for row in rows for bits in row[1:]]))
