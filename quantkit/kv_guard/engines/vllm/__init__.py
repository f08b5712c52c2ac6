"""The plugin of vLLM 0.33; what it sees, and what not, says plugin.py."""
