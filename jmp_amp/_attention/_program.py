"""Puts calls of a kernel in place of the attention in a program.

What attention consists of may be in several calls, so the equations of calls are read in their places. The jaxprs of
loops, branches, checkpoints and other calls are programs of their own, which are rewritten before.
"""

import dataclasses
import functools
import typing
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.extend.core import ClosedJaxpr, JaxprEqn, Primitive, Var

from jmp_amp import _jaxpr as jx
from jmp_amp._attention._pattern import AsWrittenError, Attention, Match, call_of, match
from jmp_amp._attention._softmax import EXPONENTIALS, Elements, Values
from jmp_amp._calls import quote, warn
from pallas_kernels._devices import target_device


class Scope:
    """Says which equations of a jaxpr run in the dtype of the kernel: all, if no subclass says otherwise.

    Scopes are hashed and compared.
    """

    def inside(self, eqn: JaxprEqn) -> "Scope":
        """Returns the scope of the equations in the jaxprs of an equation."""
        return self

    def why_not(self, eqn: JaxprEqn) -> str:
        """Returns why an equation does not run in that dtype; empty if it does."""
        return "" if eqn.params.get("precision") is None else "its products have a precision of their own"


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionSite(jx.Site):
    """A product that reads a softmax, where `attention` is given.

    Attributes:
        kernel: what computes the attention; empty if it stays as it is written.
        why: why it stays as it is written; of a kernel, how it is told of masks.
    """

    kernel: str
    why: str


class Found(NamedTuple):
    """A softmax that a product reads.

    Attributes:
        eqns: the equations that hold the product, the outermost first, and the product itself.
        kernel: the name of the kernel that computes the attention; empty if it stays as it is written.
        why: why it stays as it is written, or the options of the kernel.
        warning: what the kernel refused; empty if nothing.
    """

    eqns: tuple[JaxprEqn, ...]
    kernel: str
    why: str
    warning: str = ""

    @property
    def site(self) -> AttentionSite:
        """Where the product is in the code."""
        return AttentionSite(**vars(jx.Site.at(self.eqns)), kernel=self.kernel, why=self.why)


@dataclasses.dataclass(eq=False)
class _Equation:
    """An equation of a program.

    Attributes:
        eqn: the equation, with the kernel in its jaxprs.
        scope: the scope that it is in.
        calls: the calls around it that are read in place, the outermost first.
        inputs: the variables that it reads.
        found: the attention in its jaxprs, or that it is the last product of.
    """

    eqn: Any
    scope: Scope
    calls: "tuple[_Equation, ...]"
    found: list[Found] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        self.inputs = [atom for atom in self.eqn.invars if isinstance(atom, Var)]

    @property
    def path(self) -> tuple[JaxprEqn, ...]:
        """The calls around it, and its own equation."""
        return (*[call.eqn for call in self.calls], self.eqn)


class _Body(NamedTuple):
    """A jaxpr with the kernel in it, as a function; `args` are those of `rewrite`."""

    args: tuple[Any, ...]

    @property
    def jaxpr(self) -> Any:
        """The jaxpr."""
        return rewrite(*self.args)[0]

    def __call__(self, *xs: Any) -> list[Any]:
        # In a `shard_map` types say along which axes of the mesh values vary, where it is traced and nowhere else.
        return jax.core.eval_jaxpr(*jx.open_jaxpr(self.jaxpr), *xs)


class _Program:
    """The equations of a jaxpr, those of calls in their places, and the attention that they compute."""

    def __init__(self, jaxpr: Any, given: Sequence[Elements | None], scope: Scope, kernel: Any, dtype: Any) -> None:
        """Takes the arguments of `rewrite`."""
        (self._jaxpr, consts), self._kernel, self._dtype = jx.open_jaxpr(jaxpr), kernel, dtype
        self._name = kernel if isinstance(kernel, str) else getattr(kernel, "__name__", type(kernel).__name__)
        self._producers, self._tried = dict[Any, _Equation](), dict[Any, Any]()
        elements = dict(zip(self._jaxpr.invars, given, strict=True))
        self._values = Values(elements, dict(zip(self._jaxpr.constvars, consts, strict=True)))
        self._equations, names = list[_Equation](), dict[Any, Any]()
        self._read(self._jaxpr.eqns, scope, (), names)
        self._outs = _named(self._jaxpr.outvars, names)
        self._readers, self._within = self._find_readers(), dict[_Equation, list[_Equation]]()
        self._replaced = self._replace_attention()
        self.found = [found for each in self._equations for found in each.found]

    @property
    def is_changed(self) -> bool:
        """Whether it calls the kernel."""
        return any(found.kernel for found in self.found)

    def _read(self, eqns: Any, scope: Scope, calls: tuple[_Equation, ...], names: dict[Any, Any]) -> None:
        """Reads the equations of a jaxpr; `names` has the variables that have other names in the program."""
        for eqn in eqns:
            each = _Equation(_with_names(eqn, names) if names else eqn, scope, calls)
            if eqn.primitive.name not in jx.HIGHER_ORDER or not self._read_jaxprs(each, names):
                self._equations.append(each)
                self._values.add(each.eqn, each.inputs)
                self._producers |= dict.fromkeys(each.eqn.outvars, each)

    def _read_jaxprs(self, each: _Equation, names: dict[Any, Any]) -> bool:
        """Finds attention in the jaxprs of an equation. Reads a call in place, and returns whether it has."""
        eqn, structure = each.eqn, jx.structure_of(each.eqn)
        run: Any = jx.HIGHER_ORDER[eqn.primitive.name].run
        if structure is None or run is None:
            return False
        scope, bodies = each.scope.inside(eqn), list[_Body]()
        if any(_may_have_attention(jaxpr) for jaxpr, _ in jx.entries(structure)):
            # A loop may change its other operands.
            constant = range(len(eqn.invars))[structure.consts if isinstance(structure, jx.Loop) else slice(None)]
            for jaxpr, places in jx.entries(structure):
                given = tuple([self._values.elements_of(eqn.invars[i]) if i in constant else None for i in places])
                bodies.append(body := _Body((jaxpr, given, scope, self._kernel, self._dtype)))
                each.found += [x._replace(eqns=(*each.path, *x.eqns)) for x in rewrite(*body.args)[1]]
        is_checkpoint = jx.versions.is_checkpoint(eqn.primitive, **eqn.params)
        if isinstance(structure, jx.Call) and structure.rule is not None:
            why = "the function around it has a derivative of its own"
            each.found = [found._replace(kernel="", why=why) for found in each.found]
        elif any(found.kernel for found in each.found):
            jaxpr = _traced(each, jax.jit(lambda *args: run(eqn, bodies, args)), eqn.invars)
            self._replace(each, jaxpr, eqn.invars, names)
        elif isinstance(structure, jx.Call) and structure.is_plain and not is_checkpoint:
            inner = self._names_inside(structure.jaxpr, [eqn.invars[i] for i in structure.operands], eqn.outvars, names)
            self._read(jx.open_jaxpr(structure.jaxpr)[0].eqns, scope, (*each.calls, each), inner)
            return True
        return False

    def _names_inside(self, jaxpr: Any, operands: Sequence[Any], outvars: Sequence[Any], names: Any) -> dict[Any, Any]:
        """Returns the names of the variables of a jaxpr in place of an equation.

        Adds to `names` those results of the equation that are an operand, a constant, or another result.
        """
        opened, consts = jx.open_jaxpr(jaxpr)
        inner: dict[Any, Any] = {var: Var(var.aval) for var in opened.constvars}
        self._values.constants |= zip(inner.values(), consts, strict=True)
        inner |= zip(opened.invars, operands, strict=True)
        results = zip(opened.outvars, outvars, strict=True)
        inner |= {var: name for var, name in results if isinstance(var, Var) and var not in inner}
        inner |= {var: Var(var.aval) for eqn in opened.eqns for var in eqn.outvars if var not in inner}
        named = zip(outvars, _named(opened.outvars, inner), strict=True)
        names |= {var: name for var, name in named if name is not var}
        return inner

    def _replace(self, each: _Equation, jaxpr: Any, operands: Sequence[Any], names: dict[Any, Any]) -> None:
        """Puts the one equation of a jaxpr in place of another; for `names` see `_names_inside`."""
        inner = self._names_inside(jaxpr, operands, each.eqn.outvars, names)
        new = _with_names(jx.open_jaxpr(jaxpr)[0].eqns[0], inner)
        each.eqn = new.replace(source_info=each.eqn.source_info, ctx=each.eqn.ctx)
        each.__post_init__()

    def _replace_attention(self) -> list[_Equation]:
        """Finds attention, calls the kernel in place of the last product of each, and returns these products."""
        matches = dict[_Equation, Match]()
        for each in self._equations:
            is_product = each.eqn.primitive is lax.dot_general_p and each.eqn.outvars[0] in self._readers
            if not is_product or self._values.exponentials.isdisjoint(each.inputs):
                continue
            try:
                if (found := match(self._values, each.eqn, self._kernel, self._dtype)) is not None:
                    self._within[each] = self._between(found, each)
                    matches[each] = found
            except AsWrittenError as error:
                each.found = [Found(each.path, "", str(error))]
        is_settled = False
        while not is_settled:  # attention may read the weights of other attention
            is_settled = True
            for each, found in [*matches.items()]:
                why, warning = self._read_again(each, matches), ""
                if not why and (call := self._call(each, found))[0] is None:
                    why = call[-1]
                    warning = f"`{self._name}` refuses attention of the function, which stays as it is written: {why}"
                if why:
                    each.found, is_settled = [Found(each.path, "", why, warning)], False
                    del matches[each]
        for each, found in matches.items():
            self._call_kernel(each, found)
        return [*matches]

    def _call_kernel(self, each: _Equation, match: Match) -> None:
        """Calls the kernel in place of a product; what it refuses of it is computed as it is written."""
        jaxpr, attention, operands, words = self._call(each, match)
        why, warning, on_cpu = str(attention), "", ""
        if target_device().platform == "cpu":
            types = tuple([(jx.shape_of(atom), jx.dtype_of(atom)) for atom in operands])
            on_cpu = _refusal_on_cpu(attention, types, has_derivative=not words)
        if words or on_cpu:
            n, call = len(operands), call_of(attention)
            as_written, inputs = self._written(each, n)

            def run(*arrays: Any) -> Any:
                return call(*arrays[:n])

            if words:
                why += f"; its derivative as it is written: {words}"
                run = _with_derivative_of(run, as_written, self._name, words)
            if on_cpu:
                why += f"; on a CPU as it is written: {on_cpu}"
                warning = f"`{self._name}` refuses attention on a CPU, which computes it as it is written: {on_cpu}"
                # A program that is traced on a CPU may be lowered for a GPU: `jax.export` and `lower` do.
                run = functools.partial(lax.platform_dependent, cpu=as_written, default=run)
            operands = *operands, *inputs
            jaxpr = _traced(each, jax.jit(run), operands)
        each.found = [Found(each.path, self._name, why, warning)]
        self._replace(each, jaxpr, operands, {})

    def _between(self, match: Match, last: _Equation) -> list[_Equation]:
        """Returns the equations that compute the weights from the first product, and this product.

        Raises:
            AsWrittenError: one of them, or the last product, does not run in the dtype of the kernel.
        """
        first = self._producers[match.product]
        needed, reached, behind, within = {match.weights}, {match.product}, list[_Equation](), list[_Equation]()
        for each in self._equations[self._equations.index(last) - 1 : self._equations.index(first) : -1]:
            if not needed.isdisjoint(each.eqn.outvars):
                behind.append(each)
                needed.update({*each.inputs} - match.given)
        for each in reversed(behind):
            if not reached.isdisjoint(each.inputs):
                within.append(each)
                reached.update({*each.eqn.outvars} - match.given)
        for each in (*within, first, last):
            if why := each.scope.why_not(each.eqn):
                raise AsWrittenError(why)
        return [first, *within]

    def _find_readers(self) -> dict[Any, list[_Equation | None]]:
        """Returns the equations that read each variable, of those that have a use; None for the results."""
        readers: dict[Any, list[_Equation | None]] = {atom: [None] for atom in self._outs if isinstance(atom, Var)}
        for each in reversed(self._equations):
            if each.eqn.effects or not readers.keys().isdisjoint(each.eqn.outvars):
                for atom in each.inputs:
                    readers.setdefault(atom, []).append(each)
        return readers

    def _read_again(self, last: _Equation, matches: Mapping[_Equation, Match]) -> str:
        """Returns what reads the scores or the weights of an attention again; empty if nothing does."""
        allowed = {*matches}.union(*[self._within[each] for each in matches])
        atoms = [x for each in self._within[last] for x in each.eqn.outvars]
        others = [reader for x in atoms for reader in self._readers.get(x, ()) if reader not in allowed]
        if not others or others[0] is None:
            return "its weights are returned" if others else ""
        if jx.is_of_derivative(others[0].eqn.source_info.name_stack):
            return "its derivative is in the program as well: write `jax.grad(autocast(f))` for `autocast(jax.grad(f))`"
        return f"its weights are read again at {jx.Site.at(others[0].path).source or 'an unknown line'}"

    def _call(self, each: _Equation, match: Match) -> tuple[Any, Attention, Sequence[Var], str]:
        """Returns a call of the kernel as a jaxpr, what it computes, what it reads, and the words of the kernel.

        The jaxpr is None if the kernel refuses all variants, and there are words if it refuses the derivative.
        """
        for attention in match.variants:
            operands = [array.atom for array in attention.arrays]
            key = attention, tuple([x.aval for x in operands])
            if key not in self._tried:  # layers are alike
                self._tried[key] = _try(each, attention, operands)
            jaxpr, words = self._tried[key]
            if jaxpr is not None:
                break
        return jaxpr, attention, operands, words

    def _written(self, last: _Equation, n: int) -> tuple[Callable[..., Any], list[Var]]:
        """Returns an attention as the program computes it, from the arrays behind the first `n`, and what it reads."""
        equations = [*self._within[last], last]
        computed = {var for each in equations for var in each.eqn.outvars}
        inputs = list(dict.fromkeys([x for each in equations for x in each.inputs if x not in computed]))
        eqns = [each.eqn for each in equations]
        jaxpr = self._jaxpr.replace(constvars=[], invars=inputs, outvars=last.eqn.outvars, eqns=eqns)
        return lambda *args: jax.core.eval_jaxpr(jaxpr, (), *args[n:])[0], inputs

    def rewritten(self) -> Any:
        """Returns the jaxpr, closed, with the kernel in place of each attention."""
        # A call is opened if attention ends in it, or reads a value that it computes and does not return.
        opened = {call for each in self._replaced for call in each.calls}
        for atom in [x for each in self._replaced for x in each.eqn.invars if x in self._producers]:
            opened |= {call for call in self._producers[atom].calls if atom not in call.eqn.outvars}

        paths = [[call for call in (*each.calls, each) if call not in opened] for each in self._equations]
        tops = dict.fromkeys([top for top, *_ in paths])
        eqns = [jx.in_scopes_of([call.eqn for call in each.calls], each.eqn) for each in tops]
        kept, read = jx.live_equations(eqns, self._outs)
        consts = {var: x for var, x in self._values.constants.items() if var in read}
        jaxpr = self._jaxpr.replace(constvars=[*consts], eqns=kept, outvars=self._outs)
        return ClosedJaxpr(jaxpr, [*consts.values()])


def _named(atoms: Sequence[Any], names: Mapping[Any, Any]) -> list[Any]:
    return [names.get(atom, atom) if isinstance(atom, Var) else atom for atom in atoms]


def _with_names(eqn: Any, names: Mapping[Any, Any]) -> Any:
    return eqn.replace(invars=_named(eqn.invars, names), outvars=_named(eqn.outvars, names))


def _try(each: _Equation, attention: Attention, operands: Sequence[Var]) -> tuple[Any, str]:
    """Returns a call of a kernel as a jaxpr, and its words if it refuses its derivative; or None and why it refuses."""
    jaxpr, call = None, call_of(attention)
    try:
        jaxpr = _traced(each, call, operands)
        _traced(each, functools.partial(_gradients, call), operands)
        return jaxpr, ""
    except Exception as error:
        return jaxpr, _words_of(error)


@functools.lru_cache(maxsize=1024)
def _refusal_on_cpu(attention: Attention, types: tuple[Any, ...], has_derivative: bool) -> str:
    """Returns the words of a kernel that is traced on a CPU and refuses to be lowered for one; empty for any other.

    JAX says only then which products and which kernels a CPU lacks.
    """
    call = call_of(attention)

    def run(*arrays: Any) -> Any:
        return call(*arrays), _gradients(call, *arrays) if has_derivative else ()

    if not all(isinstance(n, int) for shape, _ in types for n in shape):
        return ""
    # No value varies along an axis of a mesh here, and JAX lowers what is in a `shard_map` together with it.
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
        try:
            traced = jax.jit(run).trace(*[jax.ShapeDtypeStruct(*each) for each in types])
        except Exception:  # a kernel that needs the axes of the mesh
            return ""
        try:
            traced.lower(lowering_platforms=("cpu",))
        except Exception as error:
            return _words_of(error)
    return ""


def _gradients(call: Callable, *arrays: Any) -> Any:
    out, pull = jax.vjp(lambda *qkv: call(*qkv, *arrays[3:]), *arrays[:3])
    return pull(out)


def _words_of(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0]


def _with_derivative_of(call: Callable, written: Callable, name: str, words: str) -> Callable[..., Any]:
    """Returns a function with the derivative of another."""
    attend = jax.custom_vjp(call)

    def forward(*arrays: Any) -> Any:
        warn(f"`{name}` refuses the derivative of attention, which is computed as it is written: {words}")
        return jax.vjp(written, *arrays)

    attend.defvjp(forward, lambda pull, cotangent: pull(cotangent))
    return attend


def _traced(each: _Equation, fun: Callable, operands: Sequence[Any]) -> Any:
    """Returns a function as a jaxpr of one equation that calls it, in the settings of another equation."""
    with jx.versions.context_of(each.eqn):
        return jx.trace(fun, [atom.aval for atom in operands])


def _may_have_attention(jaxpr: Any) -> bool:
    """Whether a jaxpr, or one inside it, has products and exponentials."""
    return jx.holds(jaxpr, _is_product) and jx.holds(jaxpr, _is_exponential)


def _is_product(primitive: Primitive, *args: Any, **params: Any) -> bool:
    return primitive is lax.dot_general_p


def _is_exponential(primitive: Primitive, *args: Any, **params: Any) -> bool:
    return primitive.name in EXPONENTIALS


_rewritten = jx.Cache()


def rewrite(jaxpr: Any, given: Sequence[Elements | None], scope: Scope, kernel: Any, dtype: Any) -> Any:
    """Returns a jaxpr with the kernel in place of each attention, the same for the same jaxpr, and what was found.

    Args:
        jaxpr: closed or open.
        given: the elements of its inputs that depend on indices and constants alone; None for all others.
        scope: the scope of its equations.
        kernel: the kernel.
        dtype: the dtype that it runs in.
    """
    opened, consts = jx.open_jaxpr(jaxpr)

    def make() -> tuple[Any, list[Found]]:
        program = _Program(jaxpr, given, scope, kernel, dtype)
        return program.rewritten() if program.is_changed else None, program.found

    known = tuple([x and (x.along, x.array.dtype, x.array.tobytes()) for x in given])
    keys = tuple(map(id, consts)), known, jax.sharding.get_abstract_mesh()
    new, found = _rewritten(opened, (*keys, scope, kernel, dtype), make)
    return new or jaxpr, found


def with_kernel(jaxpr: Any, kernel: Any, dtype: Any, scope: Scope) -> tuple[Any, list[Found]]:
    """Returns a closed jaxpr with a kernel in place of each attention, and each softmax that a product reads.

    Args:
        jaxpr: the program.
        kernel: see `check_kernel`.
        dtype: the dtype that it runs in.
        scope: says which equations run in that dtype.
    """
    opened, _ = jx.open_jaxpr(jaxpr)
    if not _may_have_attention(jaxpr) or any(map(jx.is_reference, opened.invars)):
        return jaxpr, []
    return rewrite(jaxpr, (None,) * len(opened.invars), scope, kernel, dtype)


def check_kernel(kernel: Any) -> None:
    """Checks that `attention` is None, an `implementation` of `jax.nn.dot_product_attention`, or a function like it.

    Raises:
        TypeError: it is neither a string nor a function that can be hashed.
        ValueError: a string is not an `implementation` that this version of JAX has.
    """
    if kernel is None or (callable(kernel) and isinstance(kernel, Hashable)):
        return
    hint = typing.get_type_hints(jax.nn.dot_product_attention)["implementation"]  # `Literal["xla", "cudnn"] | None`
    names = [name for each in typing.get_args(hint) for name in typing.get_args(each)]
    if kernel not in names:
        shown = ", ".join([f'"{name}"' for name in names])
        raise (ValueError if isinstance(kernel, str) else TypeError)(
            f"`attention` must be None, an implementation of `jax.nn.dot_product_attention` ({shown}), or a function "
            f"with its signature that can be hashed, got {quote(kernel)}; for a kernel of another library write "
            "`attention=kernel`, the function itself"
        )
