"""GPTQ: INT4 that makes the outputs of modules right for the inputs that calibration saw; alone, or layer by layer."""

from quantkit.gptq.factor import DAMPING, Factor, blend, factorize
from quantkit.gptq.quantize import CodesAndScale, quantize_gptq

__all__ = ["DAMPING", "CodesAndScale", "Factor", "blend", "factorize", "quantize_gptq"]
