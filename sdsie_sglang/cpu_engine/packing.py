"""Which layers use `weight_packed_linear`: two seams of SGLang, widened for the CPU engine.

SGLang packs bf16 and fp16 linear layers alone, and multiplies with F.linear and torch.matmul otherwise. In
float32 those round a single row differently from several, and take twice as long for 6 rows as for one.
`weight_packed_linear` does neither, so float32 layers and the language-model head should use it as well.
"""

from collections.abc import Callable

import torch
from torch import Tensor


def dtype_is_supported(original: Callable[[Tensor], bool], weight: Tensor) -> bool:
    """AROUND `sglang.srt.layers.amx_utils.dtype_is_supported`: float32 weights are packed too."""
    return weight.dtype == torch.float32 or original(weight)


def use_intel_amx_backend(original: Callable[[torch.nn.Module], bool], layer: torch.nn.Module) -> bool:
    """AROUND `sglang.srt.utils.common.use_intel_amx_backend`: a language-model head is multiplied packed.

    A head that is tied to the embedding keeps its plain weight for lookups; the op makes a packed copy.
    """
    return original(layer) or _is_plain_head(layer)


def _is_plain_head(layer: torch.nn.Module) -> bool:
    weight = getattr(layer, "weight", None)
    if weight is None or not hasattr(layer, "num_embeddings"):
        return False
    return weight.device.type == "cpu" and weight.is_floating_point()
