"""Entropy in PyTorch: serves machines without a GPU and checks the kernel."""

import math

import torch


def entropy_bits_reference(logits: torch.Tensor, rows: torch.Tensor | None = None) -> torch.Tensor:
    """H = (m + ln s - t / s) / ln 2 with m = max x, s = sum e^(x-m), t = sum x e^(x-m); see `entropy_bits`.

    Written with d = x - m, so that t / s = m + sum d e^d / s and the m's cancel. A masked token
    has d = -inf and e^d = 0; its product is set to 0, the limit, and not to NaN.
    """
    x = logits if rows is None else logits.index_select(0, rows)
    x = x.float()
    d = x - x.amax(dim=-1, keepdim=True)
    e = d.exp()
    s = e.sum(dim=-1)
    weighted = torch.where(d == -math.inf, 0.0, d * e).sum(dim=-1)
    # A sharp distribution may round to -1e-8 bits. NaN passes through maximum.
    return torch.maximum((s.log() - weighted / s) / math.log(2.0), torch.zeros_like(s))
