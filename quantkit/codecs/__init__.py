"""Arithmetic of one storage format per file: no names, no packing conventions, no files."""
