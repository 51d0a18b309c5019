"""Temperature, top-k, top-p and min-p under speculation on the CPU engine, whose verify takes the argmax.

At every node of the draft tree the target's token is drawn from the distribution that a plain decode would
draw it from, and a drafted child is accepted if it is that token. What is committed is therefore the target's
own draws: lossless in distribution whatever the draft proposed, since proposals never see the draws. With a
sampling seed (deterministic inference) a draw depends on seed and position alone, so the tokens equal a plain
decode's.

Seam (SGLang 0.5.23, sglang/srt/speculative/eagle_utils.py): `eagle_sample` puts penalties, bias and grammar
on the logits in place, takes their argmax as `target_predict`, and calls `verify_tree_greedy_func` with it.
Two AROUND hooks:

    sglang.srt.speculative.eagle_utils.eagle_sample             -> around_eagle_sample
    sglang.srt.speculative.eagle_utils.verify_tree_greedy_func  -> around_verify_tree_greedy

The draft-model workers and the n-gram worker all pass through them. Greedy requests keep the argmax, in mixed
batches too.
"""

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

# Draws the tokens of the verify that is under way; None: all its requests are greedy.
_draw: ContextVar[Callable[[], Tensor] | None] = ContextVar("sdsie_draw", default=None)


def sample_target_tokens(
    logits: Tensor,  # (bs * n, vocab), processed; read only
    sampling_info: Any,  # SamplingBatchInfo of the bs requests
    positions: Tensor,  # (bs * n,) of each node's own token
) -> Tensor:  # (bs, n) int64
    """The target's token after every node: drawn where its request samples, the argmax where it is greedy."""
    from sglang.srt.layers.sampler import (
        sampling_from_probs_torch,
        top_k_top_p_min_p_sampling_from_probs_torch,
    )

    bs = len(sampling_info.temperatures)
    nodes = logits.shape[0] // bs
    tokens = logits.argmax(-1)
    drawn = (sampling_info.top_ks != 1).repeat_interleave(nodes).nonzero().squeeze(1)
    request = drawn // nodes  # SGLang turns temperature 0 into top_k 1
    seed = None if sampling_info.sampling_seed is None else sampling_info.sampling_seed[request]
    probs = torch.softmax(logits[drawn] / sampling_info.temperatures[request], dim=-1)
    filters = ("need_top_k_sampling", "need_top_p_sampling", "need_min_p_sampling")
    if any(getattr(sampling_info, name) for name in filters):
        draws = top_k_top_p_min_p_sampling_from_probs_torch(
            probs,
            sampling_info.top_ks[request],
            sampling_info.top_ps[request],
            sampling_info.min_ps[request],
            sampling_info.need_min_p_sampling,
            seed,
            positions[drawn],
            max_top_k=sampling_info.max_top_k,
        )
    else:
        draws = sampling_from_probs_torch(probs, seed, positions[drawn])
    tokens[drawn] = draws.to(tokens.dtype)
    return tokens.view(bs, nodes)


def around_eagle_sample(
    original: Callable[..., Any], verify_input: Any, batch: Any, logits_output: Any, *args: Any, **kwargs: Any
) -> Any:
    """AROUND `eagle_sample`: let `around_verify_tree_greedy` draw, once the logits are processed."""
    if batch.forward_mode.is_idle() or batch.sampling_info.is_all_greedy:
        return original(verify_input, batch, logits_output, *args, **kwargs)

    def draw() -> Tensor:
        return sample_target_tokens(logits_output.next_token_logits, batch.sampling_info, verify_input.positions)

    token = _draw.set(draw)
    try:
        return original(verify_input, batch, logits_output, *args, **kwargs)
    finally:
        _draw.reset(token)


def around_verify_tree_greedy(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """AROUND `verify_tree_greedy_func`: drawn tokens in place of the argmax; rank 0's under tensor parallelism."""
    draw = _draw.get()
    if draw is not None:
        kwargs["target_predict"] = _of_first_rank(draw())
    return original(*args, **kwargs)


def _of_first_rank(tokens: Tensor) -> Tensor:
    """Ranks have the same logits and the same seed, so this changes nothing; SGLang is as careful on GPUs."""
    if not torch.distributed.is_initialized():
        return tokens
    from sglang.srt.runtime_context import get_parallel

    return get_parallel().tp_group.broadcast(tokens, src=0)
