"""Draft trees: building, verifying, and the bookkeeping around them.

A tree of n nodes is a chain or a real tree; node 0 is the last committed token. `next_token` is a node's
first child and `next_sibling` the next child of its parent, -1 where there is none.
"""

import torch
from torch import Tensor

from .registry import op

FULL_MASK, QLEN_ONLY = 0, 1


@op(
    "build_tree_kernel_efficient_cpu(Tensor parent_list, Tensor selected_index, Tensor seq_lens, "
    "Tensor(a!) tree_mask, Tensor(b!) positions, Tensor(c!) retrieve_index, "
    "Tensor(d!) retrieve_next_token, Tensor(e!) retrieve_next_sibling, int topk, int depth, "
    "int n, int mode) -> ()"
)
def build_tree_kernel_efficient_cpu(
    parent_list: Tensor,  # (bs, .) candidate that each group of topk candidates grew from
    selected_index: Tensor,  # (bs, n - 1) candidate that became node 1, 2, ...
    seq_lens: Tensor,  # (bs,)
    tree_mask: Tensor,  # flat bool; True where a node sees a column
    positions: Tensor,  # (bs * n,)
    retrieve_index: Tensor,  # (bs, n) row of the flat batch
    retrieve_next_token: Tensor,  # (bs, n)
    retrieve_next_sibling: Tensor,  # (bs, n)
    topk: int,
    depth: int,
    n: int,
    mode: int,
) -> None:
    """Turn the candidates that a draft selected into the arrays that describe their tree."""
    if mode not in (FULL_MASK, QLEN_ONLY):
        raise NotImplementedError("this project's CPU ops build no bit-packed tree mask")
    bs = seq_lens.numel()
    lengths = seq_lens.tolist()
    visible = torch.zeros(bs, n, n, dtype=torch.bool)
    visible[:, :, 0] = True
    for b in range(bs):
        parents = _parents(selected_index[b].tolist(), parent_list[b].tolist(), topk)
        _write_links(parents, retrieve_next_token[b], retrieve_next_sibling[b])
        for node in range(1, n):
            visible[b, node] |= visible[b, parents[node]]
            visible[b, node, node] = True
    depths = visible.sum(-1) - 1
    positions.view(bs, n).copy_(depths + seq_lens.view(bs, 1))
    retrieve_index.copy_(torch.arange(bs * n).view(bs, n))
    if mode == QLEN_ONLY:
        tree_mask[: bs * n * n] = visible.flatten()
        return
    offset = 0
    for b, length in enumerate(lengths):  # the prefix columns were set by the caller
        width = length + n
        tree_mask[offset : offset + n * width].view(n, width)[:, length:] = visible[b]
        offset += n * width


def _parents(selected: list[int], parent_list: list[int], topk: int) -> list[int]:
    """Parent node of every node, -1 for the root."""
    node_of = {candidate: node for node, candidate in reversed(list(enumerate(selected, start=1)))}
    groups = [candidate // topk for candidate in selected]
    return [-1] + [0 if group == 0 else node_of[parent_list[group]] for group in groups]


def _write_links(parents: list[int], next_token: Tensor, next_sibling: Tensor) -> None:
    n = len(parents)
    child, sibling = [-1] * n, [-1] * n
    for node in range(n - 1, 0, -1):
        sibling[node] = child[parents[node]]
        child[parents[node]] = node
    next_token.copy_(torch.tensor(child))
    next_sibling.copy_(torch.tensor(sibling))


@op(
    "verify_tree_greedy_cpu(Tensor(a!) predicts, Tensor(b!) accept_index, "
    "Tensor(c!) accept_token_num, Tensor candidates, Tensor retrive_index, "
    "Tensor retrive_next_token, Tensor retrive_next_sibling, Tensor target_predict) -> ()"
)
def verify_tree_greedy_cpu(
    predicts: Tensor,  # (bs * n,) token after each accepted node
    accept_index: Tensor,  # (bs, depth) rows of the accepted nodes, -1 after them
    accept_token_num: Tensor,  # (bs,) accepted drafts, the root not counted
    candidates: Tensor,  # (bs, n) draft tokens
    retrive_index: Tensor,  # (bs, n)
    retrive_next_token: Tensor,  # (bs, n)
    retrive_next_sibling: Tensor,  # (bs, n)
    target_predict: Tensor,  # (bs, n) the target's token after each node
) -> None:
    """Walk each tree from its root along the children that the target agrees with.

    `retrive_*` is how SGLang spells these arguments when it names them here.
    """
    rows, tokens = retrive_index.tolist(), candidates.tolist()
    children, siblings = retrive_next_token.tolist(), retrive_next_sibling.tolist()
    target = target_predict.reshape(-1).tolist()
    for b in range(len(tokens)):
        row, node, accepted = rows[b][0], 0, 0
        path = [row]
        while accepted + 1 < accept_index.shape[1]:
            node = children[b][node]
            while node != -1 and tokens[b][node] != target[row]:
                node = siblings[b][node]
            if node == -1:
                break
            predicts[row] = target[row]
            row = rows[b][node]
            path.append(row)
            accepted += 1
        predicts[row] = target[row]
        accept_index[b, : len(path)] = torch.tensor(path, dtype=accept_index.dtype)
        accept_token_num[b] = accepted


def reconstruct_indices_from_tree_mask(
    tree_mask: Tensor,  # (bs * n * n,) flat; True where column is the row's ancestor or itself
    seq_lens: Tensor,  # (bs,)
    positions: Tensor,  # (bs * n,)
    retrieve_index: Tensor,  # (bs, n)
    retrieve_next_token: Tensor,  # (bs, n)
    retrieve_next_sibling: Tensor,  # (bs, n)
    bs: int,
    n: int,
) -> None:
    """Arrays of a tree that is given by its mask alone: what the n-gram worker has."""
    ancestors = tree_mask[: bs * n * n].view(bs, n, n).bool().tril(-1)
    order = torch.arange(n)
    parents = torch.where(ancestors, order, -1).amax(-1)  # (bs, n): the nearest ancestor
    is_child = (parents.unsqueeze(1) == order.view(1, n, 1)) & (order.view(1, 1, n) > 0)  # (bs, parent, node)
    later_sibling = (
        (parents.unsqueeze(1) == parents.unsqueeze(2)) & (parents.unsqueeze(2) >= 0) & (order > order.view(n, 1))
    )
    positions.view(bs, n).copy_(ancestors.sum(-1) + seq_lens.view(bs, 1))
    retrieve_index.view(bs, n).copy_(torch.arange(bs * n).view(bs, n))
    retrieve_next_token.view(bs, n).copy_(_first(is_child))
    retrieve_next_sibling.view(bs, n).copy_(_first(later_sibling))


def _first(flags: Tensor) -> Tensor:
    """Index of the first True along the last dimension, -1 where there is none."""
    return torch.where(flags.any(-1), flags.int().argmax(-1), -1)


@op(
    "build_draft_decode_metadata_cpu(Tensor req_to_token, Tensor req_pool_indices, Tensor seq_lens, "
    "int topk, int num_steps, int pool_len) -> Tensor"
)
def build_draft_decode_metadata_cpu(
    req_to_token: Tensor,  # (rows, pool_len)
    req_pool_indices: Tensor,  # (bs,)
    seq_lens: Tensor,  # (bs,)
    topk: int,
    num_steps: int,
    pool_len: int,
) -> Tensor:  # (bs * topk, pool_len)
    """Slot table of the draft's branches: each is the request's prefix and its own `num_steps` slots."""
    table = torch.zeros(req_pool_indices.numel() * topk, pool_len, dtype=req_to_token.dtype)
    for b, (row, length) in enumerate(zip(req_pool_indices.tolist(), seq_lens.tolist(), strict=True)):
        branches = table[b * topk : (b + 1) * topk]
        branches[:, :length] = req_to_token[row, :length]
        tail = req_to_token[row, length : length + topk * num_steps]
        branches[:, length : length + num_steps] = tail.view(topk, num_steps)
    return table


@op("fill_bonus_tokens_cpu(Tensor accept_tokens, Tensor accept_lens, Tensor(a!) bonus_tokens, int accept_stride) -> ()")
def fill_bonus_tokens_cpu(
    accept_tokens: Tensor,  # (bs * accept_stride,)
    accept_lens: Tensor,  # (bs,) the bonus token counted
    bonus_tokens: Tensor,  # (bs,)
    accept_stride: int,
) -> None:
    """Each request's last accepted token."""
    last = torch.arange(accept_lens.numel()) * accept_stride + accept_lens.long() - 1
    bonus_tokens.copy_(accept_tokens.view(-1)[last])


@op("fill_accept_out_cache_loc_cpu(Tensor accept_index, Tensor out_cache_loc, Tensor(a!) accept_out_cache_loc) -> ()")
def fill_accept_out_cache_loc_cpu(
    accept_index: Tensor,  # rows of the accepted nodes, -1 elsewhere
    out_cache_loc: Tensor,  # (rows,)
    accept_out_cache_loc: Tensor,  # at least as long as there are accepted nodes
) -> None:
    """Slots of the accepted nodes, packed to the front."""
    rows = accept_index.flatten()
    rows = rows[rows >= 0].long()
    accept_out_cache_loc[: rows.numel()] = out_cache_loc[rows]
