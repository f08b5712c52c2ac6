"""Architectures, one file each. A new one is a new file: every module beside this one is imported here."""

import importlib
import pkgutil

from quantkit.families.config_values import Config, text_config
from quantkit.families.family import FAMILIES, NEVER_QUANTIZED, ExpectedTensor, Family, Role

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")


def family_of(config: Config) -> Family:
    """The family of a config by its ``model_type``; the generic one where none claims it."""
    model_type = config.get("model_type")
    claimed = (family for family in FAMILIES.values() if model_type in family.model_types)
    return next(claimed, FAMILIES["generic"])


__all__ = [
    "FAMILIES",
    "NEVER_QUANTIZED",
    "Config",
    "ExpectedTensor",
    "Family",
    "Role",
    "family_of",
    "text_config",
]
