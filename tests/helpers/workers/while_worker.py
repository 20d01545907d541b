"""Runs loops that end by a float under autocast, for the process that waits for them: `while_worker.py DTYPE`.

Each loop runs in a process of its own, forked before JAX has started, and is stopped if it does not end. Prints, as
JSON, what is wrong with each loop, by its name.
"""

import json
import multiprocessing
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import jmp_amp as amp

SEEDS, SECONDS, WIDTH = 20, 300, 8


def fixed_point(w, b):
    """Ends by the change, in `cond_fun`."""

    def body(carry):
        i, x, _ = carry
        new = jnp.tanh(w @ x + b)
        return i + 1, new, jnp.max(jnp.abs(new - x))

    i, x, _ = lax.while_loop(lambda c: c[2] > 1e-5, body, (0, jnp.zeros(WIDTH), jnp.float32(jnp.inf)))
    return x, i


def fixed_point_that_says_so(w, b):
    """Ends by a boolean that the body computes."""

    def body(carry):
        i, x, _ = carry
        new = jnp.tanh(w @ x + b)
        return i + 1, new, jnp.linalg.norm(new - x) < 1e-5

    i, x, _ = lax.while_loop(lambda c: ~c[2], body, (0, jnp.zeros(WIDTH), False))
    return x, i


def deep_equilibrium(w, b):
    """Of a layer called by `jit`, by the relative change of two iterates."""

    @jax.jit
    def layer(z):
        return jax.nn.tanh(z @ w.T + b)

    def body(carry):
        i, _, new = carry
        return i + 1, new, layer(new)

    def goes_on(carry):
        _, z, new = carry
        return jnp.linalg.norm(new - z) > 1e-5 * (1e-6 + jnp.linalg.norm(new))

    z = jnp.zeros((2, WIDTH))
    i, _, z = lax.while_loop(goes_on, body, (0, z, layer(z)))
    return z, i


def newton(w, b):
    """Solves x + w tanh(x) / 2 = b."""

    def residual(x):
        return x + w @ jnp.tanh(x) / 2 - b

    def body(carry):
        i, x = carry
        return i + 1, x - jnp.linalg.solve(jax.jacfwd(residual)(x), residual(x))

    i, x = lax.while_loop(lambda c: jnp.max(jnp.abs(residual(c[1]))) > 1e-5, body, (0, jnp.zeros(WIDTH)))
    return x, i


def sinkhorn(w, b):
    kernel = jnp.exp(-3 * jnp.abs(w))
    target = jnp.full(WIDTH, 1 / WIDTH)

    def body(carry):
        i, u, _, _ = carry
        v = target / (kernel.T @ u)
        u = target / (kernel @ v)
        return i + 1, u, v, jnp.sum(jnp.abs(v * (kernel.T @ u) - target))

    ones = jnp.ones(WIDTH)
    i, u, v, _ = lax.while_loop(lambda c: c[3] > 1e-5, body, (0, ones, ones, jnp.float32(1)))
    return u[:, None] * kernel * v, i


def power_iteration(w, b):
    matrix = jnp.matmul(w, w.T, precision="highest") + jnp.eye(WIDTH).at[0, 0].add(4)

    def body(carry):
        i, v, value, _ = carry
        y = matrix @ v
        new = jnp.vdot(v, y)
        return i + 1, y / jnp.linalg.norm(y), new, jnp.abs(new - value) < 1e-5 * jnp.abs(new)

    i, _, value, _ = lax.while_loop(lambda c: ~c[3], body, (0, b / jnp.linalg.norm(b), jnp.float32(0), False))
    return value, i


def conjugate_gradients(w, b):
    matrix = jnp.matmul(w, w.T, precision="highest") + jnp.eye(WIDTH)
    return jax.scipy.sparse.linalg.cg(lambda x: matrix @ x, b, tol=1e-5, maxiter=10**9)[0], 0


LOOPS = {
    f.__name__: f
    for f in (
        fixed_point,
        fixed_point_that_says_so,
        deep_equilibrium,
        newton,
        sinkhorn,
        power_iteration,
        conjugate_gradients,
    )
}


def inputs(seed):
    rng = np.random.default_rng(seed)
    w = rng.normal(size=(WIDTH, WIDTH))
    w *= 0.8 / np.linalg.norm(w, 2)  # a contraction
    return jnp.asarray(w, jnp.float32), jnp.asarray(rng.normal(size=WIDTH), jnp.float32)


def run(name, low, answers):
    plain, cast = jax.jit(LOOPS[name]), jax.jit(amp.autocast(LOOPS[name], low))
    wrong = []
    for seed in range(SEEDS):
        want, steps = plain(*inputs(seed))
        got, iterations = cast(*inputs(seed))
        far = float(jnp.linalg.norm(got - want) / jnp.linalg.norm(want))
        # What is before the loop may be low, so that the last of the iterations may be one sooner or later.
        if far > {"float16": 2e-3, "bfloat16": 2e-2}[low] or abs(int(iterations) - int(steps)) > 2:
            wrong.append(f"seed {seed}: off by {far:.1e} after {iterations} steps for {steps}")
    answers.put(wrong)


def main(low):
    context = multiprocessing.get_context("fork")
    found = {}
    for name in LOOPS:
        answers = context.Queue()
        process = context.Process(target=run, args=(name, low, answers))
        process.start()
        until = time.monotonic() + SECONDS
        while process.is_alive() and answers.empty() and time.monotonic() < until:
            time.sleep(0.05)
        ended = not answers.empty()
        found[name] = answers.get() if ended else ["does not end" if process.is_alive() else "raises"]
        process.kill()
        process.join()
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
