"""Faults, each a script of what an engine must not do."""
