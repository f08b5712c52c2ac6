"""Is an output whole, undamaged, consistent with its config, and close to its source?"""
