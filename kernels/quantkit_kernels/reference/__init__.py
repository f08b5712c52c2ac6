"""Plain torch twins of the serving kernels, with the same signatures: their specification."""
