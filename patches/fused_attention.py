"""A decode cycle's attention in one launch: see `sdsie_sglang/fused_attention.py`."""

from sdsie_sglang.fused_attention import forward
from sdsie_sglang.patches.hook import Hook, Kind

ATTENTION = Hook(
    target="sglang.srt.models.llama.LlamaAttention.forward",
    kind=Kind.AROUND,
    function=forward,
    parameters=("self", "positions", "hidden_states", "forward_batch"),
    why="rotation, KV write, planning, attention and combination are five to seven launches a layer",
    upstream="none",
    remove_when="SGLang attends to a few rows in one launch",
)
