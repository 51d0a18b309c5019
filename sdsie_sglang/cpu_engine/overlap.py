"""Overlap scheduling on the CPU engine: its one Triton-only call, as plain indexing."""

from torch import Tensor


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
