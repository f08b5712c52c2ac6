"""What a calibration found, as a file: inputs of modules, tokens of experts, what the KV cache holds."""
