"""Packages that only some data sets need, imported when needed."""

import importlib
from types import ModuleType

from socflower.errors import DataUnavailable


def optional_package(module: str, *, extra: str, purpose: str) -> ModuleType:
    """Return the imported module; raises DataUnavailable, naming the extra to install, where it is missing."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise DataUnavailable(
            f"{purpose} needs the package {package} ({error}): pip install 'socflower[{extra}]'"
        ) from error
