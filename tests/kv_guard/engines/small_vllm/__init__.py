"""A miniature of vLLM 0.33: what the guard's hooks touch, under the same names and parameters (harness.py).

Its tests drive the scheduler and the pool of a real wheel, too (wheel.py), with the miniature's workers.
"""
