import math
import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sdsie_sglang.kernels.entropy import entropy_bits, entropy_bits_reference, top_probability


@pytest.mark.parametrize("n", [1, 2, 8, 1024, 151_936])
def test_uniform_is_log2_n(n):
    assert entropy_bits(torch.full((1, n), 3.25)).item() == pytest.approx(math.log2(n), abs=1e-4)


def test_a_certain_token_is_zero_and_never_negative():
    logits = torch.full((1, 50_000), -30.0)
    logits[0, 7] = 90.0
    assert entropy_bits(logits).item() == 0.0


def test_masked_tokens_count_nothing():
    logits = torch.full((1, 49_152), -math.inf)
    logits[0, [3, 4, 5, 40_000]] = 1.5
    assert entropy_bits(logits).item() == pytest.approx(2.0, abs=1e-6)


def test_broken_rows_are_nan():
    rows = torch.zeros(4, 100)
    rows[0, 3] = math.nan
    rows[1, 3] = math.inf
    rows[2, :] = -math.inf
    out = entropy_bits(rows)
    assert torch.isnan(out[:3]).all()
    assert out[3].item() == pytest.approx(math.log2(100), abs=1e-5)


def test_rows_are_chosen_by_index():
    logits = torch.randn(6, 500)
    rows = torch.tensor([5, 0, 0])
    assert torch.equal(entropy_bits(logits, rows), entropy_bits(logits)[rows])


@given(st.lists(st.floats(-40, 40), min_size=1, max_size=60), st.floats(-100, 100))
def test_against_the_definition_and_shift_invariant(values, shift):
    x = torch.tensor([values], dtype=torch.float64)
    p = x.softmax(-1)
    expected = (torch.special.entr(p).sum() / math.log(2)).item()
    assert entropy_bits_reference(x).item() == pytest.approx(expected, abs=2e-5)
    assert entropy_bits_reference(x + shift).item() == pytest.approx(expected, abs=2e-4)


def test_the_likeliest_tokens_probability():
    logits = torch.randn(3, 500) * 3
    logits[0, 7] = -math.inf
    logits[2] = math.nan
    expected = logits.softmax(-1)
    assert torch.allclose(top_probability(logits)[:2], expected[:2].amax(-1))
    assert torch.isnan(top_probability(logits)[2])


INTERPRETED = """
import math, torch
from sdsie_sglang.kernels.entropy.kernel import entropy_bits_triton, top_probability_triton
from sdsie_sglang.kernels.entropy import entropy_bits_reference, top_probability
torch.manual_seed(0)
for n, vocab, dtype in [(1, 7, torch.float32), (3, 5000, torch.bfloat16), (2, 49152, torch.float32)]:
    x = (torch.randn(n, vocab) * 4).to(dtype)
    x[0, 1:3] = -math.inf
    if vocab > 4096:
        x[-1, :4096] = -math.inf  # a whole block with nothing in it
    for rows in (None, torch.tensor([n - 1, 0])):
        torch.testing.assert_close(
            entropy_bits_triton(x, rows), entropy_bits_reference(x, rows), rtol=1e-4, atol=1e-4
        )
    torch.testing.assert_close(top_probability_triton(x), top_probability(x), rtol=1e-4, atol=1e-6)
bad = torch.zeros(4, 5000)
bad[0, 4500] = math.nan; bad[1, 3] = math.inf; bad[2] = -math.inf
out = entropy_bits_triton(bad)
assert torch.isnan(out[:3]).all() and abs(out[3].item() - math.log2(5000)) < 1e-4, out
assert torch.isnan(top_probability_triton(bad)[:3]).all()
"""


def test_the_triton_kernel_agrees_in_the_interpreter():
    done = subprocess.run(
        [sys.executable, "-c", INTERPRETED],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
