"""Programs whose batch size is a symbol when they are exported: every rule runs without its value."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import programs
import pytest
from control_flow import BACKWARD
from control_flow import PROGRAMS as CONTROL_FLOW
from jax import export, lax
from jaxprs import dtypes, read_low

import jmp_amp as amp
from jmp_amp._ops import is_smaller

leaves = jax.tree.leaves
pytestmark = pytest.mark.usefixtures("users_code")

WEIGHTS = {"w": jnp.eye(8) / 2, "b": jnp.zeros(8), "e": jnp.ones((16, 8)) / 4, "heads": jnp.ones((8, 2, 4)) / 4}
X = jax.random.normal(jax.random.key(0), (4, 8))
TOKENS = jnp.arange(12).reshape(4, 3)

OWN = {
    "embedding": (lambda p, tokens: p["e"][tokens] @ p["w"], TOKENS),
    "one-hot embedding": (lambda p, tokens: jax.nn.one_hot(tokens, 16) @ p["e"], TOKENS),
    "norm of a product": (lambda p, x: programs.layer_norm(x @ p["w"]), X),
    "product of a norm": (lambda p, x: programs.layer_norm(x) @ p["w"], X),
    "norm over the batch": (lambda p, x: (h := x @ p["w"]) - jnp.mean(h, 0), X),
    "broadcast of a row": (lambda p, x: jnp.broadcast_to(p["w"][:1], x.shape) @ p["w"], X),
    "broadcast to more rows": (lambda p, x: jnp.repeat(x @ p["w"], 3, 0), X),
    "slice of the features": (lambda p, x: (x @ p["w"])[:, :3], X),
    "reshape": (lambda p, x: (x @ p["w"]).reshape(-1, 2, 4) + p["heads"][0], X),
    "heads with a bias": (lambda p, x: jnp.einsum("bd,dhk->bhk", x, p["heads"]) + p["heads"][0], X),
    "concatenation": (lambda p, x: jnp.concatenate([x @ p["w"], x], 0), X),
    "cross entropy": (
        lambda p, x: -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(x @ p["w"]), jnp.argmax(x, -1)[:, None], -1)),
        X,
    ),
    "scan over the batch": (lambda p, x: lax.scan(lambda h, x: (jnp.tanh(h + x @ p["w"]), h), p["b"], x), X),
    "pairs": (lambda p, x: jax.nn.softmax((x @ p["w"]) @ x.T) @ x, X),
}
# JAX itself does not export these with a symbolic size, or they divide it by the number of devices.
FIXED = {
    "cross entropy",
    "associative scan",
    "callback",
    "sum over devices in shard map",
    "gather in shard map",
    "pmap",
}
MANY_ROWS = {"sums of the program's own", "sums by scatter"}  # they ask Python for the number of rows
FORWARD_ONLY = {"while loop", "while loop that ends by a float"}


def cases():
    """Functions that make a program and its arguments, since to make them takes time, and whether it has a gradient."""
    for name, case in OWN.items():
        yield pytest.param(lambda case=case: (case[0], (WEIGHTS, case[1])), True, id=name)
    for name, fun in CONTROL_FLOW.items():
        if name != "shard_map":
            backward = name in {*BACKWARD, "custom_jvp"}
            yield pytest.param(lambda fun=fun: (lambda _, x: fun(x), (0.0, X)), backward, id=name)
    for name, program in programs.PROGRAMS.items():
        if name not in FIXED and program.group not in {*MANY_ROWS, "frameworks"}:  # which need not be there
            backward = name not in FORWARD_ONLY and program.group != "loops that end by a float"
            yield pytest.param(program.make, backward, id=f"{program.group}: {name}")


def with_gradients(fun, args):
    """Returns the results of `fun`, and its gradients with respect to all floating arguments."""
    floating = [
        i for i, x in enumerate(args) if all(jnp.issubdtype(jnp.result_type(x), jnp.floating) for x in leaves(x))
    ]

    def loss(*args):
        out = fun(*args)
        of = [x for x in leaves(out) if jnp.issubdtype(x.dtype, jnp.floating)]
        return sum(jnp.sum(jnp.sin(x.astype(jnp.float32))) for x in of), out

    return jax.value_and_grad(loss, argnums=floating, has_aux=True)


@pytest.mark.sweep(33)
@pytest.mark.parametrize(("make", "backward"), [*cases()])
def test_an_exported_program_of_any_batch_size_is_the_program_of_each(make, backward):
    fun, args = make()
    params, *data = args
    (batch,) = export.symbolic_shape("batch")
    shapes = [
        jax.ShapeDtypeStruct((batch, *x.shape[1:]), x.dtype) if getattr(x, "ndim", 0) else x
        for x in jax.tree.leaves(data)
    ]
    program = amp.autocast(fun)
    program = jax.jit(with_gradients(program, args) if backward else program)
    symbolic = jax.tree.unflatten(jax.tree.structure(data), shapes)
    exported, report = export.export(program)(params, *symbolic), amp.explain(fun)(params, *symbolic)
    assert json.loads(report.to_json())["summary"]["dtype"] in str(report)
    got, want = exported.call(params, *data), program(params, *data)
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(leaves(got), leaves(want), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(np.asarray(a, a.dtype), np.asarray(b), rtol=2e-2, atol=1e-3)


@pytest.mark.sweep(15)
@pytest.mark.parametrize("options", [{"save": "all"}, {"weight_grad_dtype": "float32"}, {"dtype": "bfloat16"}], ids=str)
@pytest.mark.parametrize("name", ["embedding", "norm of a product", "cross entropy", "heads with a bias"])
def test_options_take_symbolic_sizes_too(name, options):
    fun, x = OWN[name]
    program = jax.jit(with_gradients(amp.autocast(fun, **options), (WEIGHTS, x)))
    shape = jax.ShapeDtypeStruct((*export.symbolic_shape("batch"), *x.shape[1:]), x.dtype)
    got, want = export.export(program)(WEIGHTS, shape).call(WEIGHTS, x), program(WEIGHTS, x)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-2, atol=1e-3), got, want)


def test_sizes_are_compared_as_far_as_they_are_known():
    b, c = export.symbolic_shape("b, c")
    assert is_smaller((2, 3), (7,))
    assert not is_smaller((7,), (2, 3))
    assert not is_smaller((2, 3), (3, 2))
    assert is_smaller((b, 1), (b, 8))
    assert is_smaller((8,), (b, 8))
    assert is_smaller((b, c), (c, 2, b))
    for other in ((b, 8), (8, b), (3,), (c,), (c, 9), (b, b)):
        assert not is_smaller((b, 8), other)


def test_an_array_of_symbolic_size_is_no_scalar():
    fun = amp.autocast(read_low(lambda w, x, floor: jnp.maximum(x @ w, floor)))
    for n in (4, *export.symbolic_shape("batch")):
        args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((8, 8), (n, 8), (n, 1))]
        assert dtypes(fun, *args, primitive="max") == ["float32 float32 -> float32"]
