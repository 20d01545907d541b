"""Optional packages, imported when a function needs them."""

import importlib
from typing import Any


def extra(module: str, feature: str) -> Any:
    """Imports a module of an optional package.

    Args:
        module: the name of the module.
        feature: the function that needs it, for the error message.

    Raises:
        ImportError: the package is not installed. The message contains the `pip install` command.
    """
    package = module.partition(".")[0]
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            f"{feature} needs {package}, which could not be imported ({error}); "
            'run `pip install -e ".[demo]"` in a clone of the repository',
            name=package,
        ) from error
