"""Packages that only some functions need, imported when these are called."""

import importlib
from typing import Any


def extra(module: str, what: str) -> Any:
    """Imports a module of an optional package.

    Raises:
        ImportError: the package is not there; the message says how to get it.
    """
    package = module.partition(".")[0]
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            f'{what} needs {package}, which could not be imported: `pip install "jmp-amp[demo]"` ({error})',
            name=package,
        ) from error
