"""Commands run in this process: what runs a model takes seconds to import; processes are for what needs one."""

import pytest

from quantkit.cli.app import app
from quantkit.errors import QuantkitError


def run_inside(*arguments):
    """The exit code, 0 where there is none; a refusal is raised."""
    return app(list(map(str, arguments)), standalone_mode=False) or 0


def refusal(*arguments):
    """The error that a command ends with."""
    with pytest.raises(QuantkitError) as caught:
        run_inside(*arguments)
    return caught.value
