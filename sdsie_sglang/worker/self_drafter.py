"""The self-draft's side of a K-cycle: K decodes of the target in INT4, the first of the pending token.

They read committed KV as the target wrote it, in full precision, and write positions L to L+K-1, which the
verify pass of the same cycle overwrites. So nothing is carried to the next cycle and there is nothing to catch
up, whatever gear ran before.
"""

from typing import Any

import torch
from sglang.srt.speculative.eagle_info import EagleDraftInput, EagleVerifyInput
from sglang.srt.speculative.eagle_worker_common import build_eagle_verify_input, prepare_for_draft
from sglang.srt.speculative.spec_utils import draft_tp_context

from sdsie_sglang.worker.draft_history import DraftHistory
from sdsie_sglang.worker.draft_passes import DraftPassCounter
from sdsie_sglang.worker.drafter import TOPK
from sdsie_sglang.worker.request_state import RequestState
from sdsie_sglang.worker.self_draft import SelfDraftWorker


class NoHistory(DraftHistory):
    """Takes a `DraftHistory`'s place where the draft has no KV of its own that could fall behind."""

    def __init__(self, req_to_token: torch.Tensor) -> None:
        super().__init__(req_to_token, kv_slots=0)

    def prefilled(self, batch: Any, states: list[RequestState]) -> None:
        """The prompt's KV is the target's own."""


class SelfDrafter:
    """Same calls as `Drafter`."""

    catch_up_passes = 0
    passes_run = None

    def __init__(self, draft_worker: SelfDraftWorker, target_worker: Any, req_to_token: torch.Tensor) -> None:
        self.history = NoHistory(req_to_token)
        self.passes = DraftPassCounter(draft_worker.draft_runner)
        self._draft_worker = draft_worker
        self._target_worker = target_worker

    def propose(self, batch: Any, states: list[RequestState], k: int) -> EagleVerifyInput:
        """Runs K draft passes and builds the chain to verify; see `Drafter.propose`."""
        worker = self._draft_worker
        spec: EagleDraftInput = batch.spec_info
        spec.topk_index = spec.bonus_tokens.to(torch.int64).unsqueeze(1)
        spec.topk_p = torch.ones_like(spec.topk_index, dtype=torch.float32)
        out_cache_loc = batch.out_cache_loc
        with draft_tp_context(worker.parallel_layout):
            forward_batch, can_run_graph, _ = prepare_for_draft(
                spec, worker.req_to_token_pool, batch, worker.cuda_graph_runner, worker.draft_runner, TOPK, k + 1
            )
            if can_run_graph:
                self.passes.add(k)
                tokens = worker.cuda_graph_runner.execute(forward_batch)[2]
            else:
                worker.draft_attn_backend.init_forward_metadata(forward_batch)
                forward_batch.mark_forward_metadata_ready()
                tokens = worker.draft_forward(forward_batch)[2]
        batch.out_cache_loc = out_cache_loc
        return build_eagle_verify_input(
            batch,
            spec,
            *worker.chain(tokens[:, 1:].contiguous()),
            target_worker=self._target_worker,
            topk=TOPK,
            num_steps=k,
            num_draft_tokens=k + 1,
            tree_mask_mode=worker.tree_mask_mode,
            device=batch.device,
        )

    def verified(self, states: list[RequestState]) -> None:
        """Nothing to remember: the verify pass wrote the KV that counts."""
