"""The target as its own draft: SGLang's draft worker around the model, the KV pool and the tables of the target.

Nothing is loaded and no KV is allocated. Its passes run in INT4 and write the target's own KV slots, which the
verify pass then overwrites in full precision.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from sglang.srt.managers.tp_worker import TpModelWorker
from sglang.srt.speculative import standalone_worker_v2 as standalone
from sglang.srt.speculative.spec_utils import draft_tp_context

from sdsie_sglang.int4.precision import running_int4


class TargetAsDraft(TpModelWorker):
    """SGLang's worker of the target once more, with attention backends and graphs of its own."""

    def __init__(self, target_worker: TpModelWorker) -> None:
        self.__dict__.update(vars(target_worker))
        self.is_draft_worker = True
        self.tokenizer = self.processor = None
        self._target_runner = target_worker.model_runner
        self._model_runner = copy.copy(self._target_runner)
        self._model_runner.is_draft_worker = True
        self._model_runner.weight_load_time = 0.0  # nothing was loaded for it

    def alloc_memory_pool(self, *args: Any, **kwargs: Any) -> None:
        """The target has its pools by now: they are this one's too."""
        weight_load_time = self._model_runner.weight_load_time
        vars(self._model_runner).update(vars(self._target_runner))
        self._model_runner.is_draft_worker = True
        self._model_runner.weight_load_time = weight_load_time


class SelfDraftWorker(standalone.StandaloneDraftWorker):
    """A chain that begins with the pending token instead of the first drafted one: one step more, K passes.

    SGLang's draft starts from a token that its draft-extend has drafted; here that pass is the chain's first.
    """

    speculative_num_steps: int
    cuda_graph_runner: Any

    def __init__(self, server_args: Any, gpu_id: int, nccl_port: int, target_worker: TpModelWorker) -> None:
        def borrow(**kwargs: Any) -> TargetAsDraft:
            return TargetAsDraft(target_worker)

        with _replaced(standalone, "TpModelWorker", borrow):
            super().__init__(server_args, gpu_id, nccl_port, target_worker)

    @property
    def preloaded_weights_bytes(self) -> int:
        """They are counted with the target."""
        return 0

    def init_cuda_graphs(self) -> None:
        """No graphs of SGLang's start-up state, whose steps are not this chain's: each gear captures its own."""
        with draft_tp_context(self.parallel_layout):
            self.draft_worker.init_cuda_graphs(capture_decode_cuda_graph=False)
        self.cuda_graph_runner = self.cuda_graph_runner_for_draft_extend = None

    def draft_forward(self, forward_batch: Any) -> tuple[Any, ...]:
        """K passes in INT4, eagerly or while a graph is captured. Tokens [bs, K + 1], the pending one first."""
        steps, self.speculative_num_steps = self.speculative_num_steps, self.speculative_num_draft_tokens
        try:
            with running_int4():
                return super().draft_forward(forward_batch)
        finally:
            self.speculative_num_steps = steps

    def _rebuild_topk1_chain_buffers(self) -> None:
        """For the chain that is verified, which has K tokens whatever the number of steps says."""
        steps, self.speculative_num_steps = self.speculative_num_steps, self.speculative_num_draft_tokens - 1
        try:
            super()._rebuild_topk1_chain_buffers()
        finally:
            self.speculative_num_steps = steps

    def chain(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, None]:
        """SGLang's description of a chain of the tokens [bs, K]: parents, order, tokens, no probabilities."""
        bs, k = tokens.shape
        parents, order = self._topk1_parents_prealloc, self._topk1_score_indices_prealloc
        if bs > order.shape[0]:
            row = torch.arange(k, device=tokens.device).repeat(bs, 1)
            parents, order = (row - 1 if k > 1 else row[:, :0]), row
        return parents[:bs], order[:bs], tokens, None


@contextmanager
def drafting_itself() -> Iterator[None]:
    """While SGLang's speculative worker is built: its draft worker is a `SelfDraftWorker`."""
    with _replaced(standalone, "StandaloneDraftWorker", SelfDraftWorker):
        yield


@contextmanager
def _replaced(module: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)
