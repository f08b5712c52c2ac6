"""Files that a command writes beside its result lie in no checkpoint: nothing is written into a source, and no manifest
of an output would name them.
"""

from pathlib import Path

from quantkit.checkpoint.file_names import CONFIG_NAME
from quantkit.errors import UsageError


def check_apart(path: Path, option: str) -> None:
    """Raises UsageError where the file would lie in a checkpoint, or in a folder of one, by whatever links."""
    for folder in path.resolve().parents:
        if (folder / CONFIG_NAME).is_file() and any(folder.glob("*.safetensors")):
            raise UsageError(
                f"{option} {path} lies in the source or in another checkpoint, {folder}",
                remedy="give a file apart from it",
            )
