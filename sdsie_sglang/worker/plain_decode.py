"""Gear 0: the target's ordinary decode, issued from inside the speculative worker.

SGLang's own zero-step cycle verifies a tree of one node and runs the draft to keep its KV warm.
Here the batch is turned into a plain DECODE for one forward pass; SGLang's scheduler undoes the
edits afterwards, as it does for every speculative forward.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch

from sdsie_sglang.kernels.entropy import entropy_bits
from sdsie_sglang.worker.draft_history import DraftHistory
from sdsie_sglang.worker.request_state import RequestState


def decode_plain(
    batch: Any,
    states: list[RequestState],
    target_worker: Any,
    history: DraftHistory,
    on_publish: Callable[[torch.Tensor], None] | None,
    grammar_barrier: Callable[[], None] | None,
) -> tuple[GenerationBatchResult, torch.Tensor]:
    """One target pass, one token a request.

    On entry seq_lens counts the tokens in the target's KV and spec_info holds the token that
    follows them; its KV slot is already allocated.

    Returns:
        SGLang's result, in the speculative schema with width 1, and the entropies [bs] in bits.
    """
    bs = batch.seq_lens.shape[0]
    batch.input_ids, batch.out_cache_loc, new_seq_lens = history.plain_step(batch, batch.spec_info.bonus_tokens)
    batch.seq_lens = new_seq_lens  # a DECODE counts its own token
    if batch.seq_lens_cpu is not None:
        batch.seq_lens_cpu = batch.seq_lens_cpu + 1
    batch.seq_lens_sum = None
    # FA3 and Triton would take a DECODE with a spec_info for a draft's.
    batch.spec_info = None

    runner = target_worker.model_runner
    forward_batch = ForwardBatch.init_new(
        batch,
        runner,
        capture_hidden_mode=None if batch.return_hidden_states else CaptureHiddenMode.NULL,
        return_hidden_states_before_norm=False,
    )
    # is_verify: hand back the logits, this worker samples.
    out = target_worker.forward_batch_generation(batch=None, forward_batch=forward_batch, is_verify=True)
    logits = out.logits_output
    if batch.has_grammar and grammar_barrier is not None:
        grammar_barrier()  # the FSM must have seen the previous cycle's tokens before it masks
    entropies = entropy_bits(logits.next_token_logits)  # the sampler overwrites them in place
    next_ids = runner.sample(logits, forward_batch).to(torch.int32)
    if batch.return_logprob and logits.next_token_logprobs is not None:
        logits.next_token_logprobs = logits.next_token_logprobs.view(bs, 1)
    if on_publish is not None:
        on_publish(new_seq_lens)
    for state in states:
        state.missed += 1
    accept_lens, accept_index = _one_each(bs, next_ids.device)
    result = GenerationBatchResult(
        logits_output=logits,
        next_token_ids=next_ids,
        can_run_cuda_graph=out.can_run_cuda_graph,
        speculative_num_draft_tokens=1,
        accept_lens=accept_lens,
        accept_index=accept_index,
        new_seq_lens=new_seq_lens,
        routed_experts_output=out.routed_experts_output,
        indexer_topk_output=out.indexer_topk_output,
        extra_keep_alive_refs=[forward_batch],
    )
    return result, entropies


@cache
def _one_each(bs: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Accept lengths [bs] and indices [bs, 1] where every request commits its one token; SGLang only copies them."""
    ones = torch.ones(bs, dtype=torch.int32, device=device)
    return ones, torch.arange(bs, dtype=torch.int32, device=device).unsqueeze(1)
