"""Checkpoints on disk: what they hold, how they are read, and how an output appears whole or not at all."""
