"""Unquantised layers of a decode cycle by this project's product: see `sdsie_sglang/skinny_linear.py`."""

from sdsie_sglang.patches.hook import Hook, Kind
from sdsie_sglang.skinny_linear import apply

HOOK = Hook(
    target="sglang.srt.layers.quantization.unquant.UnquantizedLinearMethod.apply",
    kind=Kind.AROUND,
    function=apply,
    parameters=("self", "layer", "x", "bias"),
    why="cuBLAS leaves a fifth to a third of the memory bandwidth unused at the few rows of a decode cycle",
    upstream="none",
    remove_when="SGLang offers a bf16 product for 1 to 16 rows that is as fast and does not depend on their number",
)
