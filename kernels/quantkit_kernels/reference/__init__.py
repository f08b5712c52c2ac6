"""Plain torch twins of the serving kernels, with the same signatures: slow, and their specification.

INT4 words are as a checkpoint stores them; what ``repack`` returned is refused.
"""

from quantkit_kernels.reference.attention import gqa_decode, mla_decode
from quantkit_kernels.reference.int4 import dequantize_int4, int4_gemm, int4_moe
from quantkit_kernels.reference.kv_cache import (
    dequantize_index_keys,
    dequantize_kv,
    dequantize_kv_mla,
    quantize_index_keys,
    quantize_kv,
    quantize_kv_mla,
)
from quantkit_kernels.reference.kv_tags import check_captured, check_pages, check_writes, grant_pages, release_pages

__all__ = [
    "check_captured",
    "check_pages",
    "check_writes",
    "dequantize_index_keys",
    "dequantize_int4",
    "dequantize_kv",
    "dequantize_kv_mla",
    "gqa_decode",
    "grant_pages",
    "int4_gemm",
    "int4_moe",
    "mla_decode",
    "quantize_index_keys",
    "quantize_kv",
    "quantize_kv_mla",
    "release_pages",
]
