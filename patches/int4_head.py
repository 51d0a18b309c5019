"""The output head in INT4, where asked for: see `sdsie_sglang/int4/head.py`."""

from sdsie_sglang.int4.head import compute_lm_head
from sdsie_sglang.patches.hook import Hook, Kind

HOOK = Hook(
    target="sglang.srt.layers.logits_processor.LogitsProcessor._compute_lm_head",
    kind=Kind.AROUND,
    function=compute_lm_head,
    parameters=("self", "hidden_states", "lm_head", "embedding_bias"),
    why="an unquantised head is multiplied here and not by its own method, so its INT4 weight is chosen here",
    upstream="none",
    remove_when="SGLang multiplies every head by its quantisation method",
)
