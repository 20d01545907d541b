"""Is a model close to float32 under autocast? By fixed tolerances, and by the dtypes of its equations.

For models of libraries, whose products cannot be replaced. A program that can take its product as an argument is held
to a closer bound by `rounding`, which moves with the program. Float8 has `float8_nets.assert_agrees`.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxprs import row, scoped_equations

import jmp_amp as amp

LOW, FULL, FULL_UNARY = "float16 float16 -> float16", "float32 float32 -> float32", "float32 -> float32"
PRODUCTS = {"dot_general", "conv_general_dilated"}
SENSITIVE = {"exp", "exp2", "expm1", "log", "log1p", "rsqrt", "pow", "cumsum", "reduce_sum"}
TOLERANCE = {"float16": 2e-2, "bfloat16": 6e-2}


def loss_fn(model, x):
    out = model(x)
    return jnp.mean(out**2), out


def check(fun, *args, dtype="float16", transform=jax.value_and_grad, **options):
    """Runs `fun`, which returns a loss and what else it computes, and its gradient, with and without autocast.

    They must agree, and be finite wherever float32 is; products must be low precision, exponentials and sums float32.
    Returns the autocast program: scope, primitive and dtypes of each equation that computes floating values.
    """
    leaves, tree = jax.tree.flatten(args)
    is_array = [isinstance(x, jax.Array) for x in leaves]

    def of_arrays(transformed, *arrays):
        it = iter(arrays)
        return transformed(
            *jax.tree.unflatten(tree, [next(it) if a else x for x, a in zip(leaves, is_array, strict=True)])
        )

    scale = 2.0**10
    arrays = [x for x, a in zip(leaves, is_array, strict=True) if a]
    exact = transform(fun, has_aux=True)
    scaled = amp.value_and_grad(
        amp.autocast(fun, dtype, **options), has_aux=True, loss_scale=scale, transform=transform
    )

    def unscaled(*args):
        value, grads = scaled(*args)
        return value, jax.tree.map(lambda g: g / scale, grads)

    exact, low = (jax.jit(functools.partial(of_arrays, f)) for f in (exact, unscaled))
    want, want_grads = exact(*arrays)
    got, grads = low(*arrays)
    assert_close(got, want, dtype)
    assert_close(grads, want_grads, dtype)
    program = [
        (scope, eqn.primitive.name, row(eqn))
        for scope, eqn in scoped_equations(low, *arrays)
        if not any(hasattr(p, "eqns") for p in eqn.params.values())
        and any(jnp.issubdtype(v.aval.dtype, jnp.floating) for v in eqn.outvars)
        and not (eqn.primitive.name == "reduce_sum" and eqn.invars[0].aval.size == eqn.outvars[0].aval.size)
    ]
    assert_classes(program, dtype)
    return program


def assert_close(got, want, dtype="float16"):
    """The leaves have the same shapes and dtypes, and differ little for the size of the leaf, or of the largest one."""
    got, want = named_arrays(got), named_arrays(want)
    assert [(name, x.shape, x.dtype) for name, x in got] == [(name, x.shape, x.dtype) for name, x in want]
    floating = [x for _, x in want if np.issubdtype(x.dtype, np.floating)]
    largest = max((np.linalg.norm(x[np.isfinite(x)]) for x in floating), default=0)
    for (name, x), (_, y) in zip(want, got, strict=True):
        if np.issubdtype(x.dtype, np.floating):
            x, y = x[np.isfinite(x)], y[np.isfinite(x)]
            assert np.isfinite(y).all(), name
            assert np.linalg.norm(x - y) <= TOLERANCE[dtype] * max(np.linalg.norm(x), 1e-2 * largest), name
        else:
            np.testing.assert_array_equal(x, y, name)


def named_arrays(tree):
    """The leaves as NumPy arrays, with their paths; no program is compiled for it."""
    leaves = [(jax.tree_util.keystr(path), x) for path, x in jax.tree.leaves_with_path(tree)]
    is_key = [jnp.issubdtype(x.dtype, jax.dtypes.prng_key) for _, x in leaves]
    return [
        (name, np.asarray(jax.random.key_data(x) if key else x)) for (name, x), key in zip(leaves, is_key, strict=True)
    ]


def assert_classes(program, dtype="float16"):
    products = {r for _, name, r in program if name in PRODUCTS}
    assert products == {f"{dtype} {dtype} -> {dtype}"}
    assert [entry for entry in program if entry[1] in SENSITIVE and dtype in entry[2]] == []


def rows(program, primitive, scope=""):
    """The dtypes of a primitive's equations in a scope, its backward pass included; never empty."""
    found = {r for where, name, r in program if name == primitive and scope in where}
    assert found, f"no {primitive} in {scope}"
    return found


def check_rows(expected, fun, *args, **options):
    """`check`, and that all equations of a primitive in a scope have these dtypes: `{(primitive, scope): dtypes}`."""
    program = check(fun, *args, **options)
    assert {key: rows(program, *key) for key in expected} == {key: {dtypes} for key, dtypes in expected.items()}


def check_modules(fun, *args, norm):
    """Five layers whose rules say float16, bfloat16 twice, float16 and float32, and a norm that is float32."""
    program = [(scope, eqn.primitive.name, row(eqn)) for scope, eqn in scoped_equations(fun, *args)]
    products = [dtypes.split()[0] for _, name, dtypes in program if name == "dot_general"]
    assert products == ["float16", "bfloat16", "bfloat16", "float16", "float32"]
    of_norm = [dtypes for scope, name, dtypes in program if norm in scope and name != "convert_element_type"]
    assert of_norm
    assert not any("16" in dtypes for dtypes in of_norm)
