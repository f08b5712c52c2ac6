"""What one consumer wants on disk, one file each. A new one is a new file: every module beside this is imported."""

import importlib
import pkgutil

from quantkit.layouts.layout import LAYOUTS, READERS, Layout, Reader, StoredPart

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

__all__ = ["LAYOUTS", "READERS", "Layout", "Reader", "StoredPart"]
