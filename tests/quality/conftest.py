"""The model that the scripts make, after two steps of training."""

import sys

import pytest

from scripts import train_tiny_glm


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """The smallest training: it shows that everything fits, not that anything was learnt."""
    directory = tmp_path_factory.mktemp("models") / "glm-tiny"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["train", str(directory), "--steps", "2", "--batch", "1", "--threads", "1"])
        patch.setattr(train_tiny_glm, "NUM_WINDOWS", {"calibration": 2, "evaluation": 2})
        train_tiny_glm.main()
    return directory
