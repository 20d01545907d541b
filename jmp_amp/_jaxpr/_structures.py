"""How an equation holds jaxprs: the operands that each reads, how often each runs, and how it is run with others."""

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, islice
from typing import Any, NamedTuple

import jax
from jax.extend.core import ClosedJaxpr, JaxprEqn, jaxprs_in_params

from jmp_amp._jaxpr import _versions as versions
from jmp_amp._jaxpr._trace import Cache, bind, split_arrays
from jmp_amp._jaxpr._versions import open_jaxpr, trace


class Call(NamedTuple):
    """An equation that runs one jaxpr once.

    Attributes:
        jaxpr: the jaxpr; its results are those of the equation.
        operands: the indices of the operands that are its inputs.
        is_inline: whether the jaxpr can be evaluated in place of the equation. That of `shard_map` cannot: it runs on
            shards.
        rule: whose derivative it has instead of that of the jaxpr: `"custom_jvp_call"`, `"custom_vjp_call"` or None.
        has_shardings: whether the equation says how operands or results are spread over devices.
    """

    jaxpr: Any
    operands: Sequence[int]
    is_inline: bool = True
    rule: str | None = None
    has_shardings: bool = False

    @property
    def is_plain(self) -> bool:
        """Whether the jaxpr says all that the equation does, so that its equations can be in place of this one."""
        return self.is_inline and self.rule is None and not self.has_shardings

    @property
    def jaxprs(self) -> tuple[Any]:
        """The jaxpr, as the one branch."""
        return (self.jaxpr,)


class Branches(NamedTuple):
    """An equation that runs one of several jaxprs; its first operand is the index.

    Attributes:
        jaxprs: the branches.
        operands: the indices of the operands that are the inputs of each branch.
    """

    jaxprs: Sequence[Any]
    operands: Sequence[int]


class Loop(NamedTuple):
    """An equation that runs one jaxpr any number of times.

    The inputs of the body are constants, carries and slices of `xs`; its results are carries and slices of `ys`.

    Attributes:
        body: the jaxpr of one iteration.
        consts: the operands that are the constants of the body.
        carry: the operands that are the initial carries.
        xs: the operands that the body reads slices of; none in a `while`.
        length: the number of iterations; None for a `while`.
        cond: the jaxpr of the condition of a `while`, over its constants and the carries; None for a `scan`.
        cond_consts: the operands that are the constants of `cond`.
    """

    body: Any
    consts: slice
    carry: slice
    xs: slice
    length: Any = None
    cond: Any = None
    cond_consts: slice = slice(0)

    @property
    def n_consts(self) -> int:
        """The number of constants of the body."""
        return self.consts.stop - self.consts.start

    @property
    def n_carry(self) -> int:
        """The number of carries."""
        return self.carry.stop - self.carry.start

    @property
    def body_carry(self) -> slice:
        """The inputs of the body that are the carries."""
        return slice(self.n_consts, self.n_consts + self.n_carry)


Structure = Call | Branches | Loop


class Body:
    """A function in place of a jaxpr. It is traced once, so JAX compiles, differentiates and batches it once."""

    def __init__(self, fun: Callable[..., Sequence[Any]], avals: Sequence[Any]) -> None:
        """Takes a flat function, and the types of its arguments."""
        self._fun, self._avals = fun, avals

    def __call__(self, *args: Any) -> Sequence[Any]:
        return self._fun(*args)

    @property
    def jaxpr(self) -> Any:
        """The function as a closed jaxpr."""
        return _traced(self, (), lambda: trace(self._fun, self._avals))


_traced = Cache()


RunWith = Callable[[JaxprEqn, Sequence[Body], Sequence[Any]], Sequence[Any]]


class HigherOrder(NamedTuple):
    """A primitive that holds jaxprs.

    Attributes:
        structure: returns the jaxprs of an equation and the operands that they read; None if they cannot be replaced.
        run: evaluates an equation with other functions in place of its jaxprs: one for each branch; for a loop, one for
            the condition, if there is one, and one for the body. None if the equation cannot run otherwise.
        keeps_inputs: whether the equation keeps its operands for the backward pass.
        structure_low: as `structure`, for an equation that asks for other dtypes where ops are cast.
    """

    structure: Callable[[JaxprEqn], Structure | None]
    run: RunWith | None = None
    keeps_inputs: bool = False
    structure_low: Callable[[JaxprEqn], Call] | None = None


def structure_of(eqn: JaxprEqn) -> Structure | None:
    """Returns how an equation holds jaxprs; None if it holds none, or if its primitive is not registered."""
    name = eqn.primitive.name
    structure = HIGHER_ORDER[name].structure(eqn) if name in HIGHER_ORDER else None
    # A loop over a type of the user counts its operands otherwise.
    is_opaque = isinstance(structure, Loop) and any(versions.is_hi_type(atom.aval) for atom in eqn.invars)
    return None if is_opaque else structure


def entries(structure: Structure) -> list[tuple[Any, Sequence[int]]]:
    """Returns the jaxprs of an equation, the condition of a loop first, and the operands that each reads."""
    if not isinstance(structure, Loop):
        return [(jaxpr, structure.operands) for jaxpr in structure.jaxprs]
    body = structure.body, range(structure.consts.start, structure.xs.stop)
    if structure.cond is None:
        return [body]
    carry = range(structure.carry.start, structure.carry.stop)
    return [(structure.cond, [*range(structure.cond_consts.stop), *carry]), body]


def inner_jaxprs(eqn: JaxprEqn) -> list[Any]:
    """Returns all jaxprs in the parameters of an equation."""
    inside = list(
        jaxprs_in_params(eqn.params) if versions.hi_primitive(eqn) is None else filter(None, [_hi_jaxpr(eqn)])
    )
    if not inside and isinstance(structure := structure_of(eqn), Call):  # the equation holds a function
        inside = [structure.jaxpr]
    return inside


def runs_of(eqns: Sequence[JaxprEqn]) -> int:
    """Returns how often the last of `eqns` runs; the others contain it. A loop of unknown length counts once."""
    loops = [structure for structure in map(structure_of, eqns[:-1]) if isinstance(structure, Loop)]
    return math.prod([loop.length for loop in loops if isinstance(loop.length, int)])


def equations_in(jaxpr: Any, *outer: JaxprEqn) -> Iterator[tuple[JaxprEqn, ...]]:
    """Yields all equations of a jaxpr, those inside other equations behind `outer` and these, the outermost first."""
    for eqn in open_jaxpr(jaxpr)[0].eqns:
        yield (*outer, eqn)
        for inner in inner_jaxprs(eqn):
            yield from equations_in(inner, *outer, eqn)


def holds(jaxpr: Any, selects: Callable[..., bool]) -> bool:
    """Whether a jaxpr, or one inside it, has an equation whose primitive, types and parameters are selected."""
    opened, _ = open_jaxpr(jaxpr)

    def is_found() -> bool:
        here = (selects(e.primitive, *[atom.aval for atom in e.invars], **e.params) for e in opened.eqns)
        return any(here) or any(holds(inner, selects) for e in opened.eqns for inner in inner_jaxprs(e))

    return _found(opened, selects, is_found)


_found = Cache()


def _call(param: str, is_inline: bool = True, rule: str | None = None) -> Callable[[JaxprEqn], Call]:
    """Returns the structure of a call, whose jaxpr is in a parameter."""
    return lambda eqn: Call(eqn.params[param], range(len(eqn.invars)), is_inline, rule)


def _jit(eqn: JaxprEqn) -> Call:
    """Returns the structure of a `jit`."""
    shardings = *eqn.params["in_shardings"], *eqn.params["out_shardings"]
    is_set = any(isinstance(each, jax.sharding.Sharding) for each in shardings)
    return Call(eqn.params["jaxpr"], range(len(eqn.invars)), has_shardings=is_set)


def _hi_call(eqn: JaxprEqn) -> Call | None:
    """Returns the structure of a `HiPrim`; None if nothing can take the place of its function."""
    kind = versions.hi_kind(versions.hi_primitive(eqn))
    if kind is None or not all(isinstance(atom.aval, jax.core.ShapedArray) for atom in (*eqn.invars, *eqn.outvars)):
        return None
    rule = kind if kind in ("custom_jvp_call", "custom_vjp_call") else None
    return Call(_hi_jaxpr(eqn), range(len(eqn.invars)), rule=rule)


def _hi_jaxpr(eqn: JaxprEqn) -> Any:
    """Returns the function of a `HiPrim` as a closed jaxpr of arrays, the same object for the same primitive.

    None if the types of its operands do not say which arrays they consist of.
    """
    primitive = versions.hi_primitive(eqn)
    if "jaxpr" in primitive.params:
        return primitive.params["jaxpr"]
    avals: list[Any] = [atom.aval for atom in eqn.invars]
    try:
        arrays = [aval.lo_ty() if versions.is_hi_type(aval) else [aval] for aval in avals]  # of types of the user
    except NotImplementedError:
        return None

    def expand(*args: Any) -> list[Any]:
        it = iter(args)
        pairs = zip(avals, arrays, strict=True)
        operands = [
            aval.raise_val(*islice(it, len(part))) if versions.is_hi_type(aval) else next(it) for aval, part in pairs
        ]
        return split_arrays(primitive.expand(*jax.tree.unflatten(primitive.in_tree, operands)))[0]

    return _expanded(primitive, (), lambda: trace(expand, list(chain(*arrays))))


_expanded = Cache()


def _scan(eqn: JaxprEqn) -> Loop:
    """Returns the structure of a `scan`."""
    n_consts, n_carry = versions.scan_sizes(eqn)
    first, last = n_consts + n_carry, len(eqn.invars)
    consts, carry, xs = slice(0, n_consts), slice(n_consts, first), slice(first, last)
    return Loop(eqn.params["jaxpr"], consts, carry, xs, eqn.params["length"])


def _while_loop(eqn: JaxprEqn) -> Loop:
    """Returns the structure of a `while`."""
    n_cond, last = eqn.params["cond_nconsts"], len(eqn.invars)
    first = n_cond + eqn.params["body_nconsts"]
    consts, carry, xs = slice(n_cond, first), slice(first, last), slice(last, last)
    return Loop(eqn.params["body_jaxpr"], consts, carry, xs, None, eqn.params["cond_jaxpr"], slice(0, n_cond))


def _linear_solve(eqn: JaxprEqn) -> Call:
    """Returns the structure of a `custom_linear_solve`: its `solve` computes the results."""
    lengths, jaxprs = eqn.params["const_lengths"], eqn.params["jaxprs"]
    first, end = lengths.matvec + lengths.vecmat, sum(n or 0 for n in lengths)
    return Call(jaxprs.solve, [*range(first, first + lengths.solve), *range(end, len(eqn.invars))])


def run_inline(eqn: JaxprEqn, bodies: Sequence[Body], args: Sequence[Any]) -> Sequence[Any]:
    return bodies[0](*args)


def _run_with(*params: str) -> RunWith:
    """Returns a function that binds the primitive again, with new jaxprs as these parameters, and all others kept."""
    return lambda eqn, bodies, args: bind(eqn, args, **{k: b.jaxpr for k, b in zip(params, bodies, strict=True)})


def _run_cond(eqn: JaxprEqn, bodies: Sequence[Body], args: Sequence[Any]) -> Sequence[Any]:
    return bind(eqn, args, branches=tuple(body.jaxpr for body in bodies))


def with_checkpointed(eqn: JaxprEqn, jaxpr: Any) -> JaxprEqn:
    """Returns a `jax.checkpoint` of another open jaxpr, which may have more inputs in front of the others."""
    new: dict[str, Any] = {"jaxpr": jaxpr if versions.hi_primitive(eqn) is None else ClosedJaxpr(jaxpr, ())}
    prevent_cse = versions.params_of(eqn).get("prevent_cse")
    if isinstance(prevent_cse, tuple):  # one for each operand
        new["prevent_cse"] = (False,) * (len(jaxpr.invars) - len(prevent_cse)) + prevent_cse
    return versions.with_params(eqn, **new)


def _run_remat(eqn: JaxprEqn, bodies: Sequence[Body], args: Sequence[Any]) -> Sequence[Any]:
    _, consts = open_jaxpr(bodies[0].jaxpr)
    return bind(with_checkpointed(eqn, versions.with_constants_as_inputs(bodies[0].jaxpr)), [*consts, *args])


def _run_hi_primitive(eqn: JaxprEqn, bodies: Sequence[Body], args: Sequence[Any]) -> Sequence[Any]:
    primitive = versions.hi_primitive(eqn)
    kind = versions.hi_kind(primitive)
    if kind == "name":
        primitive = versions.of_one(primitive)
        return [type(primitive)(primitive.name, jax.typeof(args[0]))(args[0])]
    return (_run_remat if kind == "remat" else run_inline)(eqn, bodies, args)


def _run_shard_map(eqn: JaxprEqn, bodies: Sequence[Body], args: Sequence[Any]) -> Sequence[Any]:
    # Its body is traced where the mesh axes are manual.
    options = {name: eqn.params[name] for name in ("mesh", "in_specs", "out_specs", "check_vma")}
    axis_names = set(eqn.params["newly_manual_axes"])
    return jax.shard_map(lambda *args: tuple(bodies[0](*args)), axis_names=axis_names, **options)(*args)


HIGHER_ORDER: dict[str, HigherOrder] = {
    "jit": HigherOrder(_jit, _run_with("jaxpr")),
    # From JAX 0.12 on, both are `eval_jaxpr`.
    **dict.fromkeys(("call", "closed_call", "eval_jaxpr"), HigherOrder(_call("call_jaxpr"), run_inline)),
    "remat2": HigherOrder(_call("jaxpr"), _run_remat, keeps_inputs=True),
    "custom_jvp_call": HigherOrder(_call("call_jaxpr", rule="custom_jvp_call"), run_inline),
    "custom_vjp_call": HigherOrder(_call("call_jaxpr", rule="custom_vjp_call"), run_inline, keeps_inputs=True),
    "call_hi_primitive": HigherOrder(_hi_call, _run_hi_primitive, keeps_inputs=True),
    "shard_map": HigherOrder(_call("jaxpr", is_inline=False), _run_shard_map, keeps_inputs=True),
    "cond": HigherOrder(lambda eqn: Branches(eqn.params["branches"], range(1, len(eqn.invars))), _run_cond),
    "scan": HigherOrder(_scan, _run_with("jaxpr")),
    "while": HigherOrder(_while_loop, _run_with("cond_jaxpr", "body_jaxpr")),
    "custom_linear_solve": HigherOrder(_linear_solve),
}
