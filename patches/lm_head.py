"""The output head: in INT4 where asked for (`sdsie_sglang/int4/head.py`), else by `sdsie_sglang/skinny_linear.py`."""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from sdsie_sglang import skinny_linear
from sdsie_sglang.int4 import head
from sdsie_sglang.patches.hook import Hook, Kind


def compute_lm_head(original: Callable[..., Tensor], processor: Any, *args: Any, **kwargs: Any) -> Tensor:
    """Logits [rows, vocabulary]."""
    return head.compute_lm_head(partial(skinny_linear.compute_lm_head, original), processor, *args, **kwargs)


HOOK = Hook(
    target="sglang.srt.layers.logits_processor.LogitsProcessor._compute_lm_head",
    kind=Kind.AROUND,
    function=compute_lm_head,
    parameters=("self", "hidden_states", "lm_head", "embedding_bias"),
    why="an unquantised head is multiplied here and not by its own method, so how is chosen here",
    upstream="none",
    remove_when="SGLang multiplies every head by its quantisation method",
)
