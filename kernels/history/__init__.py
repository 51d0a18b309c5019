"""The draft's book-keeping of one decode cycle, in one launch where PyTorch would take a dozen.

Tables: `tokens` [request slots, context] int32, the tokens a request has at each position; `req_to_token`, of the
same shape, SGLang's KV slots; `valid` [KV slots] bool, whether the draft's KV in a slot belongs to the token now in
it, or None where no slot is ever reused with its contents. Each function writes `tokens` and `valid` in place, on a
GPU by Triton and elsewhere by PyTorch, and never waits for the device.
"""

from types import ModuleType

import torch

from sdsie_sglang.kernels.history import reference


def plain_step(
    rows: torch.Tensor,
    seq_lens: torch.Tensor,
    pending: torch.Tensor,
    tokens: torch.Tensor,
    req_to_token: torch.Tensor,
    valid: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Books the pending token of each request as one that the target sees and the draft does not.

    Args:
        rows: [bs] request slots.
        seq_lens: [bs] int64, tokens before the pending one.
        pending: [bs] int32.

    Returns:
        input_ids [bs] int64, KV slots [bs] int64, and seq_lens + 1.
    """
    return _place(rows).plain_step(rows, seq_lens, pending, tokens, req_to_token, valid)


def open_window(
    rows: torch.Tensor,
    seq_lens: torch.Tensor,
    pending: torch.Tensor,
    tokens: torch.Tensor,
    req_to_token: torch.Tensor,
    valid: torch.Tensor | None,
    *,
    width: int,
    drafted: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Books the pending token and gives the draft's input: the `width` tokens that end with it.

    Those become valid for the draft, and so do all but the last of the `drafted` positions behind them. A request must
    have at least `width` tokens, the pending one included.

    Returns:
        input_ids [bs * width] int64 and their KV slots [bs * width] int64.
    """
    place = _place(rows)
    return place.open_window(rows, seq_lens, pending, tokens, req_to_token, valid, width=width, drafted=drafted)


def close_window(
    rows: torch.Tensor,
    new_seq_lens: torch.Tensor,
    accept_lens: torch.Tensor,
    chain: torch.Tensor,
    tokens: torch.Tensor,
    numbers: torch.Tensor,
) -> torch.Tensor:
    """Books the verified tokens.

    Args:
        new_seq_lens: [bs], tokens before the next pending one.
        accept_lens: [bs] int32, tokens committed, at least 1.
        chain: [bs, K+1] int64, the pending token and the drafted ones.
        numbers: float32; its first bs entries receive accept_lens.

    Returns:
        [bs] int64: index among the bs * (K+1) verified rows of each request's last committed one.
    """
    return _place(rows).close_window(rows, new_seq_lens, accept_lens, chain, tokens, numbers)


def _place(tensor: torch.Tensor) -> ModuleType:
    if not tensor.is_cuda:
        return reference
    from sdsie_sglang.kernels.history import kernel

    return kernel
