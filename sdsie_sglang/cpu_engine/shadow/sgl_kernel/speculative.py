"""`sgl_kernel.speculative`, as the n-gram worker imports it."""

from sdsie_sglang.cpu_engine.ops.speculation import reconstruct_indices_from_tree_mask

__all__ = ["reconstruct_indices_from_tree_mask"]
