"""Draft trees against straightforward Python: a tree is a list of parents, a walk is a loop."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sdsie_sglang.cpu_engine.ops import speculation


@st.composite
def trees(draw, max_nodes=9):
    """Parent of every node; node 0 is the root and parents come before their children."""
    n = draw(st.integers(2, max_nodes))
    return [-1] + [draw(st.integers(0, node - 1)) for node in range(1, n)]


def ancestors(parents, node):
    """The path from the root to the node, both included."""
    path = []
    while node != -1:
        path.append(node)
        node = parents[node]
    return path[::-1]


def mask_of(parents):
    mask = torch.zeros(len(parents), len(parents), dtype=torch.bool)
    for node in range(len(parents)):
        mask[node, ancestors(parents, node)] = True
    return mask


def children(parents, node):
    return [child for child, parent in enumerate(parents) if parent == node]


def links(parents):
    """First child and next sibling of every node, -1 where there is none."""
    n = len(parents)
    child = [min(children(parents, node), default=-1) for node in range(n)]
    sibling = [-1] * n
    for node in range(1, n):
        later = [s for s in children(parents, parents[node]) if s > node]
        sibling[node] = min(later, default=-1)
    return child, sibling


def rows(batch, n):
    return torch.arange(batch * n).view(batch, n)


# Verifying


def walk(parents, tokens, target):
    """Nodes that a greedy verify accepts, the root first; of equal children the first one."""
    path = [0]
    while True:
        agreed = [c for c in children(parents, path[-1]) if tokens[c] == target[path[-1]]]
        if not agreed:
            return path
        path.append(agreed[0])


@given(st.data(), st.lists(trees(), min_size=1, max_size=3))
def test_verify_is_the_walk_along_agreed_children(data, forest):
    n = max(len(parents) for parents in forest)
    forest = [parents + [0] * (n - len(parents)) for parents in forest]
    token_lists = st.lists(st.integers(0, 2), min_size=n, max_size=n)  # few tokens: many agree
    tokens = [data.draw(token_lists) for _ in forest]
    target = [data.draw(token_lists) for _ in forest]
    depth = max(len(ancestors(p, node)) for p in forest for node in range(n))
    child, sibling = zip(*(links(parents) for parents in forest), strict=True)
    predicts = torch.zeros(len(forest) * n, dtype=torch.int32)
    accept_index = torch.full((len(forest), depth), -1, dtype=torch.int32)
    accepted = torch.empty(len(forest), dtype=torch.int32)
    arrays = (torch.tensor(t) for t in (child, sibling, target))
    speculation.verify_tree_greedy_cpu(
        predicts, accept_index, accepted, torch.tensor(tokens), rows(len(forest), n), *arrays
    )
    for b, parents in enumerate(forest):
        path = walk(parents, tokens[b], target[b])
        assert accepted[b] == len(path) - 1
        flat = [b * n + node for node in path]
        assert accept_index[b].tolist() == flat + [-1] * (depth - len(path))
        assert predicts[flat].tolist() == [target[b][node] for node in path]


def test_verify_stops_at_the_depth_of_its_output():
    n = 4
    predicts, accepted = torch.zeros(n, dtype=torch.int32), torch.empty(1, dtype=torch.int32)
    accept_index = torch.full((1, 3), -1, dtype=torch.int32)
    chain = torch.tensor([[1, 2, 3, -1]])
    tokens = torch.tensor([[9, 5, 6, 7]])
    speculation.verify_tree_greedy_cpu(
        predicts, accept_index, accepted, tokens, rows(1, n), chain, torch.full((1, n), -1),
        torch.tensor([[5, 6, 7, 8]]),
    )  # fmt: skip
    assert accept_index.tolist() == [[0, 1, 2]]
    assert accepted.item() == 2
    assert predicts[:3].tolist() == [5, 6, 7]


# Building


@st.composite
def drafts(draw):
    """What a draft of `topk` branches and `depth` steps selects: candidates, their groups' parents, the tree.

    Candidates are numbered as EAGLE does: topk in the first step, then topk * topk a step, those of a step in
    groups of topk that grew from one kept candidate each.
    """
    topk, depth = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    group_parent = [-1]  # group 0 grew from the root
    parent_candidate = dict.fromkeys(range(topk), -1)
    step, first = list(range(topk)), topk
    for _ in range(1, depth):
        kept = draw(st.lists(st.sampled_from(step), min_size=topk, max_size=topk, unique=True))
        group_parent += kept
        step = list(range(first, first + topk * topk))
        parent_candidate |= {c: kept[(c - first) // topk] for c in step}
        first += topk * topk
    selected = set()
    for leaf in draw(st.lists(st.sampled_from(sorted(parent_candidate)), min_size=1, max_size=4)):
        while leaf != -1:  # a selected candidate's ancestors score higher, so they are selected too
            selected.add(leaf)
            leaf = parent_candidate[leaf]
    order = sorted(selected)
    node = {c: i for i, c in enumerate(order, start=1)} | {-1: 0}
    return topk, depth, order, group_parent, [-1] + [node[parent_candidate[c]] for c in order]


@given(drafts(), st.integers(1, 30), st.sampled_from([speculation.FULL_MASK, speculation.QLEN_ONLY]))
def test_build_tree(draft, length, mode):
    topk, depth, selected, group_parent, parents = draft
    n, bs = len(parents), 2
    lengths = [length, length + 3]
    mask = torch.ones(sum(n * (n + s * (mode == speculation.FULL_MASK)) for s in lengths), dtype=torch.bool)
    positions = torch.empty(bs * n, dtype=torch.int64)
    index, child, sibling = torch.full((3, bs, n), -1)
    speculation.build_tree_kernel_efficient_cpu(
        torch.tensor([group_parent] * bs), torch.tensor([selected] * bs), torch.tensor(lengths),
        mask, positions, index, child, sibling, topk, depth, n, mode,
    )  # fmt: skip
    offset = 0
    for b, prefix in enumerate(lengths):
        depths = [len(ancestors(parents, node)) - 1 for node in range(n)]
        assert positions.view(bs, n)[b].tolist() == [prefix + d for d in depths]
        assert (child[b].tolist(), sibling[b].tolist()) == links(parents)
        width = n + prefix if mode == speculation.FULL_MASK else n
        own = mask[offset : offset + n * width].view(n, width)
        offset += n * width
        assert torch.equal(own[:, -n:], mask_of(parents))
        assert own[:, :-n].all()
    assert torch.equal(index, rows(bs, n))


def test_no_bit_packed_mask():
    with pytest.raises(NotImplementedError, match="bit-packed"):
        speculation.build_tree_kernel_efficient_cpu(*[torch.empty(0)] * 8, 1, 1, 2, 2)


@given(st.lists(trees(), min_size=1, max_size=3), st.integers(1, 40))
def test_reconstruct_from_the_mask(forest, length):
    n = max(len(parents) for parents in forest)
    forest = [parents + [0] * (n - len(parents)) for parents in forest]
    bs = len(forest)
    lengths = torch.arange(length, length + bs)
    positions = torch.empty(bs * n, dtype=torch.int64)
    index, child, sibling = torch.empty((3, bs, n), dtype=torch.int64)
    flat = torch.cat([mask_of(parents).flatten() for parents in forest])
    spare = torch.ones(5, dtype=torch.bool)  # SGLang's buffer may be longer
    speculation.reconstruct_indices_from_tree_mask(
        torch.cat((flat, spare)), lengths, positions, index, child, sibling, bs, n
    )
    assert torch.equal(index, rows(bs, n))
    for b, parents in enumerate(forest):
        assert (child[b].tolist(), sibling[b].tolist()) == links(parents)
        depths = [len(ancestors(parents, node)) - 1 for node in range(n)]
        assert positions.view(bs, n)[b].tolist() == [lengths[b].item() + d for d in depths]


# Bookkeeping


def test_draft_branches_see_the_prefix_and_their_own_slots():
    topk, steps, pool_len = 2, 3, 20
    table = torch.arange(3 * pool_len, dtype=torch.int32).view(3, pool_len)
    lengths = [5, 8]
    out = speculation.build_draft_decode_metadata_cpu(
        table, torch.tensor([2, 0]), torch.tensor(lengths), topk, steps, pool_len
    )
    assert out.shape == (4, pool_len)
    for b, (row, length) in enumerate(zip((2, 0), lengths, strict=True)):
        for branch in range(topk):
            own = table[row, length + branch * steps : length + (branch + 1) * steps]
            seen = out[b * topk + branch, : length + steps]
            assert torch.equal(seen, torch.cat((table[row, :length], own)))


def test_bonus_token_is_the_last_accepted():
    tokens = torch.tensor([1, 2, 3, 4, 5, 6], dtype=torch.int32)
    bonus = torch.empty(2, dtype=torch.int32)
    speculation.fill_bonus_tokens_cpu(tokens, torch.tensor([1, 3], dtype=torch.int32), bonus, 3)
    assert bonus.tolist() == [1, 6]


def test_slots_of_accepted_nodes_are_packed():
    out = torch.zeros(6, dtype=torch.int64)
    accept_index = torch.tensor([[0, 2, -1], [3, -1, -1]], dtype=torch.int32)
    speculation.fill_accept_out_cache_loc_cpu(accept_index, torch.arange(10, 16), out)
    assert out.tolist() == [10, 12, 13, 0, 0, 0]
