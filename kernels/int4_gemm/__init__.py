"""INT4 weight, bf16/fp16 activation matrix product: quantise, pack, multiply."""

from sdsie_sglang.kernels.int4_gemm.gemm import int4_gemm, prepare, tune_shape
from sdsie_sglang.kernels.int4_gemm.pack import PackedWeight, QuantizedWeight, pack, quantize, unpack
from sdsie_sglang.kernels.int4_gemm.reference import dequantize, int4_gemm_reference

__all__ = [
    "PackedWeight",
    "QuantizedWeight",
    "dequantize",
    "int4_gemm",
    "int4_gemm_reference",
    "pack",
    "prepare",
    "quantize",
    "tune_shape",
    "unpack",
]
