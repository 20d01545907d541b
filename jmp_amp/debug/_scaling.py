"""`check_loss_scaling`: checks that a train step scales and unscales its gradients consistently."""

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import SequenceKey, keystr

from jmp_amp import _jaxpr as jx
from jmp_amp import _loss_scale as ls
from jmp_amp._calls import listed, transformation, warn
from jmp_amp._loss_scale import MICRO_BATCHES, LossScaleState, Origins, Unit, UnitAnalysis, describe_unit, is_new_scale
from jmp_amp._modules import is_metric, is_module
from jmp_amp._trees import all_finite
from jmp_amp.debug._report import as_jit_takes, check_callable, grouped

Path = tuple[Any, ...]

_MAX_ERRORS = 5
_STILL_SCALED = (
    "the gradients are still scaled here; unscale them first, with `dynamic_loss_scale` around the whole optimizer"
)
_NEVER_SCALED = (
    "the gradients are unscaled twice, or were never scaled by this scale, or a factor comes from the norm of "
    "gradients that are still scaled; pass `opt_state=opt_state` to `amp.value_and_grad`, unscale once, then clip"
)


_HIDES = (
    "replaces non-finite values of gradients that are still scaled, so that the loss scale does not see overflows: "
    "leave them in; `dynamic_loss_scale` skips the step"
)
_NEVER_CHECKED = (
    "the program checks gradients for overflows only where another check, as of `apply_if_finite`, found none, so that "
    "the loss scale does not back off: `dynamic_loss_scale` skips the step, so leave the other one out"
)
_SAME_KEY = (
    "draws the same random numbers in every micro-batch: pass a typed key, `jax.random.key(...)`, as an argument of "
    "the loss, or split the key and name it in `batch_argnums`"
)
_IS_LOGGED = "divide it by the scale, or log `amp.metrics(opt_state)['grad_norm']`"
_IS_ADAPTIVE = (
    "solves for cotangents as exactly as a tolerance says. They are multiplied by the loss scale, so an absolute "
    "tolerance takes more evaluations (of `odeint`, 2.9 times as many at 2^16, 4.5 times at 2^24): use bfloat16 with "
    "`LossScale.none()`, or a smaller scale"
)
_STAYS = (
    "a loss scale that is too high never backs off, and all steps are skipped; return the state that `update` returns, "
    "in which `dynamic_loss_scale` has kept what must be kept"
)
_MOVES = (
    "That is right for counts and random keys; keep averages, statistics and pools as they were, by "
    "`optax.tree.where(amp.metrics(opt_state)['last_finite'], new, old)`, but not the state of the optimizer"
)


@transformation
def check_loss_scaling(step: Callable) -> Callable[..., None]:
    """Returns a function that raises if a train step does not scale and unscale its gradients consistently.

    It traces `step`. The check is a dimensional analysis with the loss scale as its unit: the loss has no unit, the
    scaled loss and its gradients have the unit of the scale, and unscaled gradients have none. Values that are added,
    compared or selected between must have the same unit; exponentials and logarithms take values without a unit. The
    check finds these errors, in any optimizer:

    - The loss is not scaled, or scaled by another scale than the one that divides the gradients: that of another state,
      or the next one, which `update` returns. If the step uses `dynamic_loss_scale`, tracing it already raises for most
      of these.
    - The gradients are unscaled twice, in part, or not at all, before they reach the optimizer state or the parameters.
    - The gradients are clipped, or weight decay or noise is added, while they are scaled. Between `value_and_grad` and
      `update`, tracing the step already raises for this.
    - Another check keeps overflows from the loss scale, as `apply_if_finite` around `dynamic_loss_scale` does.

    It warns of what may be intended: `jnp.nan_to_num` of scaled gradients, scalar results that are scaled, such as a
    logged norm of gradients, errors that change no other results, an adaptive solver of cotangents, and random numbers
    that all micro-batches of `accumulate_steps` share.

    Then it runs `step` with finite gradients, and with ones that overflow, and warns of what it changes then, as
    averages of parameters, batch statistics and pools; and of a state that it keeps, whose scale never backs off. It
    compares results, and what is written into Flax NNX modules, with arguments of the same place, and donates none. It
    does not run for a `jax.ShapeDtypeStruct`, nor if `step` has side effects, calls the host or is a loop over steps.

    Args:
        step: the train step, jitted or not, or a function that makes the state and runs steps. Its arguments contain
            the loss scale, as the state of `dynamic_loss_scale` or as a `LossScaleState`, unless it makes it itself.

    Returns:
        A function with the signature of `step` that returns None. Its array arguments may be `jax.ShapeDtypeStruct`.

    Raises:
        TypeError: `step` is not callable.
        ValueError: the returned function found an error, and names its lines; or there is no loss scale.

    Examples:
        >>> import jax, jax.numpy as jnp, optax
        >>> import jmp_amp as amp
        >>> tx = amp.dynamic_loss_scale(optax.sgd(0.1))
        >>> def step(params, state, unscaled=True):
        ...     loss, grads = amp.value_and_grad(lambda w: jnp.sum(w**2), opt_state=state)(params)
        ...     updates, state = tx.update(grads, state, params)
        ...     return params + (updates if unscaled else -0.1 * grads), state, loss
        >>> params = jnp.ones(3)
        >>> amp.debug.check_loss_scaling(step)(params, tx.init(params))
        >>> amp.debug.check_loss_scaling(step)(params, tx.init(params), unscaled=False)
        Traceback (most recent call last):
          ...
        ValueError: `step` does not scale and unscale its gradients consistently:
        - at ... (step), the program adds a value multiplied by the loss scale and an unscaled value: the ...

    References:
        torch's `GradScaler` records a stage for each optimizer, and raises if `unscale_` is called twice.
    """
    check_callable(step, "check_loss_scaling")

    @functools.wraps(step, updated=())
    def check(*args: Any, **kwargs: Any) -> None:
        args, kwargs = as_jit_takes(args, kwargs)
        found: list[tuple[Path, Any]] = []

        @functools.wraps(step, updated=())
        def leaves(*args: Any, **kwargs: Any) -> list[Any]:
            every = jax.tree.leaves_with_path((args, kwargs), is_leaf=is_module)
            modules = [(path, x) for path, x in every if is_module(x)]
            given = jax.tree.leaves([x for _, x in modules])
            found[:] = jax.tree.leaves_with_path(step(*args, **kwargs))
            known = set(map(id, [*given, *(x for _, x in found)]))
            # What the step has written into its modules, by the paths of the arguments.
            written = [((*path, *inner), x) for path, each in modules for inner, x in jax.tree.leaves_with_path(each)]
            found.extend((path[1:], x) for path, x in written if id(x) not in known)
            return [x for _, x in found]

        program, arrays, rebuild = jx.trace_call(leaves, args, kwargs, jax.ShapeDtypeStruct)
        # The loss scale of each `LossScaleState`, by its position among the arrays.
        states = _nodes((args, kwargs), lambda x: isinstance(x, LossScaleState))
        scales = [jax.tree.leaves(state.loss_scale)[0] for state in states]
        is_scale = [any(x is scale for scale in scales) for x in arrays]
        if not any(is_scale) and not any(is_new_scale(eqn) for *_, eqn in jx.equations_in(program)):
            raise ValueError(
                "there is no loss scale in the arguments, and `step` makes none; pass the state of "
                "`dynamic_loss_scale`, or a `LossScaleState`"
            )
        kept = {id(x) for x in arrays}
        before = [(path[1:], x) for path, x in jax.tree.leaves_with_path((args, kwargs)) if id(x) in kept]
        after = [(path, y) for (path, x), y in zip(found, rebuild(program.out_avals), strict=True) if y is not x]
        # An argument that is an array itself, or a scalar, is an origin of what is computed from it.
        origins = [frozenset({keystr(path)} if len(path) == 1 or x.shape == () else ()) for path, x in before]
        analysis, units = _analyze(program, is_scale, origins, {})
        named = [bool(each) and (each, x.shape) in analysis.named for each, (_, x) in zip(origins, before, strict=True)]
        if any(named):
            is_scale = [*map(operator.or_, is_scale, named)]
            analysis, units = _analyze(program, is_scale, origins, {})
        if analysis.equal:
            analysis, units = _analyze(program, is_scale, origins, analysis.equal)
        replaced = _replaced(before, after, lambda i, j: len(before[i][0]) > 1 or origins[i] <= units[j].origins)
        arguments: Any = jx.open_jaxpr(program)[0].debug_info.arg_names
        names = [arguments[replaced[j]] if j in replaced else f"result{keystr(x[0])}" for j, x in enumerate(after)]
        # Under `vmap` and `pmap`, a scalar has the shape of a scale, or one that no argument has.
        shapes = {x.shape for _, x in before} - {(), *map(jnp.shape, scales)}
        is_scalar = [len(x.shape) <= 1 and x.shape not in shapes for _, x in after]
        for result in zip(names, units, is_scalar, strict=True):
            analysis.check_result(*result)
        analysis.check_logged(units, [bool(replaced) and j not in replaced and ok for j, ok in enumerate(is_scalar)])
        if analysis.errors:
            lines = "\n".join(f"- {error}" for error in list(analysis.errors)[:_MAX_ERRORS])
            raise ValueError(f"`step` does not scale and unscale its gradients consistently:\n{lines}")
        if not analysis.iterates and states:
            may_move = _nodes((args, kwargs), lambda x: _is_of_optimizer(x) or is_metric(x))
            own = set(map(id, jax.tree.leaves(may_move)))
            is_other = {j: id(arrays[i]) not in own for j, i in replaced.items()}
            leaves_of = [set(map(id, jax.tree.leaves(state))) for state in states]
            next_states = [{j for j, i in replaced.items() if id(arrays[i]) in ids} for ids in leaves_of]
            moved, stuck = _run_skipped(program, arrays, is_scale, replaced, next_states)
            if _nodes((args, kwargs), _is_link):  # which passes zeros on, so that a momentum moves the parameters
                moved = {j: x for j, x in moved.items() if not all_finite(x)}
            analysis.check_moved({names[j]: x for j, x in moved.items() if is_other[j]})
            analysis.warnings |= {f"where gradients overflow, `step` keeps `{names[j]}`: {_STAYS}": None for j in stuck}
        for warning in analysis.warnings:
            warn(warning)

    return check


def _analyze(
    program: Any, is_scale: Sequence[bool], origins: Sequence[Origins], equal: dict[Any, Unit]
) -> tuple["_StepAnalysis", list[Unit]]:
    """Returns the analysis of a step, and the units of its results."""
    analysis = _StepAnalysis(sum(is_scale) + 1, equal)
    inputs = [analysis.unscaled._replace(origins=each) for each in origins]
    return analysis, analysis.infer(program, jx.combine(is_scale, analysis.scales, inputs))


def _nodes(tree: Any, selects: Callable[[Any], bool]) -> list[Any]:
    """Returns the outermost nodes that are selected."""
    return [x for x in jax.tree.leaves(tree, is_leaf=selects) if selects(x)]


def _is_link(x: Any) -> bool:
    """Whether a node is the state of an `unscale_and_check` that checks by itself."""
    return isinstance(x, ls.UnscaleAndCheckState) and x.last_finite is not None


def _is_of_optimizer(x: Any) -> bool:
    """Whether a node is the state of the wrapper, or of a chain around it, in which others may move."""
    kinds = ls.DynamicLossScaleState | ls.UnscaleAndCheckState | LossScaleState
    is_chain = type(x) is tuple and all(isinstance(each, tuple) for each in x)
    return isinstance(x, kinds) or (is_chain and bool(_nodes(x, lambda each: isinstance(each, kinds))))


def _replaced(
    before: Sequence[tuple[Path, Any]], after: Sequence[tuple[Path, Any]], depends: Callable[[int, int], bool]
) -> dict[int, int]:
    """Returns the arguments whose next values are among the results, by the numbers of these.

    A result is the next value of a leaf with its type and path in an argument, at the same place, or else the first. An
    array on its own is at the same place, and depends on the old one: another could be a loss, or a reconstruction.
    """
    arguments = grouped(range(len(before)), lambda i: (before[i][0][1:], before[i][1].shape, before[i][1].dtype))
    replaced = dict[int, int]()
    for j, (path, x) in enumerate(after):
        place = path if path and isinstance(path[0], SequenceKey) else (SequenceKey(0), *path)
        equal = arguments.get((place[1:], x.shape, x.dtype), [])
        free = [i for i in equal if i not in replaced.values() and depends(i, j)]
        same = [i for i in free if before[i][0] == place]
        if found := same or (free if place[1:] else []):
            replaced[j] = found[0]
    return replaced


def _run_skipped(
    program: Any, arrays: Sequence[Any], is_scale: Sequence[bool], replaced: dict[int, int], states: Sequence[set[int]]
) -> tuple[dict[int, Any], list[int]]:
    """Returns the results that a skipped step changes, by their numbers, and the first of a state that only it keeps.

    The step runs with a scale of 1, so that averages differ from what they average, and then with one of NaN. The next
    states of loss scales are compared for the same arguments, of which a step that updates now and then updates both or
    none. It does not run without values, or if it has side effects.
    """
    opened, consts = jx.open_jaxpr(program)
    are_known = all(isinstance(x, jax.Array | np.ndarray) and ls.is_concrete(x) for x in (*arrays, *consts))
    if opened.effects or not are_known or any("callback" in eqn.primitive.name for *_, eqn in jx.equations_in(program)):
        return {}, []

    @jax.jit
    def run(scale: float, arrays: Sequence[Any]) -> tuple[list[Any], dict[int, Any]]:
        """Returns the results, and which of them are equal to their arguments."""
        old = [jnp.full_like(x, scale) if ok else x for x, ok in zip(arrays, is_scale, strict=True)]
        new = jax.core.eval_jaxpr(opened, consts, *old)
        return new, {j: jnp.array_equal(old[i], new[j], equal_nan=True) for j, i in replaced.items()}

    with jax.debug_nans(False), jax.debug_infs(False):
        (taken, idle), (_, kept), old = run(1.0, arrays), run(jnp.nan, arrays), [*arrays]
        for j, i in replaced.items():
            old[i] = taken[j]
        new, same = run(jnp.nan, old)
    stuck = [min(state) for state in states if all(kept[j] for j in state) and not all(idle[j] for j in state)]
    return {j: new[j] for j in replaced if not same[j]}, stuck


class _StepAnalysis(UnitAnalysis):
    """The units of a train step.

    Attributes:
        warnings: what may be intended.
        equal: the units of scales that are known to be equal to others, or 1.
        named: the origins and the shape of unscaled values that become the scale of a state.
        iterates: whether there are several updates, the second of which has another scale; or a loop over scaled values
            that ends when values say so, which NaN may never do.
    """

    def __init__(self, n_scales: int, equal: dict[Any, Unit]) -> None:
        """Takes `equal`, and the number of loss scales, the last of which is a new one of `step`."""
        super().__init__(2 * n_scales)  # each of this step, and each of a later one
        self.scales = [equal.get(scale.powers, scale) for scale in self.scales[:n_scales]]
        self.warnings, self.equal, self.iterates = dict[str, None](), dict[Any, Unit](), False
        self.named = set[tuple[Origins, Any]]()
        self._shared: Unit | None = None
        self._is_guarded = False  # whether a branch is entered that a check for overflows selects

    def check_result(self, name: str, unit: Unit, is_scalar: bool) -> None:
        """Adds an error for a result that is scaled and unscaled by different scales, and warns of scaled scalars."""
        said = f"`step` returns `{name}`, {describe_unit(unit)}"
        if unit.is_scaled and sum(unit.powers or ()) == 0:
            self.errors[f"{said}: {ls.ITS_OWN_SCALE}"] = None
        elif unit.is_scaled and is_scalar:
            self.warnings[f"{said}: {_IS_LOGGED}"] = None

    def check_logged(self, units: Sequence[Unit], are_logged: Sequence[bool]) -> None:
        """Makes errors warnings that change nothing but scalars beside the next values of arguments."""
        pairs = [*zip(units, are_logged, strict=True)]
        logged, used = (
            frozenset[str]().union(*(x.origins for x, ok in pairs if ok == is_it)) for is_it in (True, False)
        )
        for error in [each for each in self.errors if each in logged - used - self.decides]:
            self.warnings[f"{error}. Only what `step` logs depends on it"] = self.errors.pop(error)

    def check_moved(self, moved: dict[str, Any]) -> None:
        """Warns of results that a skipped step changes, unless they are counts and random keys, which should change."""
        if any(map(jx.is_inexact, moved.values())):
            changed = [f"`{name}`{'' if all_finite(x) else ' (not finite)'}" for name, x in moved.items()]
            self.warnings[f"where `step` is skipped, it changes {listed(changed)}. {_MOVES}"] = None

    def error(self, predicate: str, scaled: Unit) -> str:
        """Names the line and the cure."""
        power = sum(scaled.powers or ())
        cure = _STILL_SCALED if power > 0 else _NEVER_SCALED if power else ls.ITS_OWN_SCALE
        return f"{jx.site_of(self.path).where}, the program {predicate}: {cure}"

    def hides(self, flag: Unit) -> frozenset[str]:
        """Warns if single gradients are replaced. A step that is skipped by hand replaces all."""
        if flag.finds_nonfinite == "each":
            self.warnings[f"{jx.site_of(self.path).where}, `step` {_HIDES}"] = None
        return frozenset()

    def infer_equation(self, eqn: Any, operands: list[Unit]) -> list[Unit]:
        """Warns of random numbers that do not depend on the number of the micro-batch.

        A check for overflows in a branch that another one selects, as under `apply_if_finite`, never finds one.
        """
        marks = jx.marks_in(eqn.source_info.name_stack)
        if is_set := ls.is_set_scale(eqn) and not operands[0].is_data_free:
            self.named.add((operands[0].origins, jx.shape_of(eqn.outvars[0])))
        if is_set or is_new_scale(eqn) or ls.NEXT_SCALE in marks:
            scale = next((unit for unit in operands if any(unit.powers or ())), self.scales[-1])
            return [_next(scale) if ls.NEXT_SCALE in marks else scale] * len(eqn.outvars)
        if divides := {ls.EQUAL_SCALE, ls.NO_SCALE, ls.OTHER_SCALE}.intersection(marks):
            is_next = operands[-1] == _next(operands[-1]) and any(operands[-1].powers or ())
            if ls.NO_SCALE in divides:
                self.equal[operands[-1].powers] = self.constant(1)
            elif ls.EQUAL_SCALE in divides and not is_next:
                self.equal[operands[-1].powers] = self._shared = self._shared or operands[-1]
            is_in_loop = any(each.primitive.name in ("scan", "while") for each in self.path)
            self.iterates |= is_in_loop or is_next
        if self._is_guarded and ls.CHECK in marks:
            self.errors[f"{jx.site_of([*self.path, eqn]).where}, {_NEVER_CHECKED}"] = None
        is_random = eqn.primitive.name in ("random_bits", "random_gamma")
        if is_random and MICRO_BATCHES not in operands[0].origins and any(map(_accumulates, self.path)):
            self.warnings[f"{jx.site_of([*self.path, eqn]).where}, `step` {_SAME_KEY}"] = None
        errors, units = dict(self.errors), super().infer_equation(eqn, operands)
        is_scaled = any(unit.is_scaled for unit in operands)
        self.iterates |= eqn.primitive.name == "while" and is_scaled and _holds_solver(eqn)
        if self.errors != errors and is_scaled and jx.is_backward(eqn.source_info.name_stack) and _holds_solver(eqn):
            self.errors = errors
            self.warnings[f"{jx.site_of([*self.path, eqn]).where}, the program {_IS_ADAPTIVE}"] = None
            scaled = next(unit for unit in operands if unit.is_scaled)
            return [scaled if jx.is_inexact(var) else self.unscaled for var in eqn.outvars]
        return units

    def infer_branches(self, jaxprs: Sequence[Any], inputs: list[Unit], index: Unit) -> list[Unit]:
        """Notes whether a check for overflows selects the branch, unless each branch updates the scale."""
        before = self._is_guarded
        marks = [{m for *_, e in jx.equations_in(x) for m in jx.marks_in(e.source_info.name_stack)} for x in jaxprs]
        self._is_guarded |= bool(index.finds_nonfinite) and not all(ls.NEXT_SCALE in each for each in marks)
        units = super().infer_branches(jaxprs, inputs, index)
        self._is_guarded = before
        return units

    def join_carry(self, init: Unit, out: Unit) -> Unit:
        """A carry that comes back with the next scale has it in all iterations but the first."""
        return super().join_carry(_next(init) if out.powers == _next(init).powers else init, out)

    def enter_loop(self, loop: jx.Loop, operands: list[Unit]) -> list[Unit]:
        """Marks what differs between micro-batches."""
        inputs = super().enter_loop(loop, operands)
        if not _accumulates(self.path[-1]):
            return inputs
        n = loop.n_consts
        return inputs[:n] + [unit._replace(origins=unit.origins | {MICRO_BATCHES}) for unit in inputs[n:]]


def _next(unit: Unit) -> Unit:
    """Returns the unit with the next scales in place of those of this step; they stand for all later ones, too."""
    powers = unit.powers or ()
    now, later = powers[: len(powers) // 2], powers[len(powers) // 2 :]
    return unit._replace(powers=unit.powers and (*(n * 0 for n in now), *map(operator.add, now, later)))


def _accumulates(eqn: Any) -> bool:
    return eqn.primitive.name == "scan" and MICRO_BATCHES in jx.marks_in(eqn.source_info.name_stack)


def _holds_solver(eqn: Any) -> bool:
    """Whether an equation holds, or is, a loop that ends when values say so, not a counter."""
    eqns = [eqn, *(inner[-1] for jaxpr in jx.inner_jaxprs(eqn) for inner in jx.equations_in(jaxpr))]
    conds = [jx.open_jaxpr(each.params["cond_jaxpr"])[0].eqns for each in eqns if each.primitive.name == "while"]
    return any(not cond or any(jx.is_inexact(atom) for eqn in cond for atom in eqn.invars) for cond in conds)
