"""The cycle's book-keeping in Triton: one program a request, a few loads and stores each."""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _plain_step_kernel(
    rows, seq_lens, pending, tokens, req_to_token, valid, ids, slots, new_seq_lens,
    row_stride, HAS_VALID: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0)
    at = tl.load(rows + i).to(tl.int64) * row_stride + tl.load(seq_lens + i)
    token = tl.load(pending + i)
    slot = tl.load(req_to_token + at).to(tl.int64)
    tl.store(tokens + at, token.to(tl.int32))
    tl.store(ids + i, token.to(tl.int64))
    tl.store(slots + i, slot)
    tl.store(new_seq_lens + i, tl.load(seq_lens + i) + 1)
    if HAS_VALID:
        tl.store(valid + slot, 0)


@triton.jit
def _open_window_kernel(
    rows, seq_lens, pending, tokens, req_to_token, valid, ids, slots,
    row_stride, WIDTH: tl.constexpr, DRAFTED: tl.constexpr, BLOCK: tl.constexpr, HAS_VALID: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0)
    end = tl.load(rows + i).to(tl.int64) * row_stride + tl.load(seq_lens + i)
    token = tl.load(pending + i).to(tl.int32)
    tl.store(tokens + end, token)
    # Offsets 0 .. WIDTH-1 are the draft's input, the last of them the pending token; DRAFTED more follow.
    j = tl.arange(0, BLOCK)
    at = end + j - (WIDTH - 1)
    is_input = j < WIDTH
    slot = tl.load(req_to_token + at, mask=j < WIDTH + DRAFTED, other=0).to(tl.int64)
    before = tl.load(tokens + at, mask=j < WIDTH - 1, other=0)  # never reads what was just written
    id = tl.where(j == WIDTH - 1, token, before)
    tl.store(ids + i * WIDTH + j, id.to(tl.int64), mask=is_input)
    tl.store(slots + i * WIDTH + j, slot, mask=is_input)
    if HAS_VALID:
        tl.store(valid + slot, (j < WIDTH + DRAFTED - 1).to(tl.int8), mask=j < WIDTH + DRAFTED)


@triton.jit
def _close_window_kernel(
    rows, new_seq_lens, accept_lens, chain, tokens, numbers, last,
    row_stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0)
    accepted = tl.load(accept_lens + i).to(tl.int64)
    start = tl.load(rows + i).to(tl.int64) * row_stride + tl.load(new_seq_lens + i).to(tl.int64) - accepted
    j = tl.arange(0, BLOCK)
    kept = j < accepted
    tl.store(tokens + start + j, tl.load(chain + i * WIDTH + j, mask=kept, other=0).to(tl.int32), mask=kept)
    tl.store(numbers + i, accepted.to(tl.float32))
    tl.store(last + i, i * WIDTH + accepted - 1)


def plain_step(
    rows: Tensor, seq_lens: Tensor, pending: Tensor, tokens: Tensor, req_to_token: Tensor, valid: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    bs = rows.shape[0]
    out = torch.empty((3, bs), dtype=torch.int64, device=rows.device)
    ids, slots, new_seq_lens = out.unbind()
    _plain_step_kernel[(bs,)](
        rows, seq_lens, pending, tokens, req_to_token, _bytes(valid), ids, slots, new_seq_lens,
        tokens.stride(0), HAS_VALID=valid is not None, num_warps=1,
    )  # fmt: skip
    return ids, slots, new_seq_lens


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
    bs = rows.shape[0]
    ids, slots = torch.empty((2, bs * width), dtype=torch.int64, device=rows.device).unbind()
    _open_window_kernel[(bs,)](
        rows, seq_lens, pending, tokens, req_to_token, _bytes(valid), ids, slots, tokens.stride(0),
        WIDTH=width, DRAFTED=drafted, BLOCK=triton.next_power_of_2(width + drafted),
        HAS_VALID=valid is not None, num_warps=1,
    )  # fmt: skip
    return ids, slots


def close_window(
    rows: Tensor, new_seq_lens: Tensor, accept_lens: Tensor, chain: Tensor, tokens: Tensor, numbers: Tensor
) -> Tensor:
    bs, width = chain.shape
    last = torch.empty(bs, dtype=torch.int64, device=rows.device)
    _close_window_kernel[(bs,)](
        rows, new_seq_lens, accept_lens, chain, tokens, numbers, last, tokens.stride(0),
        WIDTH=width, BLOCK=triton.next_power_of_2(width), num_warps=1,
    )  # fmt: skip
    return last


def _bytes(valid: Tensor | None) -> Tensor | None:
    return None if valid is None else valid.view(torch.int8)
