"""The rebuilt identity: autocast that casts nothing, and yet makes every jaxpr of a program again.

So any difference from plain JAX is a fault of the code that runs programs, and not a rounding.
"""

import contextlib
from collections.abc import Iterator
from unittest import mock

from jax import lax

import jmp_amp as amp
from jmp_amp._autocast._plan import Plan


@contextlib.contextmanager
def all_plans_changed() -> Iterator[None]:
    """A context in which autocast runs no jaxpr as it was traced."""
    with mock.patch.object(Plan, "changed", property(lambda self: True)):
        yield


def rebuilt_identity(fun):
    """Returns `fun` under autocast to float32; to be run in `all_plans_changed`."""
    return amp.autocast(fun, dtype="float32", rules={lax.tanh_p: "original"})
