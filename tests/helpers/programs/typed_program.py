"""A user's program, for a type checker (`mypy --strict tests/helpers/programs/typed_program.py`) and to run."""

from typing import NamedTuple, assert_type

import jax
import jax.numpy as jnp
import optax  # type: ignore[import-untyped]

import jmp_amp as amp
import jmp_amp.compat.jmp as jmp
from pallas_kernels import check_finite


class Params(NamedTuple):
    w: jax.Array
    b: jax.Array


@amp.autocast
def loss_fn(params: Params, x: jax.Array) -> jax.Array:
    with amp.full_precision():
        penalty = jnp.sum(params.b**2)
    return jnp.mean((x @ params.w + params.b) ** 2) + penalty


@amp.full_precision
def gram(x: jax.Array) -> jax.Array:
    return x.T @ x


rule = amp.LossScale(growth_interval=100)
tx = amp.dynamic_loss_scale(optax.chain(amp.unscale_and_check(), optax.adam(1e-3)), rule)


@jax.jit
def train_step(params: Params, opt_state: optax.OptState, x: jax.Array) -> tuple[Params, optax.OptState, jax.Array]:
    scale = amp.get_loss_scale(opt_state)
    loss, grads = amp.value_and_grad(loss_fn, loss_scale=scale)(params, x)
    updates, opt_state = tx.update(grads, opt_state, params)
    return Params(*optax.apply_updates(params, updates)), opt_state, loss


def main() -> None:
    params, x = Params(jnp.ones((3, 2)), jnp.zeros(2)), jnp.ones((4, 3))
    assert_type(loss_fn(params, x), jax.Array)
    assert_type(gram(x), jax.Array)
    assert_type(amp.get_policy("O2").cast_to_compute(params), Params)
    assert_type(jmp.cast_to_half(params), Params)
    assert_type(jmp.select_tree(amp.all_finite(params), params, params), Params)
    assert_type(amp.LossScale.torch(growth_interval=7), amp.LossScale)
    assert_type(amp.explain(loss_fn)(params, x), amp.debug.PrecisionReport)
    state = assert_type(rule.init(), amp.LossScaleState)
    assert_type(rule.update(state, jnp.bool_(True)), amp.LossScaleState)
    finite, _ = check_finite(params, inv_scale=0.5)

    opt_state = tx.init(params)
    params, opt_state, loss = train_step(params, opt_state, x)
    amp.check_health(opt_state, params)
    assert_type(amp.get_loss_scale(opt_state), jax.Array)
    assert_type(amp.metrics(opt_state), dict[str, jax.Array])
    assert finite
    assert jnp.isfinite(loss)


if __name__ == "__main__":
    main()
