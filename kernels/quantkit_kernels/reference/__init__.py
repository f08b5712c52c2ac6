"""Plain torch twins of the serving kernels: slow, and the specification of their bytes."""

from quantkit_kernels.reference.kv_cache import (
    dequantize_index_keys,
    dequantize_kv,
    dequantize_kv_mla,
    quantize_index_keys,
    quantize_kv,
    quantize_kv_mla,
)

__all__ = [
    "dequantize_index_keys",
    "dequantize_kv",
    "dequantize_kv_mla",
    "quantize_index_keys",
    "quantize_kv",
    "quantize_kv_mla",
]
