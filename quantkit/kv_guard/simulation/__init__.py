"""A serving engine in miniature whose pages are tagged, and faults that try to get past the guard."""
