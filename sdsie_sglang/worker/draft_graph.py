"""The draft's whole part of a K-cycle in one CUDA graph: catch-up, first token, K - 1 decodes.

Otherwise the host prepares two passes of the draft one after the other, each with lengths, slots, positions and an
attention backend's plan of its own, and issues two graphs with small kernels between them. Here it copies three
vectors and issues one graph. What the passes need is worked out in it, from SGLang's own tables: the tokens of the
catch-up, slots and positions of all steps at once. Attention is this project's (`fused_attention.Rows`), which plans
nothing. So it serves where that does, with few requests, and where the draft has only the last cycle to make up for.

A chain may be stopped where the draft itself no longer believes in it: where the product of its tokens' probabilities
falls below a limit. That is decided on the device, by conditional nodes of the graph, so nobody waits for anything;
the places behind are filled with a token that is not there to be right, and verified like any other. Should one be
right all the same, the draft's KV lacks it: that costs acceptance later, and no answer.
"""

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from sglang.kernels.ops.speculative.topk1 import draft_topk1_postprocess
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
from sglang.srt.model_executor.runner_utils.capture_mode import model_capture_mode
from sglang.srt.model_executor.runner_utils.pool import get_or_create_global_graph_memory_pool, graph_pool_capture_scope

from sdsie_sglang.fused_attention import Rows, serves
from sdsie_sglang.kernels.entropy import top_probability
from sdsie_sglang.kernels.skinny_attention.attention import MAX_ROWS
from sdsie_sglang.worker.draft_history import DraftHistory
from sdsie_sglang.worker.prepared import logged

logger = logging.getLogger(__name__)

WARM_UPS = 2  # kernels compile and load in them
FILL = 0  # behind a stopped chain; every vocabulary has it


class Chain(NamedTuple):
    """What one cycle drafted."""

    tokens: torch.Tensor  # [bs, K] int64
    passes: torch.Tensor | None  # [1] float32: of the draft that ran, tokens not filled in; None: K


def build_draft_graphs(
    runner: Any, history: DraftHistory, gears: Sequence[int], sizes: Sequence[int] | None, width: int, limit: float
) -> "DraftGraphs | None":
    """None where something of the draft is not known to be served; says what.

    Args:
        runner: SGLang's ModelRunner of the draft.
        gears: every K that may be asked for, 0 left out.
        sizes: batch sizes to capture; None: nothing is captured and each cycle issues its kernels itself.
        width: tokens of the catch-up.
        limit: of the product of a chain's probabilities, below which no more is drafted; 0: never.
    """
    served = [size for size in sizes or () if size * width <= MAX_ROWS]
    problem = serves(runner.model, runner.token_to_kv_pool, runner.page_size)
    if sizes is not None and not served:
        problem = problem or f"no batch size up to {MAX_ROWS // width} is captured"
    if problem is not None:
        logger.log(logging.WARNING if limit else logging.INFO, "sdsie: no draft graph: %s", problem)
        return None
    with logged(runner, "draft graphs"):
        return DraftGraphs(runner, history, gears, served, width, limit)


class DraftGraphs:
    """Chains of every gear. Arguments as of `build_draft_graphs`."""

    def __init__(
        self,
        runner: Any,
        history: DraftHistory,
        gears: Sequence[int],
        sizes: Sequence[int],
        width: int,
        limit: float,
    ) -> None:
        self._runner, self._history, self._width, self._limit = runner, history, width, limit
        self._req_to_token = runner.req_to_token_pool.req_to_token
        self._gears, self._sizes = frozenset(gears), sorted(sizes)
        self._graphs: dict[tuple[int, int], tuple[torch.cuda.CUDAGraph, Chain]] = {}
        if self._sizes:
            device = self._req_to_token.device
            largest = self._sizes[-1]
            self._rows = torch.zeros(largest, dtype=torch.int64, device=device)
            self._seq_lens = torch.ones(largest, dtype=torch.int64, device=device)
            self._pending = torch.zeros(largest, dtype=torch.int32, device=device)
            self._real = torch.ones(largest, dtype=torch.float32, device=device)  # 0: padding
            self._capture()

    def serve(self, requests: int, k: int) -> bool:
        """Whether there is a chain of `k` for this many requests."""
        most = self._sizes[-1] if self._sizes else MAX_ROWS // self._width
        return k in self._gears and requests <= most

    def draft(self, rows: torch.Tensor, seq_lens: torch.Tensor, pending: torch.Tensor, k: int) -> Chain:
        """The chain, valid until the next call. Runs K passes of the draft, or fewer where there is a limit.

        Args:
            rows: [bs] request slots. seq_lens: [bs] int64, tokens before the pending one. pending: [bs].
        """
        if not self._sizes:
            return self._chain(rows, seq_lens, pending, torch.ones_like(rows, dtype=torch.float32), k)
        requests = rows.shape[0]
        size = next(size for size in self._sizes if size >= requests)
        if size > requests:  # slot 0 is nobody's: SGLang pads with it as well
            self._rows[requests:size].zero_()
            self._seq_lens[requests:size].fill_(self._width - 1)
            self._pending[requests:size].zero_()
            self._real[requests:size].zero_()
        self._real[:requests].fill_(1)
        self._rows[:requests].copy_(rows)
        self._seq_lens[:requests].copy_(seq_lens)
        self._pending[:requests].copy_(pending)
        graph, chain = self._graphs[k, size]
        graph.replay()
        return chain._replace(tokens=chain.tokens[:requests])

    def _capture(self) -> None:
        """Largest first, so that the others find room in its memory."""
        pool = get_or_create_global_graph_memory_pool(torch.cuda)
        stream = torch.cuda.Stream()
        with model_capture_mode(), torch.no_grad():
            for size in reversed(self._sizes):
                arguments = self._rows[:size], self._seq_lens[:size], self._pending[:size], self._real[:size]
                for k in sorted(self._gears, reverse=True):
                    stream.wait_stream(torch.cuda.current_stream())
                    with torch.cuda.stream(stream):
                        for _ in range(WARM_UPS):
                            self._chain(*arguments, k)
                    stream.synchronize()
                    graph = torch.cuda.CUDAGraph()
                    with graph_pool_capture_scope(), torch.cuda.graph(graph, pool=pool, stream=stream):
                        chain = self._chain(*arguments, k)
                    self._graphs[k, size] = graph, chain

    def _chain(
        self, rows: torch.Tensor, seq_lens: torch.Tensor, pending: torch.Tensor, real: torch.Tensor, k: int
    ) -> Chain:
        requests, width, device = rows.shape[0], self._width, rows.device
        ids, slots = self._history.open_rows(rows, seq_lens, pending, width, k)
        table = self._req_to_token[rows]
        positions = (seq_lens.unsqueeze(1) + torch.arange(1 - width, 1, device=device)).flatten()
        steps = torch.arange(1, k + 1, device=device).unsqueeze(1)
        lengths = (seq_lens + steps).to(torch.int32)  # [K, bs]: tokens in the draft's KV after each pass
        later = seq_lens + steps[: k - 1]  # [K - 1, bs]: positions of the decodes
        later_slots = self._req_to_token[rows, later].to(torch.int64)

        tokens = torch.full((requests, k), FILL, dtype=torch.int64, device=device)

        def decode(step: int, newest: torch.Tensor) -> torch.Tensor:
            return self._forward(newest, later[step], later_slots[step], table, lengths[step + 1])

        logits = self._forward(ids, positions, slots, table, lengths[0])[width - 1 :: width]
        if self._limit:
            return Chain(tokens, self._draft_while_believed(logits, tokens, real, decode))
        for step in range(k - 1):
            logits = decode(step, _top1(logits, tokens, step))
        _top1(logits, tokens, k - 1)
        return Chain(tokens, None)

    def _draft_while_believed(
        self,
        logits: torch.Tensor,
        tokens: torch.Tensor,
        real: torch.Tensor,  # [bs] float32: 1, or 0 for padding
        decode: Callable[[int, torch.Tensor], torch.Tensor],
    ) -> torch.Tensor:
        """Fills `tokens` until the product of their probabilities is below the limit for every request."""
        newest, belief = _top1(logits, tokens, 0), real * top_probability(logits)
        going = (belief >= self._limit).any()  # NaN: no
        passes = torch.ones(1, dtype=torch.float32, device=tokens.device)

        def go_on(step: int) -> None:
            logits = decode(step, newest)
            newest.copy_(_top1(logits, tokens, step + 1))
            belief.mul_(top_probability(logits))
            going.copy_((belief >= self._limit).any())
            passes.add_(1)

        for step in range(tokens.shape[1] - 1):
            _only_if(going, partial(go_on, step))
        return passes

    def _forward(
        self,
        ids: torch.Tensor,  # [bs * rows a request]
        positions: torch.Tensor,
        slots: torch.Tensor,
        table: torch.Tensor,  # [bs, context] int32: KV slots
        lengths: torch.Tensor,  # [bs] int32: tokens, these included
    ) -> torch.Tensor:
        """Logits [bs * rows a request, vocab] of one pass, as an ordinary decode of that many rows."""
        batch = ForwardBatch(
            forward_mode=ForwardMode.DECODE,
            batch_size=ids.shape[0],
            input_ids=ids,
            req_pool_indices=lengths,  # nobody's: attention has the table
            seq_lens=lengths,
            out_cache_loc=slots,
            seq_lens_sum=0,
            positions=positions,
            return_logprob=False,
            spec_algorithm=self._runner.spec_algorithm,
            capture_hidden_mode=CaptureHiddenMode.NULL,
        )
        with forward_context(ForwardContext(attn_backend=Rows(self._runner, table, lengths)), forward_batch=batch):
            logits: torch.Tensor = self._runner.model.forward(ids, positions, batch).next_token_logits
        return logits


def _only_if(going: torch.Tensor, run: Callable[[], None]) -> None:
    """Runs what changes tensors in place if `going` [] bool holds; while capturing, as a conditional node."""
    if not going.is_cuda:
        if going:
            run()
    elif torch.cuda.is_current_stream_capturing():
        graph = torch.cuda.CUDAGraph.get_currently_capturing_graph()
        graph.begin_capture_to_if_node(going)
        try:
            run()
        finally:
            graph.end_capture_to_conditional_node()
    else:  # a warm-up: every kernel, and no waiting
        run()


def _top1(logits: torch.Tensor, chain: torch.Tensor, column: int) -> torch.Tensor:
    """The likeliest token of each row [bs], also written to its place in the chain."""
    if logits.is_cuda:
        # SGLang's, for its split over the vocabulary; it also advances positions, of which there are none here.
        scratch = torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device)
        return draft_topk1_postprocess(logits, scratch, chain, column)[1].flatten()
    chain[:, column] = logits.argmax(dim=-1)
    return chain[:, column].clone()
