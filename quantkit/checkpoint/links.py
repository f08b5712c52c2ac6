"""Which links are followed: into the checkpoint itself, and from a hub cache's snapshot into its ``blobs``."""

from pathlib import Path


class Boundary:
    """Where the files of a checkpoint directory may really lie."""

    def __init__(self, directory: Path) -> None:
        root = directory.resolve()
        self._places = [root]
        blobs = root.parent.parent / "blobs"
        if root.parent.name == "snapshots" and blobs.is_dir():
            self._places.append(blobs)

    def holds(self, path: Path) -> bool:
        """Whether a path, links followed, stays inside."""
        target = path.resolve()
        return any(target.is_relative_to(place) for place in self._places)
