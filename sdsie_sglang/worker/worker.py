"""The speculative worker that SGLang's scheduler drives."""

import logging
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.model_executor.cuda_graph_config import Backend, Phase, check_cuda_graph_backend
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
from sglang.srt.runtime_context import get_memory, get_observability, get_parallel, get_schedule
from sglang.srt.server_args import ServerArgs
from sglang.srt.speculative.adaptive_runtime_state import SpecRuntimeState
from sglang.srt.speculative.eagle_info import EagleDraftInput
from sglang.srt.speculative.standalone_worker_v2 import StandaloneWorkerV2

from sdsie_sglang.calibration.conditions import conditions_of, table_warning
from sdsie_sglang.config import config_from_env
from sdsie_sglang.int4.both import add_int4
from sdsie_sglang.kernels.entropy import entropy_bits
from sdsie_sglang.live import live_line, set_live
from sdsie_sglang.patches.raw_logits import raw_logits_of
from sdsie_sglang.telemetry.metrics import open_metrics
from sdsie_sglang.telemetry.trace import open_trace
from sdsie_sglang.worker.cycle import Cycle, HostCopy
from sdsie_sglang.worker.draft_graph import build_draft_graphs
from sdsie_sglang.worker.draft_history import DraftHistory
from sdsie_sglang.worker.drafter import STEADY_WIDTH, Drafter
from sdsie_sglang.worker.gate import Gate
from sdsie_sglang.worker.gear_resources import build_gears, silence_swaps
from sdsie_sglang.worker.plain_decode import decode_plain
from sdsie_sglang.worker.rank_check import PREFILL, RankCheck
from sdsie_sglang.worker.request_state import RequestState, attach, find_state, needs_plain, state_of
from sdsie_sglang.worker.resolution import ResolutionGear
from sdsie_sglang.worker.self_draft import SelfDraftWorker, drafting_itself
from sdsie_sglang.worker.self_drafter import SelfDrafter
from sdsie_sglang.worker.sync_check import syncs_are_errors

logger = logging.getLogger(__name__)

CHUNK_TOKENS = 8192  # of one catch-up pass, where SGLang does not chunk prefills


class GearNotExecuted(RuntimeError):
    """What ran is not what was decided. A run that goes on after this would measure a fiction."""


class SdsieWorker(StandaloneWorkerV2):
    """Decides a gear for each decode cycle and runs that gear and nothing else."""

    def __init__(self, server_args: ServerArgs, gpu_id: int, nccl_port: int, target_worker: Any) -> None:
        config = config_from_env()
        with nullcontext() if config.needs_draft_model else drafting_itself():
            super().__init__(server_args, gpu_id, nccl_port, target_worker)
        model = target_worker.model_runner.model
        if config.drafts_itself:
            add_int4(model, config.int4)
        self.resolution: ResolutionGear | None = None
        if config.resolution_layers is not None:
            self.resolution = ResolutionGear(model, config.resolution_layers, config.int4)
        parallel = get_parallel()
        self._graphs = torch.device(self.device).type == "cuda" and not check_cuda_graph_backend(
            Phase.DECODE, Backend.DISABLED
        )
        labels = {
            "model_name": server_args.served_model_name or server_args.model_path,
            "tp_rank": str(parallel.tp_rank),
            "dp_rank": str(parallel.dp_rank or 0),
            **(get_observability().extra_metric_labels or {}),
        }
        if config.replica is not None:
            labels["replica"] = config.replica
        first_rank = parallel.tp_rank == 0
        self.gate = Gate(
            config.policy,
            config.built_gears(graphs=self._graphs),
            lag=1 if get_schedule().disable_overlap_schedule else 2,
            trace=open_trace(
                config.trace,
                tp_rank=parallel.tp_rank,
                dp_rank=parallel.dp_rank or 0,
                every_rank=config.check_ranks,
                replica=config.replica,
            ),
            metrics=open_metrics(enabled=get_observability().enable_metrics and first_rank, labels=labels),
        )
        self._check_syncs = config.check_syncs
        self._wants_draft_graph, self._draft_stop = config.wants_draft_graph, config.draft_stop
        self._rank_check = None
        if config.check_ranks and parallel.tp_size > 1:
            self._rank_check = RankCheck(parallel.tp_group.cpu_group)
        silence_swaps()
        conditions = conditions_of(server_args, config)
        set_live({"dp_rank": parallel.dp_rank or 0, "replica": config.replica, "conditions": conditions.model_dump()})
        logger.info(live_line())
        if self.resolution is not None:
            set_live({"resolution": {"layers": sorted(self.resolution.names), "calibration": config.int4.calibration}})
            if first_rank:
                logger.warning(self.resolution.warning())
        if first_rank and (warning := table_warning(config.policy.cost_table, conditions)):
            logger.warning(warning)

    def init_cuda_graphs(self) -> None:
        """Called by SGLang once pools and backends exist."""
        super().init_cuda_graphs()
        self._bundles, extend_graphs = build_gears(self, self.gate.gears, self._graphs)
        self._in_force: SpecRuntimeState | None = None
        self._put_in_force(self._bundles[max(self.gate.gears)])
        self.drafter = self._build_drafter(extend_graphs)
        self._stub_topk = (
            torch.zeros((self.req_to_token_pool.size, 1), dtype=torch.float32, device=self.device),
            torch.zeros((self.req_to_token_pool.size, 1), dtype=torch.int64, device=self.device),
        )

    def _build_drafter(self, extend_graphs: dict[int, Any]) -> Drafter | SelfDrafter:
        req_to_token = self.req_to_token_pool.req_to_token
        if isinstance(self._draft_worker, SelfDraftWorker):
            return SelfDrafter(self._draft_worker, self._target_worker, req_to_token)
        kv_slots = self._target_worker.model_runner.token_to_kv_pool.size + self.page_size
        history = DraftHistory(req_to_token, 0 if get_memory().disable_radix_cache else kv_slots)
        whole = None
        if self._wants_draft_graph:
            runner, gears = self._draft_worker.draft_runner, [k for k in self.gate.gears if k]
            narrow = extend_graphs.get(STEADY_WIDTH)  # None where SGLang captures no such pass
            if not self._graphs or narrow is not None:
                sizes = None if narrow is None else narrow.capture_bs
                whole = build_draft_graphs(runner, history, gears, sizes, STEADY_WIDTH, self._draft_stop)
        return Drafter(
            self._draft_worker,
            self._target_worker,
            history,
            extend_graphs,
            chunk_tokens=chunk if (chunk := get_schedule().chunked_prefill_size or 0) > 0 else CHUNK_TOKENS,
            whole=whole,
        )

    def weight_update_runners(self) -> list[tuple[str, Any]]:
        """A self-draft has no weights of its own."""
        return [] if isinstance(self._draft_worker, SelfDraftWorker) else super().weight_update_runners()

    def _draft_model_runners(self) -> tuple[Any, ...]:
        """For SGLang's accounting of the draft's KV pools: a self-draft's is the target's."""
        return () if isinstance(self._draft_worker, SelfDraftWorker) else super()._draft_model_runners()

    @property
    def last_shared_read_runner(self) -> Any:
        """The last phase of every cycle that reads the scheduler's buffers is the target's."""
        return self._target_worker.model_runner

    def forward_batch_generation(
        self,
        batch: Any,
        on_publish: Callable[[torch.Tensor], None] | None = None,
        grammar_barrier: Callable[[], None] | None = None,
        pp_proxy_tensors: Any = None,
    ) -> GenerationBatchResult:
        """One prefill, or one decode cycle in the gear that the gate decides."""
        if batch.forward_mode.is_extend():
            return self._prefill(batch, on_publish)
        states = [state_of(req) for req in batch.reqs]
        k = self.gate.next_gear(states)
        self._compare_ranks(k, batch, states)
        with syncs_are_errors(self._check_syncs):
            self._shift(k)
            return self._run_cycle(batch, states, k, on_publish, grammar_barrier)

    def on_verify_complete_cpu(self, num_correct_drafts_per_req: list[int], batch_size: int = 0) -> None:
        """SGLang processes the oldest cycle's result: its numbers are on the host by now."""
        self.gate.settle_oldest()

    # -- phases -----------------------------------------------------------------------------

    def _prefill(self, batch: Any, on_publish: Callable[[torch.Tensor], None] | None) -> GenerationBatchResult:
        """The target alone. The draft sees the prompt when it is first engaged."""
        states = [self._begin(req) for req in batch.reqs]
        self._compare_ranks(PREFILL, batch, states)
        self._target_worker.model_runner.shared_read_done_event = None
        result = self._target_worker.forward_batch_generation(
            batch, capture_hidden_mode=None if batch.return_hidden_states else CaptureHiddenMode.NULL
        )
        result.new_seq_lens = batch.seq_lens
        if on_publish is not None:
            on_publish(result.new_seq_lens)
        self.drafter.history.prefilled(batch, states)
        result.next_draft_input = self._pending(result.next_token_ids)
        return result

    def _begin(self, req: Any) -> RequestState:
        state = find_state(req)
        if state is None:
            state = self.gate.new_state()
            state.plain_only = self.resolution is None and needs_plain(req)
            attach(req, state)
        elif state.retractions != req.retraction_count:
            self.gate.restart(state)
            state.prefilled = 0
        state.retractions = req.retraction_count
        return state

    def _compare_ranks(self, gear: int, batch: Any, states: list[RequestState]) -> None:
        if self._rank_check is not None:
            self._rank_check.compare(gear, [req.rid for req in batch.reqs], states)

    def _shift(self, k: int) -> None:
        self._put_in_force(self._bundles[k])

    def _put_in_force(self, bundle: SpecRuntimeState) -> None:
        if bundle is not self._in_force:
            # SGLang's swap skips a bundle of the same steps: its own of the start, and gear R beside gear 0.
            self.speculative_num_steps = -1
            self.apply_runtime_state(bundle)
            self._in_force = bundle

    def _run_cycle(
        self,
        batch: Any,
        states: list[RequestState],
        k: int,
        on_publish: Callable[[torch.Tensor], None] | None,
        grammar_barrier: Callable[[], None] | None,
    ) -> GenerationBatchResult:
        """Runs gear `k` as far as the worker was shifted, and fails if that is not what ran."""
        passes_before = self.drafter.passes.total
        resolution = self.resolution
        int4_before = resolution.executed if resolution is not None else 0
        self._target_worker.model_runner.shared_read_done_event = None
        if self.speculative_num_steps == 0:
            with resolution.running(k) if resolution is not None else nullcontext():
                result, numbers = decode_plain(
                    batch, states, self._target_worker, self.drafter.history, on_publish, grammar_barrier
                )
            bonus = result.next_token_ids
            catch_up_passes = 0
        else:
            result, numbers = self._run_speculative(batch, states, on_publish, grammar_barrier)
            bonus = result.next_draft_input.bonus_tokens
            catch_up_passes = self.drafter.catch_up_passes
        result.next_draft_input = self._pending(bonus)
        draft_passes = self.drafter.passes.total - passes_before
        drafted = k if resolution is None else 0
        int4_layers = resolution.executed - int4_before if resolution is not None else 0
        wanted_int4 = resolution.expected(k) if resolution is not None else 0
        verified = result.speculative_num_draft_tokens
        if draft_passes != drafted + catch_up_passes or verified != drafted + 1 or int4_layers != wanted_int4:
            raise GearNotExecuted(
                f"gear {k if resolution is None or not k else 'R'} was decided, but {draft_passes} draft passes ran "
                f"({catch_up_passes} to catch up), {verified} tokens a request were verified and {int4_layers} layers "
                f"ran in INT4 instead of {wanted_int4}"
            )
        self.gate.launched(
            Cycle(
                number=self.gate.cycles - 1,
                k=k,
                draft_passes=draft_passes,
                catch_up_passes=catch_up_passes,
                rids=[req.rid for req in batch.reqs],
                states=states,
                gates=[state.gate for state in states],
                numbers=HostCopy(numbers),
                int4_layers=int4_layers,
                stops=k > 0 and self.drafter.passes_run is not None,
            )
        )
        return result

    def _run_speculative(
        self,
        batch: Any,
        states: list[RequestState],
        on_publish: Callable[[torch.Tensor], None] | None,
        grammar_barrier: Callable[[], None] | None,
    ) -> tuple[GenerationBatchResult, torch.Tensor]:
        """Draft, verify, publish. Returns with the result what `Cycle.numbers` holds."""
        k, bs = self.speculative_num_steps, len(states)
        batch.spec_info = verify_input = self.drafter.propose(batch, states, k)
        rows, seq_lens = batch.req_pool_indices, batch.seq_lens
        result = self.verify(batch, grammar_barrier=grammar_barrier)
        if on_publish is not None:
            on_publish(result.new_seq_lens)
        batch.req_pool_indices, batch.seq_lens = rows, seq_lens
        logits, every = raw_logits_of(result.logits_output), self.gate.settings.fold == "all"
        entropies, passes_run = bs * (k + 1) if every else bs, self.drafter.passes_run
        numbers = torch.empty(bs + entropies + (passes_run is not None), dtype=torch.float32, device=logits.device)
        chain = verify_input.draft_token.view(bs, k + 1)
        last = self.drafter.history.close_window(rows, result, chain, numbers)
        entropy_bits(logits, None if every else last, out=numbers[bs : bs + entropies])
        if passes_run is not None:
            numbers[-1:].copy_(passes_run)
        self.drafter.verified(states)
        return result, numbers

    def _pending(self, bonus_tokens: torch.Tensor) -> EagleDraftInput:
        """What SGLang carries to the next cycle: the drawn token. It slices the top-k fields when a
        batch changes without overlap, so they are given a shape; nothing reads their values."""
        n = bonus_tokens.shape[0]
        return EagleDraftInput(
            bonus_tokens=bonus_tokens, topk_p=self._stub_topk[0][:n], topk_index=self._stub_topk[1][:n]
        )
