"""An INT4 output head beside a full-precision one.

SGLang multiplies by an unquantised head in its logits processor and not by the head's own method, so the
choice is made around that place. A head that is tied to the embedding is an embedding for SGLang: it keeps its
weight for look-ups, and has a second, INT4 one for the product.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sdsie_sglang.int4.precision import is_int4
from sdsie_sglang.int4.settings import CALIBRATIONS

_CALIBRATION = "sdsie_int4_head"


def mark_possible_head(embedding: torch.nn.Module, calibration: str) -> None:
    """If this embedding turns out to be the output head too, its product is INT4.

    That is known at its first use, which is the warm-up before the first graph is captured.
    """
    setattr(embedding, _CALIBRATION, "mse" if CALIBRATIONS[calibration].needs_text else calibration)


def compute_lm_head(
    original: Callable[..., Tensor],
    processor: Any,
    hidden_states: Tensor,  # [rows, hidden]
    lm_head: torch.nn.Module,
    embedding_bias: Tensor | None = None,
    **kwargs: Any,
) -> Tensor:
    """AROUND `LogitsProcessor._compute_lm_head`: logits [rows, vocabulary], by INT4 where that is what runs."""
    from sdsie_sglang.int4.method import ATTRIBUTE, quantised

    calibration = getattr(lm_head, _CALIBRATION, None)
    if calibration is not None and not hasattr(lm_head, ATTRIBUTE):
        setattr(lm_head, ATTRIBUTE, quantised(lm_head.weight.data, calibration))
    if hasattr(lm_head, ATTRIBUTE) and (is_int4() or calibration is not None):
        return getattr(lm_head, ATTRIBUTE).multiply(hidden_states, embedding_bias)
    return original(processor, hidden_states, lm_head, embedding_bias, **kwargs)
