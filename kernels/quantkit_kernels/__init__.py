"""GPU kernels that serve what quantkit writes; imports nothing of quantkit."""
