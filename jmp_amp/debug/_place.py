"""The position of an equation in one evaluation of a program."""

from typing import NamedTuple

from jax.extend.core import JaxprEqn

PlaceId = tuple[int, ...]


class Place(NamedTuple):
    """The position of an equation in one evaluation of a program.

    Attributes:
        id: the index of each equation in `eqns` within its jaxpr, and the jaxpr and the iteration of each loop.
        eqns: the equations that contain this one, outermost first, and the equation itself.
        iteration: the index of the iteration of each loop that contains the equation, outermost first.
    """

    id: PlaceId = ()
    eqns: tuple[JaxprEqn, ...] = ()
    iteration: tuple[int, ...] = ()

    def equation(self, index: int, eqn: JaxprEqn) -> "Place":
        """Returns the place of equation `index` of the jaxpr at this place."""
        return Place((*self.id, index), (*self.eqns, eqn), self.iteration)

    def step(self, jaxpr: int, i: int) -> "Place":
        """Returns the place of iteration `i` of one of the jaxprs of the loop at this place."""
        return Place((*self.id, jaxpr, i), self.eqns, (*self.iteration, i))


def argument_id(i: int) -> PlaceId:
    """Returns the id of argument `i` of the program, which differs from the id of every equation."""
    return -1, i
