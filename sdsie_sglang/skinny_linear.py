"""Unquantised linear layers of a decode cycle, a few rows wide, by this project's product where it is the faster one.

A cycle reads every weight once and computes next to nothing, so its time is how fast weights stream. Each row's
result is the same bits whatever the other rows are. Used where a tile was measured for the shape and the GPU
(`kernels/skinny_gemm/tuned`); everything else stays SGLang's.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from sdsie_sglang.config import config_from_env
from sdsie_sglang.kernels.skinny_gemm import skinny_gemm, skinny_gemm_applies


@cache
def _wanted() -> bool:
    from sglang.srt.batch_invariant_ops import is_batch_invariant_mode_enabled

    return not config_from_env().no_skinny_gemm and not is_batch_invariant_mode_enabled()


def _applies(x: Tensor, layer: torch.nn.Module) -> bool:
    return skinny_gemm_applies(x, layer.weight) and _wanted()


def apply(
    original: Callable[..., Tensor], method: Any, layer: torch.nn.Module, x: Tensor, bias: Tensor | None = None
) -> Tensor:
    """AROUND `UnquantizedLinearMethod.apply`: x [..., in] to [..., out]."""
    return skinny_gemm(x, layer.weight, bias) if _applies(x, layer) else original(method, layer, x, bias)


def compute_lm_head(
    original: Callable[..., Tensor],
    processor: Any,
    hidden_states: Tensor,  # [rows, hidden]
    lm_head: torch.nn.Module,
    embedding_bias: Tensor | None = None,
    **kwargs: Any,
) -> Tensor:
    """AROUND `LogitsProcessor._compute_lm_head`: logits [rows, vocabulary]."""
    from sglang.srt.layers.logits_processor import should_apply_lm_head_quant_method

    own = should_apply_lm_head_quant_method(lm_head, getattr(lm_head, "quant_method", None))
    wide = processor.use_fp32_lm_head or processor.use_fp32_lm_head_output
    weighted = isinstance(getattr(lm_head, "weight", None), Tensor) and not hasattr(lm_head, "set_lora")
    if weighted and not own and not wide and embedding_bias is None and _applies(hidden_states, lm_head):
        return skinny_gemm(hidden_states, lm_head.weight)
    return original(processor, hidden_states, lm_head, embedding_bias, **kwargs)
