"""The same map gets the same dtypes for its products, however it is written: facts pass loops, branches and calls."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exact_programs import BODIES, IMAGE, LARGE, LOW_LOOPS, NEAR_ONE, PROGRAMS, TOKENS, W, X, Y, normal, of_one
from jax import lax
from jax.flatten_util import ravel_pytree
from jaxprs import dtypes, equations, row
from rounding import EPSILON, error

import jmp_amp as amp
from jmp_amp import _jaxpr as jx

pytestmark = pytest.mark.usefixtures("users_code")


def in_a_fori_loop(fun, xs):
    out = jnp.zeros((len(xs), *jax.eval_shape(fun, xs[0]).shape))
    return lax.fori_loop(0, len(xs), lambda i, out: out.at[i].set(fun(xs[i])), out)


def cut(fun, xs, half=2):
    return jnp.concatenate([lax.map(fun, xs[:half]), lax.map(fun, xs[half:])])


WAYS = {
    "unrolled": lambda fun, xs: jnp.stack([fun(x) for x in xs]),
    "vmap": lambda fun, xs: jax.vmap(fun)(xs),
    "map": lax.map,
    "map over batches": lambda fun, xs: lax.map(fun, xs, batch_size=2),
    "scan": lambda fun, xs: lax.scan(lambda _, x: (None, fun(x)), None, xs)[1],
    "fori_loop": in_a_fori_loop,
    "cond": lambda fun, xs: lax.cond(xs[0, 0, 0] > 9, jax.vmap(lambda x: fun(x)), jax.vmap(lambda x: fun(x)), xs),
    "jit": lambda fun, xs: jax.vmap(jax.jit(fun))(xs),
    "checkpoint": lambda fun, xs: jax.vmap(jax.checkpoint(fun))(xs),
    "map of jit of checkpoint": lambda fun, xs: lax.map(jax.jit(jax.checkpoint(fun)), xs),
    "two loops": cut,
}


@pytest.mark.parametrize("low", ["float16", pytest.param("bfloat16", marks=pytest.mark.slow)])
@pytest.mark.parametrize("body", BODIES)
def test_products_have_the_same_dtypes_however_a_map_is_written(body, low):
    first, second, full = BODIES[body]
    want = dtypes(amp.autocast(of_one(first, second), low), X[0], primitive="dot_general")
    is_full = full[list(EPSILON).index(low)]
    assert {row == "float32 float32 -> float32" for row in want} == {is_full}

    def one_loop_after_another(_, xs):
        mid = lax.map(first, xs)
        return lax.map(lambda mid: second(*mid), mid) if isinstance(mid, tuple) else lax.map(second, mid)

    for name, way in {**WAYS, "one loop after another": one_loop_after_another}.items():
        fun = functools.partial(way, of_one(first, second))
        got = dtypes(amp.autocast(fun, low), X, primitive="dot_general")
        assert set(got) == set(want), name
        assert len(got) % len(want) == 0, name


# What changes a value, and then back. Ops that keep what a value is; only a count that was divided is none, and a
# solution ends at a bound.
EDITS = {
    "moved": lambda x: x.T.reshape(-1).reshape(x.shape[::-1]).T,
    "reversed": lambda x: lax.rev(lax.rev(x, range(x.ndim)), range(x.ndim)),
    "scaled": lambda x: 2 * (0.5 * x),
    "divided": lambda x: (x / 4) * 4,
    "negated": lambda x: jnp.negative(-x),
    "shifted": lambda x: x + 0.0,
    "selected": lambda x: jnp.where(jnp.ones(x.shape) > 0, x, 0.0),
    "clipped": lambda x: x if jnp.iscomplexobj(x) else jnp.clip(x, -1e6, 1e6),
    "cut and joined": lambda x: jnp.concatenate([x[:2], x[2:]]) if x.ndim else x,
    "in a call": jax.jit(lambda x: x * 1.0),
    "in a cond": lambda x: lax.cond(True, lambda x: x * 1.0, lambda x: x, x),
}


@pytest.mark.parametrize("low", ["float16", pytest.param("bfloat16", marks=pytest.mark.slow)])
@pytest.mark.parametrize("body", BODIES)
def test_a_fact_passes_ops_that_keep_what_a_value_is(body, low):
    first, second, full = BODIES[body]
    for name, edit in EDITS.items():
        if (body == "counts" and name in ("scaled", "divided")) or (body == "a solution" and name == "clipped"):
            continue
        fun = of_one(lambda x, edit=edit: jax.tree.map(edit, first(x)), second)
        got = dtypes(amp.autocast(fun, low), X[0], primitive="dot_general")
        assert {row == "float32 float32 -> float32" for row in got} == {full[list(EPSILON).index(low)]}, name


VELOCITIES = np.float32([[i, j] for i in (-1, 0, 1) for j in (-1, 0, 1)])
SHARES = np.float32([[[1, 4, 1, 4, 16, 4, 1, 4, 1]]]) / 36


def lattice_boltzmann(f):
    def step(f, _):
        density = f.sum(-1, keepdims=True)
        velocity = f @ VELOCITIES / density
        along = velocity @ VELOCITIES.T
        settled = density * SHARES * (1 + 3 * along + 4.5 * along**2 - 1.5 * jnp.sum(velocity**2, -1, keepdims=True))
        f = f - 0.6 * (f - settled)
        moves = [jnp.roll(f[..., i], tuple(map(int, VELOCITIES[i])), (0, 1)) for i in range(9)]
        return jnp.stack(moves, -1), None

    return lax.scan(step, f, length=100)[0]


def convolved(u):
    stencil = jnp.asarray([[0, 1, 0], [1, -4, 1], [0, 1, 0]], jnp.float32)[:, :, None, None]

    def step(u, _):
        flow = lax.conv_general_dilated(u, stencil, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        return u + 0.1 * flow + 0.05 * u * (1 - u), None

    return lax.scan(step, u, length=100)[0]


@pytest.mark.sweep(9)
@pytest.mark.parametrize("name", PROGRAMS)
def test_is_that_of_float32(name):
    fun, arg = PROGRAMS[name]
    want, *both = jax.jit(lambda x: [fun(x), *[amp.autocast(fun, low)(x) for low in EPSILON]])(arg)
    for low, got in zip(EPSILON, both, strict=True):
        assert error(got, want) < 2 * EPSILON[low], low


@pytest.mark.parametrize("low", EPSILON)
def test_a_gradient_through_a_simulation_is_that_of_float32(low):
    for simulate, start in (convolved, IMAGE), (lattice_boltzmann, SHARES * (1 + 0.1 * normal(8, 8, 1))):
        weights = jnp.cos(jnp.arange(float(start.size))).reshape(start.shape)

        def loss(start, simulate=simulate, weights=weights):
            return jnp.sum(simulate(start) * weights)

        want, got = jax.jit(lambda x, loss=loss: [jax.grad(f)(x) for f in (loss, amp.autocast(loss, low))])(start)
        assert error(got, want) < 2 * EPSILON[low], simulate


# Products of one matrix that belong together, as in `A @ P @ A.T`. They are not recognized across these edits.
TOGETHER = {"covariances by einsum", "the same without a loop", "a square root of one, unrolled"}
TOGETHER |= {"an inverse by products", "a matrix exponential by products", "a mean less what it is a mean of"}
BORDERS = {"selected", "clipped", "in a call", "in a cond"}


def with_edit(fun, edit):
    """Returns `fun` with an edit of the result of each product outside of loops."""

    def apply(eqn, operands):
        structure = jx.structure_of(eqn)
        if isinstance(structure, jx.Call) and structure.is_inline and structure.rule is None:
            return jx.evaluate(structure.jaxpr, [operands[i] for i in structure.operands], apply)
        outs = jx.apply_as_traced(eqn, operands)
        return list(map(edit, outs)) if eqn.primitive.name in PRODUCTS else outs

    return lambda x: jx.evaluate(jax.make_jaxpr(fun)(x), [x], apply)


PRODUCTS = {"dot_general", "conv_general_dilated"}


@pytest.mark.slow
@pytest.mark.parametrize("edit", EDITS)
def test_an_edit_that_changes_nothing_changes_no_decision(edit):
    def decisions(fun, arg):
        rows = amp.explain(fun, "bfloat16")(arg).select(direction="forward").rows
        return [(row.compute, row.why) for row in rows if row.primitive in PRODUCTS]

    for name, (fun, arg) in PROGRAMS.items():
        if edit not in BORDERS or name not in TOGETHER:
            assert decisions(with_edit(fun, EDITS[edit]), arg) == decisions(fun, arg), name


@pytest.mark.parametrize(
    "fun",
    [
        lambda x: jax.nn.one_hot(TOKENS[:512], 4).T @ jnp.tile(x, (128, 1))[:512],
        lambda x: (x @ W) @ W.T,
        lambda x: (x @ W) @ x.T,
    ],
)
def test_other_products_of_a_matrix_and_its_transpose_and_short_sums_are_low(fun):
    assert "float16 float16 -> float16" in dtypes(amp.autocast(fun), Y, primitive="dot_general")


def test_a_product_of_what_only_one_branch_counts_is_low():
    def fun(x):
        mask = lax.cond(x[0, 0] > 0, lambda: (x > 0).astype(jnp.float32), lambda: x)
        return mask @ mask.T

    assert dtypes(amp.autocast(fun), Y, primitive="dot_general") == ["float16 float16 -> float16"]


def local_energy(product, params, positions):
    """Of a trial wave function: its Laplacian, by forward over reverse."""

    def log_wave(x):
        h = x
        for w in params:
            h = jnp.tanh(product(h[None], w)[0])
        return jnp.sum(h) - jnp.sum(x**2) / 2

    def of_one(x):
        gradient = jax.grad(log_wave)
        laplacian = sum(jax.jvp(gradient, (x,), (e,))[1] @ e for e in jnp.eye(6))
        return (jnp.sum(x**2) - laplacian - jnp.sum(gradient(x) ** 2)) / 2

    return jnp.var(jax.vmap(of_one)(positions))


def crps(product, weights, inputs):
    """Of forecasts near 288 K by an ensemble."""
    forecast = product(inputs, weights)
    spread = jnp.abs(forecast[:, :, None] - forecast[:, None])
    return jnp.mean(jnp.abs(forecast - 288)) - jnp.mean(spread) / 2


@pytest.mark.slow
@pytest.mark.parametrize("low", EPSILON)
@pytest.mark.parametrize(
    ("loss_fn", "args"),
    [
        (local_energy, ([normal(6, 32) / 3, normal(32, 32) / 6, normal(32, 8) / 6], normal(64, 6))),
        (crps, (1 / 16 + 0.01 * normal(16, 8), 288 + 5 * normal(256, 16))),
    ],
)
def test_a_loss_that_magnifies_the_errors_of_a_network_is_as_good_as_with_casts_by_hand(loss_fn, args, low):
    def by_hand(a, b):
        return jnp.matmul(a.astype(low), b.astype(low)).astype(jnp.float32)

    def gradient(product, transform=lambda fun: fun):
        return ravel_pytree(jax.jit(jax.grad(transform(functools.partial(loss_fn, product))))(*args))[0]

    want = gradient(jnp.matmul)
    got = gradient(jnp.matmul, lambda fun: amp.autocast(fun, low))
    assert jnp.linalg.norm(got - want) < 1.5 * jnp.linalg.norm(gradient(by_hand) - want)


GATES = {
    "as it is": lambda z: z,
    "of the rest": lambda z: 1 - z,
    "of an exponential": lambda z: jnp.exp(-2.0 * z),
    "moved": lambda z: z[::-1],
}


@pytest.mark.parametrize("name", GATES)
def test_what_a_gate_is_made_of_is_float32_in_front_of_a_loop(name):
    def fun(x):
        z = jax.nn.sigmoid(x @ W - 4)
        return lax.scan(lambda h, z: (GATES[name](z) * h + z,) * 2, jnp.zeros(8), z)[1]

    assert dtypes(amp.autocast(fun), Y, primitive="logistic") == ["float32 -> float32"]

    def replaced(x):
        z = jax.nn.sigmoid(x @ W - 4)
        return lax.scan(
            lambda h, z: (jnp.tanh(GATES[name](z) @ W + h @ W),) * 2, jnp.zeros((2, 8)), z.reshape(3, 2, 8)
        )[1]

    assert dtypes(amp.autocast(replaced), Y, primitive="logistic") == ["float16 -> float16"]


@pytest.mark.parametrize("name", [name for name in PROGRAMS if "gates" in name])
def test_gates_are_float32_wherever_they_are_computed(name):
    fun, arg = PROGRAMS[name]
    assert set(dtypes(amp.autocast(fun), arg, primitive="logistic")) == {"float32 -> float32"}


def cost_of(x):
    """A sum of two products, which may cancel."""
    return x**2 @ W**2 - 2 * (x @ W)


def potential(cost):
    return jax.nn.logsumexp(-cost / 0.1, 1)


def loop_of(read):
    return lambda c: lax.scan(lambda f, _: (f + read(c), None), jnp.zeros(6), length=3)[0]


def with_rule(read):
    fun = jax.custom_vjp(read)
    fun.defvjp(lambda c: (read(c), c), lambda c, g: (c * g[:, None],))
    return fun


# Where the reader of a sum stands: beyond which border.
READERS = {
    "none": potential,
    "a constant of a scan": loop_of(potential),
    "slices of a scan": lambda c: lax.map(lambda row: potential(row[None])[0], c),
    "a constant of a fori_loop": lambda c: lax.fori_loop(0, 3, lambda _, f: f + potential(c), jnp.zeros(6)),
    "a loop in a loop": loop_of(loop_of(potential)),
    "a cond": lambda c: lax.cond(True, potential, lambda c: potential(2 * c), c),
    "a branch that reads nothing": lambda c: lax.cond(True, potential, lambda c: jnp.zeros(6), c),
    "a jit": jax.jit(potential),
    "a loop in a jit": jax.jit(loop_of(potential)),
    "a checkpoint": jax.checkpoint(potential),
    "a custom_vjp": with_rule(potential),
    "moved and scaled": lambda c: loop_of(potential)(0.5 * c[::-1]),
}
MAKERS = {
    "none": cost_of,
    "a jit": jax.jit(cost_of),
    "a checkpoint": jax.checkpoint(cost_of),
    "a map": lambda x: lax.map(lambda row: cost_of(row[None])[0], x),
    "a cond": lambda x: lax.cond(x[0, 0] > 9, cost_of, lambda x: cost_of(-x), x),
}


@pytest.mark.parametrize("low", EPSILON)
def test_a_sum_that_all_readers_read_in_float32_is_float32_beyond_borders(low):
    for made in MAKERS:
        for read in READERS if made == "none" else ("none", "a constant of a scan"):
            fun = amp.autocast(lambda x, made=made, read=read: READERS[read](MAKERS[made](x)), low)
            sums = [
                row(e) for e in equations(fun, Y) if e.primitive.name == "sub" and e.outvars[0].aval.shape[-1:] == (8,)
            ]
            assert sums[0] == "float32 float32 -> float32", (made, read)
            assert set(dtypes(fun, Y, primitive="dot_general")) == {f"{low} {low} -> {low}"}, (made, read)


def test_what_a_loop_stores_is_low_if_it_is_no_sum_or_a_reader_is_low():
    for fun in (
        lambda x: loop_of(potential)(x @ W),
        lambda x: loop_of(potential)(x @ W + 1.0),
        lambda x: loop_of(potential)(jnp.tanh(x @ W)),
        lambda x: loop_of(lambda c: jnp.sum(c @ W, 1))(x @ W - jnp.tanh(x @ W)),
    ):
        loop = next(e for e in equations(amp.autocast(fun), Y) if e.primitive.name == "scan")
        assert "float16" in {var.aval.dtype.name for var in loop.invars if var.aval.shape == (6, 8)}


def unread(h):
    """Reads `h` in vain, in ops, branches, loops and results of calls."""
    h.T.shape
    lax.cond(True, lambda: h.T, lambda: h.T)
    lax.while_loop(lambda c: c[0, 0] < 9, lambda c: c + 1, h)
    h, _ = jax.jit(lambda h: (h, h.T))(h)
    return lax.scan(lambda h, _: (h, h.T), h, length=3)[0]


def test_what_nothing_reads_does_not_count_as_a_reader():
    fun = amp.autocast(lambda x: jnp.sin(unread(30 * x @ W)))
    assert dtypes(fun, Y, primitive="dot_general") == ["float32 float32 -> float32"]
    fun = amp.autocast(lambda x: (lambda h: (jnp.sin(h), h.T))(30 * x @ W))
    assert dtypes(fun, Y, primitive="dot_general") == ["float16 float16 -> float16"]


# Cutoffs of potentials, whose coefficients cancel, in the ways that a polynomial is written.
CUTOFFS = {
    "a sum of powers": lambda u: 1 - 28 * u**6 + 48 * u**7 - 21 * u**8,
    "negative coefficients": lambda u: 1 + (-28 * u**6) + 48 * u**7 + (-21 * u**8),
    "nested": lambda u: 1 + u**6 * (-28 + u * (48 - 21 * u)),
    "polyval": lambda u: jnp.polyval(jnp.array([-21.0, 48, -28, 0, 0, 0, 0, 0, 1]), u),
    "a sum of a list": lambda u: sum([-28 * u**6, 48 * u**7, -21 * u**8], jnp.ones_like(u)),
    "of degree 5": lambda u: 1 - 6 * u**5 + 15 * u**4 - 10 * u**3,
    "of degree 10": lambda u: 1 - 45 * u**8 + 80 * u**9 - 36 * u**10,
}


@pytest.mark.parametrize("name", CUTOFFS)
def test_layers_with_a_polynomial_cutoff_and_their_derivatives_are_low(name):
    def fun(x, u):
        for _ in range(8):
            x = jnp.tanh(jnp.where(u < 1, CUTOFFS[name](u), 0.0) * x @ W)
        return jnp.sum(x)

    found = dtypes(amp.autocast(jax.value_and_grad(fun)), Y, jnp.ones((6, 1)), primitive="dot_general")
    assert set(found) == {"float16 float16 -> float16"}


GUARDS = {
    "clip": lambda x: jnp.clip(x, -1e6, 1e6),
    "minimum": lambda x: jnp.minimum(x, 1e9),
    "clamp": lambda x: lax.clamp(-1e6, x, 1e6),
    "maximum": lambda x: jnp.maximum(jnp.tanh(x), -1e9),
}


@pytest.mark.parametrize("name", GUARDS)
def test_a_large_bound_makes_no_product_float32(name):
    assert dtypes(amp.autocast(lambda x: GUARDS[name](x) @ W), Y, primitive="dot_general") == [
        "float16 float16 -> float16"
    ]


FRACTIONS = {
    "floor": lambda x: x - jnp.floor(x),
    "ceil": lambda x: jnp.ceil(x) - x,
    "round": lambda x: x - jnp.round(x),
    "lax.round": lambda x: x - lax.round(x),
    "mod": lambda x: x % 1.0,
}


@pytest.mark.parametrize("name", FRACTIONS)
def test_the_fraction_of_a_large_number_is_below_1(name):
    assert dtypes(amp.autocast(lambda x: FRACTIONS[name](1e6 * x) @ W), Y, primitive="dot_general") == [
        "float16 float16 -> float16"
    ]


@pytest.mark.parametrize(
    "grow",
    [
        lambda x: 100.0 * (100.0 * (100.0 * x)),
        lambda x: 300.0 * x - 300.0 * x[::-1] * 300.0,
        lambda x: jnp.where(x > 0, x, -1e9),
        lambda x: jnp.minimum(x, LARGE[:6]),
        lambda x: jnp.maximum(x, 1e6),
        lambda x: jnp.minimum(x, -1e6),
        lambda x: x.at[0].set(1e6),
        lambda x: 1e6 * x - jnp.floor(1e6 * x[::-1]),
        lambda x: 1e6 * x - jnp.floor(x),
    ],
)
def test_what_is_large_for_float16_is_float32_in_a_product(grow):
    for low, want in ("float16", "float32 float32 -> float32"), ("bfloat16", "bfloat16 bfloat16 -> bfloat16"):
        assert dtypes(amp.autocast(lambda x: grow(x) @ W, low), Y, primitive="dot_general") == [want]


LOSES_NOTHING = {
    "conditioning by a logarithm": lambda x: (x + jnp.log(jnp.exp(x[:, :1])) * W[0]) @ W,
    "attention scaled by the logarithm of its length": lambda x: (
        (x * jnp.log(jnp.arange(6.0) + 2)[:, None]) @ (x @ W).T
    ),
    "features that are logarithms": lambda x: jnp.tanh(jnp.log(jnp.abs(x) + 1e-6) @ W),
    "a modulus": lambda x: jnp.sqrt((x @ W) ** 2 + (x @ W.T) ** 2 + 1e-9),
    "a cost that a softmax reads": lambda x: jax.nn.softmax(-jnp.sum((x @ W) ** 2, -1) / 4 - 0.1 * jnp.sum(x**2, -1)),
    "a mask of a matrix to decompose": lambda x: jnp.linalg.slogdet(jax.nn.sigmoid(x @ W)[:, :6] + 9 * jnp.eye(6))[1],
    "a residual layer whose weight is a sum with an identity": lambda x: x @ (jnp.eye(8) + W[:, :4] @ W[:4]),
    "attention to constant neighbours": lambda x: (jnp.tanh(x @ W) @ x.T / 8 + np.tri(6, dtype=np.float32)) @ (x @ W),
    "a soft cap": lambda x: (lambda cap: cap * jnp.tanh((x @ W) / cap))(5.0),
    "factors of low rank": lambda x: (x @ W[:, :4]) @ W[:4],
    "a layer of an ODE": lambda x: lax.fori_loop(0, 9, lambda _, x: x + 0.1 * jnp.tanh(x @ W), x),
    "a layer with a mean": lambda x: lax.fori_loop(0, 9, lambda _, x: jnp.tanh(x @ W) + 0.1 * jnp.mean(x), x),
    "a small step": lambda x: x + 1e-9 * jnp.tanh(x @ W),
    "audio of 16 bits": lambda x: jnp.tanh(x / 2**15 @ W),
    "a modulation": lambda x: jnp.tanh((1 + x @ W) * x),
    "an activation": lambda x: jax.nn.hard_swish(x @ W),
}


@pytest.mark.parametrize("low", EPSILON)
@pytest.mark.parametrize("name", LOSES_NOTHING)
def test_a_product_is_low_where_that_loses_nothing(name, low):
    fun = LOSES_NOTHING[name]
    want, got = jax.jit(lambda x: [fun(x), amp.autocast(fun, low)(x)])(Y)
    assert error(got, want) < 4 * EPSILON[low]
    assert "float32" not in " ".join(dtypes(amp.autocast(fun, low), Y, primitive="dot_general"))


VOCABULARY = normal(8, 1000)
NOT_ROUTED = {
    "argmax": lambda x: jnp.argmax(x @ W, -1),
    "a draw": lambda x: jax.random.categorical(jax.random.key(0), x @ W),
    "sorted": lambda x: jnp.sort(x @ W),
    "the best of a vocabulary": lambda x: lax.top_k(jax.nn.softmax(jnp.tanh(x) @ VOCABULARY), 5)[1],
    "the best of a vocabulary, for one example": lambda x: lax.top_k(jnp.tanh(x[:1]) @ VOCABULARY, 5)[1],
    "what is in front of a router": lambda x: lax.top_k(jnp.tanh(x @ W) @ W[:, :0], 0)[1] + jnp.argmax(x @ W),
    "a region": lambda x: amp.precision("float16")(lambda x: lax.top_k(x @ W, 2)[1])(x),
}


@pytest.mark.parametrize("name", NOT_ROUTED)
def test_other_products_that_are_compared_are_low(name):
    assert dtypes(amp.autocast(NOT_ROUTED[name]), Y, primitive="dot_general")[0] == "float16 float16 -> float16"


@pytest.mark.parametrize(
    "route",
    [
        lambda x: lax.top_k(x @ W, 2),
        lambda x: lax.top_k(jax.nn.sigmoid(x @ W) + 0.1, 2),
        lambda x: jnp.argsort(-(x @ W), -1)[:, :2],
        lambda x: lax.approx_max_k(x @ W, 2),
        lambda x: lax.top_k(jax.vmap(lambda row: W.T @ row)(x), 2),
        lambda x: lax.top_k((x @ W).T, 2),
    ],
)
def test_a_router_is_float32(route):
    assert dtypes(amp.autocast(route), Y, primitive="dot_general") == ["float32 float32 -> float32"]


@pytest.mark.parametrize("n_keys", [1, 2])
def test_what_is_sorted_by_keys_is_low_and_its_keys_are_float32(n_keys):
    def fun(x):
        return lax.sort((x @ W, jnp.tanh(x) @ W, jnp.sin(x) @ W), num_keys=n_keys)

    found = dtypes(amp.autocast(fun), Y, primitive="dot_general")
    assert found == ["float32 float32 -> float32"] * n_keys + ["float16 float16 -> float16"] * (3 - n_keys)


DECAY = jnp.linspace(0.9, 1, 8)[:, None]
FACTORS = {
    "nothing": lambda x, s: x,
    "a number": lambda x, s: 0.99 * x,
    "an array": lambda x, s: DECAY * x,
    "a scalar of the iteration": lambda x, s: s[0, 0] * x,
    "an array of the iteration": lambda x, s: s * x,  # a gate, which lets it forget
}


@pytest.mark.parametrize("factor", FACTORS)
def test_a_recurrence_may_be_scaled_but_not_gated(factor):
    for body in (
        lambda x, s: FACTORS[factor](NEAR_ONE @ x, s),
        lambda x, s: NEAR_ONE @ FACTORS[factor](x, s),
        lambda x, s: s - FACTORS[factor](NEAR_ONE @ x, s),
    ):
        fun = amp.autocast(lambda xs, body=body: lax.scan(lambda x, s: (body(x, s), None), xs[0], xs)[0])
        found = dtypes(fun, jnp.ones((5, 8, 8)), primitive="dot_general")
        assert found == [f"{low} {low} -> {low}" for low in ["float16" if "array of" in factor else "float32"]]


@pytest.mark.parametrize("name", LOW_LOOPS)
def test_products_of_loops_that_forget_are_low_and_so_are_those_of_their_derivatives(name):
    fun = LOW_LOOPS[name]

    def loss(x):
        return jnp.sum(fun(x) ** 2)

    for program in (fun, jax.grad(loss), lambda x: jax.jvp(loss, (x,), (x,))):
        assert set(dtypes(amp.autocast(program), X, primitive="dot_general")) == {"float16 float16 -> float16"}


def test_a_factor_of_a_cotangent_is_stored_low():
    def loss(ws, x):
        return jnp.sum(lax.scan(lambda h, w: (h + jnp.tanh(h @ w), None), x, ws)[0] ** 2)

    forward, _ = (e for e in equations(amp.autocast(jax.grad(loss)), W[None], Y) if e.primitive.name == "scan")
    stacked = [var.aval.dtype.name for var in forward.outvars if var.aval.ndim == 3]
    assert stacked.count("float32") == 1  # the cotangent is a sum, but `1 - tanh(x)**2` is no gate of it
