"""Keeps what was found out about an object, as long as the object lives."""

import threading
import weakref
from collections.abc import Callable, Hashable
from typing import Any


class Kept:
    """Values by object and key. JAX keeps the jaxprs of inner functions, so what is found out about them is kept too.

    The objects are held weakly and compared by identity. For each, at most `size` values are kept, the newest ones.
    Several threads may use it.
    """

    def __init__(self, size: int = 64) -> None:
        """Takes the number of values to keep for each object."""
        self._size = size
        self._values: dict[int, tuple[Any, dict[Hashable, Any]]] = {}
        self._lock = threading.RLock()

    def __call__(self, owner: Any, key: Hashable, make: Callable[[], Any]) -> Any:
        """Returns the value that is kept for `owner` and `key`, or makes it. It must not hold `owner`."""
        with self._lock:
            number = id(owner)
            if number not in self._values:
                self._values[number] = weakref.ref(owner, lambda _: self._values.pop(number, None)), {}
            _, values = self._values[number]
            if key not in values:
                value = make()
                while len(values) >= self._size:
                    del values[next(iter(values))]
                values[key] = value
            return values[key]
