"""Puts calls of a kernel in place of the attention in a program."""

import dataclasses
import functools
import typing
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.extend.core import ClosedJaxpr, Primitive, Var

from jmp_amp import _jaxpr as jx
from jmp_amp._autocast._pattern import AsWrittenError, Attention, Match, call_of, match
from jmp_amp._autocast._plan import Region
from jmp_amp._autocast._planner import Planner
from jmp_amp._autocast._softmax import EXPONENTIALS, Expressions
from jmp_amp._calls import quote, warn
from jmp_amp._formats import Format
from jmp_amp._ops import RULES, OpClass, Rule
from pallas_kernels._devices import target_device


class Found(NamedTuple):
    """A softmax that a product reads.

    Attributes:
        eqns: the equations that hold the product, the outermost first, and the product itself.
        kernel: the kernel that computes the attention; empty if it stays as written.
        why: why it stays as written, or the options of the kernel.
        warning: what the kernel refused; empty if nothing.
    """

    eqns: tuple[Any, ...]
    kernel: str
    why: str
    warning: str = ""


@dataclasses.dataclass(eq=False)
class _Op:
    """An equation of a program whose calls are read in place.

    Attributes:
        eqn: the equation, with the kernel in its jaxprs.
        region: the region that it is in.
        calls: the calls around it, the outermost first.
        inside: the equations of a call that is read in place.
        found: what is found in its jaxprs, or what it is itself.
        reads: the variables that it reads.
    """

    eqn: Any
    region: Region
    calls: "tuple[_Op, ...]"
    inside: "list[_Op]" = dataclasses.field(default_factory=list)
    found: list[Found] = dataclasses.field(default_factory=list)
    reads: list[Var] = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.reads = [atom for atom in self.eqn.invars if isinstance(atom, Var)]

    @property
    def path(self) -> tuple[Any, ...]:
        """The equations of the calls around it, and its own."""
        return (*[call.eqn for call in self.calls], self.eqn)


class _Body(NamedTuple):
    """A jaxpr with the kernel in it as a function, and the arguments of `_rewritten` that it was made of."""

    jaxpr: Any
    args: tuple[Any, ...]

    def __call__(self, *xs: Any) -> list[Any]:
        # In a `shard_map` types say along which axes of the mesh values vary, where it is traced and nowhere else.
        new, _ = _rewritten(*self.args)
        return jax.core.eval_jaxpr(*jx.open_jaxpr(new), *xs)


class _Program:
    """A jaxpr as equations whose calls are read in place, and the attention in it."""

    def __init__(self, jaxpr: Any, given: Sequence[Any], region: Region, planner: Planner, form: Format) -> None:
        """Takes a jaxpr, what is known of its inputs, the region around it, a planner, and the format of the kernel."""
        self._jaxpr, self._planner, self._format = jx.open_jaxpr(jaxpr)[0], planner, form
        self._made, self._values = dict[Any, _Op](), Expressions()
        for var, known in zip(self._jaxpr.invars, given, strict=True):
            self._values.give(var, known)
        names = dict[Any, Any]()
        self._ops = self._read(jaxpr, region, (), names)
        self._outs = _named(self._jaxpr.outvars, names)
        self._leaves = list(_leaves(self._ops))
        self._places = {op: i for i, op in enumerate(self._leaves)}
        self._readers, self._within, self._tried = self._find_readers(), dict[_Op, list[_Op]](), dict[Any, Any]()
        self._kernels = self._replace_attention()
        self.found = [found for op in self._leaves for found in op.found]

    @property
    def is_changed(self) -> bool:
        """Whether it calls the kernel."""
        return any(found.kernel for found in self.found)

    def _read(self, jaxpr: Any, region: Region, calls: tuple[_Op, ...], names: dict[Any, Any]) -> list[_Op]:
        """Returns the equations of a jaxpr; `names` has the variables that are called otherwise here."""
        (opened, consts), ops = jx.open_jaxpr(jaxpr), list[_Op]()
        for var, x in zip(opened.constvars, consts, strict=True):
            self._values.define(names.get(var, var), x)
        for eqn in opened.eqns:
            if calls:
                names |= {var: Var(var.aval) for var in eqn.outvars if var not in names}
            ops.append(op := _Op(_with_names(eqn, names) if names else eqn, region, calls))
            if eqn.primitive.name not in jx.HIGHER_ORDER or not self._enter(op, names):
                self._values.add(op.eqn, op.reads)
                self._made |= dict.fromkeys(op.eqn.outvars, op)
        return ops

    def _enter(self, op: _Op, names: dict[Any, Any]) -> bool:
        """Finds attention in the jaxprs of an equation. Reads a call in place, and returns whether it has."""
        structure: Any = jx.structure_of(op.eqn)
        run: Any = jx.HIGHER_ORDER[op.eqn.primitive.name].run
        eqn = op.eqn
        if structure is None or run is None:
            return False
        region, bodies = self._planner.enter(op.region, eqn), list[_Body]()
        if any(_may_have_attention(jaxpr) for jaxpr, _ in jx.entries(structure)):
            consts = structure.consts if isinstance(structure, jx.Loop) else slice(None)
            known = range(len(eqn.invars))[consts]  # nothing is known of what a loop changes
            for jaxpr, places in jx.entries(structure):
                given = tuple([self._values.inside(eqn.invars[i]) if i in known else None for i in places])
                args = jaxpr, given, region, self._planner, self._format
                new, found = _rewritten(*args)
                op.found += [each._replace(eqns=(*op.path, *each.eqns)) for each in found]
                bodies.append(_Body(new, args))
        is_call = isinstance(structure, jx.Call)
        if is_call and structure.rule is not None:
            why = "the function around it has a derivative of its own"
            op.found = [found._replace(kernel="", why=why) for found in op.found]
        elif any(found.kernel for found in op.found):
            jaxpr = _traced(op, jax.jit(lambda *args: run(eqn, bodies, args)), eqn.invars)
            names |= self._replace(op, jaxpr, eqn.invars)
        elif is_call and structure.is_plain and not jx.versions.is_checkpoint(eqn.primitive, **eqn.params):
            inner, results = _names_inside(structure.jaxpr, [eqn.invars[i] for i in structure.operands], eqn.outvars)
            op.inside, op.found = self._read(structure.jaxpr, region, (*op.calls, op), inner), []
            names |= results
            return True
        return False

    def _replace(self, op: _Op, jaxpr: Any, operands: Sequence[Any]) -> dict[Any, Any]:
        """Puts the one equation of a jaxpr in place of another, and returns other names of its results."""
        opened, consts = jx.open_jaxpr(jaxpr)
        inner, results = _names_inside(jaxpr, operands, op.eqn.outvars)
        self._values.constants |= zip(_named(opened.constvars, inner), consts, strict=True)
        eqn = _with_names(opened.eqns[0], inner).replace(source_info=op.eqn.source_info, ctx=op.eqn.ctx)
        op.eqn, op.reads = eqn, [atom for atom in eqn.invars if isinstance(atom, Var)]
        return results

    def _replace_attention(self) -> list[_Op]:
        """Finds attention, calls the kernel in place of the last product of each, and returns these products."""
        matches, kernel = dict[_Op, Match](), name_of(self._planner.options.attention)
        for op in self._leaves:
            if op.eqn.primitive is jax.lax.dot_general_p and not self._values.exponentials.isdisjoint(op.reads):
                try:
                    matches |= self._match(op)
                except AsWrittenError as error:
                    op.found = [Found(op.path, "", str(error))]
        is_settled = False
        while not is_settled:  # attention may read the weights of other attention
            is_settled = True
            for op in [*matches]:
                why = self._read_again(op, matches)
                jaxpr, _, _, words = (None, None, None, "") if why else self._call(op, matches[op])
                if jaxpr is None:
                    refusal = f"`{kernel}` refuses attention of the function, which stays as it is written: {words}"
                    op.found, is_settled = [Found(op.path, "", why or words, "" if why else refusal)], False
                    del matches[op]
        for op, each in matches.items():
            jaxpr, attention, reads, words = self._call(op, each)
            on_cpu = _refusal_on_cpu(attention, reads, has_derivative=not words)
            why, warning = str(attention), ""
            if words or on_cpu:
                call, (written, free), n = call_of(attention), self._written(op), len(reads)
                if words:
                    why += f"; its derivative as it is written: {words}"
                    call = _with_derivative_of(call, written, n, kernel, words)
                else:
                    call = functools.partial(_of_first, call, n)
                if on_cpu:
                    why += f"; on a CPU as it is written: {on_cpu}"
                    warning = f"`{kernel}` refuses attention on a CPU, which computes it as it is written: {on_cpu}"
                    call = functools.partial(_on_each_platform, call, written, n)
                reads = *reads, *free
                jaxpr = _traced(op, jax.jit(call), reads)
            op.found = [Found(op.path, kernel, why, warning)]
            self._replace(op, jaxpr, reads)
        return [*matches]

    def _match(self, op: _Op) -> dict[_Op, Match]:
        """Returns the attention that ends in a product, by the product; see `match`."""
        planner, form = self._planner, self._format
        if op.eqn.outvars[0] not in self._readers:
            return {}
        found = match(self._values, op.eqn, planner.options.attention, form.dtype)
        if found is None:
            return {}
        first = self._made[found.product]
        self._within[op] = self._between(first, found, op)
        if any(planner.enter(each.region, each.eqn).format is not form for each in (*self._within[op], op)):
            raise AsWrittenError("a region or a rule gives it another precision")
        for eqn in (first.eqn, op.eqn):
            dtypes = [jx.dtype_of(x) for x in (*eqn.invars, *eqn.outvars)]
            if planner.rule_of(eqn).op_class is not OpClass.LOWER or not form.takes(dtypes):
                raise AsWrittenError("its products do not run in the compute dtype: see their rows")
        return {op: found}

    def _between(self, first: _Op, match: Match, last: _Op) -> list[_Op]:
        """Returns the equations that compute the weights from the first product, and this product."""
        reads, chain = {match.product}, [first]
        for op in self._leaves[self._places[first] : self._places[last]]:
            if not reads.isdisjoint(op.reads):
                chain.append(op)
                reads.update({*op.eqn.outvars} - match.given)
        needed, within = {match.weights}, list[_Op]()
        for op in reversed(chain):
            if not needed.isdisjoint(op.eqn.outvars):
                within.append(op)
                needed.update({*op.reads} - match.given)
        return within[::-1]

    def _find_readers(self) -> dict[Any, list[_Op | None]]:
        """Returns the equations that read each variable, of those that have a use; None for the results."""
        readers: dict[Any, list[_Op | None]] = {atom: [None] for atom in self._outs if isinstance(atom, Var)}
        for op in reversed(self._leaves):
            if op.eqn.effects or not readers.keys().isdisjoint(op.eqn.outvars):
                for atom in op.reads:
                    readers.setdefault(atom, []).append(op)
        return readers

    def _read_again(self, op: _Op, matches: Mapping[_Op, Match]) -> str:
        """Returns what reads the scores or the weights of an attention again; empty if nothing does."""
        allowed = {*matches}.union(*[self._within[each] for each in matches])
        atoms = [x for each in self._within[op] for x in each.eqn.outvars]
        others = [reader for x in atoms for reader in self._readers.get(x, ()) if reader not in allowed]
        if not others or others[0] is None:
            return "its weights are returned" if others else ""
        if jx.is_of_derivative(others[0].eqn.source_info.name_stack):
            return "its derivative is in the program as well: write `jax.grad(autocast(f))` for `autocast(jax.grad(f))`"
        lines = [str(frame) for eqn in others[0].path[::-1] for frame in jx.frames_of(eqn)]
        return f"its weights are read again at {lines[0]}" if lines else "its weights are read again"

    def _call(self, op: _Op, match: Match) -> tuple[Any, Attention, Sequence[Var], str]:
        """Returns a call of the kernel as a jaxpr, what it computes, what it reads, and the words of the kernel.

        The jaxpr is None if the kernel refuses all variants, and there are words if it refuses the derivative.
        """
        for attention, reads in match.variants:
            key = attention, tuple([x.aval for x in reads])
            if key not in self._tried:  # layers are alike
                self._tried[key] = _try(op, attention, reads)
            jaxpr, words = self._tried[key]
            if jaxpr is not None:
                break
        return jaxpr, attention, reads, words

    def _written(self, op: _Op) -> tuple[Callable[..., Any], list[Var]]:
        """Returns an attention as the program computes it, and the values that it reads."""
        ops = [*self._within[op], op]
        made = {var for each in ops for var in each.eqn.outvars}
        free = list(dict.fromkeys([x for each in ops for x in each.reads if x not in made]))
        jaxpr = self._jaxpr.replace(constvars=[], invars=free, outvars=op.eqn.outvars, eqns=[x.eqn for x in ops])
        return lambda *args: jax.core.eval_jaxpr(jaxpr, (), *args)[0], free

    def rewritten(self) -> Any:
        """Returns the jaxpr, closed, with the kernel in place of each attention."""
        needed, kept = {x for x in self._outs if isinstance(x, Var)}, list[Any]()
        # A call is opened if attention ends in it, or reads a value that it computes and does not return.
        opened = {call for op in self._kernels for call in op.calls}
        for atom in [x for op in self._kernels for x in op.eqn.invars if x in self._made]:
            opened |= {call for call in self._made[atom].calls if atom not in call.eqn.outvars}

        def keep(ops: Sequence[_Op]) -> None:
            for op in reversed(ops):
                if op in opened:
                    keep(op.inside)
                elif op.eqn.effects or not needed.isdisjoint(op.eqn.outvars):
                    needed.update(op.reads)
                    kept.append(jx.in_scopes_of([call.eqn for call in op.calls], op.eqn))

        keep(self._ops)
        consts = {var: x for var, x in self._values.constants.items() if var in needed}
        jaxpr = self._jaxpr.replace(constvars=[*consts], eqns=kept[::-1], outvars=self._outs)
        return ClosedJaxpr(jaxpr, [*consts.values()])


def _named(atoms: Sequence[Any], names: Mapping[Any, Any]) -> list[Any]:
    return [names.get(atom, atom) if isinstance(atom, Var) else atom for atom in atoms]


def _with_names(eqn: Any, names: Mapping[Any, Any]) -> Any:
    return eqn.replace(invars=_named(eqn.invars, names), outvars=_named(eqn.outvars, names))


def _names_inside(jaxpr: Any, operands: Sequence[Any], outvars: Sequence[Any]) -> tuple[dict[Any, Any], dict[Any, Any]]:
    """Returns what variables of a jaxpr are called in place of an equation, and its results that have another name.

    Those are an operand, a constant, or another result.
    """
    opened, _ = jx.open_jaxpr(jaxpr)
    inner: dict[Any, Any] = {var: Var(var.aval) for var in opened.constvars}
    inner |= zip(opened.invars, operands, strict=True)
    results = zip(opened.outvars, outvars, strict=True)
    inner |= {var: name for var, name in results if isinstance(var, Var) and var not in inner}
    pairs = zip(outvars, _named(opened.outvars, inner), strict=True)
    return inner, {var: name for var, name in pairs if name is not var}


def _leaves(ops: Sequence[_Op]) -> Iterator[_Op]:
    """Yields equations, in place of a call that is read in place those in it."""
    for op in ops:
        yield from _leaves(op.inside) if op.inside else [op]


# The primitives whose derivatives are those of JAX, which refuses none.
_DIFFERENTIABLE = {name for name, rule in RULES.items() if not (isinstance(rule, Rule) and rule.is_kernel)}
_DIFFERENTIABLE |= {"jit", "cast_inputs", "iota", "and", "or", "not"}


def _try(op: _Op, attention: Attention, reads: Sequence[Var]) -> tuple[Any, str]:
    """Returns a call of a kernel as a jaxpr, and its words if it refuses its derivative; or None and why it refuses."""
    jaxpr, call = None, call_of(attention)
    try:
        jaxpr = _traced(op, call, reads)
        if jx.holds(jaxpr, _may_raise):  # it takes as long to trace as the kernel
            _traced(op, functools.partial(_gradients, call), reads)
        return jaxpr, ""
    except Exception as error:
        return jaxpr, _words_of(error)


def _refusal_on_cpu(attention: Attention, reads: Sequence[Var], has_derivative: bool) -> str:
    """Returns the words of a kernel that is traced on a CPU and refuses to be lowered for one; empty for any other."""
    shapes = tuple([tuple(jx.shape_of(atom) or ()) for atom in reads])
    is_known = all(isinstance(n, int) for shape in shapes for n in shape)
    if target_device().platform != "cpu" or not is_known:
        return ""
    return _refusal_to_lower(attention, shapes, tuple(map(jx.dtype_of, reads)), has_derivative)


@functools.lru_cache(maxsize=1024)
def _refusal_to_lower(attention: Attention, shapes: Any, dtypes: Any, has_derivative: bool) -> str:
    """Lowers a kernel for a CPU: JAX says only then which products and which kernels a CPU lacks."""
    call = call_of(attention)

    def run(*arrays: Any) -> Any:
        return call(*arrays), _gradients(call, *arrays) if has_derivative else ()

    # No value varies along an axis of a mesh here, and JAX lowers what is in a `shard_map` together with it.
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
        try:
            traced = jax.jit(run).trace(*map(jax.ShapeDtypeStruct, shapes, dtypes))
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


def _of_first(call: Callable, n: int, *arrays: Any) -> Any:
    return call(*arrays[:n])


def _on_each_platform(call: Callable, written: Callable, n: int, *arrays: Any) -> Any:
    """Calls a kernel, and on a CPU a function of the arrays behind the first `n`.

    A program that is traced on a CPU may be lowered for a GPU: `jax.export` and `lower(lowering_platforms=...)` do.
    """
    return jax.lax.platform_dependent(*arrays, cpu=lambda *xs: written(*xs[n:]), default=call)


def _with_derivative_of(call: Callable, written: Callable, n: int, name: str, words: str) -> Callable[..., Any]:
    """Returns a function of `n` arrays, and those of another function, which is differentiated in its place."""

    @jax.custom_vjp
    def attend(*arrays: Any) -> Any:
        return call(*arrays[:n])

    def forward(*arrays: Any) -> Any:
        warn(f"`{name}` refuses the derivative of attention, which is computed as it is written: {words}")
        return jax.vjp(written, *arrays[n:])

    attend.defvjp(forward, lambda pull, cotangent: (*[None] * n, *pull(cotangent)))
    return attend


def _traced(op: _Op, fun: Callable, operands: Sequence[Any]) -> Any:
    """Returns a function as a jaxpr of one equation that calls it, in the settings of another equation."""
    with jx.versions.context_of(op.eqn):
        return jx.trace(fun, [atom.aval for atom in operands])


def _may_have_attention(jaxpr: Any) -> bool:
    """Whether a jaxpr, or one inside it, has products and exponentials."""
    return jx.holds(jaxpr, _is_product) and jx.holds(jaxpr, _is_exponential)


def _is_product(primitive: Primitive, *args: Any, **params: Any) -> bool:
    return primitive is lax.dot_general_p


def _is_exponential(primitive: Primitive, *args: Any, **params: Any) -> bool:
    return primitive.name in EXPONENTIALS


def _may_raise(primitive: Primitive, *args: Any, **params: Any) -> bool:
    """Whether the derivative of an op is not JAX's own, which refuses none."""
    return primitive.name not in _DIFFERENTIABLE


_programs = jx.Cache()


def _rewritten(jaxpr: Any, *args: Any) -> tuple[Any, list[Found]]:
    """Returns a jaxpr with the kernel in place of each attention, the same for the same jaxpr, and what was found.

    The other arguments are those of `_Program`.
    """
    opened, consts = jx.open_jaxpr(jaxpr)

    def rewrite() -> tuple[Any, list[Found]]:
        program = _Program(jaxpr, *args)
        return program.rewritten() if program.is_changed else None, program.found

    new, found = _programs(opened, (tuple(map(id, consts)), args, jax.sharding.get_abstract_mesh()), rewrite)
    return new or jaxpr, found


def check_kernel(attention: Any) -> None:
    """Checks the argument `attention`.

    Raises:
        TypeError: it is neither a string nor a function that can be hashed.
        ValueError: a string is not an `implementation` that this version of JAX has.
    """
    if attention is None or (callable(attention) and isinstance(attention, Hashable)):
        return
    hint = typing.get_type_hints(jax.nn.dot_product_attention)["implementation"]  # `Literal["xla", "cudnn"] | None`
    names = [name for each in typing.get_args(hint) for name in typing.get_args(each)]
    if attention not in names:
        shown = ", ".join([f'"{name}"' for name in names])
        raise (ValueError if isinstance(attention, str) else TypeError)(
            f"`attention` must be None, an implementation of `jax.nn.dot_product_attention` ({shown}), or a function "
            f"with its signature that can be hashed, got {quote(attention)}; for a kernel of another library write "
            "`attention=kernel`, the function itself"
        )


def with_kernel(jaxpr: Any, planner: Planner, region: Region) -> tuple[Any, list[Found]]:
    """Returns a closed jaxpr with a kernel in place of each attention, and each softmax that a product reads.

    Args:
        jaxpr: the program.
        planner: knows the kernel, the rules of the ops, and the regions that they are in.
        region: the region around it. Its format is that of the kernel.
    """
    opened, _ = jx.open_jaxpr(jaxpr)
    if not _may_have_attention(jaxpr) or any(map(jx.is_reference, opened.invars)):
        return jaxpr, []
    return _rewritten(jaxpr, (None,) * len(opened.invars), region, planner, region.format)


def name_of(kernel: Any) -> str:
    """Returns what `explain` and warnings call a kernel."""
    return kernel if isinstance(kernel, str) else getattr(kernel, "__name__", type(kernel).__name__)
