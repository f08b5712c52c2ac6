"""Offline INT4 quantization of FP8 mixture-of-experts checkpoints."""

__version__ = "0.1.0"
