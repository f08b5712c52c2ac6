"""Statistics of what a model's modules are fed and of what its KV cache holds, layer by layer."""
