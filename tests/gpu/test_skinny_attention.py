"""Attention in one launch on a real GPU: against the reference, in graphs, behind and before products with PDL."""

import pytest
import torch
from torch import Tensor

from sdsie_sglang.kernels.skinny_attention import Shape, attention, skinny_attention
from sdsie_sglang.kernels.skinny_attention.reference import attention_reference
from sdsie_sglang.kernels.skinny_gemm import skinny_gemm
from sdsie_sglang.kernels.skinny_gemm.tiles import Tile
from tests.unit.skinny_attention_cases import Case, make_case

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    pytest.mark.skipif(attention.INTERPRET, reason="the interpreter's cases are in tests/unit"),
]
SHAPES = [None, Shape(block=32, short=32, parts=8), Shape(block=128, short=128, warps=8)]
GEOMETRIES = [  # width, groups, heads, size
    (1, 4, 8, 64), (2, 4, 8, 64), (6, 4, 8, 128), (16, 4, 8, 64), (1, 3, 3, 64), (5, 3, 3, 64), (8, 8, 1, 128),
]  # fmt: skip


def _arrived(case: Case) -> Tensor:
    return torch.zeros(case.lengths.shape[0] * case.k_cache.shape[1], dtype=torch.int32, device="cuda")


def _check(case: Case, got: Tensor, ours: Case) -> None:
    theirs = case.fresh()
    expected = attention_reference(*theirs).float()
    # outputs are averages of unit normals; bf16 rounds weights and results by 2^-9 of themselves
    assert (got.float() - expected).abs().max() < 0.03
    assert (got.float() - expected).abs().mean() < 1.5e-3
    # all padded rows write to slot 0, in any order
    keys = theirs.k_cache[1:].float()
    wrong = (ours.k_cache[1:].float() - keys).abs()
    assert (wrong <= 0.0079 * keys.abs() + 1e-6).all(), "a key off by more than one rounding"
    assert torch.equal(ours.v_cache[1:], theirs.v_cache[1:])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("width", "groups", "heads", "size"), GEOMETRIES)
def test_same_as_reference(width: int, groups: int, heads: int, size: int, shape: Shape | None) -> None:
    for lengths in ([width], [300], [255 + width], [256 + width, 1], [5000, 77], [20000]):
        if len(lengths) * width > attention.MAX_ROWS:
            continue
        case = make_case(lengths, width, groups, heads, size, device="cuda")
        ours, arrived = case.fresh(), _arrived(case)
        got = skinny_attention(*ours, arrived, shape=shape)
        _check(case, got, ours)
        assert not arrived.any()
        for _ in range(20):
            assert torch.equal(skinny_attention(*ours, arrived, shape=shape), got), "the same bits each time"


def test_a_graph_replays_for_other_lengths() -> None:
    case = make_case([2000, 40], 6, 4, 8, 128, device="cuda")  # of some 4,000 slots, the others use the first 1,801
    ours, arrived = case.fresh(), _arrived(case)
    skinny_attention(*ours, arrived)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = skinny_attention(*ours, arrived)
    for lengths in ([900, 40], [30, 6], [6, 600]):
        other = make_case(lengths, 6, 4, 8, 128, device="cuda", seed=1)
        table = torch.zeros_like(ours.table)
        table[:, : other.table.shape[1]] = other.table
        slots = torch.arange(3000, 3012, device="cuda")
        for to, value in zip(
            (ours.qkv, ours.positions, ours.slots, ours.table, ours.lengths),
            (other.qkv, other.positions, slots, table, other.lengths),
            strict=True,
        ):
            to.copy_(value)
        before = ours.fresh()
        graph.replay()
        expected = attention_reference(*before).float()
        assert (out.float() - expected).abs().max() < 0.03


def test_waits_for_the_product_before_and_is_waited_for() -> None:
    """Decode steps as a draft runs them: each reads what the ones before have written to the cache, in one graph."""
    hidden, width, groups, heads, size, steps = 2048, 1, 4, 8, 64, 6
    torch.manual_seed(1)
    tile = Tile(rows=1, warps=8, vectors=2, registers=80)
    weights = [torch.randn((groups + 2) * heads * size, hidden, device="cuda").bfloat16() / hidden**0.5 for _ in "ab"]
    back = torch.randn(hidden, groups * heads * size, device="cuda").bfloat16() / hidden**0.5
    cases = [make_case([200 + i], width, groups, heads, size, device="cuda", seed=7) for i in range(steps)]
    longest = cases[-1]
    x = torch.randn(1, hidden, device="cuda").bfloat16()

    def run(attend, caches: list[tuple[Tensor, Tensor]]) -> Tensor:  # type: ignore[no-untyped-def]
        state = x
        for step in range(steps):
            length = 200 + step
            position = torch.full((1,), length - 1, dtype=torch.int64, device="cuda")
            lengths = torch.full((1,), length, dtype=torch.int32, device="cuda")
            for weight, (k, v) in zip(weights, caches, strict=True):
                qkv = skinny_gemm(state, weight, tile=tile)
                slots = longest.table[0, length - 1 : length].long()
                out = attend(
                    qkv, longest.cos_sin, position, k, v, slots, longest.table, lengths, longest.scale
                )  # fmt: skip
                state = skinny_gemm(out, back, tile=tile)
        return state

    fresh = [(longest.k_cache.clone(), longest.v_cache.clone()) for _ in weights]
    caches = [(k.clone(), v.clone()) for k, v in fresh]
    expected = run(lambda *a: attention_reference(*a), [(k.clone(), v.clone()) for k, v in fresh])
    counters = torch.zeros(heads, dtype=torch.int32, device="cuda")
    ours = lambda *a: skinny_attention(*a, counters)  # noqa: E731
    run(ours, caches)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            got = run(ours, caches)
    for _ in range(200):
        for (k, v), (k0, v0) in zip(caches, fresh, strict=True):
            k.copy_(k0)
            v.copy_(v0)
        graph.replay()
        torch.cuda.synchronize()
        error = (got.float() - expected.float()).norm() / expected.float().norm()
        assert error < 0.05, "a step read what was not there yet"
