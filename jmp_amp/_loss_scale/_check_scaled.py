"""Detection of gradients that were never scaled, or already unscaled, from the program that JAX traces."""

import itertools
from typing import Any

import jax

from jmp_amp._jaxpr import equations_behind, is_same_value, open_jaxpr
from jmp_amp._loss_scale._unscale import UNSCALE_SCOPE


def check_scaled(grads: Any, scale: Any = None) -> None:
    """Raises ValueError if the traced program shows that `grads` are not the gradients of a loss times `scale`.

    The gradients are wrong if they come from `unscale`, also through a chain of transformations. If `scale` is traced,
    they are also wrong if they come from differentiation but do not depend on `scale`. The check is a heuristic: it
    inspects only the first leaves and the nearest equations, and passes whatever it cannot prove wrong.
    """
    leaves = jax.tree.leaves_with_path(grads)
    for path, x in leaves[:_CHECKED_LEAVES]:
        if any(UNSCALE_SCOPE in _scopes(eqn) for eqn in itertools.islice(equations_behind(x), _CHECKED_EQUATIONS)):
            raise ValueError(
                f"the gradient at `{jax.tree_util.keystr(path)}` was already unscaled: `unscale_and_check` is in front "
                "of another `unscale_and_check` or of `dynamic_loss_scale`; keep only one, and put it inside "
                "`dynamic_loss_scale` if there is one"
            )
    for path, x in leaves[:1] if isinstance(scale, jax.core.Tracer) else ():
        eqns = list(equations_behind(x))
        is_used = any(is_same_value(scale, tracer) for eqn in eqns for tracer in eqn.in_tracers)
        if not is_used and any(map(_is_backward_pass, eqns)):
            raise ValueError(
                f"the gradient at `{jax.tree_util.keystr(path)}` does not depend on the loss scale, so it must not be "
                "divided by it; write `amp.value_and_grad(loss_fn, opt_state=opt_state)`, or "
                "disable loss scaling with `dynamic_loss_scale(inner, LossScale.none())`"
            )


_CHECKED_LEAVES = 4
_CHECKED_EQUATIONS = 256  # more than lie between two transformations of a chain


def _scopes(eqn: Any) -> list[str]:
    return str(eqn.source_info.name_stack).split("/")


def _is_backward_pass(eqn: Any) -> bool:
    """Returns whether an equation is part of a backward pass, or calls a function that is."""
    inner, _ = open_jaxpr(eqn.params.get("jaxpr"))
    return any("transpose(" in str(e.source_info.name_stack) for e in (eqn, *getattr(inner, "eqns", ())))
