"""Parts of a recipe that are data and nothing else: strict and frozen, as all of it is."""

from pydantic import BaseModel, ConfigDict


class Strict(BaseModel):
    """No unknown keys, no loose types, no changes."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class Source(Strict):
    """A repository of the hub."""

    hub_id: str
    revision: str = "main"


class Calibration(Strict):
    """The inputs that a method saw. ``tokens``: sha256 of their shape and ids.

    ``streaming``: the model was run here, layer by layer; else by llm-compressor, as a whole.
    """

    tokens: str
    sequences: int
    length: int
    streaming: bool
