"""What each gear needs prepared: attention backends and CUDA graphs, built once at start.

SGLang already bundles them as a SpecRuntimeState and swaps a whole bundle at once. Gear K takes
SGLang's own bundle for K steps, except that the pass which updates the draft's KV is two tokens
wide for every K and so shared by all of them; a wide one makes up for a stretch of gear 0. Gear 0's
bundle holds an ordinary decode graph.
"""

import dataclasses
import logging
from typing import Any

from sglang.srt.environ import envs
from sglang.srt.model_executor.runner import DecodeCudaGraphRunner
from sglang.srt.speculative.adaptive_runtime_state import SpecRuntimeState
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from sdsie_sglang.worker.drafter import STEADY_WIDTH, WIDE_WIDTH
from sdsie_sglang.worker.prepared import logged
from sdsie_sglang.worker.self_draft import SelfDraftWorker

# SGLang logs each swap of a bundle at INFO; with a gate that is several lines a second.
SWAP_LOGGER = "sglang.srt.speculative.eagle_worker_v2"


def _is_not_a_swap(record: logging.LogRecord) -> bool:
    return "Switch adaptive runtime state" not in str(record.msg)


def silence_swaps() -> None:
    logging.getLogger(SWAP_LOGGER).addFilter(_is_not_a_swap)


def build_gears(
    worker: Any, gears: tuple[int, ...], graphs: bool
) -> tuple[dict[int, SpecRuntimeState], dict[int, Any]]:
    """Builds every gear's bundle and the draft's captured extend passes by width, and logs what each cost.

    Args:
        worker: the speculative worker, its start-up graphs not yet captured for any gear.
        gears: ascending, 0 first.
        graphs: whether CUDA graphs are captured.
    """
    bundles: dict[int, SpecRuntimeState] = {}
    if worker.resolution is not None:
        for name, k in (("gear 0", 0), ("gear R", 1)):
            with logged(worker, name):
                bundles[k] = worker.resolution.build(lambda: _build_plain(worker, graphs), k)
        return {k: bundles[min(k, 1)] for k in gears}, {}
    drafts_itself = isinstance(worker.draft_worker, SelfDraftWorker)
    extend, extend_graphs = ({}, {}) if drafts_itself else _build_extends(worker, graphs)
    for k in gears:
        with logged(worker, f"gear {k}"):
            if k == 0:
                bundle = _build_plain(worker, graphs)
            else:
                with envs.SGLANG_DISABLE_DRAFT_EXTEND_CUDA_GRAPH.override(True):
                    bundle = worker.build_adaptive_runtime_state(k + drafts_itself, k + 1)
        bundles[k] = dataclasses.replace(bundle, speculative_num_steps=k, **extend)
    return bundles, extend_graphs


def _build_extends(worker: Any, graphs: bool) -> tuple[dict[str, Any], dict[int, Any]]:
    """The narrow pass's backend for every bundle, and the graphs of both widths."""
    draft_worker, runners, narrow = worker.draft_worker, {}, {}
    for width in (WIDE_WIDTH, STEADY_WIDTH) if graphs else (STEADY_WIDTH,):
        with logged(worker, f"draft extend of {width}"), worker._override_worker_state(width - 1, width):
            draft_worker.speculative_num_steps = 1  # no graph of draft steps; put back with the rest
            draft_worker.init_attention_backend()
            draft_worker._capture_cuda_graphs()
            runners[width] = draft_worker.cuda_graph_runner_for_draft_extend
            narrow = {
                "draft_extend_attn_backend": draft_worker.draft_extend_attn_backend,
                "cuda_graph_runner_for_draft_extend": runners[width],
            }
    return narrow, runners


def _build_plain(worker: Any, graphs: bool) -> SpecRuntimeState:
    runner = worker.target_worker.model_runner
    workspace = runner.init_new_workspace
    try:  # a backend of its own: another one's init_cuda_graph_state would free the verify graph's buffers
        backend = runner._get_attention_backend(init_new_workspace=True)
    finally:
        runner.init_new_workspace = workspace
    graph = None
    if graphs:
        # The runner captures TARGET_VERIFY only because its model runner says it is speculative.
        algorithm, runner.spec_algorithm = runner.spec_algorithm, SpeculativeAlgorithm.NONE
        try:
            graph = DecodeCudaGraphRunner(
                runner, attn_backend=backend, speculative_num_steps=0, speculative_num_draft_tokens=1
            )
        finally:
            runner.spec_algorithm = algorithm
    return SpecRuntimeState(
        speculative_num_steps=0,
        speculative_num_draft_tokens=1,
        draft_attn_backend=None,
        cuda_graph_runner=None,
        target_attn_backend=backend,
        target_graph_runner=graph,
        draft_extend_attn_backend=None,
        cuda_graph_runner_for_draft_extend=None,
    )
