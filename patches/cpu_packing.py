"""Float32 linear layers through this project's packed product (cpu_engine/packing.py).

Its rows do not depend on how many are computed together, so that one token and a verified chain give
the same bits.
"""

from sdsie_sglang.cpu_engine.packing import dtype_is_supported, use_intel_amx_backend
from sdsie_sglang.patches.hook import Hook, Kind

_WHY = "CPU engine only: SGLang packs no float32 weights, and its plain product rounds one row unlike several"

DTYPE = Hook(
    target="sglang.srt.layers.amx_utils.dtype_is_supported",
    kind=Kind.AROUND,
    function=dtype_is_supported,
    parameters=("weight",),
    why=_WHY,
    upstream="none",
    remove_when="SGLang's CPU engine has a batch-invariant float32 product",
)
LAYER = Hook(
    target="sglang.srt.utils.common.use_intel_amx_backend",
    kind=Kind.AROUND,
    function=use_intel_amx_backend,
    parameters=("layer",),
    why=_WHY,
    upstream="none",
    remove_when="SGLang's CPU engine has a batch-invariant float32 product",
)
