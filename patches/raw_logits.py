"""Keeps the target's raw logits when verification is about to edit them in place.

The clutch's entropy is that of the model's own distribution: before penalties, logit bias and
grammar. `eagle_sample` adds those into the logits it is given.
"""

from typing import Any

import torch

from sdsie_sglang.config import ALGORITHM
from sdsie_sglang.patches.hook import Hook, Kind

_ATTRIBUTE = "sdsie_raw_logits"


def raw_logits_of(logits_output: Any) -> torch.Tensor:
    """[rows, vocab]: what the target computed, whatever sampling did to it since."""
    return getattr(logits_output, _ATTRIBUTE, logits_output.next_token_logits)


def _will_edit(batch: Any, grammar_mask: Any) -> bool:
    info = batch.sampling_info
    return (
        grammar_mask is not None
        or info.acc_additive_penalties is not None
        or info.acc_scaling_penalties is not None
        or info.logit_bias is not None
        or not info.is_all_greedy
    )


def keep_raw_logits(
    verify_input: Any, batch: Any, logits_output: Any, grammar_mask: Any = None, *args: Any, **kwargs: Any
) -> None:
    if batch.spec_algorithm.name == ALGORITHM and _will_edit(batch, grammar_mask):
        setattr(logits_output, _ATTRIBUTE, logits_output.next_token_logits.clone())


HOOK = Hook(
    target="sglang.srt.speculative.eagle_utils.eagle_sample",
    kind=Kind.BEFORE,
    function=keep_raw_logits,
    parameters=("verify_input", "batch", "logits_output", "grammar_mask"),
    why="entropy is defined on the target's raw logits; verification edits them in place",
    upstream="none",
    remove_when="eagle_sample leaves its input alone or reports the raw logits",
)
