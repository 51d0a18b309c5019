"""What verify filters on a GPU against what SGLang's plain sampler draws there: counts of many draws, chi-square."""

from types import SimpleNamespace

import pytest
import torch
from scipy.stats import chisquare

from sdsie_sglang.worker.sampling_filters import filtered

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
VOCABULARY, DRAWS = 64, 200_000


def counts(top_k: int, top_p: float, min_p: float) -> tuple[torch.Tensor, torch.Tensor]:
    """How often each token was drawn, and how often it should have been."""
    from sglang.srt.layers.sampler import (
        min_p_sampling_from_probs,
        top_k_renorm_prob,
        top_k_top_p_sampling_from_probs,
        top_p_renorm_prob,
    )

    torch.manual_seed(0)
    row = torch.softmax(2 * torch.randn(1, VOCABULARY, device="cuda"), -1)
    probs = row.expand(DRAWS, -1).contiguous()
    top_ks = torch.full((DRAWS,), top_k, dtype=torch.int32, device="cuda")
    top_ps, min_ps = (torch.full((DRAWS,), value, device="cuda") for value in (top_p, min_p))
    if min_p:  # as layers/sampler.py of 0.5.23 does with flashinfer
        probs = top_p_renorm_prob(top_k_renorm_prob(probs, top_ks), top_ps)
        drawn = min_p_sampling_from_probs(probs, min_ps)
    else:
        drawn = top_k_top_p_sampling_from_probs(probs, top_ks, top_ps, filter_apply_order="joint")
    info = SimpleNamespace(
        top_ks=top_ks[:1], top_ps=top_ps[:1], min_ps=min_ps[:1], max_top_k=top_k, need_min_p_sampling=min_p > 0
    )
    expected = filtered(row, info, in_turn=min_p > 0)[0].double() * DRAWS
    return torch.bincount(drawn.long(), minlength=VOCABULARY).double().cpu(), expected.cpu()


@pytest.mark.parametrize(("top_k", "top_p", "min_p"), [(20, 0.7, 0.0), (8, 0.95, 0.0), (20, 0.8, 0.1), (64, 1.0, 0.2)])
def test_draws_of_the_plain_sampler_are_those_that_verify_is_given(top_k, top_p, min_p):
    pytest.importorskip("flashinfer")
    observed, expected = counts(top_k, top_p, min_p)
    assert observed[expected == 0].sum() == 0
    inside = expected > 0
    assert inside.sum() > 2
    assert chisquare(observed[inside].numpy(), expected[inside].numpy() * (DRAWS / expected.sum().item())).pvalue > 1e-4
