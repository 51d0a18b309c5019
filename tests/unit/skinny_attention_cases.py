"""Random caches and rows for tests of the attention kernel."""

from typing import NamedTuple

import torch
from torch import Tensor


class Case(NamedTuple):
    """Arguments of `skinny_attention` but for `arrived`."""

    qkv: Tensor
    cos_sin: Tensor
    positions: Tensor
    k_cache: Tensor
    v_cache: Tensor
    slots: Tensor
    table: Tensor
    lengths: Tensor
    scale: float

    def fresh(self) -> "Case":
        """The same with caches of its own, as the kernel writes to them."""
        return self._replace(k_cache=self.k_cache.clone(), v_cache=self.v_cache.clone())


def make_case(
    lengths: list[int], width: int, groups: int, heads: int, size: int, *, device: str = "cpu", seed: int = 0
) -> Case:
    """Requests of `lengths` tokens, scattered over the cache; a length below `width` is a padded request."""
    torch.manual_seed(seed)
    longest, requests = max(*lengths, width), len(lengths)
    cache = requests * longest + 1
    k_cache, v_cache = (torch.randn(cache, heads, size).bfloat16() for _ in range(2))
    table = 1 + torch.randperm(cache - 1)[: requests * longest].view(requests, longest).int()
    ends = torch.tensor(lengths)
    positions = (ends[:, None] + torch.arange(-width, 0)).clamp_min(0)
    slots = table.gather(1, positions).long()
    slots[ends < width] = 0  # where SGLang lets padded rows write
    angles = torch.outer(torch.arange(longest, dtype=torch.float32), 0.1 ** torch.linspace(0, 4, size // 2))
    case = Case(
        torch.randn(requests * width, (groups + 2) * heads * size).bfloat16(),
        torch.cat([angles.cos(), angles.sin()], dim=1), positions.flatten(), k_cache, v_cache, slots.flatten(),
        table, ends.int(), size**-0.5,
    )  # fmt: skip
    return Case(*(value.to(device) if isinstance(value, Tensor) else value for value in case))
