"""Every hook of this project, in the order in which README.md lists them."""

from sdsie_sglang.cpu_engine import is_enabled
from sdsie_sglang.patches import (
    cpu_packing,
    cpu_ranks,
    cpu_sampling,
    fused_attention,
    fused_layer,
    internal_state,
    lm_head,
    meta_info,
    raw_logits,
    replica_watch,
    sampling_filters,
    skinny_linear,
)
from sdsie_sglang.patches.hook import Hook

HOOKS: tuple[Hook, ...] = (
    raw_logits.HOOK,
    meta_info.STREAMER,
    meta_info.META_INFO,
    internal_state.REPORT,
    internal_state.CHANGE,
    internal_state.REFUSE,
    lm_head.HOOK,
    replica_watch.HOOK,
    fused_attention.ATTENTION,  # on the CPU engine for passes of the draft alone, see worker/draft_graph.py
)

# Only where this project's CPU engine runs.
CPU_HOOKS: tuple[Hook, ...] = (
    cpu_sampling.PREPARE,
    cpu_sampling.DRAW,
    cpu_packing.DTYPE,
    cpu_packing.LAYER,
    cpu_ranks.CORES,
    cpu_ranks.GROUPS,
)

GPU_HOOKS: tuple[Hook, ...] = (
    skinny_linear.HOOK,
    fused_layer.LAYER,
    fused_layer.LINK,
    sampling_filters.VERIFY,
    sampling_filters.SOFTMAX,
)


def active_hooks() -> tuple[Hook, ...]:
    """The hooks that belong into this process."""
    return HOOKS + (CPU_HOOKS if is_enabled() else GPU_HOOKS)
