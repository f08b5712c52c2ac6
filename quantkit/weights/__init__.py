"""The logical weights of a checkpoint: which stored parts make each, and in which format."""
