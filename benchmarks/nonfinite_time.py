"""The CPU time of `amp.debug.first_nonfinite` on a train step that overflows, beside that in which the step compiles.

JAX_PLATFORMS=cpu python benchmarks/nonfinite_time.py [--layers 1] [--of weight]
"""

import argparse
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jmp_amp as amp
from jmp_amp import _jaxpr as jx

D, H, T, B, V, K = 32, 2, 16, 2, 16, 5


def norm(p, x):
    with jax.named_scope("norm"):
        m = jnp.mean(x, -1, keepdims=True)
        v = jnp.mean((x - m) ** 2, -1, keepdims=True)
        return (x - m) * jax.lax.rsqrt(v + 1e-5) * p["scale"] + p["bias"]


def dense(p, x):
    return x @ p["w"] + p["b"]


def feed_forward(p, x):
    with jax.named_scope("feed_forward"):
        return dense(p["down"], jax.nn.silu(dense(p["up"], norm(p["norm"], x))))


def attention(p, x):
    with jax.named_scope("attention"):
        x = norm(p["norm"], x)
        q, k, v = (dense(p[n], x).reshape(B, T, H, D // H) for n in "qkv")
        s = jnp.einsum("bqhd,bkhd->bhqk", q, k) / (D // H) ** 0.5 + p["position"]
        w = jax.nn.softmax(s)
        return dense(p["o"], jnp.einsum("bhqk,bkhd->bqhd", w, v).reshape(B, T, D))


def convolution(p, x):
    with jax.named_scope("convolution"):
        x = jax.nn.glu(dense(p["in"], norm(p["norm"], x)))
        x = jax.lax.conv_general_dilated(
            x, p["kernel"], (1,), "SAME", dimension_numbers=("NHC", "HIO", "NHC"), feature_group_count=D
        )
        m, v = jnp.mean(x, (0, 1)), jnp.var(x, (0, 1))
        x = (x - m) / jnp.sqrt(v + 1e-5) * p["bn"]["scale"] + p["bn"]["bias"]
        return dense(p["out"], jax.nn.silu(x))


def loss_fn(params, x, y):
    x = dense(params["in"], x)
    for i, p in enumerate(params["layers"]):
        with jax.named_scope(f"layer_{i}"):
            x = x + 0.5 * feed_forward(p["ff1"], x)
            x = x + attention(p["att"], x)
            x = x + convolution(p["conv"], x)
            x = x + 0.5 * feed_forward(p["ff2"], x)
            x = norm(p["norm"], x)
    logits = dense(params["head"], x)
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, y))


def make(n=4, seed=0):
    rng = np.random.default_rng(seed)

    def w(*s):
        return jnp.asarray(rng.standard_normal(s) / s[0] ** 0.5, jnp.float32)

    def de(i, o):
        return {"w": w(i, o), "b": jnp.zeros(o)}

    def no():
        return {"scale": jnp.ones(D), "bias": jnp.zeros(D)}

    def ff():
        return {"norm": no(), "up": de(D, 2 * D), "down": de(2 * D, D)}

    def layer():
        return {
            "ff1": ff(),
            "ff2": ff(),
            "norm": no(),
            "att": {"norm": no(), "position": w(T, T), **{k: de(D, D) for k in "qkvo"}},
            "conv": {"norm": no(), "in": de(D, 2 * D), "kernel": w(K, 1, D), "bn": no(), "out": de(D, D)},
        }

    params = {"in": de(D, D), "head": de(D, V), "layers": [layer() for _ in range(n)]}
    return params, w(B, T, D), jnp.asarray(rng.integers(0, V, (B, T)))


tx = amp.dynamic_loss_scale(optax.adam(1e-3))


@jax.jit
def step(params, state, x, y):
    loss, grads = amp.value_and_grad(amp.autocast(loss_fn), opt_state=state)(params, x, y)
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state, loss


def seconds(run):
    """Returns the CPU time of a call, and its result."""
    start = time.process_time()
    result = run()
    return time.process_time() - start, result


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--of", choices=("scale", "weight"), default="scale", help="what is too large")
    options = parser.parse_args()
    params, x, y = make(options.layers)
    if options.of == "weight":
        params["layers"][-1]["ff1"]["down"]["w"] *= 1e6
    args = params, amp.set_loss_scale(tx.init(params), 2.0**24 if options.of == "scale" else 2.0**10), x, y
    n = sum(not jx.inner_jaxprs(eqn) for *_, eqn in jx.equations_in(step.trace(*args).jaxpr))
    compiled, _ = seconds(lambda: step.lower(*args).compile())
    jax.clear_caches()
    found, report = seconds(lambda: amp.debug.first_nonfinite(step, max_seconds=600)(*args))
    print(f"JAX {jax.__version__}: {n:,} ops, compiled in {compiled:.1f} s, `first_nonfinite` {found:.1f} s")
    print(report)


if __name__ == "__main__":
    main()
