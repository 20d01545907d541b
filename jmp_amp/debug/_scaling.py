"""`check_loss_scaling`: checks that a train step scales and unscales its gradients consistently."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.tree_util import keystr

from jmp_amp import _jaxpr as jx
from jmp_amp._calls import transformation, warn
from jmp_amp._loss_scale import CHECK, MICRO_BATCHES, LossScaleState, Unit, UnitAnalysis, describe_unit, is_new_scale
from jmp_amp.debug._report import as_jit_takes, check_callable

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


@transformation
def check_loss_scaling(step: Callable) -> Callable[..., None]:
    """Returns a function that raises if a train step does not scale and unscale its gradients consistently.

    It traces `step` and runs nothing. The check is a dimensional analysis with the loss scale as its unit: the loss has
    no unit, the scaled loss and its gradients have the unit of the scale, and unscaled gradients have none. Values that
    are added, compared or selected between must have the same unit; exponentials and logarithms take values without a
    unit. The check finds these errors, in any optimizer:

    - The loss is not scaled, or scaled by another scale than the one that divides the gradients. If the step uses
      `dynamic_loss_scale`, tracing the step already raises for this.
    - The gradients are unscaled twice, in part, or not at all, before they reach the optimizer state or the parameters.
    - The gradients are clipped, or weight decay or noise is added, while they are scaled. Between `value_and_grad` and
      `update`, tracing the step already raises for this.
    - Another check keeps overflows from the loss scale, as `apply_if_finite` around `dynamic_loss_scale` does.

    It warns of what may be intended: `jnp.nan_to_num` of scaled gradients, scalar results that are scaled, such as a
    logged norm of gradients, and random numbers that are the same in all micro-batches of `accumulate_steps`.

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
    def results_by_path(*args: Any, **kwargs: Any) -> dict[str, Any]:
        return {keystr(path): x for path, x in jax.tree.leaves_with_path(step(*args, **kwargs))}

    @functools.wraps(step, updated=())
    def check(*args: Any, **kwargs: Any) -> None:
        args, kwargs = as_jit_takes(args, kwargs)
        program, arrays, rebuild = jx.trace_call(results_by_path, args, kwargs, jax.ShapeDtypeStruct)
        # The loss scale of each `LossScaleState`, by its position among the arrays.
        states = jax.tree.leaves((args, kwargs), is_leaf=lambda x: isinstance(x, LossScaleState))
        found = [jax.tree.leaves(x.loss_scale)[0] for x in states if isinstance(x, LossScaleState)]
        is_scale = [any(x is scale for scale in found) for x in arrays]
        if not any(is_scale) and not any(is_new_scale(eqn) for *_, eqn in jx.equations_in(program)):
            raise ValueError(
                "there is no loss scale in the arguments, and `step` makes none; pass the state of "
                "`dynamic_loss_scale`, or a `LossScaleState`"
            )
        analysis = _StepAnalysis(sum(is_scale) + 1)
        results = analysis.infer(program, jx.combine(is_scale, analysis.scales, [analysis.unscaled] * len(arrays)))
        if analysis.errors:
            lines = "\n".join(f"- {error}" for error in list(analysis.errors)[:_MAX_ERRORS])
            raise ValueError(f"`step` does not scale and unscale its gradients consistently:\n{lines}")
        is_scalar = [jx.shape_of(var) == () for var in jx.open_jaxpr(program)[0].outvars]
        scaled = [x if ok and x.is_scaled else None for x, ok in zip(results, is_scalar, strict=True)]
        for path, x in rebuild(scaled).items():
            if isinstance(x, Unit):
                analysis.warnings[f"`step` returns `result{path}`, {describe_unit(x)}: {_IS_LOGGED}"] = None
        for warning in analysis.warnings:
            warn(warning)

    return check


class _StepAnalysis(UnitAnalysis):
    """The units of a train step.

    Attributes:
        warnings: what may be intended.
    """

    def __init__(self, n_scales: int) -> None:
        """Takes the number of loss scales; the last one is the one that `step` makes."""
        super().__init__(n_scales)
        self.warnings = dict[str, None]()
        self._is_guarded = False  # whether a branch is entered that a check for overflows selects

    def error(self, predicate: str, scaled: Unit) -> str:
        """Names the line and the cure."""
        cure = _STILL_SCALED if sum(scaled.powers or ()) > 0 else _NEVER_SCALED
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
        if is_new_scale(eqn):
            return [self.scales[-1]] * len(eqn.outvars)
        if self._is_guarded and CHECK in jx.marks_in(eqn.source_info.name_stack):
            self.errors[f"{jx.site_of([*self.path, eqn]).where}, {_NEVER_CHECKED}"] = None
        is_random = eqn.primitive.name in ("random_bits", "random_gamma")
        if is_random and MICRO_BATCHES not in operands[0].origins and any(map(_accumulates, self.path)):
            self.warnings[f"{jx.site_of([*self.path, eqn]).where}, `step` {_SAME_KEY}"] = None
        return super().infer_equation(eqn, operands)

    def infer_branches(self, jaxprs: Sequence[Any], inputs: list[Unit], index: Unit) -> list[Unit]:
        """Notes whether a check for overflows selects the branch."""
        before = self._is_guarded
        self._is_guarded |= bool(index.finds_nonfinite)
        units = super().infer_branches(jaxprs, inputs, index)
        self._is_guarded = before
        return units

    def enter_loop(self, loop: jx.Loop, operands: list[Unit]) -> list[Unit]:
        """Marks what differs between micro-batches."""
        inputs = super().enter_loop(loop, operands)
        if not _accumulates(self.path[-1]):
            return inputs
        n = loop.n_consts
        return inputs[:n] + [unit._replace(origins=unit.origins | {MICRO_BATCHES}) for unit in inputs[n:]]


def _accumulates(eqn: Any) -> bool:
    return eqn.primitive.name == "scan" and MICRO_BATCHES in jx.marks_in(eqn.source_info.name_stack)
