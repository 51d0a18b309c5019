"""Decode and extend attention over the paged KV pool.

A plain decode asks for one row (a query token) of a request, a verify for K+1, an extend for as many as are
new. Up to MAX_ROWS of them are computed so that a row's result is the same, bit for bit, whatever other rows
come with it: every row is its own batch entry over its own path (what it sees, in order, itself last), in a
span of whole chunks that the path's length alone decides. Products of the same shape then run in the same
order, and what is masked contributes exact zeros. Longer extends (prompts) are computed as blocks, which is
faster and rounds differently.
"""

import math
from collections import defaultdict

import torch
import torch.nn.functional as F
from torch import Tensor

from .registry import op

CHUNK = 64  # positions; a product over a span that isn't a multiple of the vector width rounds differently
MAX_ROWS = 256  # new tokens of one request up to which rows are independent


@op(
    "decode_attention_cpu(Tensor q, Tensor(a!) k_buffer, Tensor(b!) v_buffer, float k_scale, "
    "float v_scale, Tensor(c!) o, Tensor? k, Tensor? v, Tensor loc, Tensor(d!) attn_logits, "
    "Tensor req_to_token, Tensor req_pool_indices, Tensor seq_lens, float scale, float logit_cap, "
    "bool is_cross, int window, Tensor? encoder_lens, Tensor? sinks) -> ()"
)
def decode_attention_cpu(
    q: Tensor,  # (bs, H, D)
    k_buffer: Tensor,  # (slots, Hkv, D)
    v_buffer: Tensor,
    k_scale: float,
    v_scale: float,
    o: Tensor,  # (bs, H, D)
    k: Tensor | None,  # (bs, Hkv * D) to write at `loc` first, None where it has been written
    v: Tensor | None,
    loc: Tensor,  # (bs,)
    attn_logits: Tensor,
    req_to_token: Tensor,  # (rows, positions) slot of each position
    req_pool_indices: Tensor,  # (bs,) rows of req_to_token
    seq_lens: Tensor,  # (bs,) this token counted
    scale: float,
    logit_cap: float,  # 0: none
    is_cross: bool,
    window: int,  # positions that a token sees, itself counted; 0: all
    encoder_lens: Tensor | None,
    sinks: Tensor | None,
) -> None:
    """One token a request attends to the request's whole sequence, itself included."""
    _refuse(k_buffer, is_cross, encoder_lens, sinks)
    if k is not None and v is not None:
        k_buffer[loc] = k.reshape(-1, *k_buffer.shape[1:])
        v_buffer[loc] = v.reshape(-1, *v_buffer.shape[1:])
    for i, (row, length) in enumerate(zip(req_pool_indices.tolist(), seq_lens.tolist(), strict=True)):
        path, out = req_to_token[row : row + 1, :length], o[i : i + 1]
        _attend_rows(q[i : i + 1], k_buffer, v_buffer, path, [length], scale, logit_cap, window, out)


@op(
    "extend_attention_cpu(Tensor q, Tensor? k, Tensor? v, Tensor(a!) o, Tensor k_buffer, "
    "Tensor v_buffer, float k_scale, float v_scale, Tensor req_to_token, "
    "Tensor req_pool_indices, Tensor seq_lens, Tensor extend_seq_lens, "
    "Tensor extend_start_loc, int max_len_extend, float scale, float logit_cap, bool is_cross, "
    "int window, Tensor? encoder_lens, Tensor? sinks, Tensor? tree_mask, bool is_causal) -> ()"
)
def extend_attention_cpu(
    q: Tensor,  # (tokens, H, D)
    k: Tensor | None,  # already in the pool
    v: Tensor | None,
    o: Tensor,  # (tokens, H, D)
    k_buffer: Tensor,  # (slots, Hkv, D)
    v_buffer: Tensor,
    k_scale: float,
    v_scale: float,
    req_to_token: Tensor,  # (rows, positions)
    req_pool_indices: Tensor,  # (bs,)
    seq_lens: Tensor,  # (bs,) prefix and new tokens
    extend_seq_lens: Tensor,  # (bs,) new tokens
    extend_start_loc: Tensor,  # (bs,) first row in q
    max_len_extend: int,
    scale: float,
    logit_cap: float,
    is_cross: bool,
    window: int,
    encoder_lens: Tensor | None,
    sinks: Tensor | None,
    tree_mask: Tensor | None,  # flat bool, new * new a request, True: sees; None: a chain
    is_causal: bool,
) -> None:
    """Each request's new tokens attend to its prefix and, causally or by the tree, to one another."""
    _refuse(k_buffer, is_cross, encoder_lens, sinks)
    offset = 0
    requests = zip(
        req_pool_indices.tolist(),
        seq_lens.tolist(),
        extend_seq_lens.tolist(),
        extend_start_loc.tolist(),
        strict=True,
    )
    for row, length, new, start in requests:
        slots = req_to_token[row, :length]
        tree = None
        if tree_mask is not None:
            tree = tree_mask[offset : offset + new * new].view(new, new)
            offset += new * new
        queries, out = q[start : start + new], o[start : start + new]
        if new <= MAX_ROWS and is_causal:
            paths, lengths = _paths(slots, new, tree)
            _attend_rows(queries, k_buffer, v_buffer, paths, lengths, scale, logit_cap, window, out)
        else:
            visible = _visible(new, length, tree, window, is_causal)
            _attend_block(queries, k_buffer, v_buffer, slots, visible, scale, logit_cap, out)


def _refuse(k_buffer: Tensor, is_cross: bool, encoder_lens: Tensor | None, sinks: Tensor | None) -> None:
    if is_cross or encoder_lens is not None:
        raise NotImplementedError("this project's CPU ops have no cross-attention")
    if sinks is not None:
        raise NotImplementedError("this project's CPU ops have no attention sinks")
    if k_buffer.dtype == torch.float8_e4m3fn:
        raise NotImplementedError("this project's CPU ops have no 8-bit KV cache: use --kv-cache-dtype auto")


def _paths(slots: Tensor, new: int, tree: Tensor | None) -> tuple[Tensor, list[int]]:
    """Slots that each of the last `new` tokens sees, itself last, how many (a chain: one row of slots)."""
    prefix = slots.numel() - new
    if tree is None:
        return slots.unsqueeze(0), list(range(prefix + 1, slots.numel() + 1))
    ancestors_first = tree.int().argsort(dim=-1, descending=True, stable=True)
    paths = torch.cat((slots[:prefix].expand(new, -1), slots[prefix:][ancestors_first]), dim=1)
    return paths, (prefix + tree.sum(-1)).tolist()


def _attend_rows(
    q: Tensor,  # (m, H, D)
    k_buffer: Tensor,
    v_buffer: Tensor,
    paths: Tensor,  # (m or 1, n) slots
    lengths: list[int],  # of each row's path
    scale: float,
    logit_cap: float,
    window: int,
    out: Tensor,  # (m, H, D)
) -> None:
    """softmax(scale q k^T) v in float32, each row by itself."""
    of_span = defaultdict(list)
    for row, length in enumerate(lengths):
        of_span[_span(length, window)].append(row)
    for (start, stop), rows in of_span.items():
        slots = paths[:, start:stop] if paths.shape[0] == 1 else paths[rows, start:stop]
        slots = F.pad(slots, (0, stop - start - slots.shape[1]))  # by SGLang's dummy: finite, and masked here
        length, position = torch.tensor([lengths[row] for row in rows]), torch.arange(start, stop)
        hidden = position >= length.unsqueeze(1)
        if window > 0:
            hidden |= position < length.unsqueeze(1) - window
        bias = torch.zeros(hidden.shape).masked_fill_(hidden, -math.inf)[:, None, None]  # (m, 1, 1, n)
        keys, values = (_gather(buffer, slots) for buffer in (k_buffer, v_buffer))
        keys, values = (t.expand(len(rows), -1, -1, -1) for t in (keys, values))
        grouped = q[rows].float().unflatten(1, (keys.shape[1], -1))  # (m, Hkv, H / Hkv, D)
        out[rows] = _attend(grouped, keys, values, bias, scale, logit_cap).flatten(1, 2).to(out.dtype)


def _span(length: int, window: int) -> tuple[int, int]:
    """Whole chunks that hold what the last token of a path sees."""
    oldest = max(0, length - window) if window > 0 else 0
    return oldest // CHUNK * CHUNK, -(-length // CHUNK) * CHUNK


def _gather(buffer: Tensor, slots: Tensor) -> Tensor:
    """(r, n) slots -> (r, Hkv, n, D) float32."""
    return buffer.index_select(0, slots.flatten()).float().unflatten(0, slots.shape).transpose(1, 2)


def _visible(new: int, length: int, tree: Tensor | None, window: int, is_causal: bool) -> Tensor:
    """(new, length): whether each of the last `new` slots sees a slot."""
    prefix = length - new
    visible = torch.ones(new, length, dtype=torch.bool)
    position = torch.arange(prefix, length)
    if tree is not None:
        visible[:, prefix:] = tree
        position = prefix + tree.sum(-1) - 1
    elif is_causal:
        visible.tril_(prefix)
    if window > 0:
        within = torch.arange(length) > position.unsqueeze(1) - window
        visible &= within if tree is None else F.pad(within[:, :prefix], (0, new), value=True)
    return visible


def _attend_block(
    q: Tensor,  # (m, H, D)
    k_buffer: Tensor,
    v_buffer: Tensor,
    slots: Tensor,  # (n,)
    visible: Tensor,  # (m, n)
    scale: float,
    logit_cap: float,
    out: Tensor,  # (m, H, D)
) -> None:
    """softmax(scale q k^T) v in float32, all rows in one product."""
    keys, values = (_gather(buffer, slots.unsqueeze(0)) for buffer in (k_buffer, v_buffer))
    group = q.shape[1] // keys.shape[1]
    keys, values = (t.repeat_interleave(group, 1) for t in (keys, values))
    bias = torch.zeros(visible.shape).masked_fill_(~visible, -math.inf)
    result = _attend(q.float().transpose(0, 1).unsqueeze(0), keys, values, bias, scale, logit_cap)
    out.copy_(result.squeeze(0).transpose(0, 1))


def _attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float, logit_cap: float) -> Tensor:
    """Attention; with logit_cap, the scores are cap * tanh(scores / cap)."""
    if logit_cap <= 0:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=scale)
    scores = logit_cap * torch.tanh(scale * (q @ k.transpose(-1, -2)) / logit_cap) + bias
    return scores.softmax(-1) @ v
