"""Manifests of outputs: which files, how long, which hash."""
