"""Conversions whose codes and scales come from a method that sees a model's inputs: ours, or llm-compressor's."""
