"""The cycle's book-keeping in PyTorch; see the package for what each function does."""

import torch
from torch import Tensor


def plain_step(
    rows: Tensor, seq_lens: Tensor, pending: Tensor, tokens: Tensor, req_to_token: Tensor, valid: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    tokens[rows, seq_lens] = pending.to(torch.int32)
    slots = req_to_token[rows, seq_lens].to(torch.int64)
    if valid is not None:
        valid[slots] = False
    return pending.to(torch.int64), slots, seq_lens + 1


def open_window(
    rows: Tensor,
    seq_lens: Tensor,
    pending: Tensor,
    tokens: Tensor,
    req_to_token: Tensor,
    valid: Tensor | None,
    *,
    width: int,
    drafted: int,
) -> tuple[Tensor, Tensor]:
    tokens[rows, seq_lens] = pending.to(torch.int32)
    positions = (seq_lens.unsqueeze(1) + torch.arange(1 - width, 1, device=seq_lens.device)).flatten()
    each = rows.repeat_interleave(width)
    slots = req_to_token[each, positions].to(torch.int64)
    if valid is not None:
        valid[slots] = True
        for offset in range(1, drafted + 1):
            valid[req_to_token[rows, seq_lens + offset].to(torch.int64)] = offset < drafted
    return tokens[each, positions].to(torch.int64), slots


def close_window(
    rows: Tensor, new_seq_lens: Tensor, accept_lens: Tensor, chain: Tensor, tokens: Tensor, numbers: Tensor
) -> Tensor:
    bs, width = chain.shape
    accepted = accept_lens.to(torch.int64)
    start = new_seq_lens.to(torch.int64) - accepted
    for offset in range(width):
        kept = accepted > offset
        tokens[rows[kept], (start + offset)[kept]] = chain[kept, offset].to(torch.int32)
    numbers[:bs] = accept_lens
    return torch.arange(bs, device=rows.device) * width + accepted - 1
