import math
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F

from sdsie_sglang.cpu_engine.ops import attention

ops = torch.ops.sgl_kernel
POSITIONS = (1, 2, 63, 64, 65, 127, 128, 250, 511, 512, 700)


@pytest.fixture(autouse=True)
def inference():
    torch.manual_seed(0)
    with torch.inference_mode():
        yield


@dataclass
class Pool:
    """Two requests of up to 1024 tokens, scattered over a KV pool, in rows 2 and 0 of the slot table."""

    heads: int = 9
    kv_heads: int = 3
    size: int = 64
    dtype: torch.dtype = torch.float32

    def __post_init__(self):
        shape = (2200, self.kv_heads, self.size)
        self.k, self.v = torch.randn(shape).to(self.dtype), torch.randn(shape).to(self.dtype)
        self.k[0] = self.v[0] = 1e4  # the dummy slot: finite, and never seen
        slots = torch.randperm(2199)[:2048] + 1
        self.table = torch.zeros(3, 1024, dtype=torch.int32)
        self.table[2], self.table[0] = slots[:1024], slots[1024:]
        self.scale = 1 / math.sqrt(self.size)

    def queries(self, rows):
        return torch.randn(rows, self.heads, self.size).to(self.dtype)

    def decode(self, q, rows, lengths, window=0, cap=0.0, new=None):
        out = torch.full_like(q, math.nan)
        k, v, loc = new or (None, None, torch.empty(0))
        args = (self.table, torch.tensor(rows), torch.tensor(lengths))
        ops.decode_attention_cpu(
            q, self.k, self.v, 1.0, 1.0, out, k, v, loc, torch.empty(0), *args,
            self.scale, cap, False, window, None, None,
        )  # fmt: skip
        return out

    def extend(self, q, rows, lengths, new, window=0, cap=0.0, tree=None, causal=True):
        out = torch.full_like(q, math.nan)
        starts = [sum(new[:i]) for i in range(len(new))]
        args = (torch.tensor(t) for t in (rows, lengths, new, starts))
        ops.extend_attention_cpu(
            q, None, None, out, self.k, self.v, 1.0, 1.0, self.table, *args, max(new),
            self.scale, cap, False, window, None, None, tree, causal,
        )  # fmt: skip
        return out

    def reference(self, q, row, mask, cap=0.0):
        """Explicit softmax in float64; mask (m, n)."""
        slots = self.table[row, : mask.shape[1]].long()
        group = self.heads // self.kv_heads
        k, v = (t[slots].double().repeat_interleave(group, 1) for t in (self.k, self.v))
        scores = torch.einsum("mhd,nhd->hmn", q.double(), k) * self.scale
        if cap:
            scores = cap * torch.tanh(scores / cap)
        return torch.einsum("hmn,nhd->mhd", scores.masked_fill(~mask, -math.inf).softmax(-1), v)


def causal(new, length, window=0):
    own = torch.arange(length - new, length).unsqueeze(1)
    seen = torch.arange(length) <= own
    return seen & (torch.arange(length) > own - window) if window else seen


def close(actual, expected):
    torch.testing.assert_close(actual.double(), expected.double(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("window", [0, 1, 30, 100])
@pytest.mark.parametrize("cap", [0.0, 5.0])
@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(9, 3, 64), (4, 4, 32), (14, 2, 64)])
def test_decode(heads, kv_heads, size, cap, window):
    pool = Pool(heads, kv_heads, size)
    for length in POSITIONS:
        q = pool.queries(2)
        out = pool.decode(q, [2, 0], [length, 77], window, cap)
        close(out[:1], pool.reference(q[:1], 2, causal(1, length, window), cap))
        close(out[1:], pool.reference(q[1:], 0, causal(1, 77, window), cap))


def test_decode_writes_the_new_token_first():
    pool = Pool()
    q = pool.queries(1)
    k, v = torch.randn(1, 3 * 64), torch.randn(1, 3 * 64)
    slot = pool.table[2, 99:100].long()
    out = pool.decode(q, [2], [100], new=(k, v, slot))
    assert torch.equal(pool.k[slot].flatten(), k.flatten())
    assert torch.equal(pool.v[slot].flatten(), v.flatten())
    close(out, pool.reference(q, 2, causal(1, 100)))


@pytest.mark.parametrize("window", [0, 50])
@pytest.mark.parametrize("new", [1, 6, 70, attention.MAX_ROWS, attention.MAX_ROWS + 1])
def test_extend(new, window):
    pool = Pool()
    for prefix in (0, 3, 250):
        q = pool.queries(new + 4)
        out = pool.extend(q, [2, 0], [prefix + new, 40], [new, 4], window)
        close(out[:new], pool.reference(q[:new], 2, causal(new, prefix + new, window)))
        close(out[new:], pool.reference(q[new:], 0, causal(4, 40, window)))


def test_extend_agrees_with_torch():
    pool = Pool()
    q = pool.queries(8)
    slots = pool.table[2, :100].long()
    q_, k_, v_ = (t.transpose(0, 1).unsqueeze(0) for t in (q, pool.k[slots], pool.v[slots]))
    expected = F.scaled_dot_product_attention(q_, k_, v_, attn_mask=causal(8, 100), enable_gqa=True)
    close(pool.extend(q, [2], [100], [8]), expected[0].transpose(0, 1))


def test_bidirectional_extend():
    pool = Pool()
    q = pool.queries(5)
    out = pool.extend(q, [2], [30], [5], causal=False)
    close(out, pool.reference(q, 2, torch.ones(5, 30, dtype=torch.bool)))


@pytest.mark.parametrize("prefix", [1, 61, 128])
def test_tree(prefix):
    pool = Pool()
    parents = [-1, 0, 0, 1, 1, 2, 4]
    n = len(parents)
    tree = torch.eye(n, dtype=torch.bool)
    for node in range(1, n):
        tree[node] |= tree[parents[node]]
    chain = torch.ones(n, n, dtype=torch.bool).tril()
    q = pool.queries(2 * n)
    flat = torch.cat((tree.flatten(), chain.flatten()))
    out = pool.extend(q, [2, 0], [prefix + n, 50], [n, n], tree=flat)
    mask = torch.cat((torch.ones(n, prefix, dtype=torch.bool), tree), dim=1)
    close(out[:n], pool.reference(q[:n], 2, mask))
    close(out[n:], pool.reference(q[n:], 0, causal(n, 50)))
    assert torch.equal(out[n:], pool.extend(q[n:], [0], [50], [n]))  # a chain given by its mask


@pytest.mark.parametrize("window", [0, 30])
def test_a_node_is_computed_as_a_decode_of_its_path(window):
    pool = Pool()
    tree = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]]).bool()
    for prefix in (1, 61, 62, 63, 200):
        q = pool.queries(4)
        together = pool.extend(q, [2], [prefix + 4], [4], window, tree=tree.flatten())
        for node in range(4):
            path = torch.cat((pool.table[2, :prefix], pool.table[2, prefix : prefix + 4][tree[node]]))
            pool.table[0, : len(path)] = path
            alone = pool.decode(q[node : node + 1], [0], [len(path)], window)
            assert torch.equal(alone[0], together[node])


def test_a_tree_too_wide_for_rows():
    pool = Pool()
    n = attention.MAX_ROWS + 1
    star = torch.eye(n, dtype=torch.bool)
    star[:, 0] = True
    q = pool.queries(n)
    for window in (0, 20):
        out = pool.extend(q, [2], [100 + n], [n], window, tree=star.flatten())
        depth = star.sum(-1) - 1
        prefix = torch.arange(100) > (100 + depth - (window or 1000)).unsqueeze(1)
        close(out, pool.reference(q, 2, torch.cat((prefix, star), dim=1)))


def test_tree_in_a_sliding_window():
    pool = Pool()
    tree = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]]).bool()  # two siblings, one position
    q = pool.queries(3)
    out = pool.extend(q, [2], [103], [3], window=20, tree=tree.flatten())
    depth = tree.sum(-1) - 1
    prefix = torch.arange(100) > (100 + depth - 20).unsqueeze(1)
    close(out, pool.reference(q, 2, torch.cat((prefix, tree), dim=1)))


@pytest.mark.parametrize("window", [0, 100])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "dtype"),
    [
        (9, 3, 64, torch.float32),
        (8, 8, 64, torch.float32),
        (16, 8, 128, torch.float32),
        (9, 3, 64, torch.bfloat16),
    ],
)
def test_a_row_does_not_depend_on_the_others(heads, kv_heads, size, dtype, window):
    pool = Pool(heads, kv_heads, size, dtype)
    for prefix in (0, 1, *POSITIONS):
        for new in (2, 4, 6, 8, 24, 100):
            q = pool.queries(new)
            together = pool.extend(q, [2], [prefix + new], [new], window)
            for row in {0, 1, new // 2, new - 1}:
                alone = pool.decode(q[row : row + 1], [2], [prefix + row + 1], window)
                assert torch.equal(alone[0], together[row]), (prefix, new, row)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"is_cross": True}, "cross-attention"),
        ({"sinks": torch.zeros(9)}, "sinks"),
        ({"k_buffer": torch.zeros(4, 3, 64).to(torch.float8_e4m3fn)}, "8-bit"),
    ],
)
def test_what_is_missing_is_named(change, what):
    given = {"k_buffer": torch.zeros(4, 3, 64), "is_cross": False, "encoder_lens": None, "sinks": None}
    with pytest.raises(NotImplementedError, match=what):
        attention._refuse(**(given | change))
