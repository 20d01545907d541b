"""What the gradient of a program keeps for its backward pass; tests of `jax.checkpoint` compare it."""

import jax

import jmp_amp as amp


def residual_bytes(fun, *args):
    """The bytes of the residuals, traced only."""
    pullback = jax.eval_shape(lambda *args: jax.vjp(fun, *args)[1], *args)
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(pullback))


def arrays_on_host(fun, *args):
    """How often the gradient names an array in the memory of the host."""
    return str(jax.make_jaxpr(jax.grad(fun))(*args)).count("<host>[")


def keeps_the_users_plan(fun, *args):
    """Whether autocast keeps what JAX keeps with the checkpoints of the program, and not more than in float32."""
    low, low_all = (amp.autocast(fun, "bfloat16", save=save) for save in ("matmuls", "all"))
    kept, kept_all, in_float32 = (residual_bytes(each, *args) for each in (low, low_all, fun))
    return kept == kept_all <= in_float32 and arrays_on_host(low, *args) == arrays_on_host(fun, *args)
