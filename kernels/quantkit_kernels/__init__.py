"""Triton kernels that serve what quantkit writes, and convert on a GPU; imports nothing of quantkit.

Every serving op has a plain twin of the same name and signature in ``quantkit_kernels.reference``.
"""

from quantkit_kernels.fp8_kv import (
    dequantize_index_keys,
    dequantize_kv,
    dequantize_kv_mla,
    quantize_index_keys,
    quantize_kv,
    quantize_kv_mla,
)
from quantkit_kernels.gemm import int4_gemm
from quantkit_kernels.gqa import gqa_decode
from quantkit_kernels.kv_tags import check_captured, check_pages, check_writes, grant_pages, release_pages
from quantkit_kernels.mla import mla_decode
from quantkit_kernels.modules import Int4Experts, Int4Linear
from quantkit_kernels.moe import int4_moe
from quantkit_kernels.requantize import requantize_fp8_to_int4
from quantkit_kernels.transformers_model import patch
from quantkit_kernels.word_order import repack, unrepack

__all__ = [
    "Int4Experts",
    "Int4Linear",
    "check_captured",
    "check_pages",
    "check_writes",
    "dequantize_index_keys",
    "dequantize_kv",
    "dequantize_kv_mla",
    "gqa_decode",
    "grant_pages",
    "int4_gemm",
    "int4_moe",
    "mla_decode",
    "patch",
    "quantize_index_keys",
    "quantize_kv",
    "quantize_kv_mla",
    "release_pages",
    "repack",
    "requantize_fp8_to_int4",
    "unrepack",
]
