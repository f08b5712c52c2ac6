"""What fits on each rank: weights, KV cache and overhead, predicted before anything is loaded."""
