"""Reading and writing the KV pool and the table of token slots."""

import ctypes

from torch import Tensor

from .registry import op


@op("store_cache_cpu(Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor indices, int row_dim) -> ()")
def store_cache_cpu(
    k: Tensor,  # (M, Hkv, D)
    v: Tensor,
    k_cache: Tensor,  # (slots, Hkv, D)
    v_cache: Tensor,
    indices: Tensor,  # (M,) slots
    row_dim: int,
) -> None:
    """Write M tokens' keys and values to their slots."""
    k_cache.view(-1, row_dim)[indices] = k.reshape(-1, row_dim)
    v_cache.view(-1, row_dim)[indices] = v.reshape(-1, row_dim)


@op("copy_all_layer_kv_cache_cpu(Tensor data_ptrs, Tensor strides, Tensor tgt_loc, Tensor src_loc) -> ()")
def copy_all_layer_kv_cache_cpu(data_ptrs: Tensor, strides: Tensor, tgt_loc: Tensor, src_loc: Tensor) -> None:
    """Copy slots `src_loc` to `tgt_loc` in every buffer, as if all were read before any is written.

    SGLang passes the buffers' addresses and the bytes of a slot, not tensors.
    """
    targets, sources = tgt_loc.tolist(), src_loc.tolist()
    for address, slot_bytes in zip(data_ptrs.tolist(), strides.tolist(), strict=True):
        rows = [ctypes.string_at(address + slot * slot_bytes, slot_bytes) for slot in sources]
        for slot, row in zip(targets, rows, strict=True):
            ctypes.memmove(address + slot * slot_bytes, row, slot_bytes)


@op(
    "assign_req_to_token_pool_cpu(Tensor req_pool_indices, Tensor(a!) req_to_token, Tensor start, "
    "Tensor end, Tensor out_cache_loc, int pool_len) -> ()"
)
def assign_req_to_token_pool_cpu(
    req_pool_indices: Tensor,  # (bs,) rows of req_to_token
    req_to_token: Tensor,  # (rows, pool_len) slot of each position
    start: Tensor,  # (bs,)
    end: Tensor,  # (bs,)
    out_cache_loc: Tensor,  # (sum of end - start,)
    pool_len: int,
) -> None:
    """req_to_token[row, start:end] = the request's part of `out_cache_loc`, for each request."""
    offset = 0
    for row, first, last in _rows(req_pool_indices, start, end):
        req_to_token[row, first:last] = out_cache_loc[offset : offset + last - first].to(req_to_token.dtype)
        offset += last - first


@op(
    "assign_extend_cache_locs_cpu(Tensor req_pool_indices, Tensor req_to_token, Tensor start, "
    "Tensor end, Tensor(a!) out_cache_loc, int pool_len) -> ()"
)
def assign_extend_cache_locs_cpu(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    start: Tensor,
    end: Tensor,
    out_cache_loc: Tensor,
    pool_len: int,
) -> None:
    """The request's part of `out_cache_loc` = req_to_token[row, start:end], for each request."""
    offset = 0
    for row, first, last in _rows(req_pool_indices, start, end):
        out_cache_loc[offset : offset + last - first] = req_to_token[row, first:last].to(out_cache_loc.dtype)
        offset += last - first


@op(
    "assign_draft_cache_locs_contiguous_cpu(Tensor req_pool_indices, Tensor req_to_token, Tensor seq_lens, "
    "Tensor(a!) out_cache_loc, int pool_len, int topk, int num_steps) -> ()"
)
def assign_draft_cache_locs_contiguous_cpu(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    seq_lens: Tensor,  # (bs,)
    out_cache_loc: Tensor,  # (bs * topk * num_steps,)
    pool_len: int,
    topk: int,
    num_steps: int,
) -> None:
    """The slots of the `topk * num_steps` positions that follow each request's sequence."""
    ends = seq_lens + topk * num_steps
    assign_extend_cache_locs_cpu(req_pool_indices, req_to_token, seq_lens, ends, out_cache_loc, pool_len)


def _rows(req_pool_indices: Tensor, start: Tensor, end: Tensor) -> list[tuple[int, int, int]]:
    return list(zip(req_pool_indices.tolist(), start.tolist(), end.tolist(), strict=True))
