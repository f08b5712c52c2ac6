"""How the scale of an INT4 group is chosen: by a search, or by the largest magnitude."""

from typing import Literal

ScaleChoice = Literal["search", "absmax"]
