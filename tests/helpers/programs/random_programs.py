"""Small random programs: nested control flow, custom derivatives, refs, literals, repeated and unused variables.

A program is a function of arrays. It draws its ops while it is traced, from a generator that starts at the same seed
each time; so does the body of each loop, branch and call in it. All floating values stay between -1 and 1.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.custom_batching import custom_vmap
from jax.custom_derivatives import SymbolicZero, linear_call
from jax.experimental import io_callback

BFLOAT16 = jnp.dtype("bfloat16")
FLOATING = ("matrix", "scalar", "half")
KINDS = ("matrix", "matrix", "matrix", "scalar", "scalar", "int", "bool", "half", "key", "complex", "empty")
CONSTANTS = (
    np.float32([[0.5, -0.25], [0.125, 1.0]]),
    jnp.asarray([[0.0, 1.0], [0.5, -0.75]]),
    jnp.asarray([[0.25, 0.75], [-0.5, 0.5]], BFLOAT16),
    np.complex64([[0.5j, 0.25], [0.0, -0.5]]),
    np.zeros((0, 2), np.float32),
    np.float32(0.375),
    jnp.float32(-0.625),
    np.int32(2),
    jnp.int32(1),
    np.bool_(True),
)
LITERALS = {
    "scalar": (0.0, 0.5, -1.0, 0.25),
    "int": (0, 1, 2, 3),
    "bool": (True, False),
}
INPUTS = (
    np.float32([[0.3, -0.6], [0.9, 0.2]]),
    np.float32([[-0.7, 0.4], [0.1, 0.8]]),
    np.float32(0.45),
    np.int32(3),
    np.bool_(True),
)


def kind_of(x):
    """Returns the name of the type of a value; None for a type that has no name here."""
    aval = jax.typeof(x)
    if jnp.issubdtype(aval.dtype, jax.dtypes.prng_key):
        return "key"
    names = {
        ((2, 2), "float32"): "matrix",
        ((), "float32"): "scalar",
        ((), "int32"): "int",
        ((), "bool"): "bool",
        ((2, 2), "bfloat16"): "half",
        ((2, 2), "complex64"): "complex",
        ((0, 2), "float32"): "empty",
    }
    return names.get((aval.shape, aval.dtype.name))


@dataclasses.dataclass(frozen=True, eq=False)
class Body:
    """A function that draws its ops from a seed.

    Attributes:
        seed: where its generator starts.
        results: the kinds of its results.
        outer: the values that it closes over.
        depth: how many bodies may be nested in it.
        is_differentiable: whether JAX must be able to differentiate it.
        has_jvp: whether JAX must be able to compute its tangents, as it cannot for a `custom_vjp`.
        has_effects: whether it may have refs and callbacks; `vmap`, `checkpoint` and rules allow few.
    """

    seed: int
    results: tuple[str, ...]
    outer: tuple[Any, ...] = ()
    depth: int = 0
    is_differentiable: bool = False
    has_jvp: bool = False
    has_effects: bool = True

    def __call__(self, *args):
        draw = Draw(self, [*self.outer, *args])
        for _ in range(draw.below(4) + self.depth):
            holds_bodies = self.depth > 0 and draw.chance(0.5)
            op = draw.one_of(HIGHER_ORDER if holds_bodies else OPS)
            draw.values += [x for x in op(draw) if kind_of(x)]
        return tuple(map(draw.result, self.results))


class Draw:
    """Draws values, kinds and bodies."""

    def __init__(self, body, values):
        self.body, self.values = body, values
        self.generator = np.random.default_rng(body.seed)

    def below(self, n):
        return int(self.generator.integers(n))

    def chance(self, p):
        return self.generator.random() < p

    def one_of(self, items):
        return items[self.below(len(items))]

    def value(self, kind):
        """Returns a value of a kind: a recent one, any other one, a constant or a literal."""
        known = [x for x in self.values if kind_of(x) == kind]
        if not known or self.chance(0.12):
            return self.literal(kind)
        return known[-1] if self.chance(0.4) else self.one_of(known)

    def result(self, kind):
        """Returns a value of a kind; often one that depends on all others of it, so that a wrong one shows."""
        known = [x for x in self.values if kind_of(x) == kind]
        if kind not in FLOATING or len(known) < 2 or self.chance(0.3):
            return self.value(kind)
        return sum(known[1:], known[0]) / len(known)

    def literal(self, kind):
        if kind == "key":
            return jax.random.key(self.below(4))
        constants = [x for x in CONSTANTS if kind_of(x) == kind]
        return self.one_of([*constants, *LITERALS.get(kind, ())])

    def kinds(self, least=0, most=3, of=KINDS):
        return tuple(self.one_of(of) for _ in range(least + self.below(most - least + 1)))

    def arguments(self, least=0, most=3):
        return tuple(map(self.value, self.kinds(least, most)))

    def child(self, results, closes_over=True, **changes):
        """Returns a body to nest in this one; half of them close over values of this one."""
        outer = tuple(self.values) if closes_over and self.chance(0.5) else ()
        depth = self.body.depth - 1
        seed = int(self.generator.integers(2**32))
        return dataclasses.replace(self.body, seed=seed, results=results, outer=outer, depth=depth, **changes)


# Ops, each of which returns new values.


def product(draw):
    x, y = draw.value("matrix"), draw.value("matrix")
    match draw.below(5):
        case 0:
            return [(x @ y) / 2]
        case 1:
            return [jnp.tanh(x @ y)]
        case 2:
            return [jnp.dot(x, y, precision="highest") * 0.5]
        case 3:
            return [jnp.stack([x @ y[0], y @ x[1]]) / 2]
        case 4:
            return [jnp.einsum("ij,kj->ik", x, y) / 2]


def product_of_halves(draw):
    x, y = draw.value("half"), draw.value("half")
    return [jnp.dot(x, y, preferred_element_type=draw.one_of([np.float32, BFLOAT16])) / 2]


def two_values(draw):
    kind = draw.one_of(FLOATING)
    x, y = draw.value(kind), draw.value(kind)
    match draw.below(4):
        case 0:
            return [(x + y) * 0.5]
        case 1:
            return [x * y]
        case 2:
            return [jnp.where(draw.value("bool"), x, y)]
        case 3:
            return [jnp.maximum(x, y) - 1 if draw.chance(0.1) else jnp.maximum(x, y)]


def one_value(draw):
    functions = [jnp.tanh, jnp.sin, jnp.cos, jax.nn.sigmoid, jax.nn.relu, jnp.negative, jnp.square]
    functions += [lambda x: x * 0.5, lambda x: 0.5 * x + 0.25, lambda x: jnp.exp(-jnp.abs(x)), lax.stop_gradient]
    functions += [lax.optimization_barrier, lambda x: jnp.clip(x, -0.5, 0.5), lambda x: jax.nn.silu(x)]
    functions += [lambda x: checkpoint_name(x, "kept")]
    return [draw.one_of(functions)(jnp.asarray(draw.value(draw.one_of(FLOATING))))]


def matrix_and_scalar(draw):
    x = draw.value("matrix")
    match draw.below(7):
        case 0:
            return [x * draw.value("scalar")]
        case 1:
            return [jnp.mean(x), jnp.max(x)]
        case 2:
            return [jnp.argmax(jnp.asarray(x))]
        case 3:
            return [jax.nn.softmax(x), jnp.cumsum(jnp.asarray(x), 0) / 2]
        case 4:
            return [jnp.asarray(x)[jnp.abs(draw.value("int")) % 2, 0]]
        case 5:
            return [jnp.asarray(x).at[jnp.abs(draw.value("int")) % 2].set(draw.value("scalar"))]
        case 6:
            return [jnp.sort(x)]


def shapes(draw):
    x = jnp.asarray(draw.value(draw.one_of(["matrix", "half"])))
    match draw.below(4):
        case 0:
            return [x.T]
        case 1:
            return [x.reshape(4)[::-1].reshape(2, 2)]
        case 2:
            return [jnp.concatenate([x[1:], x[:1]])]
        case 3:
            return [x[None].squeeze(0), jnp.broadcast_to(x[0], (2, 2))]


def casts(draw):
    match draw.below(5):
        case 0:
            return [jnp.asarray(draw.value("matrix")).astype(BFLOAT16)]
        case 1:
            return [jnp.asarray(draw.value("half")).astype(np.float32)]
        case 2:  # away from the numbers that programs compute exactly
            return [jnp.floor(draw.value("scalar") * 3.3 + 0.137).astype(np.int32)]
        case 3:
            return [jnp.sin(lax.convert_element_type(draw.value("int"), np.float32))]
        case 4:
            return [lax.convert_element_type(draw.value("bool"), np.float32)]


def integers(draw):
    x, y = draw.value("int"), draw.value("int")
    match draw.below(4):
        case 0:
            return [(jnp.asarray(x) + 2 * y) % 7]
        case 1:
            return [jnp.less(x, y), jnp.minimum(x, y)]
        case 2:
            return [jnp.greater(draw.value("scalar"), 0.0123)]
        case 3:
            return [jnp.logical_and(draw.value("bool"), jnp.logical_not(draw.value("bool")))]


def keys(draw):
    key = draw.value("key")
    match draw.below(3):
        case 0:
            return list(jax.random.split(key))
        case 1:
            return [jax.random.fold_in(key, draw.value("int"))]
        case 2:
            return [jax.random.uniform(key, (2, 2))]


def complex_numbers(draw):
    x, y = draw.value("complex"), draw.value("complex")
    match draw.below(3):
        case 0:
            return [lax.complex(*map(jnp.asarray, (draw.value("matrix"), draw.value("matrix")))) / 2]
        case 1:
            return [jnp.conj(x) @ y / 4]
        case 2:
            return [jnp.real(x), jnp.imag(y)]


def empty_arrays(draw):
    empty, x = draw.value("empty"), draw.value("matrix")
    match draw.below(3):
        case 0:
            return [empty @ x, jnp.sum(empty)]
        case 1:
            return [jnp.concatenate([empty, x])]
        case 2:
            return [jnp.asarray(x)[:0], jnp.tanh(empty)]


def callback(draw):
    x = jnp.asarray(draw.value("matrix"))
    if draw.body.is_differentiable:  # JAX has no batching rule for this
        return [linear_call(lambda _, x: x / 2, lambda _, t: t / 2, (), x)] if draw.body.has_effects else []
    if draw.body.has_effects and draw.chance(0.5):
        return [io_callback(np.tanh, x, x, ordered=draw.chance(0.5))]
    return [jax.pure_callback(np.tanh, x, x, vmap_method="sequential")]


def literals(draw):
    return [draw.literal(kind) for kind in draw.kinds(1)]


# Ops that hold bodies.


def jit(draw):
    return jax.jit(draw.child(draw.kinds()))(*draw.arguments())


def checkpoint(draw):
    policies = jax.checkpoint_policies
    policy = draw.one_of([None, policies.dots_saveable, policies.everything_saveable, policies.nothing_saveable])
    child = draw.child(draw.kinds(), has_effects=False)
    return jax.checkpoint(child, policy=policy, prevent_cse=draw.chance(0.5))(*draw.arguments())


def cond(draw):
    results = draw.kinds()
    return lax.cond(draw.value("bool"), draw.child(results), draw.child(results), *draw.arguments())


def switch(draw):
    results = draw.kinds()
    branches = [draw.child(results) for _ in range(3)]
    return lax.switch(draw.value("int"), branches, *draw.arguments())


def stacked(draw, kinds, n):
    return tuple(jnp.stack([jnp.asarray(draw.value(kind)) for _ in range(n)]) for kind in kinds)


def scan(draw):
    carry, ys = draw.kinds(), draw.kinds(0, 2)
    child = draw.child(carry + ys)
    n = 1 + draw.below(3)

    def step(values, xs):
        results = child(*values, *xs)
        return results[: len(carry)], results[len(carry) :]

    xs = stacked(draw, draw.kinds(0, 2), n)
    options = {"reverse": draw.chance(0.3), "unroll": draw.one_of([1, 1, 2, True])}
    last, rows = lax.scan(step, tuple(map(draw.value, carry)), xs, n, **options)
    return [*last, *(row[-1] for row in rows)]


def lax_map(draw):
    child = draw.child(draw.kinds())
    rows = lax.map(lambda xs: child(*xs), stacked(draw, draw.kinds(1), 2))
    return [row[0] for row in rows]


def while_loop(draw):
    if draw.body.is_differentiable:
        return fori_loop(draw)
    kinds = draw.kinds()
    goes_on, child = draw.child(("bool",), has_effects=False), draw.child(kinds)

    def condition(carry):
        i, values = carry
        return jnp.logical_and(i < 3, jnp.logical_or(i < 1, goes_on(*values)[0]))

    def step(carry):
        i, values = carry
        return i + 1, child(i, *values)

    count, values = lax.while_loop(condition, step, (0, tuple(map(draw.value, kinds))))
    return [count, *values]


def fori_loop(draw):
    kinds = draw.kinds()
    child = draw.child(kinds)
    dynamic = draw.chance(0.3) and not draw.body.is_differentiable
    steps = jnp.minimum(draw.value("int"), 3) if dynamic else draw.below(4)
    return lax.fori_loop(0, steps, lambda i, values: child(i, *values), tuple(map(draw.value, kinds)))


def _for_a_rule(draw, results, **changes):
    """Returns a body for a function with a rule, which JAX differentiates only with respect to its arguments."""
    return draw.child(results, closes_over=not draw.body.is_differentiable, has_effects=False, **changes)


def _doubled(tangents):
    return jax.tree.map(lambda t: t if t.dtype == jax.dtypes.float0 else 2 * t, tangents)


def custom_jvp(draw):
    child = _for_a_rule(draw, draw.kinds(1), has_jvp=True)
    call = jax.custom_jvp(lambda *args: child(*args))

    @call.defjvp
    def _(primals, tangents):
        results, result_tangents = jax.jvp(child, primals, tangents)
        return results, _doubled(result_tangents)

    return call(*draw.arguments(1))


def custom_vjp(draw):
    if draw.body.has_jvp:
        return custom_jvp(draw)
    child = _for_a_rule(draw, draw.kinds(1))
    n, factor = draw.below(3), draw.below(3)
    call = jax.custom_vjp(lambda n, *args: child(n, *args), nondiff_argnums=(0,))

    def forward(n, *args):
        results = child(n, *args)
        return results, (args, results, factor, 0.5)

    def backward(n, residuals, cotangents):
        args, _, factor, half = residuals
        _, pullback = jax.vjp(lambda *args: child(n, *args), *args)
        return tuple(
            jax.tree.map(lambda g: g if g.dtype == jax.dtypes.float0 else (factor + n) * half * g, pullback(cotangents))
        )

    call.defvjp(forward, backward)
    return call(n, *draw.arguments(1))


def custom_vjp_of_a_matrix(draw):
    """A rule that is no derivative, reads residuals of all kinds, and has no cotangents for integers."""
    if draw.body.has_jvp:
        return custom_jvp(draw)
    symbolic_zeros = draw.chance(0.3)
    child = _for_a_rule(draw, ("matrix", *draw.kinds()))
    rule = _for_a_rule(draw, ("matrix",))
    kept = draw.arguments(0, 2) if not draw.body.is_differentiable else ()
    call = jax.custom_vjp(lambda x, i: child(x, i))

    def forward(x, i):
        x, i = (x.value, i.value) if symbolic_zeros else (x, i)
        results = child(x, i)
        return results, (x, i, results[0], True)

    def backward(residuals, cotangents):
        cotangent = 0.5 if isinstance(cotangents[0], SymbolicZero) else cotangents[0]
        return rule(*residuals, cotangent, *kept)[0], None

    call.defvjp(forward, backward, symbolic_zeros=symbolic_zeros)
    return call(draw.value("matrix"), draw.value("int"))


def scope(draw):
    child = draw.child(draw.kinds())
    with jax.named_scope(f"scope_{draw.below(3)}"):
        return child(*draw.arguments())


def vmap(draw):
    child = draw.child(draw.kinds(), has_effects=False)
    name = f"axis_{draw.body.depth}"

    def of_row(xs):
        results = child(*xs)
        return [lax.pmean(x, name) if kind_of(x) == "matrix" else x for x in results]

    rows = jax.vmap(of_row, axis_name=name)(stacked(draw, draw.kinds(1), 2))
    return [row[1] for row in rows]


def with_custom_vmap(draw):
    if draw.body.is_differentiable or not draw.body.has_effects:  # JAX does not transform this in all places
        return vmap(draw)
    child = draw.child(draw.kinds(1), closes_over=False, has_effects=False)
    call = custom_vmap(lambda *args: child(*args))

    @call.def_vmap
    def _(size, batched, *args):
        results = jax.vmap(child, in_axes=[0 if b else None for b in batched], axis_size=size)(*args)
        return results, (True,) * len(results)

    if draw.chance(0.5):
        return call(*draw.arguments(1))
    return [row[0] for row in jax.vmap(call)(*stacked(draw, draw.kinds(1), 2))]


def grad(draw):
    child = draw.child(("matrix", *draw.kinds()), is_differentiable=True, has_effects=False)

    def loss(x, *args):
        first, *others = child(x, *args)
        return jnp.mean(first), others

    gradient, others = jax.grad(loss, has_aux=True)(draw.value("matrix"), *draw.arguments(0, 2))
    return [jnp.tanh(gradient), *others]


def jvp(draw):
    child = draw.child(("matrix",), is_differentiable=True, has_jvp=True, has_effects=False)
    args = draw.arguments(0, 2)
    x = jnp.asarray(draw.value("matrix"))
    (result,), (tangent,) = jax.jvp(lambda x: child(x, *args), [x], [jnp.ones_like(x)])
    return [result, jnp.tanh(tangent)]


def linear_solve(draw):
    x = jnp.asarray(draw.value("matrix"))
    diagonal = jnp.float32([2.0, 4.0])[:, None]
    solve = lax.custom_linear_solve(lambda y: diagonal * y, x, lambda _, b: b / diagonal, symmetric=True)
    return [solve]


def associative_scan(draw):
    rows = stacked(draw, ["matrix"], 3)[0]
    return [lax.associative_scan(lambda a, b: (a @ b) / 2, rows)[-1]]


def ref(draw):
    """A ref that a body writes: here, in a `jit` that closes over it or gets it, in loops and in branches."""
    if not draw.body.has_effects:
        return jit(draw)
    kind = draw.one_of(FLOATING if draw.body.is_differentiable else (*FLOATING, "int"))
    cell = jax.new_ref(jnp.asarray(draw.value(kind)))
    child, args = draw.child((kind,)), draw.arguments()

    def write(cell, *args):
        old = cell[...]
        (new,) = child(old, *args)
        # JAX 0.10 cannot differentiate where a value that depends on nothing replaces one that depends on an input.
        cell[...] = (old + new) / 2 if draw.body.is_differentiable else new

    before = cell[...]
    match draw.below(6 if draw.body.is_differentiable else 7):  # JAX does not differentiate branches with refs
        case 0:
            write(cell, *args)
        case 1:
            jax.jit(lambda *args: write(cell, *args))(*args)
        case 2:
            jax.jit(write)(cell, *args)
        case 3:
            lax.fori_loop(0, 2, lambda i, _: write(cell, i, *args), None)
        case 4:
            lax.scan(lambda i, _: (i, write(cell, i, *args)), 0, None, 2, reverse=draw.chance(0.5))
        case 5:
            jax.jit(lambda *args: jax.jit(write)(cell, *args))(*args)
        case 6:
            lax.cond(draw.value("bool"), lambda: write(cell, *args), lambda: None)
    return [before, cell[...] if draw.chance(0.5) else jax.freeze(cell)]


def ref_of_rows(draw):
    """A ref whose rows are written and added to."""
    if not draw.body.has_effects:
        return scan(draw)
    cell = jax.new_ref(jnp.asarray(draw.value("matrix")))
    child, args = draw.child(("scalar",)), draw.arguments()

    def step(i, _):
        cell[i] = (cell[i] + child(cell[i, 0], *args)[0]) / 2
        jax.ref.addupdate(cell, (i, slice(0, 1)), jnp.full(1, 0.125, np.float32))

    lax.fori_loop(0, 2, step, None)
    return [jnp.tanh(cell[...]), jnp.tanh(cell[0, 1])]


OPS = [product, product, product, product_of_halves, two_values, two_values, one_value, one_value]
OPS += [matrix_and_scalar, shapes, casts, integers, keys, literals, complex_numbers, empty_arrays, callback]
HIGHER_ORDER = [jit, jit, checkpoint, cond, cond, switch, scan, scan, scan, lax_map, while_loop, while_loop, fori_loop]
HIGHER_ORDER += [custom_jvp, custom_vjp, custom_vjp_of_a_matrix, scope, vmap, vmap, grad, jvp, linear_solve]
HIGHER_ORDER += [with_custom_vmap, associative_scan, ref, ref, ref_of_rows]


def random_program(seed, **allowed):
    """Returns a function of `INPUTS`, whose first result is a matrix; see `Body` for what is allowed in it."""
    draw = Draw(Body(seed, ()), [])
    depth, results = 1 + draw.below(3), ("matrix", *draw.kinds())
    return Body(int(draw.generator.integers(2**32)), results, depth=depth, **allowed)
