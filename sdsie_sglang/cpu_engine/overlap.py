"""Overlap scheduling with speculation on the CPU engine, which SGLang switches off for one Triton-only call."""

from typing import Any

from torch import Tensor


def keep_overlap_schedule(server_args: Any) -> None:
    """Leaves the overlap schedule as it was asked for.

    Replaces `sglang.srt.arg_groups.speculative_hook._disable_overlap_schedule_for_cpu`.
    """


def gather_spec_extras(
    indices: Tensor,  # (bs,) rows of the request pool
    topk_p: Tensor,
    topk_index: Tensor,
    output_tokens: Tensor,
    hidden_states: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Rows of the relay buffers; replaces `sglang.srt.managers.overlap_utils.gather_spec_extras`."""
    hidden = None if hidden_states is None else hidden_states[indices]
    return topk_p[indices], topk_index[indices], output_tokens[indices], hidden
