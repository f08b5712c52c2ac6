"""Configs of published checkpoints: those of the shipped recipes, and a few more that only tests want."""

import json
from pathlib import Path
from typing import Any

from quantkit.recipe_files import recipe_config, recipe_paths

_CONFIGS = Path(__file__).parent / "configs"
NAMES = (*recipe_paths(), *sorted(path.stem for path in _CONFIGS.glob("*.json")))


def published_config(name: str) -> dict[str, Any]:
    """By recipe name, or by the name of a file beside the tests."""
    path = _CONFIGS / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else recipe_config(name)
