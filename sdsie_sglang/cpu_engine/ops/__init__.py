"""The PyTorch ops. Importing this package registers all of them; SGLang imports some by name as well.

environment.py      thread binding
tensor_parallel.py  sums and gathers of tensor-parallel ranks
dense.py            linear layers, norms, activations, rotary embedding
attention.py        decode and extend attention over the paged KV pool
kv_cache.py         KV pool and slot table
speculation.py      draft trees
sampling.py         the hash behind seeded sampling
unavailable.py      names that must exist at import
"""

from . import attention, dense, environment, sampling, tensor_parallel, unavailable
from .kv_cache import (
    assign_draft_cache_locs_contiguous_cpu,
    assign_extend_cache_locs_cpu,
    assign_req_to_token_pool_cpu,
    copy_all_layer_kv_cache_cpu,
)
from .speculation import (
    build_draft_decode_metadata_cpu,
    build_tree_kernel_efficient_cpu,
    fill_accept_out_cache_loc_cpu,
    fill_bonus_tokens_cpu,
    verify_tree_greedy_cpu,
)
from .unavailable import rotate_input_ids_cpu

__all__ = [
    "assign_draft_cache_locs_contiguous_cpu",
    "assign_extend_cache_locs_cpu",
    "assign_req_to_token_pool_cpu",
    "attention",
    "build_draft_decode_metadata_cpu",
    "build_tree_kernel_efficient_cpu",
    "copy_all_layer_kv_cache_cpu",
    "dense",
    "environment",
    "fill_accept_out_cache_loc_cpu",
    "fill_bonus_tokens_cpu",
    "rotate_input_ids_cpu",
    "sampling",
    "tensor_parallel",
    "unavailable",
    "verify_tree_greedy_cpu",
]
