"""top-k, top-p and min-p on a GPU's verify as its plain decode has them.

SGLang 0.5.23's verify (`eagle_sample`) takes top-p of what top-k left and ignores min-p; its plain sampler
(layers/sampler.py) takes top-k and top-p of the same distribution (flashinfer's "joint" order), and min-p. So a request
that asks for two of them, or for min-p, would be sampled otherwise in gear K than in gear 0. Where a batch has such a
request, the verify's probabilities are filtered here, and its own filters are left out.

Two AROUND hooks, on a GPU alone (the CPU engine's verify draws with the plain sampler, cpu_engine/sampled_verify.py):

    sglang.srt.speculative.eagle_utils.eagle_sample      -> around_eagle_sample
    sglang.srt.speculative.eagle_utils.sampling_softmax  -> around_softmax
"""

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from sdsie_sglang.config import ALGORITHM

# What around_softmax filters by; None: SGLang's own filters are those of its plain sampler.
_info: ContextVar[Any] = ContextVar("sdsie_sampling_info", default=None)


def differs(info: Any) -> bool:
    """Whether verify and plain decode would filter a batch (SamplingBatchInfo) differently."""
    return not info.is_all_greedy and (
        info.need_min_p_sampling or (info.need_top_k_sampling and info.need_top_p_sampling)
    )


def filtered(probs: Tensor, info: Any, *, in_turn: bool) -> Tensor:
    """The distributions that the plain sampler would draw from.

    Args:
        probs: (bs * n, vocab), each request's n rows together. info: SamplingBatchInfo of the bs requests.
        in_turn: top-p of what top-k left, as flashinfer's sampler does where a request of the batch has a min-p;
            otherwise both of the whole distribution.

    Returns:
        (bs * n, vocab), each row with a sum of 1.
    """
    nodes = probs.shape[0] // len(info.top_ks)
    top_k, top_p, min_p = (
        each.repeat_interleave(nodes).unsqueeze(1) for each in (info.top_ks, info.top_ps, info.min_ps)
    )
    most = info.max_top_k
    if most is not None and most < probs.shape[-1]:
        kept, tokens = probs.topk(most, dim=-1, sorted=True)
    else:
        kept, tokens = probs.sort(dim=-1, descending=True)
    rank = torch.arange(kept.shape[-1], device=kept.device)
    by_rank = kept.masked_fill(rank >= top_k, 0.0)
    mass = by_rank / by_rank.sum(-1, keepdim=True) if in_turn else kept
    kept = by_rank.masked_fill(mass.cumsum(-1) - mass > top_p, 0.0)
    if info.need_min_p_sampling:
        kept = kept.masked_fill(kept < min_p * kept[:, :1], 0.0)
    return torch.zeros_like(probs).scatter_(-1, tokens, kept / kept.sum(-1, keepdim=True))


def around_eagle_sample(
    original: Callable[..., Any], verify_input: Any, batch: Any, logits_output: Any, *args: Any, **kwargs: Any
) -> Any:
    """AROUND `eagle_sample`: leaves its filters out where `around_softmax` does their work."""
    info = batch.sampling_info
    if batch.spec_algorithm.name != ALGORITHM or batch.forward_mode.is_idle() or not differs(info):
        return original(verify_input, batch, logits_output, *args, **kwargs)
    needs = info.need_top_k_sampling, info.need_top_p_sampling
    info.need_top_k_sampling = info.need_top_p_sampling = False
    token = _info.set(info)
    try:
        return original(verify_input, batch, logits_output, *args, **kwargs)
    finally:
        _info.reset(token)
        info.need_top_k_sampling, info.need_top_p_sampling = needs


def around_softmax(original: Callable[..., Tensor], logits: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """AROUND `sampling_softmax`: filters the target's probabilities within such a verify."""
    probs = original(logits, *args, **kwargs)
    info = _info.get()
    if info is None:
        return probs
    return filtered(probs, info, in_turn=info.need_min_p_sampling and _sampling_backend() == "flashinfer")


def _sampling_backend() -> str:
    from sglang.srt.runtime_context import get_exec

    return str(get_exec().kernel.sampling_backend)
