"""Rows of stored source parts -> rows of stored output parts; the one place that chooses what computes them."""

from quantkit.transcode.devices import CPU, ChooseKernels, choose_kernels
from quantkit.transcode.kernels import COMPOSED, FUSED_CPU, Kernels, Quantized, kernels_for
from quantkit.transcode.rows import Rows, check_copied, read_rows

__all__ = [
    "COMPOSED",
    "CPU",
    "FUSED_CPU",
    "ChooseKernels",
    "Kernels",
    "Quantized",
    "Rows",
    "check_copied",
    "choose_kernels",
    "kernels_for",
    "read_rows",
]
