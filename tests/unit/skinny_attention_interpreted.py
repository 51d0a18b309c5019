"""The attention kernel in Triton's interpreter, run by test_skinny_attention.py in a process of its own."""

import pytest
import torch

from sdsie_sglang.kernels.skinny_attention import Shape, skinny_attention
from sdsie_sglang.kernels.skinny_attention.reference import attention_reference
from tests.unit.skinny_attention_cases import make_case

SMALL = Shape(block=16, short=32, parts=4, warps=4)


@pytest.mark.parametrize(
    ("lengths", "width", "groups", "heads", "size"),
    [
        ([1], 1, 1, 1, 32),
        ([17], 1, 4, 2, 64),
        ([33, 1, 300], 1, 4, 2, 32),
        ([6], 6, 4, 1, 64),
        ([70, 7], 6, 4, 2, 32),
        ([129], 16, 2, 2, 32),
        ([200, 90], 2, 3, 1, 128),
    ],
)
def test_same_as_reference(lengths: list[int], width: int, groups: int, heads: int, size: int) -> None:
    case = make_case(lengths, width, groups, heads, size)
    ours, theirs = case.fresh(), case.fresh()
    arrived = torch.zeros(len(lengths) * heads, dtype=torch.int32)
    got = skinny_attention(*ours, arrived, shape=SMALL)
    expected = attention_reference(*theirs)
    torch.testing.assert_close(got.float(), expected.float(), rtol=2e-2, atol=1e-2)
    assert (got.float() - expected.float()).abs().mean() < 2e-3
    assert torch.equal(ours.k_cache, theirs.k_cache), "keys rotated and in their slots, no other slot touched"
    assert torch.equal(ours.v_cache, theirs.v_cache)
    assert not arrived.any(), "left for the next launch"


def test_padded_request_leaves_the_others_alone() -> None:
    both = make_case([90, 1], 6, 4, 2, 32)
    alone = both._replace(
        qkv=both.qkv[:6], positions=both.positions[:6], slots=both.slots[:6], table=both.table[:1],
        lengths=both.lengths[:1],
    )  # fmt: skip
    arrived = torch.zeros(4, dtype=torch.int32)
    got = skinny_attention(*both.fresh(), arrived, shape=SMALL)
    assert torch.isfinite(got).all()
    assert torch.equal(got[:6], skinny_attention(*alone.fresh(), arrived, shape=SMALL))
