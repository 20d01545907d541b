"""Checks the optax transformations in front of and around one that unscales, by the units of what they compute."""

import contextlib
import inspect
import traceback
import types
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.tree_util import keystr

from jmp_amp import _jaxpr as jx
from jmp_amp._loss_scale._units import Origins, Unit, UnitAnalysis, describe_unit
from jmp_amp._trees import multiply_wide

_is_analysed = jax.make_user_context(False)  # of JAX's caches, so that no jitted function keeps what is traced here
_EPSILON = 1e-4  # smaller constants avoid a division by 0, and clip nothing
_UNKNOWN = (Exception,)  # whatever a function of the user raises, if it is traced a second time
_GRADIENTS, _UNSCALED = "scaled gradients", "unscaled gradients"  # origins


def is_analysed() -> bool:
    """Whether `Composition` traces the transformation here."""
    return _is_analysed.value


class Composition:
    """The check for one transformation that unscales."""

    def __init__(self, name: str, cure: str) -> None:
        """Takes the name of the transformation, and what to do with `{outer}`, the function around it."""
        self._name, self._cure = name, cure
        self._passed = jx.Cache()  # outside `jit`, each composition is checked once

    def check(self, updates: Any, *, is_scaled: bool) -> None:
        """Raises ValueError if what runs around the `update` that calls this is wrong for scaled gradients.

        Transformations in front of it, in a chain, must commute with a scaling of the gradients and pass on what is not
        finite. None may keep scaled gradients in a state that it reads, nor return them. Nothing is said of a
        composition that cannot be traced, and of values whose unit is not known.

        Args:
            updates: what `update` got.
            is_scaled: whether the gradients may be multiplied by another scale than 1.
        """
        frame, outer = _outermost_update()
        if frame is None:
            return
        held = [frame.f_locals.get(name) for name in frame.f_code.co_freevars]

        def passed() -> Any:
            if error := _Analysis(self._name, outer, is_scaled).find_error(frame):
                raise ValueError(f"{error}; {self._cure.format(outer=outer)}")
            return held  # keeps their ids

        if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(updates)):
            passed()
        else:
            self._passed(frame.f_code, (*map(id, held), is_scaled), passed)


def as_unscaled(updates: Any) -> Any:
    """Returns what takes the place of unscaled updates where the transformation is analysed."""
    return _named(_UNSCALES, lambda tree: multiply_wide(tree, jnp.float32(1)))(updates)


_PREFIX = "jmp_amp_"
_UNSCALES, _BEHIND = _PREFIX + "unscales", _PREFIX + "behind_"


def _named(name: str, fun: Callable) -> Callable:
    fun.__name__ = name
    return jax.jit(fun)


def _outermost_update() -> tuple[types.FrameType | None, str]:
    """Returns the frame of the outermost `update` of optax around a transformation that unscales, and its name."""
    found, name = None, ""
    n_own = 0
    for frame, _ in traceback.walk_stack(inspect.currentframe()):
        module, code = frame.f_globals.get("__name__", ""), frame.f_code
        n_own += module.startswith("jmp_amp._loss_scale") and code.co_name == "update"
        if n_own > 1:  # all is unscaled inside another one
            break
        if module.startswith("optax.") and code.co_varnames[: code.co_argcount][-2:] == ("state", "params"):
            found = frame
            name = name if module == "optax._src.base" else code.co_qualname.partition(".")[0]
    return found, name


def _call_of(frame: types.FrameType) -> tuple[Callable, Any, Any, Any, dict[str, Any]]:
    """Returns the `update` of a frame, as it is called there: a function and its arguments.

    A chain may have transformed the updates before it calls what unscales: only their shapes count.
    """
    code, values = frame.f_code, frame.f_locals
    *bound, name = code.co_varnames[: code.co_argcount - 2]
    last = code.co_argcount + code.co_kwonlyargcount
    # It may have deleted arguments that it does not read.
    extra = {var: values.get(var) for var in code.co_varnames[code.co_argcount : last]}
    if code.co_flags & inspect.CO_VARKEYWORDS:
        extra |= values.get(code.co_varnames[last], {})
    cells = [types.CellType(_with_places(values[var])) for var in code.co_freevars]
    function = types.FunctionType(code, frame.f_globals, closure=tuple(cells))

    def update(updates: Any, state: Any, params: Any, extra: dict[str, Any]) -> Any:
        return function(*[values[var] for var in bound], updates, state, params, **extra)

    return update, values.get(name), values.get("state"), values.get("params"), extra


def _with_places(value: Any) -> Any:
    """Returns functions in a list or tuple as functions that mark the updates that they return with their place."""

    def with_place(place: int, fun: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            result = fun(*args, **kwargs)
            if not (isinstance(result, tuple) and len(result) == 2):  # of `init`
                return result
            updates, state = result
            return _named(f"{_BEHIND}{place}", lambda tree: jax.tree.map(jnp.copy, tree))(updates), state

        return call if inspect.isroutine(fun) else fun

    if type(value) not in (list, tuple):
        return value
    return type(value)(jax.tree.map(lambda fun, i=i: with_place(i, fun), x) for i, x in enumerate(value))


class _Analysis(UnitAnalysis):
    """The units of what an `update` of optax computes around the transformation that unscales."""

    def __init__(self, name: str, outer: str, is_scaled: bool) -> None:
        """Takes the name of the transformation, of the function around it, and whether gradients have a unit."""
        super().__init__(1, _EPSILON)
        self._name, self._outer, self._is_scaled = name, outer, is_scaled
        unit = self.scales[0] if is_scaled else self.unscaled
        self._gradient = unit._replace(is_data_free=False, origins=frozenset({_GRADIENTS}))
        self._is_guarded = False  # whether a branch is entered that a check for overflows selects
        self._reached: list[Unit] = []  # what is unscaled
        self._behind: list[tuple[str, list[Unit]]] = []  # what each place in a chain returns, in front of that

    def find_error(self, frame: types.FrameType) -> str | None:
        """Returns what is wrong with the `update` of a frame; None also if it cannot be traced a second time."""
        with contextlib.suppress(*_UNKNOWN), _is_analysed(True):
            update, *args = _call_of(frame)
            program, arrays, rebuild = jx.trace_call(update, args, {})
            _, with_arrays = jx.split_arrays(tuple(args))
            leaves = jax.tree.leaves_with_path(with_arrays([_ARRAY] * len(arrays)))
            paths = [path for path, x in leaves if x is _ARRAY]
            is_inexact = [jx.is_inexact(var) for var in jx.open_jaxpr(program)[0].outvars]
            kept: dict[Any, Unit] | None = None  # the state that holds scaled gradients, after one update
            while True:
                self.errors, self._reached, self._behind = {}, [], []
                inputs = [self._input(path, jnp.shape(x), kept) for path, x in zip(paths, arrays, strict=True)]
                units = [x if ok else None for x, ok in zip(self.infer(program, inputs), is_inexact, strict=True)]
                leaves = jax.tree.leaves_with_path(rebuild(units), is_leaf=lambda x: isinstance(x, Unit))
                results = {path: x for path, x in leaves if isinstance(x, Unit)}
                before, kept = kept, (kept or {}) | {path: x for path, x in results.items() if _is_kept(path, x)}
                if before is not None and before.keys() == kept.keys():
                    return self._error_in(results)
        return None

    def _input(self, path: Any, shape: Any, kept: dict[Any, Unit] | None) -> Unit:
        origin = frozenset({path})
        group = _group(path)
        if group == "updates":
            return self._gradient
        if group == "state" and kept is None:
            return Unit(is_data_free=False, origins=origin)
        if kept and path in kept:
            return kept[path]._replace(origins=origin | {_GRADIENTS})
        if group == "extra arguments" and path[-1] == jax.tree_util.DictKey("loss_scale"):
            return self.scales[0]
        if group == "extra arguments" and shape:  # such as gradients
            return Unit(is_data_free=False)
        return self.unscaled._replace(origins=origin)

    def _error_in(self, results: dict[Any, Unit]) -> str | None:
        if not any(_GRADIENTS in unit.origins for unit in self._reached):
            return None
        around = f"`{self._outer}` around `{self._name}`"
        for place, units in self._behind:
            for error in filter(None, map(self._error_of, units)):
                return f"a transformation in front of `{self._name}` in a chain, at [{place}], {error}"
        for error in filter(None, map(self._error_of, self._reached)):
            return f"{around} {error}"
        updates = {path[1:]: unit for path, unit in results.items() if _group(path) == "updates"}
        read, more = Origins(), Origins().union(*(x.origins for x in (*self._reached, *updates.values())))
        while read != more:
            read, more = more, more.union(*(unit.origins for path, unit in results.items() if path in more))
        for path, unit in results.items():
            if path in read and _is_kept(path, unit):
                where = keystr(path[1:])
                return f"{around} keeps scaled gradients in its state at {where}, so an overflow would remain there"
        for path, unit in updates.items():
            if self._is_scaled and _GRADIENTS in unit.origins:
                return f"{around} returns scaled gradients, or what is computed from them, at `{keystr(path)}`"
        return None

    def _error_of(self, unit: Unit) -> str | None:
        """Returns what is wrong with a value in the place of a scaled gradient."""
        for error in self.errors:
            if error in unit.origins:
                return error
        if _UNSCALED in unit.origins:
            return "unscales gradients twice"
        if unit.is_data_free or unit.powers in (None, self._gradient.powers):
            return None
        return f"returns {describe_unit(unit)}, which must not be divided by it"

    def error(self, predicate: str, scaled: Unit) -> str:
        """Returns what the transformation does."""
        return predicate

    def hides(self, flag: Unit) -> Origins:
        """Returns an error: the loss scale must see overflows."""
        error = "replaces gradients that are not finite, so the loss scale does not back off"
        self.errors[error] = None
        return frozenset({error})

    def constant(self, x: Any) -> Unit:
        """Of an array, nothing is known: it may be the scale. What stands in the code is a number."""
        return Unit(is_data_free=False) if isinstance(x, jax.Array) else super().constant(x)

    def infer_equation(self, eqn: Any, operands: list[Unit]) -> list[Unit]:
        """Stops where the updates are unscaled, and where a transformation of a chain returns them."""
        name = str(eqn.params.get("name"))
        floats = [unit for unit, atom in zip(operands, eqn.invars, strict=True) if jx.is_inexact(atom)]
        if name == _UNSCALES:
            guard = self.hides(self._gradient) if self._is_guarded else frozenset()
            self._reached += [unit._replace(origins=unit.origins | guard) for unit in floats]
            return [self.unscaled._replace(origins=frozenset({_UNSCALED}))] * len(eqn.outvars)
        if name.startswith(_BEHIND):
            if not self._reached:
                self._behind.append((name.removeprefix(_BEHIND), floats))
            return operands
        units = super().infer_equation(eqn, operands)
        # A flag or a count that is computed from gradients is finite.
        return [
            unit if jx.is_inexact(var) else unit._replace(origins=unit.origins - {_GRADIENTS})
            for unit, var in zip(units, eqn.outvars, strict=True)
        ]

    def infer_branches(self, jaxprs: Sequence[Any], inputs: list[Unit], index: Unit) -> list[Unit]:
        """Notes whether a check for overflows selects the branch."""
        before = self._is_guarded
        self._is_guarded |= bool(index.finds_nonfinite)
        units = super().infer_branches(jaxprs, inputs, index)
        self._is_guarded = before
        return units


_ARRAY = object()


def _group(path: Any) -> str:
    return ("updates", "state", "params", "extra arguments")[path[0].idx]


def _is_kept(path: Any, unit: Unit) -> bool:
    return _group(path) == "state" and _GRADIENTS in unit.origins
