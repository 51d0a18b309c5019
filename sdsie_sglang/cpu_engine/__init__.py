"""SGLang's CPU engine on PyTorch ops: what a host without a GPU runs.

SGLang's CPU engine needs `sgl_kernel`'s compiled CPU build; PyPI's `sgl_kernel` is a CUDA build that can't be
imported without libcuda. This package brings the ops that a dense decoder needs, plain and under
speculation, as PyTorch code, and makes `import sgl_kernel` find them.

    activation.py      enable(): the one switch; platform_plugin(): the same, called by SGLang itself
    shadow/sgl_kernel  the module that `import sgl_kernel` finds once enabled
    ops/               the ops, one file a concern, registered as torch.ops.sgl_kernel.*
    sampled_verify.py  temperature, top-k, top-p and min-p honoured by the CPU engine's verify
    ranks.py           several ranks on one host
    overlap.py         plain-indexing stand-in for the Triton gather of overlap scheduling

Importing this package imports neither torch nor SGLang.
"""

from .activation import EnableError, enable, is_enabled, platform_plugin

__all__ = ["EnableError", "enable", "is_enabled", "platform_plugin"]
