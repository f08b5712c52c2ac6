"""Scales of FP8 KV caches: chosen from statistics, judged by engine and backend, written where an engine reads them."""
