"""Rows of stored source parts -> words and values; the one place that chooses what computes them."""

from quantkit.transcode.devices import ALL_GPUS, CPU, ON_GPU, ChooseKernels, choose_kernels, device_names, first_device
from quantkit.transcode.given import with_words
from quantkit.transcode.kernels import COMPOSED, FUSED_CPU, Kernels, Quantized, kernels_for, weighed_rows
from quantkit.transcode.native import has_row_blocks, read_words
from quantkit.transcode.recover import recover_rows
from quantkit.transcode.rows import Rows, check_copied, read_rows
from quantkit.transcode.searched import search_values

__all__ = [
    "ALL_GPUS",
    "COMPOSED",
    "CPU",
    "FUSED_CPU",
    "ON_GPU",
    "ChooseKernels",
    "Kernels",
    "Quantized",
    "Rows",
    "check_copied",
    "choose_kernels",
    "device_names",
    "first_device",
    "has_row_blocks",
    "kernels_for",
    "read_rows",
    "read_words",
    "recover_rows",
    "search_values",
    "weighed_rows",
    "with_words",
]
