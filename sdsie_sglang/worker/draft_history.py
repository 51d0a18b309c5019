"""Which tokens the draft has not seen, and what they are.

A gear that runs nothing of the draft leaves its KV behind. The tokens are kept on the device, one
row a request slot, because with overlap scheduling the host learns them a cycle late; how many are
missing is counted on the host (`RequestState.missed`).
"""

from typing import Any

import torch

from sdsie_sglang.kernels import history
from sdsie_sglang.worker.request_state import RequestState


def ragged_positions(lengths: list[int], ends: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Flat indices of `lengths[i]` consecutive positions that end just before `ends[i]`.

    Args:
        lengths: [bs] host integers, each at least 1.
        ends: [bs] int64 on the device.

    Returns:
        row: [sum] which request; position: [sum]; last: [bs] flat index of each request's last.
    """
    device = ends.device
    n = torch.tensor(lengths, dtype=torch.int64).to(device, non_blocking=True)
    total = sum(lengths)
    row = torch.repeat_interleave(torch.arange(len(lengths), device=device), n, output_size=total)
    after = torch.cumsum(n, 0)
    position = ends[row] - after[row] + torch.arange(total, device=device)
    return row, position, after - 1


def passes_of(width: int, missed: int, shortest: int, most: int) -> int:
    """How many passes that rewrite each request's last `width` tokens make up for `missed`; 0 if they cannot.

    Args:
        shortest: tokens of the shortest request, which must be as long as what is rewritten.
        most: passes beyond which another way is cheaper.
    """
    passes = -(-missed // width)
    return passes if passes <= most and passes * width <= shortest else 0


class DraftHistory:
    """Args:
    req_to_token: SGLang's [request slots, context] table of KV slots.
    kv_slots: KV slots of the pool, or 0 without a radix cache: then no slot is ever reused with
        its contents, and their validity needs no record.
    """

    def __init__(self, req_to_token: torch.Tensor, kv_slots: int) -> None:
        self._req_to_token = req_to_token
        self._tokens = torch.zeros(req_to_token.shape, dtype=torch.int32, device=req_to_token.device)
        self._valid = torch.ones(kv_slots, dtype=torch.bool, device=req_to_token.device) if kv_slots else None

    def slots(self, rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return self._req_to_token[rows, positions].to(torch.int64)

    def tokens(self, rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return self._tokens[rows, positions].to(torch.int64)

    def write(self, rows: torch.Tensor, positions: torch.Tensor, tokens: torch.Tensor) -> None:
        self._tokens[rows, positions] = tokens.to(torch.int32)

    def mark(self, slots: torch.Tensor, *, valid: bool) -> None:
        """Records whether the draft's KV in `slots` belongs to the tokens now in them."""
        if self._valid is not None:
            self._valid[slots] = valid

    def plain_step(self, batch: Any, pending: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """See `kernels.history.plain_step`."""
        return history.plain_step(
            batch.req_pool_indices, batch.seq_lens, pending, self._tokens, self._req_to_token, self._valid
        )

    def open_window(self, batch: Any, pending: torch.Tensor, width: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        """See `kernels.history.open_window`."""
        return self.open_rows(batch.req_pool_indices, batch.seq_lens, pending, width, k)

    def open_rows(
        self, rows: torch.Tensor, seq_lens: torch.Tensor, pending: torch.Tensor, width: int, k: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The same, of these request slots."""
        return history.open_window(
            rows, seq_lens, pending, self._tokens, self._req_to_token, self._valid, width=width, drafted=k
        )

    def close_window(self, rows: torch.Tensor, result: Any, chain: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        """See `kernels.history.close_window`."""
        return history.close_window(rows, result.new_seq_lens, result.accept_lens, chain, self._tokens, numbers)

    def prefilled(self, batch: Any, states: list[RequestState]) -> None:
        """The target has prefilled `batch` (SGLang's extend batch); the draft has not.

        A prefix found in the radix cache may hold slots that were generated in gear 0 and never
        drafted: the draft then starts at the first of them. That look-up is the one place that
        waits for the device, at prefill, and only behind a radix hit.
        """
        rows, device = batch.req_pool_indices, batch.seq_lens.device
        lengths = [int(n) for n in batch.extend_lens]
        row, position, _ = ragged_positions(lengths, batch.seq_lens)
        self.write(rows[row], position, batch.input_ids)
        self.mark(batch.out_cache_loc, valid=False)
        for i, (req, state) in enumerate(zip(batch.reqs, states, strict=True)):
            prefix, end = int(batch.prefix_lens[i]), int(batch.prefix_lens[i]) + lengths[i]
            is_next_chunk = 0 < state.prefilled == prefix
            if not is_next_chunk:
                state.covered, state.engaged = self._valid_prefix(rows[i], prefix), False
                if prefix:
                    ids = torch.tensor(req.get_fill_ids()[:prefix], dtype=torch.int32)
                    self._tokens[rows[i], :prefix] = ids.to(device, non_blocking=True)
            state.prefilled = end
            state.missed = end + 1 - state.covered

    def _valid_prefix(self, row: torch.Tensor, prefix: int) -> int:
        if prefix == 0 or self._valid is None:
            return prefix
        valid = self._valid[self._req_to_token[row, :prefix].to(torch.int64)]
        return int(torch.cumprod(valid.to(torch.int32), 0).sum())
