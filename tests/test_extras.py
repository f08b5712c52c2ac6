"""What is missing is named with the extra that brings it; what is called quantkit on PyPI is somebody else's."""

import re
import tomllib
from pathlib import Path

from quantkit.errors import not_installed

ROOT = Path(__file__).parent.parent


def test_an_extra_is_installed_from_the_clone():
    error = not_installed("running a model", "torch", extra="calibrate")
    assert str(error) == (
        "running a model needs torch (not installed here); run pip install '.[calibrate]' in the clone of quantkit"
    )
    assert error.exit_code == 2


def test_every_remedy_is_made_in_one_place_and_every_extra_is_one():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = set()
    for path in sorted((ROOT / "quantkit").rglob("*.py")):
        text = path.read_text()
        assert "pip install" not in text or path.name == "errors.py", path
        named |= set(re.findall(r"""not_installed\(.*extra="([^"]+)"|install_remedy\('([^']+)'\)""", text))
    assert {one or other for one, other in named} == {"calibrate", "imatrix", "kernels", "kv-guard", "ray"}
    assert {one or other for one, other in named} <= extras.keys()
    assert "pip install quantkit" not in (ROOT / "README.md").read_text()
