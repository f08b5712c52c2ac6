"""Plugins of engines. A module here imports its engine by name, and only when the engine has loaded it."""
