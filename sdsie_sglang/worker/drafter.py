"""The draft model's side of a K-cycle: catch up, then propose K tokens.

Unlike SGLang's STANDALONE, which feeds the draft token p+1 at position p, the draft here sees every
token at its own position, the first one included. And the pass that fills its KV is not run at the
end of a cycle but at the beginning of the next: what was missed, be it the one or two tokens of the
last cycle, a stretch of gear 0 or a whole prompt, is one and the same operation.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from sglang.kernels.ops.speculative.topk1 import draft_topk1_postprocess
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode
from sglang.srt.speculative.eagle_info import EagleDraftExtendInput, EagleDraftInput, EagleVerifyInput
from sglang.srt.speculative.eagle_worker_common import (
    build_eagle_verify_input,
    prepare_for_draft,
    prepare_for_draft_extend,
)
from sglang.srt.speculative.spec_utils import draft_tp_context

from sdsie_sglang.worker.draft_graph import DraftGraphs
from sdsie_sglang.worker.draft_history import DraftHistory, passes_of, ragged_positions
from sdsie_sglang.worker.draft_passes import DraftPassCounter
from sdsie_sglang.worker.request_state import RequestState
from sdsie_sglang.worker.sync_check import syncs_are_allowed

# After a K-cycle the draft lacks the bonus token and, if all K were accepted, the last drafted
# one: always extending by two keeps the shape fixed. Rewriting a slot with the same token is free.
STEADY_WIDTH = 2
# A stretch of gear 0 is made up for by captured passes of this width, which cost hardly more than the narrow one.
WIDE_WIDTH = 16
MAX_WIDE_PASSES = 4
TOPK = 1
MIN_CHUNK = 64  # tokens a request in one catch-up pass, however many requests there are


@contextmanager
def _borrowed(batch: Any, *names: str) -> Iterator[None]:
    """Puts the named fields of SGLang's batch back afterwards."""
    before = {name: getattr(batch, name) for name in names}
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(batch, name, value)


def _move_seq_lens(batch: Any, by: int) -> None:
    batch.seq_lens = batch.seq_lens + by
    if batch.seq_lens_cpu is not None:
        batch.seq_lens_cpu = batch.seq_lens_cpu + by
    batch.seq_lens_sum = None


def _host_lens(batch: Any, states: list[RequestState]) -> torch.Tensor:
    """seq_lens [bs] on the host. Waits for the device only behind a K-cycle; a fresh prompt's length is known."""
    if batch.seq_lens_cpu is not None:
        return batch.seq_lens_cpu
    known = [state.seq_len for state in states]
    return batch.seq_lens.cpu() if None in known else torch.tensor(known, dtype=torch.int64)


class Drafter:
    """Args:
    draft_worker: SGLang's StandaloneDraftWorker, which owns the model, its backends and graphs.
    extend_graphs: captured passes that fill the draft's KV, by their width in tokens a request.
    chunk_tokens: tokens of one catch-up pass at most.
    """

    def __init__(
        self,
        draft_worker: Any,
        target_worker: Any,
        history: DraftHistory,
        extend_graphs: Mapping[int, Any],
        chunk_tokens: int,
        whole: DraftGraphs | None = None,
    ) -> None:
        self.history = history
        self.passes = DraftPassCounter(draft_worker.draft_runner)
        self.catch_up_passes = 0
        self._draft_worker = draft_worker
        self._runner = draft_worker.draft_runner
        self._target_worker = target_worker
        self._extend_graphs = extend_graphs
        self._chunk_tokens = chunk_tokens
        self._whole = whole
        self.passes_run: torch.Tensor | None = None

    def propose(self, batch: Any, states: list[RequestState], k: int) -> EagleVerifyInput:
        """Runs K draft passes (more if the draft fell far behind) and builds the chain to verify.

        Args:
            batch: a decode batch; seq_lens counts the tokens in the target's KV, and spec_info
                holds the one that follows them, drawn but not yet in any KV.
        """
        spec: EagleDraftInput = batch.spec_info
        self.passes_run = None
        with draft_tp_context(self._draft_worker.parallel_layout):
            if self._whole is not None and self._is_steady(states) and self._whole.serve(len(states), k):
                chain = self._draft_whole(self._whole, batch, k)
            else:
                spec.topk_p, spec.topk_index = self._first_token(self._catch_up(batch, states, k))
                chain = self._decode(batch, k)
        return build_eagle_verify_input(
            batch,
            spec,
            *chain,
            target_worker=self._target_worker,
            topk=TOPK,
            num_steps=k,
            num_draft_tokens=k + 1,
            tree_mask_mode=self._draft_worker.tree_mask_mode,
            device=batch.device,
        )

    def verified(self, states: list[RequestState]) -> None:
        """The next cycle has the bonus token and, if all were accepted, the last drafted one to make up for."""
        for state in states:
            state.missed, state.engaged = STEADY_WIDTH, True

    @staticmethod
    def _is_steady(states: list[RequestState]) -> bool:
        """Whether the draft has seen everything up to the last K-cycle."""
        return max(state.missed for state in states) <= STEADY_WIDTH

    def _draft_whole(self, whole: DraftGraphs, batch: Any, k: int) -> tuple[Any, ...]:
        """What SGLang's draft steps return of a chain: parents and order, always the same, tokens, no probabilities."""
        tokens, self.passes_run = whole.draft(batch.req_pool_indices, batch.seq_lens, batch.spec_info.bonus_tokens, k)
        self.passes.add(k)
        self.catch_up_passes = 0
        bs = tokens.shape[0]
        parents, order = self._draft_worker._topk1_parents_prealloc, self._draft_worker._topk1_score_indices_prealloc
        return parents[:bs], order[:bs], tokens, None

    # -- catch-up ---------------------------------------------------------------------------

    def _catch_up(self, batch: Any, states: list[RequestState], k: int) -> torch.Tensor:
        """Brings the draft's KV up to the pending token; returns logits [bs, vocab] of the token after it."""
        missed = [state.missed for state in states]
        pending = batch.spec_info.bonus_tokens
        if not self._is_steady(states):
            if passes := self._wide_passes(batch, max(missed), min(state.prefilled for state in states) + 1):
                return self._catch_up_wide(batch, pending, k, passes)
            self.history.open_window(batch, pending, 1, k)
            with syncs_are_allowed():
                return self._catch_up_ragged(batch, missed, _host_lens(batch, states))
        self.catch_up_passes = 0
        return self._extend_even(batch, STEADY_WIDTH, *self.history.open_window(batch, pending, STEADY_WIDTH, k))

    def _wide_passes(self, batch: Any, missed: int, shortest: int) -> int:
        """How many captured wide passes make up for `missed` tokens; 0 if they cannot."""
        graph = self._extend_graphs.get(WIDE_WIDTH)
        if graph is None or batch.seq_lens.shape[0] > graph.max_bs:
            return 0
        return passes_of(WIDE_WIDTH, missed, shortest, MAX_WIDE_PASSES)

    def _catch_up_wide(self, batch: Any, pending: torch.Tensor, k: int, passes: int) -> torch.Tensor:
        """Fixed widths need no lengths on the host, so that nothing waits for the device."""
        self.catch_up_passes = passes - 1
        rows, seq_lens = batch.req_pool_indices, batch.seq_lens
        for behind in range((passes - 1) * WIDE_WIDTH, 0, -WIDE_WIDTH):
            offsets = torch.arange(1 - WIDE_WIDTH, 1, device=seq_lens.device) - behind
            positions = (seq_lens.unsqueeze(1) + offsets).flatten()
            each = rows.repeat_interleave(WIDE_WIDTH)
            slots = self.history.slots(each, positions)
            self._extend_even(batch, WIDE_WIDTH, self.history.tokens(each, positions), slots, behind)
            self.history.mark(slots, valid=True)
        return self._extend_even(batch, WIDE_WIDTH, *self.history.open_window(batch, pending, WIDE_WIDTH, k))

    def _catch_up_ragged(self, batch: Any, missed: list[int], lens: torch.Tensor) -> torch.Tensor:
        """Any lengths, in chunks: prompts, and whatever has no graph. lens: seq_lens on the host."""
        self.catch_up_passes = 0
        budget = max(MIN_CHUNK, self._chunk_tokens // len(missed))
        while max(missed) > budget:
            # Whoever has less to catch up writes one slot early, so that the batch stays whole.
            self._extend_ragged(batch, [budget if n > budget else 1 for n in missed], missed, lens)
            missed = [n - budget if n > budget else n for n in missed]
            self.catch_up_passes += 1
        return self._extend_ragged(batch, missed, missed, lens)

    def _extend_even(
        self, batch: Any, width: int, ids: torch.Tensor, slots: torch.Tensor, behind: int = 0
    ) -> torch.Tensor:
        """`width` tokens a request that end `behind` the pending one; a captured graph where there is one.

        Returns logits [bs, vocab] after each request's last token.
        """
        bs = batch.seq_lens.shape[0]
        graph = self._extend_graphs.get(width)
        select, accepted, drafted = _even_layout(bs, width, batch.seq_lens.device)
        with _borrowed(
            batch, "seq_lens", "seq_lens_cpu", "seq_lens_sum", "input_ids", "out_cache_loc", "prefix_lens",
            "extend_lens", "extend_num_tokens", "extend_logprob_start_lens", "forward_mode", "spec_info",
        ):  # fmt: skip
            _move_seq_lens(batch, 1 - width - behind)
            batch.extend_logprob_start_lens = None
            batch.out_cache_loc = slots
            forward_batch = prepare_for_draft_extend(
                EagleDraftExtendInput(
                    num_correct_drafts=drafted,
                    num_accept_tokens=accepted,
                    num_tokens_per_req=width,
                    num_tokens_for_logprob_per_req=width,
                ),
                batch,
                ids,
                width,
                self._runner,
                graph,
                return_hidden_states_before_norm=False,
            )
            forward_batch.return_logprob = False
            if graph is not None and graph.can_run_graph(forward_batch):
                self.passes.add(1)
                return graph.execute(forward_batch, select).next_token_logits
            return self._runner.forward(forward_batch).logits_output.next_token_logits[select]

    def _extend_ragged(self, batch: Any, lengths: list[int], back: list[int], lens: torch.Tensor) -> torch.Tensor:
        """Extends request i of `lens[i]` tokens by `lengths[i]`, the first of them `back[i]` from the end.

        Returns logits [bs, vocab] of each request's last token.
        """
        starts_back = torch.tensor([b - n for b, n in zip(back, lengths, strict=True)], dtype=torch.int64)
        ends = batch.seq_lens + 1 - starts_back.to(batch.seq_lens.device, non_blocking=True)
        row, positions, _ = ragged_positions(lengths, ends)
        rows = batch.req_pool_indices[row]
        with _borrowed(
            batch, "seq_lens", "seq_lens_cpu", "seq_lens_sum", "input_ids", "out_cache_loc", "prefix_lens",
            "extend_lens", "extend_num_tokens", "extend_logprob_start_lens", "forward_mode", "spec_info",
        ):  # fmt: skip
            batch.seq_lens = ends
            batch.seq_lens_cpu = lens + 1 - starts_back
            batch.seq_lens_sum = int(batch.seq_lens_cpu.sum())
            batch.input_ids = self.history.tokens(rows, positions)
            batch.out_cache_loc = slots = self.history.slots(rows, positions)
            batch.prefix_lens = [end - n for end, n in zip(batch.seq_lens_cpu.tolist(), lengths, strict=True)]
            batch.extend_lens, batch.extend_num_tokens = list(lengths), sum(lengths)
            batch.extend_logprob_start_lens = None
            batch.forward_mode = ForwardMode.EXTEND
            batch.spec_info = EagleDraftExtendInput(num_tokens_per_req=1, num_tokens_for_logprob_per_req=1)
            forward_batch = ForwardBatch.init_new(
                batch,
                self._runner,
                capture_hidden_mode=CaptureHiddenMode.NULL,
                return_hidden_states_before_norm=False,
            )
            forward_batch.return_logprob = False
            logits = self._runner.forward(forward_batch).logits_output.next_token_logits
        self.history.mark(slots, valid=True)
        return logits

    # -- proposal ---------------------------------------------------------------------------

    def _decode(self, batch: Any, k: int) -> tuple[Any, ...]:
        """K - 1 draft passes from the first drafted token on; a captured graph where there is one."""
        worker = self._draft_worker
        with _borrowed(batch, "seq_lens", "seq_lens_cpu", "seq_lens_sum", "out_cache_loc"):
            _move_seq_lens(batch, 1)  # the pending token is in the draft's KV by now
            forward_batch, can_run_graph, _ = prepare_for_draft(
                batch.spec_info,
                worker.req_to_token_pool,
                batch,
                worker.cuda_graph_runner,
                self._runner,
                TOPK,
                k,
            )
        if can_run_graph:
            self.passes.add(k - 1)
            return worker.cuda_graph_runner.execute(forward_batch)
        if k > 1:
            worker.draft_attn_backend.init_forward_metadata(forward_batch)
            forward_batch.mark_forward_metadata_ready()
        return worker.draft_forward(forward_batch)

    def _first_token(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Greedy: probabilities (constant 1, unused in a chain) and tokens, both [bs, 1]."""
        if logits.is_cuda:
            # SGLang's, for its split over the vocabulary; it also advances positions, of which there are none here.
            return draft_topk1_postprocess(
                logits, torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device)
            )
        token = logits.argmax(dim=-1, keepdim=True)
        return torch.ones_like(token, dtype=torch.float32), token


@cache
def _even_layout(bs: int, width: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Index of each request's last token [bs], and SGLang's two counts of it [bs]: the same in every pass."""
    select = torch.arange(width - 1, bs * width, width, device=device)
    accepted = torch.full((bs,), width, dtype=torch.int32, device=device)
    return select, accepted, accepted - 1
