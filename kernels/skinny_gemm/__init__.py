"""A few activation rows times an unquantised weight, at memory speed."""

from sdsie_sglang.kernels.skinny_gemm.gemm import skinny_gemm, skinny_gemm_applies
from sdsie_sglang.kernels.skinny_gemm.norm_gemm import NormedStream, add_norm_gemm, has_norm_tile, normed_gemm
from sdsie_sglang.kernels.skinny_gemm.reference import skinny_gemm_reference

__all__ = [
    "NormedStream",
    "add_norm_gemm",
    "has_norm_tile",
    "normed_gemm",
    "skinny_gemm",
    "skinny_gemm_applies",
    "skinny_gemm_reference",
]
