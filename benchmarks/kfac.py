"""The losses and curvature blocks of K-FAC under autocast, with and without the layers registered.

    pip install kfac_jax
    JAX_PLATFORMS=cpu python benchmarks/kfac.py

It needs JAX 0.10, since kfac_jax 0.0.8 does not import with JAX 0.11; what that needs of older versions is put back.
The program is the example of kfac_jax, on scikit-learn's digits.
"""

import collections
import itertools

import jax
import jax.numpy as jnp
from report import head, row
from sklearn.datasets import load_digits

import jmp_amp as amp

STEPS, L2, SIZES = 40, 1e-3, (64, 50, 50, 10)


def evaluate(eqn, values):
    """Evaluates an equation; kfac_jax does it as JAX did before 0.9.2."""
    outs = eqn.primitive.bind(*values, **eqn.primitive.get_bind_params(eqn.params))
    return outs if eqn.primitive.multiple_results else [outs]


def import_kfac():
    """Imports kfac_jax for a JAX that is newer than it."""
    import jax.core
    import jax.interpreters.xla

    jax.core.Effects, jax.interpreters.xla.pytype_aval_mappings = set, collections.defaultdict(lambda: None)
    import kfac_jax

    kfac_jax.tag_graph_matcher.eval_jaxpr_eqn = evaluate
    return kfac_jax


def loss_of(registers):
    """Returns the loss function of a network, whose layers are registered or not."""
    kfac_jax = import_kfac()

    def loss_fn(params, batch):
        x, labels = batch
        for i, (w, b) in enumerate(params):
            x = kfac_jax.register_dense(x @ w + b, x, w, b) if registers else x @ w + b
            x = jax.nn.relu(x) if i < len(params) - 1 else x
        kfac_jax.register_softmax_cross_entropy_loss(x, labels)
        loss = -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(x), labels[:, None], axis=1))
        return loss + L2 * kfac_jax.utils.inner_product(params, params) / 2

    return loss_fn


def run(dtype, registers, steps=STEPS):
    """Returns the last loss, and the number of blocks of each kind."""
    kfac_jax, (x, labels) = import_kfac(), load_digits(return_X_y=True)
    batch = jnp.asarray(x / 16, jnp.float32), jnp.asarray(labels)
    optimizer = kfac_jax.Optimizer(
        jax.value_and_grad(amp.autocast(loss_of(registers), dtype)),
        l2_reg=L2,
        num_burnin_steps=0,
        use_adaptive_learning_rate=True,
        use_adaptive_momentum=True,
        use_adaptive_damping=True,
        initial_damping=1.0,
        multi_device=False,
    )
    keys = jax.random.split(jax.random.key(0), len(SIZES))
    shapes = itertools.pairwise(SIZES)
    params = [
        (jax.random.normal(key, shape) / shape[0] ** 0.5, jnp.zeros(shape[1]))
        for key, shape in zip(keys[1:], shapes, strict=True)
    ]
    state = optimizer.init(params, keys[0], batch)
    for key in jax.random.split(keys[0], steps):
        params, state, stats = optimizer.step(params, state, key, batch=batch)
    return float(stats["loss"]), collections.Counter(type(x).__name__ for x in optimizer._estimator.blocks)


def main():
    print(*head("dtype", "layers", "loss", "blocks"), sep="\n")
    for dtype in ("float32", "bfloat16", "float16"):
        for registers in (False, True):
            loss, blocks = run(dtype, registers)
            names = ", ".join(f"{n} `{name}`" for name, n in sorted(blocks.items()))
            print(row(dtype, "registered" if registers else "as written", f"{loss:.3f}", names), flush=True)


if __name__ == "__main__":
    main()
