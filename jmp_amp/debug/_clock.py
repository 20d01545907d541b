"""How long a tool has run: its progress, and when it is to stop."""

import contextlib
import math
import numbers
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from jmp_amp._calls import quote

R = TypeVar("R")
_PATIENCE = 5.0  # seconds before progress is shown


def check_seconds(max_seconds: Any) -> None:
    """Raises ValueError unless `max_seconds`, an option of a tool, is a positive number."""
    is_number = isinstance(max_seconds, numbers.Real) and not isinstance(max_seconds, bool)
    if not is_number or not max_seconds > 0:
        raise ValueError(f"`max_seconds` must be a positive number, got {quote(max_seconds)}")


class Clock:
    """Counts the seconds since it was made, and shows on stderr what has been done after the first five.

    Attributes:
        max_seconds: when it is late.
    """

    def __init__(self, max_seconds: float = math.inf) -> None:
        self.max_seconds, self._start, self._n, self._shown = max_seconds, time.monotonic(), 0, _PATIENCE

    @property
    def seconds(self) -> float:
        """The seconds since the clock was made."""
        return time.monotonic() - self._start

    @property
    def is_late(self) -> bool:
        """Whether the time is over."""
        return self.seconds > self.max_seconds

    def tick(self, what: str) -> None:
        """Counts something that is done, and shows the count about once in a second."""
        self._n += 1
        self.show(f"{self._n:,} {what}")

    def show(self, what: str) -> None:
        """Shows what is done about once in a second."""
        if (seconds := self.seconds) > self._shown:
            self._shown = seconds + 1
            sys.stderr.write(f"\r{f'first_nonfinite: {what}, {seconds:.0f} s':<60}")
            sys.stderr.flush()

    def wait_for(self, fun: Callable[[], R], what: str, until: float) -> R:
        """Returns what a function returns that nothing can interrupt, such as a compilation.

        Raises:
            TimeoutError: so many seconds are over. The function runs to its end in a thread, and its result is dropped.
        """
        threads = ThreadPoolExecutor(1)
        future = threads.submit(fun)
        threads.shutdown(wait=False)
        while (left := until - self.seconds) > 0:
            with contextlib.suppress(TimeoutError):
                return future.result(min(0.2, left))
            self.show(what)
        raise TimeoutError

    def finish(self) -> None:
        """Ends the line of the progress, if there is one."""
        if self._shown > _PATIENCE:
            sys.stderr.write("\n")
