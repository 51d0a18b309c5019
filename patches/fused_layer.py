"""A decoder layer's products with what lies between them: see `sdsie_sglang/fused_layer.py`."""

from sdsie_sglang.fused_layer import forward, link_layers
from sdsie_sglang.patches.hook import Hook, Kind

LAYER = Hook(
    target="sglang.srt.models.llama.LlamaDecoderLayer.forward",
    kind=Kind.AROUND,
    function=forward,
    parameters=("self", "positions", "hidden_states", "forward_batch", "capture_output"),
    why="the kernels between a decode cycle's products keep each product from asking for its weights early",
    upstream="none",
    remove_when="SGLang runs them inside its products",
)

LINK = Hook(
    target="sglang.srt.models.llama.LlamaModel.__init__",
    kind=Kind.AFTER,
    function=link_layers,
    parameters=("self", "config", "quant_config", "prefix"),
    why="down_proj needs the weight of the next layer's norm",
    upstream="none",
    remove_when="the layer's patch goes",
)
